"""The way back over the steps of a block of trajectories, in visits: one step of several columns each.

The columns of a block are ordered by their numbers of steps, the most first, so a visit is about the first few. Visit v is
the (v+1)-th step from the end of each column. (Where only some states were kept, see `checkpoints`.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.record import Steps

__all__ = ["Visit", "Walk"]


class Visit(NamedTuple):
    """A step of the first columns of a block.

    Parameters
    ----------
    t, h : array, shape (width,)
    u : array, shape (d, width)
        Before the step.
    last : slice
        The columns for which it is the last step.
    """

    t: Array
    h: Array
    u: Array
    last: slice

    def of(self, columns: Any) -> Visit:
        """Return the visit of some columns."""
        # An array of indices would leave the states in another order than that which NumPy takes fastest.
        u = self.u[:, columns] if type(columns) is slice else np.take(self.u, columns, axis=1)
        return Visit(self.t[columns], self.h[columns], u, self.last)


class Walk:
    """The visits of a block whose states were all kept.

    Parameters
    ----------
    steps : Steps
    start, stop : int
        The block: which places in the order of the steps.
    """

    def __init__(self, steps: Steps, start: int, stop: int):
        self._steps, self._start, self._stop = steps, start, stop
        self.ids = steps.order[start:stop]
        self.counts = steps.counts[self.ids]

    def __len__(self) -> int:
        return int(self.counts[0])

    def backwards(self) -> Iterator[Visit]:
        """Return the visits from the last step to the first."""
        return (self._visit(s) for s in range(len(self)))

    def forwards(self) -> Iterator[Visit]:
        """Return the visits from the first step to the last."""
        return (self._visit(s) for s in range(len(self) - 1, -1, -1))

    def visit_of(self, column: Array, number: Array) -> Array:
        """Return in which visit, counted backwards, the steps of these numbers lie."""
        return self.counts[column] - 1 - number

    def numbers(self, v: int, width: int) -> Array:
        """Return the numbers, from 0, of the steps of a visit."""
        return self.counts[:width] - 1 - v

    def _visit(self, s: int) -> Visit:
        sweep = self._steps.sweep(s)
        stop = min(self._stop, int(self._steps.widths[s]))
        cut = slice(self._start, stop)
        last = slice(0, stop - self._start) if s == 0 else slice(0, 0)
        return Visit(sweep.t[cut], sweep.h[cut], sweep.u[:, cut], last)
