"""Saved values by the steps in which they lie: where a sweep over the steps meets them.

Inside a step the saved value is u + h Σ w_i(x) k_i, with x the part of the step that is gone there. The last stage k is
the first one of the next step, so its share belongs there; in a trajectory's last step nothing follows, and the stage is
computed for it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.interpolant import stage_weights
from mpiad.ensemble.run import Run
from mpiad.ensemble.tableaus import Tableau
from mpiad.ensemble.walk import Walk

__all__ = ["Entries", "Schedule", "Seeds", "entries_of", "scheduled"]


class Seeds(NamedTuple):
    """Cotangents of the results.

    Parameters
    ----------
    end : array, shape (d, N)
    saved : array, shape (N, n_saved, d), or None
        None where all are zero.
    reached : array, shape (N,), or None
        Of the times at which trajectories ended.
    crossed : array, shape (m,), or None
        Of the times of events on the way; None where all are zero.
    """

    end: Array
    saved: Array | None = None
    reached: Array | None = None
    crossed: Array | None = None

    def share(self, rows: slice) -> Seeds:
        """Return those of some of the trajectories, where there are no events."""
        parts = (None if part is None else part[rows] for part in (self.saved, self.reached))
        return Seeds(self.end[:, rows], *parts)


class Entries(NamedTuple):
    """Values that are saved in some step of some trajectory.

    Parameters
    ----------
    ids, place : array of int, shape (m,)
        The trajectories, and which of their saved values this is.
    number : array of int, shape (m,)
        The step in which it lies, from 0.
    x : array, shape (m,)
        The part of the step that is gone; 1 at its end.
    h : array, shape (m,)
        The step.
    """

    ids: Array
    place: Array
    number: Array
    x: Array
    h: Array

    def take(self, chosen: Array) -> Entries:
        """Return some of them."""
        return Entries(*(array[chosen] for array in self))


def entries_of(run: Run) -> Entries:
    """Return all values that the trajectories of a run save on their way."""
    ids, place = np.nonzero(run.save_step >= 0)
    number = run.save_step[ids, place].astype(np.int64)
    t, h = np.empty(len(ids)), np.empty(len(ids))
    for first, steps in run.shares:
        mine = (ids >= first) & (ids < first + len(steps.counts))
        t[mine], h[mine] = steps.times(ids[mine] - first, number[mine])
    due = run.due(ids, place)
    if due is None:
        return Entries(ids, place, number, np.ones(len(ids)), h)
    # The last step ends there by decree, and t + h may miss it by rounding.
    last = (number == run.counts[ids] - 1) & (due == run.batch.end[ids])
    x = np.where(last | (due == t + h), 1.0, (due - t) / h)
    return Entries(ids, place, number, x, h)


def scheduled(run: Run, entries: Entries, walk: Walk, ids: Array) -> Schedule:
    """Return when a walk over the steps of the trajectories `ids` meets their entries, which are ordered by trajectory."""
    starts = np.searchsorted(entries.ids, ids)
    counts = np.searchsorted(entries.ids, ids, side="right") - starts
    column = np.repeat(np.arange(len(ids)), counts)
    # A trajectory's entries are neighbours: from its first on, as many as it has.
    chosen = np.arange(len(column)) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
    return Schedule(entries.take(chosen), column, walk, run.tableau)


class Schedule:
    """The entries of a block of columns, by the visits of a walk over its steps.

    Parameters
    ----------
    entries : Entries
    column : array of int, shape (m,)
        Each entry's column in the block.
    walk : Walk
    tableau : Tableau

    Attributes
    ----------
    at_end, inside, handed_on : dict
        From visits to lists of arrays of entries, in none of which a column comes twice: those saved at the end of the
        step, those inside it, and those inside the step before, whose last stage is this one's first.
    final : array of bool, shape (m,)
        Whether the step is its trajectory's last.
    weights : list of array, shape (m,)
        For each stage.
    """

    def __init__(self, entries: Entries, column: Array, walk: Walk, tableau: Tableau):
        self.ids, self.column, self.place, self.x, self.h = entries.ids, column, entries.place, entries.x, entries.h
        self.final = entries.number == walk.counts[column] - 1
        inside = entries.x != 1
        visit = walk.visit_of(column, entries.number)
        following = walk.visit_of(column, np.where(self.final, entries.number, entries.number + 1))
        self.at_end = _grouped(~inside, visit, column)
        self.inside = _grouped(inside, visit, column)
        self.handed_on = _grouped(inside & ~self.final, following, column)
        self.weights = stage_weights(tableau, entries.x)


def _grouped(chosen: Array, visit: Array, column: Array) -> dict[int, list[Array]]:
    """Return the chosen entries, for each visit in lists in which no column comes twice."""
    order = np.flatnonzero(chosen)
    order = order[np.lexsort((column[order], visit[order]))]
    v, c = visit[order], column[order]
    fresh = np.ones(len(order), bool)
    fresh[1:] = (v[1:] != v[:-1]) | (c[1:] != c[:-1])
    starts = np.flatnonzero(fresh)
    # How many of the same visit and column come before. Of equal turns no column comes twice: += by index adds once to
    # each.
    turn = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
    again = np.lexsort((c, turn, v))
    order, v, turn = order[again], v[again], turn[again]
    cuts = np.flatnonzero((v[1:] != v[:-1]) | (turn[1:] != turn[:-1])) + 1
    groups: dict[int, list[Array]] = {}
    for members in np.split(order, cuts):
        if len(members):
            groups.setdefault(int(visit[members[0]]), []).append(members)
    return groups
