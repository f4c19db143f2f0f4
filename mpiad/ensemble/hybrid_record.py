"""The record of a solve with events that change the state: the steps of all its pieces, the events between them.

Of columns the steps are put into one record, of kernels their tapes are linked. With checkpoints kernels keep no steps: the
solve is done again then, of some trajectories after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.compiled.kernel_solver import joined_pieces
from mpiad.ensemble.events import in_order
from mpiad.ensemble.given_times import GivenTimes
from mpiad.ensemble.jumps import FOUND, Jump
from mpiad.ensemble.outcome import Outcome
from mpiad.ensemble.record import Log, Steps
from mpiad.ensemble.run import FINAL
from mpiad.ensemble.settings import DueTimes, Settings

if TYPE_CHECKING:
    from mpiad.ensemble.hybrid_solve import HybridSolve

__all__ = ["HappenedEvents", "HybridRecord", "Repeated"]


class HappenedEvents:
    """The events of a solve, piece by piece.

    `found`: which events have conditions. `passed`: of a kernel in which events acted the trajectories, and which given
    times come first, and no more; see `GivenTimes`.
    """

    def __init__(self, found: Sequence[int], given: GivenTimes, signs: Array):
        self._found, self._given, self._signs = np.array(found, int), given, signs
        self._tables: list[Array] = []
        self._noted: list[Array] = []
        self.passed: tuple[Array, Array, Array] | None = None

    @cached_property
    def conditions(self) -> Array:
        """The table of events at which a condition vanished, see `Outcome.event_table`, as pieces met them; when all have.

        Kernels tell of the steps, too, in which they were, in further rows.
        """
        return np.concatenate(self._tables, axis=1) if self._tables else np.empty((5, 0))

    @cached_property
    def order(self) -> Array:
        """Which of its columns come first, trajectory by trajectory."""
        return in_order(self.conditions)

    def note(self, ids: Array, outcome: Outcome, begun: Array) -> tuple[Array, Array]:
        """Note those of pieces of some trajectories, as `HybridRecord.keep` does; return for each whose and which it is."""
        (local, which), (number, part, time) = outcome.event_table[:2].astype(int), outcome.event_table[2:]  # type: ignore[index]
        which, row = self._found[which], sum(table.shape[1] for table in self._tables) + np.arange(len(local))
        more = () if outcome.crossings is None else outcome.crossings.T[5:]
        self._tables.append(np.stack([ids[local].astype(float), which, number + begun[local], part, time, *more]))
        self._noted.append(np.stack([ids[local].astype(float), which, time, row]))
        return local, which

    def note_given(self, ids: Array, event: int, t: Array, slot: Array) -> None:
        """Note one at given times."""
        self._noted.append(np.stack([ids.astype(float), np.full(len(ids), float(event)), t, -1.0 - slot]))

    def all(self) -> Array:
        """Return all, shape (4, m), those of a trajectory in their order: the trajectories, which events, and when.

        The last row says which column of `conditions` each is, or -1 less the given time.
        """
        found = np.concatenate([np.empty((4, 0)), *self._noted], axis=1)
        if self.passed is None:
            return found
        every = np.concatenate([found, self._given.passed(*self.passed)], axis=1)
        # The given times are in order by themselves; at one of them conditions come first.
        return every[:, np.lexsort((self._signs[every[0].astype(int)] * every[2], every[0]))] if found.size else every


class HybridRecord:
    """What is kept of a solve.

    `whole`: the outcome of a kernel in which events acted, with its own record.
    """

    def __init__(self, settings: Settings):
        self._log = Log(settings.checkpoints)
        self._steps: list[tuple[int, Steps]] = []
        self._compiled: list[tuple[Array, Outcome]] = []  # pieces of kernels
        self.jumps: list[Jump] = []
        self.whole: Outcome | None = None

    def keep(self, ids: Array, outcome: Outcome, begun: Array) -> None:
        """Keep pieces of some trajectories, which had made `begun` steps before, shape (n,)."""
        if outcome.solver is not None:
            self._compiled.append((ids, outcome))
            return
        for first, steps in outcome.recorded():
            own = slice(first, first + len(steps.counts))
            self._log.note_again(steps, ids[own], begun[own])

    def keep_all(self, ids: Array, outcome: Outcome, count: int) -> None:
        """Keep the steps of all pieces of some trajectories, of `count` in the whole."""
        if len(ids) == count:
            self._steps = outcome.steps
        else:
            self.keep(ids, outcome, np.zeros(len(ids), int))

    def keep_whole(self, outcome: Outcome, due: DueTimes, solved: HybridSolve) -> None:
        """Keep a solve of all by a kernel in which events acted: at given times, and at the conditions that were noted."""
        given, found = solved.given, solved.happened.conditions
        self.whole = outcome
        # States after events are in the record, and none are computed again.
        met = due.number >= 0
        own, slot = np.nonzero(met)
        before = due.before[met].T
        jumps = [Jump(own, due.number[met], given.event[slot, own], slot, given.times[slot, own], before, before)]
        acting = np.array([event.acts for event in solved.settings.events])[found[1].astype(int)]
        if acting.any():
            ids, event, number = found[:3, acting].astype(int)
            before = outcome.at_events[acting].T  # type: ignore[index]
            own = Jump(ids, number + 1, event, np.full(len(ids), FOUND), found[4, acting], before, before)
            # After the same step conditions come first.
            joined = [np.concatenate(parts, axis=-1) for parts in zip(own, jumps[0])]
            order = np.lexsort((joined[1], joined[0]))
            jumps = [Jump(*(part[..., order] for part in joined))]
        self.jumps += jumps

    def outcome(self, solved: HybridSolve) -> Outcome:
        """Return the results of a solve that has run, with its record."""
        batch, settings, happened = solved.batch, solved.settings, solved.happened
        table = happened.conditions[:, happened.order]
        save_step = solved.saves.steps
        # What would be saved where the next step begins, and there is none.
        save_step[save_step == solved.naccept[:, None]] = FINAL
        if self.whole is not None:
            found = self.whole
            found.codes, found.saved, found.save_step = solved.codes, solved.saves.states, save_step
            found.jumps, found.event_table = self.jumps, table[:5]
            found.crossings, found.end_part = table.T if len(table) > 5 else None, np.ones(batch.size)
            return found
        made: dict[str, Any] = {}
        if self._compiled and settings.checkpoints is not None:
            make = partial(type(solved), solved.advance, way=solved.way)
            made = {"solver": Repeated(make, batch, settings)}
        elif self._compiled:
            solver, tapes, last = joined_pieces(self._compiled, batch, settings)
            made = {"solver": solver, "tapes": tapes, "last": last, "crossings": table.T if len(table) > 5 else None}
        else:
            made = {"steps": self._steps or [(0, self._log.steps(solved.naccept, len(solved.u), solved.u.dtype))]}
        return Outcome(
            solved.u, solved.t, solved.codes, solved.naccept, solved.nreject, solved.saves.states, save_step,
            np.ones(batch.size), event_table=table[:5], jumps=self.jumps, **made,
        )  # fmt: skip


class Repeated:
    """A solve by kernels that is done again where its steps are wanted.

    `make`: ``make(batch, settings)`` returns a solve that is to run.
    """

    every = False

    def __init__(self, make: Callable[[Batch, Settings], HybridSolve], batch: Batch, settings: Settings):
        self._make, self.batch, self.settings = make, batch, settings
        self._recorded: Outcome | None = None

    def record(self) -> Outcome:
        """Solve once more, and keep all steps."""
        solved = self._make(self.batch, self.settings._replace(checkpoints=None, progress=None))
        solved.run()
        return solved.record.outcome(solved)  # type: ignore[union-attr]

    def recorded(self, outcome: Outcome) -> Outcome:
        """Return an outcome with a record of all steps."""
        self._recorded = self._recorded or self.record()
        return self._recorded

    def parts(self) -> Iterator[tuple[slice, Repeated]]:
        """Return the trajectories in as many parts as the checkpoints ask for."""
        count = self.batch.size
        parts = max(1, min(self.settings.checkpoints or 1, count))
        for first, stop in pairwise(count * i // parts for i in range(parts + 1)):
            rows = slice(first, stop)
            yield rows, Repeated(self._make, self.batch.share(rows), self.settings.share(rows))
