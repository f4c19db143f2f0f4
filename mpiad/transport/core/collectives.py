"""Collectives on arrays, without derivatives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf, isfinite, prod
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiad._typing import Array, Buffer, Op
from mpiad.transport.core import large_collectives
from mpiad.transport.core.agreement import agreed, fingerprint, raise_first
from mpiad.transport.core.buffers import outgoing
from mpiad.transport.core.channels import Channel
from mpiad.transport.devices.chunked_staging import in_place_transfer, of_whole
from mpiad.transport.devices.device_arrays import Spec, arrays_named, arrays_of, contiguous, copied, result
from mpiad.transport.devices.device_settings import LEAST_CHUNK, divides, exchanges, present
from mpiad.transport.devices.staging import Direct, Staged, communicate, send_buffer, transfer_of

_INTEGER = ("SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR")
_NAMES = (*_INTEGER, "MINLOC", "MAXLOC", "REPLACE", "NO_OP", "OP_NULL")
_OF_KIND = {
    "b": ("LAND", "LOR", "LXOR"),
    "i": _INTEGER,
    "u": _INTEGER,
    "f": ("SUM", "PROD", "MAX", "MIN"),
    "c": ("SUM", "PROD"),
}


def defined_for(kind: str) -> tuple[str, ...]:
    """Return the names of the reductions for a dtype's `kind`; all names if it isn't a number."""
    return _OF_KIND.get(kind, _NAMES)


def name_of(op: Op) -> str | None:
    """Return the name of one of MPI's own reductions, None for a user's reduction."""
    return next((name for name in _NAMES if op == getattr(MPI, name)), None)


class Summation:
    """A pending sum: one request per piece, a function that stores a received piece, and one that returns the result."""

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
            return large_collectives.allreduce(channel, array, op)
        if exchanges(array.nbytes) and name_of(op) == "SUM":
            return large_collectives.exchanged_sum(channel, array)
    if type(array) is np.ndarray:
        out = np.empty(array.shape, array.dtype)
        channel.data.Allreduce(array, out, op)
        return out if array.ndim else out[()]
    return communicate(lambda sent, out: channel.data.Allreduce(sent, out, op), array, Spec.of(array))


def reduce(channel: Channel, x: Array, root: int, call: str) -> Array:
    """Sum the ranks' arrays on the root; return zeros on other ranks."""
    array = outgoing(x, call)
    if divides(array.nbytes):
        return large_collectives.reduce(channel, array, root)
    if exchanges(array.nbytes):
        return large_collectives.exchanged_sum(channel, array, root)
    if channel.rank != root:
        channel.data.Reduce(send_buffer(array), None, MPI.SUM, root)
        return Spec.of(array).zeros()
    return communicate(lambda sent, out: channel.data.Reduce(sent, out, MPI.SUM, root), array, Spec.of(array))


def bcast(channel: Channel, x: Array, spec: Spec, root: int, call: str) -> Array:
    """Return the root's array on all ranks, which know its spec."""
    array = outgoing(x, call) if channel.rank == root else None
    if divides(spec.nbytes):
        if array is None:
            return large_collectives.bcast_to_here(channel, spec, root, present().chunk)
        large_collectives.bcast_from_here(channel, array, present().chunk)
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
        return large_collectives.scan(comm, array, exclusive)
    sums = communicate(comm.Exscan if exclusive else comm.Scan, array, Spec.of(array))
    # In MPI the first rank's exclusive sum is undefined.
    return Spec.of(array).zeros() if exclusive and comm.rank == 0 else sums


def alltoall(channel: Channel, x: Array, call: str) -> Array:
    """Transpose blocks: block s of rank r becomes block r of rank s."""
    array = outgoing(x, call)
    if divides(array.nbytes):
        return large_collectives.alltoall(channel, array)
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
        return _back(large_collectives.gather(channel, array, root, counts, whole), axis)

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
        return _back(large_collectives.scatter(channel, array, root, counts, spec), axis)

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
        return _back(large_collectives.reduce_scatter(channel, array, counts, block), axis)
    if exchanges(array.nbytes):
        return _back(large_collectives.exchanged_reduce_scatter(channel, array, counts, block), axis)
    return _back(communicate(lambda sent, out: channel.data.Reduce_scatter(sent, out, counts, MPI.SUM), array, block), axis)


def _front(array: Array, axis: int | None) -> Array:
    # MPI counts contiguous entries, so the divided axis must come first.
    return array if not axis else contiguous(np.moveaxis(array, axis, 0))


def _back(array: Array, axis: int | None) -> Array:
    return array if not axis else contiguous(np.moveaxis(array, 0, axis))


# Broadcasts with a header that contains the shape and dtype, and also the entries of a small array.
#
# An error of the root (an object instead of an array, a shape that can't be divided) is sent in the header, and all ranks
# raise it.


_WORDS = 128
# Words of a header: dtype, number of dimensions, up to 64 dimensions, device, bytes of a piece; then a small array.
_KIND, _CHUNK, _SHAPE_WORDS = 66, 70, 71
_CODES = ["?", "b", "h", "i", "l", "q", "B", "H", "I", "L", "Q", "f", "d", "F", "D"]  # int64 has two of them
_INLINE_BYTES = 8 * (_WORDS - _SHAPE_WORDS)
_ERROR = -1
_INLINE = -1  # in the place of the bytes of a piece: the array is in the header


def bcast_with_header(channel: Channel, x: Array, root: int, call: str) -> Array:
    """Copy the root's array to all ranks, which needn't know its shape and dtype.

    On other ranks the result is on the device of the template `x`, or on a device like the root's if there is none.
    """
    # The header has a fixed size, since the receivers don't know the size of the array.
    packet = np.zeros(_WORDS, dtype=np.int64)
    if channel.rank == root:
        return _bcast_from_here(channel, x, root, call, packet)
    channel.data.Bcast(packet, root)
    spec = _unpacked(packet, root, x)
    if packet[_CHUNK] > 0:
        return large_collectives.bcast_to_here(channel, spec, root, int(packet[_CHUNK]))
    if packet[_CHUNK] == _INLINE:
        flat = packet[_SHAPE_WORDS:].view(np.uint8)[: spec.nbytes]
        array = flat.view(spec.dtype).reshape(spec.shape)
        return result(array.copy()) if spec.arrays is None else spec.arrays.to_device(array)
    return communicate(lambda _, out: channel.data.Bcast(out, root), None, spec)


def _bcast_from_here(channel: Channel, x: Array, root: int, call: str, packet: np.ndarray) -> Array:
    array = _or_send_error(channel, root, packet, lambda: outgoing(x, call))
    spec = Spec.of(array)
    transfer = transfer_of(spec.arrays)
    _pack(packet, spec)
    # An array that MPI reads on the device isn't copied to the host for the header.
    small = array.nbytes <= _INLINE_BYTES and not isinstance(transfer, Direct)
    if small:
        packet[_CHUNK] = _INLINE
        packet[_SHAPE_WORDS:].view(np.uint8)[: array.nbytes] = transfer.send_buffer(array).reshape(-1).view(np.uint8)
    elif divides(array.nbytes) or (isinstance(transfer, Staged) and array.nbytes > present().chunk):
        packet[_CHUNK] = present().chunk
    channel.data.Bcast(packet, root)
    if packet[_CHUNK] > 0:
        large_collectives.bcast_from_here(channel, array, present().chunk)
    elif not small:
        channel.data.Bcast(transfer.send_buffer(array), root)
    return copied(array)


def agree_on_spec(channel: Channel, make: Callable[[], Spec], root: int, template: object) -> Spec:
    """Broadcast the spec that `make` returns on the root to all ranks, or raise its error on all of them.

    On other ranks it has the device of the template, or a device like the root's if there is none.
    """
    packet = np.zeros(_WORDS, dtype=np.int64)
    if channel.rank != root:
        channel.data.Bcast(packet, root)
        return _unpacked(packet, root, template)
    spec = _or_send_error(channel, root, packet, make)
    _pack(packet, spec)
    channel.data.Bcast(packet, root)
    return spec


def _pack(packet: np.ndarray, spec: Spec) -> None:
    packet[0], packet[1] = _CODES.index(spec.dtype.char), len(spec.shape)
    packet[2 : 2 + len(spec.shape)] = spec.shape
    if spec.arrays is not None:
        packet[_KIND:_CHUNK].view(np.uint8)[:] = np.frombuffer(spec.arrays.name.encode().ljust(32)[:32], np.uint8)


def _unpacked(packet: np.ndarray, root: int, template: object) -> Spec:
    if packet[0] == _ERROR:
        kind, length = (TypeError, ValueError)[packet[1]], packet[2]
        text = packet[3:].view(np.uint8)[:length].tobytes().decode(errors="replace")
        raise kind(f"{text} (raised on the root, rank {root})")
    spec = Spec(tuple(packet[2 : 2 + packet[1]].tolist()), np.dtype(_CODES[packet[0]]))
    if template is not None:
        return spec._replace(arrays=arrays_of(template))
    kind = packet[_KIND:_CHUNK].tobytes().strip(b"\0 ").decode()
    return spec._replace(arrays=arrays_named(kind)) if kind else spec


def _or_send_error(channel: Channel, root: int, packet: np.ndarray, make: Callable[[], Any]) -> Any:
    """Return ``make()``; if it raises, first send the error to the other ranks, which already wait for a header."""
    try:
        return make()
    except (TypeError, ValueError) as error:
        text = np.frombuffer(str(error).encode()[: 8 * (_WORDS - 3)], dtype=np.uint8)
        packet[:3] = _ERROR, isinstance(error, ValueError), len(text)
        packet[3:].view(np.uint8)[: len(text)] = text
        channel.data.Bcast(packet, root)
        raise


def bcast_integers(channel: Channel, values: list[int], root: int) -> list[int]:
    """Copy the root's list, of one integer for each rank, to all ranks."""
    buffer = np.empty(channel.size, dtype=np.int64)
    if channel.rank == root:
        buffer[:] = values
    channel.data.Bcast(buffer, root)
    return buffer.tolist()
