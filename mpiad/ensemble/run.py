"""A solve that is to be differentiated: what it started from, and the steps that it took."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.field import Field
from mpiad.ensemble.outcome import Outcome
from mpiad.ensemble.record import Steps
from mpiad.ensemble.retcodes import ReturnCode
from mpiad.ensemble.settings import Settings
from mpiad.ensemble.walk import Walk

__all__ = ["FINAL", "INITIAL", "NOWHERE", "Crossings", "Run"]

# Where saved values lie that lie in no step.
INITIAL, NOWHERE, FINAL = -1, -2, -3


class Crossings(NamedTuple):
    """Events on the way of trajectories.

    Parameters
    ----------
    ids, order, event, number : array of int, shape (m,)
        The trajectories, which of the events of each this is, which event, and in which step, from 0.
    x, time : array, shape (m,)
        The part of the step that is gone there, and when.
    """

    ids: Array
    order: Array
    event: Array
    number: Array
    x: Array
    time: Array

    def by_visits(self, walk: Walk, ids: Array) -> dict[int, list[tuple[Array, Array]]]:
        """Return by the visits of a walk along trajectories the crossings and their columns, event by event."""
        found: dict[int, list[tuple[Array, Array]]] = {}
        order = np.argsort(ids)
        place = np.minimum(np.searchsorted(ids, self.ids, sorter=order), max(0, len(ids) - 1))
        mine = np.flatnonzero(ids[order[place]] == self.ids) if len(ids) else np.empty(0, int)
        columns = order[place[mine]]
        visits = walk.visit_of(columns, self.number[mine])
        for v, event in sorted(set(zip(visits.tolist(), self.event[mine].tolist()))):
            chosen = (visits == v) & (self.event[mine] == event)
            found.setdefault(v, []).append((mine[chosen], columns[chosen]))
        return found


class Run:
    """A solve and its record. Everything here is a plain array.

    Parameters
    ----------
    batch : Batch
    settings : Settings
    outcome : Outcome

    Attributes
    ----------
    live : array of bool, shape (N,)
        Which trajectories didn't fail.
    """

    def __init__(self, batch: Batch, settings: Settings, outcome: Outcome):
        self.batch, self.settings, self.outcome = batch, settings, outcome
        self.tableau, self.field = settings.alg.tableau, Field(batch)
        self.live = ~outcome.failed

    @cached_property
    def terminated(self) -> Array:
        """Which trajectories an event ended, array of bool, shape (N,)."""
        return self.outcome.codes == ReturnCode.Terminated.code

    @cached_property
    def counts(self) -> Array:
        """Steps to differentiate, array of int, shape (N,)."""
        return np.where(self.live, self.outcome.naccept, 0)

    @cached_property
    def shares(self) -> list[tuple[int, Steps]]:
        """For each share its first trajectory and the steps of those that didn't fail."""
        return [(first, self._survivors(first, steps)) for first, steps in self.outcome.recorded()]

    def _survivors(self, first: int, steps: Steps) -> Steps:
        live = self.live[first : first + len(steps.counts)]
        # What fails drops out; its steps may have led to where f overflows.
        return steps if live.all() else steps.chosen(live)

    @cached_property
    def save_step(self) -> Array:
        """In which step each saved value lies, shape (N, n_saved), or INITIAL, NOWHERE (not reached, or failed), FINAL."""
        live, count = self.live[:, None], self.counts[:, None]
        if self.settings.saveat is not None:
            still = (self.batch.start == self.batch.end)[:, None]
            return np.where(live, np.where(still, INITIAL, np.asarray(self.outcome.save_step)), NOWHERE)
        # Every step is saved at its end.
        number = np.arange(-1, int(self.outcome.naccept.max(initial=0)))
        found = np.where(number == count - 1, FINAL, np.where(number < count, number, NOWHERE))
        found[:, 0] = INITIAL
        return np.where(live, found, NOWHERE)

    @cached_property
    def crossings(self) -> Crossings:
        """All events on the way of trajectories that didn't fail, but for those that ended one."""
        outcome, found = self.outcome, []
        for i in sorted(outcome.event_times):
            pairs = zip(outcome.event_times[i], outcome.event_places[i])
            for order, ((event, time), (number, x)) in enumerate(pairs):
                if self.live[i] and not self.settings.events[event].terminal:
                    found.append((i, order, event, number, x, time))
        columns = [np.array(column) for column in zip(*found)] or [np.empty(0, int)] * 4 + [np.empty(0)] * 2
        return Crossings(*columns)

    @cached_property
    def ending_events(self) -> Array:
        """Which event ended each trajectory, -1 where none did, shape (N,)."""
        found = np.full(self.batch.size, -1)
        for i in np.flatnonzero(self.terminated):
            happened = [number for number, _ in self.outcome.event_times[int(i)] if self.settings.events[number].terminal]
            found[i] = happened[-1]
        return found

    def due(self, ids: Array, place: Array) -> Array | None:
        """Return the times of saved values; None where every step is saved."""
        times = self.settings.saveat
        if times is None:
            return None
        return times[place] if times.ndim == 1 else times[ids, place]

    def doubled(self, width: int) -> Any:
        """Return with which columns f is called: all, and a single one twice."""
        return np.zeros(2, int) if width == 1 and not self.field.one_by_one else slice(0, width)

    def columns(self, leaves: Sequence[Any], ids: Any) -> list[Any]:
        """Return the leaves of the parameters of some trajectories."""
        return [leaf[..., ids] if varies else leaf for leaf, varies in zip(leaves, self.batch.p.varies)]
