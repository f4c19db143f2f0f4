"""Solves with events that change the state: in pieces, from event to event.

Each piece is a solve of its own, of all trajectories that still move: each starts at the time and in the state that its
last event left, and goes to its next given time, to the end of tspan, or to where a condition vanishes, which ends it as a
terminal event does. So any way to solve serves, with its steps, saved times and derivatives, and a trajectory's numbers
depend on no other. A piece's first step is the one that would have been next.

Where the affect leaves a condition at its root, the next piece looks for the way back only, and its first step is so short
that it isn't back by then (`root_departure`).

A kernel may let events act itself: then all is one piece. By columns trajectories whose events come at
times of their own re-enter the running columns (`rolling_pieces`). Both give the numbers of pieces that all go together.

Where derivatives are wanted the steps of all pieces make one record, in which events stand between steps
(`hybrid_record`, `jumps`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.ensemble.batch import Batch, two_at_least
from mpiad.ensemble.derivative import derivative_of, locked
from mpiad.ensemble.event import Event
from mpiad.ensemble.event_affects import affected
from mpiad.ensemble.given_times import GivenTimes
from mpiad.ensemble.hybrid_record import HappenedEvents, HybridRecord
from mpiad.ensemble.initialization import derivative_at
from mpiad.ensemble.jumps import FOUND, Jump
from mpiad.ensemble.outcome import Outcome, ReturnCode, evaluations
from mpiad.ensemble.piece_saves import PieceSaves
from mpiad.ensemble.rolling_pieces import RollingPieces
from mpiad.ensemble.root_departure import MOST_SHORT, SHORT, departure, distance_ahead
from mpiad.ensemble.settings import DueTimes, Settings

__all__ = ["HybridSolve"]

_MOVING = -1  # no return code yet
# At which given time a piece ends at the latest: none, but that is the end of tspan, or its start, since an event has ended
# the trajectory; or it stays where it failed.
_AT_END, _HERE, _FAILED = -1, -2, -3


class HybridSolve:
    """The state of such a solve, and at its end its results.

    - `advance`: ``advance(batch, settings)`` solves a piece.
    - `batch`: of plain arrays on the host.
    - `way`: "rounds", "compiled", "whole" or "rolling": whether pieces of all are solved together, by columns or by
      kernels; whether `advance` lets events act itself; or whether it goes on with trajectories that have ended
      (`Settings.again`).
    - `u`, of shape (d, N).
    - `t`, `codes`, `naccept`, `nreject`, `nf`, of shape (N,).
    - `record`: None where the settings ask for none.
    """

    def __init__(
        self, advance: Callable[[Batch, Settings], Outcome], batch: Batch, settings: Settings, way: str = "rounds"
    ):
        self.batch, self.settings, self.advance, self.way = batch, settings, advance, way
        count, events = batch.size, settings.events
        self._signs = np.where(batch.end < batch.start, -1.0, 1.0)
        self._backward = bool((self._signs < 0).any())
        self.given = GivenTimes(events, batch, self._signs)
        self._found = [e for e, event in enumerate(events) if event.times is None]
        self._sides = [e for e in self._found if events[e].acts and not events[e].direction]  # by the side each is on
        self.saves = PieceSaves(batch, settings.saveat, self._signs)  # type: ignore[arg-type]
        self.u, self.t, self.codes = batch.u0.copy(), batch.start.copy(), np.full(count, _MOVING)
        self.naccept, self.nreject, self.nf = (np.zeros(count, np.int64) for _ in range(3))
        self._derivative = derivative_of(batch.f, batch.shape)
        self._slot = self.given.first.copy()
        self._cut = np.zeros(count, bool)  # by terminal events, which may be others' neighbours in time
        self._restart, self._side = np.full(count, np.inf), np.zeros((len(events), count))
        self._last, self._short = batch.start.copy(), np.zeros(count, int)
        self.record = HybridRecord(settings) if settings.record else None
        self.happened = HappenedEvents(self._found, self.given, self._signs)

    def run(self) -> None:
        """Go on until all trajectories have ended."""
        with np.errstate(all="ignore"):
            while True:
                self.meet_given_times()
                moving = np.flatnonzero(self.codes == _MOVING)
                if not moving.size:
                    return
                if self.way == "whole":
                    return self._flow_through(moving if self.record is None else np.arange(self.batch.size))
                if self.way == "rolling" and not self._sides and (self._found or not self.given.alike):
                    outcome = RollingPieces(self, moving).run()
                    return self.record and self.record.keep_all(moving, outcome, self.batch.size)
                for ids in self._alike(moving):
                    self._flow(ids)

    def moving(self, ids: Array) -> Array:
        """Tell which of some trajectories have not ended."""
        return self.codes[ids] == _MOVING

    def _end(self, ids: Array, code: ReturnCode) -> None:
        self.codes[ids] = code.code
        if self.settings.progress is not None and len(ids):
            self.settings.progress(len(ids))

    # ---- pieces

    def _alike(self, ids: Array) -> list[Array]:
        """Return the trajectories by the ways in which their conditions are to vanish, where an event is for both."""
        own = self._sides
        if not own:
            return [ids]
        for e in own:
            unknown = ids[self._side[e, ids] == 0]
            self._side[e, unknown] = np.sign(self._condition(e, unknown, self.u[:, unknown], self.t[unknown]))
        kinds, which = np.unique(self._side[np.ix_(own, ids)], axis=1, return_inverse=True)
        return [ids[which.reshape(-1) == kind] for kind in range(kinds.shape[1])]

    def piece(self, ids: Array) -> tuple[Array, Batch, Settings]:
        """Return the next pieces of some trajectories, with all saved times: their slots, and what to solve."""
        slot, signs, start = self._of(self._slot, ids), self._of(self._signs, ids), self._of(self.t, ids).copy()
        due, end, cut = self._next(self.given.times, ids), self._of(self.batch.end, ids), self._of(self._cut, ids)
        ends = signs * due > signs * end if self._backward else due > end
        slot, stop = np.where(ends, _AT_END, slot), np.where(ends, end, due)
        if cut.any():
            slot, stop = np.where(cut, _HERE, slot), np.where(cut, start, stop)
        batch = self.batch._replace(
            u0=self._of(self.u, ids).copy(), start=start, end=stop, p=self.batch.p._replace(leaves=self._leaves(ids))
        )
        settings = self.settings._replace(
            events=tuple(self._as_terminal(e, ids) for e in self._found), progress=None,
            restarts=self._of(self._restart, ids).copy(), saveat=self.saves.times(ids),
        )  # fmt: skip
        return slot, batch, settings

    def _flow(self, ids: Array) -> None:
        """Solve from where trajectories are to where their next event is, or tspan ends."""
        slot, batch, settings = self.piece(ids)
        places = self.saves.places(ids, batch.end)
        settings = settings._replace(saveat=self.saves.due(ids, places))
        # The record of all pieces knows which steps' states are to be kept; kernels keep none then.
        settings = settings if self.way == "compiled" else settings._replace(checkpoints=None)
        outcome = self.advance(batch, settings)
        if self.record is not None:
            self.record.keep(ids, outcome, self.naccept[ids])
        self.finish(ids, slot, batch, settings, outcome, places)

    def finish(
        self, ids: Array, slot: Array, batch: Batch, settings: Settings, outcome: Outcome, places: Array | None = None
    ) -> None:
        """Take the results of pieces, which may have saved all times, and let the events act that ended them."""
        given = np.isfinite(settings.restarts)  # type: ignore[arg-type]
        # The next piece goes on with the step that would be next, unless an event that is met now says otherwise.
        self._set(self._restart, ids, np.where(batch.start == batch.end, settings.restarts, outcome.following))  # type: ignore[arg-type]
        self._set(self._side, ids, 0.0)
        places = self.saves.all_places(ids) if places is None else places
        self._take(ids, slot, places, batch, outcome, given)

    def _flow_through(self, ids: Array) -> None:
        """Solve from the start to the end, with all events on the way."""
        first, failed = self._of(self._slot, ids), ~self.moving(ids)
        # What has failed at the start stays there.
        end = np.where(failed, self._of(self.batch.start, ids), self._of(self.batch.end, ids))
        places = self.saves.places(ids, end)
        places[failed] = -1
        slots = len(self.given.times) if self.settings.record else 0
        due = DueTimes(
            self._of(self.given.times, ids), self._of(self.given.event, ids), np.stack([first, np.zeros(len(ids), int)]),
            np.full((len(ids), slots), -1), np.empty((len(ids), slots, len(self.u)), self.u.dtype), tuple(self._found),
        )  # fmt: skip
        _, batch, settings = self.piece(ids)
        events = tuple(self.settings.events[e] for e in self._found)
        batch, settings = batch._replace(end=end), settings._replace(events=events, restarts=None, given_times=due)
        outcome = self.advance(batch, settings)
        self._take(ids, np.where(failed, _FAILED, _AT_END), places, batch, outcome)
        self._set(self.nf, ids, self._of(self.nf, ids) + due.slots[1])
        if self.record is not None:
            self.record.keep_whole(outcome, due, self)
        self.happened.passed = ids, first, due.slots[0]

    def _of(self, x: Array, ids: Array) -> Array:
        """Return an array of some trajectories, each once and in order, which nobody writes into: of all without a copy."""
        return x if len(ids) == self.batch.size else x[..., ids]

    def _set(self, x: Array, ids: Array, values: Array | float) -> None:
        """Write the values of some trajectories, each once and in order."""
        if len(ids) == self.batch.size:
            x[...] = values
        else:
            x[..., ids] = values

    def _next(self, table: Array, ids: Array) -> Array:
        """Return what a table of given times has of the next one of some trajectories."""
        slot = self._of(self._slot, ids)
        return self._of(table[slot[0]], ids) if (slot == slot[0]).all() else table[slot, ids]

    def _leaves(self, ids: Array) -> list[Any]:
        p = self.batch.p
        return [locked(self._of(leaf, ids)) if varies else leaf for leaf, varies in zip(p.leaves, p.varies)]

    def _parameters(self, ids: Array) -> Tree:
        """Return the parameters of some trajectories as functions of the user's take them: of one twice."""
        leaves, varies = self._leaves(ids), self.batch.p.varies
        if len(ids) == 1:
            leaves = [np.repeat(leaf, 2, axis=-1) if own else leaf for leaf, own in zip(leaves, varies)]
        return self.batch.p.build(leaves)

    def _as_terminal(self, e: int, ids: Array) -> Event:
        """Return an event as the pieces look for it: one that acts ends them."""
        event = self.settings.events[e]
        if not event.acts:
            return event
        # What leaves on one side comes back from there.
        direction = event.direction or -int(self._side[e, ids[0]])
        return Event(event.condition, True, direction)

    def _take(
        self, ids: Array, slot: Array, places: Array, batch: Batch, outcome: Outcome, given: Array | bool = False
    ) -> None:
        """Take the results of pieces, whose first steps were `given` or not."""
        self._set(self.u, ids, outcome.u_end)
        self._set(self.t, ids, outcome.t_reached)
        given, begun = given | (self.settings.dt is not None), self.naccept[ids]
        calls = evaluations(outcome.naccept, outcome.nreject, self.settings.alg, given)
        for total, more in ((self.naccept, outcome.naccept), (self.nreject, outcome.nreject), (self.nf, calls)):
            self._set(total, ids, self._of(total, ids) + more)
        self.saves.take(ids, outcome, places, batch, begun)
        codes = outcome.codes
        for code in np.flatnonzero(np.bincount(codes)).tolist():
            if code == ReturnCode.Success.code:
                self._end(ids[(codes == code) & (slot == _AT_END)], ReturnCode.Success)
                self._end(ids[(codes == code) & (slot == _HERE)], ReturnCode.Terminated)
            elif code != ReturnCode.Terminated.code or self.way == "whole":
                self._end(ids[codes == code], list(ReturnCode)[code])
        if outcome.event_table is not None:
            local, which = self.happened.note(ids, outcome, begun)
            gone = np.abs(outcome.t_reached - batch.start)
            if self.way != "whole":
                self._meet_conditions(ids, codes == ReturnCode.Terminated.code, local, which, gone)
        # Counted over all pieces: in each of them alone the limit may never be reached.
        tired = self._of(self.naccept + self.nreject >= self.settings.max_steps, ids)
        if tired.any():
            self._end(ids[tired & (self.codes[ids] == _MOVING)], ReturnCode.MaxIters)

    # ---- events

    def _meet_conditions(self, ids: Array, ended: Array, local: Array, which: Array, gone: Array) -> None:
        """Let the events act that ended pieces; `gone` is how long the pieces were."""
        events = self.settings.events
        for e in self._found:
            if not (events[e].acts or events[e].terminal):
                continue
            met = np.flatnonzero(ended & self.moving(ids) & (np.bincount(local[which == e], minlength=len(ids)) > 0))
            own = ids[met]
            if events[e].acts and met.size:
                before = self._condition(e, own, self.u[:, own], self.t[own])
                self._jump(e, own, None)
                self._look_ahead(e, own, before, gone[met])
            if events[e].terminal:
                self._cut[own] = True
        self._count_short(ids[ended & (self.codes[ids] == _MOVING)])

    def _jump(self, e: int, ids: Array, slot: Array | None) -> None:
        """Let an event act. What it makes of a state must be finite; the trajectory ends otherwise, in the state before."""
        event, p, u, t = self.settings.events[e], self._parameters(ids), self._of(self.u, ids), self._of(self.t, ids)
        if len(ids) == 1:  # two columns at least, wherever functions of the user's are called
            u, t = np.repeat(u, 2, axis=-1), np.repeat(t, 2)
        after = affected(event, self.batch, u, p, t)[:, : len(ids)]
        sane = np.isfinite(after).all(axis=0)
        if not sane.all():
            self._end(ids[~sane], ReturnCode.Unstable)
            ids, slot, after = ids[sane], None if slot is None else slot[sane], after[:, sane]
        at = np.full(len(ids), FOUND) if slot is None else slot
        if self.record is not None:
            self.record.jumps.append(Jump(ids, self.naccept[ids], e, at, self.t[ids], self.u[:, ids], after))
        self._set(self.u, ids, after)
        if slot is not None:
            self.happened.note_given(ids, e, self._of(self.t, ids), slot)

    def _look_ahead(self, e: int, ids: Array, before: Array, gone: Array) -> None:
        """Find on which side of its root a condition goes on, where the affect has left it there, and when it is back."""
        u, t, span = self.u[:, ids], self.t[ids], np.abs(self.batch.end[ids] - self.batch.start[ids])
        ahead, rate = distance_ahead(gone, span), self._rate(ids, u, t)
        straight, later = u + ahead * rate, t + self._signs[ids] * ahead
        bent = u + 0.5 * ahead * (rate + self._rate(ids, straight, later))
        values = [self._condition(e, ids, *at) for at in ((u, t), (straight, later), (bent, later))]
        found = departure((before, *values), self.settings.events[e].direction, gone, span)
        # The first step must not go beyond, where nobody would see that it had left.
        self._restart[ids] = np.minimum(self._restart[ids], 0.25 * found.back)
        self._side[e, ids] = found.side
        self._end(ids[found.endless & (self.codes[ids] == _MOVING)], ReturnCode.Zeno)

    def _rate(self, ids: Array, u: Array, t: Array) -> Array:
        """Return f in the direction of the solve for some trajectories."""
        twice = two_at_least(len(ids))
        signs, p = self._signs[ids[twice]], self._parameters(ids)
        sign = signs if self._backward else None
        return derivative_at(self._derivative, u[:, twice], p, signs * t[twice], sign)[:, : len(ids)]

    def _condition(self, e: int, ids: Array, u: Array, t: Array) -> Array:
        """Return the values of an event's condition for some trajectories."""
        if not len(ids):
            return np.empty(0)
        twice = two_at_least(len(ids))
        p = self._parameters(ids)
        return self.settings.events[e].value(u[:, twice], p, t[twice])[: len(ids)]

    def _count_short(self, ids: Array) -> None:
        """Count events that follow each other at once, and end what has too many of them."""
        span = np.abs(self.batch.end[ids] - self.batch.start[ids])
        short = np.abs(self.t[ids] - self._last[ids]) <= SHORT * span
        self._short[ids] = np.where(short, self._short[ids] + 1, 0)
        self._last[ids] = self.t[ids]
        self._end(ids[self._short[ids] >= MOST_SHORT], ReturnCode.Zeno)

    def meet_given_times(self) -> None:
        """Let the events act whose times have come, those of one time one after the other."""
        every = np.arange(self.batch.size)
        while every.size:
            due = self._next(self.given.times, every) == self.t
            ids = np.flatnonzero(due & (self.codes == _MOVING) & ~self._cut)
            if not ids.size:
                return
            which, slot = self._next(self.given.event, ids), self._of(self._slot, ids).copy()
            self._set(self._slot, ids, slot + 1)
            for e in np.flatnonzero(np.bincount(which)).tolist():
                mine = which == e
                own, at = (ids, slot) if mine.all() else (ids[mine], slot[mine])
                self._jump(e, own, at)
                if self.settings.events[e].terminal:
                    self._cut[own] = True
