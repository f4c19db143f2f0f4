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
from mpiad.ensemble.step_sweep import Saved, SavedInStep

if TYPE_CHECKING:
    from mpiad.ensemble.sorted_sweep import SortedSweep


def starts_of_runs(*keys: Array) -> Array:
    """Return where runs of neighbours that are equal in all keys begin."""
    fresh = np.ones(len(keys[0]), bool)
    fresh[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return np.flatnonzero(fresh)


def grouped(visits: Array, kinds: Array, *arrays: Array, rows: Array | None = None) -> dict[int, list[tuple[Array, ...]]]:
    """Return for each visit the entries of arrays that belong to it, kind by kind; the last axis of these counts them.

    `rows`: which entries the visits and kinds are of; all by default.
    """
    order = np.lexsort((kinds, visits))
    own = order if rows is None else rows[order]
    v, taken = visits[order], [np.take(array, own, axis=-1) for array in arrays]
    cuts = [*starts_of_runs(v, kinds[order]).tolist(), len(order)]
    found: dict[int, list[tuple[Array, ...]]] = {}
    for start, stop in zip(cuts, cuts[1:]):
        found.setdefault(int(v[start]), []).append(tuple(array[..., start:stop] for array in taken))
    return found


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
    """The entries of a block of columns, by the visits of a sweep over its steps; `column` is that of each in the block."""

    def __init__(self, entries: Entries, column: Array, sweep: SortedSweep, coefficients: Coefficients):
        final, inside = sweep.is_last(column, entries.number), entries.x != 1
        visit = sweep.visit_of(column, entries.number)
        following = sweep.visit_of(column, np.where(final, entries.number, entries.number + 1))
        weights, own = coefficients.weights(entries.x), (entries.ids, entries.place, column)
        step = entries.x, entries.h
        self._at_end = _by_visits(~inside, visit, column, *own)
        self._inside = _by_visits(inside, visit, column, *own, *step, weights, final)
        self._handed_on = _by_visits(inside & ~final, following, column, *own, *step, weights[-1:])

    def at_visit(self, visit: int) -> SavedInStep:
        """Return what is saved in the step of a visit, by its number."""
        parts = (groups.get(visit, ()) for groups in (self._at_end, self._inside, self._handed_on))
        return SavedInStep._make([Saved(*own) for own in part] for part in parts)


def _by_visits(chosen: Array, visit: Array, column: Array, *arrays: Array) -> dict[int, list[tuple[Array, ...]]]:
    """Return chosen entries, which are ordered by column, for each visit in groups in which no column comes twice."""
    order = np.flatnonzero(chosen)
    order = order[np.argsort(visit[order], kind="stable")]
    v, starts = visit[order], starts_of_runs(visit[order], column[order])
    # How many of the same visit and column come before. Of equal turns no column comes twice: += by index adds once.
    turn = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
    return grouped(v, turn, *arrays, rows=order)
