"""The location of events (sign changes of conditions) on the interpolants of steps, and the table of events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array, Scalar, Tree
from mpiad.device.assembly import concatenate
from mpiad.ensemble.batch import two_at_least
from mpiad.ensemble.coefficients import Coefficients, polynomials, states_at
from mpiad.ensemble.event import Event
from mpiad.ensemble.jumps import beside
from mpiad.ensemble.record import Step
from mpiad.ensemble.step_sweep import LocatedEvent

# The search for a root ends when its bracket has this width, as a fraction of the step, or after this number of
# evaluations. In a narrower bracket rounding would determine the sign of the condition.
RESOLUTION, EVALUATIONS = 2.0**-48, 50
# The ITP method evaluates at this distance from the root of the secant, relative to the squared width of the bracket.
TRUNCATION = 0.2
# Events at which no step ends are located together when more than this number of columns have been collected, to amortize
# the overhead of NumPy's calls.
_MANY = 2048
# Maximum number of bisections until the first time after a root is found. More are needed only near the time zero.
_BISECTIONS = 100


class Roots(NamedTuple):
    """The roots of one condition in some columns, in order of the columns; a column may occur again."""

    event: int
    columns: Array
    x: Array  # the fractions of the step
    signs: Array  # of the condition before the root
    ends: Array  # the fractions of the step at which the parts end in which the condition changes its sign

    def at(self, part: Array) -> tuple[Array, Array]:
        """Return the columns whose roots are in the last parts of steps that end at `part`, and the signs before them."""
        last = (self.x <= part[self.columns]) & (self.ends >= np.minimum(part, 1.0)[self.columns])
        return self.columns[last], self.signs[last]


class StepEvents(NamedTuple):
    """The events of one step of several columns."""

    located: list[LocatedEvent]
    ended: Array | None  # bool, shape (n,); whether an event ended the step; None if no event ended the step in any column
    part: Array  # shape (n,); the fraction of the step at which an event ended the step, otherwise infinity
    states: Array  # shape (d, n); the states at the ends of the steps
    roots: list[Roots]


class CrossedSteps(NamedTuple):
    """Steps in which conditions may have changed their signs, stored until the events are located."""

    crossed: Array  # bool, shape (events, points - 1, n); whether each condition has changed its sign between two points
    x: Array  # shape (events, points, n); the points, from 0 to 1, at which the conditions were tested
    values: Array  # shape (events, points, n); the values of the conditions
    step: Step

    @staticmethod
    def joined(parts: Sequence[CrossedSteps]) -> CrossedSteps:
        """Return the concatenation along the columns."""
        if len(parts) == 1:
            return parts[0]
        *tables, steps = zip(*parts)
        *rows, stages, sign = zip(*steps)
        fields: list[Any] = [np.concatenate(row, axis=-1) for row in rows]
        fields += [[np.concatenate(k, axis=-1) for k in zip(*stages)], None if sign[0] is None else np.concatenate(sign)]
        return CrossedSteps._make([*(np.concatenate(table, axis=-1) for table in tables), Step._make(fields)])

    def at(self, columns: Array) -> CrossedSteps:
        """Return the steps of some columns."""
        return CrossedSteps(*(table[..., columns] for table in self[:3]), self.step.at(columns))  # type: ignore[arg-type]


class EventWatch:
    """The detection and location of the events of a working set, and their table."""

    def __init__(self, events: tuple[Event, ...], coefficients: Coefficients, select: Callable[[Array], Tree]):
        self._events, self._coefficients, self._select = events, coefficients, select
        self._points = np.linspace(0.0, 1.0, 2 + max([event.interior_points for event in events], default=0))
        self._x, self._weights = coefficients.placed(self._points), coefficients.weights_inside(self._points[1:-1])
        self._reads = slice(0)  # the components of the states that the conditions read
        # The events with `stops` whose conditions read only p and t, and the roots of these conditions to which steps were
        # retaken, shape (n,).
        self.clocks: list[int] = []
        self.clock = np.empty(0)
        # States, parameters and times of all columns, repeated for all points but the first: (d, points - 1, n), ....
        self._repeated: tuple[Array, Tree, Array] = np.empty(0), None, np.empty(0)
        # Values of the conditions before and after the last step, and at the current states; each of shape (events, n).
        self._before = self._after = self.values = np.empty((0, 0))
        # Trajectory, event, step, fraction of the step (infinite if another event has ended the step earlier), and time.
        self._rows: list[Array] = []
        self._count = 0
        self._postponed: list[CrossedSteps] = []
        self._postponed_count = 0  # number of columns

    def enter(self, u: Array, ids: Array, t: Array) -> None:
        """Evaluate the conditions of a new working set, given its states and actual times."""
        if not self._events:
            return
        self.values = np.stack([event.value(u, self._select(ids), t) for event in self._events])
        rows = [event.rows(u, self._select(ids), t) for event in self._events]
        self.clocks = [e for e, event in enumerate(self._events) if event.stops and not rows[e].stop]
        rows = [r for r in rows if r.stop]
        self._reads = slice(min([r.start for r in rows], default=0), max([r.stop for r in rows], default=0))
        count = len(self._points) - 1
        self._repeated = np.tile(u[:, None], (count, 1)), self._select(np.tile(ids, count)), np.tile(t, (count, 1))

    def screened(self, step: Step) -> Array:
        """Evaluate the conditions in a step; return masks, (events, n), that contain all columns with sign changes."""
        (u, p, t), before = self._repeated, self.values
        u[self._reads, -1] = step.new[self._reads]
        self._coefficients.write_inside(u[self._reads, :-1], step.u, step.h, step.k, self._reads, self._weights)
        np.multiply(self._x[1:-1, None], step.actual(step.h), out=t[:-1])
        t[:-1] += step.actual(step.t)
        t[-1] = step.actual(step.t_new)
        after, screened, margin = np.empty_like(before), np.empty_like(before, dtype=bool), len(self._points) ** 2
        for e, event in enumerate(self._events):
            values = event.checked(u.reshape(len(u), -1), p, t.reshape(-1)).reshape(t.shape)
            after[e] = values[-1]
            # If a parabola has two roots between neighboring points, its least absolute value at the points is below the
            # largest one over the square of their number. The margin also exceeds rounding errors of sums by BLAS.
            low, high = np.minimum(before[e], np.min(values, axis=0)), np.maximum(before[e], np.max(values, axis=0))
            screened[e] = ~((margin * low > high) | (margin * high < low))  # also if a value is NaN
        self._before, self._after = before, after
        self.values = np.where(step.accepted, after, before)
        return screened & step.accepted

    def clock_roots(
        self, step: Step, live: Array, screen: Callable[[Step], Array], sides: Mapping[int, Array] = {}
    ) -> Array | None:
        """Return the times to which steps are retaken, the first roots of conditions of p and t in them, else infinity.

        Rejected steps are retaken, too, so the columns are those of the mask `live`; None if there are no such conditions.
        ``screen(step)`` returns masks as `screened`.
        """
        if not self.clocks:
            return None
        step, known = step._replace(accepted=live), self.values
        screened, self.values = screen(step), known
        times, columns = np.full_like(step.t, np.inf), np.flatnonzero(screened[self.clocks].any(axis=0))
        if not columns.size:
            return times
        on_host, kept = type(times) is np.ndarray, self.bracketed(step, columns, screened, sides)
        for e in self.clocks:
            rows = np.flatnonzero(kept.crossed[e].any(axis=0))
            if rows.size:
                j, places = np.argmax(kept.crossed[e][:, rows], axis=0), columns[rows]
                part, before = kept.step.at(rows), np.sign(kept.values[e, j, rows])
                low, high = (_time_of(part, kept.x[e, k, rows]) for k in (j, j + 1))
                # Bisection finds the first number at which the condition has changed its sign.
                for _ in range(_BISECTIONS):
                    middle = 0.5 * (low + high)
                    wide = (low < middle) & (middle < high)
                    if on_host and not wide.any():
                        break
                    same = np.sign(self._called(self._events[e], part.u, part.ids, part.actual(middle))) == before
                    low, high = np.where(wide & same, middle, low), np.where(wide & ~same, middle, high)
                times[places] = np.minimum(times[places], high)
        times = np.where((times <= step.t_new) & (step.t_new != self.clock), times, np.inf)
        self.clock = np.where(times < np.inf, times, self.clock)
        return times

    def ends(self, t_new: Array) -> Array:
        """Return the times of f at the ends of steps: see `beside`."""
        return np.where(t_new == self.clock, beside(t_new, -1.0, self._coefficients.real), t_new) if self.clocks else t_new

    def bracketed(self, step: Step, columns: Array, screened: Array, sides: Mapping[int, Array] = {}) -> CrossedSteps:
        """Return the steps of some columns, and the parts in which conditions change signs (`sides`: `Event.crossed`)."""
        part, points, count = step.at(columns), self._x, len(self._events)
        x = np.zeros_like(part.t, shape=(count, len(points), len(columns))) + points[:, None]
        values, crossed = np.zeros_like(x), np.zeros_like(x[:, 1:], dtype=bool)
        for e, event in enumerate(self._events):
            values[e, 0], values[e, -1] = self._before[e, columns], self._after[e, columns]
            values[e, 1:-1] = self._inside(event, part, x[e, 1:-1])
            # A point moves to the vertex of the parabola through it and its neighbors if the condition changes signs there.
            before, at, after = values[e, :-2], values[e, 1:-1], values[e, 2:]
            slope, curvature = 0.5 * (after - before), before - 2 * at + after
            near = (before * at > 0) & (after * at > 0) & (curvature * at > 0)
            near &= (np.abs(slope) < np.abs(curvature)) & (slope * slope >= 2 * curvature * at)
            if type(near) is not np.ndarray or near.any():
                vertex = x[e, 1:-1] - self._points[1] * np.where(near, slope, 0.0) / np.where(near, curvature, 1.0)
                value = self._inside(event, part, vertex)
                near &= value * at < 0
                near[1:] &= ~near[:-1]
                x[e, 1:-1], values[e, 1:-1] = np.where(near, vertex, x[e, 1:-1]), np.where(near, value, at)
            side = sides[e][columns] if e in sides else None
            crossed[e] = event.crossed(values[e, :-1], values[e, 1:], side) & screened[e, columns]
        return CrossedSteps(crossed, x, values, part)

    def _inside(self, event: Event, step: Step, x: Array) -> Array:
        """Return the values of a condition at the fractions x of a step, shape (points, n)."""
        if not x.size:
            return x
        real = self._coefficients.real
        terms = polynomials(self._coefficients, step.u, step.h.astype(real, copy=False), step.k)
        u = np.moveaxis(states_at(terms, x[:, None].astype(real, copy=False)), 1, 0).reshape(len(step.u), -1)
        t = step.actual(step.t + x * step.h)
        return self._called(event, u, np.tile(step.ids, len(x)), t.reshape(-1)).reshape(x.shape)

    def postpone(self, steps: CrossedSteps) -> None:
        """Store steps of some columns that don't end at events, to locate the events of many columns together."""
        self._postponed.append(steps)
        self._postponed_count += len(steps.step.ids)
        if self._postponed_count > _MANY:
            self._cut_postponed()

    def _cut_postponed(self) -> None:
        if self._postponed:
            self.cut(CrossedSteps.joined(self._postponed))
            self._postponed, self._postponed_count = [], 0

    def cut(self, steps: CrossedSteps) -> StepEvents:
        """Locate and store the events of steps, and end the steps at events that are terminal or act."""
        step, roots = steps.step, []
        part, ending_event, states = np.full_like(step.t, np.inf), np.full_like(step.ids, -1), step.new
        for e in sorted(range(len(self._events)), key=lambda e: not self._events[e].stops):
            event, crossed, x, values = self._events[e], steps.crossed[e], steps.x[e], steps.values[e]
            if states is not step.new and not event.stops:
                end = self._called(event, states, step.ids, step.actual(_time_of(step, part)))
                x, values = np.minimum(x, part), np.where(x < part, values, end)
                crossed = event.crossed(values[:-1], values[1:]) & crossed.any(axis=0)
            number, turn = np.cumsum(crossed, axis=0), 0
            # Columns mustn't occur twice in a group: see `LocatedEvent`.
            while (columns := np.flatnonzero((chosen := crossed & (number == (turn := turn + 1))).any(axis=0))).size:
                j = np.argmax(chosen[:, columns], axis=0)
                ends = [table[k, columns] for table in (x, values) for k in (j, j + 1)]
                if e in self.clocks:  # the step ends at the root, though rounding may put the sign change inside
                    place = ends[1] = np.ones_like(ends[0])
                    at = step.new[:, columns]
                else:
                    place, at = self._located(event, step.at(columns), *ends)
                roots.append(Roots(e, columns, place, np.sign(ends[2]), ends[1]))
                if event.stops:  # at its first root
                    states = states.copy() if states is step.new else states
                    earlier = place <= part[columns]  # if two events coincide, the later one in the list ends the step
                    part[columns] = np.where(earlier, place, part[columns])
                    ending_event[columns] = np.where(earlier, np.full_like(columns, e), ending_event[columns])
                    states[:, columns] = np.where(earlier, at, states[:, columns])
                    break
        located = [self._written(step, root, part, ending_event, len(roots) > 1) for root in roots]
        ended = None if states is step.new else part < np.inf
        if ended is not None:
            step.t_new[:], step.new[...] = _time_of(step, part), states
        return StepEvents([event for event in located if event], ended, part, states, roots)

    def _called(self, event: Event, u: Array, ids: Array, t: Array) -> Array:
        """Return the values of a condition, which on the host is called with at least two columns."""
        twice = two_at_least(len(t)) if type(t) is np.ndarray else slice(None)
        return event.value(u[:, twice], self._select(ids[twice]), t[twice])[: len(t)]

    def _located(
        self, event: Event, step: Step, low: Array, high: Array, before: Array, after: Array
    ) -> tuple[Array, Array]:
        """Return the fractions of the step at which a condition vanishes, and the states there, given brackets and values.

        References
        ----------
        I. F. D. Oliveira, R. H. C. Takahashi, An enhancement of the bisection method average performance preserving minmax
        optimality, ACM Transactions on Mathematical Software 47 (2020), 5:1-24: the method ITP, with κ₂ = 2 and n₀ = 1.
        """
        count, real = len(before), self._coefficients.real
        on_host = type(before) is np.ndarray
        if count == 1 and on_host:  # conditions are called with at least two columns
            step, (low, high, before, after) = (
                step.at(np.zeros(2, int)),
                (np.repeat(x, 2) for x in (low, high, before, after)),
            )
        p, signs, width = self._select(step.ids), np.sign(before), high - low
        terms = polynomials(self._coefficients, step.u, step.h.astype(real, copy=False), step.k)
        for evaluation in range(EVALUATIONS):
            wide = high - low > RESOLUTION
            if on_host and not wide.any():
                break
            # On a device, bisection with a fixed number of evaluations needs no copies to the host.
            x = _projected(low, high, before, after, width * 0.5**evaluation) if on_host else 0.5 * (low + high)
            value = event.value(states_at(terms, x.astype(real, copy=False)), p, step.actual(step.t + x * step.h))
            same = np.sign(value) == signs
            moves_low, moves_high = wide & same, wide & ~same
            low, high = np.where(moves_low, x, low), np.where(moves_high, x, high)
            if on_host:
                before, after = np.where(moves_low, value, before), np.where(moves_high, value, after)
        return high[:count], states_at(terms, high.astype(real, copy=False))[:, :count]

    def _written(
        self, step: Step, roots: Roots, end_part: Array, ending_event: Array, several: bool
    ) -> LocatedEvent | None:
        """Write an event to the table; return it without the columns in which another event ended the step earlier."""
        e, columns, x = roots[:3]
        time = _time_of(step, x, columns)
        time = time if step.sign is None else time * step.sign[columns]
        occurred, stops = x <= end_part[columns], self._events[e].stops
        part = np.where(occurred, x, np.inf)
        row = self._count + np.cumsum(np.full_like(columns, 1)) - 1
        self.note(step, e, columns, part, time)
        if several:
            chosen = np.flatnonzero((ending_event[columns] == e) if stops else occurred)
            columns, x, time, row = columns[chosen], x[chosen], time[chosen], row[chosen]
        return LocatedEvent(e, stops, columns, x, time, row) if len(columns) else None

    def note(self, step: Step, e: int, columns: Array, part: Array, time: Array) -> None:
        """Write an event of some columns to the table."""
        # All entries are doubles, so that one copy from a device to the host is enough.
        rows = step.ids[columns], np.full_like(columns, e), step.number[columns], part, time
        self._rows.append(np.stack([row.astype(float) for row in rows]))
        self._count += len(columns)

    def rows(self) -> Array | None:
        """Return the table, shape (5, m); None if it is empty."""
        self._cut_postponed()
        return np.concatenate(self._rows, axis=1) if self._rows else None


def _time_of(step: Step, x: Array, columns: Array | slice = slice(None)) -> Array:
    """Return the times at fractions x of steps, in the direction of the solve; the ends of the steps for x >= 1."""
    # Rounding mustn't move an event beyond the step, nor an event at its end, maybe a given time, before it.
    return np.minimum(np.where(x < 1, step.t[columns] + x * step.h[columns], np.inf), step.t_new[columns])


def _projected(low: Array, high: Array, before: Array, after: Array, radius: Array) -> Array:
    """Return the next point of the method ITP; `radius` is the width of the first bracket, halved at each point."""
    # The root of the secant is moved towards the middle of the bracket, and its distance from the middle is limited.
    # The method needs about as few evaluations as the secant method, and at most one more than bisection.
    width, middle = high - low, 0.5 * (low + high)
    x = (after * low - before * high) / (after - before)
    distance, allowed = middle - x, radius - 0.5 * width
    shift = np.maximum(TRUNCATION * width * width, 0.5 * RESOLUTION)
    x = np.where(np.abs(distance) <= shift, middle, np.where(distance > 0, x + shift, x - shift))
    return np.where(np.abs(x - middle) <= allowed, x, np.where(distance > 0, middle - allowed, middle + allowed))


class EventRows(NamedTuple):
    """The events of a solution, sorted by trajectory and time: arrays of shape (m,)."""

    ids: np.ndarray  # the numbers of their trajectories
    events: np.ndarray  # their indices in the list of the solve
    times: Array  # may be traced

    def by_trajectory(self) -> dict[int, list[tuple[int, Scalar]]]:
        """Return the (event, time) pairs of each trajectory."""
        pairs = defaultdict(list)
        every = self.times if isbox(self.times) else self.times.tolist()
        for i, e, time in zip(self.ids.astype(int).tolist(), self.events.astype(int).tolist(), every):
            pairs[i].append((e, time))
        return dict(pairs)

    @classmethod
    def joined(cls, groups: Sequence[EventRows], counts: Sequence[int]) -> EventRows:
        """Return the events of groups of trajectories; the trajectories of all groups are numbered one after the other."""
        starts = np.repeat(np.cumsum([0, *counts])[:-1], [len(group.ids) for group in groups])
        ids, events = (np.concatenate([group[k] for group in groups]) for k in (0, 1))
        return cls(ids + starts, events, concatenate([group.times for group in groups]))


NO_EVENTS = EventRows(np.empty(0, int), np.empty(0, int), np.empty(0))


def in_order(rows: np.ndarray) -> np.ndarray:
    """Return the indices of events that occurred, sorted by trajectory and time, given the rows of a table."""
    ids, event, number, part = rows[:4]
    step = ids * (number.max(initial=0.0) + 1.0) + number
    order = np.argsort(step, kind="stable")  # fast for sorted events, such as those of kernels
    step = step[order]
    if (step[1:] == step[:-1]).any():
        order = np.lexsort((event, part, number, ids))
    return order[np.isfinite(part[order])]


def traced_times(
    ids: np.ndarray, times: np.ndarray, places: np.ndarray, live: np.ndarray, reached: Array, crossed: Array
) -> Array:
    """Return the times of events, shape (m,), with derivatives except for failed trajectories (not in the mask `live`)."""
    # `places`: the index of each time in `crossed`; -1 if it ended its trajectory and is in `reached`, shape (N,).
    place = np.where(places < 0, ids, len(live) + places) + len(ids)
    return concatenate([times, reached, crossed])[np.where(live[ids], place, np.arange(len(ids)))]
