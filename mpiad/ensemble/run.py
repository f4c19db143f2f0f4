"""`Run`: a solve to be differentiated, with its inputs, recorded steps, saved values and events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.compiling.program import Program
from mpiad.ensemble.batch import Batch, two_at_least
from mpiad.ensemble.coefficients import Coefficients, coefficients_of
from mpiad.ensemble.column_lu import Mass
from mpiad.ensemble.derivative import derivative_of
from mpiad.ensemble.field_jacobian import FieldJacobian, field_program, jacobian_of
from mpiad.ensemble.initialization import derivative_at
from mpiad.ensemble.jumps import FOUND, Jumps, beside
from mpiad.ensemble.linearization import Field
from mpiad.ensemble.outcome import FINAL, INITIAL, NOWHERE, Outcome, ReturnCode
from mpiad.ensemble.record import Steps
from mpiad.ensemble.settings import Settings
from mpiad.ensemble.sparse_lu import StepMatrices
from mpiad.ensemble.stages import Stages, stages_for
from mpiad.ensemble.step_sweep import (
    Columns,
    EventTimes,
    LocatedEvent,
    Saved,
    SavedInStep,
    StepSweep,
    Visit,
    starts_of_runs,
    turns,
)
from mpiad.transport.devices.device_arrays import arrays_of

# Saved values, sorted by the steps that contain them.
#
# A saved value at the fraction x of a step of size h from u is u + h Σ w_i(x) k_i, with the stages k_i and the weights w_i
# of the interpolant.


# For each visit of a sweep, tuples of arrays whose last axis counts the entries of a group.
Groups: TypeAlias = dict[int, list[tuple[Array, ...]]]


def grouped(visits: Array, kinds: Array, *arrays: Array) -> Groups:
    """Return for each visit of a sweep (see `step_sweep`) its entries along the last axis of arrays, grouped by kind."""
    order = np.lexsort((kinds, visits))
    v, chosen = visits[order], [np.take(array, order, axis=-1) for array in arrays]
    cuts = [*starts_of_runs(v, kinds[order]).tolist(), len(order)]
    groups: Groups = {}
    for start, stop in zip(cuts, cuts[1:]):
        groups.setdefault(int(v[start]), []).append(tuple(array[..., start:stop] for array in chosen))
    return groups


class Seeds(NamedTuple):
    """Cotangents of the results of N trajectories."""

    end: Array  # of the final states: shape (d, N)
    saved: Array | None = None  # of the saved states: shape (N, n_saved, d), or None if all are zero
    reached: Array | None = None  # of the final times: shape (N,), or None
    crossed: Array | None = None  # of the times in `EventTimes.crossed`: shape (m,), or None if all are zero

    def share(self, rows: slice) -> Seeds:
        """Return the seeds of some trajectories, without the cotangents of the times of events."""
        parts = (None if part is None else part[rows] for part in (self.saved, self.reached))
        return Seeds(self.end[:, rows], *parts)


def _by_visits(chosen: Array, visit: Array, column: Array, *arrays: Array) -> Groups:
    """Return for each visit the chosen entries, sorted by column, in groups with at most one entry per column."""
    # `+=` with an index array adds only once per column. Entries of a column must be adjacent and in the order of time.
    rows = np.flatnonzero(chosen)
    visit, column, *arrays = (np.take(array, rows, axis=-1) for array in (visit, column, *arrays))  # type: ignore[assignment]
    return grouped(visit, turns(visit, column), *arrays)


# Sweeps on the host over the steps of a block of trajectories, each of which is a column of the arrays.
#
# The columns are sorted by their numbers of steps, in descending order. A visit of the sweep contains one step of several
# columns: visit v contains the (v+1)-th step from the end of each column with more than v steps. If only some states were
# stored, steps are counted from the start instead, so that all columns have stored states in the same visits.


def columns_of(sweep: SortedSweep, ids: Array) -> tuple[Array, Array]:
    """Return the indices, in `ids`, of the trajectories of a sweep, and their columns, in ascending order of columns."""
    order = np.argsort(sweep.ids)
    position = np.minimum(np.searchsorted(sweep.ids, ids, sorter=order), max(0, len(order) - 1))
    indices = np.flatnonzero(sweep.ids[order[position]] == ids) if len(order) else np.empty(0, int)
    columns = order[position[indices]]
    ascending = np.argsort(columns, kind="stable")
    return indices[ascending], columns[ascending]


class Crossings(NamedTuple):
    """m events of trajectories; all arrays have shape (m,)."""

    ids: Array  # trajectories
    event: Array  # index among the events of the solve
    number: Array  # the step, from 0
    x: Array  # the fraction of the step at the event
    time: Array


class SortedSweep(StepSweep):
    """The visits of a block on the host, `start` to `stop` in sorted order; `first`: the index of its first trajectory."""

    def __init__(self, run: Run, steps: Steps, start: int, stop: int, first: int, every: int | None):
        self._run, self._steps, self._start, self._stop = run, steps, start, stop
        self._trajectories = steps.order[start:stop]
        self.counts, self.ids = steps.counts[self._trajectories], self._trajectories + first
        self._every = every
        self._cut = run.cut[self.ids] if run.settings.events else None

    @cached_property
    def leaves(self) -> list[Any]:  # type: ignore[override]
        """The leaves of the parameters of the columns."""
        return self._run.batch.p.chosen(self.ids)

    def __len__(self) -> int:
        return int(self.counts[0])

    def visit_of(self, column: Array, number: Array) -> Array:
        """Return the indices of the visits that contain steps of columns; `number`: the steps, from 0."""
        return (len(self) if self._every else self.counts[column]) - 1 - number

    def _starts(self) -> range:
        return range(0, len(self), self._every or 1)

    def _segment(self, begin: int) -> Iterator[Visit]:
        if not self._every:
            s = len(self) - 1 - begin
            stop = min(self._stop, int(self._steps.widths[s]))
            t, h, u = (x[..., self._start : stop] for x in self._steps.sweep(s))
            yield Visit(s, t, h, u, slice(0, stop - self._start) if s == 0 else slice(0, 0))
            return
        stop, width = min(begin + self._every, len(self)), self._width(begin)
        kept: Any = self._steps.kept
        u = kept.states(self._trajectories[:width], np.full(width, begin // self._every))
        for number in range(begin, stop):
            width, following = self._width(number), self._width(number + 1)
            u = u[:, :width]
            t, h = self._steps.times(self._trajectories[:width], np.full(width, number))
            visit = Visit(len(self) - 1 - number, t, h, u, slice(following, width))
            yield visit
            if number + 1 < stop:  # the state at `stop` was stored
                u = self._run.stages_of(self.ids[:width], np.full(width, number), u, t, h)[1]
                for rows, columns in self.jumps(visit):
                    u[:, columns] = self._run.jumps.after[:, rows]  # type: ignore[union-attr]

    def _width(self, number: int) -> int:
        return int(np.count_nonzero(self.counts > number))

    @cached_property
    def _saved_values(self) -> tuple[Groups, Groups]:
        """For each visit, the values saved at the end of the step and inside it."""
        entries = self._run.entries
        starts, stops = (np.searchsorted(entries[0], self.ids, side=side) for side in ("left", "right"))
        counts = stops - starts
        column = np.repeat(np.arange(len(self.ids)), counts)
        # The entries of a trajectory are adjacent.
        chosen = np.arange(len(column)) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
        ids, place, number, x = (array[chosen] for array in entries)
        inside, visit, entry = x != 1, self.visit_of(column, number), (ids, place, column)
        weights = self._run.coefficients.weights(x)
        return _by_visits(~inside, visit, column, *entry), _by_visits(inside, visit, column, *entry, x, weights)

    def saved(self, visit: Visit) -> SavedInStep:
        """Return the values saved in the step."""
        parts = (groups.get(visit.number, ()) for groups in self._saved_values)
        return SavedInStep._make([Saved(*group) for group in part] for part in parts)

    @cached_property
    def _crossings_at(self) -> list[Groups]:
        """The indices and columns of `Run.crossings`, and those of `Run.stops`, for each visit, grouped by event."""
        groups = []
        for crossings in (self._run.crossings, self._run.stops):
            indices, columns = columns_of(self, crossings.ids)
            visits, event = self.visit_of(columns, crossings.number[indices]), crossings.event[indices]
            # A condition may vanish several times in one step, but `+=` with an index array adds only once per column.
            order, turn = np.lexsort((event, columns, visits)), np.zeros_like(event)
            turn[order] = turns(visits[order], columns[order], event[order])
            groups.append(grouped(visits, event + len(self._run.settings.events) * turn, indices, columns))
        return groups

    def located(self, visit: Visit) -> Sequence[LocatedEvent]:
        """Return the events in the step."""
        if self._cut is None:
            return ()
        run, events = self._run, []
        for crossings, visits, ends in zip((run.crossings, run.stops), self._crossings_at, (False, True)):
            for chosen, columns in visits.get(visit.number, ()):
                x, time, event = crossings.x[chosen], crossings.time[chosen], int(crossings.event[chosen[0]])
                # The index of the event's time in `crossed`, or, for a final time, the trajectory.
                acted = ends and run.jumps
                row = run.crossed_row[run.stop_rows[chosen]] if acted else self.ids[columns] if ends else chosen
                events.append(LocatedEvent(event, ends, columns, x, time, row))
        return events

    @cached_property
    def _jumps_at(self) -> Groups:
        """The jumps (state changes by events) after the step of each visit, at most one per column in each group."""
        jumps = self._run.jumps
        if jumps is None:
            return {}
        indices, columns = columns_of(self, np.where(jumps.number > 0, jumps.ids, -1))
        visits = self.visit_of(columns, jumps.number[indices] - 1)
        return grouped(visits, jumps.turn[indices], indices, columns)

    def jumps(self, visit: Visit) -> Sequence[tuple[Array, Array]]:
        """Return the jumps after the step, in order, and their columns."""
        return self._jumps_at.get(visit.number, ())

    def limits(self, visit: Visit) -> tuple[Array, Array] | None:
        """Return the times of f at both ends of the step: see `Run.limits`."""
        number = (len(self) if self._every else self.counts[: len(visit.t)]) - 1 - visit.number
        return self._run.limits(self.ids[: len(visit.t)], np.broadcast_to(number, visit.t.shape))

    def moves(self, visit: Visit) -> Array:
        """Return a mask of the columns in which the step ends at the end of tspan."""
        mask = np.zeros(len(visit.t), bool)
        mask[visit.about] = True if self._cut is None else ~self._cut[visit.about]
        return mask


# Number of entries per array of a block, so large that computing f costs more than tracing it.
_BLOCK = 49152
_LEAST_COLUMNS = 1024


class Run:
    """A solve and its record, in untraced arrays; `live`, shape (N,): a host mask of the trajectories that didn't fail."""

    def __init__(self, batch: Batch, settings: Settings, outcome: Outcome):
        self.batch, self.settings, self.outcome = batch, settings, outcome
        self.tableau, self.field = settings.alg.tableau, Field(batch)
        self.live, self.xp = ~outcome.failed, arrays_of(batch.u0)

    @cached_property
    def coefficients(self) -> Coefficients:
        """The method's coefficients, on the device of the states."""
        return coefficients_of(self.tableau, self.batch.u0)

    @cached_property
    def program(self) -> Program | None:
        """The program of f, if its derivatives take less time than those of f."""
        return field_program(self.batch)

    @cached_property
    def jacobian(self) -> FieldJacobian:
        """The Jacobian of f."""
        return jacobian_of(self.batch)

    @cached_property
    def step_matrices(self) -> StepMatrices:
        """The matrices of the steps of a Rosenbrock method."""
        table: Any = self.tableau
        mass = Mass(self.settings.mass, table.gamma)
        return StepMatrices(self.jacobian.places, mass, len(self.batch.u0), self.xp is None)

    @cached_property
    def terminated(self) -> Array:
        """A mask of the trajectories that an event ended, shape (N,), on the host."""
        return self.outcome.codes == ReturnCode.Terminated.code

    @cached_property
    def counts(self) -> Array:
        """The number of steps to differentiate per trajectory: array of int, shape (N,)."""
        return np.where(self.live, self.outcome.naccept, 0)

    @property
    def n_saved(self) -> int:
        """The number of saved values per trajectory."""
        return self.save_step.shape[1]

    @property
    def slots(self) -> int:
        """The length of the axis of saved values; on a device there is an additional entry for unsaved values."""
        return self.n_saved

    @cached_property
    def event_times(self) -> EventTimes:
        """The final times, and the times of events."""
        ids, _, _, _, time, _ = self._event_columns
        return EventTimes(self.outcome.t_reached, ids[self.crossed_rows], time[self.crossed_rows])

    @cached_property
    def save_step(self) -> Array:
        """The step of each saved value, from 0, or INITIAL, FINAL or NOWHERE: array of int, shape (N, n_saved)."""
        live, count = self.live[:, None], self.counts[:, None]
        if self.settings.saveat is not None:
            steps, empty_span = np.asarray(self.outcome.save_step), (self.batch.start == self.batch.end)[:, None]
            final = empty_span & (steps == INITIAL) & (np.arange(steps.shape[1]) > 0)
            return np.where(live, np.where(final, FINAL, steps), NOWHERE)
        number = np.arange(-1, int(self.outcome.naccept.max(initial=0)))
        steps = np.where(number == count - 1, FINAL, np.where(number < count, number, NOWHERE))
        steps[:, 0] = INITIAL
        return np.where(live, steps, NOWHERE)

    def masked(self, x: Array) -> Array:
        """Return a copy with zeros for failed trajectories, which are columns of the last axis."""
        if self.xp is not None and self.live.all():
            return x.copy()
        return np.where(self.placed(self.live), x, 0)

    def placed(self, mask: np.ndarray) -> Array:
        """Return a host array, copied to the device of the states."""
        return mask if self.xp is None else self.xp.to_device(np.ascontiguousarray(mask))

    def arange(self, stop: int) -> Array:
        """Return the integers from 0 on, on the device of the states."""
        return np.arange(stop) if self.xp is None else self.xp.arange(stop)

    def on_host(self, x: Array) -> np.ndarray:
        """Return a host array, a copy if x is on a device."""
        return x if self.xp is None else self.xp.to_host(x)

    def zeros(self, *shape: int) -> Array:
        """Return zeros in double precision on the device of the states."""
        return np.zeros_like(self.batch.u0, shape=shape, dtype=float)

    def doubled(self, width: int) -> Columns:
        """Return the columns with which f is called: all columns, or on the host a single column twice."""
        single = width == 1 and self.xp is None and not self.field.one_by_one
        return np.zeros(2, int) if single else slice(0, width)

    @cached_property
    def shares(self) -> list[tuple[int, Steps]]:
        """For each thread's share: its first trajectory, and the steps of its trajectories that didn't fail."""
        recorded = self.outcome.recorded()
        return [(first, steps.chosen(self.live[first : first + len(steps.counts)])) for first, steps in recorded]

    def sweeps(self, backwards: bool = False) -> Iterator[StepSweep]:
        """Return all sweeps, block by block; if only some states were stored, only `backwards` sweeps have states."""
        width = max(_LEAST_COLUMNS, _BLOCK // max(1, len(self.batch.u0)))
        for first, steps in self.shares:
            moving = int(np.count_nonzero(steps.counts))
            for start in range(0, moving, width):
                yield SortedSweep(self, steps, start, min(start + width, moving), first, steps.every if backwards else None)

    @cached_property
    def _new_stages(self) -> Callable[[Array], Stages]:
        return stages_for(self.coefficients, self.batch, self.settings.mass)

    def stages(self, u: Array, p: Tree, t: Array, h: Array, end: Array) -> Stages:
        """Return the stages of steps from states u, (d, n), computed as in the solve; times and h are actual ones."""
        stages = self._new_stages(u)
        stages.k[0][...] = derivative_at(derivative_of(self.batch.f, self.batch.shape), u, p, t, None)
        stages.compute(u, p, t, h, end, None)
        return stages

    def stages_of(self, ids: Array, number: Array, u: Array, t: Array, h: Array) -> tuple[list[Array], Array]:
        """Return the stages of steps (`number`, from 0) of trajectories from states u, (d, n), and the states after."""
        width = len(t)
        columns = two_at_least(width)  # as in the solve
        end, limits = t + h, self.limits(ids, number)
        if limits is not None:
            t, end = (np.where(np.isnan(limit), x, limit) for x, limit in zip((t, end), limits))
        u, t, h = u[:, columns], t[columns], h[columns]
        stages = self.stages(u, self.batch.parameters(ids[columns]), t, h, end[columns])
        return [k[:, :width] for k in stages.k], stages.new[:, :width]

    @cached_property
    def _event_ends(self) -> list[tuple[Array, Array]]:
        """Sorted keys (see `limits`) and times of events: of those that act, and of those at whose times steps end."""
        jumps, stops, width = self.jumps, self.stops, int(self.counts.max(initial=0)) + 2
        at_end = stops.x == 1.0  # roots of conditions of p and t; other roots end steps, but not their stages
        ends = [(stops.ids[at_end] * width + stops.number[at_end] + 1, stops.time[at_end])]
        starts = [ends[0]]
        if jumps is not None:
            starts = [(jumps.ids * width + jumps.number, np.where(jumps.number > 0, jumps.time, np.nan))]
            ends += [tuple(x[jumps.slot != FOUND] for x in starts[0])]  # type: ignore[list-item]
        joined = [tuple(map(np.concatenate, zip(*parts))) for parts in (starts, ends)]
        return [(keys[order], times[order]) for keys, times in joined for order in [np.argsort(keys)]]

    def limits(self, ids: Array, number: Array) -> tuple[Array, Array] | None:
        """Return the times of f at the starts and ends of steps if an event lies there, otherwise NaN: see `beside`."""
        if not self.settings.events or not any(len(keys) for keys, _ in self._event_ends):
            return None
        directions, limits = np.where(self.batch.end < self.batch.start, -1.0, 1.0)[ids], []
        key = ids * (int(self.counts.max(initial=0)) + 2) + number
        for (keys, times), direction, wanted in zip(self._event_ends, (directions, -directions), (key, key + 1)):
            place = np.minimum(np.searchsorted(keys, wanted), max(0, len(keys) - 1))
            limit = np.full(len(ids), np.nan)
            if len(keys):
                limit = beside(times[place], direction, self.batch.u0.real.dtype)
                limit = np.where(keys[place] == wanted, limit, np.nan)
            limits.append(limit)
        return limits[0], limits[1]

    def seeds(self, saved: Array, end: Array, times: Sequence[Array]) -> Seeds:
        """Return the cotangents of the results, from arrays for saved states, (N, n_saved, d), final states and times."""
        if saved.size:
            # The cotangents of values that weren't reached may be NaN.
            saved = np.where((self.save_step == NOWHERE)[..., None], 0, saved)
        reached, crossed = times or (None, None)
        crossed = crossed if crossed is not None and crossed.any() else None
        return Seeds(end.T, saved if saved.any() else None, reached, crossed)

    @cached_property
    def entries(self) -> tuple[Array, Array, Array, Array]:
        """The m saved values inside steps: trajectories (ascending), indices, step numbers and fractions of steps."""
        ids, place = np.nonzero(self.save_step >= 0)
        # The times of `sol(t)` may be in any order; `_by_visits` needs those of a step next to each other.
        place = place[np.lexsort((self.save_step[ids, place], ids))]
        number = self.save_step[ids, place].astype(np.int64)
        t, h = np.empty(len(ids)), np.empty(len(ids))
        for first, steps in self.shares:
            in_share = (ids >= first) & (ids < first + len(steps.counts))
            t[in_share], h[in_share] = steps.times(ids[in_share] - first, number[in_share])
        times = self.settings.saveat
        if times is None:
            return ids, place, number, np.ones(len(ids))
        due = times[place] if times.ndim == 1 else times[ids, place]
        # The last step ends at the end of tspan, from which t + h may differ by rounding.
        last = (number == self.counts[ids] - 1) & (due == self.batch.end[ids])
        x = np.where(last | (due == t + h), 1.0, (due - t) / h)
        return ids, place, number, x

    def saved_at(self, at_start: bool) -> np.ndarray:
        """Return a mask of the saved values that are initial (or final) states, shape (N, n_saved), on the host."""
        return self.save_step == (INITIAL if at_start else FINAL)

    def add_saved(self, total: Array, saved: Array, at_start: bool) -> None:
        """Add to `total`, (d, N), the cotangents of saved values that are initial (or final) states."""
        mask = self.saved_at(at_start)
        for slot in np.flatnonzero(mask.any(axis=0)).tolist():
            rows = mask[:, slot]
            ids = slice(None) if rows.all() else self.placed(np.flatnonzero(rows))
            total[:, ids] += saved[ids, slot].T

    @cached_property
    def _event_columns(self) -> list[Array]:
        """The rows of `Outcome.event_table`, and a mask of the events that are terminal or act (change the state)."""
        rows = np.empty((5, 0)) if self.outcome.event_table is None else self.outcome.event_table
        ids, event, number = rows[:3].astype(int)
        ends = np.array([event.stops for event in self.settings.events], bool)[event]
        return [ids, event, number, *rows[3:], ends]

    @cached_property
    def crossing_rows(self) -> Array:
        """The rows of `crossings` in the table of events."""
        return np.flatnonzero(self.live[self._event_columns[0]] & ~self._event_columns[-1])

    @cached_property
    def crossings(self) -> Crossings:
        """The events that are neither terminal nor act, in trajectories that didn't fail."""
        return Crossings(*(column[self.crossing_rows] for column in self._event_columns[:5]))

    @cached_property
    def stops(self) -> Crossings:
        """The events that are terminal or act, at which steps end; only the last event that ends a step."""
        return Crossings(*(column[self.stop_rows] for column in self._event_columns[:5]))

    @cached_property
    def stop_rows(self) -> Array:
        """The rows of `stops` in the table of events."""
        ids, _, number, *_, ends = self._event_columns
        rows = np.flatnonzero(ends & self.live[ids])
        trajectory, step = ids[rows], number[rows]
        return rows[np.append((trajectory[1:] != trajectory[:-1]) | (step[1:] != step[:-1]), True)[: len(rows)]]

    @cached_property
    def crossed_rows(self) -> Array:
        """The rows of `crossed` in the table of events."""
        if not self._any_acts:
            return self.crossing_rows
        acts = np.array([event.acts for event in self.settings.events], bool)
        return np.append(self.crossing_rows, self.stop_rows[acts[self.stops.event]])

    @cached_property
    def crossed_row(self) -> Array:
        """The index of each event's time in `crossed`; -1 if `crossed` doesn't contain it, or the trajectory failed."""
        ids, *_, ends = self._event_columns
        index, rows = np.full(len(ids), -1), np.flatnonzero(self.live[ids] & ends)
        index[self.crossed_rows] = np.arange(len(self.crossed_rows))
        index[rows] = index[self.stop_rows[np.searchsorted(self.stop_rows, rows)]]
        return index

    @cached_property
    def jumps(self) -> Jumps | None:
        """The state changes by events in trajectories that didn't fail; None if there are none."""
        if not self._any_acts:
            return None
        outcome = self.outcome if self.outcome.solver is None else self.outcome.solver.recorded(self.outcome)
        jumps = Jumps(outcome.jumps, self.live) if outcome.jumps else None
        return jumps if jumps is not None and len(jumps.ids) else None

    @property
    def _any_acts(self) -> bool:
        return any(event.acts for event in self.settings.events)

    @property
    def times_move(self) -> bool:
        """Whether steps may begin, or end after another event, at roots of conditions, so times depend on all inputs."""
        # Independent of the events that have occurred, since otherwise a trajectory's derivatives would depend on others.
        return self._any_acts and any(event.stops and event.condition is not None for event in self.settings.events)

    @cached_property
    def cut(self) -> Array:
        """A mask of the trajectories whose last step ends at an event instead of the end of tspan, shape (N,)."""
        mask = self.terminated.copy()
        if self.jumps is not None:
            mask[self.jumps.ids[self.jumps.number == self.counts[self.jumps.ids]]] = True
        return mask

    @cached_property
    def without_last_step(self) -> Array:
        """The trajectories without a step to the end of tspan: tspan is empty, or an event has changed the state there."""
        return np.flatnonzero(((self.batch.start == self.batch.end) | self.cut) & self.live & ~self.terminated)
