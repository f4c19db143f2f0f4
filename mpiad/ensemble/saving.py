"""At which times states are saved, and how they get there while the trajectories advance."""

from __future__ import annotations

import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.coefficients import Coefficients, interpolate
from mpiad.ensemble.initialization import Joint
from mpiad.ensemble.outcome import Outcome
from mpiad.ensemble.record import Step

__all__ = ["SavePoints", "save_times", "times_of"]


def save_times(saveat: Array | None, batch: Batch, first: int = 0) -> Array:
    """Return the times that `saveat` asks for.

    Parameters
    ----------
    saveat : number, list of numbers, array of shape (all, n_saved), or None
        A number is the interval from the start on, and the end is saved too; None is both ends.
    batch : Batch
        N trajectories, of which the first is row `first` of `saveat`.

    Returns
    -------
    array, shape (n_saved,) or (N, n_saved)

    Raises
    ------
    TypeError, ValueError
        Where a time lies outside tspan, or times aren't in the order of the solve.
    """
    if saveat is None:
        return batch.both_ends()
    start, end, count = batch.start, batch.end, batch.size
    saveat = saveat[first : first + count] if np.ndim(saveat) == 2 else saveat
    if count and start.strides == end.strides == (0,):  # one tspan, however many trajectories
        start, end = start[:1], end[:1]
    times = np.asarray(saveat)
    if times.dtype.kind not in "iuf":
        raise TypeError(f"solve: saveat must be a number or numbers, but got {saveat!r}.")
    times = times.astype(float)
    if times.ndim == 0:
        return _every(float(times), start, end)
    if times.ndim > 2 or (times.ndim == 2 and len(times) != count):
        raise ValueError(
            f"solve: saveat must be a number, a list of times, or an array of shape (N, n_saved) with N = {count}, "
            f"but has shape {times.shape}."
        )
    _check(times, start, end)
    return times


def _every(interval: float, start: Array, end: Array) -> Array:
    if not (np.isfinite(interval) and interval > 0):
        raise ValueError(f"solve: saveat as an interval must be above zero, but got {interval!r}.")
    if not len(start):
        return np.empty(0)
    if (start != start[0]).any() or (end != end[0]).any():
        i = int(np.argmax((start != start[0]) | (end != end[0])))
        raise ValueError(
            f"solve: saveat as an interval needs one tspan for all trajectories, but got ({start[0]}, {end[0]}) and "
            f"({start[i]}, {end[i]}). Give an array of shape (N, n_saved)."
        )
    span = float(end[0] - start[0])
    # A tenth of a thousand ten times isn't one in binary: the last multiple may miss the end by rounding.
    count = int(np.floor(abs(span) / interval * (1 + 1e-12)))
    times = start[0] + np.copysign(interval, span) * np.arange(count + 1)
    if abs(times[-1] - end[0]) <= 1e-9 * interval:
        times[-1] = end[0]
        return times
    return np.append(times, end[0])


def _check(times: Array, start: Array, end: Array) -> None:
    rows = np.atleast_2d(times)
    low, high = np.minimum(start, end)[:, None], np.maximum(start, end)[:, None]
    outside = ~((rows >= low) & (rows <= high))
    if outside.any():
        i, j = np.argwhere(outside)[0]
        own = min(i, len(start) - 1)  # one tspan for all was cut to one row
        raise ValueError(
            f"solve: saveat must lie in tspan, but {np.broadcast_to(rows, outside.shape)[i, j]} lies outside of "
            f"({start[own]}, {end[own]})."
        )
    back = (rows[:, 1:] - rows[:, :-1]) * np.where(end < start, -1, 1)[:, None] < 0
    if back.any():
        i, j = np.argwhere(back)[0]
        earlier, later = np.broadcast_to(rows, (len(back), rows.shape[1]))[i, j : j + 2]
        raise ValueError(
            "solve: the times of saveat must be in the order of the solve, from the start of tspan on, but got "
            f"{later} after {earlier}. Sort them."
        )


def times_of(t: Array, count: int | None) -> Array:
    """Return the times that `sol(t)` asks for, shape (n,) or (N, n); `count` is N, None for one solution, without rows.

    Raises
    ------
    NotImplementedError
        Where t is traced.
    TypeError, ValueError
        Where it isn't numbers, or of another shape.
    """
    if isbox(t) or (isinstance(t, (list, tuple)) and any(map(isbox, t))):
        raise NotImplementedError(
            "sol(t): t is traced, but states have no derivative here by the times at which they are looked at. Pass "
            "mpiad.stop(t), or let tspan end at the time that moves: u_end has a derivative by it."
        )
    times = np.asarray(t)
    if times.dtype.kind not in "iuf":
        raise TypeError(f"sol(t): t must be a number or numbers, but got {t!r}.")
    if times.ndim > (1 if count is None else 2) or (times.ndim == 2 and len(times) != count):
        rows = "" if count is None else f", or (N, n) with N = {count}"
        raise ValueError(f"sol(t): t must be a number, or have shape (n,){rows}, but has shape {times.shape}.")
    return np.atleast_1d(times.astype(float))


class SavePoints:
    """The times at which the trajectories of a working set are saved next.

    Parameters
    ----------
    times : array, shape (n_saved,) or (N, n_saved)
    signs : array, shape (N,)
    starts : array, shape (N,)
    """

    def __init__(self, times: Array, signs: Array, starts: Array, outcome: Outcome, coefficients: Coefficients):
        self._times, self._signs, self._starts = times, signs, starts
        self._saved: Array = outcome.saved
        self._save_step, self._coefficients = outcome.save_step, coefficients
        self._count = times.shape[-1]
        self.next = np.empty(0)
        self._place = np.empty(0, int)

    def enter(self, ids: Array, u: Array, joined: Joint) -> None:
        """Save the initial states of trajectories that enter, where asked for, and take up the next working set."""
        place = np.zeros(len(ids), int)
        due = self._due(ids, place)
        while (at_start := due == self._starts[ids] * self._signs[ids]).any():
            self._write(ids[at_start], place[at_start], u[:, at_start], -1)
            place += at_start
            due = self._due(ids, place)
        self._place, self.next = joined(self._place, place), joined(self.next, due)

    def _due(self, ids: Array, place: Array) -> Array:
        ended = place >= self._count
        index = np.minimum(place, self._count - 1)
        times = self._times[index] if self._times.ndim == 1 else self._times[ids, index]
        return np.where(ended, np.inf, times * self._signs[ids])

    def _write(self, ids: Array, place: Array, u: Array, step: Array | int) -> None:
        self._saved[ids, place] = u.T
        if self._save_step is not None:
            self._save_step[ids, place] = step

    def see(self, step: Step) -> None:
        """Save what lies in a step."""
        due = self.next <= step.t_new
        due &= step.accepted
        if not np.count_nonzero(due):
            return
        columns = np.flatnonzero(due)
        inside = columns[self.next[columns] < step.t_new[columns]]
        if inside.size:
            self._save_inside(inside, step)
        # Most often the end of the step is the end of the solve, for which nothing is interpolated.
        while (columns := columns[self.next[columns] == step.t_new[columns]]).size:
            self._write(step.ids[columns], self._place[columns], step.new[:, columns], step.number[columns])
            self._go_on(columns, step.ids)

    def _save_inside(self, columns: Array, step: Step) -> None:
        # Several times may lie in one step of a column: all are found first, and interpolated in one call.
        found = []
        while columns.size:
            found.append((columns, self._place[columns], self.next[columns]))
            self._go_on(columns, step.ids)
            columns = columns[self.next[columns] < step.t_new[columns]]
        columns, place, due = (np.concatenate(parts) for parts in zip(*found))
        step = step.at(columns)
        values = interpolate(self._coefficients, step.u, step.h, step.k, (due - step.t) / step.h)
        self._write(step.ids, place, values, step.number)

    def _go_on(self, columns: Array, ids: Array) -> None:
        self._place[columns] += 1
        self.next[columns] = self._due(ids[columns], self._place[columns])
