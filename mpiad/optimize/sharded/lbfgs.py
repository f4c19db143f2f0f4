"""Limited-memory BFGS: trial points, line search, iteration. Every rank runs it, and decides by the same numbers."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import numpy as np

from mpiad._typing import Array
from mpiad.optimize.evaluated_points import INTERRUPTED, Ending
from mpiad.optimize.iterates import PieceIterates
from mpiad.optimize.objective_evaluation import Evaluation
from mpiad.optimize.packing import DevicePacking, PiecePacking
from mpiad.optimize.root_exchange import Totals
from mpiad.optimize.sharded.convergence import ABNORMAL, GRADIENT, NOT_FINITE, Settings, ending_at
from mpiad.optimize.sharded.limited_memory import LimitedMemory
from mpiad.optimize.sharded.line_search import LineSearch
from mpiad.optimize.sharded.solver_state import Point, State, StateFiles


class Trials:
    """Points along a direction: every rank moves its piece, all evaluate, and two small messages tell what is to be known.

    `memory`: where the direction comes from and gradients go to. `count`: evaluations so far.
    """

    def __init__(
        self, evaluation: Evaluation, packing: PiecePacking | DevicePacking, totals: Totals, memory: LimitedMemory
    ):
        self._evaluation, self._packing, self._totals, self._memory = evaluation, packing, totals, memory
        self._spare: list[Array] = []
        self.count = 0

    def start(self, x: Array) -> Point:
        """Evaluate the starting point, moved into the bounds; x belongs to the point from now on."""
        if self._memory.vectors.box is not None:
            self._memory.vectors.project(x)
        return self._evaluated(Point(x), None)

    def along(self, here: Point, step: float) -> Point:
        """Evaluate a step along the direction from a point, projected onto the bounds."""
        point = Point(self._spare.pop() if self._spare else self._memory.vectors.new())
        point.step = step
        self._memory.advance(here, step, (point.x, self._packing.lend()))
        return self._evaluated(point, here)

    def release(self, point: Point) -> None:
        """Take back the memory of a point that is not needed any more."""
        self._spare.append(point.x)

    def _evaluated(self, point: Point, here: Point | None) -> Point:
        self.count += 1
        value, gradient = self._evaluation.both(point.x)
        largest, *terms, clipped = self._memory.measure(point, here, gradient)
        # Told by a number of its own, since what MPI takes for the maximum of a NaN isn't said.
        broken = not math.isfinite(largest)
        numbers = self._totals.of(terms, [0.0 if broken else largest, broken, clipped], [value])
        point.slope, point.predicted, point.met, square, point.norm, any_broken, any_clipped, point.value = numbers
        point.clipped, point.length = bool(any_clipped), math.sqrt(square)
        point.finite = not any_broken and math.isfinite(point.value) and math.isfinite(point.slope)
        return point


class LBFGS:
    """The iteration."""

    def __init__(
        self, trials: Trials, memory: LimitedMemory, iterates: PieceIterates, settings: Settings, files: StateFiles
    ):
        self._trials, self._memory, self._files, self._iterates = trials, memory, files, iterates
        self._settings, self._bounded = settings, memory.vectors.box is not None
        self._count, self._wall = 0, math.inf

    def run(self, start: Array) -> tuple[Point, Ending]:
        """Descend from this rank's start, shape (n,), which is overwritten; return where it ends and why."""
        found = self._files.take()
        if found is not None:
            self._trials.release(Point(start))  # its vector serves for trial points
            return self._descend(self._restored(found))
        here = self._trials.start(start)
        self._iterates.note(here, self._trials.count)
        if not here.finite:
            return here, NOT_FINITE
        return self._descend(self._moved(here, None, False))

    def _descend(self, state: State) -> tuple[Point, Ending]:
        while True:
            here = state.here
            ending = self._ending(state) or (INTERRUPTED if self._files.interrupted else None)
            self._keep(state, ending)
            if ending is not None:
                return here, ending
            found = self._search(here, state.slope, state.length) if state.slope < 0.0 else here
            if found is here and self._files.interrupted:  # the search begins anew when the solve goes on
                self._keep(state, INTERRUPTED)
                return here, INTERRUPTED
            if found is not here:
                self._count += 1
                found.room = self._wall - found.length if self._wall > found.length else math.inf
                stop = self._iterates.heard(found, self._trials.count)
                state = self._moved(found, here, stop)
                self._trials.release(here)
            elif self._memory.ring.count == 0 and self._trials.count < self._settings.maxfun:
                return here, ABNORMAL
            else:
                # The direction may be bad by what the memory holds: once more along the steepest descent before giving up.
                self._memory.ring.forget()
                state = self._moved(here, None, False)

    def _ending(self, state: State) -> Ending | None:
        if state.here.norm <= self._settings.gtol:
            return GRADIENT
        made = state.iteration, state.count
        return ending_at(state.value_before, state.here.value, lambda: state.stopped, made, self._settings)

    def _moved(self, here: Point, before: Point | None, stop: bool) -> State:
        """Take a point into the memory; return the state of the solve there."""
        slope, length, stopped = self._memory.update(here, self._pair(before, here), stop)
        value_before = math.inf if before is None else before.value
        return State(self._count, self._trials.count, here, value_before, slope, length, stopped)

    def _pair(self, before: Point | None, here: Point) -> Point | None:
        """Return where the last step came from, if the memory is to keep it: not where the function didn't curve up."""
        if before is None or not here.met - here.predicted > -sys.float_info.epsilon * here.predicted:
            return None
        return before

    # ---- line search

    def _search(self, here: Point, slope: float, length: float) -> Point:
        """Return the point where a line search ends, or the best that it met; `here` where none is better."""
        self._wall = math.inf
        line, best = LineSearch(here.value, slope, self._first_step(here, slope, length)), here
        for _ in range(self._settings.maxls):
            if line.stuck or self._trials.count >= self._settings.maxfun:
                break
            trial = self._trials.along(here, line.step)
            # Along a straight line both follow from the slopes; along a path bent by bounds they are summed with the point.
            if not self._bounded:
                trial.predicted, trial.met = trial.step * slope, trial.step * trial.slope
            # Outside of where the objective is finite nothing is learnt but that the step was too long.
            if not trial.finite:
                self._wall = min(self._wall, trial.length)
                self._trials.release(trial)
                line.back_away()
                continue
            # Where bounds have stopped variables the slope along the path jumps, and decrease is all that can be asked.
            lower = trial.clipped and line.decreases(trial.value, trial.predicted)
            if lower or line.accepts(trial.value, trial.slope):
                self._drop(best, here)
                return trial
            if trial.value < best.value:
                self._memory.put_aside(trial)
                # Kept aside: if the search ends without its conditions, the lowest point that it met is returned.
                trial, best = best, trial
            self._drop(trial, here)
            if self._files.interrupted:
                self._drop(best, here)
                return here
        self._memory.take_back(best)
        return best

    def _first_step(self, here: Point, slope: float, length: float) -> float:
        if self._memory.ring.count == 0:  # nothing says yet how long a step should be
            return 1.0 / length if self._count == 0 else min(1.0, 1.0 / length)
        # Where the last search met the end of the domain, the model still expects the minimiser far beyond it. The
        # direction is at least -slope / length long, so this goes no less far than the end was.
        return min(1.0, here.room * length / -slope)

    def _drop(self, point: Point, here: Point) -> None:
        if point is not here:
            self._trials.release(point)

    # ---- checkpoint

    def _keep(self, state: State, ending: Ending | None) -> None:
        """Write the state where it is time to; all ranks call this."""
        if self._files.due(state.iteration, ending is not None):
            self._files.write(state.iteration, self._arrays(state))

    def _arrays(self, state: State) -> Iterator[tuple[str, np.ndarray]]:
        here = state.here
        yield "x", self._memory.vectors.to_host(here.x)
        yield "numbers", np.array([here.value, here.norm, state.value_before, state.slope, state.length, here.room])
        yield "count", np.array(state.count)
        yield "history", self._iterates.record.table()
        yield from self._memory.state().items()

    def _restored(self, found: dict[str, np.ndarray]) -> State:
        """Put what `_arrays` has returned into the parts of the solve; return the rest of it."""
        here = Point(self._memory.vectors.from_host(found["x"]))
        here.value, here.norm, value_before, slope, length, here.room = found["numbers"].tolist()
        here.settled = True  # the gradient is in the memory
        self._count, self._trials.count = self._files.iteration, int(found["count"])
        self._iterates.record.restore(found["history"])
        self._memory.restore(found)
        return State(self._count, self._trials.count, here, value_before, slope, length, False)
