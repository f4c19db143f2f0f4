"""Limited-memory BFGS for distributed variables; all ranks run the iteration with the same scalars."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.optimize.evaluated_points import INTERRUPTED, RETREAT, Ending
from mpiad.optimize.iterates import ShardedIterates
from mpiad.optimize.objective_evaluation import Evaluation
from mpiad.optimize.sharded.constraint_values import LinearEquality
from mpiad.optimize.sharded.convergence import ABNORMAL, GRADIENT, Settings
from mpiad.optimize.sharded.limited_memory import LimitedMemory, Point
from mpiad.optimize.sharded.sharded_method import ShardedMethod, StateFiles

# A line search for the strong Wolfe conditions, which all ranks run with the same scalars.
#
# It follows Moré and Thuente: an interval that brackets a minimizer is reduced by safeguarded cubic steps, at first for the
# function minus the required linear decrease, which has a minimizer at which the conditions hold. There are two additions.
# If the function isn't finite at a trial, the next trial is closer to the best step, and later trials aren't longer. If
# values are equal up to rounding, only slopes are compared (Hager and Zhang's approximate conditions), so the gradient can
# become smaller than the square root of the precision.
#
# References
# ----------
# .. [1] J. J. Moré and D. J. Thuente, "Line search algorithms with guaranteed sufficient decrease", ACM Trans. Math.
#    Software 20 (1994), sections 2 to 4.
# .. [2] W. W. Hager and H. Zhang, SIAM J. Optim. 16 (2005), equation (4.1).


# The constants of the line search in SciPy's L-BFGS-B.
_DECREASE, _CURVATURE, _NARROW = 1e-3, 0.9, 0.1
_FARTHEST, _GROWTH, _SHRINKAGE = 1e10, (1.1, 4.0), 0.66
_ROUNDING = 10.0 * sys.float_info.epsilon
# Steps beyond the trial point are at most this fraction of the distance to the other end of the interval.
_SAFEGUARD = 0.66


class Sample(NamedTuple):
    """Value and slope of the objective at a step along the direction."""

    step: float
    value: float
    slope: float


class LineSearch:
    """A search for a descent step; `step` is tried next; `stuck`: the interval can't be reduced any further."""

    def __init__(self, value: float, slope: float, first: float):
        self.step, self.stuck = first, False
        self._start = self._best = self._other = Sample(0.0, value, slope)
        self._bracketed, self._first_stage = False, True
        self._farthest = _FARTHEST
        self._width, self._width_before = _FARTHEST, 2.0 * _FARTHEST
        self._low, self._high = 0.0, (1.0 + _GROWTH[1]) * first

    def accepts(self, value: float, slope: float) -> bool:
        """Return whether value and slope at `step` end the search; otherwise choose another step."""
        start, trial = self._start, Sample(self.step, value, slope)
        required = start.value + _DECREASE * trial.step * start.slope
        if value <= required and abs(slope) <= -_CURVATURE * start.slope:
            return True
        # For larger decreases the usual conditions apply.
        is_equal = abs(value - start.value) <= _ROUNDING * abs(start.value)
        if is_equal and _CURVATURE * start.slope <= slope <= (2.0 * _DECREASE - 1.0) * start.slope:
            return True
        if self._is_narrow() or (trial.step >= self._farthest and value <= required):
            self.stuck = True
            return value <= required
        if self._first_stage and value <= required and slope >= 0.0:
            self._first_stage = False
        self._advance(trial, modified=self._first_stage and value <= self._best.value and value > required)
        return False

    def back_away(self) -> None:
        """Choose a shorter step if the value at `step` isn't finite."""
        best = self._best.step
        self.step = self._farthest = best + RETREAT * (self.step - best)
        self._high = min(self._high, self._farthest)
        self.stuck = self.step == best

    def _is_narrow(self) -> bool:
        if not self._bracketed:
            return False
        return not self._low < self.step < self._high or self._high - self._low <= _NARROW * self._high

    def _advance(self, trial: Sample, modified: bool) -> None:
        shift = _DECREASE * self._start.slope if modified else 0.0
        # Until the required decrease is reached, Moré and Thuente interpolate the function minus that decrease.
        ends = self._best, self._other, trial
        best, other, new = (Sample(end.step, end.value - end.step * shift, end.slope - shift) for end in ends)
        step = next_step(best, other, new, self._bracketed, self._low, self._high)
        if new.value > best.value:
            self._other, self._bracketed = trial, True
        else:
            if new.slope * best.slope < 0.0:
                self._other, self._bracketed = self._best, True
            self._best = trial
        if self._bracketed:
            width = abs(self._other.step - self._best.step)
            if width >= _SHRINKAGE * self._width_before:
                step = self._best.step + 0.5 * (self._other.step - self._best.step)
            self._width_before, self._width = self._width, width
            ends = self._best.step, self._other.step
            self._low, self._high = min(ends), max(ends)
        else:
            # Steps grow until a minimizer is bracketed.
            growth = step - self._best.step
            self._low, self._high = step + _GROWTH[0] * growth, step + _GROWTH[1] * growth
        self.step = min(max(step, 0.0), self._farthest)
        if self._is_narrow():
            self.step = self._best.step or self.step


def next_step(best: Sample, other: Sample, trial: Sample, bracketed: bool, lowest: float, highest: float) -> float:
    """Return the step after `trial`: cases 1 to 4 in section 4 of [1]; `other`: the other end of a `bracketed` interval."""

    def distance(step: float) -> float:
        return abs(step - trial.step)

    # The trial is higher than the best point, so it brackets a minimizer.
    if trial.value > best.value:
        width, (cubic, _) = trial.step - best.step, _cubic(best, trial)
        descent = (best.value - trial.value) / width + best.slope
        quadratic = best.step + best.slope / descent / 2.0 * width
        is_closer = abs(cubic - best.step) < abs(quadratic - best.step)
        return cubic if is_closer else cubic + (quadratic - cubic) / 2.0
    limit, turns = highest if trial.step > best.step else lowest, trial.slope * best.slope < 0.0
    if not turns and abs(trial.slope) >= abs(best.slope):
        # A lower value and a slope that isn't smaller: take the limit of the allowed steps.
        return _cubic(trial, other)[0] if bracketed else limit
    secant = trial.step + trial.slope / (trial.slope - best.slope) * (best.step - trial.step)
    cubic, exists = _cubic(trial, best)
    if turns:
        # Slopes of opposite signs bracket a minimizer: take the estimate that is farther from the trial.
        return max(cubic, secant, key=distance)
    # A lower value and a smaller slope: the minimizer lies beyond the trial, but the cubic may not have a minimizer there.
    if not exists or (cubic - trial.step) * (trial.step - best.step) <= 0.0:
        cubic = limit
    if not bracketed:
        return min(max(max(cubic, secant, key=distance), lowest), highest)
    step, limit = min(cubic, secant, key=distance), trial.step + _SAFEGUARD * (other.step - trial.step)
    return min(step, limit) if trial.step > best.step else max(step, limit)


def _cubic(a: Sample, b: Sample) -> tuple[float, bool]:
    """Return the minimizer of the cubic through both values and slopes, computed from a, and whether it exists."""
    theta = 3.0 * (a.value - b.value) / (b.step - a.step) + a.slope + b.slope
    scale = max(abs(theta), abs(a.slope), abs(b.slope))  # squares of slopes may overflow
    root = scale * math.sqrt(max(0.0, (theta / scale) ** 2 - (a.slope / scale) * (b.slope / scale)))
    # This sign of the root selects the minimizer, not the maximizer.
    signed = root if b.step > a.step else -root
    fraction = (signed - a.slope + theta) / (signed - a.slope + signed + b.slope)
    return a.step + fraction * (b.step - a.step), root > 0.0


class LBFGS(ShardedMethod[Point]):
    """The L-BFGS iteration."""

    _settings: Settings

    def __init__(
        self,
        evaluation: Evaluation | LinearEquality,
        memory: LimitedMemory,
        iterates: ShardedIterates,
        settings: Settings,
        files: StateFiles,
    ):
        super().__init__(iterates, files, memory.vectors.box, settings)
        self._evaluation, self._memory = evaluation, memory
        self._barrier = math.inf  # length of the shortest step of the last search without a finite value
        # At the current iterate: the number of evaluations (without those of a search that SIGTERM interrupts and that is
        # repeated); the previous objective, infinite if no better point was found; slope along the direction; norm.
        self._count_here, self._value_before, self._slope, self._grad_norm = 0, math.inf, math.nan, math.nan
        self._stopped = False  # whether a callback has raised StopIteration

    def _evaluated(self, x: Array, iterate: Point | None, step: float = math.nan) -> Point:
        # This takes three small collective operations in addition to those of the objective.
        self.count += 1
        point, (value, gradient) = Point(x, step=step), self._evaluation.both(x)
        largest, *terms, clipped = self._memory.measure(point, iterate, gradient)
        # MPI doesn't specify the maximum of NaN.
        broken = not math.isfinite(largest)
        numbers = self._memory.totals.reduce(terms, [0.0 if broken else largest, broken, clipped], [value])
        point.slope, point.change_before, point.change_after, square, point.norm, any_broken, any_clipped, point.value = (
            numbers
        )
        point.clipped, point.length = bool(any_clipped), math.sqrt(square)
        point.finite = not any_broken and math.isfinite(point.value) and math.isfinite(point.slope)
        return point

    def _next_point(self, iterate: Point) -> Point | Ending:
        found = self._search(iterate) if self._slope < 0.0 else iterate
        if found is not iterate:
            found.range = self._barrier - found.length if self._barrier > found.length else math.inf
            return found
        if self._files.interrupted:  # the search is repeated when the solve resumes
            self._write(iterate, True)
            return INTERRUPTED
        if self._memory.ring.count == 0 and self.count < self._settings.maxfun:
            return ABNORMAL
        # No better point along the direction: retry with steepest descent.
        self._memory.ring.forget()
        self._arrive(iterate, None)
        return self._ended(iterate) or self._next_point(iterate)

    def _ending(self, iterate: Point) -> Ending | None:
        if iterate.norm <= self._settings.gtol:
            return GRADIENT
        return self._limit_reached(self._value_before, iterate.value, lambda: self._stopped)

    def _arrive(self, new: Point, before: Point | None) -> None:
        # The memory stores a step only if the curvature along it is positive.
        curved = before is not None and new.change_after - new.change_before > -sys.float_info.epsilon * new.change_before
        found = self._memory.update(new, before if curved else None, self._iterates.stopped)
        self._slope, self._grad_norm, self._stopped = found
        self._count_here, self._value_before = self.count, math.inf if before is None else before.value

    def _search(self, iterate: Point) -> Point:
        """Return the accepted point, or the best trial; `iterate` if none is better, or after SIGTERM."""
        grad_norm, slope, best = self._grad_norm, self._slope, iterate
        if self._memory.ring.count == 0:  # without stored pairs the direction isn't scaled
            first = 1.0 / grad_norm if self._iterates.record.iterations == 0 else min(1.0, 1.0 / grad_norm)
        else:
            # If the objective wasn't finite at trial points of the last search, the model may predict a minimizer beyond
            # them. The length of the direction is at least -slope / grad_norm, so this isn't shorter than their distance.
            first = min(1.0, iterate.range * grad_norm / -slope)
        self._barrier, line = math.inf, LineSearch(iterate.value, slope, first)
        for _ in range(self._settings.maxls):
            if line.stuck or self.count >= self._settings.maxfun:
                break
            x = np.empty_like(iterate.x)
            self._memory.advance(iterate, line.step, x)
            trial = self._evaluated(x, iterate, line.step)
            # With bounds the path isn't straight, so `measure` has computed these products.
            if self._box is None:
                trial.change_before, trial.change_after = trial.step * slope, trial.step * trial.slope
            if not trial.finite:
                self._barrier = min(self._barrier, trial.length)
                line.back_away()
                continue
            # If a variable has reached a bound, the slope along the path is discontinuous, and only a decrease is required.
            lower = trial.clipped and trial.value <= iterate.value + _DECREASE * trial.change_before
            if lower or line.accepts(trial.value, trial.slope):
                return trial
            if trial.value < best.value:
                self._memory.store_gradient(trial)
                best = trial
            if self._files.interrupted:
                return iterate
        self._memory.restore_gradient(best)
        return best

    def _arrays(self, point: Point) -> Iterator[tuple[str, np.ndarray]]:
        numbers = [point.value, point.norm, self._value_before, self._slope, self._grad_norm, point.range]
        yield "numbers", np.array(numbers)
        yield "count", np.array(self._count_here)
        yield from self._memory.state().items()

    def _restored(self, arrays: dict[str, np.ndarray], x: Array) -> Point:
        iterate = Point(x, current=True)  # the gradient is in the memory
        iterate.value, iterate.norm, *numbers, iterate.range = arrays["numbers"].tolist()
        self._value_before, self._slope, self._grad_norm = numbers
        self.count = self._count_here = int(arrays["count"])
        self._memory.restore(arrays)
        return iterate
