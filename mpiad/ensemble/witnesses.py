"""Those who look at every step of the working set: the record, events, saved times; in this order."""

from __future__ import annotations

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.coefficients import Coefficients
from mpiad.ensemble.entrance import Entrance, Entrants, Joint
from mpiad.ensemble.events import EventWatch
from mpiad.ensemble.outcome import Outcome
from mpiad.ensemble.record import Log
from mpiad.ensemble.saving import SavePoints
from mpiad.ensemble.settings import Settings
from mpiad.ensemble.step import Step

__all__ = ["NONE", "Witnesses"]

NONE = np.empty(0, np.int64)


class Witnesses:
    """What is kept of the steps beside the final state.

    Parameters
    ----------
    batch : Batch
    settings : Settings
    outcome : Outcome
        Is filled in.
    entrance : Entrance

    Attributes
    ----------
    any : bool
        Whether there is anybody.
    """

    def __init__(self, batch: Batch, settings: Settings, outcome: Outcome, entrance: Entrance):
        self._outcome, self._entrance, self._batch = outcome, entrance, batch
        coefficients = Coefficients(settings.alg.tableau, batch.u0)
        self._log = Log(settings.checkpoints) if settings.record else None
        self._events = self._saves = None
        if settings.events:
            self._events = EventWatch(settings.events, coefficients, outcome.event_times, outcome.event_places)
        if outcome.saved is not None and settings.saveat is not None and outcome.saved.shape[1]:
            self._saves = SavePoints(settings.saveat, entrance.signs, batch.start, outcome, coefficients)
        self.any = not (self._log is self._events is self._saves is None)

    def enter(self, new: Entrants, joined: Joint, u: Array, p: Tree, t: Array) -> None:
        """Take up the next working set: its new trajectories, its states, parameters and actual times."""
        if self._saves is not None:
            self._saves.enter(new.ids, new.u, joined)
        if self._events is not None:
            self._events.enter(u, p, t)

    def see(self, step: Step, p: Tree) -> Array:
        """Look at a step; return the columns that a terminal event ends, whose step is cut short there."""
        if self._log is not None:
            self._log.note(step)
        terminated = NONE
        if self._events is not None:
            terminated, parts, states = self._events.after(step, p, self._entrance.parameters)
            # The end and its state, where nothing that is saved may lie behind it.
            step.t_new[terminated] = step.t[terminated] + parts * step.h[terminated]
            step.new[:, terminated] = states
            self._outcome.end_part[step.ids[terminated]] = parts
        if self._saves is not None:
            self._saves.see(step)
        return terminated

    def close(self) -> None:
        """Put the record in order."""
        if self._log is not None:
            u0 = self._batch.u0
            self._outcome.steps = [(0, self._log.steps(self._outcome.naccept, len(u0), u0.dtype))]
