"""The next trial step between or beyond two points of a line, from their values and slopes.

References
----------
.. [1] J. J. Moré and D. J. Thuente, "Line search algorithms with guaranteed sufficient decrease", ACM Trans. Math.
   Software 20 (1994), section 4: cases 1 to 4.
"""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["End", "next_step"]

# How far towards the other end of the interval a step may go that the cubic wants beyond the trial point.
_SAFEGUARD = 0.66


class End(NamedTuple):
    """A point of the line.

    Attributes
    ----------
    step : float
    value : float
    slope : float
    """

    step: float
    value: float
    slope: float


def next_step(best: End, other: End, trial: End, bracketed: bool, lowest: float, highest: float) -> float:
    """Return the step to try after `trial`, where `best` has the lowest value so far.

    Parameters
    ----------
    best, other, trial : End
        `other` is the far end of the interval where a minimiser is bracketed.
    bracketed : bool
    lowest, highest : float
        How far a step may go that is not bracketed.
    """
    if trial.value > best.value:
        return _after_rise(best, trial)
    if trial.slope * best.slope < 0.0:
        cubic, secant = _cubic(trial, best), _secant(best, trial)
        return max(cubic, secant, key=lambda step: abs(step - trial.step))
    if abs(trial.slope) < abs(best.slope):
        return _after_flattening(best, other, trial, bracketed, lowest, highest)
    if bracketed:
        return _cubic(trial, other)
    return highest if trial.step > best.step else lowest


def _after_rise(best: End, trial: End) -> float:
    width = trial.step - best.step
    descent = (best.value - trial.value) / width + best.slope
    quadratic = best.step + best.slope / descent / 2.0 * width
    cubic = _cubic(best, trial)
    if abs(cubic - best.step) < abs(quadratic - best.step):
        return cubic
    return cubic + (quadratic - cubic) / 2.0


def _after_flattening(best: End, other: End, trial: End, bracketed: bool, lowest: float, highest: float) -> float:
    secant = _secant(best, trial)
    cubic = _cubic_beyond(best, trial)
    if cubic is None:
        cubic = highest if trial.step > best.step else lowest
    if not bracketed:
        return min(max(max(cubic, secant, key=lambda s: abs(s - trial.step)), lowest), highest)
    step = min(cubic, secant, key=lambda s: abs(s - trial.step))
    limit = trial.step + _SAFEGUARD * (other.step - trial.step)
    return min(step, limit) if trial.step > best.step else max(step, limit)


def _secant(a: End, b: End) -> float:
    return b.step + b.slope / (b.slope - a.slope) * (a.step - b.step)


def _cubic(a: End, b: End) -> float:
    """Return the minimiser of the cubic through both values and slopes, reckoned from a."""
    theta, root = _cubic_terms(a, b)
    # The sign makes it the minimiser, whichever side of a it lies on.
    root = root if b.step > a.step else -root
    return a.step + (root - a.slope + theta) / (root - a.slope + root + b.slope) * (b.step - a.step)


def _cubic_beyond(best: End, trial: End) -> float | None:
    """Return the cubic's minimiser where it lies beyond `trial`, or None."""
    theta, root = _cubic_terms(best, trial)
    root = -root if trial.step > best.step else root
    share = (root - trial.slope + theta) / (root + (best.slope - trial.slope) + root) if root else 0.0
    return trial.step + share * (best.step - trial.step) if share < 0.0 else None


def _cubic_terms(a: End, b: End) -> tuple[float, float]:
    theta = 3.0 * (a.value - b.value) / (b.step - a.step) + a.slope + b.slope
    scale = max(abs(theta), abs(a.slope), abs(b.slope))  # squares of slopes may overflow
    return theta, scale * math.sqrt(max(0.0, (theta / scale) ** 2 - (a.slope / scale) * (b.slope / scale)))
