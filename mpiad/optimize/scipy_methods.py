"""SciPy's methods: what must be known of each, and how the root runs them, with the objective of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy  # loads its parts at their first use: to load them here would double the time of importing mpiad

from mpiad._typing import Function
from mpiad.optimize.box_constraints import Box, box_of
from mpiad.optimize.checkpoint import RootCheckpoint, problem_of
from mpiad.optimize.conclusion import STOPPED, concluded, cut_short, outcome_of
from mpiad.optimize.constraints import ConstraintSet, constraints_of
from mpiad.optimize.evaluated_points import Ending, Left, Points
from mpiad.optimize.iterates import IteratesOfPoints
from mpiad.optimize.objective_evaluation import Program
from mpiad.optimize.root_driven import Leader


class Wishes(NamedTuple):
    """What else the root was given for the method."""

    bounds: Any
    constraints: Any
    tol: float | None
    options: dict | None
    callback: Function | None
    checkpoint: Any = None


def drive(method: Method, wishes: Wishes, program: Program, leader: Leader) -> dict[str, Any]:
    """Run a method on the root; return its result, corrected where it must be."""
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
    except StopIteration:  # which some of SciPy's methods let pass
        result = cut_short(STOPPED, points, iterates.count)
    except Left as left:
        result = cut_short(left.ending, points, iterates.count, left.at_best)
    except ValueError as error:  # as some of SciPy's methods refuse NaN and infinities in their matrices
        if iterates.told or not points.broken:
            raise
        said = f"ABNORMAL: the objective or its gradient isn't finite where the method has come, which raised {error!r}."
        result = cut_short(Ending(3, said), points, iterates.count, at_best=True)
    if not result.success:
        result.message += points.not_finite_at_start()
    iterates.keep(ended=True)
    return outcome_of(result, iterates.record.history(), points.counts)


def _run_out(value: Callable, start: np.ndarray, jac: Callable, callback: IteratesOfPoints, **others: Any) -> Any:
    """Evaluate where an earlier run has made the last iteration, in place of SciPy's `minimize`."""
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
    """Return the most evaluations that are allowed, and the options that SciPy gets."""
    if options.get("maxfun") is None:
        return None, options
    maxfun = options["maxfun"]
    if not isinstance(maxfun, (int, float, np.integer)) or not 0 <= maxfun or (maxfun % 1 and maxfun != math.inf):
        raise ValueError(f"minimize: option maxfun must be an integer of at least 0, but got {maxfun!r}.")
    # SciPy's own methods, where they have this option, look at it between two line searches only.
    return float(maxfun), options if method.knows_maxfun else {k: v for k, v in options.items() if k != "maxfun"}


def _remaining(options: dict, done: int) -> dict:
    """Return the options for what an earlier run has left of its iterations."""
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
    """What must be known of a method of SciPy."""

    name: str  # SciPy's name
    together: bool  # whether its line search wants the gradient at every point at which it wants the value
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
    """Return the method of a name, in any case; a ValueError where there is none."""
    found = _METHODS.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        names = ", ".join(repr(method.name) for key, method in _METHODS.items() if key != "l-bfgs")
        sharded = ", ".join(map(repr, _SHARDED))
        raise ValueError(f"minimize: method must be 'L-BFGS', {sharded} or one of {names}, but got {name!r}.")
    return found


def is_sharded(name: object) -> bool:
    """Return whether a method leaves the variables on their ranks: none of SciPy's; a ValueError where there is none."""
    if isinstance(name, str) and name.lower() in map(str.lower, _SHARDED):
        return True
    method_named(name)
    return False
