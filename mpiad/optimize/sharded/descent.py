"""The iteration: direction, line search, memory. Every rank runs it, and decides by the same numbers."""

from __future__ import annotations

import sys

import numpy as np

from mpiad.optimize.sharded.ending import (
    ABNORMAL,
    EVALUATIONS,
    GRADIENT,
    ITERATIONS,
    NOT_FINITE,
    REDUCTION,
    STOPPED,
    Ending,
)
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
    """

    def __init__(self, trials: Trials, memory: Memory, listener: Listener, settings: Settings, bounded: bool):
        self._trials, self._memory, self._listener = trials, memory, listener
        self._settings, self._bounded = settings, bounded
        self._iterations = 0

    def run(self, start: np.ndarray) -> tuple[Point, Ending]:
        """Descend from this rank's start, shape (n,), which is overwritten; return where it ends and why."""
        here = self._trials.start(start)
        self._listener.note(here, self._trials.count)
        if not here.finite:
            return here, NOT_FINITE
        before, stop = None, False
        while True:
            ending = self._ending(here, before)
            if ending is not None:
                return here, ending
            slope, length, stop = self._memory.update(here, self._pair(before, here), stop)
            if stop:
                return here, STOPPED
            before = None if before is None else self._trials.release(before)
            found = self._search(here, slope, length) if slope < 0.0 else here
            if found is not here:
                self._iterations += 1
                here, before = found, here
                stop = self._listener.heard(here, self._trials.count)
            elif self._memory.empty and self._trials.count < self._settings.maxfun:
                return here, ABNORMAL
            else:
                self._memory.forget()

    def _ending(self, here: Point, before: Point | None) -> Ending | None:
        settings = self._settings
        if here.norm <= settings.gtol:
            return GRADIENT
        if before is not None and settings.ftol > 0.0:
            scale = max(abs(before.value), abs(here.value), 1.0)
            if before.value - here.value <= settings.ftol * scale:
                return REDUCTION
        if self._iterations >= settings.maxiter:
            return ITERATIONS
        return EVALUATIONS if self._trials.count >= settings.maxfun else None

    def _pair(self, before: Point | None, here: Point) -> Point | None:
        """Return where the last step came from, if the memory is to keep it: not where the function didn't curve up."""
        if before is None or not here.met - here.predicted > -sys.float_info.epsilon * here.predicted:
            return None
        return before

    def _search(self, here: Point, slope: float, length: float) -> Point:
        """Return the point where a line search ends, or the best that it met; `here` where none is better."""
        first = 1.0
        if self._memory.empty:  # nothing says yet how long a step should be
            first = 1.0 / length if self._iterations == 0 else min(1.0, 1.0 / length)
        line, best = LineSearch(here.value, slope, first), here
        direction = self._memory.direction(here)
        for _ in range(self._settings.maxls):
            if line.stuck or self._trials.count >= self._settings.maxfun:
                break
            trial = self._trials.along(here, direction, line.step)
            direction = self._memory.same_direction()
            if not self._bounded:
                trial.predicted, trial.met = trial.step * slope, trial.step * trial.slope
            if not trial.finite:
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
        self._memory.take_back(best)
        return best

    def _drop(self, point: Point, here: Point) -> None:
        if point is not here:
            self._trials.release(point)
