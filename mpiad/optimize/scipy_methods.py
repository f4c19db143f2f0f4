"""The properties of SciPy's methods, their execution on the root, and corrections of their results.

SciPy's methods return their last point. If the objective isn't finite at that point, or was lower at an earlier point, the
best point is returned instead. With constraints, other rules apply (see `corrected`).
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy

from mpiad._typing import Function, Tree
from mpiad.optimize.checkpoint import CheckpointFile, RootCheckpoint, fingerprint, problem_of
from mpiad.optimize.constraints import Box, Constraint, as_list, box_of, constraint_of
from mpiad.optimize.evaluated_points import STOPPED, Ending, EndMethod, Point, Points
from mpiad.optimize.iterates import IteratesOfPoints
from mpiad.optimize.objective_evaluation import Program
from mpiad.optimize.root_driven import RootDriven


class MethodArguments(NamedTuple):
    """The root's arguments for the method, besides the objective and x0."""

    bounds: Sequence | scipy.optimize.Bounds | None
    constraints: Sequence | dict | scipy.optimize.LinearConstraint | scipy.optimize.NonlinearConstraint
    tol: float | None
    options: dict | None
    callback: Function | None
    checkpoint: CheckpointFile | None = None


def run_method(method: Method, arguments: MethodArguments, program: Program, x0: Tree, solve: RootDriven) -> dict[str, Any]:
    """Run a method on the root; return its result, corrected if necessary."""
    points, start = Points(solve.evaluation, solve.request, method.gradient_with_value), solve.packing.pack(x0)
    box, constraints = _bounds_and_constraints(method, arguments, solve)
    checks = [part.violation for part in (box, *constraints) if part is not None]
    points.violation = lambda x: max((check(x) for check in checks), default=0.0)
    points.maxfun, options = _evaluation_limit(method, dict(arguments.options or {}))
    problem = {"method": method.name, **problem_of(program, solve.packing, start, solve.channel.size)}
    problem["bounds (checksum)"] = None if box is None else fingerprint(*box)
    iterates = IteratesOfPoints(points, arguments.callback, solve, _root_checkpoint(arguments, problem, constraints, start))
    start = iterates.resume(start)
    if iterates.checkpoint.result is not None and points.is_still(iterates.record.last):
        return {**iterates.checkpoint.result, "history": iterates.record.history(), "evaluations": dict(points.counts)}
    if iterates.record.iterations and method.has_maxiter and options.get("maxiter") is not None:  # includes earlier runs
        options = {**options, "maxiter": max(options["maxiter"] - iterates.record.iterations, 0)}
    feasible = np.ravel(getattr(arguments.bounds, "keep_feasible", False))
    try:
        if points.exhausted:  # by earlier runs
            raise points.limit_reached()
        if iterates.record.iterations and method.has_maxiter and options.get("maxiter") == 0:  # SciPy makes one iteration
            iterates.value(start)
            points.gradient(start)
            done = f"STOP: all {iterates.record.iterations} iterations are done. Raise options['maxiter']"
            raise EndMethod(Ending(1, f"{done}, or accept x, the best point so far."))
        result = scipy.optimize.minimize(
            iterates.value,
            start,
            method=method.name,
            jac=points.gradient,
            hessp=points.product if method.products else None,
            bounds=None if box is None else scipy.optimize.Bounds(*box, feasible),  # type: ignore[arg-type]
            constraints=[constraint.for_scipy for constraint in constraints],
            tol=arguments.tol,
            options=options,
            callback=iterates,
        )
        if method.name == "trust-constr":  # SciPy calls the gradient `grad`, and the Jacobians of the constraints `jac`
            result.constr_jac = result.jac
        result = corrected(result, points, bool(constraints), method.no_step)
        if method.name == "trust-constr":
            result.grad = result.jac
            if box is not None and not constraints:
                _check_projected_gradient(result, box, options.get("gtol", arguments.tol) or _GTOL)
        if iterates.resumed:  # SciPy counts from the restart
            result.update(nit=iterates.record.iterations, nfev=points.count("value"), njev=points.count("gradient"))
    except StopIteration:  # from the callback, if SciPy's method doesn't catch it
        result = partial_result(STOPPED, points, iterates.record.iterations)
    except EndMethod as end:
        result = partial_result(end.ending, points, iterates.record.iterations, end.at_best)
    except ValueError as error:  # some of SciPy's methods raise for NaN and infinities in their matrices
        if iterates.in_callback or all(point.finite for point in points.recent):
            raise
        text = f"ABNORMAL: the objective or its gradient isn't finite at a trial point, at which SciPy raised {error!r}."
        result = partial_result(Ending(3, text), points, iterates.record.iterations, at_best=True)
    if not result.success and points.first is not None and not points.first.finite:
        result.message += solve.request("not_finite", points.first.x)
    iterates.checkpoint.write_if_due(iterates.record, points.last_or_best, points.counts, result)
    result.x, evaluations = np.array(result.x, dtype=float), dict(points.counts)
    return {**result, "history": iterates.record.history(), "evaluations": evaluations}


def _bounds_and_constraints(
    method: Method, arguments: MethodArguments, solve: RootDriven
) -> tuple[Box | None, list[Constraint]]:
    """Return them as functions of the vector of variables; raise a ValueError if the method doesn't support them."""
    if arguments.bounds is not None and not method.bounded:
        supported = "'L-BFGS', 'TNC', 'SLSQP' or 'trust-constr'"
        raise ValueError(f"minimize: method {method.name!r} doesn't support bounds. Use {supported}.")
    box, constraints = box_of(arguments.bounds, solve.packing), as_list(arguments.constraints)
    if constraints and not method.constrained:
        raise ValueError(f"minimize: method {method.name!r} doesn't support constraints. Use 'SLSQP' or 'trust-constr'.")
    return box, [constraint_of(each, solve.packing, solve.channel) for each in constraints]


def _root_checkpoint(
    arguments: MethodArguments, problem: dict[str, object], constraints: list[Constraint], x0: np.ndarray
) -> RootCheckpoint:
    """Return the checkpoint of a solve, whose result depends on the problem, the options, `tol` and the constraints."""
    checksums = []
    for constraint in constraints if arguments.checkpoint is not None else ():
        # The matrix of a linear constraint may be large and sparse; it is multiplied by a vector without zeros.
        linear = isinstance(constraint.for_scipy, scipy.optimize.LinearConstraint)
        values = constraint.values(np.cos(np.arange(x0.size)) if linear else x0)
        checksums.append(fingerprint(*(np.asarray(part, float) for part in (constraint.low, constraint.high, values))))
    options = {**(arguments.options or {}), "tol": arguments.tol, "constraints (checksum)": checksums}
    return RootCheckpoint(arguments.checkpoint, problem, options, "minimize")


def _evaluation_limit(method: Method, options: dict) -> tuple[float | None, dict]:
    """Return the maximum number of evaluations, and the options for SciPy."""
    if options.get("maxfun") is None:
        return None, options
    maxfun = options["maxfun"]
    if not isinstance(maxfun, (int, float, np.integer)) or not 0 <= maxfun or (maxfun % 1 and maxfun != math.inf):
        raise ValueError(f"minimize: option maxfun must be an integer of at least 0, but got {maxfun!r}.")
    # SciPy checks this option only between line searches, so `Points` checks it at each evaluation.
    return float(maxfun), options if method.has_maxfun else {k: v for k, v in options.items() if k != "maxfun"}


_SHARDED = "L-BFGS-sharded", "Newton-CG-sharded", "MMA-sharded"


class Method(NamedTuple):
    """Properties of one of SciPy's methods."""

    name: str  # SciPy's name
    gradient_with_value: bool  # whether its line search always needs the gradient together with the value
    products: bool  # whether it uses Hessian products
    has_maxfun: bool = False  # whether it has the option `maxfun`
    has_maxiter: bool = True  # whether it has the option `maxiter`
    bounded: bool = False  # whether it supports bounds
    constrained: bool = False  # whether it supports constraints
    no_step: int = 2  # its status if the line search finds no lower value


_METHODS = {
    "l-bfgs": Method("L-BFGS-B", True, False, True, bounded=True),
    "l-bfgs-b": Method("L-BFGS-B", True, False, True, bounded=True),
    "bfgs": Method("BFGS", True, False),
    "cg": Method("CG", True, False),
    "tnc": Method("TNC", True, False, True, has_maxiter=False, bounded=True, no_step=4),
    "slsqp": Method("SLSQP", False, False, bounded=True, constrained=True, no_step=8),
    "newton-cg": Method("Newton-CG", False, True),
    "trust-ncg": Method("trust-ncg", False, True),
    "trust-krylov": Method("trust-krylov", False, True),
    "trust-constr": Method("trust-constr", False, True, bounded=True, constrained=True),
}


def method_named(name: object) -> Method | None:
    """Return SciPy's method with this name, in any case, None for a sharded one; raise a ValueError if there is none."""
    lower = name.lower() if isinstance(name, str) else ""
    if lower not in (*_METHODS, *map(str.lower, _SHARDED)):
        names = ", ".join(repr(method.name) for key, method in _METHODS.items() if key != "l-bfgs")
        sharded = ", ".join(map(repr, _SHARDED))
        raise ValueError(f"minimize: method must be 'L-BFGS', {sharded} or one of {names}, but got {name!r}.")
    return _METHODS.get(lower)


_NO_STEP = (
    "No step from x lowers the objective. If the gradient at x is almost zero, x is a minimum up to rounding errors. "
    "Otherwise the objective may have jumps or noise (as sorting, rounding and random numbers have), or its gradient is "
    "inconsistent: call mpiad.testing.check_grads at x."
)
_GTOL = 1e-8  # SciPy's default for "trust-constr"


def _check_projected_gradient(result: scipy.optimize.OptimizeResult, box: Box, gtol: float) -> None:
    """Correct a result of "trust-constr" in place: with `keep_feasible` no variable leaves a bound at which it starts."""
    # Variables between their bounds are as accurate as the barrier that the method follows.
    steps = np.abs(box.projected_step(result.x, result.jac))[~box.inside(result.x, slice(None))]
    if result.success and np.max(steps, initial=0.0) > gtol**0.5:
        result.success, result.status = False, 3
        result.message = (
            "ABNORMAL: x isn't a minimum, since the largest entry of the projected gradient of variables at bounds is "
            f"{np.max(steps):.1e}. Pass an x0 inside of the bounds, or use 'L-BFGS'. SciPy's message: {result.message}"
        )


# Values with at most this relative difference are treated as equal.
_ROUNDING = 4.0 * sys.float_info.epsilon


def partial_result(ending: Ending, points: Points, iterations: int, at_best: bool = False) -> scipy.optimize.OptimizeResult:
    """Return the result of a method that ended early."""
    point: Point = (points.best or points.iterate) if at_best else points.last_or_best  # type: ignore[assignment]
    result = scipy.optimize.OptimizeResult(x=point.x.copy(), fun=point.value, jac=_gradient_at(point.x, points))
    result.update(nit=iterations, nfev=points.count("value"), njev=points.count("gradient"))
    result.update(success=False, status=ending.status, message=ending.message)
    if points.counts["product"]:
        result.nhev = points.counts["product"]
    return result


def _gradient_at(x: np.ndarray, points: Points) -> np.ndarray:
    """Return the gradient at x, evaluated if the limits allow it, otherwise NaN."""
    point = points.at(np.ascontiguousarray(x, dtype=float))
    if point.gradient is None:
        with contextlib.suppress(EndMethod):
            points.gradient(point.x)
    return np.full_like(point.x, np.nan) if point.gradient is None else point.gradient.copy()


def corrected(
    result: scipy.optimize.OptimizeResult, points: Points, constrained: bool, no_step: int
) -> scipy.optimize.OptimizeResult:
    """Correct a result in place if values aren't finite or an earlier point is better, which may violate constraints."""
    # `no_step`: SciPy's status if the line search has failed.
    advice = f" {_NO_STEP}" if not result.success and result.status == no_step else ""
    if points.maxfun is not None:  # SciPy also counts evaluations at points that were stored
        result.nfev = min(result.nfev, points.count("value"))
    # SciPy's `fun` may be a substitute, and L-BFGS-B's x isn't the point of its `fun` if a line search fails.
    gradient = _gradient_at(result.x, points)
    best, value = points.best, points.at(np.ascontiguousarray(result.x, dtype=float)).value
    result.fun = value
    if best is None:
        result.success = False
        result.message = "ABNORMAL: the objective wasn't finite at any point. Choose an x0 at which it is finite."
        result.status = result.status or 3
    elif value is None or not math.isfinite(value):
        known = "not known" if value is None else value
        _set_x(result, best, points, f"x is the best point found, since the objective is {known} at the last point.")
    elif constrained and not result.success and points.best_improves_on(np.asarray(result.x, dtype=float), value):
        reason = "x is the point with the least violation of constraints, and the lowest value of such points."
        _set_x(result, best, points, reason)
    elif not constrained and value - best.value > _ROUNDING * abs(value):  # type: ignore[operator]
        converged = result.success and best.norm <= np.max(np.abs(gradient), initial=0.0)
        reason = f"x is the best point found, since the last one has a higher value, {value}."
        _set_x(result, best, points, reason, converged)
    elif result.success and not np.all(np.isfinite(gradient)):
        result.success, result.status = False, 3
        result.message = f"ABNORMAL: the gradient isn't finite at x. SciPy's message: {result.message}"
    result.jac, result.message = _gradient_at(result.x, points), f"{result.message.strip()}{advice}"
    return result


# Results of "trust-constr" and "SLSQP" at the last point, which describe no other point.
_OF_LAST_POINT = {"constr", "constr_jac", "lagrangian_grad", "multipliers", "optimality", "v"}


def _set_x(result: scipy.optimize.OptimizeResult, best: Point, points: Points, reason: str, success: bool = False) -> None:
    result.x, result.fun = best.x.copy(), best.value
    for name in _OF_LAST_POINT & result.keys():
        del result[name]
    if "constr_violation" in result:
        result.constr_violation = points.violation(best.x)
    if result.success and not success:
        result.success, result.status = False, 2
    result.message = f"{result.message} But {reason}"
