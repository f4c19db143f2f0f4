"""Collectives on arrays, without derivatives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf, isfinite, prod
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiad._typing import Array, Buffer, Op
from mpiad.transport.core import chunked_collectives, exchanged_sums
from mpiad.transport.core.agreement import agreed, fingerprint, raise_first
from mpiad.transport.core.buffers import Spec, contiguous, copied, outgoing
from mpiad.transport.core.channels import Channel
from mpiad.transport.core.mpi_operations import name_of
from mpiad.transport.devices.chunked_staging import in_place_transfer, of_whole
from mpiad.transport.devices.device_arrays import arrays_of
from mpiad.transport.devices.device_settings import LEAST_CHUNK, divides, exchanges, present
from mpiad.transport.devices.staging import communicate, send_buffer, transfer_of


class Summation:
    """A pending sum: MPI's requests, one per piece, and functions that take a piece and return the result."""

    __slots__ = ("_channel", "_requests", "_result", "_take")

    def __init__(
        self, channel: Channel, requests: list[Any], result: Callable[[], Array], take: Callable[[int], Any] | None = None
    ):
        self._channel, self._requests, self._result, self._take = channel, requests, result, take

    def finish(self) -> Array:
        """Wait for the sum and return it."""
        for number, requests in enumerate(self._requests):
            requests[0].Wait()
            self._channel.release(requests)
            if self._take is not None:
                self._take(number)
        return self._result()


def start_allreduce(channel: Channel, array: Array) -> Summation:
    """Start to sum arrays. A host array mustn't be used before the end; a device array is copied."""
    if divides(array.nbytes):
        return _start_in_pieces(channel, array)
    arrays = arrays_of(array)
    transfer = transfer_of(arrays, nonblocking=True)
    destination = transfer.destination(array.shape, array.dtype)
    sent, into = array if arrays is None else transfer.send_copy(array), transfer.recv_buffer(destination)
    requests = channel.begin("reduction", (sent, into, destination), channel.data.Iallreduce, sent, into, MPI.SUM)
    return Summation(channel, [requests], partial(transfer.received, destination))


def _start_in_pieces(channel: Channel, array: Array) -> Summation:
    pieces = of_whole(array.size, array.dtype.itemsize)
    transfer, requests = in_place_transfer(array, pieces, private=True), []
    for number in range(len(pieces)):
        piece = transfer.piece(number)
        requests.append(channel.begin("reduction", piece, channel.data.Iallreduce, MPI.IN_PLACE, piece, MPI.SUM))
    return Summation(channel, requests, transfer.received, transfer.take)


def start_sum_in_place(channel: Channel, array: np.ndarray) -> Summation:
    """Start to sum host arrays in place; they mustn't be used before the end."""
    requests = channel.begin("reduction", array, channel.data.Iallreduce, MPI.IN_PLACE, array, MPI.SUM)
    return Summation(channel, [requests], lambda: array)


def sum_in_place(channel: Channel, array: np.ndarray) -> None:
    """Sum host arrays in place."""
    channel.data.Allreduce(MPI.IN_PLACE, array, MPI.SUM)


# Maxima and minima of floating-point numbers, as in NumPy: a NaN on any rank gives NaN on all.
#
# In MPI the result of MAX and MIN for NaN is undefined and may differ between ranks. Therefore NaN is replaced by the
# infinity that wins: inf for a maximum, -inf for a minimum. If the result doesn't contain it, there was no NaN, and one
# reduction is enough. Otherwise a second reduction finds the entries that were NaN. Zeros in the result are set to 0.0,
# since the order of comparisons decides between 0.0 and -0.0.

_HOST = (np.ndarray, np.generic)


def without_nan(array: Array, op: Op) -> Array:
    """Return a contiguous array with infinities in place of NaN; the array itself if it is known to be finite."""
    if _is_clearly_finite(array):
        return array
    arrays = arrays_of(array)
    out = array.copy() if arrays is None else arrays.copy(array)
    out[np.isnan(array)] = _dominant(op)
    return out


def may_be_nan(found: Array, op: Op) -> bool:
    """Return whether any entry is the infinity that represents NaN."""
    if _is_clearly_finite(found):
        return False
    arrays, reached = arrays_of(found), np.any(found == _dominant(op))
    return bool(reached if arrays is None else arrays.to_host(reached))


def finished(found: Array, nan: Array | None) -> Array:
    """Return a reduced array with NaN at the entries of a flat mask, and zeros set to 0.0; may overwrite the array."""
    found += found.dtype.type(0)  # -0.0 + 0.0 is 0.0
    if nan is None:
        return found
    flat = found.reshape(-1)
    flat[nan] = np.nan
    return flat.reshape(found.shape) if found.shape else flat[0]


def _dominant(op: Op) -> float:
    return inf if op == MPI.MAX else -inf


def _is_clearly_finite(array: Array) -> bool:
    """Return whether a fast test shows that a host array is finite; it may return False for finite arrays, too."""
    if not isinstance(array, _HOST):
        return False
    if array.size == 1:
        return isfinite(array.item() if array.ndim else array)
    # A finite sum of squares implies finite entries. vdot takes a third of the time of isnan and any, and unlike dot it
    # doesn't warn of overflow.
    return isfinite(np.vdot(array, array))


_FAILED = -1
_EMPTY = Spec((0,), np.dtype(float))


def allreduce(channel: Channel, x: Array, op: Op, call: str) -> Array:
    """Reduce the ranks' arrays, with the result on all ranks; maximum and minimum of floats propagate NaN."""
    array = outgoing(x, call)
    if op is MPI.SUM or array.dtype.kind != "f" or op not in (MPI.MAX, MPI.MIN):
        return _combined(channel, array, op)
    found = _combined(channel, without_nan(array, op), op)
    nan = _combined(channel, np.isnan(array.reshape(-1)), MPI.LOR) if may_be_nan(found, op) else None
    return finished(found, nan)


def _combined(channel: Channel, array: Array, op: Op) -> Array:
    if array.nbytes > LEAST_CHUNK:
        if divides(array.nbytes):
            return chunked_collectives.allreduce(channel, array, op)
        if exchanges(array.nbytes) and name_of(op) == "SUM":
            return exchanged_sums.allreduce(channel, array)
    if type(array) is np.ndarray:
        out = np.empty(array.shape, array.dtype)
        channel.data.Allreduce(array, out, op)
        return out if array.ndim else out[()]
    return communicate(lambda sent, out: channel.data.Allreduce(sent, out, op), array, Spec.of(array))


def reduce(channel: Channel, x: Array, root: int, call: str) -> Array:
    """Sum the ranks' arrays on the root; return zeros on other ranks."""
    array = outgoing(x, call)
    if divides(array.nbytes):
        return chunked_collectives.reduce(channel, array, root)
    if exchanges(array.nbytes):
        return exchanged_sums.reduce(channel, array, root)
    if channel.rank != root:
        channel.data.Reduce(send_buffer(array), None, MPI.SUM, root)
        return Spec.of(array).zeros()
    return communicate(lambda sent, out: channel.data.Reduce(sent, out, MPI.SUM, root), array, Spec.of(array))


def bcast(channel: Channel, x: Array, spec: Spec, root: int, call: str) -> Array:
    """Return the root's array on all ranks, which know its spec."""
    array = outgoing(x, call) if channel.rank == root else None
    if divides(spec.nbytes):
        if array is None:
            return chunked_collectives.bcast_to_here(channel, spec, root, present().chunk)
        chunked_collectives.bcast_from_here(channel, array, present().chunk)
        return copied(array)
    if array is not None:
        channel.data.Bcast(send_buffer(array), root)
        return copied(array)
    return communicate(lambda _, out: channel.data.Bcast(out, root), None, spec)


def scan(channel: Channel, x: Array, exclusive: bool, backwards: bool, call: str) -> Array:
    """Return the sum over this rank and all lower ranks (higher, if `backwards`); if `exclusive`, without this rank."""
    array = outgoing(x, call)
    # Suffix sums are prefix sums over the ranks in reverse order.
    comm = channel.backwards() if backwards else channel.data
    if divides(array.nbytes):
        return chunked_collectives.scan(comm, array, exclusive)
    sums = communicate(comm.Exscan if exclusive else comm.Scan, array, Spec.of(array))
    # In MPI the first rank's exclusive sum is undefined.
    return Spec.of(array).zeros() if exclusive and comm.rank == 0 else sums


def alltoall(channel: Channel, x: Array, call: str) -> Array:
    """Transpose blocks: block s of rank r becomes block r of rank s."""
    array = outgoing(x, call)
    if divides(array.nbytes):
        return chunked_collectives.alltoall(channel, array)
    return communicate(channel.data.Alltoall, array, Spec.of(array))


def lengths_of_all(channel: Channel, like: Spec, axis: int | None, call: str, wrong: Exception | None = None) -> list[int]:
    """Return the ranks' lengths along `axis` for a gather, 1 each if arrays are stacked; collective.

    `like`: the spec of this rank's array. `wrong`: an error of this rank, which all ranks raise. Raises a ValueError on
    all ranks if other dimensions or dtypes differ between ranks.
    """
    if wrong is not None:
        like, axis = _EMPTY, None  # a rank with an error takes part in the communication, too
    shape, dtype = like.shape, like.dtype
    piece = (shape if axis is None else shape[:axis] + shape[axis + 1 :], dtype.str)
    mine = np.array([1 if axis is None else shape[axis], fingerprint(*piece)], dtype=np.int64)
    every = np.empty((channel.size, 2), dtype=np.int64)
    if wrong is not None:
        mine[0] = _FAILED
    channel.data.Allgather(mine, every)
    if (every[:, 0] == _FAILED).any():
        raise_first(channel, wrong)
    if (every[:, 1] != every[0, 1]).any():
        shapes = channel.data.allgather(f"{shape} {dtype}")
        listed = ", ".join(f"rank {rank}: {shape}" for rank, shape in enumerate(shapes))
        free = "must be equal on all ranks" if axis is None else f"may differ along axis {axis} only"
        raise agreed(channel, ValueError(f"{call}: shapes and dtypes {free}, but got {listed}."))
    return every[:, 0].tolist()


def gather(channel: Channel, x: Array, root: int | None, axis: int | None, lengths: list[int], call: str) -> Array:
    """Stack (`axis` None) or concatenate the ranks' arrays on the root, or on all ranks if `root` is None."""
    array = _front(outgoing(x, call), axis)
    rest = array.shape if axis is None else array.shape[1:]
    mine = root is None or channel.rank == root
    whole = Spec(((sum(lengths) if mine else 0), *rest), array.dtype, arrays_of(array))
    counts = [length * prod(rest) for length in lengths]
    if divides(sum(counts) * array.dtype.itemsize):
        return _back(chunked_collectives.gather(channel, array, root, counts, whole), axis)

    def collect(sent: Buffer, out: Buffer) -> None:
        if root is None:
            channel.data.Allgatherv(sent, [out, counts])
        else:
            channel.data.Gatherv(sent, [out, counts] if mine else None, root)

    return _back(communicate(collect, array, whole), axis)


def scatter(
    channel: Channel, x: Array, root: int | None, axis: int | None, lengths: list[int], piece: Spec, call: str
) -> Array:
    """Return this rank's piece of the root's array; every rank knows the spec of its own piece."""
    shape = piece.shape if axis is None else (piece.shape[axis], *piece.shape[:axis], *piece.shape[axis + 1 :])
    array = _front(outgoing(x, call), axis) if channel.rank == root else None
    spec, counts = piece._replace(shape=shape), [length * prod(shape if axis is None else shape[1:]) for length in lengths]
    if divides(sum(counts) * piece.dtype.itemsize):
        return _back(chunked_collectives.scatter(channel, array, root, counts, spec), axis)

    def distribute(sent: Buffer | None, out: Buffer) -> None:
        channel.data.Scatterv(None if sent is None else [sent, counts], out, root)

    return _back(communicate(distribute, array, spec), axis)


def reduce_scatter(channel: Channel, x: Array, axis: int | None, lengths: list[int], call: str) -> Array:
    """Sum the ranks' arrays, and return this rank's piece of the sum."""
    array = _front(outgoing(x, call), axis)
    rest = array.shape[1:]
    block = Spec(rest if axis is None else (lengths[channel.rank], *rest), array.dtype, arrays_of(array))
    counts = [length * prod(rest) for length in lengths]
    if divides(array.nbytes):
        return _back(chunked_collectives.reduce_scatter(channel, array, counts, block), axis)
    if exchanges(array.nbytes):
        return _back(exchanged_sums.reduce_scatter(channel, array, counts, block), axis)
    return _back(communicate(lambda sent, out: channel.data.Reduce_scatter(sent, out, counts, MPI.SUM), array, block), axis)


def _front(array: Array, axis: int | None) -> Array:
    # MPI counts contiguous entries, so the divided axis must come first.
    return array if not axis else contiguous(np.moveaxis(array, axis, 0))


def _back(array: Array, axis: int | None) -> Array:
    return array if not axis else contiguous(np.moveaxis(array, 0, axis))
