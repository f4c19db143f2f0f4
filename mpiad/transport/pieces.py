"""Collectives on large arrays of a device, piece by piece: one piece is copied while another one travels.

All copies to the host are queued at once, on the stream for copies, with an event behind each piece. The host waits for
a piece's event, gives the piece to MPI, and queues its copy back on the current stream. Pieces are those of the flat
array, all of the same number of entries but the last, so the ranks need to agree on the size of a piece alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpiad._typing import Array, Op
from mpiad.transport import device_settings
from mpiad.transport.channels import Channel
from mpiad.transport.device_arrays import ArrayModule
from mpiad.transport.pinned import Loan, pool_of

__all__ = ["Departing", "allreduce", "arriving", "bcast_from_here", "bcast_to_here", "bounds", "depart", "reduce"]

_LARGEST_ENTRY = 16  # bytes, of a complex128


def bounds(size: int, itemsize: int, chunk: int | None = None) -> list[tuple[int, int]]:
    """Return where the pieces of an array of so many entries begin and end; `chunk` is the most bytes of one."""
    chunk = device_settings.present().chunk if chunk is None else chunk
    step = (chunk - chunk % _LARGEST_ENTRY) // itemsize  # whole entries of any dtype
    return [(start, min(start + step, size)) for start in range(0, size, step)]


class Departing(NamedTuple):
    """An array on its way to the host: its flat pieces, and the events behind them.

    Attributes
    ----------
    array : ndarray
        All of it, in page-locked memory.
    pieces : list of (int, int, event)
    """

    arrays: ArrayModule
    loan: Loan
    array: np.ndarray
    pieces: list[tuple[int, int, Any]]

    def arrived(self) -> Iterator[np.ndarray]:
        """Return the pieces one by one, each when it is there."""
        flat = self.array.reshape(-1)
        for start, end, event in self.pieces:
            self.arrays.wait(event)
            yield flat[start:end]


def depart(arrays: ArrayModule, array: Array) -> Departing:
    """Queue the copies of all pieces to the host."""
    loan = pool_of(arrays).lend(array.nbytes)
    host, flat, ready = loan.array(array.shape, array.dtype), array.reshape(-1), arrays.record()
    pieces = []
    with arrays.copying_stream():
        arrays.wait_on_device(ready)  # the array may still be computed, on the stream of the arithmetic
        for start, end in bounds(array.size, array.dtype.itemsize):
            arrays.copy_to_host(flat[start:end], host.reshape(-1)[start:end])
            pieces.append((start, end, arrays.record()))
        # Whoever borrows the memory next waits for the last copy: an exception may end the waiting for pieces.
        loan.written = pieces[-1][2]
    return Departing(arrays, loan, host, pieces)


class arriving:
    """An array on its way to the device, of whose pieces the host has some.

    Parameters
    ----------
    arrays : ArrayModule
    loan : Loan
    host : ndarray
        In its memory.
    """

    def __init__(self, arrays: ArrayModule, loan: Loan, host: np.ndarray):
        self.arrays, self._loan, self._host = arrays, loan, host.reshape(-1)
        self.array = arrays.empty(host.shape, host.dtype)
        self._flat = self.array.reshape(-1)

    def take(self, start: int, end: int) -> None:
        """Queue the copy of one piece to the device."""
        self.arrays.copy_to_device(self._host[start:end], self._flat[start:end])
        self._loan.read = self.arrays.record()


def allreduce(channel: Channel, arrays: ArrayModule, array: Array, op: Op) -> Array:
    """Combine every rank's array, with the result on all ranks."""
    going = depart(arrays, array)
    coming = arriving(arrays, going.loan, going.array)
    for (start, end, _), piece in zip(going.pieces, going.arrived()):
        channel.data.Allreduce(MPI.IN_PLACE, piece, op)
        coming.take(start, end)
    return coming.array


def reduce(channel: Channel, arrays: ArrayModule, array: Array, op: Op, root: int) -> Array:
    """Combine every rank's array on the root; zeros elsewhere."""
    going = depart(arrays, array)
    if channel.rank != root:
        for piece in going.arrived():
            channel.data.Reduce(piece, None, op, root)
        return arrays.full(array.shape, 0, array.dtype)
    coming = arriving(arrays, going.loan, going.array)
    for (start, end, _), piece in zip(going.pieces, going.arrived()):
        channel.data.Reduce(MPI.IN_PLACE, piece, op, root)
        coming.take(start, end)
    return coming.array


def bcast_from_here(channel: Channel, arrays: ArrayModule, array: Array) -> None:
    """Copy this rank's array to all ranks."""
    for piece in depart(arrays, array).arrived():
        channel.data.Bcast(piece, channel.rank)


def bcast_to_here(channel: Channel, spec: Any, root: int, chunk: int) -> Array:
    """Return the root's array, which comes in pieces of so many bytes, in the place that the spec says."""
    parts = bounds(int(np.prod(spec.shape)), spec.dtype.itemsize, chunk)
    if spec.arrays is None:
        out = np.empty(spec.shape, spec.dtype)
        for start, end in parts:
            channel.data.Bcast(out.reshape(-1)[start:end], root)
        return out
    loan = pool_of(spec.arrays).lend(spec.nbytes)
    host = loan.array(spec.shape, spec.dtype)
    coming = arriving(spec.arrays, loan, host)
    for start, end in parts:
        channel.data.Bcast(host.reshape(-1)[start:end], root)
        coming.take(start, end)
    return coming.array
