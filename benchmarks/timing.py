"""The shortest of several times of a call, in seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from mpi4py import MPI

SHORT = 1e-3  # seconds


def seconds_of(run: Callable[[], object], rounds: int, comm: MPI.Comm = MPI.COMM_WORLD) -> float:
    """Return the shortest time of a call, in each round that of the slowest rank; all ranks of `comm` call it."""
    times = []
    for _ in range(rounds):
        comm.Barrier()
        start = time.perf_counter()
        run()
        times.append(comm.allreduce(time.perf_counter() - start, MPI.MAX))
    return min(times)


def fastest(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Return the shortest time of each call on this rank; the calls alternate, short ones three times in succession."""
    best = [float("inf")] * len(calls)
    for _ in range(repeats):
        for k, call in enumerate(calls):
            for _ in range(3 if best[k] < SHORT else 1):  # the first finds its code and data outside of the caches
                start = time.perf_counter()
                call()
                best[k] = min(best[k], time.perf_counter() - start)
    return best
