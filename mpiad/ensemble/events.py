"""Events: when a condition changes its sign along a trajectory, found on the step's interpolant, and the table of them."""

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

# How close the bracket of a root is drawn, in parts of the step, and in how many evaluations at the latest. Where it is
# narrower the condition's rounding decides on its sign, and secants creep.
RESOLUTION, EVALUATIONS = 2.0**-48, 50
# How far from the secant's root, for the bracket's width, evaluations are taken on the side of the middle.
TRUNCATION = 0.2
# For so many columns events that end no step are looked for at once: what NumPy's calls take to start no longer counts.
_MANY = 2048


class StepEvents(NamedTuple):
    """The events of one step of several columns."""

    located: list[LocatedEvent]
    ended: Array | None  # bool, shape (n,); which columns a terminal event ended; None where none did
    part: Array  # shape (n,); at which part of the step; infinite elsewhere
    states: Array  # shape (d, n); there, and after the step elsewhere
    found: list[tuple[int, Array, Array]]  # the events, the columns of each, and the parts of their steps


class CrossedSteps(NamedTuple):
    """Steps of some columns in which conditions have changed their signs, kept until they are looked at."""

    # Shape (events, n). Which conditions have, and their values before and after the step; none without conditions.
    crossed: Array
    before: Array
    after: Array
    step: Step

    @staticmethod
    def joined(parts: Sequence[CrossedSteps]) -> CrossedSteps:
        """Return several as one."""
        if len(parts) == 1:
            return parts[0]
        *tables, steps = zip(*parts)
        *rows, stages, sign = zip(*steps)
        made: list[Any] = [np.concatenate(row, axis=-1) for row in rows]
        made += [[np.concatenate(k, axis=-1) for k in zip(*stages)], None if sign[0] is None else np.concatenate(sign)]
        found: list[Any] = [np.concatenate(table, axis=-1) for table in tables]
        return CrossedSteps._make([*found, Step._make(made)])


class EventWatch:
    """The values of the conditions at the working set's columns, and what becomes of them in a step.

    Whether any changed its sign is asked with `crossed`. Where one did, the part of the step is found, for all columns that
    it concerns at once, and noted in a table: the trajectory, which event, in which of its steps (from 0), at which part of
    it (infinite where the trajectory had ended before), and when.

    `select`: ``select(ids)`` returns the parameters of some trajectories.
    """

    def __init__(self, events: tuple[Event, ...], coefficients: Coefficients, select: Callable[[Array], Tree]):
        self._events, self._coefficients, self._select = events, coefficients, select
        self.values: list[Array] = []  # of the conditions now, each of shape (n,)
        self.pairs: list[tuple[Array, Array]] = []  # before and after the step that was looked at last
        self._rows: list[Array] = []
        self._count = 0
        self._later: list[CrossedSteps] = []
        self._put_off = 0  # how many columns these have

    def enter(self, u: Array, p: Tree, t: Array) -> None:
        """Take up the columns of a new working set, at their present states and actual times."""
        self.values = [event.value(u, p, t) for event in self._events]

    def crossed(self, step: Step, p: Tree, sides: Mapping[int, Array] = {}) -> list[Array]:
        """Tell for each event in which columns its condition changed its sign as asked for; go on from the step's end.

        `sides`: of some events on which side their conditions were left.
        """
        time = step.actual(step.t_new)
        self.pairs = [(old, event.value(step.new, p, time)) for event, old in zip(self._events, self.values)]
        self.values = [np.where(step.accepted, new, old) for old, new in self.pairs]
        changed = (event.crossed(*pair, sides.get(e)) for e, (event, pair) in enumerate(zip(self._events, self.pairs)))
        return [step.accepted & mask for mask in changed]

    def kept(self, step: Step, columns: Array, crossed: Sequence[Array], end: bool = False) -> CrossedSteps:
        """Return the step of some columns, or its end alone, in which these conditions have changed their signs."""
        before, after = zip(*self.pairs)
        changed, old, new = (np.array([row[columns] for row in rows]) for rows in (crossed, before, after))
        return CrossedSteps(changed, old, new, step.at_end(columns) if end else step.at(columns))

    def put_off(self, step: Step, columns: Array, crossed: Sequence[Array]) -> None:
        """Look for the events of some columns later, for many at once: they end no step."""
        self._later.append(self.kept(step, columns, crossed))
        self._put_off += len(columns)
        if self._put_off > _MANY:
            self._catch_up()

    def _catch_up(self) -> None:
        if self._later:
            self.cut(CrossedSteps.joined(self._later))
            self._later, self._put_off = [], 0

    def cut(self, kept: CrossedSteps) -> StepEvents:
        """Find the events of steps that were kept, note them, and cut the steps short that they end."""
        step, crossed = kept.step, [np.flatnonzero(row) for row in kept.crossed]
        pairs = list(zip(kept.before, kept.after))
        found = self.located(step, [rows if rows.size else None for rows in crossed], pairs)
        if found.ended is not None:
            ended = np.flatnonzero(found.ended)
            at = step.t[ended] + found.part[ended] * step.h[ended]
            step.t_new[ended] = np.minimum(at, step.t_new[ended])  # by rounding, see `_entered`
            step.new[:, ended] = found.states[:, ended]
        return found

    def located(self, step: Step, crossed: Sequence[Array | None], pairs: Sequence[tuple[Array, Array]]) -> StepEvents:
        """Find the events of a step, and note them; `crossed` has the columns of each event, None where there are none.

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
                earlier = x <= last[columns]  # of two at once the one that was given later counts
                last[columns] = np.where(earlier, x, last[columns])
                ender[columns] = np.where(earlier, np.full_like(columns, e), ender[columns])
                states[:, columns] = np.where(earlier, at, states[:, columns])
        located = [self._entered(step, e, columns, x, last, ender, len(found) > 1) for e, columns, x in found]
        ended = None if states is step.new else last < np.inf
        return StepEvents([one for one in located if one], ended, last, states, found)

    def _located(self, event: Event, step: Step, before: Array, after: Array) -> tuple[Array, Array]:
        """Return at which parts of the step a condition vanishes, down to time's resolution, and the states there.

        References
        ----------
        I. F. D. Oliveira, R. H. C. Takahashi, An enhancement of the bisection method average performance preserving minmax
        optimality, ACM Transactions on Mathematical Software 47 (2020), 5:1-24: the method ITP, with κ₂ = 2 and n₀ = 1.
        """
        count, ids, real = len(before), step.ids, self._coefficients.real
        hosted = type(before) is np.ndarray
        if count == 1 and hosted:  # two columns at least, wherever f and conditions are called
            step, before, after = step.at(np.zeros(2, int)), np.repeat(before, 2), np.repeat(after, 2)
            ids = step.ids
        p, signs = self._select(ids), np.sign(before)
        terms = polynomials(self._coefficients, step.u, step.h.astype(real, copy=False), step.k)
        low, high = np.zeros_like(before), np.ones_like(before)
        for evaluation in range(EVALUATIONS):
            wide = high - low > RESOLUTION
            if hosted and not wide.any():
                break
            # On a device nobody looks whether all are found, so fewer evaluations would save nothing.
            x = _projected(low, high, before, after, 0.5**evaluation) if hosted else 0.5 * (low + high)
            value = event.value(states_at(terms, x.astype(real, copy=False)), p, step.actual(step.t + x * step.h))
            same = np.sign(value) == signs
            # What is done stays, however long others take.
            rise, fall = wide & same, wide & ~same
            low, high = np.where(rise, x, low), np.where(fall, x, high)
            if hosted:
                before, after = np.where(rise, value, before), np.where(fall, value, after)
        return high[:count], states_at(terms, high.astype(real, copy=False))[:, :count]

    def _entered(
        self, step: Step, e: int, columns: Array, x: Array, last: Array, ender: Array, several: bool
    ) -> LocatedEvent | None:
        """Write an event into the table, and return it without the columns that had ended before."""
        # By rounding no event lies beyond the step's end, where another may be, or tspan may end.
        time = np.minimum(step.t[columns] + x * step.h[columns], step.t_new[columns])
        time = time if step.sign is None else time * step.sign[columns]
        # What comes after a terminal event in the same step never happens.
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
        # All as doubles, which hold the numbers exactly: one table, and from a device one copy to the host.
        rows = step.ids[columns], np.full_like(columns, e), step.number[columns], part, time
        self._rows.append(np.stack([row.astype(float) for row in rows]))
        self._count += len(columns)

    def rows(self) -> Array | None:
        """Return the table, shape (5, m); None where nothing happened."""
        self._catch_up()
        return np.concatenate(self._rows, axis=1) if self._rows else None


def _projected(low: Array, high: Array, before: Array, after: Array, reach: float) -> Array:
    """Return where ITP evaluates next: the secant's root, moved towards the middle, and no further from it than it may be.

    It is drawn by the values at both ends, `before` and `after`; `reach` is 1, halved with each evaluation.
    """
    # Interpolate, truncate, project: as few evaluations as the secant's, and never more than one beyond bisection's.
    width, middle = high - low, 0.5 * (low + high)
    x = (after * low - before * high) / (after - before)
    away, room = middle - x, reach - 0.5 * width
    shift = np.maximum(TRUNCATION * width * width, 0.5 * RESOLUTION)
    x = np.where(np.abs(away) <= shift, middle, np.where(away > 0, x + shift, x - shift))
    return np.where(np.abs(x - middle) <= room, x, np.where(away > 0, middle - room, middle + room))


def by_trajectory(ids: np.ndarray, events: np.ndarray, times: Array) -> dict[int, list[tuple[int, Any]]]:
    """Return the events of each trajectory, by those of all in their order; the times may be traced."""
    found: dict[int, list[tuple[int, Any]]] = {}
    every = times if isbox(times) else times.tolist()
    for i, e, time in zip(ids.astype(int).tolist(), events.astype(int).tolist(), every):
        found.setdefault(i, []).append((e, time))
    return found


def in_order(rows: np.ndarray) -> np.ndarray:
    """Return which rows say that an event was, trajectory by trajectory in the order of time."""
    ids, event, number, part = rows[:4]
    step = ids * (number.max(initial=0.0) + 1.0) + number
    order = np.argsort(step, kind="stable")  # in no time where they are in order, as kernels' are
    step = step[order]
    if (step[1:] == step[:-1]).any():
        # Within a step by its parts; equal ones in the order in which the events were given.
        order = np.lexsort((event, part, number, ids))
    return order[np.isfinite(part[order])]


def traced_times(
    ids: np.ndarray, times: np.ndarray, places: np.ndarray, live: np.ndarray, reached: Array, crossed: Array
) -> Array:
    """Return the times of events, shape (m,), as traces see them; of trajectories that failed as they are.

    `ids` are the trajectories, and `places` says where in `crossed` each time is, -1 for those that ended trajectories:
    these are in `reached`, of shape (N,). `live`, bool, shape (N,): which trajectories didn't fail.
    """
    place = np.where(places < 0, ids, len(live) + places) + len(ids)
    return concatenate([times, reached, crossed])[np.where(live[ids], place, np.arange(len(ids)))]
