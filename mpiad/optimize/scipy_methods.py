"""SciPy's methods: their properties, and how the root runs them with the objective of all ranks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import autograd.numpy as anp
import numpy as np
import scipy

from mpiad._typing import Function
from mpiad.device import to_host
from mpiad.differentiation import make_vjp
from mpiad.optimize.box_constraints import Box, box_of
from mpiad.optimize.checkpoint import RootCheckpoint, problem_of
from mpiad.optimize.conclusion import STOPPED, concluded, cut_short, outcome_of
from mpiad.optimize.evaluated_points import Ending, Left, Points
from mpiad.optimize.iterates import IteratesOfPoints
from mpiad.optimize.objective_evaluation import Program
from mpiad.optimize.packing import Packing
from mpiad.optimize.root_driven import Leader
from mpiad.transport import Channel

# Constraints of a method that the root drives: functions of the pytree of variables, evaluated on the root only.
#
# The other ranks wait meanwhile, so a constraint that tries to communicate raises. Data of other ranks for a constraint
# must be gathered before the solve.


_REMEMBERED = 4
# Smaller violations are rounding.
_NOTHING = 1e-8
_WHO = "constraints are evaluated on the root alone, and the other ranks take no part"


class _Function:
    """A constraint's function of the vector of variables, with its Jacobian."""

    def __init__(self, fun: Callable, jac: Function | None, args: tuple, packing: Packing, used: Channel):
        self._fun, self._args, self._packing, self._used = fun, args, packing, used
        self._given = jac if callable(jac) else None
        self._known: deque[tuple[bytes, np.ndarray]] = deque(maxlen=_REMEMBERED)
        # '3-point' and 'cs' are requests of the user; '2-point' is also SciPy's default.
        self.jacobian = jac if isinstance(jac, str) and jac != "2-point" else self._jacobian

    def value(self, vector: np.ndarray) -> np.ndarray:
        """Return the constraint's values, shape (k,)."""
        key = np.asarray(vector, dtype=float).tobytes()
        for known, value in self._known:
            if known == key:
                return value.copy()
        with self._used.refusing(_WHO):
            found = to_host(self._fun(self._packing.unpack(vector), *self._args))
        # A copy, as below: it is stored, and SciPy stores a Jacobian, while the user may write into the same array.
        value = np.array(found, dtype=float).reshape(-1)
        self._known.append((key, value))
        return value.copy()

    def _jacobian(self, vector: np.ndarray) -> np.ndarray:
        x = self._packing.unpack(vector)
        with self._used.refusing(_WHO):
            if self._given is not None:
                return np.atleast_2d(np.array(to_host(self._given(x, *self._args)), dtype=float))
            # One row per unit vector: a constraint has few values, and many variables.
            pull, value = make_vjp(lambda x: anp.reshape(anp.array(to_host(self._fun(x, *self._args))), (-1,)))(x)
            rows = [self._packing.pack_gradient(pull(unit)) for unit in np.eye(value.size)]
        return np.array(rows).reshape(value.size, self._packing.size)


class ConstraintSet:
    """The constraints in SciPy's form, and the violation at a point."""

    def __init__(self) -> None:
        self.for_scipy: list[Any] = []
        self._checks: list[tuple[Callable[[np.ndarray], np.ndarray], Any, Any]] = []

    def add(self, constraint: object, fun: Callable[[np.ndarray], np.ndarray], low: object, high: object) -> None:
        """Append a constraint, whose function must lie between `low` and `high`."""
        self.for_scipy.append(constraint)
        self._checks.append((fun, low, high))

    def excess(self, vector: np.ndarray) -> float:
        """Return the largest violation; 0 if it is only rounding."""
        worst = 0.0
        for fun, low, high in self._checks:
            value = fun(vector)
            gaps = np.maximum(np.asarray(low) - value, value - np.asarray(high))
            worst = max(worst, float(np.max(gaps, initial=0.0))) if not np.any(np.isnan(gaps)) else np.inf
        return worst if worst > _NOTHING else 0.0


def constraints_of(given: Any, packing: Packing, used: Channel) -> ConstraintSet:
    """Return the root's constraints as functions of the vector of variables; raise if one isn't of a type of SciPy's."""
    found = ConstraintSet()
    for constraint in given if isinstance(given, (list, tuple)) else [given]:
        if isinstance(constraint, dict):
            _add_dict(found, constraint, packing, used)
        elif isinstance(constraint, scipy.optimize.NonlinearConstraint):
            _add_nonlinear(found, constraint, packing, used)
        elif isinstance(constraint, scipy.optimize.LinearConstraint):
            found.add(constraint, lambda x, matrix=constraint.A: np.asarray(matrix @ x), constraint.lb, constraint.ub)
        else:
            raise TypeError(
                f"minimize: a constraint must be a dict, LinearConstraint or NonlinearConstraint, but got "
                f"{type(constraint).__name__} {constraint!r:.60}."
            )
    return found


def _add_dict(found: ConstraintSet, given: dict, packing: Packing, used: Channel) -> None:
    kind, fun, args = given.get("type"), given.get("fun"), given.get("args", ())
    if not isinstance(kind, str) or kind.lower() not in ("eq", "ineq") or not callable(fun):
        raise ValueError(
            f"minimize: a constraint's dict must have a type, 'eq' or 'ineq', and a function fun, but got {given!r:.80}."
        )
    made = _Function(fun, given.get("jac"), args if isinstance(args, tuple) else (args,), packing, used)
    high = 0.0 if kind.lower() == "eq" else np.inf
    found.add({"type": kind, "fun": made.value, "jac": made.jacobian}, made.value, 0.0, high)


def _add_nonlinear(
    found: ConstraintSet, given: scipy.optimize.NonlinearConstraint, packing: Packing, used: Channel
) -> None:
    made = _Function(given.fun, given.jac, (), packing, used)
    hess = given.hess
    if callable(hess) and not isinstance(hess, scipy.optimize.HessianUpdateStrategy):

        def hess(vector: np.ndarray, weights: np.ndarray) -> Any:
            with used.refusing(_WHO):
                return given.hess(packing.unpack(vector), weights)

    constraint = scipy.optimize.NonlinearConstraint(
        made.value, given.lb, given.ub, jac=made.jacobian, hess=hess, keep_feasible=given.keep_feasible,
        finite_diff_rel_step=given.finite_diff_rel_step, finite_diff_jac_sparsity=given.finite_diff_jac_sparsity,
    )  # fmt: skip
    found.add(constraint, made.value, given.lb, given.ub)


class Wishes(NamedTuple):
    """The root's further arguments for the method."""

    bounds: Any
    constraints: Any
    tol: float | None
    options: dict | None
    callback: Function | None
    checkpoint: Any = None


def drive(method: Method, wishes: Wishes, program: Program, leader: Leader) -> dict[str, Any]:
    """Run a method on the root; return its result, corrected if necessary."""
    points = Points(leader.evaluation, leader.instructions, method.together)
    if wishes.bounds is not None and not method.bounded:
        others = "'L-BFGS', 'TNC', 'SLSQP' and 'trust-constr'"
        raise ValueError(f"minimize: method {method.name!r} takes no bounds; {others} do.")
    start = leader.packing.pack(leader.start)
    box = box_of(wishes.bounds, start.size)
    constraints = _constraints(method, wishes.constraints, leader)
    points.excess = _excess(box, constraints)
    points.maxfun, options = _limited(method, dict(wishes.options or {}))
    problem = {"method": method.name, **problem_of(program, leader.packing, start, leader.used.size)}
    problem["bounds (checksum)"] = None if box is None else box.fingerprint
    keeper = RootCheckpoint(wishes.checkpoint, problem)
    iterates = IteratesOfPoints(points, wishes.callback, leader, keeper)
    start = iterates.resume(start)
    options = _remaining(options, iterates.done)
    run = _run_out if iterates.done and options.get("maxiter") == 0 else scipy.optimize.minimize
    try:
        if iterates.spent:
            raise points.limit_reached()
        result = run(
            iterates.value,
            start,
            method=method.name,
            jac=points.gradient,
            hessp=points.product if method.products else None,
            bounds=_flat_bounds(wishes.bounds),
            constraints=() if constraints is None else constraints.for_scipy,
            tol=wishes.tol,
            options=options,
            callback=iterates,
        )
        result.fun = points.value_found(result.x, result.fun)
        result = iterates.counted(concluded(result, points, constrained=constraints is not None))
    except StopIteration:  # which some of SciPy's methods don't catch
        result = cut_short(STOPPED, points, iterates.count)
    except Left as left:
        result = cut_short(left.ending, points, iterates.count, left.at_best)
    except ValueError as error:  # some of SciPy's methods reject NaN and infinities in their matrices
        if iterates.told or not points.broken:
            raise
        said = f"ABNORMAL: the objective or its gradient isn't finite where the method has come, which raised {error!r}."
        result = cut_short(Ending(3, said), points, iterates.count, at_best=True)
    if not result.success:
        result.message += points.not_finite_at_start()
    iterates.keep(ended=True)
    return outcome_of(result, iterates.record.history(), points.counts)


def _run_out(value: Callable, start: np.ndarray, jac: Callable, callback: IteratesOfPoints, **others: Any) -> Any:
    """Replace SciPy's `minimize` if an earlier run has made the last iteration: only evaluate at the start."""
    value(start.copy())
    jac(start.copy())
    said = f"STOP: all {callback.count} iterations are done. Raise options['maxiter'], or accept x, the best point so far."
    raise Left(Ending(1, said))


def _constraints(method: Method, given: object, leader: Leader) -> ConstraintSet | None:
    if given is None or (isinstance(given, (list, tuple)) and not given):
        return None
    if not method.constrained:
        raise ValueError(f"minimize: method {method.name!r} takes no constraints; 'SLSQP' and 'trust-constr' do.")
    return constraints_of(given, leader.packing, leader.used)


def _excess(box: Box | None, constraints: ConstraintSet | None) -> Callable[[np.ndarray], float] | None:
    checks = [each.excess for each in (box, constraints) if each is not None]
    return (lambda x: max(check(x) for check in checks)) if checks else None


def _limited(method: Method, options: dict) -> tuple[float | None, dict]:
    """Return the maximum number of evaluations, and the options for SciPy."""
    if options.get("maxfun") is None:
        return None, options
    maxfun = options["maxfun"]
    if not isinstance(maxfun, (int, float, np.integer)) or not 0 <= maxfun or (maxfun % 1 and maxfun != math.inf):
        raise ValueError(f"minimize: option maxfun must be an integer of at least 0, but got {maxfun!r}.")
    # SciPy's own methods with this option check it only between two line searches.
    return float(maxfun), options if method.knows_maxfun else {k: v for k, v in options.items() if k != "maxfun"}


def _remaining(options: dict, done: int) -> dict:
    """Return the options for the remaining iterations after an earlier run."""
    if not done or options.get("maxiter") is None:
        return options
    return {**options, "maxiter": max(options["maxiter"] - done, 0)}


def _flat_bounds(bounds: Any) -> Any:
    if not isinstance(bounds, scipy.optimize.Bounds):
        return bounds
    low, high = (np.ravel(np.asarray(limit)) for limit in (bounds.lb, bounds.ub))
    return scipy.optimize.Bounds(low, high, np.ravel(bounds.keep_feasible))  # type: ignore[arg-type]


_SHARDED = "L-BFGS-sharded", "Newton-CG-sharded"


class Method(NamedTuple):
    """Properties of a method of SciPy."""

    name: str  # SciPy's name
    together: bool  # whether its line search always needs the gradient together with the value
    products: bool  # whether it uses Hessian products
    knows_maxfun: bool = False  # whether it has an option of this name
    bounded: bool = False  # whether it takes bounds
    constrained: bool = False  # whether it takes constraints


_METHODS = {
    "l-bfgs": Method("L-BFGS-B", True, False, True, bounded=True),
    "l-bfgs-b": Method("L-BFGS-B", True, False, True, bounded=True),
    "bfgs": Method("BFGS", True, False),
    "cg": Method("CG", True, False),
    "tnc": Method("TNC", True, False, True, bounded=True),
    "slsqp": Method("SLSQP", False, False, bounded=True, constrained=True),
    "newton-cg": Method("Newton-CG", False, True),
    "trust-ncg": Method("trust-ncg", False, True),
    "trust-krylov": Method("trust-krylov", False, True),
    "trust-constr": Method("trust-constr", False, True, bounded=True, constrained=True),
}


def method_named(name: object) -> Method:
    """Return the method with this name, in any case; a ValueError if there is none."""
    found = _METHODS.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        names = ", ".join(repr(method.name) for key, method in _METHODS.items() if key != "l-bfgs")
        sharded = ", ".join(map(repr, _SHARDED))
        raise ValueError(f"minimize: method must be 'L-BFGS', {sharded} or one of {names}, but got {name!r}.")
    return found


def is_sharded(name: object) -> bool:
    """Return whether a method leaves the variables on their ranks, as SciPy's don't; a ValueError if it doesn't exist."""
    if isinstance(name, str) and name.lower() in map(str.lower, _SHARDED):
        return True
    method_named(name)
    return False
