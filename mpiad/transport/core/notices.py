"""Empty messages to single ranks without a waiting receiver, for which any thread may poll."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiad._typing import Comm, Rank


def threads_may_communicate() -> bool:
    """Return whether MPI was initialized for calls from several threads at once."""
    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


class Notices:
    """Notices on a communicator without other point-to-point messages."""

    def __init__(self, comm: Comm):
        self._comm = comm
        self._empty = np.empty(0)
        self._posted: list[Any] = []
        self._sent: Counter[Rank] = Counter()
        self._taken: Counter[Rank] = Counter()

    def post(self, dest: Rank, kind: int) -> None:
        """Send a notice, without waiting."""
        self._posted.append(self._comm.Isend(self._empty, dest, kind))
        self._sent[dest] += 1

    def take(self) -> tuple[Rank, int] | None:
        """Return sender and kind of the next notice, None if there is none; one thread at a time."""
        status = MPI.Status()
        if not self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            return None
        self._receive(status.source, status.tag)
        return status.source, status.tag

    def _receive(self, source: Rank, tag: int) -> None:
        self._comm.Recv(self._empty, source, tag)
        self._taken[source] += 1

    def drain(self) -> None:
        """Receive all remaining notices, so that the communicator can be freed; collective."""
        size = self._comm.size
        # A probe may miss a notice in flight; the senders' counts give the remaining number.
        for source, sent in enumerate(self._comm.alltoall([self._sent[rank] for rank in range(size)])):
            while self._taken[source] < sent:
                self._receive(source, MPI.ANY_TAG)
        for request in self._posted:
            request.Wait()
        self._posted.clear()
