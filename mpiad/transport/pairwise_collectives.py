"""Collectives of two ranks on long arrays: each sends the part that the other lacks, and combines the received part.

MPI's algorithms for any number of ranks send in small pieces and through memory allocated in each call. Between
two processes of one machine that takes up to three times as long as one exchange. The exchange is a collective, too, so it
meets no message of another kind. For more ranks MPI has better knowledge of the network.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from mpiad._typing import Array, Comm, Op
from mpiad.transport.channels import Channel
from mpiad.transport.device_settings import present
from mpiad.transport.mpi_operations import name_of

# Bytes: shorter ones travel as fast in any way; of very long ones each rank combines a half, and sends the result.
_LONG, _VERY_LONG = 1 << 16, 1 << 20
# Commutative to the last bit; `collectives` handles zeros and NaN.
_FUNCTIONS: dict[str | None, np.ufunc] = {"SUM": np.add, "MAX": np.maximum, "MIN": np.minimum}


def are_two(channel: Channel, whole: Array, op: Op = MPI.SUM) -> bool:
    """Return whether a collective uses these functions, the same on both ranks; `whole` is as long on both."""
    # If a rank may have arrays on a device, all use the general algorithm: the other rank's array may be one.
    settings = present()
    return not (settings.expected or settings.exchanged) and exchanges_pieces(channel, whole, op)


def exchanges_pieces(channel: Channel, whole: Array, op: Op) -> bool:
    """Return whether the pieces of an array, copied to the host, are combined by `allreduce_in_place`."""
    # Not under watch, which identifies calls by their names.
    return (
        channel.size == 2 and whole.nbytes >= _LONG and name_of(op) in _FUNCTIONS and whole.dtype.kind in "iufc"
        and isinstance(channel.data, MPI.Comm)
    )  # fmt: skip


def allgather(comm: Comm, mine: np.ndarray, whole: np.ndarray, counts: list[int]) -> None:
    """Concatenate both ranks' contiguous arrays, of `counts` entries, in `whole`."""
    parts = _cut(whole, counts)
    _swap(comm, mine, parts[1 - comm.rank])
    parts[comm.rank][...] = mine.reshape(-1)


def allreduce(comm: Comm, array: np.ndarray, op: Op) -> np.ndarray:
    """Reduce both ranks' contiguous arrays by an operation that `are_two` allows; the same bits on both."""
    total = np.empty(array.shape, array.dtype)
    if array.nbytes < _VERY_LONG:
        _swap(comm, array, total)
        return _FUNCTIONS[name_of(op)](total, array, out=total)
    halves = [array.size // 2, array.size - array.size // 2]
    parts = _cut(total, halves)
    reduce_scatter(comm, array, parts[comm.rank], halves, op)
    _swap(comm, parts[comm.rank], parts[1 - comm.rank])
    return total


def allreduce_in_place(comm: Comm, array: np.ndarray, op: Op) -> None:
    """Combine both ranks' contiguous arrays in their own memory."""
    parts = _cut(array, [array.size // 2, array.size - array.size // 2])
    mine, others = parts[comm.rank], parts[1 - comm.rank]
    received = np.empty_like(mine)
    _swap(comm, others, received)
    _FUNCTIONS[name_of(op)](mine, received, out=mine)
    _swap(comm, mine, others)


def reduce_scatter(comm: Comm, array: np.ndarray, block: np.ndarray, counts: list[int], op: Op = MPI.SUM) -> None:
    """Combine this rank's part, of `counts` entries, of both ranks' contiguous arrays, and write it to `block`."""
    parts = _cut(array, counts)
    _swap(comm, parts[1 - comm.rank], block)
    total = block.reshape(-1)
    _FUNCTIONS[name_of(op)](total, parts[comm.rank], out=total)


def _cut(array: np.ndarray, counts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    flat = array.reshape(-1)
    return flat[: counts[0]], flat[counts[0] :]


def _swap(comm: Comm, sent: np.ndarray, received: np.ndarray) -> None:
    """Send an array to the other rank, and receive its own."""
    other = 1 - comm.rank
    out, back = [0, 0], [0, 0]
    out[other], back[other] = sent.size, received.size
    comm.Alltoallv([sent, (out, [0, 0])], [received, (back, [0, 0])])
