"""Interpolants of trajectories that were solved apart: batch by batch, or over the ranks."""

from __future__ import annotations

import hashlib
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array, Comm
from mpiad.ensemble.pickled_communicator import PickledCommunicator, present
from mpiad.primitives import mpi_allgather
from mpiad.transport import channel
from mpiad.transport.agreement import raise_together, require_same

__all__ = ["GatheredOutput", "JoinedOutput", "times_of"]


def times_of(t: Any, count: int | None) -> Array:
    """Return the times that `sol(t)` asks for, shape (n,) or (N, n).

    Parameters
    ----------
    t : number, or array of shape (n,) or (N, n)
    count : int or None
        N; None for a single solution, which has no rows.

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


class JoinedOutput:
    """Batches, one after the other.

    Parameters
    ----------
    parts : list of (callable, int)
        The interpolants of each, and how many trajectories it has.
    """

    def __init__(self, parts: list[tuple[Any, int]]):
        self._parts = parts

    def __call__(self, times: Array, only: int | None = None) -> Array:
        """Return states, shape (N, n, …); of one trajectory (n, …)."""
        found, first = [], 0
        for part, count in self._parts:
            rows = times[first : first + count] if times.ndim == 2 else times
            if only is None:
                found.append(part(rows))
            elif first <= only < first + count:
                return part(rows, only - first)
            first += count
        return anp.concatenate(found)


class GatheredOutput:
    """The shares of all ranks.

    Parameters
    ----------
    share : callable
        The interpolants of this rank's.
    count : int
        How many trajectories it has.

    Notes
    -----
    All ranks call it, with the same times.
    """

    def __init__(self, share: Any, count: int, comm: Comm):
        self._share, self._count, self._comm = share, count, PickledCommunicator(comm)

    def __call__(self, times: Array, only: int | None = None) -> Array:
        """Return states, shape (N, n, …); of one trajectory (n, …)."""
        comm = present(self._comm.comm, "sol(t)", "Ask for these times by saveat in the solve, or pickle sol(t).")
        used = channel(comm, "ensemble.solve")
        digest = hashlib.sha256(times.tobytes()).hexdigest()[:16]
        # By a hash: with other times on one rank the gathered states would be put together of different questions.
        require_same(used, f"t of shape {times.shape}, with SHA-256 {digest}", "sol(t)")
        counts = used.data.allgather(self._count)
        first = sum(counts[: used.rank])
        own, error = None, None
        try:
            # A rank whose share fails must still come to the agreement, where the others wait.
            own = self._share(times[first : first + self._count] if times.ndim == 2 else times)
        except Exception as found:  # noqa: BLE001 it is raised on all ranks
            error = found
        raise_together(used, error)
        everything = mpi_allgather(own, axis=0, comm=comm)
        return everything if only is None else everything[only]
