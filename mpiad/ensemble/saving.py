"""`SavePoints` saves states at given times while the trajectories advance; `times_of` checks the times of `sol(t)`."""

from __future__ import annotations

import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array
from mpiad.ensemble.coefficients import Coefficients, interpolate
from mpiad.ensemble.initialization import Joint
from mpiad.ensemble.outcome import Outcome
from mpiad.ensemble.record import Step


def times_of(t: Array, count: int | None) -> Array:
    """Return the times of `sol(t)` as an array, shape (n,) or (N, n); `count` is N, or None for one solution."""
    refuse_traced_times("sol(t): t", t)
    times = np.asarray(t)
    if times.dtype.kind not in "iuf":
        raise TypeError(f"sol(t): t must be a number or numbers, but got {t!r}.")
    if times.ndim > (1 if count is None else 2) or (times.ndim == 2 and len(times) != count):
        rows = "" if count is None else f", or (N, n) with N = {count}"
        raise ValueError(f"sol(t): t must be a number, or have shape (n,){rows}, but has shape {times.shape}.")
    return np.atleast_1d(times.astype(float))


def refuse_traced_times(what: str, times: Array) -> None:
    """Raise a NotImplementedError if times at which states are requested are traced; `what` begins the message."""
    if any(map(isbox, times if isinstance(times, (list, tuple)) else [times])):
        raise NotImplementedError(
            f"{what} is traced, but derivatives with respect to saved times aren't supported. Apply "
            "mpiad.stop_gradient, or end tspan at the traced time: u_end has a derivative with respect to the end of tspan."
        )


class SavePoints:
    """Saves states at times of shape (n_saved,) or (N, n_saved); `next`: the next saved time per column."""

    def __init__(self, times: Array, signs: Array, starts: Array, outcome: Outcome, coefficients: Coefficients):
        self._times, self._signs, self._starts = times, signs, starts
        self._saved: Array = outcome.saved
        self._save_step, self._coefficients = outcome.save_step, coefficients
        self._count = times.shape[-1]
        self.next = np.empty(0)
        self._time_index = np.empty(0, int)

    def enter(self, ids: Array, u: Array, joined: Joint) -> None:
        """Add the columns of new trajectories, and save their initial states if these are requested."""
        time_index = np.zeros(len(ids), int)
        due = self._due(ids, time_index)
        while (at_start := due == self._starts[ids] * self._signs[ids]).any():
            self._write(ids[at_start], time_index[at_start], u[:, at_start], -1)
            time_index += at_start
            due = self._due(ids, time_index)
        self._time_index, self.next = joined(self._time_index, time_index), joined(self.next, due)

    def _due(self, ids: Array, time_index: Array) -> Array:
        ended = time_index >= self._count
        index = np.minimum(time_index, self._count - 1)
        times = self._times[index] if self._times.ndim == 1 else self._times[ids, index]
        return np.where(ended, np.inf, times * self._signs[ids])

    def _write(self, ids: Array, time_index: Array, u: Array, step: Array | int) -> None:
        self._saved[ids, time_index] = u.T
        if self._save_step is not None:
            self._save_step[ids, time_index] = step

    def save(self, step: Step, changing: Array) -> None:
        """Save states in a step, except at its end in the columns `changing`, since events will change these states."""
        due = self.next <= step.t_new
        due &= step.accepted
        if not np.count_nonzero(due):
            return
        columns = np.flatnonzero(due)
        self.save_inside(step, columns, columns)
        if changing.size:
            columns = np.setdiff1d(columns, changing, assume_unique=True)
        self.save_at_end(step, columns, columns, step.number)

    def save_inside(self, step: Step, rows: Array, columns: Array) -> None:
        """Save states inside a step, in its columns `rows`; `columns`: the indices of `rows` in the working set."""
        # Several saved times may lie in one step of a column. One call interpolates the states at all of them.
        found = []
        while np.count_nonzero(inside := self.next[columns] < step.t_new[rows]):
            rows, columns = rows[inside], columns[inside]
            found.append((rows, self._time_index[columns], self.next[columns]))
            self._to_next_time(columns, step.ids[rows])
        if found:
            rows, time_index, due = (np.concatenate(parts) for parts in zip(*found))
            step = step.at(rows)
            values = interpolate(self._coefficients, step.u, step.h, step.k, (due - step.t) / step.h)
            self._write(step.ids, time_index, values, step.number)

    def save_at_end(self, step: Step, rows: Array, columns: Array, number: Array) -> None:
        """Save states at the end of a step, in its columns `rows`; `columns`: see `save_inside`; `number`: step numbers."""
        while np.count_nonzero(at_end := self.next[columns] == step.t_new[rows]):
            rows, columns = rows[at_end], columns[at_end]
            self._write(step.ids[rows], self._time_index[columns], step.new[:, rows], number[rows])
            self._to_next_time(columns, step.ids[rows])

    def _to_next_time(self, columns: Array, ids: Array) -> None:
        self._time_index[columns] += 1
        self.next[columns] = self._due(ids, self._time_index[columns])
