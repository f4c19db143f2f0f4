"""Forward mode of a solve: tangents carried along its accepted steps, from the first to the last.

Values and tangents of a block make one array of shape (1 + directions, d, n), so a sum over stages is one for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        evaluate = partial(Tracing(run.field, tuple(directions.leaves), False).along, bundle)
        for first, walk in walks(run):
            _Block(run, evaluate, directions, walk, walk.ids + first, saved).sweep(end, entries)
    if saved is not None:
        for where, states in ((INITIAL, directions.u0), (FINAL, end)):
            ids, place = np.nonzero(run.save_step == where)
            saved[:, ids, place] = states[:, :, ids].transpose(0, 2, 1)
    return end, saved


class _Block:
    """One block of columns on the way forwards."""

    def __init__(
        self, run: Run, evaluate: Callable, directions: Directions, walk: Walk, ids: Array, saved: Any
    ):
        self._run, self._evaluate, self._walk, self._ids, self._saved = run, evaluate, walk, ids, saved
        batch = run.batch
        self._leaves = run.columns(batch.p.leaves, ids)
        self._along = [
            [None if g is None else g[..., ids] if batch.p.varies[place] else g for g in gs]
            for place, gs in directions.leaves.items()
        ]
        self._varies = [batch.p.varies[place] for place in directions.leaves]
        self._coefficients = Coefficients(run.tableau, batch.u0.real.dtype)

    def sweep(self, end: Array, entries: Entries | None) -> None:
        """Go from the first step to the last."""
        schedule = None if entries is None else scheduled(self._run, entries, self._walk, self._ids)
        tangents = end[:, :, self._ids]
        for v, visit in zip(range(len(self._walk) - 1, -1, -1), self._walk.forwards()):
            self._push(v, visit, tangents, schedule)
        end[:, :, self._ids] = tangents

    def _push(self, v: int, visit: Visit, tangents: Array, schedule: Schedule | None) -> None:
        width = len(visit.t)
        step = self._step(visit, tangents)
        new = step.argument(step.last)[1:]
        if schedule is not None:
            self._save(v, step, new, schedule)
        tangents[:, :, :width] = new[:, :, :width]

    def _step(self, visit: Visit, tangents: Array) -> _Step:
        columns = self._run.doubled(len(visit.t))
        leaves = self._run.columns(self._leaves, columns)
        along = [
            [None if g is None else g[..., columns] if varies else g for g in gs]
            for gs, varies in zip(self._along, self._varies)
        ]
        visit = visit.of(columns)
        # In C order, which NumPy takes fastest: what is made by an index of two columns has another.
        u = np.empty((1 + len(tangents), *visit.u.shape), tangents.dtype)
        u[0], u[1:] = visit.u, tangents[:, :, columns]
        return _Step(self._coefficients, self._run.tableau.c, self._evaluate, u, visit, leaves, along)

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
    """The stages of one step with their tangents, each of shape (1 + m, d, n)."""

    def __init__(
        self, coefficients: Coefficients, c: Sequence[float], evaluate: Callable, u: Array, visit: Visit,
        leaves: Sequence[Any], along: Sequence[Sequence[Any]],
    ):  # fmt: skip
        self._coefficients, self._c, self._call, self._visit = coefficients, c, evaluate, visit
        self._leaves, self._along = leaves, along
        self.u, self._h = u, visit.h.astype(u.real.dtype, copy=False)
        self.last = len(coefficients.rows) - 1
        self._term = np.empty_like(u)
        self._new: Array | None = None
        self.k: list[Array] = []
        for i in range(self.last):
            self._evaluate(u if i == 0 else self._sum(i), i)

    def argument(self, i: int) -> Array:
        """Return the new state: the argument of the last stage."""
        if self._new is None:
            self._new = self._sum(i)
        return self._new

    def add_last_stage(self) -> None:
        """Compute the stage at the new state too; once."""
        if len(self.k) == self.last:
            self._evaluate(self.argument(self.last), self.last)

    def _sum(self, i: int) -> Array:
        y = weighted_sum(self._coefficients.rows[i], self.k, np.empty_like(self.u), self._term)
        np.multiply(y, self._h, out=y)
        return np.add(y, self.u, out=y)

    def _evaluate(self, y: Array, i: int) -> None:
        t = (self._visit.t + self._c[i] * self._visit.h).astype(self._h.dtype, copy=False)
        k = np.empty_like(self.u)
        self._call(k, y, self._leaves, t, self._along)
        self.k.append(k)
