"""The states of a run between its steps, for any trajectory at any time."""

from __future__ import annotations

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.checkpoints import walks
from mpiad.ensemble.derivative import derivative_of
from mpiad.ensemble.run import Run
from mpiad.ensemble.stages import Stages

__all__ = ["DenseStates"]


class DenseStates:
    """The interpolants of all steps of a run, as polynomials in the part of the step.

    Parameters
    ----------
    run : Run
    """

    def __init__(self, run: Run):
        self._run, self._counts = run, run.counts
        self._offsets = np.cumsum(run.counts) - run.counts
        total, d, degree = int(run.counts.sum()), len(run.batch.u0), run.tableau.dense.shape[1]
        self._sign = np.where(run.batch.end < run.batch.start, -1.0, 1.0)
        self._t, self._h = np.empty(total), np.empty(total)
        self._terms = np.zeros((degree + 1, d, total), run.batch.u0.dtype)
        self._derivative = derivative_of(run.batch.f, run.batch.shape)
        with np.errstate(all="ignore"):
            for first, walk in walks(run):
                for v, visit in enumerate(walk.backwards()):
                    ids = walk.ids[: len(visit.t)] + first
                    self._fill(self._offsets[ids] + walk.numbers(v, len(ids)), ids, visit.t, visit.h, visit.u)

    def _fill(self, place: Array, ids: Array, t: Array, h: Array, u: Array) -> None:
        run, width = self._run, len(ids)
        columns = np.arange(max(2, width)) % width  # two at least, as in the solve: see `norms`
        p = run.batch.p.columns(ids[columns], run.field.one_by_one)
        stages = Stages(run.tableau, self._derivative, u.dtype, (len(u), len(columns)))
        self._derivative.write(stages.k[0], u[:, columns], p, t[columns].astype(u.real.dtype))
        stages.take(u[:, columns], p, t[columns], h[columns], (t + h)[columns], None)
        self._t[place], self._h[place], self._terms[0][:, place] = t, h, u
        for power, weights in enumerate(run.tableau.dense.T, 1):
            total = sum(weight * k[:, :width] for weight, k in zip(weights, stages.k) if weight)
            self._terms[power][:, place] = h * total

    def at(self, ids: Array, t: Array) -> Array:
        """Return the states of trajectories at times, shape (d, len(ids)); beyond their steps by the nearest one."""
        place = self._offsets[ids] + self._number(ids, t)
        x = ((t - self._t[place]) / self._h[place]).astype(self._terms.real.dtype)
        # Horner's scheme, over the powers of the part of the step.
        value = self._terms[-1][:, place]
        for term in self._terms[-2::-1]:
            value = value * x + term[:, place]
        return value

    def ends(self, ids: Array, numbers: Array) -> Array:
        """Return the times after steps of trajectories, by their numbers from 0."""
        place = self._offsets[ids] + numbers
        return self._t[place] + self._h[place]

    def _number(self, ids: Array, t: Array) -> Array:
        """Return in which steps times lie, by bisection."""
        # For all times at once: the numbers of steps differ between trajectories, so the slowest decides.
        low, high = np.zeros(len(ids), np.int64), self._counts[ids] - 1
        sign, offset = self._sign[ids], self._offsets[ids]
        while (low < high).any():
            middle = (low + high + 1) // 2
            begun = (self._t[offset + middle] - t) * sign <= 0
            low, high = np.where(begun, middle, low), np.where(begun, high, middle - 1)
        return low
