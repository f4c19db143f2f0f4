"""The way over steps of which only some states were kept: those between are computed again, stretch by stretch.

A stretch is the steps from one kept state to the next. Its visits are about steps of one number, counted from the start of
each trajectory, so all columns of a block begin their stretches together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.derivative import derivative_of
from mpiad.ensemble.record import Steps
from mpiad.ensemble.run import Run
from mpiad.ensemble.stages import Stages
from mpiad.ensemble.walk import Visit, Walk

__all__ = ["StretchWalk", "walks"]

# Numbers in one array of a block: so many that tracing f costs less than computing it.
_BLOCK = 49152
_LEAST_COLUMNS = 1024


class StretchWalk(Walk):
    """The visits of a block of whose states some were kept.

    Parameters
    ----------
    run : Run
    steps : Steps
    start, stop : int
    first : int
        The trajectory that the steps count from.
    """

    def __init__(self, run: Run, steps: Steps, start: int, stop: int, first: int):
        super().__init__(steps, start, stop)
        self._run, self._first, self._every = run, first, int(steps.every or 1)
        self._derivative = derivative_of(run.batch.f, run.batch.shape)

    def backwards(self) -> Iterator[Visit]:
        """Return the visits from the last step to the first."""
        for begin in range((len(self) - 1) // self._every * self._every, -1, -self._every):
            yield from reversed(list(self._stretch(begin)))

    def forwards(self) -> Iterator[Visit]:
        """Return the visits from the first step to the last."""
        for begin in range(0, len(self), self._every):
            yield from self._stretch(begin)

    def visit_of(self, column: Array, number: Array) -> Array:
        """Return in which visit, counted backwards, the steps of these numbers lie."""
        return len(self) - 1 - number

    def numbers(self, v: int, width: int) -> Array:
        """Return the numbers, from 0, of the steps of a visit."""
        return np.full(width, len(self) - 1 - v)

    def _stretch(self, begin: int) -> Iterator[Visit]:
        """Return the visits of one stretch, from its first step to its last."""
        stop = min(begin + self._every, len(self))
        width = self._width(begin)
        kept: Any = self._steps.kept
        u = kept.states(self.ids[:width], np.full(width, begin // self._every))
        for number in range(begin, stop):
            width, following = self._width(number), self._width(number + 1)
            u = u[:, :width]
            t, h = self._steps.times(self.ids[:width], np.full(width, number))
            yield Visit(t, h, u, slice(following, width))
            if number + 1 < stop:  # the next stretch begins at a kept state
                u = self._advanced(u, t, h)

    def _width(self, number: int) -> int:
        return int(np.count_nonzero(self.counts > number))

    def _advanced(self, u: Array, t: Array, h: Array) -> Array:
        """Return the states after a step, computed as the solve did."""
        run, width = self._run, u.shape[1]
        columns = np.arange(max(2, width)) % width  # two at least, as in the solve: see `norms`
        u, t, h = u[:, columns], t[columns], h[columns]
        p = run.batch.p.columns((self.ids[:width] + self._first)[columns], run.field.one_by_one)
        stages = Stages(run.tableau, self._derivative, u.dtype, u.shape)
        self._derivative.write(stages.k[0], u, p, t.astype(u.real.dtype))
        stages.take(u, p, t, h, t + h, None)
        return stages.new[:, :width]


def walks(run: Run) -> Iterator[tuple[int, Walk]]:
    """Return the ways over all steps of a run, block by block: the trajectory that each counts from, and the walk."""
    width = max(_LEAST_COLUMNS, _BLOCK // max(1, len(run.batch.u0)))
    for first, steps in run.shares:
        moving = int(np.count_nonzero(steps.counts))
        for start in range(0, moving, width):
            stop = min(start + width, moving)
            yield first, Walk(steps, start, stop) if steps.kept is None else StretchWalk(run, steps, start, stop, first)
