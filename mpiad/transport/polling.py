"""Wait without taking the core away from the processes that are waited for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from mpi4py import MPI

from mpiad._typing import Comm, Request

# Ranks often outnumber cores; an MPI's own wait would take another rank's core away.
_AT_ONCE = 0.01
_LONGEST_NAP = 1e-3
# A sleep of no length takes up to 100 µs, a hundred times as long.
_yield_core = getattr(os, "sched_yield", lambda: time.sleep(0))


class Backoff:
    """Pauses of one wait: none at first, longer and longer after `at_once` seconds without news.

    `nap`: the length of the next, zero at first.
    """

    __slots__ = ("_at_once", "_start", "nap")

    def __init__(self, at_once: float = _AT_ONCE) -> None:
        self._at_once = at_once
        self.renew()

    def renew(self) -> None:
        """Begin again, since something has come."""
        self._start, self.nap = time.perf_counter(), 0.0

    def pause(self) -> None:
        """Release the core to others."""
        if self.nap:
            time.sleep(self.nap)
        else:
            _yield_core()
        if self.nap or time.perf_counter() - self._start > self._at_once:
            self.nap = min(self.nap + 2e-5, _LONGEST_NAP)

    @property
    def seconds(self) -> float:
        """Return the time since the start."""
        return time.perf_counter() - self._start


def wait_for_message(found: Callable[[], bool], comm: Comm, source: int = MPI.ANY_SOURCE) -> None:
    """Return when `found` is true, which looks for a message of one rank or any; others may compute until then."""
    if not isinstance(comm, MPI.Comm):
        comm.until(found, source)  # under watch: a table of waits shows it
        return
    patience = Backoff()
    while not found():
        patience.pause()


def wait_gently(request: Request) -> None:
    """Wait for a request of MPI's; one under watch has its own wait."""
    if not isinstance(request, MPI.Request):
        request.Wait()
        return
    patience = Backoff()
    while not request.Test():
        patience.pause()
