"""One clock for all ranks: each rank's difference from rank 0's, measured at the start and at the end.

A message there and back, timed on both sides, bounds the difference by half its time; the fastest of several bounds it
best. In between the difference is taken to change evenly, as that of two quartz clocks does.
"""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

import numpy as np

from mpiad._typing import Comm

__all__ = ["Clock", "Reading", "read_clock"]

_TIMES = 10


class Reading(NamedTuple):
    """The difference of rank 0's clock from this one, at a time of this one."""

    time: float
    difference: float


class Clock:
    """Translate this rank's times to those of rank 0's clock."""

    def __init__(self, first: Reading, last: Reading):
        self._first = first
        passed = last.time - first.time
        self._drift = (last.difference - first.difference) / passed if passed > 0 else 0.0

    def __call__(self, time: float) -> float:
        """Return rank 0's time; the order of times is kept."""
        return time + self._first.difference + self._drift * (time - self._first.time)


def read_clock(comm: Comm) -> Reading:
    """Compare this rank's clock with rank 0's; collective."""
    ours, theirs = np.empty(1), np.empty(1)
    if comm.rank != 0:
        for _ in range(_TIMES):
            comm.Recv(theirs, 0)
            ours[0] = perf_counter()
            comm.Send(ours, 0)
        comm.Recv(theirs, 0)
        return Reading(perf_counter(), float(theirs[0]))
    # One rank after the other: messages of two at once would be timed with each other's.
    for rank in range(1, comm.size):
        comm.Send(np.array([min(_round(comm, rank, ours, theirs) for _ in range(_TIMES))[1]]), rank)
    return Reading(perf_counter(), 0.0)


def _round(comm: Comm, rank: int, ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    """Return how long a message there and back takes, and the difference of the clocks in its middle."""
    start = perf_counter()
    comm.Send(ours, rank)
    comm.Recv(theirs, rank)
    end = perf_counter()
    return end - start, (start + end) / 2 - float(theirs[0])
