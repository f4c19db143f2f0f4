"""The result of a solve on the root: SciPy's result, corrected if better points were found or it isn't finite.

SciPy's methods return their last point. If the objective isn't finite there, or was lower at a point that the line search
passed, that point is returned instead, without success. All ranks get the same.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import scipy

from mpiad.optimize.evaluated_points import Counts, Ending, Point, Points
from mpiad.optimize.history import History
from mpiad.optimize.packing import Packing

# Values with a smaller relative difference are equal up to rounding.
_ROUNDING = 4.0 * sys.float_info.epsilon


# SciPy's own status for it.
STOPPED = Ending(99, "`callback` raised `StopIteration`.")


def cut_short(ending: Ending, points: Points, iterations: int, at_best: bool = False) -> scipy.optimize.OptimizeResult:
    """Return the result of a method that was interrupted, at the last iterate or at the best point found."""
    point: Point = (points.best or points.iterate) if at_best else points.foremost  # type: ignore[assignment]
    result = scipy.optimize.OptimizeResult(
        x=point.x.copy(), fun=point.value, jac=_known(point.gradient, point.x), nit=iterations,
        nfev=points.counts.of_objective, njev=points.counts.of_gradient, success=False, status=ending.status,
        message=ending.message,
    )  # fmt: skip
    if points.counts["product"]:
        result.nhev = points.counts["product"]
    return result


def _known(gradient: np.ndarray | None, x: np.ndarray) -> np.ndarray:
    return np.full_like(x, np.nan) if gradient is None else gradient.copy()


def concluded(result: scipy.optimize.OptimizeResult, points: Points, constrained: bool) -> scipy.optimize.OptimizeResult:
    """Correct, in place, a result of SciPy's that isn't the best point found, or isn't finite.

    With constraints a successful method's point stays, since a lower one may violate them.
    """
    if points.maxfun is not None:  # SciPy also counts evaluations that the root took from its stored points
        result.nfev = min(result.nfev, points.counts.of_objective)
    best, value, gradient = points.best, float(result.fun), _gradient(result)
    if best is None:
        result.success = False
        result.message = "ABNORMAL: the objective was finite nowhere. Start where it is."
        result.status = result.status or 3
    elif not math.isfinite(value):
        _move(result, best, f"x is the best point that was met, since the objective is {value} where the method ended.")
    elif constrained and not result.success and points.lowers(np.asarray(result.x, dtype=float), value):
        _move(result, best, "x is the best point that was met: no other violates the constraints less at a lower value.")
    elif not constrained and value - best.value > _ROUNDING * abs(value):  # type: ignore[operator]
        converged = result.success and best.norm <= np.max(np.abs(gradient), initial=0.0)
        _move(result, best, f"x is the best point that was met, since the method ended higher, at {value}.", converged)
    elif result.success and not np.all(np.isfinite(gradient)):
        result.success, result.status = False, 3
        result.message = f"ABNORMAL: the gradient isn't finite at x. SciPy's message: {result.message}"
    return result


def _gradient(result: scipy.optimize.OptimizeResult) -> np.ndarray:
    # "trust-constr" calls the gradient grad, and the constraints' Jacobians jac.
    return np.asarray(result["grad"] if "grad" in result else result.get("jac", np.zeros(0)))


def _move(result: scipy.optimize.OptimizeResult, best: Point, reason: str, success: bool = False) -> None:
    result.x, result.fun = best.x.copy(), best.value
    result["grad" if "grad" in result else "jac"] = _known(best.gradient, best.x)
    if result.success and not success:
        result.success, result.status = False, 2
    result.message = f"{result.message} But {reason}"


def outcome_of(result: scipy.optimize.OptimizeResult, history: History, counts: Counts) -> dict[str, Any]:
    """Return the part of SciPy's result that the root sends to the other ranks."""
    outcome = dict(result)
    outcome["x"] = np.array(outcome["x"], dtype=float)
    outcome["history"] = history
    outcome["evaluations"] = dict(counts)
    return outcome


def finished(outcome: dict[str, Any], packing: Packing) -> scipy.optimize.OptimizeResult:
    """Return the result with variables and gradient in the form of x0."""
    result = scipy.optimize.OptimizeResult(outcome)
    result.x = packing.unpack(outcome["x"])
    for name in ("jac", "grad"):  # "trust-constr" calls the gradient grad, and the constraints' Jacobians jac
        gradient = outcome.get(name)
        if isinstance(gradient, np.ndarray) and gradient.shape == (packing.size,):
            result[name] = packing.unpack_gradient(gradient)
    return result
