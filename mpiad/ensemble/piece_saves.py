"""What is saved of trajectories that are solved in pieces: which saved times a piece has, and where its states belong."""

from __future__ import annotations

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.outcome import Outcome
from mpiad.ensemble.run import INITIAL, NOWHERE

__all__ = ["PieceSaves"]


class PieceSaves:
    """The saved states of all trajectories.

    - `batch`: of the whole solve.
    - `saveat`, of shape (n_saved,) or (N, n_saved).
    - `signs`, of shape (N,): -1 for trajectories that go backwards.
    - `states`, of shape (N, n_saved, d).
    - `steps`, int, shape (N, n_saved): in which of all steps each lies, where that is recorded; INITIAL before the first
      one, NOWHERE where it wasn't reached.
    """

    def __init__(self, batch: Batch, saveat: Array, signs: Array):
        self._times, self._signs, self._backward = np.atleast_2d(saveat), signs, bool((signs < 0).any())
        self.states = np.full((batch.size, self._times.shape[1], len(batch.u0)), np.nan, batch.u0.dtype)
        self.steps = np.full(self.states.shape[:2], NOWHERE)
        self._place = np.zeros(batch.size, int)

    def times(self, ids: Array) -> Array:
        """Return all saved times of some trajectories, as `Settings` have them."""
        return self._times[0] if len(self._times) == 1 else self._times[ids]

    def places(self, ids: Array, stop: Array) -> Array:
        """Return which saved times come until the pieces end, at the latest, shape (n, m); -1 where there are no more."""
        first, after = self._place[ids], self._count(ids, stop, beyond=True)
        places = first[:, None] + np.arange(max(0, int((after - first).max(initial=0))))
        return np.where(places < after[:, None], places, -1)

    def all_places(self, ids: Array) -> Array:
        """Return all saved times that aren't behind, shape (N, n_saved); -1 where they are."""
        every = np.arange(self._times.shape[1])
        return np.where(every >= self._place[ids][:, None], every, -1)

    def due(self, ids: Array, places: Array) -> Array:
        """Return the times of such places, infinitely far where there are none."""
        times = self._times[0 if len(self._times) == 1 else ids[:, None], np.maximum(places, 0)]
        return np.where(places < 0, self._signs[ids][:, None] * np.inf, times)

    def take(self, ids: Array, outcome: Outcome, places: Array, batch: Batch, begun: Array) -> None:
        """Take what pieces saved, before which `begun` steps were made, shape (n,)."""
        if not places.size:
            return
        reached = self._count(ids, outcome.t_reached, beyond=True)
        column, place = np.nonzero((places >= 0) & (places < reached[:, None]))
        whole, still = places[column, place], (batch.start == batch.end)[column]
        values = np.where(still[:, None], batch.u0.T[column], outcome.saved[column, place])  # type: ignore[index]
        self.states[ids[column], whole] = values
        if outcome.save_step is not None:
            number, before = outcome.save_step[column, place], begun[column]
            first = still | (number == INITIAL)  # in the next step, at its start, where one comes before
            self.steps[ids[column], whole] = np.where(first, np.where(before > 0, before, INITIAL), before + number)
        # What is saved at an event will be what is after it.
        self._place[ids] = self._count(ids, outcome.t_reached, beyond=False)

    def _count(self, ids: Array, t: Array, beyond: bool) -> Array:
        """Return how many saved times lie before t, or with `beyond` there too."""
        times = self._times
        if len(times) == 1 and not self._backward:
            return np.searchsorted(times[0], t, "right" if beyond else "left")
        signs = self._signs[ids]
        ahead = signs[:, None] * times[0 if len(times) == 1 else ids]
        passed = ahead <= (signs * t)[:, None] if beyond else ahead < (signs * t)[:, None]
        return np.count_nonzero(passed, axis=1)
