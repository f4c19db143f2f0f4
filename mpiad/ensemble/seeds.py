"""Saved values by the steps in which they lie: where a sweep over the steps meets them.

Inside a step the saved value is u + h Σ w_i(x) k_i, with x the part of the step that is gone there. The last stage k is
the first one of the next step, so its share belongs there; in a trajectory's last step nothing follows, or an event that
changes the state, and the stage is computed for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.coefficients import Coefficients
from mpiad.ensemble.step_sweep import Saved

if TYPE_CHECKING:
    from mpiad.ensemble.sorted_sweep import SortedSweep


def starts_of_runs(*keys: Array) -> Array:
    """Return where runs of neighbours that are equal in all keys begin."""
    fresh = np.ones(len(keys[0]), bool)
    fresh[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return np.flatnonzero(fresh)


class Seeds(NamedTuple):
    """Cotangents of the results."""

    end: Array  # shape (d, N)
    saved: Array | None = None  # shape (N, n_saved, d), or None; none where all are zero
    reached: Array | None = None  # shape (N,), or None; of the times at which trajectories ended
    crossed: Array | None = None  # shape (m,), or None; of the times of events on the way; None where all are zero

    def share(self, rows: slice) -> Seeds:
        """Return those of some of the trajectories, where there are no events."""
        parts = (None if part is None else part[rows] for part in (self.saved, self.reached))
        return Seeds(self.end[:, rows], *parts)


class Entries(NamedTuple):
    """Values that are saved in some step of some trajectory, ordered by trajectory."""

    # `ids`, `place`: int, shape (m,). The trajectories, and which of their saved values this is.
    ids: Array
    place: Array
    number: Array  # int, shape (m,); the step in which it lies, from 0
    x: Array  # shape (m,); the part of the step that is gone; 1 at its end
    h: Array  # shape (m,); the step

    def scheduled(self, sweep: SortedSweep, coefficients: Coefficients) -> Schedule:
        """Return when a sweep over sorted steps meets those of its trajectories."""
        starts = np.searchsorted(self.ids, sweep.ids)
        counts = np.searchsorted(self.ids, sweep.ids, side="right") - starts
        column = np.repeat(np.arange(len(sweep.ids)), counts)
        # A trajectory's entries are neighbours: from its first on, as many as it has.
        chosen = np.arange(len(column)) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
        return Schedule(Entries(*(array[chosen] for array in self)), column, sweep, coefficients)


class Schedule:
    """The entries of a block of columns, by the visits of a sweep over its steps; `column` is that of each in the block.

    By a visit's number `at_end` returns what is saved at the end of the step, `inside` what is saved inside it, and
    `handed_on` what is saved inside the step before, with the weight of its last stage.
    """

    def __init__(self, entries: Entries, column: Array, sweep: SortedSweep, coefficients: Coefficients):
        final, inside = sweep.is_last(column, entries.number), entries.x != 1
        visit = sweep.visit_of(column, entries.number)
        following = sweep.visit_of(column, np.where(final, entries.number, entries.number + 1))
        weights = coefficients.weights(entries.x)
        self.at_end = _Grouped(entries, column, visit, ~inside).at_visit
        self.inside = _Grouped(entries, column, visit, inside, weights, final).at_visit
        self.handed_on = _Grouped(entries, column, following, inside & ~final, weights[-1:]).at_visit


class _Grouped:
    """Chosen entries in the order of visits, each visit's in groups in which no column comes twice."""

    def __init__(
        self, entries: Entries, column: Array, visit: Array, chosen: Array, weights: Array | None = None,
        whole: Array | None = None,
    ):  # fmt: skip
        order = np.flatnonzero(chosen)
        order = order[np.lexsort((column[order], visit[order]))]
        v, c = visit[order], column[order]
        starts = starts_of_runs(v, c)
        # How many of the same visit and column come before. Of equal turns no column comes twice: += by index adds once to
        # each.
        turn = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
        again = np.lexsort((c, turn, v))
        order, v, turn = order[again], v[again], turn[again]
        cuts = [*starts_of_runs(v, turn).tolist(), len(order)]
        # All arrays in this order, so that a group is a slice of each.
        self._ids, self._place, self._column = entries.ids[order], entries.place[order], column[order]
        self._x, self._h = entries.x[order], entries.h[order]
        self._weights = None if weights is None else weights[:, order]
        self._whole = None if whole is None else whole[order]
        self._groups: dict[int, list[slice]] = {}
        for start, stop in zip(cuts, cuts[1:]):
            self._groups.setdefault(int(v[start]), []).append(slice(start, stop))

    def at_visit(self, visit: int) -> list[Saved]:
        """Return the groups of a visit."""
        return [self._saved(own) for own in self._groups.get(visit, ())]

    def _saved(self, own: slice) -> Saved:
        where = self._ids[own], self._place[own], self._column[own]
        if self._weights is None:
            return Saved(*where)
        whole = None if self._whole is None else self._whole[own]
        return Saved(*where, self._x[own], self._h[own], self._weights[:, own], whole)
