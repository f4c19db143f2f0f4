"""Events that changed the state, in the record of a solve: after which step each was, and what it changed."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.sorted_sweep import columns_of, grouped

if TYPE_CHECKING:
    from mpiad.ensemble.sorted_sweep import SortedSweep

__all__ = ["FOUND", "Jump", "Jumps"]

FOUND = -1


class Jump(NamedTuple):
    """What one event did to some trajectories at once.

    Parameters
    ----------
    ids, number : array of int, shape (n,)
        The trajectories, and how many steps each had made.
    event : int
    slot : array of int, shape (n,)
        At which given times; FOUND where a condition had vanished.
    time : array, shape (n,)
    before, after : array, shape (d, n)
    """

    ids: Array
    number: Array
    event: int
    slot: Array
    time: Array
    before: Array
    after: Array


class Jumps:
    """All jumps of a solve, trajectory by trajectory, those of each in their order.

    Attributes
    ----------
    ids, number, event, slot : array of int, shape (m,)
    time : array, shape (m,)
    before, after : array, shape (d, m)
        All as in `Jump`.
    turn : array of int, shape (m,)
        How many others of the trajectory came after the same step.
    """

    def __init__(self, jumps: list[Jump], live: Array):
        joined = [np.concatenate(parts, axis=-1) for parts in zip(*(j._replace(event=0 * j.ids + j.event) for j in jumps))]
        order = np.argsort(joined[0], kind="stable")
        order = order[live[joined[0][order]]]
        self.ids, self.number, self.event, self.slot, self.time, self.before, self.after = (x[..., order] for x in joined)
        first = np.ones(len(self.ids), bool)
        first[1:] = (self.ids[1:] != self.ids[:-1]) | (self.number[1:] != self.number[:-1])
        place = np.arange(len(first))
        self.turn = place - np.maximum.accumulate(np.where(first, place, 0))

    @cached_property
    def still(self) -> Array:
        """Whether no step ends at a jump, since one before was at the same time, or the start."""
        return (self.turn > 0) | (self.number == 0)

    @cached_property
    def lengthens(self) -> Array:
        """Whether the step before ends at the given time of the jump, whenever that is."""
        return ~self.still & (self.slot != FOUND)

    def at_start(self) -> list[Array]:
        """Return which come before the first step, one of each trajectory after the other."""
        rows = np.flatnonzero(self.number == 0)
        return [rows[self.turn[rows] == turn] for turn in range(int(self.turn[rows].max(initial=-1)) + 1)]

    def by_visits(self, sweep: SortedSweep) -> dict[int, list[tuple[Array, Array]]]:
        """Return by the visits of a sweep which come after its step, with their columns; one of each column at a time."""
        mine, columns = columns_of(sweep, np.where(self.number > 0, self.ids, -1))
        visits = sweep.visit_of(columns, self.number[mine] - 1)
        return {v: [(mine[own], columns[own]) for own in groups] for v, groups in grouped(visits, self.turn[mine]).items()}
