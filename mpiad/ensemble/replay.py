"""Replay of the accepted steps of a solve by traceable functions, for derivatives of second and higher order.

Step sizes are constant, except for steps that end at the end of tspan, at a given time of an event, or at an event that is
terminal or acts (changes the state), since these times depend on the inputs. `adjoint` and `tangents` compute the first
derivatives of the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval, isbox

from mpiad._typing import Array, Function
from mpiad.device.assembly import concatenate
from mpiad.device.transfer import array_to_device
from mpiad.differentiation.gradient import cotangents_of_variables
from mpiad.differentiation.products import jvp
from mpiad.differentiation.trace import Variables, trace_backwards, trace_forwards
from mpiad.ensemble.batch import two_at_least
from mpiad.ensemble.event import affect_field
from mpiad.ensemble.jumps import FOUND, mass_matrix_rhs
from mpiad.ensemble.run import Run
from mpiad.ensemble.step_sweep import Columns, Saved, StepSweep, Visit
from mpiad.ensemble.tableaus import RosenbrockTableau
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.transport.devices.device_arrays import is_device_array

# Number of Newton steps at an event, for correct derivatives up to third order.
_ROOT_STEPS = 2


class StepReplay:
    """One step of several columns."""

    def __init__(self, run: Run, leaves: list[Any], u: Array, t: Array, h: Array):
        self._run, self._leaves, self._u, self.t, self.h = run, leaves, u, t, h
        self._k: list[Array] = []
        for i in range(run.tableau.stages - 1):
            self._k.append(self._stage(i))

    def _stage(self, i: int) -> Array:
        t = _like(self.t + self._run.tableau.c[i] * self.h, self._u)
        return self._run.field.array(self.argument(i), self._leaves, t)

    def argument(self, i: int) -> Array:
        """Return the argument of stage i; the argument of the last stage is the new state."""
        if i == 0:
            return self._u
        total = sum(k * weight for k, weight in zip(self._k, self._run.tableau.a[i - 1]) if weight)
        return total * _like(self.h, self._u) + self._u

    def inside(self, x: Array, columns: Columns) -> Array:
        """Return states inside the step; x: fractions of the step, shape (m,), or (s, m) for s fractions per column."""
        if len(self._k) < self._run.tableau.stages:
            self._k.append(self._stage(len(self._k)))
        weights = _like(self._run.coefficients.weights(x), self._u)
        total = sum(k[:, columns] * weights[i][..., None, :] for i, k in enumerate(self._k))
        return total * _like(self.h[columns], self._u) + self._u[:, columns]

    def root(self, condition: Function, x: Array, columns: Array) -> Array:
        """Return the root of an event's condition as a differentiable function of the inputs; x: its value."""
        leaves = self._run.columns(self._leaves, columns)

        def value(x: Array) -> Array:
            t = self.t[columns] + x * self.h[columns]
            return condition(self.inside(x, columns), self._run.batch.p.build(leaves), t)

        # The slope is computed again in each Newton step, so that each step squares the error.
        for _ in range(_ROOT_STEPS):
            residual, slope = jvp(value, x, np.ones_like(getval(x)))
            x = x - (residual - getval(residual)) / slope
        return x


class RosenbrockReplay(StepReplay):
    """One step of a Rosenbrock method (see `tableaus` for the notation)."""

    def _stage(self, i: int) -> Array:
        table, mass = cast(RosenbrockTableau, self._run.tableau), self._run.settings.mass
        rate = super()._stage(i) if i != 1 else self._k[0]
        if i == 0:
            self._matrices, self._time_term = self._linearized(table.gamma)
        if 0 < i < table.stages - 1:
            before = [weight * k for weight, k in zip(table.coupling[i - 1], self._k) if weight]
            coupled = sum(before[1:], before[0]) if before else 0.0
            coupled = coupled if mass is None or not before else anp.dot(mass, coupled)
            rate = rate + table.slopes[i - 1] * self._time_term + coupled
            rate = anp.transpose(anp.linalg.solve(self._matrices, anp.transpose(rate)[..., None])[..., 0])
        return rate

    def _linearized(self, gamma: float) -> tuple[Array, Array]:
        """Return the matrices W, shape (n, d, d), and h ∂f/∂t, shape (d, n)."""
        u, t, h, field, leaves = self._u, _like(self.t, self._u), _like(self.h, self._u), self._run.field, self._leaves
        if is_device_array(getval(u)):
            raise NotImplementedError(
                "solve: second derivatives of a Rosenbrock method aren't supported for device arrays. Apply "
                "mpiad.device.to_host to u0 and p."
            )
        ones, units = np.ones_like(getval(u)[0]), np.eye(len(u), dtype=u.dtype)
        columns = [jvp(lambda u: field.array(u, leaves, t), u, np.outer(unit, ones))[1] for unit in units]
        time_term = h * jvp(lambda t: field.array(u, leaves, t), t, ones)[1]
        jacobian = anp.transpose(anp.stack(columns), (2, 1, 0))
        mass = self._run.settings.mass
        return (units if mass is None else mass) / gamma - anp.reshape(h, (-1, 1, 1)) * jacobian, time_term


def _like(x: Array, u: Array) -> Array:
    """Return real numbers x in the precision of the states u."""
    real = np.zeros(0, u.dtype).real.dtype
    return x if x.dtype == real else x.astype(real)


Replay = Callable[[list], Array]


def replayed(run: Run, u0: Array, start: Array, end: Array, leaves: Sequence[Any], due: Array | None = None) -> list[Array]:
    """Return the results of a run as functions of its inputs, which may be traced.

    `u0` has shape (d, N); `start` and `end`, shape (N,), are on the host; `due`, shape (times, N), are the given times at
    which events act. The results are the saved states, (N, n_saved, d), zero if a time wasn't reached or the trajectory
    failed; the final states, (N, d); and, with events, the final times, (N,), and the times of events, (m,).
    """
    replay = _Replay(run, start, end, leaves, due)
    with np.errstate(all="ignore"):
        # The states of failed trajectories aren't differentiated.
        u0 = u0 if run.live.all() else anp.where(run.placed(run.live), u0, 0.0)
        states = initial = replay.started(u0)
        for sweep in run.sweeps(whole=True):
            states = replay.through(sweep, states)
        states = replay.ended(states)
        times = replay.times() if run.settings.events else ()
        return [replay.saved(initial, states), anp.transpose(states), *times]


class _Replay:
    """The replay of all steps, which collects the results (see `step_sweep` for sweeps and visits)."""

    def __init__(self, run: Run, start: Array, end: Array, leaves: Sequence[Any], due: Any):
        self._run, self._leaves, self._due, d = run, leaves, due, len(run.batch.u0)
        self._timed = any(map(isbox, (start, end, due))) or run.times_move
        if self._timed:
            # Traced zeros with the derivatives of the start of tspan and of its end. They are added to the constant times
            # and sizes of steps. After an event that ends a step, `_shift` has the derivatives of the time of the event.
            shifts = [x - getval(x) for x in (start, end)]
            self._shift, self._lengthening = shifts if run.xp is None else (array_to_device(x, run.xp) for x in shifts)
        # The saved values as rows, and the number of rows. Row 0, of zeros, is used for times that weren't reached.
        self._rows, self._count = [np.zeros_like(run.batch.u0, shape=(1, d))], 1
        self._index = np.zeros_like(run.batch.u0, shape=(run.batch.size, run.slots), dtype=np.int64)
        # Indices and times: of terminal events among the final times, and of other events among the times of all events.
        self._ended: list[tuple[Array, Array]] = []
        self._passed: list[tuple[Array, Array]] = []

    def through(self, sweep: StepSweep, states: Array) -> Array:
        """Return the states of all trajectories, shape (d, N), after the steps of a sweep."""
        leaves, u = self._run.columns(self._leaves, sweep.ids), states[:, :0]
        for visit in sweep.forwards():
            before, width = u.shape[1], len(visit.t)
            if before < width:
                # Visits are aligned at the ends of trajectories, so shorter trajectories begin later.
                entering = states[:, sweep.ids[before:width]]
                u = concatenate([u, entering], axis=1) if before else entering
            u = self._visited(sweep, visit, u, leaves)
        return self._put(states, sweep.ids, u) if u.shape[1] else states

    def _visited(self, sweep: StepSweep, visit: Visit, u: Array, leaves: list[Any]) -> Array:
        """Return the states after a visit, and store its saved values and events."""
        run, width = self._run, len(visit.t)
        columns = run.doubled(width)
        t, h = (time[columns] for time in self._times(sweep, visit))
        kind = RosenbrockReplay if run.tableau.implicit else StepReplay
        step = kind(run, run.columns(leaves, columns), u[:, columns], t, h)
        new = step.argument(run.tableau.stages - 1)[:, :width]
        for located in sweep.located(visit):
            c, event = located.columns, run.settings.events[located.event]
            x = step.root(event.condition, located.x, c)
            time = step.t[c] + x * step.h[c]
            if located.terminal and not event.acts:
                self._ended.append((sweep.ids[c], time))
            else:
                self._passed.append((located.row, time))
            if located.terminal:
                new = self._put(new, c, step.inside(x, c))
                if run.jumps and self._timed:
                    self._shift = self._put(self._shift, sweep.ids[c], time - getval(time))
        saved = sweep.saved(visit)
        for part in saved.at_end:
            self._save(part, part.of(new))
        for part in saved.inside:
            x = self._fractions(part, visit, t, h) if self._timed else part.x
            self._save(part, step.inside(x, part.columns))
        for rows, own in sweep.jumps(visit):
            new = self._put(new, own, self._jumped(rows, new[:, own]))
        return new

    def _times(self, sweep: StepSweep, visit: Visit) -> tuple[Array, Array]:
        """Return the start times and sizes of the steps of a visit."""
        if not self._timed:
            return visit.t, visit.h
        # The end of tspan affects only the size of the last step, and nothing if the trajectory ended at a terminal event.
        ids = sweep.ids[: len(visit.t)]
        longer = anp.where(sweep.moves(visit), self._lengthening[ids] - self._shift[ids], 0.0)
        for rows, own in sweep.jumps(visit)[:1]:
            longer = self._put(longer, own, self._moved(rows) - self._shift[ids[own]])
        return visit.t + self._shift[ids], visit.h + longer

    def _fractions(self, part: Saved, visit: Visit, t: Array, h: Array) -> Array:
        """Return the fractions of steps at the constant saved times; they depend on the times of the steps."""
        own = part.columns
        moving = visit.h[own] != 0
        elapsed = visit.t[own] + part.x * visit.h[own] - t[own]
        # A value saved at the time of an event that acts is the state after the event, and doesn't depend on its time.
        moving = moving & (part.x != 0) if self._run.jumps else moving
        return anp.where(moving, elapsed / anp.where(moving, h[own], 1.0), 0.0)

    def started(self, u0: Array) -> Array:
        """Return the states of all trajectories after events at the start."""
        for rows in self._run.jumps.at_start() if self._run.jumps else ():
            ids = self._run.jumps.ids[rows]  # type: ignore[union-attr]
            u0 = self._put(u0, ids, self._jumped(rows, u0[:, ids]))
        return u0

    def ended(self, states: Array) -> Array:
        """Return the final states as functions of the end of tspan, if events change states at this time."""
        run = self._run
        ids = np.flatnonzero(run.cut & ~run.terminated) if run.jumps and self._timed else np.empty(0, int)
        if not ids.size:
            return states
        moved = self._drifted(states[:, ids], ids, run.batch.end[ids], self._lengthening[ids])
        return self._put(states, ids, moved)

    def _moved(self, rows: Array) -> Array:
        """Return zeros with the derivatives of the times of jumps: given times, or the ends of the preceding steps."""
        jumps: Any = self._run.jumps
        ids, slot = jumps.ids[rows], jumps.slot[rows]
        due = self._due[np.maximum(slot, 0), ids]
        return anp.where(slot == FOUND, self._shift[ids], due - getval(due))

    def _jumped(self, rows: Array, u: Array) -> Array:
        """Return the states after jumps, given the states before them; at most one jump per trajectory."""
        run, jumps = self._run, self._run.jumps
        ids, t = jumps.ids[rows], jumps.time[rows]  # type: ignore[union-attr]
        if self._timed:
            moved = self._moved(rows)
            # Only these columns are advanced: in other columns f may be infinite, and derivatives would become NaN.
            stepless = np.flatnonzero(jumps.stepless[rows])  # type: ignore[union-attr]
            if stepless.size:
                u = self._put(u, stepless, self._drifted(u[:, stepless], ids[stepless], t[stepless], moved[stepless]))
            self._shift, t = self._put(self._shift, ids, moved), t + moved
        which = jumps.event[rows]  # type: ignore[union-attr]
        for event in np.unique(which).tolist():
            own = np.flatnonzero(which == event)
            columns = own[two_at_least(len(own))]
            field = affect_field(run.settings.events[event], run.batch)
            after = field.array(u[:, columns], run.columns(self._leaves, ids[columns]), t[columns])
            u = self._put(u, own, after[:, : len(own)])
        return u

    def _drifted(self, u: Array, ids: Array, t: Array, moved: Array) -> Array:
        """Return states advanced by the difference of two equal times, which is zero but has derivatives."""
        shift = self._shift[ids]
        between = moved - shift
        if not isbox(between):
            return u
        run, columns = self._run, two_at_least(len(ids))
        leaves, now, between = run.columns(self._leaves, ids[columns]), (t + shift)[columns], between[columns]
        rate_at = partial(mass_matrix_rhs, run.batch, run.settings.mass)
        rate = rate_at(u[:, columns], leaves, now)
        # A step of Heun's method, of order 2, gives correct derivatives up to second order.
        rate = 0.5 * (rate + rate_at(u[:, columns] + between * rate, leaves, now + between))
        return u + (between * rate)[:, : len(ids)].astype(u.dtype)

    def _save(self, part: Saved, value: Array) -> None:
        """Store saved values of shape (d, m), or (s, d, m) for s values per column."""
        rows = anp.reshape(anp.swapaxes(value, -1, -2), (-1, value.shape[-2]))
        numbers = self._count + self._run.arange(len(rows))
        self._index[part.ids, part.place] = numbers.reshape(*value.shape[:-2], -1)
        self._add(rows)

    def _add(self, rows: Array) -> None:
        self._rows.append(rows)
        self._count += len(rows)

    def _put(self, old: Array, columns: Array, new: Array) -> Array:
        """Return an array with some columns replaced; differentiable."""
        order = self._run.arange(old.shape[-1])
        order[columns] = old.shape[-1] + self._run.arange(len(columns))
        return concatenate([old, new], axis=-1)[..., order]

    def saved(self, start: Array, end: Array) -> Array:
        """Return the saved states, shape (N, n_saved, d)."""
        run, index = self._run, self._index
        rows = run.arange(run.batch.size)[:, None]
        for at_start, states in ((True, start), (False, end)):
            mask = run.saved_at(at_start)
            if mask is not None:
                index = np.where(mask, self._count + rows, index)
                self._add(anp.transpose(states))
        return concatenate(self._rows, axis=0)[index[:, : run.n_saved]]

    def times(self) -> tuple[Array, Array]:
        """Return the final times, shape (N,), and the times of events, (m,)."""
        run = self._run
        reached = run.reached
        if self._timed:
            reached = reached + anp.where(run.placed(run.live & ~run.terminated), self._lengthening, 0.0)
        if self._timed and run.jumps:
            reached = reached + anp.where(run.live & run.terminated, self._shift, 0.0)
        return reached if run.jumps else self._replaced(reached, self._ended), self._replaced(run.crossed, self._passed)

    def _replaced(self, times: Array, found: list[tuple[Array, Array]]) -> Array:
        if not found:
            return times
        places, values = zip(*found)
        return self._put(times, np.concatenate(places), concatenate(values))


def replayed_jvp(replay: Replay, argnums: Sequence[int], args: Sequence[Any], gs: Sequence[Any]) -> Array:
    """Return the tangent of the results of `replay`, given the tangents `gs` of the arguments at `argnums`."""
    tangents = [conform(g, *spec_like(args[k])) for k, g in zip(argnums, gs)]
    return trace_forwards(*_function_of(replay, argnums, args), tangents)[1]


def replayed_vjp(replay: Replay, argnums: Sequence[int], args: Sequence[Any], g: Array) -> list[Array]:
    """Return the cotangents of the arguments at `argnums`, given the cotangent g of the results of `replay`."""
    fun, variables = _function_of(replay, argnums, args)
    traced = trace_backwards(fun, variables)
    seeds = [(place, conform(g, *spec_like(value))) for place, value in zip(traced.places, traced.values) if place >= 0]
    return cotangents_of_variables(traced, seeds, variables)


def _function_of(replay: Replay, argnums: Sequence[int], args: Sequence[Any]) -> tuple[Callable[..., Array], Variables]:
    """Return the results as a function of the arguments at `argnums`, and these arguments."""

    def fun(values: Sequence[Any]) -> Array:
        filled = list(args)
        for k, value in zip(argnums, values):
            filled[k] = value
        return replay(filled)

    return fun, Variables([args[k] for k in argnums], list(range(len(argnums))), list)
