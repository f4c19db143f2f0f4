"""SciPy's methods on the root, with the objective of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy  # loads its parts at their first use: to load them here would double the time of importing mpiad

from mpiad._typing import Function
from mpiad.optimize.box_constraints import Box, box_of
from mpiad.optimize.checkpoint import problem_of
from mpiad.optimize.conclusion import broken_off, concluded, interrupted, limited, outcome_of, spent, stopped
from mpiad.optimize.constraints import ConstraintSet, constraints_of
from mpiad.optimize.evaluated_points import Interrupted, LimitReached, Points
from mpiad.optimize.iterates import IteratesOfPoints
from mpiad.optimize.methods import Method
from mpiad.optimize.objective_evaluation import Program
from mpiad.optimize.root_checkpoint import RootCheckpoint
from mpiad.optimize.root_driven import Leader

__all__ = ["Wishes", "drive"]


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
            raise LimitReached("earlier runs have made all evaluations")
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
        result = stopped(points, iterates.count)
    except IterationsDone:
        result = spent(points, iterates.count)
    except LimitReached:
        result = limited(points, iterates.count)
    except Interrupted:
        result = interrupted(points, iterates.count)
    except ValueError as error:  # as some of SciPy's methods refuse NaN and infinities in their matrices
        if iterates.told or not points.broken:
            raise
        result = broken_off(error, points, iterates.count)
    iterates.keep(ended=True)
    return outcome_of(result, iterates.record.history(), points.counts)


class IterationsDone(Exception):
    """Leave a solve of which earlier runs have made all iterations."""


def _run_out(value: Callable, start: np.ndarray, jac: Callable, **others: Any) -> Any:
    """Evaluate where an earlier run has ended, in place of SciPy's `minimize`."""
    value(start.copy())
    jac(start.copy())
    raise IterationsDone


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
