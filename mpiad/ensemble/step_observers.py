"""Observers of every step of the working set: the record, events, saved times; in this order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.ensemble.acting_events import NONE, ActingEvents, Resumed
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.coefficients import Coefficients
from mpiad.ensemble.events import EventWatch, in_order
from mpiad.ensemble.initialization import Entrants, Initialization, Joint
from mpiad.ensemble.outcome import Outcome
from mpiad.ensemble.record import Log, Step
from mpiad.ensemble.saving import SavePoints
from mpiad.ensemble.settings import Settings


class Stopped(NamedTuple):
    """Which columns' steps end at an event, each array int of shape (m,)."""

    terminated: Array = NONE  # those that it ends
    # Those that are held, until events act on them by `StepObservers.release`: where conditions vanish, and at given times.
    at_roots: Array = NONE
    at_times: Array = NONE


class StepObservers:
    """What is kept of the steps beside the final state; `outcome` is filled in."""

    def __init__(self, batch: Batch, settings: Settings, outcome: Outcome, initialization: Initialization):
        self._outcome, self._batch, self._settings = outcome, batch, settings
        coefficients = Coefficients(settings.alg.tableau, batch.u0)
        self._log = Log(settings.checkpoints) if settings.record else None
        self._events = self._saves = self._acting = None
        if settings.events:
            self._events = EventWatch(settings.events, coefficients, initialization.parameters)
        if outcome.saved is not None and settings.saveat is not None and outcome.saved.shape[1]:
            self._saves = SavePoints(settings.saveat, initialization.signs, batch.start, outcome, coefficients)
        if settings.acting is not None:
            self._acting = ActingEvents(batch, settings, outcome, initialization, self._events)

    def enter(self, new: Entrants, joined: Joint, u: Array, p: Tree, t: Array) -> None:
        """Take up the next working set: its new trajectories, its states, parameters and actual times."""
        if self._saves is not None:
            self._saves.enter(new.ids, new.u, joined)
        if self._events is not None:
            self._events.enter(u, p, t)
        if self._acting is not None:
            self._acting.enter(new, joined)

    def see(self, step: Step, p: Tree, done: Array, h: Array) -> Stopped:
        """Look at a step, and say which columns an event has ended, whose steps are cut short there.

        `done`, bool, shape (n,), says which have come to the end of tspan or a given time; h, shape (n,), are the sizes of
        the next steps.
        """
        if self._log is not None:
            self._log.note(step)
        acting = self._acting
        if acting is not None:
            crossed = acting.crossed(step, p)
        else:
            crossed = [] if self._events is None else self._events.crossed(step, p)
        terminated = at_roots = at_times = NONE
        if acting is not None:
            at_roots = acting.at_roots(crossed)
            if at_roots.size:
                acting.hold(at_roots, step, h, crossed, at_roots=True)
                others = np.ones(len(step.ids), bool)
                others[at_roots] = False
                step, crossed = step._replace(accepted=step.accepted & others), [mask & others for mask in crossed]
                done = done & others
            at_times = acting.at_given_times(step, done)
            if at_times.size:
                acting.hold(at_times, step, h, crossed)
        if crossed and (columns := np.flatnonzero(np.any(crossed, axis=0))).size:
            terminated = self._located(step, columns, crossed)
        if self._saves is not None:
            self._saves.see(step, at_times)
        return Stopped(terminated, at_roots, at_times)

    def release(self) -> Iterator[Resumed]:
        """Let events act on the columns whose steps are held, and return how they go on."""
        for resumed, step in self._acting.release() if self._acting is not None else ():
            if self._saves is not None:
                rows = np.arange(len(resumed.columns))
                if step.k:
                    self._saves.see_inside(step, rows, resumed.columns)
                self._saves.see_end(step, rows, resumed.columns, step.number + 1)
            yield resumed

    def _located(self, step: Step, columns: Array, crossed: Sequence[Array]) -> Array:
        """Note events of some columns, and cut the steps short that they end; return the columns of these."""
        watch: EventWatch = self._events  # type: ignore[assignment]
        ends = [changed[columns] for event, changed in zip(self._settings.events, crossed) if event.terminal]
        ended = np.any(ends, axis=0) if ends else np.zeros(len(columns), bool)
        if not ended.all():
            watch.put_off(step, columns[~ended], crossed)
        terminated = columns[ended]
        if not terminated.size:
            return NONE
        kept = watch.kept(step, terminated, crossed)
        watch.cut(kept)
        # The end and its state, where nothing that is saved may lie behind it.
        step.t_new[terminated], step.new[:, terminated] = kept.step.t_new, kept.step.new
        return terminated

    def close(self) -> None:
        """Put the record and the events in order."""
        rows = None if self._events is None else self._events.rows()
        if rows is not None:
            self._outcome.event_table = rows[:, in_order(rows)]
        if self._log is not None:
            u0 = self._batch.u0
            self._outcome.steps = [(0, self._log.steps(self._outcome.naccept, len(u0), u0.dtype))]
