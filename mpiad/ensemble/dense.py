"""The states of a run between its steps, for any trajectory at any time."""

from __future__ import annotations

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.interpolant import polynomials, states_at
from mpiad.ensemble.run import Run

__all__ = ["DenseStates"]


class DenseStates:
    """The interpolants of all steps of a run, trajectory after trajectory, as polynomials in the part of the step.

    Parameters
    ----------
    run : Run
    """

    def __init__(self, run: Run):
        self._run, batch = run, run.batch
        ends = np.cumsum(run.counts)
        total, degree = int(ends[-1]) if len(ends) else 0, run.tableau.dense.shape[1]
        # So many halvings find one of the most steps that a trajectory took.
        self._halvings = int(run.counts.max(initial=0)).bit_length()
        self._counts, self._offsets = run.placed(run.counts), run.placed(ends - run.counts)
        backward = batch.end < batch.start
        self._sign = run.placed(np.where(backward, -1.0, 1.0)) if backward.any() else None
        # A place more, for steps that weren't made.
        self._t, self._h = run.numbers(total + 1), run.numbers(total + 1) + 1.0
        self._terms = np.zeros_like(batch.u0, shape=(degree + 1, len(batch.u0), total + 1))
        number = np.zeros_like(self._counts)
        with np.errstate(all="ignore"):
            for walk in run.walks():
                for visit in walk.forwards():
                    ids, h = walk.ids[: len(visit.t)], visit.h.astype(run.coefficients.real, copy=False)
                    place = self._offsets[ids] + number[ids]
                    if visit.made is not None:
                        place = np.where(visit.made, place, np.full_like(place, total))
                    number[ids] += 1 if visit.made is None else visit.made
                    self._t[place], self._h[place] = visit.t, visit.h
                    terms = polynomials(run.coefficients, visit.u, h, run.stages_again(walk, visit)[0])
                    for power in range(len(terms)):
                        self._terms[power][:, place] = terms[power]

    def at(self, ids: Array, t: Array) -> Array:
        """Return the states of trajectories at times, shape (d, len(ids)); beyond their steps by the nearest one."""
        place = self._offsets[ids] + self._number(ids, t)
        x = ((t - self._t[place]) / self._h[place]).astype(self._run.coefficients.real)
        return states_at([self._terms[power][:, place] for power in range(len(self._terms))], x)

    def ends(self, ids: Array, numbers: Array) -> Array:
        """Return the times after steps of trajectories, by their numbers from 0."""
        place = self._offsets[ids] + numbers
        return self._t[place] + self._h[place]

    def _number(self, ids: Array, t: Array) -> Array:
        """Return in which steps times lie, by bisection."""
        low, high, offset = np.zeros_like(ids), self._counts[ids] - 1, self._offsets[ids]
        for _ in range(self._halvings):
            middle = (low + high + 1) // 2
            gone = t - self._t[offset + middle]
            begun = (gone if self._sign is None else gone * self._sign[ids]) >= 0
            low, high = np.where(begun, middle, low), np.where(begun, high, middle - 1)
        return low
