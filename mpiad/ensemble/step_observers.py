"""Observers of the steps of the working set, called in this order: the record, events, saved states."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.ensemble.batch import Batch, two_at_least
from mpiad.ensemble.coefficients import Coefficients, interpolate
from mpiad.ensemble.event import Event, affected
from mpiad.ensemble.events import CrossedSteps, EventWatch, StepEvents, in_order
from mpiad.ensemble.initialization import Entrants, Initialization, Joint, least_step
from mpiad.ensemble.jumps import (
    FOUND,
    LEAST,
    MANY_SHORT,
    SHORT,
    UNRESOLVED,
    Jump,
    beside,
    departure,
    distance_ahead,
    mass_matrix_rhs,
)
from mpiad.ensemble.outcome import Outcome, ReturnCode, came_through
from mpiad.ensemble.record import Log, Step
from mpiad.ensemble.settings import MOVING, Acting, Settings

NONE = np.empty(0, np.int64)


class SavePoints:
    """Saves states at times of shape (n_saved,) or (N, n_saved); `next`: the next saved time per column."""

    def __init__(self, times: Array, signs: Array, starts: Array, outcome: Outcome, coefficients: Coefficients):
        self._times, self._signs, self._starts = times, signs, starts
        self._saved: Array = outcome.saved
        self._save_step, self._coefficients = outcome.save_step, coefficients
        self._count = times.shape[-1]
        self.next = np.empty(0)
        self._time_index = np.empty(0, int)

    def enter(self, ids: Array, u: Array, joined: Joint) -> None:
        """Add the columns of new trajectories, and save their initial states if these are requested."""
        time_index = np.zeros(len(ids), int)
        due = self._due(ids, time_index)
        while (at_start := due == self._starts[ids] * self._signs[ids]).any():
            self._write(ids[at_start], time_index[at_start], u[:, at_start], -1)
            time_index += at_start
            due = self._due(ids, time_index)
        self._time_index, self.next = joined(self._time_index, time_index), joined(self.next, due)

    def _due(self, ids: Array, time_index: Array) -> Array:
        ended = time_index >= self._count
        index = np.minimum(time_index, self._count - 1)
        times = self._times[index] if self._times.ndim == 1 else self._times[ids, index]
        return np.where(ended, np.inf, times * self._signs[ids])

    def _write(self, ids: Array, time_index: Array, u: Array, step: Array | int) -> None:
        self._saved[ids, time_index] = u.T
        if self._save_step is not None:
            self._save_step[ids, time_index] = step

    def save(self, step: Step, changing: Array) -> None:
        """Save states in a step, except at its end in the columns `changing`, since events will change these states."""
        due = self.next <= step.t_new
        due &= step.accepted
        if not np.count_nonzero(due):
            return
        columns = np.flatnonzero(due)
        self.save_inside(step, columns, columns)
        if changing.size:
            columns = np.setdiff1d(columns, changing, assume_unique=True)
        self.save_at_end(step, columns, columns, step.number)

    def save_inside(self, step: Step, rows: Array, columns: Array) -> None:
        """Save states inside a step, in its columns `rows`; `columns`: the indices of `rows` in the working set."""
        # Several saved times may lie in one step of a column. One call interpolates the states at all of them.
        groups = []
        while np.count_nonzero(inside := self.next[columns] < step.t_new[rows]):
            rows, columns = rows[inside], columns[inside]
            groups.append((rows, self._time_index[columns], self.next[columns]))
            self._to_next_time(columns, step.ids[rows])
        if groups:
            rows, time_index, due = (np.concatenate(parts) for parts in zip(*groups))
            step = step.at(rows)
            values = interpolate(self._coefficients, step.u, step.h, step.k, (due - step.t) / step.h)
            self._write(step.ids, time_index, values, step.number)

    def save_at_end(self, step: Step, rows: Array, columns: Array, number: Array) -> None:
        """Save states at the end of a step, in its columns `rows`; `columns`: see `save_inside`; `number`: step numbers."""
        while np.count_nonzero(at_end := self.next[columns] == step.t_new[rows]):
            rows, columns = rows[at_end], columns[at_end]
            self._write(step.ids[rows], self._time_index[columns], step.new[:, rows], number[rows])
            self._to_next_time(columns, step.ids[rows])

    def _to_next_time(self, columns: Array, ids: Array) -> None:
        self._time_index[columns] += 1
        self.next[columns] = self._due(ids, self._time_index[columns])


# Events that act: their affects change the state.
#
# Locating roots of conditions and applying affects takes about a hundred calls of NumPy, even for few columns. Therefore
# a column whose step ends at an event is suspended, with its step, until events act on all suspended columns together, in a
# turn that `WorkingSet` chooses.
#
# If a condition is still at its root after an affect, its next event is the return to the root. The next step ends before
# this return (see `jumps.departure`).


class EventColumns:
    """The n trajectories `ids`, on which events act one after the other: evaluations of conditions, affects and f."""

    def __init__(
        self,
        batch: Batch,
        acting: Acting,
        slots: Array,
        signs: Array,
        jumps: list[Jump] | None,
        ids: Array,
        u: Array,
        t: Array,
        number: Array,
    ):
        # `slots` (indices of the next given times, of all trajectories), `jumps` (None: not recorded) and `u` are updated.
        self._batch, self._acting, self._slots, self._jumps = batch, acting, slots, jumps
        self.ids, self.u, self.t, self._number = ids, u, t, number  # shape (d, n) and (n,); actual times; steps so far
        self.signs = signs[ids]  # -1: integrated backwards in time
        self.codes = np.full(len(ids), MOVING)  # return codes of ended trajectories
        # Signs with which conditions leave their roots (0: not at a root), for events that act in both directions.
        self.left: defaultdict[int, Array] = defaultdict(lambda: np.zeros(len(ids)))

    def at(self, rows: Array) -> tuple[Array, Array]:
        """Return the states and times of the columns `rows`, in ascending order; they must not be modified."""
        return (self.u, self.t) if len(rows) == len(self.ids) else (self.u[:, rows], self.t[rows])

    def _arguments(self, rows: Array, at: tuple[Array, Array] | None) -> tuple[Array, Tree, Array]:
        """Return the arguments of the user's functions for the columns `rows`; a single column is duplicated."""
        (u, t), twice = at or self.at(rows), two_at_least(len(rows))
        return u[:, twice], self._batch.parameters(self.ids[rows[twice]]), t[twice]

    def condition(self, event: Event, rows: Array, at: tuple[Array, Array] | None = None) -> Array:
        """Return the values of a condition for some columns; `at`: states and times, by default the current ones."""
        return event.value(*self._arguments(rows, at))[: len(rows)] if rows.size else np.empty(0)

    def rate(self, rows: Array, at: tuple[Array, Array], mass: Array | None = None) -> Array:
        """Return u' of M u' = f, by default f, in the direction of the solve for some columns at states and times."""
        if not rows.size:
            return np.empty_like(self.u[:, :0])
        twice, batch = two_at_least(len(rows)), self._batch
        u, t, leaves = at[0][:, twice], at[1][twice].astype(at[0].real.dtype), batch.p.chosen(self.ids[rows[twice]])
        return (mass_matrix_rhs(batch, mass, u, leaves, t) * self.signs[rows[twice]].astype(t.dtype))[:, : len(rows)]

    def act(self, e: int, rows: Array, slot: Array | None = None) -> Array:
        """Apply the affect of event e at given times `slot`, or at roots (None); return the mask of finite new states."""
        # A trajectory ends in the state before the event if its new state isn't finite.
        if not rows.size:
            return np.empty(0, bool)
        u, t = self.at(rows)
        after = affected(self._acting.events[e], self._batch, *self._arguments(rows, (u, t)))[:, : len(rows)]
        finite = np.isfinite(after).all(axis=0)
        self.codes[rows[~finite]] = ReturnCode.Unstable.code
        rows, u, t, after = rows[finite], u[:, finite], t[finite], after[:, finite]
        if self._jumps is not None:
            at = np.full(len(rows), FOUND) if slot is None else slot[finite]
            self._jumps.append(Jump(self.ids[rows], self._number[rows], e, at, t, u, after))
        self.u[:, rows] = after
        return finite

    def meet_given_times(self) -> None:
        """Apply, one after the other, the affects of events with a given time equal to the current time; update `slots`."""
        acting, rows = self._acting, np.arange(len(self.ids))
        while rows.size:
            ids = self.ids[rows]
            rows = rows[(acting.times[self._slots[ids], ids] == self.t[rows]) & came_through(self.codes[rows])]
            slot = self._slots[self.ids[rows]]
            which = acting.kinds[slot, self.ids[rows]]
            for e in np.flatnonzero(np.bincount(which)).tolist():
                chosen = rows[which == e]
                done = chosen[self.act(e, chosen, slot[which == e])]
                self._slots[self.ids[done]] += 1
                if acting.events[e].terminal:
                    self.codes[done] = ReturnCode.Terminated.code


class Resumed(NamedTuple):
    """n columns in which events have acted; times are in the direction of the solve (see `initialization`)."""

    columns: Array
    codes: Array  # return codes of columns that have ended, else MOVING
    number: Array  # numbers of steps
    t: Array
    end: Array  # upper bounds on the ends of the next steps
    h: Array  # sizes of the next steps
    u: Array  # states after the events, shape (d, n)
    k: Array  # f at u, shape (d, n)


class ActingEvents:
    """The events that act on the columns of a working set; `watch` evaluates conditions."""

    def __init__(
        self, batch: Batch, settings: Settings, outcome: Outcome, initialization: Initialization, watch: EventWatch
    ):
        self._batch, self._settings, self._watch, self._initialization = batch, settings, watch, initialization
        self._acting: Acting = settings.acting  # type: ignore[assignment]
        self._jumps = outcome.jumps if settings.record else None
        self._slots, self._resumed = outcome.slots, outcome.resumed
        self._events, self._adaptive = settings.events, settings.alg.tableau.error is not None
        # The columns suspended at given times (False) and at roots of conditions (True), the sizes of their next steps, and
        # their steps.
        self._suspended: dict[bool, list[tuple[Array, Array, CrossedSteps]]] = {False: [], True: []}
        # Per column: for each event, the time at which it last acted, or the start; the time of the last root of any
        # condition; the number of successive short intervals between roots.
        self._last_acted = {e: np.empty(0) for e, event in enumerate(self._events) if event.acts}
        self._last_root, self._short_count = np.empty(0), np.empty(0, int)
        self._limit = np.empty(0)  # upper bound on the end of the next step; ignored if it isn't in the future
        self._left = np.empty(0)  # the last time at which an event acted
        # The signs of conditions whose events act in both directions.
        self.sides = {e: np.empty(0) for e, event in enumerate(self._events) if event.sided}

    def enter(self, new: Entrants, joined: Joint) -> None:
        """Add the columns of the next working set, in which the watch has evaluated the conditions."""
        self._last_acted = {e: joined(last, new.t) for e, last in self._last_acted.items()}
        self._last_root, self._limit = joined(self._last_root, new.t), joined(self._limit, new.t)
        self._left = joined(self._left, new.t - np.inf)
        self._short_count = joined(self._short_count, np.zeros(len(new.t), int))
        for e, side in self.sides.items():
            side = joined(side, np.full(len(new.t), np.nan))
            self.sides[e] = np.where(np.isnan(side), np.sign(self._watch.values[e]), side)

    def screened(self, step: Step) -> Array:
        """Return masks, (events, n), that contain all columns in which a condition changes its sign."""
        watch, before = self._watch, self._watch.values
        ignored = np.abs(before) <= LEAST
        screened = watch.screened(step)
        if not np.count_nonzero(ignored):
            return screened
        ignored &= step.t_new - step.t <= UNRESOLVED * self._span(step.ids)
        watch.values = np.where(ignored, before, watch.values)
        return screened & ~ignored

    def limits(self, ids: Array, t: Array, t_new: Array, end: Array) -> tuple[Array, Array]:
        """Return the times of f at both ends of a step: see `StepObservers.limits`."""
        real, columns = self._batch.u0.real.dtype, np.flatnonzero(self._left == t)
        if columns.size:
            t = t.copy()
            t[columns] = beside(t[columns], 1.0, real)
        columns = np.flatnonzero(t_new == end)
        if columns.size:
            ending = ids[columns]
            due = self._acting.until(np.full(len(ending), np.inf), self._slots, ending, self._initialization.signs[ending])
            columns, t_new = columns[due == t_new[columns]], t_new.copy()
            t_new[columns] = beside(t_new[columns], -1.0, real)
        return t, t_new

    def at_given_times(self, step: Step, done: Array) -> Array:
        """Return the columns of the mask `done` in which the step ends at a given time of an event."""
        if not np.count_nonzero(done):
            return NONE
        columns = np.flatnonzero(done)
        ids = step.ids[columns]
        due = self._acting.times[self._slots[ids], ids]
        return columns[due == step.t_new[columns] if step.sign is None else due == step.t_new[columns] * step.sign[columns]]

    def suspend(self, columns: Array, h: Array, steps: CrossedSteps, at_roots: bool = False) -> None:
        """Store the steps of some columns, which end at given times or, with `at_roots`, at roots of conditions."""
        self._suspended[at_roots].append((columns, h[columns], steps))  # `h`: the sizes of the next steps of all columns

    def resume(self) -> Iterator[tuple[Resumed, Step]]:
        """Apply events at the ends of suspended steps; yield the columns, and their steps with the changed states."""
        for at_roots in (False, True):
            suspended, self._suspended[at_roots] = self._suspended[at_roots], []
            if suspended:
                columns, h, kept = zip(*suspended)
                yield self._resumed_columns(np.concatenate(columns), np.concatenate(h), CrossedSteps.joined(kept), at_roots)

    def _resumed_columns(self, columns: Array, h: Array, kept: CrossedSteps, at_roots: bool) -> tuple[Resumed, Step]:
        step = kept.step
        step_events = self._watch.cut(kept) if at_roots else None
        span, every = self._span(step.ids), np.arange(len(columns))
        directions, t = self._initialization.signs, step.actual(step.t_new)
        at_event = EventColumns(
            self._batch, self._acting, self._slots, directions, self._jumps, step.ids, step.new, t, step.number + 1
        )
        reached = kept.values[:, -1]
        if step_events is not None:
            reached = np.array([at_event.condition(event, every) for event in self._events])
        # Values assigned to conditions that are still near their roots after the affects; NaN for other conditions.
        signs, near = np.sign(kept.values[:, 0]), np.abs(kept.values[:, 0]) <= LEAST
        unresolved = step.t_new - step.t <= UNRESOLVED * span
        assigned = np.where(unresolved & (near | (np.sign(reached) != signs)), LEAST * signs, np.nan)
        if step_events is None:  # the sign changes have been stored, and mustn't be detected again
            assigned = np.where(kept.crossed[:, -1], -LEAST * np.sign(kept.values[:, -2]), assigned)
        else:
            occurred = self._occurred(columns, kept, step_events, reached, unresolved & near)
            for e, (rows, before) in enumerate(occurred):
                assigned[e, rows] = -LEAST * before
                if e in self.sides:
                    self.sides[e][columns[rows]] = -before
            self._apply_at_roots(at_event, columns, [rows for rows, _ in occurred], span)
        at_event.meet_given_times()
        self._left[columns] = step.t_new
        goal, directions = self._initialization.goal(step.ids), directions[step.ids]
        codes, moving = at_event.codes, at_event.codes == MOVING
        continuing = moving & (step.t_new < goal)
        codes[moving & ~continuing] = ReturnCode.Success.code
        rows, k = np.flatnonzero(continuing), np.zeros_like(step.new)
        begin = step.actual(beside(step.t_new, 1.0, self._batch.u0.real.dtype))
        k[:, rows] = at_event.rate(rows, (at_event.u[:, rows], begin[rows]))
        self._continue_from(at_event, columns, rows, reached, assigned)
        limit = self._limit[columns] - step.t_new
        h = np.maximum(np.where(limit > 0, np.minimum(h, limit), h), least_step(step.t_new))
        end = self._acting.until(goal, self._slots, step.ids, directions)
        return Resumed(columns, codes, step.number + 1, step.t_new, end, h, step.new, k), step

    def _occurred(
        self, columns: Array, kept: CrossedSteps, step_events: StepEvents, reached: Array, ignored: Array
    ) -> list[tuple[Array, Array]]:
        """Return for each event the rows of `kept` in which it occurs at the end of the step, and its signs before that."""
        # The roots of several conditions may be closer than the resolution of the search. If another condition has also
        # changed sign (`reached`: its values), its event also occurs, since the sign change couldn't be detected later.
        step, occurred = kept.step, []
        for e, event in enumerate(self._events):
            located = [roots.at(step_events.part) for roots in step_events.roots if roots.event == e]
            rows, before = map(np.concatenate, zip((NONE, np.empty(0)), *located))
            if event.stops:
                side = self.sides[e][columns] if e in self.sides else None
                missed = event.crossed(kept.values[e, 0], reached[e], side) & ~ignored[e]
                missed[rows] = False
                more = np.flatnonzero(missed)
                self._watch.note(step, e, more, step_events.part[more], step.actual(step.t_new)[more])
                rows, before = np.append(rows, more), np.append(before, np.sign(kept.values[e, 0, more]))
            order = np.argsort(rows)
            occurred.append((rows[order], before[order]))
        return occurred

    def _span(self, ids: Array) -> Array:
        return np.abs(self._batch.end[ids] - self._batch.start[ids])

    def _apply_at_roots(self, at_event: EventColumns, columns: Array, occurred: list[Array], span: Array) -> None:
        now = at_event.t * self._initialization.signs[at_event.ids]
        ending = np.zeros(len(columns), bool)
        for e, (event, rows) in enumerate(zip(self._events, occurred)):
            if event.acts:
                rows = rows[at_event.codes[rows] == MOVING]
                before = at_event.condition(event, rows)
                finite = at_event.act(self._acting.conditions[e], rows)
                self._look_ahead(at_event, e, columns, rows[finite], before[finite], now, span)
            ending[rows] |= event.terminal
        # A trajectory ends if too many successive intervals between events are short.
        moving = np.flatnonzero(at_event.codes == MOVING)
        places = columns[moving]
        short = np.abs(now[moving] - self._last_root[places]) <= SHORT * span[moving]
        self._short_count[places], self._last_root[places] = np.where(short, self._short_count[places] + 1, 0), now[moving]
        at_event.codes[moving[self._short_count[places] >= MANY_SHORT]] = ReturnCode.Zeno.code
        at_event.codes[ending & (at_event.codes == MOVING)] = ReturnCode.Terminated.code

    def _look_ahead(
        self, at_event: EventColumns, e: int, columns: Array, rows: Array, before: Array, now: Array, span: Array
    ) -> None:
        """Determine the sign of the condition of event e after its departure from the root, and the time of its return."""
        if not rows.size:
            return
        event, (u, t), places, now, span = self._events[e], at_event.at(rows), columns[rows], now[rows], span[rows]
        elapsed, self._last_acted[e][places] = now - self._last_acted[e][places], now
        ahead, mass = distance_ahead(elapsed, span), self._settings.mass
        rate = at_event.rate(rows, (u, t), mass)
        euler, later = u + ahead * rate, t + at_event.signs[rows] * ahead
        heun = u + 0.5 * ahead * (rate + at_event.rate(rows, (euler, later), mass))
        values = [at_event.condition(event, rows, at) for at in ((u, t), (euler, later), (heun, later))]
        side, back, endless = departure((before, *values), event.direction, elapsed, span)
        if self._adaptive:  # otherwise the step size is fixed
            # A step that contains both the departure and the return wouldn't change the sign.
            limit = np.where(self._limit[places] > now, self._limit[places], np.inf)
            self._limit[places] = np.minimum(limit, now + 0.25 * back)
        if e in self.sides:
            at_event.left[e][rows] = side
        at_event.codes[rows[endless]] = ReturnCode.Zeno.code

    def _continue_from(self, at_event: EventColumns, columns: Array, rows: Array, reached: Array, assigned: Array) -> None:
        """Store the values and signs of conditions at the states from which some rows continue."""
        # A value that equals `reached`, since no event has changed it, is replaced by `assigned` unless this is NaN.
        places = columns[rows]
        self._resumed[at_event.ids[rows]] += 1
        for e, event in enumerate(self._events):
            value, replacement = at_event.condition(event, rows), assigned[e, rows]
            unchanged = (value == reached[e, rows]) & ~np.isnan(replacement)
            value = np.where(unchanged, replacement, value)
            self._watch.values[e][places] = value
            if e in self.sides:
                side = np.where(unchanged, self.sides[e][places], np.sign(value))
                left = at_event.left[e][rows]
                self.sides[e][places] = np.where(left, left, side)


class Stopped(NamedTuple):
    """The columns whose steps end at an event."""

    terminated: Array | None = None  # bool, shape (n,); a mask of the trajectories that end at the event; None without any
    suspended: Array = NONE  # int, shape (m,); the columns that are suspended until `StepObservers.resume`
    alive: int | None = None  # the number of trajectories that haven't ended, counted on a device


class StepObservers:
    """The observers of a solve, which write their results to `outcome`."""

    def __init__(
        self, batch: Batch, settings: Settings, outcome: Outcome, initialization: Initialization, coefficients: Coefficients
    ):
        self._outcome, self._batch, self._settings = outcome, batch, settings
        self._log = Log(settings.checkpoints) if settings.record else None
        self._saves = self._acting = None
        self._stops = np.array([event.stops for event in settings.events], bool)
        self._events = EventWatch(settings.events, coefficients, batch.parameters)
        if outcome.saved is not None and settings.saveat is not None and outcome.saved.shape[1]:
            self._saves = SavePoints(settings.saveat, initialization.signs, batch.start, outcome, coefficients)
        if settings.acting is not None:
            self._acting = ActingEvents(batch, settings, outcome, initialization, self._events)

    def enter(self, new: Entrants, joined: Joint, ids: Array, u: Array, p: Tree, t: Array, sign: Array | None) -> None:
        """Add the next working set: its new trajectories, and the arrays of all of its trajectories."""
        if self._saves is not None:
            self._saves.enter(new.ids, new.u, joined)
        self._events.enter(u, ids, t if sign is None else t * sign)
        self._events.clock = joined(self._events.clock, new.t - np.inf)
        if self._acting is not None:
            self._acting.enter(new, joined)

    def limits(self, ids: Array, t: Array, t_new: Array, end: Array) -> tuple[Array, Array]:
        """Return the times of f at both ends of a step, which are `beside` given times of events; `end`: upper bounds."""
        if self._acting is not None:
            t, t_new = self._acting.limits(ids, t, t_new, end)
        return t, self._events.ends(t_new)

    def clock_roots(self, step: Step, live: Array) -> Array | None:
        """Return the times to which steps are retaken: see `EventWatch.clock_roots`."""
        acting = self._acting
        if acting is None:
            return self._events.clock_roots(step, live, self._events.screened)
        return self._events.clock_roots(step, live, acting.screened, acting.sides)

    def process(self, step: Step, p: Tree, done: Array, h: Array, moving: Array | None) -> Stopped:
        """Process a step, which may be shortened by events; return the columns whose steps end at an event."""
        # `done`: the columns that reach the end of tspan or a given time. `moving` is used on a device.
        if self._log is not None:
            self._log.note(step)
        acting, watch, sides = self._acting, self._events, {} if self._acting is None else self._acting.sides
        at_roots, at_times, terminated = NONE, NONE, None
        screened = np.empty((0, len(step.ids)), bool)
        if self._settings.events:
            screened = (watch if acting is None else acting).screened(step)
            columns = np.flatnonzero(screened.any(axis=0))
            if columns.size:
                kept = watch.bracketed(step, columns, screened, sides)
                crossed = kept.crossed.any(axis=1)
                ends = crossed[self._stops].any(axis=0)
                rest = np.flatnonzero(crossed.any(axis=0) & ~ends)
                if rest.size:
                    watch.postpone(kept.at(rest))
                if ends.any():
                    at_roots, kept = columns[ends], kept.at(np.flatnonzero(ends))
                    if acting is not None:
                        acting.suspend(at_roots, h, kept, at_roots=True)
                    else:
                        watch.cut(kept)
                        # The step now ends at the terminal event, so that no states at later times are saved.
                        step.t_new[at_roots], step.new[:, at_roots] = kept.step.t_new, kept.step.new
                        terminated = np.zeros(len(step.ids), bool)
                        terminated[at_roots] = True
        if acting is not None:
            if at_roots.size:
                others = np.ones(len(step.ids), bool)
                others[at_roots] = False
                step, done = step._replace(accepted=step.accepted & others), done & others
            at_times = acting.at_given_times(step, done)
            if at_times.size:
                acting.suspend(at_times, h, watch.bracketed(step, at_times, screened, sides))
        if self._saves is not None:
            self._saves.save(step, at_times)
        return Stopped(terminated, np.concatenate([at_roots, at_times]) if acting is not None else NONE)

    def resume(self) -> Iterator[Resumed]:
        """Apply events to the suspended columns, and yield these columns with their new states."""
        for resumed, step in self._acting.resume() if self._acting is not None else ():
            if self._saves is not None:
                rows = np.arange(len(resumed.columns))
                self._saves.save_inside(step, rows, resumed.columns)
                self._saves.save_at_end(step, rows, resumed.columns, step.number + 1)
            yield resumed

    def close(self, results: Array) -> None:
        """Write the recorded steps and the sorted table of events to the outcome; `results` is used on a device."""
        rows = self._events.rows()
        if rows is not None:
            self._outcome.event_table = rows[:, in_order(rows)]
        if self._log is not None:
            u0 = self._batch.u0
            self._outcome.steps = [(0, self._log.steps(self._outcome.naccept, len(u0), u0.dtype))]
