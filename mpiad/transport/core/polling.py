"""Waiting without occupying the core, which other ranks may need."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from mpi4py import MPI

from mpiad._typing import Comm, Request

# Ranks often outnumber cores; MPI's own wait would occupy the core of another rank.
_AT_ONCE = 0.01
_LONGEST_NAP = 1e-3
_yield_core = getattr(os, "sched_yield", lambda: time.sleep(0))  # a sleep takes up to 100 µs, 100 times as long


class Backoff:
    """Increasing pauses during a wait; in the first `at_once` seconds zero. `nap`: the length of the next pause."""

    __slots__ = ("_at_once", "_start", "nap")

    def __init__(self, at_once: float = _AT_ONCE) -> None:
        self._at_once = at_once
        self.renew()

    def renew(self) -> None:
        """Begin again, since something has arrived."""
        self._start, self.nap = time.perf_counter(), 0.0

    def pause(self) -> None:
        """Sleep, or yield the core to another process."""
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
    """Wait until ``found()``, which probes for a message from `source`, returns true."""
    if not isinstance(comm, MPI.Comm):
        comm.until(found, source)  # a guarded communicator shows the wait in deadlock reports
        return
    patience = Backoff()
    while not found():
        patience.pause()


def wait_gently(request: Request) -> None:
    """Wait for a request; a guarded request has its own wait."""
    if not isinstance(request, MPI.Request):
        request.Wait()
        return
    patience = Backoff()
    while not request.Test():
        patience.pause()
