"""The vectorized solver on a device: each round attempts one step of all trajectories.

Per round the host reads a few numbers: the number of active trajectories, the number of saved times in the column that
has the most of them in this round, and for each event the number of columns in which it occurs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.batch import Batch, on_device_of
from mpiad.ensemble.coefficients import DeviceCoefficients
from mpiad.ensemble.controller import LEAST_ERROR
from mpiad.ensemble.derivative import derivative_of
from mpiad.ensemble.events import EventWatch, in_order
from mpiad.ensemble.initialization import derivative_at, started
from mpiad.ensemble.on_device.device_stages import stages_on_device
from mpiad.ensemble.on_device.round_record import Events, Record, Round
from mpiad.ensemble.on_device.saved_slots import EveryStep, SaveTimes
from mpiad.ensemble.outcome import Outcome, ReturnCode
from mpiad.ensemble.record import Step
from mpiad.ensemble.settings import Settings
from mpiad.ensemble.working_set import Turns
from mpiad.transport.devices.device_arrays import arrays_of


def integrate(batch: Batch, settings: Settings) -> Outcome:
    """Solve all trajectories of a batch whose states are device arrays; its start and end times are on the host.

    In the outcome, states, saved states and the record for derivatives are on the device. Everything else is on the host;
    end times, return codes and numbers of steps are copied in one transfer, saved times and events separately.
    """
    working_set = DeviceWorkingSet(batch, settings)
    with np.errstate(all="ignore"):
        if batch.size:  # there may be more ranks than trajectories
            working_set.run()
        return working_set.outcome()


class DeviceWorkingSet(Turns):
    """The working set of a solve: all trajectories that haven't been removed after their ends."""

    _one = 1.0

    def __init__(self, batch: Batch, settings: Settings):
        super().__init__(settings)
        self._batch, self._alive, u0 = batch, batch.size, batch.u0
        self._xp: Any = arrays_of(u0)
        self._table, self._derivative = DeviceCoefficients(self._tableau, u0), derivative_of(batch.f, batch.shape)
        real = self._table.real.type
        atol = np.asarray(settings.atol, real)
        self._rtol, self._atol = real(settings.rtol), self._xp.to_device(atol) if atol.ndim else real(atol)
        self._signs = np.where(batch.end < batch.start, -1.0, 1.0)
        self._saves: Any = None
        if settings.saveat is None:
            self._saves = EveryStep(batch)
        elif settings.saveat.shape[-1]:
            self._saves = SaveTimes(settings.saveat, batch, self._signs, bool(settings.events))
        self._examines_steps = settings.saveat is not None and self._saves is not None and self._saves.examines_steps
        self._watch = EventWatch(settings.events, self._table, batch.parameters) if settings.events else None
        self._record = Record(batch, self._table, self._saves, settings.checkpoints) if settings.record else None
        # Results, written when trajectories are removed. `_outcomes` is double, so that one copy to the host is enough.
        self._u_end, self._outcomes = self._xp.copy(u0), self._xp.full((4, batch.size), 0.0, float)
        self._saved: Array = None
        if settings.saveat is not None:
            shape = batch.size, settings.saveat.shape[-1] + 1, len(u0)  # the last slot is for unneeded values
            self._saved = self._xp.full(shape, np.nan, u0.dtype)

    def run(self) -> None:
        """Advance until all trajectories have ended."""
        self._enter()
        self._report_progress(int(np.count_nonzero(self._batch.start == self._batch.end)))
        while self._alive:
            self._take_turn()
            if 2 * self._alive <= len(self.ids) and self._alive:
                self._remove_ended()
        self._store_results()

    def _report_progress(self, ended: int) -> None:
        self._alive -= ended
        if ended and self._settings.progress is not None:
            self._settings.progress(ended)

    # ---- the working set

    def _enter(self) -> None:
        batch, settings, n = self._batch, self._settings, self._batch.size
        self.ids, self.u, self._leaves = self._xp.arange(n), batch.u0, list(batch.p.leaves)
        self.t, self.end = (on_device_of(times * self._signs, batch.u0) for times in (batch.start, batch.end))
        self._sign = on_device_of(self._signs, batch.u0) if (self._signs < 0).any() else None
        self._p = batch.p.of_columns(self._leaves, len(batch.shape) > 1)
        rate = lambda u, t: derivative_at(self._derivative, u, self._p, t, self._sign)  # noqa: E731
        self.h, k = started(rate, self.u, self.t, self.end, settings, self._rtol, self._atol)
        self.live = on_device_of(batch.start != batch.end, batch.u0)
        self.number, self.entered, self._tries = (self._xp.full((n,), 0, np.int64) for _ in range(3))
        self._code = np.full_like(self.ids, ReturnCode.Success.code)
        self.q2, self.rejected = np.full_like(self.h, LEAST_ERROR), self.number > 0
        self.idle = np.where(self.live, 0.0, 1.0)
        self._place = on_device_of(self._saves.initial.sum(axis=1), batch.u0) if self._examines_steps else self.number
        self._stages = stages_on_device(self._table, self._derivative, k, batch)
        self._begin()

    def _remove_ended(self) -> None:
        """Store the results of all columns, and remove the ended trajectories."""
        self._store_results()
        keep, varies = np.flatnonzero(self.live), self._batch.p.varies
        per_column = "ids t end h q2 number entered _tries _place _code live rejected idle u _sign".split()
        for name in per_column:
            array = getattr(self, name)
            setattr(self, name, None if array is None else np.take(array, keep, axis=-1))
        self._leaves = [np.take(leaf, keep, axis=-1) if v else leaf for leaf, v in zip(self._leaves, varies)]
        self._p = self._batch.p.of_columns(self._leaves, len(self._batch.shape) > 1)
        self._stages.first = np.take(self._stages.first, keep, axis=-1)
        self._begin()

    def _begin(self) -> None:
        """Evaluate the event conditions, and begin a block of the record, for a new set of columns."""
        if self._watch is not None:
            self._watch.enter(self.u, self._p, self.t if self._sign is None else self.t * self._sign)
        if self._record is not None:
            self._record.begin(self.ids, self._sign, self._leaves)

    # ---- one round

    def _finish_turn(self, accepted: Array, h: Array, t_new: Array) -> None:
        """Advance by the accepted steps, and end the trajectories that have reached their ends or a terminal event."""
        stages = self._stages
        step = Step(self.ids, self.number, accepted, self.t, h, t_new, self.u, stages.new, stages.k, self._sign)
        crossed = [] if self._watch is None else self._watch.crossed(step, self._p)
        before = self.live, self.end, self.h, self.idle, self._code, self._tries
        self._advance(step, None)
        alive, most, count, column_counts = self._read_counts(step, crossed)
        reached, located = None, []
        if any(column_counts):
            columns = [np.flatnonzero(mask) if n else None for mask, n in zip(crossed, column_counts)]
            found = self._watch.located(step, columns, self._watch.pairs)  # type: ignore[union-attr]
            located, ended = found.located, found.ended
            if ended is not None:
                # Undo `_advance`, and advance by the steps that events have shortened.
                reached = step.t + np.where(ended, found.part, 0.0) * (step.t_new - step.t)
                step = step._replace(t_new=np.where(ended, reached, step.t_new), new=found.states)
                self.live, self.end, self.h, self.idle, self._code, self._tries = before
                self._advance(step, ended)
                alive, most, count, _ = self._read_counts(step, [])
                reached = step.t_new
        if self._record is not None:
            saves = count if most else None
            self._record.note(Round(step.t, h, t_new, accepted, step.u, self._place, saves, reached, most, located))
        if self._settings.saveat is None:
            self._saves.note(step, self.t, self.u)
        elif most:
            self._save(step, h, count, most)
        self._place = self._place + count if most else self._place
        self._report_progress(self._alive - alive)

    def _advance(self, step: Step, terminated: Array | None) -> None:
        """Advance by the accepted steps, and set the return codes of ended trajectories."""
        accepted = step.accepted
        self.t, self.u = np.where(accepted, step.t_new, step.t), np.where(accepted, step.new, step.u)
        self.number, self._stages.first = step.number + accepted, self._stages.following(accepted)
        done = accepted & (self.t == self.end)
        if terminated is not None:
            done = done & ~terminated
            self._end(terminated, ReturnCode.Terminated)
        self._end(done, ReturnCode.Success)
        self._end_failed(accepted)

    def _some_are_small(self) -> bool:
        return True  # the exact answer would require a synchronization of host and device

    def _end(self, mask: Array, code: ReturnCode) -> None:
        self.live, self._code = self.live & ~mask, np.where(mask, code.code, self._code)
        # Later steps of these columns have size zero.
        self.end, self._tries = np.where(mask, self.t, self.end), np.where(mask, self._turn, self._tries)
        self.h, self.idle = (np.where(mask, 1.0, x) for x in (self.h, self.idle))

    def _read_counts(self, step: Step, crossed: list[Array]) -> tuple[int, int, Any, list[int]]:
        """Return the numbers of active trajectories, of saved times (largest; per column), and of columns per event."""
        numbers, count = [np.sum(self.live)], None
        if self._examines_steps:
            count = np.where(step.accepted, self._saves.passed(self.ids, self.t) - self._place, 0)
            numbers.append(np.max(count))
        numbers += [np.sum(mask) for mask in crossed]
        counts = self._xp.to_host(np.stack(numbers) if len(numbers) > 1 else numbers[0]).reshape(-1).tolist()
        if self._settings.saveat is None:
            return counts[0], 1, step.accepted.astype(np.int64), counts[1:]
        return counts[0], counts[1] if self._examines_steps else 0, count, counts[1 + self._examines_steps :]

    def _save(self, step: Step, h: Array, count: Array, most: int) -> None:
        due = self._saves.due(step.ids, self._place, count, most, step.t, h, step.t_new)
        for part in self._saves.groups(most, step.u.size):
            inside = self._stages.inside(step.u, due.x[part])
            states = np.where(due.at_end[part][:, None], step.new, inside)
            self._saved[step.ids, due.slot[part]] = np.moveaxis(states, 1, -1)

    # ---- results

    def _store_results(self) -> None:
        self._u_end[:, self.ids] = self.u
        outcomes = self.t, self._code, self.number, self._tries
        self._outcomes[:, self.ids] = np.stack([outcome.astype(float) for outcome in outcomes])

    def outcome(self) -> Outcome:
        """Return the results."""
        batch, events = self._batch, self._settings.events
        t, code, number, tries = self._xp.to_host(self._outcomes) if batch.size else np.zeros((4, 0))
        codes, naccept = code.astype(np.int8), number.astype(np.int64)
        saved = None if self._saved is None else self._all_saved(codes)
        outcome = Outcome(self._u_end, t * self._signs, codes, naccept, (tries - number).astype(np.int64), saved, None)
        if self._settings.saveat is None:
            start = on_device_of(batch.start * self._signs, batch.u0)
            outcome.saved, times = self._saves.collected(start, int(naccept.max(initial=0)))
            outcome.saved_times = self._xp.to_host(times) * self._signs[:, None]
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
                reached = self._outcomes[0] * on_device_of(self._signs, batch.u0)
                self._record.events = Events(reached, rows[0].astype(np.int64), rows[4], order)
        return outcome

    def _all_saved(self, codes: np.ndarray) -> Array:
        saves, saved = self._saves, self._saved[:, :-1]
        if saves is None:
            return saved
        final = saves.final & (codes == ReturnCode.Success.code)[:, None]
        for mask, states in ((saves.initial, self._batch.u0), (final, self._u_end)):
            if mask.all():
                saved = np.broadcast_to(states.T[:, None], saved.shape)
            elif mask.any():
                same = bool((mask == mask[:1]).all())
                on_device = self._xp.to_device(np.ascontiguousarray(mask[:1] if same else mask))
                saved = np.where(on_device[:, :, None], states.T[:, None], saved)
        return self._xp.copy(saved)
