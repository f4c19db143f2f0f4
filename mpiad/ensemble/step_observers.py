"""Observers of every step of the working set: the record, events, saved times; in this order."""

from __future__ import annotations

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.coefficients import Coefficients
from mpiad.ensemble.events import EventWatch, in_order
from mpiad.ensemble.initialization import Entrants, Initialization, Joint
from mpiad.ensemble.outcome import Outcome
from mpiad.ensemble.record import Log, Step
from mpiad.ensemble.saving import SavePoints
from mpiad.ensemble.settings import Settings

__all__ = ["NONE", "StepObservers"]

NONE = np.empty(0, np.int64)


class StepObservers:
    """What is kept of the steps beside the final state.

    `outcome`: is filled in.
    """

    def __init__(self, batch: Batch, settings: Settings, outcome: Outcome, initialization: Initialization):
        self._outcome, self._batch, self._settings = outcome, batch, settings
        coefficients = Coefficients(settings.alg.tableau, batch.u0)
        self._log = Log(settings.checkpoints) if settings.record else None
        # How many steps trajectories had made before they entered again.
        self._begun = np.zeros(batch.size if settings.again else 0, np.int64)
        self._events = self._saves = None
        if settings.events:
            self._events = EventWatch(settings.events, coefficients, initialization.parameters)
        if outcome.saved is not None and settings.saveat is not None and outcome.saved.shape[1]:
            self._saves = SavePoints(settings.saveat, initialization.signs, batch.start, outcome, coefficients)

    def enter(self, new: Entrants, joined: Joint, u: Array, p: Tree, t: Array) -> None:
        """Take up the next working set: its new trajectories, its states, parameters and actual times."""
        if self._saves is not None:
            self._saves.enter(new.ids, new.u, joined)
        if self._events is not None:
            self._events.enter(u, p, t)

    def see(self, step: Step, p: Tree) -> Array:
        """Look at a step; return the columns that a terminal event ends, whose step is cut short there."""
        if self._log is not None:
            self._log.note(step._replace(number=step.number + self._begun[step.ids]) if len(self._begun) else step)
        terminated = NONE
        if self._events is not None:
            found = [np.flatnonzero(mask) for mask in self._events.crossed(step, p)]
            if any(columns.size for columns in found):
                terminated = self._cut(step, [columns if columns.size else None for columns in found])
        if self._saves is not None:
            self._saves.see(step)
        return terminated

    def _cut(self, step: Step, crossed: list[Array | None]) -> Array:
        """Note events, and cut the steps short that they end; return their columns."""
        found = self._events.located(step, crossed)  # type: ignore[union-attr]
        if found.ended is None:
            return NONE
        terminated = np.flatnonzero(found.ended)
        parts = found.part[terminated]
        # The end and its state, where nothing that is saved may lie behind it.
        step.t_new[terminated] = step.t[terminated] + parts * step.h[terminated]
        step.new[:, terminated] = found.states[:, terminated]
        self._outcome.end_part[step.ids[terminated]] = parts
        return terminated

    def pause(self, ids: Array) -> None:
        """Put the events since the last time into the outcome, in any order; trajectories have left that may go on."""
        self._begun[ids] += self._outcome.naccept[ids]
        self._outcome.event_table = None if self._events is None else self._events.rows()
        if self._events is not None:
            self._events.forget()

    def close(self) -> None:
        """Put the record and the events in order."""
        rows = None if self._events is None else self._events.rows()
        if rows is not None:
            self._outcome.event_table = rows[:, in_order(rows)]
        if self._log is not None:
            u0, counts = self._batch.u0, self._begun if len(self._begun) else self._outcome.naccept
            self._outcome.steps = [(0, self._log.steps(counts, len(u0), u0.dtype))]
