"""The location of events (sign changes of conditions) on the interpolants of steps, and the table of events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array, Tree
from mpiad.device.assembly import concatenate
from mpiad.ensemble.coefficients import Coefficients, polynomials, states_at
from mpiad.ensemble.event import Event
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


class StepEvents(NamedTuple):
    """The events of one step of several columns."""

    located: list[LocatedEvent]
    ended: Array | None  # bool, shape (n,); whether an event ended the step; None if no event ended the step in any column
    part: Array  # shape (n,); the fraction of the step at which an event ended the step, otherwise infinity
    states: Array  # shape (d, n); the states at the ends of the steps
    found: list[tuple[int, Array, Array]]  # per event: the index, the columns, and the fractions of the step


class CrossedSteps(NamedTuple):
    """Steps in which conditions may have changed their signs, stored until the events are located."""

    crossed: Array  # bool, shape (events, n); whether each condition has changed its sign
    before: Array  # shape (events, n); the values of the conditions before the step
    after: Array  # shape (events, n); the values after the step
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
        found: list[Any] = [np.concatenate(table, axis=-1) for table in tables]
        return CrossedSteps._make([*found, Step._make(fields)])


class EventWatch:
    """The detection and location of the events of a working set, and their table."""

    def __init__(self, events: tuple[Event, ...], coefficients: Coefficients, select: Callable[[Array], Tree]):
        self._events, self._coefficients, self._select = events, coefficients, select
        self.values: list[Array] = []  # values of the conditions at the current states, each of shape (n,)
        self.pairs: list[tuple[Array, Array]] = []  # values of the conditions before and after the last step
        # Trajectory, event, step, fraction of the step (infinite if another event has ended the step earlier), and time.
        self._rows: list[Array] = []
        self._count = 0
        self._postponed: list[CrossedSteps] = []
        self._postponed_count = 0  # number of columns

    def enter(self, u: Array, p: Tree, t: Array) -> None:
        """Evaluate the conditions of a new working set, given its states and actual times."""
        self.values = [event.value(u, p, t) for event in self._events]

    def crossed(self, step: Step, p: Tree, sides: Mapping[int, Array] = {}) -> list[Array]:
        """Update `values`, and return each event's mask of sign changes; `sides`: signs with which some left roots."""
        time = step.actual(step.t_new)
        self.pairs = [(old, event.value(step.new, p, time)) for event, old in zip(self._events, self.values)]
        self.values = [np.where(step.accepted, new, old) for old, new in self.pairs]
        changed = (event.crossed(*pair, sides.get(e)) for e, (event, pair) in enumerate(zip(self._events, self.pairs)))
        return [step.accepted & mask for mask in changed]

    def extracted(self, step: Step, columns: Array, crossed: Sequence[Array]) -> CrossedSteps:
        """Return the step of some columns, and the sign changes of conditions."""
        shape = len(self._events), len(columns)
        rows = [(changed[columns], old[columns], new[columns]) for changed, (old, new) in zip(crossed, self.pairs)]
        found = [np.array(part).reshape(shape) for part in zip(*rows)] or 3 * [np.empty(shape)]
        return CrossedSteps._make([*found, step.at(columns)])

    def postpone(self, step: Step, columns: Array, crossed: Sequence[Array]) -> None:
        """Store steps of some columns that don't end at events, to locate the events of many columns together."""
        self._postponed.append(self.extracted(step, columns, crossed))
        self._postponed_count += len(columns)
        if self._postponed_count > _MANY:
            self._cut_postponed()

    def _cut_postponed(self) -> None:
        if self._postponed:
            self.cut(CrossedSteps.joined(self._postponed))
            self._postponed, self._postponed_count = [], 0

    def cut(self, steps: CrossedSteps) -> StepEvents:
        """Locate and store the events of steps, and end the steps at events that are terminal or act."""
        step, crossed = steps.step, [np.flatnonzero(row) for row in steps.crossed]
        pairs = list(zip(steps.before, steps.after))
        found = self.located(step, [rows if rows.size else None for rows in crossed], pairs)
        if found.ended is not None:
            ended = np.flatnonzero(found.ended)
            # Rounding mustn't move the event beyond the step, nor an event at its end, maybe a given time, before it.
            at = np.where(found.part[ended] < 1, step.t[ended] + found.part[ended] * step.h[ended], np.inf)
            step.t_new[ended] = np.minimum(at, step.t_new[ended])
            step.new[:, ended] = found.states[:, ended]
        return found

    def located(self, step: Step, crossed: Sequence[Array | None], pairs: Sequence[tuple[Array, Array]]) -> StepEvents:
        """Locate and store the events of a step; `crossed`: the columns of each event; `pairs`: values before and after."""
        part, ending_event = np.full_like(step.t, np.inf), np.full_like(step.ids, -1)
        states, found = step.new, []
        for e, (event, columns) in enumerate(zip(self._events, crossed)):
            if columns is None:
                continue
            x, at = self._located(event, step.at(columns), *(values[columns] for values in pairs[e]))
            found.append((e, columns, x))
            if event.stops:
                states = states.copy() if states is step.new else states
                earlier = x <= part[columns]  # if two events coincide, the later one in the list ends the step
                part[columns] = np.where(earlier, x, part[columns])
                ending_event[columns] = np.where(earlier, np.full_like(columns, e), ending_event[columns])
                states[:, columns] = np.where(earlier, at, states[:, columns])
        located = [self._written(step, e, columns, x, part, ending_event, len(found) > 1) for e, columns, x in found]
        ended = None if states is step.new else part < np.inf
        return StepEvents([event for event in located if event], ended, part, states, found)

    def _located(self, event: Event, step: Step, before: Array, after: Array) -> tuple[Array, Array]:
        """Return the fractions of the step at which a condition vanishes, and the states there.

        References
        ----------
        I. F. D. Oliveira, R. H. C. Takahashi, An enhancement of the bisection method average performance preserving minmax
        optimality, ACM Transactions on Mathematical Software 47 (2020), 5:1-24: the method ITP, with κ₂ = 2 and n₀ = 1.
        """
        count, ids, real = len(before), step.ids, self._coefficients.real
        on_host = type(before) is np.ndarray
        if count == 1 and on_host:  # conditions are called with at least two columns
            step, before, after = step.at(np.zeros(2, int)), np.repeat(before, 2), np.repeat(after, 2)
            ids = step.ids
        p, signs = self._select(ids), np.sign(before)
        terms = polynomials(self._coefficients, step.u, step.h.astype(real, copy=False), step.k)
        low, high = np.zeros_like(before), np.ones_like(before)
        for evaluation in range(EVALUATIONS):
            wide = high - low > RESOLUTION
            if on_host and not wide.any():
                break
            # On a device, bisection with a fixed number of evaluations needs no copies to the host.
            x = _projected(low, high, before, after, 0.5**evaluation) if on_host else 0.5 * (low + high)
            value = event.value(states_at(terms, x.astype(real, copy=False)), p, step.actual(step.t + x * step.h))
            same = np.sign(value) == signs
            moves_low, moves_high = wide & same, wide & ~same
            low, high = np.where(moves_low, x, low), np.where(moves_high, x, high)
            if on_host:
                before, after = np.where(moves_low, value, before), np.where(moves_high, value, after)
        return high[:count], states_at(terms, high.astype(real, copy=False))[:, :count]

    def _written(
        self, step: Step, e: int, columns: Array, x: Array, end_part: Array, ending_event: Array, several: bool
    ) -> LocatedEvent | None:
        """Write an event to the table; return it without the columns in which another event ended the step earlier."""
        # As in `cut`.
        time = np.minimum(np.where(x < 1, step.t[columns] + x * step.h[columns], np.inf), step.t_new[columns])
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


def _projected(low: Array, high: Array, before: Array, after: Array, radius: float) -> Array:
    """Return the next point of the method ITP (interpolate, truncate, project); `radius` is 1, halved at each point."""
    # The root of the secant is moved towards the middle of the bracket, and its distance from the middle is limited.
    # The method needs about as few evaluations as the secant method, and at most one more than bisection.
    width, middle = high - low, 0.5 * (low + high)
    x = (after * low - before * high) / (after - before)
    distance, allowed = middle - x, radius - 0.5 * width
    shift = np.maximum(TRUNCATION * width * width, 0.5 * RESOLUTION)
    x = np.where(np.abs(distance) <= shift, middle, np.where(distance > 0, x + shift, x - shift))
    return np.where(np.abs(x - middle) <= allowed, x, np.where(distance > 0, middle - allowed, middle + allowed))


def by_trajectory(ids: np.ndarray, events: np.ndarray, times: Array) -> dict[int, list[tuple[int, Any]]]:
    """Return the (event, time) pairs of each trajectory, given sorted events of all of them; `times` may be traced."""
    found: dict[int, list[tuple[int, Any]]] = {}
    every = times if isbox(times) else times.tolist()
    for i, e, time in zip(ids.astype(int).tolist(), events.astype(int).tolist(), every):
        found.setdefault(i, []).append((e, time))
    return found


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
