"""Empty messages that nobody waits for: posted to single ranks, looked for from time to time, by any thread."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from mpiad._typing import Comm, Rank

__all__ = ["Notices", "threads_may_communicate"]


def threads_may_communicate() -> bool:
    """Tell whether MPI was initialised for calls from several threads at once."""
    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


class Notices:
    """Notices of one communicator, on which no other point-to-point messages travel."""

    def __init__(self, comm: Comm):
        self._comm = comm
        self._empty = np.empty(0)
        self._posted: list[Any] = []

    def post(self, dest: Rank, kind: int) -> None:
        """Send a notice, without waiting."""
        self._posted.append(self._comm.Isend(self._empty, dest, kind))

    def take(self, kind: int) -> Rank | None:
        """Return the rank that a notice came from, None where there is none."""
        status = MPI.Status()
        if not self._comm.Iprobe(MPI.ANY_SOURCE, kind, status):
            return None
        return self.take_from(status.source, kind)

    def take_from(self, source: Rank, kind: int) -> Rank:
        """Wait for the notice of one rank."""
        self._comm.Recv(self._empty, source, kind)
        return source

    def close(self) -> None:
        """Complete what was posted, once all of it was taken."""
        MPI.Request.Waitall(self._posted)
        self._posted.clear()
