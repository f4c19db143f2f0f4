"""Events: sign changes of a condition along a trajectory, located on the step's interpolant, and the table of them."""

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

# The width of a root's bracket, as a fraction of the step, at which the search ends, and the maximum number of evaluations.
# In a narrower bracket rounding decides on the condition's sign, and secants converge slowly.
RESOLUTION, EVALUATIONS = 2.0**-48, 50
# Distance of evaluations from the secant's root towards the middle, relative to the bracket's width.
TRUNCATION = 0.2
# Number of columns for which non-terminal events are located at once: large enough to amortize the overhead of NumPy's
# calls.
_MANY = 2048


class StepEvents(NamedTuple):
    """The events of one step of several columns."""

    located: list[LocatedEvent]
    ended: Array | None  # bool, shape (n,); which columns a terminal event ended; None if none did
    part: Array  # shape (n,); the fraction of the step at which it did; infinite for the others
    states: Array  # shape (d, n); the states there, and for the others after the step
    found: list[tuple[int, Array, Array]]  # the events, the columns of each, and the fractions of their steps


class CrossedSteps(NamedTuple):
    """Steps of some columns in which conditions have changed their signs, kept until the events are located."""

    # Shape (events, n). The conditions that have, and their values before and after the step; empty without conditions.
    crossed: Array
    before: Array
    after: Array
    step: Step

    @staticmethod
    def joined(parts: Sequence[CrossedSteps]) -> CrossedSteps:
        """Return the concatenation of several."""
        if len(parts) == 1:
            return parts[0]
        *tables, steps = zip(*parts)
        *rows, stages, sign = zip(*steps)
        made: list[Any] = [np.concatenate(row, axis=-1) for row in rows]
        made += [[np.concatenate(k, axis=-1) for k in zip(*stages)], None if sign[0] is None else np.concatenate(sign)]
        found: list[Any] = [np.concatenate(table, axis=-1) for table in tables]
        return CrossedSteps._make([*found, Step._make(made)])


class EventWatch:
    """The values of the conditions at the working set's columns, and the events in each step.

    `crossed` returns the columns in which a condition changed its sign. The fractions of their steps are then located for
    all these columns at once, and stored in a table: the trajectory, the event, the number of its step (from 0), the
    fraction of the step (infinite if the trajectory had ended before), and the time.

    `select`: ``select(ids)`` returns the parameters of some trajectories.
    """

    def __init__(self, events: tuple[Event, ...], coefficients: Coefficients, select: Callable[[Array], Tree]):
        self._events, self._coefficients, self._select = events, coefficients, select
        self.values: list[Array] = []  # of the conditions at the current states, each of shape (n,)
        self.pairs: list[tuple[Array, Array]] = []  # before and after the last step
        self._rows: list[Array] = []
        self._count = 0
        self._later: list[CrossedSteps] = []
        self._put_off = 0  # the number of columns in these steps

    def enter(self, u: Array, p: Tree, t: Array) -> None:
        """Set the columns of a new working set, at their present states and actual times."""
        self.values = [event.value(u, p, t) for event in self._events]

    def crossed(self, step: Step, p: Tree, sides: Mapping[int, Array] = {}) -> list[Array]:
        """Return per event the columns in which its condition changed its sign, and set the values to those after the step.

        `sides`: for some events, the side on which their conditions were left.
        """
        time = step.actual(step.t_new)
        self.pairs = [(old, event.value(step.new, p, time)) for event, old in zip(self._events, self.values)]
        self.values = [np.where(step.accepted, new, old) for old, new in self.pairs]
        changed = (event.crossed(*pair, sides.get(e)) for e, (event, pair) in enumerate(zip(self._events, self.pairs)))
        return [step.accepted & mask for mask in changed]

    def kept(self, step: Step, columns: Array, crossed: Sequence[Array], end: bool = False) -> CrossedSteps:
        """Return the step of some columns, or only its end, in which these conditions have changed their signs."""
        before, after = zip(*self.pairs)
        changed, old, new = (np.array([row[columns] for row in rows]) for rows in (crossed, before, after))
        return CrossedSteps(changed, old, new, step.at_end(columns) if end else step.at(columns))

    def put_off(self, step: Step, columns: Array, crossed: Sequence[Array]) -> None:
        """Locate the events of some columns later, for many at once: they end no step."""
        self._later.append(self.kept(step, columns, crossed))
        self._put_off += len(columns)
        if self._put_off > _MANY:
            self._catch_up()

    def _catch_up(self) -> None:
        if self._later:
            self.cut(CrossedSteps.joined(self._later))
            self._later, self._put_off = [], 0

    def cut(self, kept: CrossedSteps) -> StepEvents:
        """Locate the events of kept steps, store them, and cut short the steps that they end."""
        step, crossed = kept.step, [np.flatnonzero(row) for row in kept.crossed]
        pairs = list(zip(kept.before, kept.after))
        found = self.located(step, [rows if rows.size else None for rows in crossed], pairs)
        if found.ended is not None:
            ended = np.flatnonzero(found.ended)
            at = step.t[ended] + found.part[ended] * step.h[ended]
            step.t_new[ended] = np.minimum(at, step.t_new[ended])  # in case of rounding, see `_entered`
            step.new[:, ended] = found.states[:, ended]
        return found

    def located(self, step: Step, crossed: Sequence[Array | None], pairs: Sequence[tuple[Array, Array]]) -> StepEvents:
        """Locate the events of a step, and store them; `crossed` has the columns of each event, None if there are none.

        `pairs` are the conditions' values before and after it.
        """
        last, ender = np.full_like(step.t, np.inf), np.full_like(step.ids, -1)
        states, found = step.new, []
        for e, (event, columns) in enumerate(zip(self._events, crossed)):
            if columns is None:
                continue
            x, at = self._located(event, step.at(columns), *(values[columns] for values in pairs[e]))
            found.append((e, columns, x))
            if event.stops:
                states = states.copy() if states is step.new else states
                earlier = x <= last[columns]  # of two that coincide the later one in the list counts
                last[columns] = np.where(earlier, x, last[columns])
                ender[columns] = np.where(earlier, np.full_like(columns, e), ender[columns])
                states[:, columns] = np.where(earlier, at, states[:, columns])
        located = [self._entered(step, e, columns, x, last, ender, len(found) > 1) for e, columns, x in found]
        ended = None if states is step.new else last < np.inf
        return StepEvents([one for one in located if one], ended, last, states, found)

    def _located(self, event: Event, step: Step, before: Array, after: Array) -> tuple[Array, Array]:
        """Return the fractions of the step at which a condition vanishes, to the resolution of time, and the states there.

        References
        ----------
        I. F. D. Oliveira, R. H. C. Takahashi, An enhancement of the bisection method average performance preserving minmax
        optimality, ACM Transactions on Mathematical Software 47 (2020), 5:1-24: the method ITP, with κ₂ = 2 and n₀ = 1.
        """
        count, ids, real = len(before), step.ids, self._coefficients.real
        hosted = type(before) is np.ndarray
        if count == 1 and hosted:  # at least two columns wherever f and conditions are called
            step, before, after = step.at(np.zeros(2, int)), np.repeat(before, 2), np.repeat(after, 2)
            ids = step.ids
        p, signs = self._select(ids), np.sign(before)
        terms = polynomials(self._coefficients, step.u, step.h.astype(real, copy=False), step.k)
        low, high = np.zeros_like(before), np.ones_like(before)
        for evaluation in range(EVALUATIONS):
            wide = high - low > RESOLUTION
            if hosted and not wide.any():
                break
            # On a device the host doesn't check whether all are found, so fewer evaluations would save nothing.
            x = _projected(low, high, before, after, 0.5**evaluation) if hosted else 0.5 * (low + high)
            value = event.value(states_at(terms, x.astype(real, copy=False)), p, step.actual(step.t + x * step.h))
            same = np.sign(value) == signs
            # Finished columns stay unchanged, however long others take.
            rise, fall = wide & same, wide & ~same
            low, high = np.where(rise, x, low), np.where(fall, x, high)
            if hosted:
                before, after = np.where(rise, value, before), np.where(fall, value, after)
        return high[:count], states_at(terms, high.astype(real, copy=False))[:, :count]

    def _entered(
        self, step: Step, e: int, columns: Array, x: Array, last: Array, ender: Array, several: bool
    ) -> LocatedEvent | None:
        """Write an event into the table, and return it without the columns that had already ended."""
        # Rounding must not move an event beyond the step's end, which may be another event or the end of tspan.
        time = np.minimum(step.t[columns] + x * step.h[columns], step.t_new[columns])
        time = time if step.sign is None else time * step.sign[columns]
        # An event after a terminal event in the same step doesn't occur.
        known, terminal = x <= last[columns], self._events[e].stops
        part = np.where(known, x, np.inf)
        row = self._count + np.cumsum(np.full_like(columns, 1)) - 1
        self.note(step, e, columns, part, time)
        if several:
            kept = np.flatnonzero((ender[columns] == e) if terminal else known)
            columns, x, time, row = columns[kept], x[kept], time[kept], row[kept]
        return LocatedEvent(e, terminal, columns, x, time, row) if len(columns) else None

    def note(self, step: Step, e: int, columns: Array, part: Array, time: Array) -> None:
        """Write an event in steps of some columns into the table."""
        # All as doubles, which hold the integers exactly: one table, and one copy from a device to the host.
        rows = step.ids[columns], np.full_like(columns, e), step.number[columns], part, time
        self._rows.append(np.stack([row.astype(float) for row in rows]))
        self._count += len(columns)

    def rows(self) -> Array | None:
        """Return the table, shape (5, m); None if it is empty."""
        self._catch_up()
        return np.concatenate(self._rows, axis=1) if self._rows else None


def _projected(low: Array, high: Array, before: Array, after: Array, reach: float) -> Array:
    """Return the next point of ITP: the secant's root, moved towards the middle, and within the allowed distance of it.

    `before` and `after` are the values at both ends; `reach` is 1, halved with each evaluation.
    """
    # Interpolate, truncate, project: as few evaluations as the secant method, and never more than one beyond bisection.
    width, middle = high - low, 0.5 * (low + high)
    x = (after * low - before * high) / (after - before)
    away, allowed = middle - x, reach - 0.5 * width
    shift = np.maximum(TRUNCATION * width * width, 0.5 * RESOLUTION)
    x = np.where(np.abs(away) <= shift, middle, np.where(away > 0, x + shift, x - shift))
    return np.where(np.abs(x - middle) <= allowed, x, np.where(away > 0, middle - allowed, middle + allowed))


def by_trajectory(ids: np.ndarray, events: np.ndarray, times: Array) -> dict[int, list[tuple[int, Any]]]:
    """Return the events of each trajectory, given those of all trajectories in order; the times may be traced."""
    found: dict[int, list[tuple[int, Any]]] = {}
    every = times if isbox(times) else times.tolist()
    for i, e, time in zip(ids.astype(int).tolist(), events.astype(int).tolist(), every):
        found.setdefault(i, []).append((e, time))
    return found


def in_order(rows: np.ndarray) -> np.ndarray:
    """Return the rows with events that occurred, sorted by trajectory and then by time."""
    ids, event, number, part = rows[:4]
    step = ids * (number.max(initial=0.0) + 1.0) + number
    order = np.argsort(step, kind="stable")  # fast if they are sorted, as kernels' are
    step = step[order]
    if (step[1:] == step[:-1]).any():
        # Within a step by its fractions; equal ones in the order in which the events were given.
        order = np.lexsort((event, part, number, ids))
    return order[np.isfinite(part[order])]


def traced_times(
    ids: np.ndarray, times: np.ndarray, places: np.ndarray, live: np.ndarray, reached: Array, crossed: Array
) -> Array:
    """Return the times of events, shape (m,), as traces see them; for failed trajectories the plain times.

    `ids` are the trajectories, and `places` has the index of each time in `crossed`, or -1 for those that ended
    trajectories: these times are in `reached`, of shape (N,). `live`, bool, shape (N,): which trajectories didn't fail.
    """
    place = np.where(places < 0, ids, len(live) + places) + len(ids)
    return concatenate([times, reached, crossed])[np.where(live[ids], place, np.arange(len(ids)))]
