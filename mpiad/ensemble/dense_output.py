"""Dense output: the states of a solve at any times, interpolated in its steps, for `sol(t)`.

The stages of the recorded steps that contain the times are computed again. With traced inputs, the states have the same
derivatives as states saved by `saveat`.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import autograd.numpy as anp
import numpy as np

from mpiad._typing import Array, Comm
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.coefficients import interpolate
from mpiad.ensemble.differentiable import differentiable
from mpiad.ensemble.outcome import INITIAL, NOWHERE, Outcome
from mpiad.ensemble.record import Steps
from mpiad.ensemble.run import Run
from mpiad.ensemble.settings import Settings
from mpiad.ensemble.solution import solution_of
from mpiad.errors import CommunicatorError
from mpiad.primitives import mpi_allgather
from mpiad.transport import channel
from mpiad.transport.core.agreement import fingerprint, raising_together, require_same

# Maximum number of entries of one array in the interpolation.
_BLOCK = 32_768


class DenseOutput:
    """The interpolants of all trajectories of a batch of plain arrays; `inputs`: the same batch, possibly traced."""

    def __init__(self, batch: Batch, settings: Settings, outcome: Outcome, inputs: Batch):
        self._batch, self._settings, self._outcome = batch, settings, outcome
        self._inputs = inputs
        # The table of events refers to all events of the solve.
        events = settings.events if settings.acting is None else settings.acting.events
        self._run = Run(batch, settings._replace(events=events), outcome)
        self._signs = np.where(batch.end < batch.start, -1.0, 1.0)

    def __call__(self, times: Array, only: int | None = None) -> Array:
        """Return the states at times in tspan, shape (N, n, …), or those of the trajectory `only`, shape (n, …)."""
        batch = self._batch
        if self._inputs.traced:
            everything = self._traced(times)
            return everything if only is None else everything[only]
        ids = np.arange(batch.size) if only is None else np.array([range(batch.size)[only]])
        values, _ = self._saved(ids, self._rows(times, ids))
        values = values.reshape(*values.shape[:2], *batch.shape)
        return values if only is None else values[0]

    def _traced(self, times: Array) -> Array:
        batch, ids = self._batch, np.arange(self._batch.size)
        saved, save_step = self._saved(ids, self._rows(times, ids))
        steps = self._outcome.recorded()
        # Kernels and their results are removed, since they are valid only for the saved times of the solve.
        outcome = dataclasses.replace(
            self._outcome, saved=saved, save_step=save_step, steps=steps, solver=None, carried=None, tapes=[], last=None
        )
        settings = self._settings._replace(saveat=times, record=True, ends=False)
        sol = solution_of(outcome, batch, settings)
        return differentiable(sol, Run(batch, settings, outcome), self._inputs).u

    def _rows(self, times: Array, ids: Array) -> Array:
        """Return the times for the trajectories `ids`, shape (len(ids), n)."""
        batch = self._batch
        rows = np.broadcast_to(times, (batch.size, times.shape[-1]))[ids]
        low, high = (end(batch.start, batch.end)[ids, None] for end in (np.minimum, np.maximum))
        outside = ~((rows >= low) & (rows <= high))
        if outside.any():
            i, j = np.argwhere(outside)[0]
            raise ValueError(
                f"sol(t): t must lie in tspan, but {rows[i, j]} lies outside of ({batch.start[ids[i]]}, "
                f"{batch.end[ids[i]]}). States are interpolated, never extrapolated."
            )
        return rows

    def _saved(self, ids: Array, rows: Array) -> tuple[Array, Array]:
        """Return the states of trajectories at the times `rows`, (len(ids), n, d), and the steps that contain the times."""
        batch, count = self._batch, rows.size
        owner, times = np.repeat(ids, rows.shape[1]), rows.ravel()
        number = np.empty(count, np.int64)
        values = np.full((count, len(batch.u0)), np.nan, batch.u0.dtype)
        width = max(2, _BLOCK // max(1, len(batch.u0)))
        # Steps are recorded for groups of trajectories; `first` is the first trajectory of a group.
        for first, steps in self._outcome.recorded():
            group = np.flatnonzero((owner >= first) & (owner < first + len(steps.counts)))
            number[group] = self._numbers(steps, owner[group] - first, owner[group], times[group])
            in_steps = group[number[group] >= 0]
            for start in range(0, len(in_steps), width):
                chosen = in_steps[start : start + width]
                values[chosen] = self._inside(steps, owner[chosen] - first, owner[chosen], number[chosen], times[chosen]).T
        at_start = number == INITIAL
        # No step contains the start.
        values[at_start] = batch.u0.T[owner[at_start]]
        return values.reshape(*rows.shape, len(batch.u0)), number.reshape(rows.shape).astype(np.int32)

    def _numbers(self, steps: Steps, rows: Array, ids: Array, times: Array) -> Array:
        """Return the first steps that contain the times, or INITIAL or NOWHERE; `rows`: the trajectories in `steps`."""
        counts, sign = steps.counts[rows], self._signs[ids]
        # Bisection for all times at once.
        low, high = np.full(len(rows), -1), counts - 1
        while (low < high).any():
            middle = np.maximum((low + high + 1) // 2, 0)
            active = low < high
            started = np.zeros(len(rows), bool)
            started[active] = ((steps.times(rows[active], middle[active])[0] - times[active]) * sign[active]) < 0
            low, high = np.where(active & started, middle, low), np.where(active & ~started, middle - 1, high)
        # Times after the end of a trajectory give NaN.
        reached = (times - self._outcome.t_reached[ids]) * sign <= 0
        return np.where(reached, np.where(low < 0, INITIAL, low), NOWHERE)

    def _inside(self, steps: Steps, rows: Array, ids: Array, number: Array, times: Array) -> Array:
        """Return the states at times inside steps, or at the ends of steps, shape (d, len(ids)); see `_numbers`."""
        outcome, (t, h), u = self._outcome, steps.times(rows, number), steps.states(rows, number)
        with np.errstate(all="ignore"):
            value = interpolate(self._run.coefficients, u, h, self._run.stages_of(ids, number, u, t, h)[0], (times - t) / h)
        final = number == steps.counts[rows] - 1
        # At the end of a step the recorded state is returned, from which the interpolant differs by rounding.
        inner = np.flatnonzero(~final)
        at_end = inner[steps.times(rows[inner], number[inner] + 1)[0] == times[inner]]
        value[:, at_end] = steps.states(rows[at_end], number[at_end] + 1)
        last = np.flatnonzero(final & (times == outcome.t_reached[ids]))
        value[:, last] = outcome.u_end[:, ids[last]]
        return value


class JoinedOutput:
    """The interpolants of several batches; `parts`: the interpolants and the number of trajectories of each batch."""

    def __init__(self, parts: list[tuple[Any, int]]):
        self._parts = parts

    def __call__(self, times: Array, only: int | None = None) -> Array:
        """Return states, shape (N, n, …), or those of the trajectory `only`, shape (n, …)."""
        parts, first = [], 0
        for part, count in self._parts:
            rows = times[first : first + count] if times.ndim == 2 else times
            if only is None:
                parts.append(part(rows))
            elif first <= only < first + count:
                return part(rows, only - first)
            first += count
        return anp.concatenate(parts)


class GatheredOutput:
    """The interpolants of all ranks, for collective calls; `share`: interpolants of this rank's `count` trajectories."""

    def __init__(self, share: Callable[[Array], Array], count: int, comm: Comm):
        self._share, self._count, self._comm = share, count, PickledCommunicator(comm)

    def __call__(self, times: Array, only: int | None = None) -> Array:
        """Return states, shape (N, n, …), or those of the trajectory `only`, shape (n, …)."""
        comm = present(self._comm.comm, "sol(t)", "Give these times as saveat to the solve, or pickle the array sol(t).")
        group = channel(comm, "ensemble.solve")
        require_same(group, f"t of shape {times.shape}, with the fingerprint {fingerprint(times)}", "sol(t)")
        counts = group.data.allgather(self._count)
        first = sum(counts[: group.rank])
        with raising_together(group, Exception):
            part = self._share(times[first : first + self._count] if times.ndim == 2 else times)
        everything = mpi_allgather(part, axis=0, comm=comm)
        return everything if only is None else everything[only]


# In an unpickled solution, instead of a communicator that couldn't be pickled.
_LOST = "<communicator of the program that pickled this>"


class PickledCommunicator:
    """The communicator of a solution. Copies share the communicator; a pickle contains it only if it can be pickled."""

    def __init__(self, comm: Comm | str):
        self.comm = comm

    def __deepcopy__(self, memo: dict[int, object]) -> PickledCommunicator:
        return self

    def __reduce__(self) -> tuple[type[PickledCommunicator], tuple[Comm | str]]:
        try:
            pickle.dumps(self.comm)
        except Exception:  # noqa: BLE001 - the exception type depends on the version of mpi4py
            return PickledCommunicator, (_LOST,)
        return PickledCommunicator, (self.comm,)


def present(comm: Comm, call: str, remedy: str) -> Comm:
    """Return the communicator of a solution; raise CommunicatorError if it was lost when the solution was pickled."""
    if isinstance(comm, str):
        raise CommunicatorError(
            f"{call}: this solution was unpickled, and its communicator, which belongs to the program that pickled it, "
            f"couldn't be pickled. {remedy}"
        )
    return comm
