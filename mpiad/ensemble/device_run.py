"""A recorded solve on a device, for differentiation: its rounds are the visits of a sweep (see `step_sweep`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.coefficients import Coefficients, polynomials, states_at
from mpiad.ensemble.device_rounds import Block, Record
from mpiad.ensemble.outcome import Outcome
from mpiad.ensemble.run import Run, Seeds
from mpiad.ensemble.settings import Settings
from mpiad.ensemble.step_sweep import EventTimes, LocatedEvent, Saved, SavedInStep, StepSweep, Visit


class DeviceRun(Run):
    """A solve on a device, and its closed record (see `Record.close`). Arrays are on the device."""

    few = 0  # gradients are computed by the adjoint, unless tangents are requested

    def __init__(self, batch: Batch, settings: Settings, outcome: Outcome):
        super().__init__(batch, settings, outcome)
        self.record: Record = outcome.record

    @property
    def coefficients(self) -> Coefficients:  # type: ignore[override]
        """The method's table on the device, which the solve has copied."""
        return self.record.table

    @property
    def n_saved(self) -> int:
        """The number of saved values per trajectory."""
        return 0 if self.record.saves is None else self.record.saves.count

    @property
    def slots(self) -> int:
        """The number of slots for saved values per trajectory, the last of which is never read."""
        return self.n_saved + 1

    # ---- steps

    def sweeps(self, backwards: bool = False) -> Iterator[StepSweep]:
        """Return the sweeps over all rounds, block by block."""
        blocks, every = (self.record.blocks[::-1], self.record.every) if backwards else (self.record.blocks, None)
        return (RoundSweep(self, block, every) for block in blocks if len(block.ids))

    @cached_property
    def ends(self) -> Array:
        """The ends of tspan, multiplied by -1 for trajectories that are integrated backwards in time."""
        return self.placed(self.batch.end * self.record.signs)

    # ---- saved states

    def seeds(self, saved: Array, end: Array, times: Sequence[Array]) -> Seeds:
        """Return the cotangents of the results; those of saved states have an additional slot of zeros."""
        padded = None
        if self.n_saved:
            padded = np.zeros_like(saved, shape=(saved.shape[0], self.slots, saved.shape[2]))
            padded[:, :-1] = np.where(np.isnan(saved), 0, saved)  # NaN for states that weren't reached
        return Seeds(np.swapaxes(end, 0, 1), padded, *times)

    def saved_at(self, at_start: bool) -> np.ndarray:
        """Return a mask of the saved values that are initial (or final) states, shape (N, n_saved), on the host."""
        saves = self.record.saves
        if saves is None:
            return np.zeros((self.batch.size, 0), bool)
        return (saves.initial if at_start else saves.final) & self.live[:, None]

    # ---- events

    @property
    def event_times(self) -> EventTimes:  # type: ignore[override]
        """The final times, and the times of all events."""
        return self.record.events  # type: ignore[return-value]

    @cached_property
    def crossed_row(self) -> np.ndarray:
        """For each row of the sorted table of events, its index in `crossed`, or -1 if the event ended its trajectory."""
        return np.where(self._event_columns[-1], -1, self.event_times.order)


class Slots(Saved):
    """Values saved in one round, s values per column. Shapes: ids (n,), place and x (s, n), weights (s, 1, n)."""

    def of(self, states: Array) -> Array:
        """Return states with an additional axis of length 1, for the values per column."""
        return states[..., None, :, :]


class RoundSweep(StepSweep):
    """The visits of a block of rounds; `every`: the number of rounds between stored states, None if none are recomputed."""

    def __init__(self, run: DeviceRun, block: Block, every: int | None):
        self._run, self._block, self._every = run, block, every
        self.ids, self.sign = block.ids, block.sign

    @cached_property
    def leaves(self) -> list[Any]:  # type: ignore[override]
        """The leaves of the parameters of the columns."""
        return self._run.batch.p.taken(self.ids)

    def _starts(self) -> range:
        return range(0, len(self._block.rounds), self._every or 1)

    def _segment(self, begin: int) -> Iterator[Visit]:
        u = self._block.rounds[begin].u
        stop = min(begin + (self._every or 1), len(self._block.rounds))
        for number in range(begin, stop):
            round_, sign = self._block.rounds[number], self.sign
            t, h = round_.t, np.where(round_.accepted, round_.h, 0.0)
            t, h = (t, h) if sign is None else (t * sign, h * sign)
            visit = Visit(number, t, h, u, round_, round_.accepted)
            yield visit
            if number + 1 < stop:  # the next segment begins at a stored state
                u = self._advanced(visit)

    def _advanced(self, visit: Visit) -> Array:
        """Return the recomputed states after a round."""
        u, table = visit.u, self._run.coefficients
        p, end = self._run.batch.p.of_columns(self.leaves, self._run.field.one_by_one), visit.about.t_new
        stages = self._run.stages(u, p, visit.t, visit.h, end if self.sign is None else end * self.sign)
        new = np.where(visit.made, stages.new, u)  # type: ignore[arg-type, call-overload]
        for located in visit.about.located:
            if located.terminal:
                c = located.columns
                terms = polynomials(table, u[:, c], visit.h[c].astype(table.real), np.take(stages.k, c, axis=-1))
                new[:, c] = states_at(terms, located.x.astype(table.real))
        return new

    # ---- values and events in a round

    def saved(self, visit: Visit) -> SavedInStep:
        """Return the values saved in the step."""
        round_, run, table = visit.about, self._run, self._run.coefficients
        if not round_.most:
            return SavedInStep()
        end = round_.t_new if round_.reached is None else round_.reached
        saves: Any = run.record.saves
        due = saves.due(self.ids, round_.place, round_.count, round_.most, round_.t, round_.h, end)
        nowhere = np.full_like(due.slot, run.n_saved)
        at_end = Slots(self.ids, np.where(due.at_end, due.slot, nowhere), slice(None))
        if not saves.inside:
            return SavedInStep([at_end])
        place = np.where(due.at_end, nowhere, due.slot)
        weights = table.weights(due.x).astype(table.real)
        weights = [weights[i][:, None] for i in range(len(weights))]
        return SavedInStep([at_end], [Slots(self.ids, place, slice(None), due.x, weights)])

    def located(self, visit: Visit) -> Sequence[LocatedEvent]:
        """Return the events in the step."""
        found = sorted(visit.about.located, key=lambda located: located.terminal)
        return [located._replace(row=self.ids[located.columns]) if located.terminal else located for located in found]

    def moves(self, visit: Visit) -> Array:
        """Return a mask of the columns in which the step ends at the end of tspan."""
        mask = visit.made & (visit.about.t_new == self._run.ends[self.ids])
        for located in visit.about.located:
            if located.terminal:  # the step ends before the end of tspan
                mask[located.columns] = False
        return mask
