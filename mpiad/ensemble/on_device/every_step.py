"""All accepted steps as saved states: how many there are is known at the end, so they are put to their places then."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.on_device.saving import Due
from mpiad.ensemble.on_device.working_set import WorkingSet
from mpiad.transport.device_arrays import arrays_of

__all__ = ["EveryStep"]


class EveryStep:
    """As `SaveTimes`: the start, and the end of each accepted step.

    Parameters
    ----------
    batch : Batch

    Attributes
    ----------
    count : int
        Of the longest trajectory, once all have ended.
    looks, inside : bool
        Whether each step has something to save, and whether anything lies inside one.
    """

    looks, inside = True, False

    def __init__(self, batch: Batch):
        self._batch, self.count = batch, 1
        self._taken: list[tuple[Array, Array, Array, Array, Array]] = []

    @property
    def initial(self) -> np.ndarray:
        """Return which are saved before the first step: array of bool, shape (N, count), on the host."""
        first = np.zeros((self._batch.size, self.count), bool)
        first[:, 0] = True
        return first

    @property
    def final(self) -> np.ndarray:
        """Return which are saved with the final state: none, since each belongs to its step."""
        return np.zeros((self._batch.size, self.count), bool)

    def note(self, now: WorkingSet, moved: WorkingSet, accepted: Array) -> None:
        """Keep the states after a round, which the next one has anyway."""
        self._taken.append((now.ids, now.number, accepted, moved.t, moved.u))

    def due(self, ids: Array, place: Array, count: Array, most: int, t: Array, h: Array, t_new: Array) -> Due:
        """Return what is saved in a step: its end, where it was accepted."""
        accepted = count > 0
        slot = np.where(accepted, place + 1, self.count)
        return Due(slot[None], np.zeros_like(t)[None], accepted[None])

    def collected(self, start: Array, most: int) -> tuple[Array, Array]:
        """Return the saved states, shape (N, most + 1, d), and their times in the direction of the solve, filled with NaN.

        Parameters
        ----------
        start : array, shape (N,)
            On the device, in the direction of the solve.
        most : int
            Steps of the longest trajectory.
        """
        home: Any = arrays_of(start)
        u0, self.count = self._batch.u0, most + 1
        # A place more, for steps that weren't accepted.
        u = home.full((self._batch.size, most + 2, len(u0)), np.nan, u0.dtype)
        times = home.full((self._batch.size, most + 2), np.nan, float)
        u[:, 0], times[:, 0] = u0.T, start
        for ids, number, accepted, t, states in self._taken:
            slot = np.where(accepted, number + 1, most + 1)
            u[ids, slot], times[ids, slot] = states.T, t
        self._taken.clear()
        return home.contiguous(u[:, : most + 1]), home.contiguous(times[:, : most + 1])
