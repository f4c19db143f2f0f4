"""The solve: rounds of one step of all trajectories that still move."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.coefficients import DeviceCoefficients
from mpiad.ensemble.controller import LEAST_ERROR
from mpiad.ensemble.entrance import least_step
from mpiad.ensemble.happened import events_of
from mpiad.ensemble.on_device.arguments import check
from mpiad.ensemble.on_device.events import EventWatch
from mpiad.ensemble.on_device.every_step import EveryStep
from mpiad.ensemble.on_device.rates import parameters_of, rates_of
from mpiad.ensemble.on_device.record import Events, Record, Round
from mpiad.ensemble.on_device.saving import SaveTimes
from mpiad.ensemble.on_device.stages import Stages
from mpiad.ensemble.on_device.trials import Look, Try
from mpiad.ensemble.on_device.working_set import WorkingSet
from mpiad.ensemble.outcome import Outcome
from mpiad.ensemble.retcodes import ReturnCode
from mpiad.ensemble.settings import Settings
from mpiad.ensemble.starting import first_step
from mpiad.transport.device_arrays import arrays_of

__all__ = ["integrate"]

# As on the host: what is left to the end where steps are fixed, of a step.
_ROUNDING = 1e-9
_SUCCESS, _TIRED, _STUCK, _UNSTABLE = (
    code.code for code in (ReturnCode.Success, ReturnCode.MaxIters, ReturnCode.DtLessThanMin, ReturnCode.Unstable)
)


def integrate(batch: Batch, settings: Settings) -> Outcome:
    """Solve all trajectories of a batch whose states are device arrays.

    Parameters
    ----------
    batch : Batch
        With start and end on the host.
    settings : Settings

    Returns
    -------
    Outcome
        States and saved states on the device; the rest on the host, brought there in one copy at the end.

    Raises
    ------
    NotImplementedError
        Where f, or a condition of events, uses a traced value from around it.
    TypeError, ValueError
        Where f isn't written for columns, or parameters aren't where the states are.
    """
    check(batch)
    if not batch.size:  # as on ranks that are more than trajectories
        return _nothing(batch, settings)
    with np.errstate(all="ignore"):
        return _Solve(batch, settings).outcome()


def _nothing(batch: Batch, settings: Settings) -> Outcome:
    outcome, home = Outcome.empty(batch, settings), arrays_of(batch.u0)
    saves = None
    if outcome.saved is not None:
        saves = SaveTimes(settings.saveat, batch, np.ones(0))  # type: ignore[arg-type]
        outcome.saved = home.empty(outcome.saved.shape, batch.u0.dtype)  # type: ignore[union-attr]
    elif settings.saveat is None:
        outcome.saved, outcome.saved_times = home.empty((0, 1, len(batch.u0)), batch.u0.dtype), np.empty((0, 1))  # type: ignore[union-attr]
    if settings.record:
        every = EveryStep(batch) if settings.saveat is None else None
        outcome.record = Record(batch, DeviceCoefficients(settings.alg.tableau, batch.u0), saves or every)
        if settings.events:
            none: Any = home.empty((0,), float)  # type: ignore[union-attr]
            outcome.record.events = Events(none, none.astype(np.int64), none, [])
    return outcome


class _Solve:
    """One solve."""

    def __init__(self, batch: Batch, settings: Settings):
        self._batch, self._settings, u0 = batch, settings, batch.u0
        self._arrays: Any = arrays_of(u0)
        self._table, self._rates = DeviceCoefficients(settings.alg.tableau, u0), rates_of(batch.f, batch.shape)
        real = self._table.real.type
        self._rtol = real(settings.rtol)
        given = settings.atol
        self._atol = self._arrays.to_device(np.asarray(given, real)) if np.ndim(given) else real(given)  # type: ignore[arg-type]
        self._signs = np.where(batch.end < batch.start, -1.0, 1.0)
        self._saves = None
        if settings.saveat is not None and settings.saveat.shape[-1]:
            self._saves = SaveTimes(settings.saveat, batch, self._signs, bool(settings.events))
        self._watch = EventWatch(settings.events, batch, self._table) if settings.events else None
        self._looks = self._saves is not None and self._saves.looks
        self._steps = EveryStep(batch) if settings.saveat is None else None
        self._record = None
        if settings.record:
            self._record = Record(batch, self._table, self._saves or self._steps, settings.checkpoints)
        # Results, filled in as trajectories end.
        self._end = self._arrays.copy(u0)
        # All as doubles, counts and codes too, so that they come to the host in one copy.
        self._facts = self._arrays.full((4, batch.size), 0.0, float)
        self._saved = self._save_step = None
        if self._saves is not None:
            shape = (batch.size, self._saves.count + 1, len(u0))  # the last place is for what nobody asked for
            self._saved = self._arrays.full(shape, np.nan, u0.dtype)

    def outcome(self) -> Outcome:
        """Advance until all have ended, and return the results."""
        now, alive = self._entered(), self._batch.size
        still = int(np.count_nonzero(self._batch.start == self._batch.end))
        alive = self._told(still, alive)
        turn = 0
        while alive:
            turn += 1
            now, left = self._round(now, turn)
            alive = self._told(alive - left, alive)
            # Columns of ended trajectories cost as much as others: they go when they are the half of all.
            if 2 * alive <= len(now.ids) and alive:
                self._leave(now)
                now = now.at(np.flatnonzero(now.live), self._batch.p.varies)
                if self._record is not None:
                    self._record.begin(now)
        self._leave(now)
        return self._results()

    def _told(self, ended: int, alive: int) -> int:
        if ended and self._settings.progress is not None:
            self._settings.progress(ended)
        return alive - ended

    # ---- the start

    def _spread(self, values: np.ndarray) -> Array:
        """Return numbers of the host, one for each trajectory, on the device; without a copy where all are the same."""
        if (values == values[0]).all():
            return self._arrays.full(values.shape, values.dtype.type(values[0]), values.dtype)
        return self._arrays.to_device(values)

    def _entered(self) -> WorkingSet:
        batch, settings, u = self._batch, self._settings, self._batch.u0
        t, end = self._spread(batch.start * self._signs), self._spread(batch.end * self._signs)
        sign = self._spread(self._signs) if (self._signs < 0).any() else None
        p = parameters_of(batch, batch.p.leaves)
        actual = self._table.time(0, t, t, t, sign)
        self._rates.check(u, p, actual)
        if self._watch is not None:
            self._watch.check(u, p, self._actual(t, sign))
        rate = lambda u, t: self._directed(self._rates.at(u, p, self._table.time(0, t, t, t, sign)), sign)  # noqa: E731
        k = rate(u, t)
        if settings.dt is not None:
            h = self._arrays.full(t.shape, float(settings.dt), float)
        else:
            h = first_step(rate, u, t, end, k, self._rtol, self._atol, settings.alg.tableau.error_order)
        h = np.maximum(np.minimum(h, settings.dtmax), least_step(t))
        none = self._arrays.full(t.shape, 0, np.int64)
        live = self._spread(batch.start != batch.end)
        place = none if not self._looks else self._spread(self._saves.initial.sum(axis=1))  # type: ignore[union-attr]
        now = WorkingSet(
            self._arrays.arange(batch.size), t, end, h, np.full_like(h, LEAST_ERROR), none, none, place,
            np.full_like(none, _SUCCESS), live, none > 0, sign, u, k, self._conditions(u, p, t, sign), list(batch.p.leaves),
        )  # fmt: skip
        if self._record is not None:
            self._record.begin(now)
        return now

    @staticmethod
    def _actual(t: Array, sign: Array | None) -> Array:
        return t if sign is None else t * sign

    def _conditions(self, u: Array, p: Any, t: Array, sign: Array | None) -> Array | None:
        return None if self._watch is None else self._watch.values(u, p, self._actual(t, sign))

    def _directed(self, k: Array, sign: Array | None) -> Array:
        return k if sign is None else k * sign.astype(self._table.real)

    # ---- one round

    def _round(self, now: WorkingSet, turn: int) -> tuple[WorkingSet, int]:
        """Try one step of every trajectory; return the working set after it, and how many of it still move."""
        t_new = self._proposed(now)
        h = t_new - now.t
        p = parameters_of(self._batch, now.leaves)
        stages = Stages(self._table, self._rates, now.u, now.k, p, now.t, h, t_new, now.sign)
        values = self._conditions(stages.new, p, t_new, now.sign)
        tried = Try(t_new, stages.new, stages.k[-1], *self._judged(now, stages, h, t_new), values)
        accepted = tried.accepted
        moved, happened = self._moved(now, tried, turn), None
        crossed = None
        if self._watch is not None:
            crossed = self._watch.crossed(now.values, tried.values, accepted)  # type: ignore[arg-type]
        look = self._looked(now, moved, accepted, crossed)
        if any(look.events):
            happened = self._watch.happened(now, stages, h, crossed, look.events)  # type: ignore[union-attr, arg-type]
            tried = tried.cut(happened, now.t)
            moved = self._moved(now, tried, turn)
            look = self._looked(now, moved, accepted, None)
        count = look.count
        done = Round(
            now.t, h, t_new, accepted, now.u, now.place, count if look.most else None,
            tried.t if happened else None, look.most, happened.met if happened else [],
        )  # fmt: skip
        if self._record is not None:
            self._record.note(done)
        if self._steps is not None:
            self._steps.note(now, moved, accepted)
            moved = moved._replace(place=now.place + count)
        elif look.most:
            self._save(now, stages, tried, count, look.most, h)
            moved = moved._replace(place=now.place + count)
        return moved, look.alive

    def _moved(self, now: WorkingSet, tried: Try, turn: int) -> WorkingSet:
        """Return the working set after a round."""
        accepted, code = tried.accepted, tried.code
        moved = now._replace(
            t=np.where(accepted, tried.t, now.t), h=tried.h, q2=tried.q2, number=now.number + accepted,
            tries=now.tries + now.live, u=np.where(accepted, tried.u, now.u), k=np.where(accepted, tried.k, now.k),
            rejected=~accepted, code=code,
        )  # fmt: skip
        if tried.values is not None:
            moved = moved._replace(values=np.where(accepted, tried.values, now.values))
        if turn >= self._settings.max_steps:
            moved = moved._replace(code=np.where(now.live & (code < 0), _TIRED, code))
        # Codes below zero: still under way.
        return moved._replace(live=now.live & (moved.code < 0), code=np.where(now.live, moved.code, now.code))

    def _proposed(self, now: WorkingSet) -> Array:
        t_new = now.t + now.h
        if self._settings.alg.tableau.error is None:
            # Many equal steps don't sum up to the span; a last one of rounding's size is none.
            t_new = np.where(t_new > now.end - _ROUNDING * now.h, now.end, t_new)
        # Ended ones stay where they are.
        return np.where(now.live, np.minimum(t_new, now.end), now.t)

    def _judged(self, now: WorkingSet, stages: Stages, h: Array, t_new: Array) -> tuple[Array, Array, Array, Array]:
        """Return which steps are accepted, the codes of all (below zero: none yet), the next steps and errors."""
        settings, unfinished = self._settings, np.full_like(now.code, -1)
        if settings.alg.tableau.error is None:
            accepted = np.all(np.isfinite(stages.new), axis=0) & now.live
            code = np.where(accepted, np.where(t_new == now.end, _SUCCESS, unfinished), _UNSTABLE)
            return accepted, code, now.h, now.q2
        error, controller = stages.error(now.u, self._rtol, self._atol), settings.alg.controller
        accepted = (error < 1.0) & now.live
        factor = controller.factor(error, now.q2, accepted, now.rejected, settings.alg.tableau.error_order)
        h_next = np.minimum(h * factor, settings.dtmax)
        done = accepted & (t_new == now.end)
        least = least_step(np.where(accepted, t_new, now.t))
        small = (h_next < least) & ~done
        stuck = np.where(np.isfinite(error), _STUCK, _UNSTABLE)
        code = np.where(done, _SUCCESS, np.where(small & ~accepted, stuck, unfinished))
        q2 = np.where(accepted, np.maximum(error, LEAST_ERROR), now.q2)
        # What has ended mustn't make steps of zero or NaN of its own.
        return accepted, code, np.where(now.live, np.where(small & accepted, least, h_next), 1.0), q2

    def _looked(self, now: WorkingSet, moved: WorkingSet, accepted: Array, crossed: Array | None) -> Look:
        """Return what the host learns of a round: its one look, and a second one after events."""
        numbers, count = [np.sum(moved.live)], None
        if self._looks:
            passed = self._saves.passed(now.ids, moved.t)  # type: ignore[union-attr]
            count = np.where(accepted, passed - now.place, 0)
            numbers.append(np.max(count))
        if crossed is not None:
            numbers += [np.sum(one) for one in (crossed[e] for e in range(len(crossed)))]
        told = self._arrays.to_host(np.stack(numbers) if len(numbers) > 1 else numbers[0]).reshape(-1).tolist()
        alive, most = told[0], told[1] if self._looks else 0
        if self._steps is not None:
            most, count = 1, accepted.astype(np.int64)
        return Look(alive, most, count, told[1 + self._looks :])

    def _save(self, now: WorkingSet, stages: Stages, tried: Try, count: Array, most: int, h: Array) -> None:
        saves: Any = self._saves
        due = saves.due(now.ids, now.place, count, most, now.t, h, tried.t)
        for part in saves.groups(most, now.u.size):
            inside = stages.inside(now.u, due.x[part])
            states = np.where(due.at_end[part][:, None], tried.u, inside)
            self._saved[now.ids, due.slot[part]] = np.moveaxis(states, 1, -1)  # type: ignore[index]

    # ---- the end

    def _leave(self, now: WorkingSet) -> None:
        """Take the results of all columns, for good or until they move on."""
        self._end[:, now.ids] = now.u
        code = np.where(now.code < 0, _SUCCESS, now.code)  # those under way come here again
        facts = now.t, code, now.number, now.tries
        self._facts[:, now.ids] = np.stack([fact.astype(float) for fact in facts])

    def _results(self) -> Outcome:
        t, code, number, tries = self._arrays.to_host(self._facts)
        batch, codes = self._batch, code.astype(np.int8)
        saved = None if self._saves is None else self._all_saved(codes)
        outcome = Outcome(
            self._end, t * self._signs, codes, number.astype(np.int64), (tries - number).astype(np.int64), saved, None,
            np.ones(batch.size),
        )  # fmt: skip
        if self._steps is not None:
            start = self._spread(batch.start * self._signs)
            outcome.saved, times = self._steps.collected(start, int(outcome.naccept.max()))
            outcome.saved_times = self._arrays.to_host(times) * self._signs[:, None]
        rows = None if self._watch is None else self._watch.rows()
        passed: list[tuple[int, int, int]] = []
        if rows is not None:
            told = self._arrays.to_host(rows)
            outcome.event_times, passed = events_of(told, self._settings.events, outcome.failed)
        if self._record is not None:
            self._record.close(outcome.failed)
            outcome.record = self._record
            if rows is not None:
                reached = self._facts[0] * self._spread(self._signs)
                self._record.events = Events(reached, rows[0].astype(np.int64), rows[4], passed)
        return outcome

    def _all_saved(self, codes: np.ndarray) -> Array:
        saves: Any = self._saves
        saved = self._saved[:, : saves.count]  # type: ignore[index]
        for mask, states in ((saves.initial, self._batch.u0), (saves.final & (codes == _SUCCESS)[:, None], self._end)):
            if mask.all():
                saved = np.broadcast_to(states.T[:, None], saved.shape)
            elif mask.any():
                saved = np.where(self._spread_mask(mask)[:, :, None], states.T[:, None], saved)
        return self._arrays.copy(saved)

    def _spread_mask(self, mask: np.ndarray) -> Array:
        """Return a mask over trajectories and saved times on the device, one row where all trajectories' are the same."""
        same = bool((mask == mask[:1]).all())
        return self._arrays.to_device(np.ascontiguousarray(mask[:1] if same else mask))
