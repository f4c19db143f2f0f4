"""States saved inside steps, on the device: as many at once as any trajectory has in this step."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.batch import Batch
from mpiad.transport.device_arrays import arrays_of

__all__ = ["Due", "SaveTimes"]

# Numbers in one array of saved states.
_BLOCK = 1 << 24


class Due(NamedTuple):
    """What is saved in one step.

    Parameters
    ----------
    slot : array of int, shape (m, n)
        Which of its saved times each column takes; the one behind the last where it takes none.
    x : array, shape (m, n)
        The part of the step that is gone there; 0 where there is none.
    at_end : array of bool, shape (m, n)
        Whether it is the end of the step.
    """

    slot: Array
    x: Array
    at_end: Array


class SaveTimes:
    """The saved times of a batch.

    Parameters
    ----------
    times : array, shape (n_saved,) or (N, n_saved)
        On the host.
    batch : Batch
    signs : array, shape (N,)
    watched : bool
        Whether each step must be looked at anyway: not all trajectories may come to their ends.

    Attributes
    ----------
    count : int
        Of each trajectory.
    initial, final : array of bool, shape (N, n_saved), on the host
        Which are saved before the first step, and which with the final state, after the last one.
    looks : bool
        Whether any lies elsewhere, so that each step must be looked at.
    inside : bool
        Whether any may lie inside a step.
    """

    inside = True

    def __init__(self, times: np.ndarray, batch: Batch, signs: np.ndarray, watched: bool = False):
        self.count = times.shape[-1]
        start, end = batch.start[:, None], batch.end[:, None]
        self.initial = (times == start) | (start == end)
        at_end = (times == end) & ~self.initial
        self.looks = not (self.initial.all() if watched else (self.initial | at_end).all())
        # Where every step is looked at, what lies at the end is saved with the last one.
        self.final = at_end if not self.looks else np.zeros_like(at_end)
        self._rows: Any = None
        if self.looks:
            common = times.ndim == 1 and (signs == signs[:1]).all()
            rows = times * signs[0] if common else np.broadcast_to(times, at_end.shape) * signs[:, None]
            home: Any = arrays_of(batch.u0)
            self._rows = home.to_device(np.ascontiguousarray(rows, float))

    def passed(self, ids: Array, t: Array) -> Array:
        """Return how many saved times lie before or at times of trajectories, shape (n,)."""
        if self._rows.ndim == 1:
            return np.searchsorted(self._rows, t, side="right")
        return np.sum(self._rows[ids] <= t[:, None], axis=1)

    def due(self, ids: Array, place: Array, count: Array, most: int, t: Array, h: Array, t_new: Array) -> Due:
        """Return what is saved in a step: `count` of each column from `place` on, `most` at most."""
        home: Any = arrays_of(t)
        k = home.arange(most)[:, None]
        mine = k < count
        slot = np.where(mine, place + k, self.count)
        within = np.minimum(slot, self.count - 1)  # the place behind the last has no time: any will do
        times = self._rows[within] if self._rows.ndim == 1 else self._rows[ids, within]
        at_end = mine & (times == t_new)
        x = np.where(mine, times - t, 0.0) / np.where(h > 0.0, h, 1.0)  # ended columns have steps of length zero
        return Due(slot, x, at_end)

    def groups(self, most: int, numbers: int) -> list[slice]:
        """Return slices of what is saved in one step, of no more numbers than fit well into memory."""
        width = max(1, _BLOCK // max(1, numbers))
        return [slice(a, min(a + width, most)) for a in range(0, most, width)]
