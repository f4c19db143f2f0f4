"""Events that changed the state, in the record of a solve: after which step each was, and what it changed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.seeds import grouped
from mpiad.ensemble.sorted_sweep import columns_of
from mpiad.ensemble.step_sweep import Columns

if TYPE_CHECKING:
    from mpiad.ensemble.sorted_sweep import SortedSweep

FOUND = -1


class Jump(NamedTuple):
    """What one event did to some trajectories at once."""

    # `ids`, `number`: int, shape (n,); the trajectories, and how many steps each had made.
    ids: Array
    number: Array
    event: int | Array
    slot: Array  # int, shape (n,); at which given times; FOUND where a condition had vanished
    time: Array  # shape (n,)
    # `before`, `after`: shape (d, n).
    before: Array
    after: Array

    def chosen(self, mask: Array) -> Jump:
        """Return what it did to some of them."""
        ids, number, event, slot, time, before, after = self
        event = event[mask] if isinstance(event, np.ndarray) else event
        return Jump(ids[mask], number[mask], event, slot[mask], time[mask], before[:, mask], after[:, mask])


class Jumps:
    """All jumps of a solve, trajectory by trajectory, those of each in their order.

    Its arrays are those of `Jump`: `before` and `after` of shape (d, m), the others of shape (m,).
    """

    def __init__(self, jumps: Sequence[Jump], live: Array):
        parts = zip(*(jump._replace(event=0 * jump.ids + jump.event) for jump in jumps))
        joined = [part[0] if len(jumps) == 1 else np.concatenate(part, axis=-1) for part in map(list, parts)]
        ids = joined[0]
        if (ids[1:] < ids[:-1]).any() or not live.all():
            order = np.argsort(ids, kind="stable")
            order = order[live[ids[order]]]
            joined = [x[..., order] for x in joined]
        self.ids, self.number, self.event, self.slot, self.time, self.before, self.after = joined

    @cached_property
    def turn(self) -> Array:
        """How many others of the trajectory came after the same step."""
        first = np.ones(len(self.ids), bool)
        first[1:] = (self.ids[1:] != self.ids[:-1]) | (self.number[1:] != self.number[:-1])
        place = np.arange(len(first))
        return place - np.maximum.accumulate(np.where(first, place, 0))

    @cached_property
    def kinds(self) -> list[tuple[int, Columns]]:
        """Each event, and which jumps are of it."""
        events = np.flatnonzero(np.bincount(self.event)).tolist()
        # Of a single one without a copy of all.
        return [(e, np.flatnonzero(self.event == e) if len(events) > 1 else slice(None)) for e in events]

    @cached_property
    def still(self) -> Array:
        """Whether no step ends at a jump, since one before was at the same time, or the start."""
        return (self.turn > 0) | (self.number == 0)

    @cached_property
    def lengthens(self) -> Array:
        """Whether the step before ends at the given time of the jump, whenever that is."""
        return ~self.still & (self.slot != FOUND)

    def bounds(self, count: int) -> Array:
        """Return which is the first of each of `count` trajectories, and behind them how many there are, (count + 1,)."""
        return np.searchsorted(self.ids, np.arange(count + 1))

    def before_steps(self) -> Jumps:
        """Return those that come before the first step."""
        mask = self.number == 0
        own = Jump(self.ids, self.number, self.event, self.slot, self.time, self.before, self.after).chosen(mask)
        return Jumps([own], np.ones(int(own.ids.max(initial=-1)) + 1, bool))

    def at_start(self) -> list[Array]:
        """Return which come before the first step, one of each trajectory after the other."""
        rows = np.flatnonzero(self.number == 0)
        if not rows.size:
            return []
        return [rows[self.turn[rows] == turn] for turn in range(int(self.turn[rows].max()) + 1)]

    def by_visits(self, sweep: SortedSweep) -> dict[int, list[tuple[Array, Array]]]:
        """Return by the visits of a sweep which come after its step, with their columns; one of each column at a time."""
        mine, columns = columns_of(sweep, np.where(self.number > 0, self.ids, -1))
        visits = sweep.visit_of(columns, self.number[mine] - 1)
        return grouped(visits, self.turn[mine], mine, columns)
