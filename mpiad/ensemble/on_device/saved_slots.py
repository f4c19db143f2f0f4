"""The saved values of a solve on a device: at given times (`SaveTimes`), or at the end of every step (`EveryStep`).

Each saved value of a trajectory has an index, its slot. In each round (one step of all trajectories), the trajectory with
the most saved times determines the number of values that are computed for every trajectory; unneeded values are written to
an additional slot.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.record import Step
from mpiad.transport.devices.device_arrays import arrays_of

# Maximum size of one array of saved states, in numbers.
_BLOCK = 1 << 24


class Due(NamedTuple):
    """The slots and times of the values saved in one step."""

    slot: Array  # int, shape (m, n); the slots of each column's values; the additional slot if a column has fewer than m
    x: Array  # shape (m, n); the saved time as a fraction of the step; 0 for unused slots
    at_end: Array  # bool, shape (m, n); whether the saved time is the end of the step


class SaveTimes:
    """The saved times of a batch; `times`: shape (n_saved,) or (N, n_saved), on the host.

    - `initial`, `final`: bool, shape (N, n_saved), on the host. Whether each saved value is the initial state, or is copied
      from the final state after the last step.
    - `examines_steps`: whether each step must be checked for saved times.
    """

    inside = True  # whether saved times may be inside a step

    def __init__(self, times: np.ndarray, batch: Batch, signs: np.ndarray, has_events: bool = False):
        self.count = times.shape[-1]
        start, end = batch.start[:, None], batch.end[:, None]
        self.initial = (times == start) | (start == end)
        at_end = (times == end) & ~self.initial
        self.examines_steps = not (self.initial.all() if has_events else (self.initial | at_end).all())
        self.final = at_end if not self.examines_steps else np.zeros_like(at_end)
        self._signed_times: Array = None
        if self.examines_steps:
            common = times.ndim == 1 and (signs == signs[:1]).all()
            rows = times * signs[0] if common else np.broadcast_to(times, at_end.shape) * signs[:, None]
            xp: Any = arrays_of(batch.u0)
            self._signed_times = xp.to_device(np.ascontiguousarray(rows, float))

    def passed(self, ids: Array, t: Array) -> Array:
        """Return the number of saved times up to and including t, shape (n,), of the trajectories `ids`."""
        if self._signed_times.ndim == 1:
            return np.searchsorted(self._signed_times, t, side="right")
        return np.sum(self._signed_times[ids] <= t[:, None], axis=1)

    def due(self, ids: Array, place: Array, count: Array, most: int, t: Array, h: Array, t_new: Array) -> Due:
        """Return `count` slots and times per column for a step, with slots from `place` on; `most`: the largest count."""
        xp: Any = arrays_of(t)
        k = xp.arange(most)[:, None]
        used = k < count
        slot = np.where(used, place + k, self.count)
        index = np.minimum(slot, self.count - 1)  # the additional slot has no time; any valid index will do
        times = self._signed_times[index] if self._signed_times.ndim == 1 else self._signed_times[ids, index]
        at_end = used & (times == t_new)
        x = np.where(used, times - t, 0.0) / np.where(h > 0.0, h, 1.0)  # ended columns have steps of size zero
        return Due(slot, x, at_end)

    def groups(self, most: int, entries: int) -> list[slice]:
        """Divide ``range(most)`` into slices of limited size; `entries`: the number of entries of one state array."""
        width = max(1, _BLOCK // max(1, entries))
        return [slice(a, min(a + width, most)) for a in range(0, most, width)]


class EveryStep:
    """The counterpart of `SaveTimes` for ``save_everystep=True``; the number of slots is known only after the solve."""

    examines_steps, inside = True, False

    def __init__(self, batch: Batch):
        self._batch, self.count = batch, 1
        self._step_ends: list[tuple[Array, Array, Array, Array, Array]] = []

    @property
    def initial(self) -> np.ndarray:
        """Whether each value is an initial state: bool, shape (N, count), on the host."""
        first = np.zeros((self._batch.size, self.count), bool)
        first[:, 0] = True
        return first

    @property
    def final(self) -> np.ndarray:
        """Whether each value is copied from the final state: no, since each value is saved after its step."""
        return np.zeros((self._batch.size, self.count), bool)

    def note(self, step: Step, t: Array, u: Array) -> None:
        """Store references to the times and states after a step."""
        self._step_ends.append((step.ids, step.number, step.accepted, t, u))

    def due(self, ids: Array, place: Array, count: Array, most: int, t: Array, h: Array, t_new: Array) -> Due:
        """Return the values saved in a step: its end, if it was accepted."""
        accepted = count > 0
        slot = np.where(accepted, place + 1, self.count)
        return Due(slot[None], np.zeros_like(t)[None], accepted[None])

    def collected(self, start: Array, most: int) -> tuple[Array, Array]:
        """Return the saved states, shape (N, most + 1, d), and their times, padded with NaN.

        `most`: the largest number of accepted steps. `start`, shape (N,), and the returned times contain the factor
        `Record.signs`.
        """
        xp: Any = arrays_of(start)
        u0, self.count = self._batch.u0, most + 1
        # The states of rejected steps are written to an additional slot.
        u = xp.full((self._batch.size, most + 2, len(u0)), np.nan, u0.dtype)
        times = xp.full((self._batch.size, most + 2), np.nan, float)
        u[:, 0], times[:, 0] = u0.T, start
        for ids, number, accepted, t, states in self._step_ends:
            slot = np.where(accepted, number + 1, most + 1)
            u[ids, slot], times[ids, slot] = states.T, t
        self._step_ends.clear()
        return xp.contiguous(u[:, : most + 1]), xp.contiguous(times[:, : most + 1])
