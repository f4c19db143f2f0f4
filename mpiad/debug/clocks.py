"""One clock for all ranks: each rank's difference from rank 0's, measured at the start and at the end.

A message there and back, timed on both sides, bounds the difference from below by its way there and from above by its way
back; the fastest says best where in between. On a busy machine most of them wait for a core, but hardly all on the same
way: so the bounds of many are put together, until more don't make them narrower. Processes of one machine have one clock,
and between those of two machines lie hours: where the difference may be zero, it is. In between the two readings it is
taken to change evenly, as that of two quartz clocks does.
"""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

import numpy as np

from mpiad._typing import Comm

_TIMES, _MOST = 10, 200  # messages at a time, and in all


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
    if comm.rank == 0:
        # One rank after the other: messages of two at once would be timed with each other's.
        for rank in range(1, comm.size):
            comm.Send(np.array([0.0, _difference(comm, rank)]), rank)
        return Reading(perf_counter(), 0.0)
    asked, now = np.empty(2), np.empty(1)
    while True:
        comm.Recv(asked, 0)
        now[0] = perf_counter()
        if not asked[0]:
            return Reading(float(now[0]), float(asked[1]))
        comm.Send(now, 0)


def _difference(comm: Comm, rank: int) -> float:
    """Return how far rank 0's clock is ahead of another rank's."""
    asked, theirs = np.ones(2), np.empty(1)
    low, high, fastest = -np.inf, np.inf, (np.inf, 0.0)
    for count in range(_TIMES, _MOST + 1, _TIMES):
        before = high - low
        for _ in range(_TIMES):
            start = perf_counter()
            comm.Send(asked, rank)
            comm.Recv(theirs, rank)
            end = perf_counter()
            low, high = max(low, start - theirs[0]), min(high, end - theirs[0])
            fastest = min(fastest, (end - start, (start + end) / 2 - float(theirs[0])))
        if count > _TIMES and high - low > 0.9 * before:
            break
    return 0.0 if low <= 0 <= high else float(np.clip(fastest[1], low, high))
