"""The accepted steps of a solve, in the order that a reverse sweep needs.

In each turn of a solve every active trajectory, a column, tries a step. The accepted steps of a turn are stored as a chunk.
At the end they are sorted into *sweeps*: sweep s has the (s+1)-th step from the end of each trajectory that has it.
Trajectories are sorted by their numbers of steps, in descending order, so sweep s has the first ``widths[s]`` trajectories.
The states of a sweep form one block of shape (d, width). Reverse passes visit s = 0, 1, …, forward passes the opposite.

The record takes d + 2 numbers per accepted step, or d / k + 2 if only the states before every k-th step are stored.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpiad._typing import Array


class Step(NamedTuple):
    """A step of n columns; times are in the direction of the solve (see `initialization`)."""

    ids: Array  # trajectories, int, shape (n,)
    number: Array  # index of this step among the accepted steps of the trajectory, int, shape (n,)
    accepted: Array  # bool, shape (n,)
    t: Array  # time before the step, shape (n,)
    h: Array  # shape (n,)
    t_new: Array  # shape (n,)
    u: Array  # states before the step, shape (d, n)
    new: Array  # states after the step, shape (d, n)
    k: Array | list[Array]  # stages, each of shape (d, n); one array on a device
    sign: Array | None  # shape (n,), 1 or, for columns integrated backwards in time, -1; None if all are 1

    def at(self, columns: Array) -> Step:
        """Return the step of some columns."""
        fields: list = [np.take(array, columns, axis=-1) for array in self[:8]]
        one_array = not isinstance(self.k, list)
        fields.append(np.take(self.k, columns, axis=-1) if one_array else [np.take(k, columns, axis=-1) for k in self.k])
        fields.append(None if self.sign is None else self.sign[columns])
        return Step._make(fields)

    def actual(self, times: Array) -> Array:
        """Return actual times or signed step sizes, given times or sizes in the direction of the solve."""
        return times if self.sign is None else times * self.sign


class Steps:
    """All accepted steps, sorted into sweeps; `counts`, shape (N,): the number of steps per trajectory."""

    def __init__(self, counts: Array, d: int, dtype: np.dtype, every: int | None = None):
        self.every, self.kept = every, None
        if every is not None:  # only the states before every `every`-th step are stored
            self.kept, d = Steps(-(-counts // every), d, dtype), 0
        self.counts, self.d = counts, d
        self.order = np.argsort(-counts, kind="stable")  # trajectories, in descending order of their numbers of steps
        self.rank = np.empty_like(self.order)  # inverse of `order`
        self.rank[self.order] = np.arange(len(counts))
        most = int(counts.max(initial=0))
        self.widths = len(counts) - np.cumsum(np.bincount(counts, minlength=most + 1))[:most]
        self._offsets = np.concatenate([[0], np.cumsum(self.widths)])
        total = int(self._offsets[-1])
        self._t, self._h, self._u = np.empty(total), np.empty(total), np.empty(d * total, dtype)

    def __len__(self) -> int:
        return len(self.widths)

    def sweep(self, s: int) -> tuple[Array, Array, Array]:
        """Return the times, the signed step sizes, each of shape (width,), and the states, (d, width), of sweep s."""
        start, stop = int(self._offsets[s]), int(self._offsets[s + 1])
        u = self._u[self.d * start : self.d * stop].reshape(self.d, stop - start)
        return self._t[start:stop], self._h[start:stop], u

    def times(self, ids: Array, numbers: Array) -> tuple[Array, Array]:
        """Return the times before steps of the trajectories `ids`, and their signed sizes; `numbers`: the steps, from 0."""
        position = self._offsets[self.counts[ids] - numbers - 1] + self.rank[ids]
        return self._t[position], self._h[position]

    def states(self, ids: Array, numbers: Array) -> Array:
        """Return the states before steps of the trajectories `ids`, shape (d, len(ids)); `numbers`: the steps, from 0."""
        sweeps = self.counts[ids] - numbers - 1
        # In the block of a sweep, each component is stored `width` entries after the previous component.
        rows = self.d * self._offsets[sweeps] + np.arange(self.d)[:, None] * self.widths[sweeps] + self.rank[ids]
        return self._u[rows]

    def chosen(self, keep: Array) -> Steps:
        """Return the steps of only the trajectories in the mask `keep`."""
        if keep.all():
            return self
        steps = Steps(np.where(keep, self.counts, 0), self.d, self._u.dtype)
        for s in range(len(self)):
            columns = np.flatnonzero(keep[self.order[: self.widths[s]]])
            ids = self.order[columns]
            steps.fill(ids, self.counts[ids] - 1 - s, *(x[..., columns] for x in self.sweep(s)))
        steps.every, steps.kept = self.every, self.kept and self.kept.chosen(keep)
        return steps

    def fill(self, ids: Array, numbers: Array, t: Array, h: Array, u: Array) -> None:
        """Store steps of the trajectories `ids`; `numbers`: the steps, from 0."""
        sweeps, rank = self.counts[ids] - numbers - 1, self.rank[ids]
        position = self._offsets[sweeps] + rank
        self._t[position], self._h[position] = t, h
        self._u[self.d * self._offsets[sweeps] + rank + np.arange(len(u))[:, None] * self.widths[sweeps]] = u


class Log:
    """Accepted steps in the order of the solve, with the states before each step, or before each `every`-th step."""

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._chunks: list[tuple[Array, ...]] = []
        self._kept: list[tuple[Array, ...]] = []

    def note(self, step: Step) -> None:
        """Store the step in the columns in which it was accepted, with actual times and signed sizes."""
        # int32 saves a tenth of the memory of the record.
        count, u = len(step.ids), step.u
        numbers, times = np.empty((2, count), np.int32), np.empty((2, count))
        numbers[0], numbers[1] = step.ids, step.number
        times[0], times[1] = step.actual(step.t), step.actual(step.h)
        if self._every is not None:
            keep = np.flatnonzero(step.accepted & (step.number % self._every == 0))
            entries = [numbers[0], numbers[1] // self._every], times, u
            self._kept.append(tuple(np.take(array, keep, axis=-1) for array in entries))
            u = u[:0]
        if np.count_nonzero(step.accepted) == count:
            self._chunks.append((numbers, times, u.copy()))
        else:
            self._chunks.append(tuple([array.compress(step.accepted, axis=-1) for array in (numbers, times, u)]))

    def steps(self, counts: Array, d: int, dtype: np.dtype) -> Steps:
        """Return all stored steps, sorted into sweeps; the log is empty afterwards."""
        steps = Steps(counts, d, dtype, self._every)
        for chunks, filled in ((self._chunks, steps), (self._kept, steps.kept or steps)):
            while chunks:  # a chunk is freed when it has been copied
                (ids, numbers), (t, h), u = chunks.pop()
                filled.fill(ids, numbers, t, h, u)
        return steps
