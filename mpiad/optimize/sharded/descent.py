"""The iteration: direction, line search, memory. Every rank runs it, and decides by the same numbers."""

from __future__ import annotations

import math
import sys

import numpy as np

from mpiad.optimize.sharded.ending import (
    ABNORMAL,
    EVALUATIONS,
    GRADIENT,
    INTERRUPTED,
    ITERATIONS,
    NOT_FINITE,
    REDUCTION,
    STOPPED,
    Ending,
)
from mpiad.optimize.sharded.keeper import Keeper, State
from mpiad.optimize.sharded.line_search import LineSearch
from mpiad.optimize.sharded.listener import Listener
from mpiad.optimize.sharded.memory import Memory
from mpiad.optimize.sharded.point import Point
from mpiad.optimize.sharded.settings import Settings
from mpiad.optimize.sharded.trials import Trials

__all__ = ["Descent"]


class Descent:
    """Limited-memory BFGS.

    Parameters
    ----------
    trials : Trials
    memory : Memory
    listener : Listener
    settings : Settings
    bounded : bool
        Whether steps may be clipped.
    keeper : Keeper
    """

    def __init__(
        self, trials: Trials, memory: Memory, listener: Listener, settings: Settings, bounded: bool, keeper: Keeper
    ):
        self._trials, self._memory, self._listener, self._keeper = trials, memory, listener, keeper
        self._settings, self._bounded = settings, bounded
        self._iterations, self._wall = 0, math.inf

    def run(self, start: np.ndarray) -> tuple[Point, Ending]:
        """Descend from this rank's start, shape (n,), which is overwritten; return where it ends and why."""
        found = self._keeper.restored(self._memory, self._trials, self._listener)
        if found is not None:
            self._iterations = found.iteration
            self._trials.release(Point(start))  # its vector serves for trial points
            return self._descend(found)
        here = self._trials.start(start)
        self._listener.note(here, self._trials.count)
        if not here.finite:
            return here, NOT_FINITE
        return self._descend(self._moved(here, None, False))

    def _descend(self, state: State) -> tuple[Point, Ending]:
        while True:
            here, ending = state.here, self._ending(state)
            self._keeper.keep(state, ending, self._memory, self._listener.record)
            if ending is not None:
                return here, ending
            found = self._search(here, state.slope, state.length) if state.slope < 0.0 else here
            if found is here and self._keeper.interrupted:  # the search begins anew when the solve goes on
                self._keeper.keep(state, INTERRUPTED, self._memory, self._listener.record)
                return here, INTERRUPTED
            if found is not here:
                self._iterations += 1
                found.room = self._wall - found.length if self._wall > found.length else math.inf
                stop = self._listener.heard(found, self._trials.count)
                state = self._moved(found, here, stop)
                self._trials.release(here)
            elif self._memory.empty and self._trials.count < self._settings.maxfun:
                return here, ABNORMAL
            else:
                # The direction may be bad by what the memory holds: once more along the steepest descent before giving up.
                self._memory.forget()
                state = self._moved(here, None, False)

    def _moved(self, here: Point, before: Point | None, stop: bool) -> State:
        """Take a point into the memory; return the state of the solve there."""
        slope, length, stopped = self._memory.update(here, self._pair(before, here), stop)
        value_before = math.inf if before is None else before.value
        return State(self._iterations, self._trials.count, here, value_before, slope, length, stopped)

    def _ending(self, state: State) -> Ending | None:
        settings, here = self._settings, state.here
        if here.norm <= settings.gtol:
            return GRADIENT
        if settings.ftol > 0.0 and state.value_before < math.inf:
            scale = max(abs(state.value_before), abs(here.value), 1.0)
            if state.value_before - here.value <= settings.ftol * scale:
                return REDUCTION
        if state.stopped:
            return STOPPED
        if self._iterations >= settings.maxiter:
            return ITERATIONS
        if self._trials.count >= settings.maxfun:
            return EVALUATIONS
        return INTERRUPTED if self._keeper.interrupted else None

    def _pair(self, before: Point | None, here: Point) -> Point | None:
        """Return where the last step came from, if the memory is to keep it: not where the function didn't curve up."""
        if before is None or not here.met - here.predicted > -sys.float_info.epsilon * here.predicted:
            return None
        return before

    def _search(self, here: Point, slope: float, length: float) -> Point:
        """Return the point where a line search ends, or the best that it met; `here` where none is better."""
        self._wall = math.inf
        line, best = LineSearch(here.value, slope, self._first_step(here, slope, length)), here
        for _ in range(self._settings.maxls):
            if line.stuck or self._trials.count >= self._settings.maxfun:
                break
            trial = self._trials.along(here, line.step)
            if not self._bounded:
                trial.predicted, trial.met = trial.step * slope, trial.step * trial.slope
            if not trial.finite:
                self._wall, self._memory.attempts.at_edge = min(self._wall, trial.length), True
                self._trials.release(trial)
                line.back_away()
                continue
            lower = trial.clipped and line.decreases(trial.value, trial.predicted)
            if lower or line.accepts(trial.value, trial.slope):
                self._drop(best, here)
                return trial
            if trial.value < best.value:
                self._memory.put_aside(trial)
                trial, best = best, trial
            self._drop(trial, here)
            if self._keeper.interrupted:
                self._drop(best, here)
                return here
        self._memory.take_back(best)
        return best

    def _first_step(self, here: Point, slope: float, length: float) -> float:
        if self._memory.empty:  # nothing says yet how long a step should be
            return 1.0 / length if self._iterations == 0 else min(1.0, 1.0 / length)
        if self._memory.attempts.followed:  # hyperbolas have found the end of the domain by themselves
            return 1.0
        # Where the last search met the end of the domain, the model still expects the minimiser far beyond it. The
        # direction is at least -slope / length long, so this goes no less far than the end was.
        return min(1.0, here.room * length / -slope)

    def _drop(self, point: Point, here: Point) -> None:
        if point is not here:
            self._trials.release(point)
