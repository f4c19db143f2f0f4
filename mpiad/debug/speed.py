"""How fast messages are: a look, not a benchmark."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import numpy as np

from mpiad._typing import Comm
from mpiad.transport import Channel
from mpiad.transport.channels import make_communicator

_LARGE = 4 << 20  # bytes
_ENOUGH = 0.15  # seconds for each kind


class Speed(NamedTuple):
    """Times of messages."""

    latency: float  # seconds that 8 bytes take from rank 0 to rank 1
    bandwidth: float  # bytes per second of 4 MB between them
    allreduce: float  # seconds of a reduction of 8 bytes over all ranks

    def __str__(self) -> str:
        return (
            f"8 bytes from rank 0 to 1 in {1e6 * self.latency:.1f} µs, 4 MB at {1e-9 * self.bandwidth:.1f} GB/s; "
            f"allreduce of 8 bytes in {1e6 * self.allreduce:.1f} µs"
        )


def speed_of(channel: Channel) -> Speed | None:
    """Measure the messages of a communicator: the same result on all ranks, None for a single one; collective."""
    if channel.size == 1:
        return None
    # On a duplicate of its own: no message of the program's may meet these.
    comm = make_communicator(channel.user.Dup)
    try:
        small, large = (_fastest(comm, _ping_pong, np.zeros(count)) / 2 for count in (1, _LARGE // 8))
        reduction = _fastest(comm, lambda comm, array: comm.Allreduce(array, np.empty_like(array)), np.zeros(1))
        return comm.bcast(Speed(small, _LARGE / large, reduction), 0)
    finally:
        comm.Free()


def _fastest(comm: Comm, exchange: Callable[[Comm, np.ndarray], object], array: np.ndarray) -> float:
    """Return the shortest of several times; rank 0 says how many there will be, by how long the first ones take."""
    start = perf_counter()
    for _ in range(3):
        exchange(comm, array)
    count = comm.bcast(max(3, min(1000, int(_ENOUGH / (perf_counter() - start) * 3))), 0)
    times = np.empty(count)
    for k in range(count):
        start = perf_counter()
        exchange(comm, array)
        times[k] = perf_counter() - start
    return float(times.min())


def _ping_pong(comm: Comm, array: np.ndarray) -> None:
    if comm.rank == 0:
        comm.Send(array, 1)
        comm.Recv(array, 1)
    elif comm.rank == 1:
        comm.Recv(array, 0)
        comm.Send(array, 0)
