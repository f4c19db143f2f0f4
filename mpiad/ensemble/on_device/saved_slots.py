"""The saved values of a solve on the device: states inside steps, as many at once as any trajectory has, or every step.

The number of accepted steps is known only at the end, so the states of every step are then moved to their slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.record import Step
from mpiad.transport.device_arrays import arrays_of

# Maximum size of one array of saved states, in numbers.
_BLOCK = 1 << 24


class Due(NamedTuple):
    """The values saved in one step."""

    # Int, shape (m, n). The slots of each column's values; the one after the last for columns with fewer.
    slot: Array
    x: Array  # shape (m, n); the part of the step before the saved time; 0 if there is none
    at_end: Array  # bool, shape (m, n); whether it is the end of the step


class SaveTimes:
    """The saved times of a batch.

    - `times`, of shape (n_saved,) or (N, n_saved): on the host.
    - `signs`: shape (N,).
    - `watched`: whether each step must be examined anyway: not all trajectories may reach their ends.
    - `count`: number of saved times per trajectory.
    - `initial`, `final`, bool of shape (N, n_saved), on the host: the times that are saved before the first step, and those
      with the final state, after the last one.
    - `looks`: whether there are others, so that each step must be examined.
    - `inside`: whether any may be inside a step.
    """

    inside = True

    def __init__(self, times: np.ndarray, batch: Batch, signs: np.ndarray, watched: bool = False):
        self.count = times.shape[-1]
        start, end = batch.start[:, None], batch.end[:, None]
        self.initial = (times == start) | (start == end)
        at_end = (times == end) & ~self.initial
        self.looks = not (self.initial.all() if watched else (self.initial | at_end).all())
        # If every step is examined, states at the end are saved with the last step.
        self.final = at_end if not self.looks else np.zeros_like(at_end)
        self._rows: Array = None
        if self.looks:
            common = times.ndim == 1 and (signs == signs[:1]).all()
            rows = times * signs[0] if common else np.broadcast_to(times, at_end.shape) * signs[:, None]
            home: Any = arrays_of(batch.u0)
            self._rows = home.to_device(np.ascontiguousarray(rows, float))

    def passed(self, ids: Array, t: Array) -> Array:
        """Return the numbers of saved times up to and including the times of trajectories, shape (n,)."""
        if self._rows.ndim == 1:
            return np.searchsorted(self._rows, t, side="right")
        return np.sum(self._rows[ids] <= t[:, None], axis=1)

    def due(self, ids: Array, place: Array, count: Array, most: int, t: Array, h: Array, t_new: Array) -> Due:
        """Return the values saved in a step: `count` per column from `place` on, `most` at most."""
        home: Any = arrays_of(t)
        k = home.arange(most)[:, None]
        mine = k < count
        slot = np.where(mine, place + k, self.count)
        within = np.minimum(slot, self.count - 1)  # the slot after the last has no time: any will do
        times = self._rows[within] if self._rows.ndim == 1 else self._rows[ids, within]
        at_end = mine & (times == t_new)
        x = np.where(mine, times - t, 0.0) / np.where(h > 0.0, h, 1.0)  # ended columns have steps of length zero
        return Due(slot, x, at_end)

    def groups(self, most: int, numbers: int) -> list[slice]:
        """Return slices of the values saved in one step whose arrays have limited size."""
        width = max(1, _BLOCK // max(1, numbers))
        return [slice(a, min(a + width, most)) for a in range(0, most, width)]


class EveryStep:
    """As `SaveTimes`: the start, and the end of each accepted step.

    `count`: of the longest trajectory, once all have ended. `looks`, `inside`: whether steps have states to save, and
    whether any of these are inside a step.
    """

    looks, inside = True, False

    def __init__(self, batch: Batch):
        self._batch, self.count = batch, 1
        self._taken: list[tuple[Array, Array, Array, Array, Array]] = []

    @property
    def initial(self) -> np.ndarray:
        """Return which values are saved before the first step: array of bool, shape (N, count), on the host."""
        first = np.zeros((self._batch.size, self.count), bool)
        first[:, 0] = True
        return first

    @property
    def final(self) -> np.ndarray:
        """Return which values are saved with the final state: none, since each belongs to its step."""
        return np.zeros((self._batch.size, self.count), bool)

    def note(self, step: Step, t: Array, u: Array) -> None:
        """Keep references to the times and states after a turn."""
        self._taken.append((step.ids, step.number, step.accepted, t, u))

    def due(self, ids: Array, place: Array, count: Array, most: int, t: Array, h: Array, t_new: Array) -> Due:
        """Return the values saved in a step: its end, if it was accepted."""
        accepted = count > 0
        slot = np.where(accepted, place + 1, self.count)
        return Due(slot[None], np.zeros_like(t)[None], accepted[None])

    def collected(self, start: Array, most: int) -> tuple[Array, Array]:
        """Return the saved states, shape (N, most + 1, d), and their times in the direction of the solve, filled with NaN.

        `start` (N,) is on the device, in the direction of the solve; `most` counts the steps of the longest trajectory.
        """
        home: Any = arrays_of(start)
        u0, self.count = self._batch.u0, most + 1
        # One slot more, for steps that weren't accepted.
        u = home.full((self._batch.size, most + 2, len(u0)), np.nan, u0.dtype)
        times = home.full((self._batch.size, most + 2), np.nan, float)
        u[:, 0], times[:, 0] = u0.T, start
        for ids, number, accepted, t, states in self._taken:
            slot = np.where(accepted, number + 1, most + 1)
            u[ids, slot], times[ids, slot] = states.T, t
        self._taken.clear()
        return home.contiguous(u[:, : most + 1]), home.contiguous(times[:, : most + 1])
