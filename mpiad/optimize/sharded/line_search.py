"""A strong Wolfe line search on plain numbers: every rank runs it on the same ones.

It works as Moré and Thuente's: an interval that brackets a minimiser shrinks by safeguarded cubic steps, at first for
the function minus its linear decrease, which has a minimiser where the conditions hold. Two things are added. Where a
trial isn't finite, the search backs away towards the best step and never goes that far again. Where values differ by no
more than rounding, slopes alone decide (Hager and Zhang's approximate conditions), so that a gradient can be brought
below the square root of the precision.

References
----------
.. [1] J. J. Moré and D. J. Thuente, "Line search algorithms with guaranteed sufficient decrease", ACM Trans. Math.
   Software 20 (1994), sections 2 to 4.
.. [2] W. W. Hager and H. Zhang, SIAM J. Optim. 16 (2005), equation (4.1).
"""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

from mpiad.optimize.evaluated_points import RETREAT

# The constants of SciPy's L-BFGS-B, so that evaluations can be compared.
_DECREASE, _CURVATURE, _NARROW = 1e-3, 0.9, 0.1
_FARTHEST, _GROWTH, _SHRINKAGE = 1e10, (1.1, 4.0), 0.66
_ROUNDING = 10.0 * sys.float_info.epsilon
# How far towards the other end of the interval a step may go that the cubic wants beyond the trial point.
_SAFEGUARD = 0.66


class End(NamedTuple):
    """A point of the line."""

    step: float
    value: float
    slope: float


class LineSearch:
    """One search along a direction of descent.

    - `value`, `slope`: at step zero; the slope is negative.
    - `first`: the first step to try.
    - `step`: what to try next.
    - `stuck`: whether the interval can't be narrowed any more: the step is as good as it gets.
    """

    def __init__(self, value: float, slope: float, first: float):
        self.step, self.stuck = first, False
        self._start = self._best = self._other = End(0.0, value, slope)
        self._bracketed, self._early = False, True
        self._farthest = _FARTHEST
        self._width, self._width_before = _FARTHEST, 2.0 * _FARTHEST
        self._low, self._high = 0.0, (1.0 + _GROWTH[1]) * first

    def accepts(self, value: float, slope: float) -> bool:
        """Return whether what was found at `step` ends the search; else choose another step."""
        start, trial = self._start, End(self.step, value, slope)
        wanted = start.value + _DECREASE * trial.step * start.slope
        if value <= wanted and abs(slope) <= -_CURVATURE * start.slope:
            return True
        if self._approximately(trial):
            return True
        if self._is_narrow() or (trial.step >= self._farthest and value <= wanted):
            self.stuck = True
            return value <= wanted
        if self._early and value <= wanted and slope >= 0.0:
            self._early = False
        self._advance(trial, modified=self._early and value <= self._best.value and value > wanted)
        return False

    def decreases(self, value: float, predicted: float) -> bool:
        """Return whether a value is low enough, given the change that the first order predicts."""
        return value <= self._start.value + _DECREASE * predicted

    def back_away(self) -> None:
        """Choose another step, since at `step` there is no finite value."""
        best = self._best.step
        self.step = self._farthest = best + RETREAT * (self.step - best)
        self._high = min(self._high, self._farthest)
        self.stuck = self.step == best

    def _approximately(self, trial: End) -> bool:
        start = self._start
        if trial.value > start.value + _ROUNDING * abs(start.value):
            return False
        # Such a decrease is more than rounding: values can be trusted, and the usual conditions decide.
        if trial.value < start.value - _ROUNDING * abs(start.value):
            return False
        return _CURVATURE * start.slope <= trial.slope <= (2.0 * _DECREASE - 1.0) * start.slope

    def _is_narrow(self) -> bool:
        if not self._bracketed:
            return False
        return not self._low < self.step < self._high or self._high - self._low <= _NARROW * self._high

    def _advance(self, trial: End, modified: bool) -> None:
        tilt = _DECREASE * self._start.slope if modified else 0.0
        # While the decrease that is asked for isn't reached, Moré and Thuente fit the function less that decrease, of which
        # an interval surely holds a minimiser.
        ends = self._best, self._other, trial
        best, other, new = (End(end.step, end.value - end.step * tilt, end.slope - tilt) for end in ends)
        step = next_step(best, other, new, self._bracketed, self._low, self._high)
        self._narrow_down(best, new, trial)
        if self._bracketed:
            step = self._bisected(step)
            ends = self._best.step, self._other.step
            self._low, self._high = min(ends), max(ends)
        else:
            # Ever longer steps, as long as no minimiser is bracketed.
            growth = step - self._best.step
            self._low, self._high = step + _GROWTH[0] * growth, step + _GROWTH[1] * growth
        self.step = min(max(step, 0.0), self._farthest)
        if self._is_narrow():
            self.step = self._best.step or self.step

    def _narrow_down(self, best: End, new: End, trial: End) -> None:
        """Replace one end of the interval, or both, by the trial point."""
        if new.value > best.value:
            self._other, self._bracketed = trial, True
            return
        if new.slope * best.slope < 0.0:
            self._other, self._bracketed = self._best, True
        self._best = trial

    def _bisected(self, step: float) -> float:
        width = abs(self._other.step - self._best.step)
        if width >= _SHRINKAGE * self._width_before:
            step = self._best.step + 0.5 * (self._other.step - self._best.step)
        self._width_before, self._width = self._width, width
        return step


def next_step(best: End, other: End, trial: End, bracketed: bool, lowest: float, highest: float) -> float:
    """Return the step to try after `trial`, where `best` has the lowest value so far: section 4 of [1], cases 1 to 4.

    `other` is the far end of the interval where a minimiser is bracketed; else a step may go from `lowest` to `highest`.
    """
    # A minimiser is bracketed: between the best point, from where the function falls, and a higher one.
    if trial.value > best.value:
        return _after_rise(best, trial)
    if trial.slope * best.slope < 0.0:
        # Bracketed by slopes of two signs; the farther of both estimates, since the nearer may hardly move.
        cubic, secant = _cubic(trial, best), _secant(best, trial)
        return max(cubic, secant, key=lambda step: abs(step - trial.step))
    # Lower, and flatter: the minimiser lies beyond, where the cubic may have none.
    if abs(trial.slope) < abs(best.slope):
        return _after_flattening(best, other, trial, bracketed, lowest, highest)
    if bracketed:
        return _cubic(trial, other)
    # Lower, and as steep: nothing says how far to go.
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
