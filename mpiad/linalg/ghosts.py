"""Entries of a divided vector that a rank needs and others own: who sends what to whom, found once."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiad._typing import Comm, LocalArray, Rank
from mpiad.device.constants import Constants
from mpiad.primitives import mpi_alltoall, mpi_irecv, mpi_send, mpi_wait
from mpiad.primitives.operation import suspended
from mpiad.transport import channel
from mpiad.transport.buffers import empty_beside
from mpiad.transport.device_arrays import arrays_of
from mpiad.transport.tracing import restoring_state

# Beside those of halos, below the 32767 that MPI guarantees.
_TAG_INDICES, _TAG_FETCH, _TAG_GIVE = 32741, 32742, 32743


class GhostPlan:
    """What ranks exchange so that each has the ghosts that it needs, and how it flows back; all ranks make it.

    - `needed`: places in the whole vector of what this rank needs and doesn't own, sorted.
    - `offsets`, of length P + 1: rank r owns the places from offsets[r] to offsets[r + 1].
    - `sources`, list of (int, slice): ranks that this one receives ghosts from, and their places among the ghosts.
    - `destinations`, list of (int, array of int): ranks that it sends to, and the places in its own part.
    """

    def __init__(self, needed: np.ndarray, offsets: np.ndarray, comm: Comm):
        used = channel(comm, "DistributedMatrix")
        self.comm, self.count = comm, len(needed)
        owners = np.searchsorted(offsets, needed, side="right") - 1
        # Sorted places have sorted owners, so the ghosts of one owner follow one another.
        ranks, starts, counts = np.unique(owners, return_index=True, return_counts=True)
        self.sources: list[tuple[Rank, slice]] = [
            (int(owner), slice(int(start), int(start + count))) for owner, start, count in zip(ranks, starts, counts)
        ]
        wanted = np.zeros(used.size, np.int64)
        wanted[ranks] = counts
        with restoring_state(), suspended():
            asked = mpi_alltoall(wanted, comm=comm)
            # Receives first, so that no rank must keep others' lists until it looks for them.
            coming = [
                (int(r), mpi_irecv(np.empty(asked[r], np.int64), int(r), _TAG_INDICES, comm)) for r in np.flatnonzero(asked)
            ]
            for owner, places in self.sources:
                mpi_send(needed[places].astype(np.int64), owner, _TAG_INDICES, comm)
            self.destinations = [(r, mpi_wait(request) - offsets[used.rank]) for r, request in coming]
        self._places = Constants(*[places for _, places in self.destinations])

    def fetch(self, x: LocalArray) -> LocalArray:
        """Return the ghosts of a vector, shape (..., count), from this rank's part, shape (..., n); collective."""
        ghosts = empty_beside(x, (*x.shape[:-1], self.count))
        coming = [(places, mpi_irecv(ghosts[..., places], r, _TAG_FETCH, self.comm)) for r, places in self.sources]
        for r, places in self._destinations(x):
            mpi_send(x[..., places], r, _TAG_FETCH, self.comm)
        for places, request in coming:
            ghosts[..., places] = mpi_wait(request)
        return ghosts

    def give(self, ghosts: LocalArray, out: LocalArray) -> None:
        """Add ghosts to what their owners have in `out`: the transpose of `fetch`; collective."""
        coming = []
        for r, places in self._destinations(out):
            room = empty_beside(out, (*out.shape[:-1], len(places)))
            coming.append((places, mpi_irecv(room, r, _TAG_GIVE, self.comm)))
        for r, places in self.sources:
            mpi_send(ghosts[..., places], r, _TAG_GIVE, self.comm)
        for places, request in coming:
            # A place is asked for once by each rank, so that none is lost among equal ones.
            out[..., places] += mpi_wait(request)

    def _destinations(self, x: LocalArray) -> Any:
        """Return the ranks that this one sends to and the places, these where `x` lives."""
        home = arrays_of(x)
        return self.destinations if home is None else zip([r for r, _ in self.destinations], self._places.on(home))
