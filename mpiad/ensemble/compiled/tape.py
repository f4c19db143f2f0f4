"""Accepted steps as kernels write them: one row each, in the order in which lanes took them, linked by trajectory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.complex_parts import from_parts, is_complex
from mpiad.ensemble.record import Steps

__all__ = ["Tape"]


class Tape(NamedTuple):
    """The steps of some trajectories.

    Parameters
    ----------
    first, stop : int
        Which trajectories.
    rows : array, shape (m, 2 + d)
        Time before the step, its signed size, and the state before it; of a complex one its parts.
    before : array of int, shape (m,)
        The row of the same trajectory's step before; -1 where there is none.
    """

    first: int
    stop: int
    rows: Array
    before: Array

    def steps(self, last: Array, counts: Array, dtype: np.dtype) -> Steps:
        """Return the steps in the order of sweeps.

        Parameters
        ----------
        last : array of int, shape (N,)
            The row of the last step of every trajectory of the ensemble.
        counts : array of int, shape (N,)
        dtype : dtype
            Of the states.
        """
        d = (self.rows.shape[1] - 2) // (2 if is_complex(dtype) else 1)
        steps = Steps(counts[self.first : self.stop], d, dtype)
        row = last[self.first : self.stop][steps.order]
        for s, width in enumerate(steps.widths):
            row = row[:width]  # those that have so many steps stand first in the order
            ids, found = steps.order[:width], self.rows[row]
            steps.fill(ids, steps.counts[ids] - 1 - s, found[:, 0], found[:, 1], from_parts(found[:, 2:], dtype).T)
            row = self.before[row]
        steps.pad()
        return steps
