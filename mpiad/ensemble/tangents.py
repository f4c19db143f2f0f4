"""Forward mode of a solve: tangents carried along its accepted steps, from the first to the last.

Values and tangents of a block make one array of shape (1 + directions, d, n), so a sum over stages is one for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.differentiation.bundles import Bundle
from mpiad.ensemble.checkpoints import walks
from mpiad.ensemble.coefficients import Coefficients, weighted_sum
from mpiad.ensemble.linearization import Tracing
from mpiad.ensemble.run import FINAL, INITIAL, Run
from mpiad.ensemble.seeds import Entries, Schedule, entries_of, scheduled
from mpiad.ensemble.walk import Visit, Walk

__all__ = ["Directions", "push_run"]

# Columns up to which each number gets its own step size.
_FEW = 1024


class Directions(NamedTuple):
    """Along what to differentiate, in m directions.

    Parameters
    ----------
    u0 : array, shape (m, d, N)
    leaves : dict
        From places of leaves of the parameters to lists of m arrays in their shapes, None where one is zero.
    """

    u0: Array
    leaves: dict[int, list[Any]]


def push_run(run: Run, directions: Directions, saving: bool = True) -> tuple[Array, Any]:
    """Return the tangents of final and saved states, of shapes (m, d, N) and (m, N, n_saved, d).

    Parameters
    ----------
    run : Run
    directions : Directions
    saving : bool
        Whether those of the saved states are wanted.
    """
    end = np.where(run.live, directions.u0, 0)
    m, d, n = end.shape
    saved = np.zeros((m, n, run.save_step.shape[1], d), end.dtype) if saving else None
    entries = entries_of(run) if saving else None
    with np.errstate(all="ignore"), Bundle() as bundle:
        along = partial(Tracing(run.field, tuple(directions.leaves), False).along, bundle)
        for first, walk in walks(run):
            _Block(run, along, directions, walk, walk.ids + first, saved).sweep(end, entries)
    if saved is not None:
        for where, states in ((INITIAL, directions.u0), (FINAL, end)):
            ids, place = np.nonzero(run.save_step == where)
            saved[:, ids, place] = states[:, :, ids].transpose(0, 2, 1)
    return end, saved


class _Block:
    """One block of columns on the way forwards."""

    def __init__(
        self, run: Run, along: Callable, directions: Directions, walk: Walk, ids: Array, saved: Any
    ):
        self._run, self._f_along, self._walk, self._ids, self._saved = run, along, walk, ids, saved
        batch = run.batch
        self._leaves = run.columns(batch.p.leaves, ids)
        self._along = [
            [None if g is None else g[..., ids] if batch.p.varies[place] else g for g in gs]
            for place, gs in directions.leaves.items()
        ]
        self._varies = [batch.p.varies[place] for place in directions.leaves]
        self._coefficients = Coefficients(run.tableau, batch.u0.real.dtype)
        self._c = np.array(run.tableau.c)[:, None]
        self._width, self._columns = 0, slice(0, 0)
        self._step: Any = None

    def sweep(self, end: Array, entries: Entries | None) -> None:
        """Go from the first step to the last."""
        schedule = None if entries is None else scheduled(self._run, entries, self._walk, self._ids)
        tangents = end[:, :, self._ids]
        for v, visit in zip(range(len(self._walk) - 1, -1, -1), self._walk.forwards()):
            self._push(v, visit, tangents, schedule)
        end[:, :, self._ids] = tangents

    def _push(self, v: int, visit: Visit, tangents: Array, schedule: Schedule | None) -> None:
        width = len(visit.t)
        if width != self._width:
            self._step = self._step_of(width, tangents)
        step, columns = self._step, self._columns
        step.take(visit if type(columns) is slice else visit.of(columns), tangents[:, :, columns])
        new = step.argument(step.last)[1:]
        if schedule is not None:
            self._save(v, step, new, schedule)
        tangents[:, :, :width] = new[:, :, :width]

    def _step_of(self, width: int, tangents: Array) -> _Step:
        """Return what steps of so many columns have in common."""
        self._width = width
        columns = self._columns = self._run.doubled(width)
        leaves = self._run.columns(self._leaves, columns)
        along = [
            [None if g is None else g[..., columns] if varies else g for g in gs]
            for gs, varies in zip(self._along, self._varies)
        ]
        m, d = tangents.shape[:2]
        shape = 1 + m, d, width if type(columns) is slice else len(columns)
        return _Step(self._coefficients, self._c, self._f_along(leaves, along), shape, tangents.dtype)

    def _save(self, v: int, step: _Step, new: Array, schedule: Schedule) -> None:
        for chosen in schedule.at_end.get(v, ()):
            self._write(schedule, chosen, new[:, :, schedule.column[chosen]])
        last = step.last
        for chosen in schedule.handed_on.get(v, ()):
            share = step.k[0][1:][:, :, schedule.column[chosen]] * (schedule.h * schedule.weights[last])[chosen]
            ids, place = schedule.ids[chosen], schedule.place[chosen]
            self._saved[:, ids, place] += share.transpose(0, 2, 1)  # the step before has written the rest
        for chosen in schedule.inside.get(v, ()):
            columns, final = schedule.column[chosen], schedule.final[chosen]
            value = sum(k[1:][:, :, columns] * w[chosen] for k, w in zip(step.k[:last], schedule.weights))
            if final.any():
                step.add_last_stage()
                value = value + step.k[last][1:][:, :, columns] * (schedule.weights[last][chosen] * final)
            self._write(schedule, chosen, step.u[1:][:, :, columns] + value * schedule.h[chosen])

    def _write(self, schedule: Schedule, chosen: Array, value: Array) -> None:
        self._saved[:, schedule.ids[chosen], schedule.place[chosen]] = value.transpose(0, 2, 1)


class _Step:
    """The stages of a step with their tangents, each of shape (1 + m, d, n).

    Parameters
    ----------
    coefficients : Coefficients
    c : array, shape (stages, 1)
        Times of the stages, as parts of the step.
    write : callable
        Writes f and its tangents: see `Tracing.along`.
    shape : tuple of int
        (1 + m, d, n)
    dtype : dtype

    Attributes
    ----------
    u : array
        Before the step.
    k : list of array
        The stages.
    """

    def __init__(
        self, coefficients: Coefficients, c: Array, write: Callable, shape: tuple[int, int, int], dtype: Any
    ):
        self._rows, self._c, self._write = coefficients.rows, c, write
        self.last = len(self._rows) - 1
        # In C order, which NumPy takes fastest: what is made by an index of two columns has another.
        self.u, self._argument, self._end, self._term = (np.empty(shape, dtype) for _ in range(4))
        self._k = [np.empty(shape, dtype) for _ in self._rows]
        self.k: list[Array] = []
        # Of few columns each number has its own h, as to repeat one takes as long as to multiply.
        self._few = np.empty(shape, self.u.real.dtype) if shape[2] <= _FEW else None
        self._new: Array | None = None

    def take(self, visit: Visit, tangents: Array) -> None:
        """Compute the stages of a visit, but for the last."""
        u, h = self.u, visit.h
        u[0], u[1:] = visit.u, tangents
        times = self._c * h
        times += visit.t
        real = u.real.dtype
        self._times = times if times.dtype == real else times.astype(real)
        if self._few is None:
            self._h = h.astype(real, copy=False)
        else:
            self._few[...] = h
            self._h = self._few
        self._new, self.k = None, []
        for i in range(self.last):
            self._evaluate(self._sum(i, self._argument) if i else u)

    def argument(self, i: int) -> Array:
        """Return the new state: the argument of the last stage."""
        if self._new is None:
            self._new = self._sum(i, self._end)
        return self._new

    def add_last_stage(self) -> None:
        """Compute the stage at the new state too; once."""
        if len(self.k) == self.last:
            self._evaluate(self.argument(self.last))

    def _sum(self, i: int, y: Array) -> Array:
        weighted_sum(self._rows[i], self.k, y, self._term)
        np.multiply(y, self._h, y)
        return np.add(y, self.u, y)

    def _evaluate(self, y: Array) -> None:
        i = len(self.k)
        self._write(self._k[i], y, self._times[i])
        self.k.append(self._k[i])
