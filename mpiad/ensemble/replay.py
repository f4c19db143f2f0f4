"""The accepted steps of a solve as traceable functions, from which all its derivatives are computed.

Step sizes are constant, except for steps that end at the end of tspan, at a given time of an event, or at an event that is
terminal or acts (changes the state), since these times depend on the inputs. `replayed` repeats the whole solve, for
tangents and for derivatives of second and higher order. `adjoint` transposes one visit after the other.
f is evaluated by its program if this takes less time than calling f with traced arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias, cast

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval, isbox

from mpiad._typing import Array
from mpiad.device.assembly import concatenate
from mpiad.device.transfer import array_to_device
from mpiad.differentiation.products import jvp
from mpiad.ensemble.batch import two_at_least
from mpiad.ensemble.column_lu import products
from mpiad.ensemble.compiled.trace import packing_of
from mpiad.ensemble.jumps import FOUND, mass_matrix_rhs
from mpiad.ensemble.linearization import Field, jacobian_by_tangents
from mpiad.ensemble.run import Run, Seeds
from mpiad.ensemble.step_operators import advanced, replaced, solved, values_of
from mpiad.ensemble.step_sweep import Columns, LocatedEvent, Saved, SavedInStep, StepSweep, Visit
from mpiad.ensemble.tableaus import RosenbrockTableau

Limits: TypeAlias = tuple[Array, ...] | None  # see `StepSweep.limits`
# Number of Newton steps at an event, for correct derivatives up to third order.
_ROOT_STEPS = 2


class StepReplay:
    """One step of several columns."""

    def __init__(self, run: Run, u: Array, leaves: list[Any], t: Array, h: Array, limits: Limits, exact: bool):
        # With `exact` the sums of the new state are those of the solve, and it has derivatives up to third order.
        self._limits = limits
        self._run, self._leaves, self._u, self.t, self.h, self._exact = run, leaves, u, t, h, exact
        self._size, self._k, self._arguments = _like(h, u), [], dict[int, Array]()
        self._rows = None if run.program is None else _numbers(run, leaves, getval(u))  # the parameters
        for i in range(run.tableau.stages - 1):
            self._k.append(self._stage(i))

    def _time(self, i: int) -> Array:
        """Return the times of stage i."""
        c = self._run.tableau.c[i]
        t = _like(self.t + c * self.h, self._u)
        if self._limits is None or c not in (0.0, 1.0):
            return t
        limit = self._limits[int(c)].astype(t.dtype)
        return t + np.where(np.isnan(limit), 0.0, limit - getval(t)).astype(t.dtype)

    def _stage(self, i: int) -> Array:
        t = self._time(i)
        if self._run.program is None:
            return self._run.field.array(self.argument(i), self._leaves, t)
        return values_of(self._run.program, self.argument(i), self._rows, t[None])

    def argument(self, i: int) -> Array:
        """Return the argument of stage i; the argument of the last stage is the new state."""
        if i not in self._arguments:
            u, row, rows = self._u, ((), *self._run.tableau.a)[i], self._run.tableau.a
            if i > 1 and row[:-1] == rows[i - 2] and not self._exact:  # in stiffly accurate methods
                u, row = self.argument(i - 1), (0.0,) * (i - 1) + row[-1:]
            self._arguments[i] = self._sum(u, self._size, row)
        return self._arguments[i]

    def _sum(self, u: Array, h: Array | float, weights: tuple[float, ...]) -> Array:
        stages, chosen = _nonzero(weights, self._run.coefficients.real)
        return advanced(u, h, chosen, *[self._k[j] for j in stages]) if stages else u

    def weights(self, x: Array) -> Array:
        """Return the interpolant's weights at fractions x of the step, shape (stages, m), or (stages, s, 1, m)."""
        weights = _like(self._run.coefficients.weights(x), self._u)
        return weights if weights.ndim == 2 else weights[:, :, None]

    def inside(self, weights: Array | Sequence[Array], columns: Columns) -> Array:
        """Return states inside the step, given the interpolant's weights."""
        dense = self._run.tableau.interpolating
        if len(self._k) < dense.stop:
            self._k.append(self._stage(len(self._k)))
        u, h, stages = self._u, self._size, self._k[dense]
        if type(columns) is not slice:
            u, h, stages = u[:, columns], h[columns], [k[:, columns] for k in stages]
        return advanced(u, h, weights[dense], *stages)

    def event(self, located: LocatedEvent) -> tuple[Array, Array]:
        """Return states and times at the root of an event's condition as differentiable functions of the inputs."""
        # By the implicit function theorem, one Newton step from the fractions x of the steps gives first derivatives. With
        # `exact`, second and third derivatives are also correct.
        count, run = len(located.columns), self._run
        every = two_at_least(count) if run.xp is None else slice(None)
        columns = _without_repetitions(located.columns, self._u.shape[1]) if count > 1 else located.columns[every]
        condition = run.settings.events[located.event].condition
        p = run.batch.p.build(run.batch.p.chosen(columns, self._leaves))
        t, h, x = self.t[columns], self.h[columns], located.x[every]
        state_at = lambda x: self.inside(self.weights(x), columns)  # noqa: E731
        value = lambda x: condition(state_at(x), p, t + x * h)  # noqa: E731
        # The slope is computed again in each Newton step, so that each step squares the error.
        for _ in range(_ROOT_STEPS if self._exact else 1):
            residual, slope = jvp(value, x, np.ones_like(getval(x)))
            x = x - (residual - getval(residual)) / (slope if self._exact else getval(slope))
        return state_at(x)[:, :count], (t + x * h)[:count]


def _without_repetitions(columns: Columns, count: int) -> Columns:
    """Return an index of the same ascending columns that can't contain one twice, so that its adjoint is cheaper."""
    if type(columns) is not np.ndarray:  # a slice, or an array on a device
        return columns
    mask = np.zeros(count, bool)
    mask[columns] = True
    return slice(None) if mask.all() else mask


@lru_cache(256)
def _nonzero(weights: tuple[float, ...], dtype: np.dtype) -> tuple[list[int], list[Array]]:
    """Return the indices and values of nonzero weights."""
    stages = [j for j, weight in enumerate(weights) if weight]
    return stages, [dtype.type(weights[j]) for j in stages]


class RosenbrockReplay(StepReplay):
    """One step of a Rosenbrock method (see `tableaus` for the notation), which doesn't compute f at its ends."""

    def _stage(self, i: int) -> Array:
        table, mass = cast(RosenbrockTableau, self._run.tableau), self._run.settings.mass
        if i == 0:
            self._rate, entries, self._slope = self._linearized(self._time(0))
            self._entries = entries * self._size
            self._lu = self._run.step_matrices.factorized(-getval(self._entries))
            return np.zeros_like(getval(self._u))
        right = super()._stage(i) if i > 1 or self._rate is None else self._rate
        stages, weights = _nonzero(table.coupling[i - 1], self._run.coefficients.real)
        if mass is not None and stages:
            before = self._sum(np.zeros_like(getval(self._u)), 1.0, table.coupling[i - 1])
            right, stages = right + products(mass, before), []
        if self._slope is not None and table.slopes[i - 1]:
            right = right + self._size.dtype.type(table.slopes[i - 1]) * self._size * self._slope
        k = [self._k[j] for j in stages]
        return solved(self._lu, False, self._run.jacobian.places, self._entries, weights, right, *k)

    def _linearized(self, t: Array) -> tuple[Array | None, Array, Array | None]:
        """Return f if it is computed, too; the entries of ∂f/∂u, shape (m, n); and ∂f/∂t, shape (d, n), None for zero."""
        run, u, jacobian = self._run, self._u, self._run.jacobian
        if jacobian.program is not None:
            rows = _numbers(run, self._leaves, getval(u)) if self._rows is None else self._rows
            return None, *jacobian.program.parts(u, rows, t)
        rate, products, slope = jacobian_by_tangents(run.field, u, self._leaves, t, jacobian.groups)
        return rate, jacobian.chosen(concatenate(products)), slope


def _numbers(run: Run, leaves: Sequence[Any], like: Array) -> Array:
    """Return the scalars of the parameters as rows, shape (m, n), in the order of a program's inputs."""
    rows = []
    for part in packing_of(run.batch.p).parts:
        leaf = leaves[part.place]
        # A number may be on the host even if the states are on a device.
        leaf = anp.reshape(leaf, (-1, like.shape[1] if part.varies else 1)) if anp.ndim(leaf) else leaf
        leaf = leaf if part.varies else leaf * np.ones_like(like[:1].real)
        if part.complex:
            leaf = anp.reshape(anp.stack([anp.real(leaf), anp.imag(leaf)], axis=1), (-1, like.shape[1]))
        rows.append(_like(leaf, like))
    return concatenate(rows) if rows else like[:0]


def _like(x: Array, u: Array) -> Array:
    """Return real numbers x in the precision of the states u."""
    return x if x.dtype == u.dtype or x.dtype == (real := np.zeros(0, u.dtype).real.dtype) else x.astype(real)


class Inputs(NamedTuple):
    """The inputs of a solve on which its steps depend, for n trajectories; they may be traced."""

    leaves: list[Any]
    # Zeros with the derivatives of the start (or of an event that ended a step) and of the end of tspan, which are added to
    # the constant times and sizes of steps; None if times are constant.
    shift: Array = None  # shape (n,)
    lengthening: Array = None  # shape (n,)
    due: Array = None  # shape (times, n); the given times of events

    def of(self, run: Run, columns: Columns) -> Inputs:
        """Return the inputs of some of the trajectories."""
        return Inputs(run.batch.p.chosen(columns, self.leaves), *[x if x is None else x[..., columns] for x in self[1:]])


class Visited(NamedTuple):
    """The results of a visit of n columns."""

    u: Array  # shape (d, n); the states after the step, and after events that change them
    shift: Array  # shape (n,); see `Inputs`
    saved: list[tuple[Saved, Array]]  # values of shape (d, m), or (s, d, m) for s values per column
    times: list[tuple[LocatedEvent, Array]]


class Replay:
    """The steps and events of a solve as functions of its inputs, on which, if `timed`, the times of steps depend."""

    def __init__(self, run: Run, timed: bool, seeds: Seeds | None = None):
        # With seeds, only first derivatives of the results that have cotangents are needed.
        self._run, self._timed, self._seeds = run, timed, seeds

    def begun(self, u0: Array, inputs: Inputs) -> tuple[Array, Array]:
        """Return the states of all trajectories and their `shift` after events at the start."""
        run, shift = self._run, inputs.shift
        for rows in run.jumps.at_start() if run.jumps else ():
            u0, shift = self._jumped(rows, run.jumps.ids[rows], u0, inputs._replace(shift=shift))  # type: ignore[union-attr]
        return u0, shift

    def visited(self, sweep: StepSweep, visit: Visit, u: Array, inputs: Inputs) -> Visited:
        """Return the results of a visit, given the states before it and the inputs of its columns."""
        run, columns = self._run, self._run.doubled(len(visit.t))
        (t, h), leaves, limits = self._times(sweep, visit, inputs), inputs.leaves, sweep.limits(visit)
        if type(columns) is not slice:
            u, t, h, leaves = u[:, columns], t[columns], h[columns], run.batch.p.chosen(columns, leaves)
            limits = limits and tuple(limit[columns] for limit in limits)
        step = (RosenbrockReplay if run.tableau.implicit else StepReplay)(run, u, leaves, t, h, limits, self._seeds is None)
        new, shift, times = step.argument(run.tableau.stages - 1), inputs.shift, []
        new = new if type(columns) is slice else new[:, : len(visit.t)]
        crossed = True if self._seeds is None else self._seeds.crossed
        for located in sweep.located(visit):
            # If no step ends at an event, its time is needed only for derivatives; on a device the host would have to wait.
            if located.stops or (crossed[located.row].any() if isinstance(crossed, np.ndarray) else crossed is not None):
                state, time = step.event(located)
                times.append((located, time))
                if located.stops:
                    new = replaced(new, located.columns, state)
                    shift = replaced(shift, located.columns, time - getval(time)) if self._timed else shift
        values = sweep.saved(visit) if self._seeds is None or self._seeds.saved is not None else SavedInStep()
        saved = [(part, part.of(new)) for part in values.at_end]
        if values.at_end and self._timed and run.settings.saveat is not None:
            # Saved times are constant, while the ends of steps move by `shift`, except at the end of tspan.
            shifted, end, moved = inputs._replace(shift=shift), visit.t + visit.h, anp.where(sweep.moves(visit), shift, 0.0)
            at_time = lambda k, new=new: self._drifted(new[:, k], shifted.of(run, k), end[k], moved[k])  # noqa: E731
            saved = [(part, part._replace(columns=slice(None)).of(at_time(part.columns))) for part in values.at_end]
        for part in values.inside:
            weights = part.weights if not self._timed else step.weights(self._fractions(part, visit, t, h))
            saved.append((part, step.inside(weights, _without_repetitions(part.columns, len(step.t)))))
        for rows, columns in sweep.jumps(visit):
            new, shift = self._jumped(rows, columns, new, inputs._replace(shift=shift))
        return Visited(new, shift, saved, times)

    def ended(self, ids: Array, u: Array, inputs: Inputs) -> Array:
        """Return final states as functions of the end of tspan; `ids`: trajectories whose states events changed there."""
        return self._drifted(u, inputs, self._run.placed(self._run.batch.end[ids]), inputs.lengthening)

    def _times(self, sweep: StepSweep, visit: Visit, inputs: Inputs) -> tuple[Array, Array]:
        """Return the start times and sizes of the steps of a visit."""
        if not self._timed:
            return visit.t, visit.h
        # The end of tspan affects only the size of the last step, and nothing if the trajectory ended at a terminal event.
        longer = anp.where(sweep.moves(visit), inputs.lengthening - inputs.shift, 0.0)
        for rows, columns in sweep.jumps(visit)[:1]:
            shift = inputs.shift[columns]
            longer = replaced(longer, columns, self._moved(rows, columns, inputs, shift) - shift)
        return visit.t + inputs.shift, visit.h + longer

    def _fractions(self, part: Saved, visit: Visit, t: Array, h: Array) -> Array:
        """Return the fractions of steps at the constant saved times; they depend on the times of the steps."""
        columns = part.columns
        elapsed = visit.t[columns] + part.x * visit.h[columns] - t[columns]
        # A value saved at the time of an event that acts is the state after the event, and doesn't depend on its time.
        moving = (visit.h[columns] != 0) & (part.x != 0 if self._run.jumps else True)
        return anp.where(moving, elapsed / anp.where(moving, h[columns], 1.0), 0.0)

    def _moved(self, rows: Array, columns: Array, inputs: Inputs, shift: Array) -> Array:
        """Return zeros with the derivatives of the times of jumps: given times, or the ends of the preceding steps."""
        slot = self._run.jumps.slot[rows]  # type: ignore[union-attr]
        if (slot == FOUND).all():
            return shift
        due = inputs.due[np.maximum(slot, 0), columns]
        return anp.where(slot == FOUND, shift, due - getval(due))

    def _jumped(self, rows: Array, columns: Array, u: Array, inputs: Inputs) -> tuple[Array, Array]:
        """Return the states and `shift` after jumps, at most one per trajectory; `columns`: their columns."""
        run, jumps, shift = self._run, self._run.jumps, inputs.shift
        index = _without_repetitions(columns, u.shape[1])
        t, chosen, before = jumps.time[rows], inputs.of(run, index), u[:, index]  # type: ignore[union-attr]
        if self._timed:
            moved = self._moved(rows, columns, inputs, chosen.shift)
            # Only these columns are advanced: in other columns f may be infinite, and derivatives would become NaN.
            stepless = np.flatnonzero(jumps.stepless[rows])  # type: ignore[union-attr]
            if stepless.size:
                drifted = self._drifted(before[:, stepless], chosen.of(run, stepless), t[stepless], moved[stepless])
                before = replaced(before, stepless, drifted)
            shift, t = replaced(shift, columns, moved), t + moved
        after, which = before, jumps.event[rows]  # type: ignore[union-attr]
        for event in np.unique(which).tolist():
            changed = np.flatnonzero(which == event)
            doubled = changed[two_at_least(len(changed))]
            affect = Field(run.batch._replace(f=run.settings.events[event].affect))  # type: ignore[arg-type]
            states = affect.array(before[:, doubled], run.batch.p.chosen(doubled, chosen.leaves), t[doubled])
            after = replaced(after, changed, states[:, : len(changed)])
        return replaced(u, columns, after), shift

    def _drifted(self, u: Array, inputs: Inputs, t: Array, moved: Array) -> Array:
        """Return states advanced by the difference of two equal times, which is zero but has derivatives."""
        between = moved - inputs.shift
        if not isbox(between):
            return u
        batch, count, columns = self._run.batch, u.shape[1], two_at_least(u.shape[1])
        leaves, now, between = batch.p.chosen(columns, inputs.leaves), (t + inputs.shift)[columns], between[columns]
        rate_at = partial(mass_matrix_rhs, batch, self._run.settings.mass)
        rate = rate_at(u[:, columns], leaves, now)
        # A step of Heun's method, of order 2, gives correct derivatives up to second order.
        rate = 0.5 * (rate + rate_at(u[:, columns] + between * rate, leaves, now + between))
        return u + (between * rate)[:, :count].astype(u.dtype)


def replayed(run: Run, u0: Array, start: Array, end: Array, leaves: Sequence[Any], due: Array) -> list[Array]:
    """Return the results of a run as functions of its inputs, which may be traced."""
    # Results: saved states, (N, n_saved, d), zero for failures and times not reached; final states, (N, d); with events
    # the final times, (N,), and the times of events, (m,). `due`, shape (times, N): the given times at which events act.
    timed = any(map(isbox, (start, end, due))) or run.times_move
    replay, inputs, rows = Replay(run, timed), Inputs(list(leaves)), _SavedRows(run)
    if timed:
        shifts = [x - getval(x) for x in (start, end)]
        shifts = shifts if run.xp is None else [array_to_device(x, run.xp) for x in shifts]
        inputs = inputs._replace(shift=shifts[0], lengthening=shifts[1], due=due if np.size(due) else None)
    # Indices and times: of terminal events among the final times, and of other events among the times of all events.
    ended: list[tuple[Array, Array]] = []
    passed: list[tuple[Array, Array]] = []
    with np.errstate(all="ignore"):
        # The states of failed trajectories aren't differentiated.
        initial = u0 if run.live.all() else anp.where(run.placed(run.live), u0, 0.0)
        states, shift = replay.begun(initial, inputs)
        initial = states
        for sweep in run.sweeps():
            of_sweep, u = inputs._replace(shift=shift).of(run, sweep.ids), states[:, :0]
            for visit in sweep.forwards():
                before, width = u.shape[1], len(visit.t)
                if before < width:
                    # Visits are aligned at the ends of trajectories, so shorter trajectories begin later.
                    entering = states[:, sweep.ids[before:width]]
                    u = concatenate([u, entering], axis=1) if before else entering
                visited = replay.visited(
                    sweep, visit, u, of_sweep if width == len(sweep.ids) else of_sweep.of(run, slice(0, width))
                )
                u = visited.u
                if run.jumps and timed:
                    of_sweep = of_sweep._replace(shift=replaced(of_sweep.shift, slice(0, width), visited.shift))
                for part, value in visited.saved:
                    rows.save(part, value)
                for located, time in visited.times:
                    final = located.stops and not run.settings.events[located.event].acts
                    (ended if final else passed).append((sweep.ids[located.columns] if final else located.row, time))
            if u.shape[1]:
                states = replaced(states, sweep.ids, u)
            if run.jumps and timed:
                shift = replaced(shift, sweep.ids, of_sweep.shift)
        ids = run.without_last_step
        if timed and ids.size:
            states = replaced(states, ids, replay.ended(ids, states[:, ids], inputs._replace(shift=shift).of(run, ids)))
        results = [rows.array(initial, states), anp.transpose(states)]
        if not run.settings.events:
            return results
        reached, _, crossed, _ = run.event_times
        if timed:
            reached = reached + anp.where(run.placed(run.live & ~run.terminated), inputs.lengthening, 0.0)
        if timed and run.jumps:
            reached = reached + anp.where(run.live & run.terminated, shift, 0.0)
        return [*results, reached if run.jumps else _with_times(reached, ended), _with_times(crossed, passed)]


def _with_times(times: Array, located: list[tuple[Array, Array]]) -> Array:
    if not located:
        return times
    places, values = zip(*located)
    return replaced(times, np.concatenate(places), concatenate(values))


class _SavedRows:
    """The saved values of a solve as rows; row 0, of zeros, is used for times that weren't reached."""

    def __init__(self, run: Run):
        self._run, d = run, len(run.batch.u0)
        self._rows, self._count = [np.zeros_like(run.batch.u0, shape=(1, d))], 1
        self._index = np.zeros_like(run.batch.u0, shape=(run.batch.size, run.slots), dtype=np.int64)

    def save(self, part: Saved, value: Array) -> None:
        """Store saved values of shape (d, m), or (s, d, m) for s values per column."""
        rows = anp.reshape(anp.swapaxes(value, -1, -2), (-1, value.shape[-2]))
        numbers = self._count + self._run.arange(len(rows))
        self._index[part.ids, part.place] = numbers.reshape(*value.shape[:-2], -1)
        self._add(rows)

    def _add(self, rows: Array) -> None:
        self._rows.append(rows)
        self._count += len(rows)

    def array(self, start: Array, end: Array) -> Array:
        """Return the saved states, shape (N, n_saved, d), given the initial and final states."""
        run, index = self._run, self._index[:, : self._run.n_saved]
        rows = run.arange(run.batch.size)[:, None]
        for mask, states in ((run.saved_at(True), start), (run.saved_at(False), end)):
            if mask.any():
                index = np.where(run.placed(mask), self._count + rows, index)
                self._add(anp.transpose(states))
        return concatenate(self._rows, axis=0)[index]
