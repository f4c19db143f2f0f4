"""The accepted steps of a solve once more, in functions that traces see: what derivatives of derivatives are taken of.

Steps are fixed, but for the last one of each trajectory, which ends where tspan does, and for terminal events, whose times
are roots that move. The first derivatives that plain arrays get (`adjoint`, `tangents`) are those of this function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval, isbox

from mpiad._typing import Array, Function
from mpiad.differentiation.products import jvp
from mpiad.ensemble.run import FINAL, INITIAL, Run
from mpiad.ensemble.seeds import Schedule, entries_of, scheduled
from mpiad.ensemble.walk import Visit, Walk

__all__ = ["ROOT_STEPS", "replayed"]

# Newton's steps at an event: its derivatives are right up to the third.
ROOT_STEPS = 2


def replayed(run: Run, u0: Array, start: Array, end: Array, leaves: Sequence[Any]) -> tuple[Array, Array, Array, Array]:
    """Return the results of a run as functions of its inputs, which may be traced.

    Parameters
    ----------
    run : Run
    u0 : array, shape (d, N)
    start, end : array, shape (N,)
    leaves : sequence
        All leaves of the parameters.

    Returns
    -------
    tuple
        Final states (N, d), saved states (N, n_saved, d), zero where one wasn't reached, the times at which trajectories
        ended (N,), and those of events on the way (m,).
    """
    replay = _Replay(run, u0, start, end, leaves)
    with np.errstate(all="ignore"):
        for first, steps in run.shares:
            moving = int(np.count_nonzero(steps.counts))
            if moving:
                replay.take(Walk(steps, 0, moving), first)
    return replay.final(), replay.saved(), replay.reached(), replay.crossed()


class _Replay:
    """The pieces of the results, put together at the end."""

    def __init__(self, run: Run, u0: Array, start: Array, end: Array, leaves: Sequence[Any]):
        self._run, self._u0, self._leaves = run, u0, leaves
        # Zero in value, and what is traced of both ends: steps move with them, and keep their accepted numbers.
        self._shift, self._lengthening = start - getval(start), end - getval(end)
        self._timed = isbox(start) or isbox(end)
        self._entries = entries_of(run)
        self._ends: list[tuple[Array, Array]] = []
        self._saves: list[tuple[Array, Array, Array]] = []
        self._crossings: list[tuple[Array, Array]] = []
        self._passings: list[tuple[Array, Array]] = []

    def take(self, walk: Walk, first: int) -> None:
        """Take the steps of a share of the trajectories."""
        ids = walk.ids + first
        schedule = scheduled(self._run, self._entries, walk, ids)
        self._passed = self._run.crossings.by_visits(walk, ids)
        leaves, u = self._run.columns(self._leaves, ids), self._u0[:, :0]
        for v, visit in zip(range(len(walk) - 1, -1, -1), walk.forwards()):
            before, width = u.shape[1], len(visit.t)
            # Visits are counted from the ends, so on the way forwards shorter trajectories enter later.
            entering = self._u0[:, ids[before:width]]
            u = anp.concatenate([u, entering], axis=1) if before else entering
            u = self._step(v, visit, u, ids[:width], leaves, schedule)
        self._ends.append((ids, u))

    def _step(self, v: int, visit: Visit, u: Array, ids: Array, leaves: list[Any], schedule: Schedule) -> Array:
        run, width = self._run, len(ids)
        # Two columns at least, as in the solve, whose arithmetic this repeats.
        columns = run.doubled(width)
        t, h = (time[columns] for time in self._times(visit, ids))
        step = _Step(run, run.columns(leaves, columns), u[:, columns], t, h)
        new = step.argument(run.tableau.stages - 1)
        for chosen in schedule.at_end.get(v, ()):
            self._save(schedule, chosen, new[:, schedule.column[chosen]])
        for chosen in schedule.inside.get(v, ()):
            x, own = schedule.x[chosen], schedule.column[chosen]
            if self._timed:
                x = (visit.t[own] + x * visit.h[own] - t[own]) / h[own]  # the saved time stays, and the step moves
            self._save(schedule, chosen, step.inside(x, own))
        for chosen, own in self._passed.get(v, ()):
            event = run.settings.events[int(run.crossings.event[chosen[0]])]
            x = step.root(event.condition, run.crossings.x[chosen], own)
            self._passings.append((chosen, step.t[own] + x * step.h[own]))
        crossed = np.flatnonzero(run.terminated[ids[visit.last]]) + visit.last.start
        return self._crossed(step, new[:, :width], crossed, ids) if len(crossed) else new[:, :width]

    def _times(self, visit: Visit, ids: Array) -> tuple[Array, Array]:
        """Return when the steps start, and their sizes; the last ones end where tspan does."""
        if not self._timed:
            return visit.t, visit.h
        # The controller's sizes are fixed, so a later end lengthens the last step alone; at a terminal event
        # there is none to lengthen.
        last = np.zeros(len(ids))
        last[visit.last] = ~self._run.terminated[ids[visit.last]]
        return visit.t + self._shift[ids], visit.h + last * (self._lengthening[ids] - self._shift[ids])

    def _save(self, schedule: Schedule, chosen: Array, value: Array) -> None:
        self._saves.append((schedule.ids[chosen], schedule.place[chosen], value))

    def _crossed(self, step: _Step, new: Array, columns: Array, ids: Array) -> Array:
        """Put the states at terminal events to their columns, and note their times."""
        run, order = self._run, np.arange(new.shape[1])
        pieces, count = [new], new.shape[1]
        for number in np.unique(run.ending_events[ids[columns]]):
            own = columns[run.ending_events[ids[columns]] == number]
            x = step.root(run.settings.events[number].condition, run.outcome.end_part[ids[own]], own)
            pieces.append(step.inside(x, own))
            self._crossings.append((ids[own], step.t[own] + x * step.h[own]))
            order[own] = count + np.arange(len(own))
            count += len(own)
        return anp.concatenate(pieces, axis=1)[:, order]

    # ---- results

    def final(self) -> Array:
        """Return the final states, shape (N, d)."""
        run = self._run
        # What failed is constant: its states aren't differentiated.
        moved = run.counts > 0
        rest, failed = np.flatnonzero(~moved & run.live), np.flatnonzero(~run.live)
        pieces = [*self._ends, (rest, self._u0[:, rest]), (failed, run.outcome.u_end[:, failed])]
        # Where each trajectory lies among the pieces, which are put together once and then brought into order.
        place = np.empty(run.batch.size, np.int64)
        place[np.concatenate([ids for ids, _ in pieces])] = np.arange(run.batch.size)
        self._final = anp.concatenate([states for _, states in pieces], axis=1)[:, place]
        return anp.transpose(self._final)

    def saved(self) -> Array:
        """Return the saved states, shape (N, n_saved, d)."""
        where = self._run.save_step
        for code, states in ((INITIAL, self._u0), (FINAL, self._final)):
            ids, place = np.nonzero(where == code)
            self._saves.append((ids, place, states[:, ids]))
        index, count = np.zeros(where.shape, np.int64), 1
        for ids, place, _ in self._saves:
            index[ids, place] = count + np.arange(len(ids))
            count += len(ids)
        nothing = np.zeros((len(self._u0), 1), self._run.batch.u0.dtype)  # column 0: what wasn't reached
        values = anp.concatenate([nothing, *[value for _, _, value in self._saves]], axis=1)
        return anp.transpose(values[:, index], (1, 2, 0))

    def reached(self) -> Array:
        """Return the times at which the trajectories ended, shape (N,)."""
        run = self._run
        index, count = np.arange(run.batch.size), run.batch.size
        pieces = [run.outcome.t_reached + (run.live & ~run.terminated) * self._lengthening]
        for ids, times in self._crossings:
            index[ids] = count + np.arange(len(ids))
            pieces.append(times)
            count += len(ids)
        return anp.concatenate(pieces)[index]

    def crossed(self) -> Array:
        """Return the times of events on the way, shape (m,)."""
        if not self._passings:
            return np.empty(0)
        order = np.argsort(np.concatenate([chosen for chosen, _ in self._passings]))
        return anp.concatenate([times for _, times in self._passings])[order]


class _Step:
    """One step of several columns."""

    def __init__(self, run: Run, leaves: list[Any], u: Array, t: Array, h: Array):
        self._run, self._leaves, self._u, self.t, self.h = run, leaves, u, t, h
        self._k: list[Array] = []
        for i in range(run.tableau.stages - 1):
            self._evaluate(i)

    def _evaluate(self, i: int) -> None:
        t = _like(self.t + self._run.tableau.c[i] * self.h, self._u)
        self._k.append(self._run.field.array(self.argument(i), self._leaves, t))

    def argument(self, i: int) -> Array:
        """Return the argument of stage i; that of the last is the new state."""
        if i == 0:
            return self._u
        total = sum(k * weight for k, weight in zip(self._k, self._run.tableau.a[i - 1]) if weight)
        return total * _like(self.h, self._u) + self._u

    def inside(self, x: Array, columns: Array) -> Array:
        """Return the states of some columns at the parts x of the step."""
        if len(self._k) < self._run.tableau.stages:
            self._evaluate(len(self._k))
        weights = [_polynomial(row, x) for row in self._run.tableau.dense]
        total = sum(k[:, columns] * _like(weight, self._u) for k, weight in zip(self._k, weights))
        return total * _like(self.h[columns], self._u) + self._u[:, columns]

    def root(self, condition: Function, x: Array, columns: Array) -> Array:
        """Return the root of an event's condition, known by its value, as a function of all that moves it."""
        leaves = self._run.columns(self._leaves, columns)

        def value(x: Array) -> Array:
            t = self.t[columns] + x * self.h[columns]
            return condition(self.inside(x, columns), self._run.batch.p.build(leaves), t)

        # Newton's steps stay where they are, and each doubles the order to which the root's derivatives are right.
        for _ in range(ROOT_STEPS):
            found, slope = jvp(value, x, np.ones(len(columns)))
            x = x - (found - getval(found)) / slope
        return x


def _polynomial(row: Array, x: Array) -> Array:
    total = row[-1]
    for coefficient in row[-2::-1]:
        total = total * x + coefficient
    return total * x


def _like(x: Array, u: Array) -> Array:
    """Return real numbers in the precision of the states."""
    real = np.zeros(0, u.dtype).real.dtype
    return x if x.dtype == real else x.astype(real)
