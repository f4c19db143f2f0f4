"""Saved values, sorted by the steps that contain them, as a sweep over the steps needs them.

Inside a step the saved value is u + h Σ w_i(x) k_i at the fraction x of the step. The last stage k is the first one of the
next step, so its contribution is added there; after a trajectory's last step no step follows, or after an event that
changes the state a different one, and the stage is computed separately.
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
    """Return the first indices of runs of adjacent entries that are equal in all keys."""
    fresh = np.ones(len(keys[0]), bool)
    fresh[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return np.flatnonzero(fresh)


def grouped(visits: Array, kinds: Array, *arrays: Array, rows: Array | None = None) -> dict[int, list[tuple[Array, ...]]]:
    """Return for each visit its entries of arrays, grouped by kind; the last axis of the arrays counts them.

    `rows`: the entries that the visits and kinds belong to; all by default.
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
    saved: Array | None = None  # shape (N, n_saved, d), or None if all are zero
    reached: Array | None = None  # shape (N,), or None; of the times at which trajectories ended
    crossed: Array | None = None  # shape (m,), or None if all are zero; of the times of non-terminal events

    def share(self, rows: slice) -> Seeds:
        """Return those of some of the trajectories, for a solve without events."""
        parts = (None if part is None else part[rows] for part in (self.saved, self.reached))
        return Seeds(self.end[:, rows], *parts)


class Entries(NamedTuple):
    """Values that are saved in some step of some trajectory, sorted by trajectory."""

    # `ids`, `place`: int, shape (m,). The trajectories, and the indices of the values among their saved ones.
    ids: Array
    place: Array
    number: Array  # int, shape (m,); the step that contains it, from 0
    x: Array  # shape (m,); the fraction of the step; 1 at its end
    h: Array  # shape (m,); the size of the step

    def scheduled(self, sweep: SortedSweep, coefficients: Coefficients) -> Schedule:
        """Return the entries of a sweep's trajectories by its visits."""
        starts = np.searchsorted(self.ids, sweep.ids)
        counts = np.searchsorted(self.ids, sweep.ids, side="right") - starts
        column = np.repeat(np.arange(len(sweep.ids)), counts)
        # A trajectory's entries are adjacent: `counts` of them from the first on.
        chosen = np.arange(len(column)) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
        return Schedule(Entries(*(array[chosen] for array in self)), column, sweep, coefficients)


class Schedule:
    """The entries of a block of columns, by the visits of a sweep over its steps; `column`: their columns in the block."""

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
        """Return the values saved in the step of a visit, given its number."""
        parts = (groups.get(visit, ()) for groups in (self._at_end, self._inside, self._handed_on))
        return SavedInStep._make([Saved(*own) for own in part] for part in parts)


def _by_visits(chosen: Array, visit: Array, column: Array, *arrays: Array) -> dict[int, list[tuple[Array, ...]]]:
    """Return chosen entries, which are sorted by column, for each visit in groups with at most one per column."""
    order = np.flatnonzero(chosen)
    order = order[np.argsort(visit[order], kind="stable")]
    v, starts = visit[order], starts_of_runs(visit[order], column[order])
    # The number of earlier entries of the same visit and column. No column occurs twice with equal turns: += by index adds
    # once.
    turn = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
    return grouped(v, turn, *arrays, rows=order)
