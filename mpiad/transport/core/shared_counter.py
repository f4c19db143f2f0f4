"""A counter from which any rank takes the next number during its computation.

It is on rank 0, where a thread answers the others. One-sided operations won't do: several MPIs execute them only when the
target rank calls MPI.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiad._typing import Comm
from mpiad.transport.core.channels import make_communicator
from mpiad.transport.core.polling import wait_gently

_ASK, _ANSWER = 1, 2
_POLL_INTERVAL = 5e-4  # seconds


class SharedCounter:
    """A counter from 0 for all ranks: a context that all of them enter and leave. MPI must allow threads."""

    def __init__(self, comm: Comm):
        self._comm: Any = make_communicator(comm.Dup)
        self._count, self._counting, self._ended = 0, threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._answer, name="mpiad-counter", daemon=True)
        if comm.rank == 0 and comm.size > 1:
            self._thread.start()

    def take(self, many: int = 1) -> int:
        """Return the next number, and advance the counter by `many`."""
        if self._comm.rank == 0:
            with self._counting:
                before, self._count = self._count, self._count + many
            return before
        number = np.array(many, np.int64)
        self._comm.Send(number, 0, _ASK)
        wait_gently(self._comm.Irecv(number, 0, _ANSWER))
        return int(number)

    def _answer(self) -> None:
        number, status = np.empty((), np.int64), MPI.Status()
        while not self._ended.wait(_POLL_INTERVAL):
            # Polled, since MPI's own wait would occupy a core.
            while self._comm.Iprobe(MPI.ANY_SOURCE, _ASK, status):
                self._comm.Recv(number, status.source, _ASK)
                self._comm.Send(np.array(self.take(int(number)), np.int64), status.source, _ANSWER)

    def __enter__(self) -> SharedCounter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End; after an exception the communicator isn't freed, since all ranks would have to free it together."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        if kind is None:
            self._comm.Free()
