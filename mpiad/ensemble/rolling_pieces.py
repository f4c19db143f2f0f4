"""Pieces between events by columns: a trajectory that an event has ended re-enters the columns that are running.

Otherwise those that meet their events early would wait in each round for those that meet them late, or never. A column's
numbers depend on no other, so they are those of pieces that are solved in rounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.events import in_order
from mpiad.ensemble.outcome import Outcome

if TYPE_CHECKING:
    from mpiad.ensemble.hybrid_solve import HybridSolve

__all__ = ["RollingPieces"]


class RollingPieces:
    """The pieces of some trajectories of a solve, each once and in order.

    The batch and the settings that the columns are given hold the pieces that are under way, and are written into.
    """

    def __init__(self, solved: HybridSolve, ids: Array):
        self._solved, self._ids = solved, ids
        self._slot, batch, self._settings = solved.piece(ids)
        self._slot, self._settings = self._slot.copy(), self._settings._replace(again=self._again)
        self._batch = batch._replace(start=batch.start.copy(), end=batch.end.copy())
        self._rows = np.empty((5, 0))

    def run(self) -> Outcome:
        """Go on until all have ended; return the outcome, of which the record of steps is whole."""
        still = np.flatnonzero(self._batch.start == self._batch.end)
        outcome = self._solved.advance(self._batch, self._settings)
        if still.size:  # which never entered
            self._take(still, outcome, None)
        return outcome

    def _again(self, columns: Array, outcome: Outcome) -> Array:
        """Let the events act that ended some columns, and return those that go on."""
        columns = np.sort(columns)
        self._take(columns, outcome, self._events(columns, outcome.event_table))
        going = columns[self._solved.moving(self._ids[columns])]
        if not going.size:
            return going
        self._slot[going], batch, settings = self._solved.piece(self._ids[going])
        ours = self._batch
        ours.u0[:, going], ours.start[going], ours.end[going] = batch.u0, batch.start, batch.end
        self._settings.restarts[going] = settings.restarts  # type: ignore[index]
        still = going[batch.start == batch.end]
        if still.size:  # which end where they are
            outcome.u_end[:, still], outcome.t_reached[still] = ours.u0[:, still], ours.start[still]
            outcome.codes[still] = outcome.naccept[still] = outcome.nreject[still] = 0
            self._take(still, outcome, None)
        return going[batch.start != batch.end]

    def _take(self, columns: Array, outcome: Outcome, table: Array | None) -> None:
        """Hand the results of some columns on."""
        batch, settings = self._batch, self._settings
        own = batch._replace(u0=batch.u0[:, columns], start=batch.start[columns], end=batch.end[columns])
        settings = settings._replace(restarts=settings.restarts[columns])  # type: ignore[index]
        self._solved.finish(self._ids[columns], self._slot[columns], own, settings, outcome.chosen(columns, table))
        self._solved.meet_given_times()

    def _events(self, columns: Array, new: Array | None) -> Array | None:
        """Return the table of the events of some columns, numbered among these; those of others are kept."""
        rows = self._rows if new is None else np.concatenate([self._rows, new], axis=1)
        ids, place = rows[0].astype(int), np.full(len(self._ids), -1)
        place[columns] = np.arange(len(columns))
        mine = place[ids] >= 0
        self._rows = rows[:, ~mine]
        rows = np.concatenate([place[ids[mine]][None].astype(float), rows[1:, mine]])
        return rows[:, in_order(rows)] if rows.size else None
