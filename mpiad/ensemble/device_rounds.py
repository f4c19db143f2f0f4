"""The observers of the rounds of a solve on a device: the record for derivatives, saved states and events.

A round is one step of all columns of the working set. Per round the host reads a few numbers: the number of active
trajectories, the number of saved times in the column that has the most of them in this round, and for each event the number
of columns in which it occurs. If events end trajectories, the first two numbers are read again.

The record has the states before each round, and the steps of the round; sweeps visit the rounds again, backwards or
forwards. Each saved value of a trajectory has an index, its slot. In each round the trajectory with the most saved times
determines the number of values that are computed for every trajectory; unneeded values are written to an additional slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.ensemble.batch import Batch, on_device_of
from mpiad.ensemble.coefficients import Coefficients, polynomials, states_at
from mpiad.ensemble.events import EventWatch, in_order
from mpiad.ensemble.initialization import Entrants, Initialization, Joint
from mpiad.ensemble.jumps import beside
from mpiad.ensemble.outcome import Outcome, ReturnCode
from mpiad.ensemble.record import Step
from mpiad.ensemble.run import Run, Seeds
from mpiad.ensemble.settings import Settings
from mpiad.ensemble.step_observers import Stopped
from mpiad.ensemble.step_sweep import EventTimes, LocatedEvent, Saved, SavedInStep, StepSweep, Visit
from mpiad.transport.devices.device_arrays import arrays_of

# Maximum size of one array of saved states, in numbers.
_BLOCK = 1 << 24


class Due(NamedTuple):
    """The slots and times of the values saved in one step."""

    slot: Array  # int, shape (m, n); the slots of each column's values; the additional slot if a column has fewer than m
    x: Array  # shape (m, n); the saved time as a fraction of the step; 0 for unused slots
    at_end: Array  # bool, shape (m, n); whether the saved time is the end of the step


class SaveTimes:
    """The saved times of a batch, shape (n_saved,) or (N, n_saved), on the host."""

    def __init__(self, times: np.ndarray, batch: Batch, signs: np.ndarray, has_events: bool = False):
        self.count = times.shape[-1]
        start, end = batch.start[:, None], batch.end[:, None]
        empty = start == end
        # Whether each value is the initial state, or is copied from the final state after the last step; (N, n_saved).
        self.initial = np.where(empty, np.arange(self.count) == 0, times == start)
        at_end = (times == end) & ~self.initial
        self.examines_steps = not (self.initial | (at_end & empty if has_events else at_end)).all()
        self.final = at_end & empty if self.examines_steps else at_end
        self._signed_times: Array = None
        if self.examines_steps:
            common = times.ndim == 1 and (signs == signs[:1]).all()
            rows = times * signs[0] if common else np.broadcast_to(times, at_end.shape) * signs[:, None]
            xp: Any = arrays_of(batch.u0)
            self._signed_times = xp.to_device(np.ascontiguousarray(rows, float))

    def passed(self, ids: Array, t: Array) -> Array:
        """Return the number of saved times up to and including t, shape (n,), of the trajectories `ids`."""
        if self._signed_times.ndim == 1:
            return np.searchsorted(self._signed_times, t, side="right")
        return np.sum(self._signed_times[ids] <= t[:, None], axis=1)

    def due(self, ids: Array, place: Array, count: Array, most: int, t: Array, h: Array, t_new: Array) -> Due:
        """Return `count` slots and times per column for a step, with slots from `place` on; `most`: the largest count."""
        xp: Any = arrays_of(t)
        k = xp.arange(most)[:, None]
        is_slot = k < count
        slot = np.where(is_slot, place + k, self.count)
        index = np.minimum(slot, self.count - 1)  # the additional slot has no time; any valid index will do
        times = self._signed_times[index] if self._signed_times.ndim == 1 else self._signed_times[ids, index]
        at_end = is_slot & (times == t_new)
        x = np.where(is_slot, times - t, 0.0) / np.where(h > 0.0, h, 1.0)  # ended columns have steps of size zero
        return Due(slot, x, at_end)


class Round(NamedTuple):
    """One step of all columns (trajectories) of a block; times are multiplied by `Record.signs`, so they increase."""

    t: Array  # shape (n,), like `h` and `t_new`
    h: Array
    t_new: Array
    accepted: Array  # bool, shape (n,)
    u: Array | None  # shape (d, n); before the step; None if the states must be recomputed
    place: Array  # int, shape (n,); the number of values saved before the round, or with `save_everystep` of steps
    count: Array | None  # int, shape (n,); the number of saved times in the step of each column; None if all are zero
    reached: Array | None  # shape (n,); the end of the step if an event may have cut it short; None if it is `t_new`
    most: int  # the largest count
    located: list[LocatedEvent]

    def at(self, columns: Array) -> Round:
        """Return the round with only some of its columns."""
        taken: list[Any] = [None if array is None else np.take(array, columns, axis=-1) for array in self[:-2]]
        new_index = np.full_like(columns, -1, shape=self.t.shape)
        new_index[columns] = arrays_of(columns).arange(len(columns))  # type: ignore[union-attr]
        return Round._make([*taken, self.most, [_moved(part, new_index) for part in self.located]])


def _moved(located: LocatedEvent, new_index: Array) -> LocatedEvent:
    """Return an event without removed columns; `new_index`: the new index of each column, -1 for removed ones."""
    columns = new_index[located.columns]
    rest = np.flatnonzero(columns >= 0)
    return located._replace(columns=columns[rest], x=located.x[rest], time=located.time[rest], row=located.row[rest])


class Block:
    """Rounds of the same columns. `ids`: the trajectories, shape (n,). `sign`: 1 or -1, shape (n,); None if all are 1."""

    def __init__(self, ids: Array, sign: Array | None):
        self.ids, self.sign = ids, sign
        self.rounds: list[Round] = []


class Record:
    """All rounds of a solve, block by block; `every`: the number of rounds between stored states (None: all stored)."""

    def __init__(self, batch: Batch, table: Coefficients, saves: SaveTimes | None, every: int | None):
        self.batch, self.table, self.saves, self.every = batch, table, saves, every
        self.n_saved = 0 if saves is None else saves.count  # values per trajectory
        # Factors of times: -1 for trajectories that are integrated backwards in time.
        self.signs = np.where(batch.end < batch.start, -1.0, 1.0)
        self.blocks: list[Block] = []
        self.events: EventTimes | None = None  # None without event conditions

    def note(self, round_: Round) -> None:
        """Add a round to the last block."""
        rounds = self.blocks[-1].rounds
        between = self.every is not None and len(rounds) % self.every
        rounds.append(round_._replace(u=None) if between else round_)

    def close(self, failed: np.ndarray) -> None:
        """Remove failed trajectories, since f may not be finite at their states."""
        if not failed.any():
            return
        xp: Any = arrays_of(self.batch.u0)
        live = xp.to_device(~failed)
        for block in self.blocks:
            columns = np.flatnonzero(live[block.ids])
            block.ids, block.sign = block.ids[columns], None if block.sign is None else block.sign[columns]
            block.rounds = [round_.at(columns) for round_ in block.rounds]


class DeviceObservers:
    """The observers of a solve on a device; results are written to `outcome`."""

    def __init__(
        self, batch: Batch, settings: Settings, outcome: Outcome, initialization: Initialization, table: Coefficients
    ):
        self._batch, self._settings, self._outcome, self._table = batch, settings, outcome, table
        self._signs = initialization.signs
        self._xp: Any = arrays_of(batch.u0)
        self._saves: Any = None
        self._saved: Array = None
        if settings.saveat is not None:
            shape = batch.size, settings.saveat.shape[-1] + 1, len(batch.u0)  # the last slot is for unneeded values
            self._saved = self._xp.full(shape, np.nan, batch.u0.dtype)
            if settings.saveat.shape[-1]:
                self._saves = SaveTimes(settings.saveat, batch, self._signs, bool(settings.events))
        self._examines_steps = self._saves is not None and self._saves.examines_steps
        self._place: Array = None  # the number of saved values of each column, if steps are checked for saved times
        self._watch = EventWatch(settings.events, table, batch.parameters) if settings.events else None
        self._record = Record(batch, table, self._saves, settings.checkpoints) if settings.record else None

    def enter(self, new: Entrants, joined: Joint, ids: Array, u: Array, p: Tree, t: Array, sign: Array | None) -> None:
        """Begin a block of columns: see `StepObservers.enter`."""
        if self._examines_steps:
            first = on_device_of(self._saves.initial.sum(axis=1), u)[new.ids] if len(new.ids) else None
            self._place = joined(self._place, first)
        if self._watch is not None:
            self._watch.enter(u, ids, t if sign is None else t * sign)
            self._watch.clock = joined(self._watch.clock, new.t - np.inf)
        if self._record is not None:
            self._record.blocks.append(Block(ids, sign))

    def limits(self, ids: Array, t: Array, t_new: Array, end: Array) -> tuple[Array, Array]:
        """Return the times of f at both ends of a step: see `StepObservers.limits`."""
        return t, t_new if self._watch is None else self._watch.ends(t_new)

    def clock_roots(self, step: Step, live: Array) -> Array | None:
        """Return the times to which steps are retaken: see `EventWatch.clock_roots`."""
        return None if self._watch is None else self._watch.clock_roots(step, live, self._watch.screened)

    def process(self, step: Step, p: Tree, done: Array, h: Array, moving: Array) -> Stopped:
        """Process a step: see `StepObservers.process`; `moving`: a mask of the columns that continue if no event occurs."""
        crossed = None if self._watch is None else self._watch.screened(step)
        place = self._place if self._examines_steps else step.number
        alive, most, count, crossings = self._read_counts(step, place, moving, crossed)
        t_new, located, terminated = step.t_new, [], None
        if crossings:
            columns = np.flatnonzero(crossed.any(axis=0))  # type: ignore[union-attr]
            kept = self._watch.bracketed(step, columns, crossed)  # type: ignore[union-attr]
            step_events = self._watch.cut(kept)  # type: ignore[union-attr]
            located = [event._replace(columns=columns[event.columns]) for event in step_events.located]
            if step_events.ended is not None:  # events shorten steps
                t_new, terminated = step.t_new.copy(), np.zeros_like(step.accepted)
                terminated[columns] = step_events.ended
                step.t_new[columns], step.new[:, columns] = kept.step.t_new, kept.step.new
                alive, most, count, _ = self._read_counts(step, place, moving & ~terminated, None)
        if self._record is not None:
            reached = None if terminated is None else step.t_new
            saves = count if most else None
            self._record.note(Round(step.t, step.h, t_new, step.accepted, step.u, place, saves, reached, most, located))
        if most:
            self._save(step, count, most)
            self._place = place + count
        return Stopped(terminated, alive=alive)

    def _read_counts(
        self, step: Step, place: Array, moving: Array, crossed: Array | None
    ) -> tuple[int, int, Array | None, int]:
        """Return the numbers of active trajectories, of saved times (largest; per column), and of columns with events."""
        numbers, count = [np.sum(moving)], None
        if self._examines_steps:
            count = np.where(step.accepted, self._saves.passed(step.ids, step.t_new) - place, 0)
            numbers.append(np.max(count))
        numbers += [] if crossed is None else [np.sum(crossed)]
        counts = self._xp.to_host(np.stack(numbers) if len(numbers) > 1 else numbers[0]).reshape(-1).tolist()
        return counts[0], counts[1] if self._examines_steps else 0, count, sum(counts[1 + self._examines_steps :])

    def _save(self, step: Step, count: Array, most: int) -> None:
        due = self._saves.due(step.ids, self._place, count, most, step.t, step.h, step.t_new)
        real = self._table.real
        terms = polynomials(self._table, step.u, step.h.astype(real), step.k)
        width = max(1, _BLOCK // max(1, step.u.size))
        for first in range(0, most, width):
            part = slice(first, first + width)
            inside = states_at(terms, due.x[part][:, None].astype(real))
            states = np.where(due.at_end[part][:, None], step.new, inside)
            self._saved[step.ids, due.slot[part]] = np.moveaxis(states, 1, -1)

    def close(self, results: Array) -> None:
        """Write saved states, events and the record to the outcome; `results`: see `WorkingSet`."""
        outcome, events = self._outcome, self._settings.events
        outcome.saved = self._steps(outcome, results) if self._settings.saveat is None else self._all_saved(outcome)
        rows, order = None if self._watch is None else self._watch.rows(), np.empty(0, int)
        if rows is not None:
            table = self._xp.to_host(rows)
            order = in_order(table)
            outcome.event_table = table[:, order]
        if self._record is not None:
            self._record.close(outcome.failed)
            outcome.record = self._record
            if events:
                rows = self._xp.empty((5, 0), float) if rows is None else rows
                reached = results[0] * on_device_of(self._signs, self._batch.u0)
                self._record.events = EventTimes(reached, rows[0].astype(np.int64), rows[4], order)

    def _steps(self, outcome: Outcome, results: Array) -> Array:
        """Return the states of all steps, shape (N, most + 1, d), padded with NaN, and set the saved times."""
        xp, record = self._xp, self._record
        shape = self._batch.size, int(outcome.naccept.max(initial=0)) + 1
        u, times = xp.full((*shape, len(outcome.u_end)), np.nan, outcome.u_end.dtype), xp.full(shape, np.nan, float)
        for block in record.blocks:  # type: ignore[union-attr]
            for round_ in block.rounds:
                # A step that was rejected, and the next try, have the same number.
                u[block.ids, round_.place], times[block.ids, round_.place] = round_.u.T, round_.t  # type: ignore[union-attr]
        ids, number = xp.arange(len(u)), results[2].astype(np.int64)
        u[ids, number], times[ids, number] = outcome.u_end.T, results[0]
        outcome.saved_times, record.n_saved = xp.to_host(times) * self._signs[:, None], shape[1]  # type: ignore[union-attr]
        return u

    def _all_saved(self, outcome: Outcome) -> Array:
        saves, saved = self._saves, self._saved[:, :-1]
        if saves is None:
            return saved
        final = saves.final & (outcome.codes == ReturnCode.Success.code)[:, None]
        for mask, states in ((saves.initial, self._batch.u0), (final, outcome.u_end)):
            if mask.any():
                same = bool((mask == mask[:1]).all())
                on_device = self._xp.to_device(np.ascontiguousarray(mask[:1] if same else mask))
                saved = np.where(on_device[:, :, None], states.T[:, None], saved)
        return self._xp.copy(saved)


# A recorded solve on a device, for differentiation: its rounds are the visits of a sweep (see `step_sweep`).


class DeviceRun(Run):
    """A solve on a device, and its closed record (see `Record.close`). Arrays are on the device."""

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
        return self.record.n_saved

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
        # States that weren't reached are NaN.
        padded = np.pad(np.where(np.isnan(saved), 0, saved), ((0, 0), (0, 1), (0, 0))) if self.n_saved else None
        return Seeds(np.swapaxes(end, 0, 1), padded, *times)

    def saved_at(self, at_start: bool) -> np.ndarray:
        """Return a mask of the saved values that are initial (or final) states, shape (N, n_saved), on the host."""
        saves, mask = self.record.saves, np.zeros((self.batch.size, self.n_saved), bool)
        if saves is None:  # with `save_everystep` each value except the first is saved after a step
            mask[:, :1] = at_start
        else:
            mask = saves.initial if at_start else saves.final
        return mask & self.live[:, None]

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
        new = np.where(visit.step_mask, stages.new, u)  # type: ignore[arg-type, call-overload]
        for located in visit.about.located:
            if located.stops:
                c = located.columns
                terms = polynomials(table, u[:, c], visit.h[c].astype(table.real), np.take(stages.k, c, axis=-1))
                new[:, c] = states_at(terms, located.x.astype(table.real))
        return new

    # ---- values and events in a round

    def saved(self, visit: Visit) -> SavedInStep:
        """Return the values saved in the step."""
        round_, run, table, saves = visit.about, self._run, self._run.coefficients, self._run.record.saves
        if saves is None and run.n_saved:  # every step
            slot = np.where(round_.accepted, round_.place + 1, run.n_saved)
            return SavedInStep([Slots(self.ids, slot[None], slice(None))])
        if saves is None or not round_.most:
            return SavedInStep()
        end = round_.t_new if round_.reached is None else round_.reached
        due = saves.due(self.ids, round_.place, round_.count, round_.most, round_.t, round_.h, end)
        nowhere = np.full_like(due.slot, run.n_saved)
        at_end = Slots(self.ids, np.where(due.at_end, due.slot, nowhere), slice(None))
        place = np.where(due.at_end, nowhere, due.slot)
        weights = table.weights(due.x).astype(table.real)
        weights = [weights[i][:, None] for i in range(len(weights))]
        return SavedInStep([at_end], [Slots(self.ids, place, slice(None), due.x, weights)])

    def located(self, visit: Visit) -> Sequence[LocatedEvent]:
        """Return the events in the step."""
        events = sorted(visit.about.located, key=lambda located: located.stops)
        return [located._replace(row=self.ids[located.columns]) if located.stops else located for located in events]

    def limits(self, visit: Visit) -> tuple[Array, Array] | None:
        """Return the times of f at both ends of the step: see `Run.limits`."""
        start = end = np.full_like(visit.t, np.nan)
        for located in visit.about.located:
            if located.stops:
                backwards, real = -1.0 if self.sign is None else -self.sign[located.columns], self._run.coefficients.real
                end = end.copy()
                end[located.columns] = np.where(located.x == 1.0, beside(located.time, backwards, real), np.nan)
        return None if end is start else (start, end)

    def moves(self, visit: Visit) -> Array:
        """Return a mask of the columns in which the step ends at the end of tspan."""
        mask = visit.step_mask & (visit.about.t_new == self._run.ends[self.ids])
        for located in visit.about.located:
            if located.stops:  # the step ends before the end of tspan
                mask[located.columns] = False
        return mask
