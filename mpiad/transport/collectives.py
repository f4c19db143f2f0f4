"""Collectives on arrays, without derivatives: shapes are agreed where the caller can't know them."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from mpiad._typing import Array, Op
from mpiad.transport import device_settings, pieces
from mpiad.transport.agreement import raise_first
from mpiad.transport.buffers import Spec, contiguous, copied, outgoing
from mpiad.transport.channels import Channel
from mpiad.transport.device_arrays import ArrayModule, arrays_of
from mpiad.transport.staging import HOST, Way, in_pieces, way_of

__all__ = [
    "allreduce", "alltoall", "barrier", "bcast", "gather", "lengths_of_all", "reduce", "reduce_scatter",
    "scan", "scatter", "Summation", "finish_allreduce", "start_allreduce", "start_sum_in_place", "sum_in_place",
]


_WRONG = -1
_NOTHING = np.zeros(0)


def allreduce(channel: Channel, x: Array, op: Op, call: str) -> Array:
    """Combine every rank's array, with the result on all ranks."""
    array = outgoing(x, call)
    if type(array) is not np.ndarray:
        return _allreduce_on_device(channel, array, op)
    out = np.empty(array.shape, array.dtype)
    channel.data.Allreduce(array, out, op)
    return out if array.ndim else out[()]


def _allreduce_on_device(channel: Channel, array: Array, op: Op) -> Array:
    arrays = arrays_of(array)
    divided = in_pieces(channel, array.nbytes, arrays)
    if divided is not None:
        return pieces.allreduce(channel, divided, array, op)
    way = way_of(channel, arrays)
    room = way.room(array.shape, array.dtype)
    channel.data.Allreduce(way.lent(array), way.buffer(room), op)
    return way.home(room)


def reduce(channel: Channel, x: Array, op: Op, root: int, call: str, mixed: bool = False) -> Array:
    """Combine every rank's array on the root; zeros elsewhere. `mixed`: some ranks' arrays may lie on the host."""
    array = outgoing(x, call)
    if type(array) is not np.ndarray:
        return _reduce_on_device(channel, array, op, root, mixed)
    out = np.empty(array.shape, array.dtype) if channel.rank == root else np.zeros(array.shape, array.dtype)
    channel.data.Reduce(array, out if channel.rank == root else None, op, root)
    return out if array.ndim else out[()]


def _reduce_on_device(channel: Channel, array: Array, op: Op, root: int, mixed: bool) -> Array:
    arrays = arrays_of(array)
    divided = None if mixed else in_pieces(channel, array.nbytes, arrays)
    if divided is not None:
        return pieces.reduce(channel, divided, array, op, root)
    way = way_of(channel, arrays)
    # Room on the device is made on the root alone.
    if channel.rank != root:
        channel.data.Reduce(way.lent(array), None, op, root)
        return Spec(array.shape, array.dtype, arrays).zeros()
    room = way.room(array.shape, array.dtype)
    channel.data.Reduce(way.lent(array), way.buffer(room), op, root)
    return way.home(room)


def bcast(channel: Channel, x: Array, spec: Spec, root: int, call: str, mixed: bool = False) -> Array:
    """Copy the root's array, of a spec that all ranks know, to all ranks. `mixed` as in `reduce`."""
    divided = None if mixed else in_pieces(channel, spec.nbytes, spec.arrays)
    if divided is not None:
        return _bcast_in_pieces(channel, divided, x, spec, root, call)
    way = way_of(channel, spec.arrays)
    if channel.rank == root:
        array = outgoing(x, call)
        channel.data.Bcast(way.lent(array), root)
        return copied(array)
    room = way.room(spec.shape, spec.dtype)
    channel.data.Bcast(way.buffer(room), root)
    return way.home(room)


def _bcast_in_pieces(channel: Channel, arrays: ArrayModule, x: Array, spec: Spec, root: int, call: str) -> Array:
    if channel.rank != root:
        return pieces.bcast_to_here(channel, spec, root, device_settings.present().chunk)
    array = outgoing(x, call)
    pieces.bcast_from_here(channel, arrays, array)
    return copied(array)


def scan(channel: Channel, x: Array, exclusive: bool, backwards: bool, call: str) -> Array:
    """Sum over the ranks before this one (after it, where `backwards`), with its own unless `exclusive`."""
    array = outgoing(x, call)
    way = way_of(channel, arrays_of(array))
    room = way.room(array.shape, array.dtype)
    # MPI has no suffix sums: on the ranks in reverse order they are prefix sums.
    comm = channel.backwards() if backwards else channel.data
    (comm.Exscan if exclusive else comm.Scan)(way.lent(array), way.buffer(room), MPI.SUM)
    if exclusive and comm.rank == 0:
        # MPI leaves the first rank's exclusive sum undefined, and some write to it all the same.
        return Spec(array.shape, array.dtype, arrays_of(array)).zeros()
    return way.home(room)


def alltoall(channel: Channel, x: Array, call: str) -> Array:
    """Transpose blocks: block s of rank r becomes block r of rank s."""
    array = outgoing(x, call)
    way = way_of(channel, arrays_of(array))
    room = way.room(array.shape, array.dtype)
    channel.data.Alltoall(way.lent(array), way.buffer(room))
    return way.home(room)


def barrier(channel: Channel) -> None:
    """Wait for all ranks."""
    channel.data.Barrier()


def lengths_of_all(
    channel: Channel, array: np.ndarray, axis: int | None, call: str, wrong: Exception | None = None
) -> list[int]:
    """Agree on the pieces of a gather: each rank's length along `axis`, 1 each where they are stacked.

    Raises
    ------
    ValueError
        On all ranks, where their other dimensions or their dtypes differ.
    Exception
        On all ranks, where one has found `wrong` arguments: the others must not wait for it.
    """
    if wrong is not None:
        array, axis = _NOTHING, None  # it takes part all the same: the others are on their way to the same call
    piece = (array.shape if axis is None else array.shape[:axis] + array.shape[axis + 1 :], array.dtype.str)
    mine = np.array([1 if axis is None else array.shape[axis], _fingerprint(piece)], dtype=np.int64)
    every = np.empty((channel.size, 2), dtype=np.int64)
    if wrong is not None:
        mine[0] = _WRONG
    channel.data.Allgather(mine, every)
    if (every[:, 0] == _WRONG).any():
        raise_first(channel, wrong)
    if (every[:, 1] != every[0, 1]).any():
        shapes = channel.data.allgather(f"{array.shape} {array.dtype}")
        listed = ", ".join(f"rank {rank}: {shape}" for rank, shape in enumerate(shapes))
        free = "must be equal on all ranks" if axis is None else f"may differ along axis {axis} only"
        raise ValueError(f"{call}: shapes and dtypes {free}, but got {listed}.")
    return every[:, 0].tolist()


def _fingerprint(piece: tuple[Any, str]) -> int:
    # Python's hash of strings differs from process to process; this one must not.
    text = repr(piece).encode()
    # The rule of FNV-1a, cut to 63 bits: MPI compares signed integers.
    value = 1469598103934665603
    for byte in text:
        value = ((value ^ byte) * 1099511628211) & 0x7FFFFFFFFFFFFFFF
    return value


def gather(channel: Channel, x: Array, root: int | None, axis: int | None, lengths: list[int], call: str) -> Array:
    """Stack (`axis` None) or concatenate every rank's array on the root, or on all ranks where `root` is None."""
    array = _front(outgoing(x, call), axis)
    rest = array.shape if axis is None else array.shape[1:]
    mine = root is None or channel.rank == root
    way = way_of(channel, arrays_of(array))
    room = way.room(((sum(lengths) if mine else 0), *rest), array.dtype)
    counts = [length * _count(rest) for length in lengths]
    if root is None:
        channel.data.Allgatherv(way.lent(array), [way.buffer(room), counts])
    else:
        channel.data.Gatherv(way.lent(array), [way.buffer(room), counts] if mine else None, root)
    return _back(way.home(room), axis)


def scatter(
    channel: Channel, x: Array, root: int | None, axis: int | None, lengths: list[int], piece: Spec, call: str
) -> Array:
    """Give each rank its piece of the root's array; every rank knows the spec of its own piece."""
    shape = piece.shape if axis is None else (piece.shape[axis], *piece.shape[:axis], *piece.shape[axis + 1 :])
    way, whole = way_of(channel, piece.arrays), None
    room = way.room(shape, piece.dtype)
    if channel.rank == root:
        array = _front(outgoing(x, call), axis)
        counts = [length * _count(array.shape[1:]) for length in lengths]
        whole = [way_of(channel, arrays_of(array)).lent(array), counts]
    channel.data.Scatterv(whole, way.buffer(room), root)
    return _back(way.home(room), axis)


def reduce_scatter(channel: Channel, x: Array, axis: int | None, lengths: list[int], call: str) -> Array:
    """Sum every rank's array and give each rank its piece of the sum."""
    array = _front(outgoing(x, call), axis)
    rest = array.shape[1:]
    way = way_of(channel, arrays_of(array))
    room = way.room(rest if axis is None else (lengths[channel.rank], *rest), array.dtype)
    counts = [length * _count(rest) for length in lengths]
    channel.data.Reduce_scatter(way.lent(array), way.buffer(room), counts, MPI.SUM)
    return _back(way.home(room), axis)


def _front(array: Array, axis: int | None) -> Array:
    # MPI counts in contiguous entries, so the divided axis comes first while it travels.
    return array if not axis else contiguous(np.moveaxis(array, axis, 0))


def _back(array: Array, axis: int | None) -> Array:
    return array if not axis else contiguous(np.moveaxis(array, 0, axis))


def _count(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape)) if shape else 1


class Summation:
    """A reduction under way, and the room for its result."""

    __slots__ = ("channel", "request", "room", "way")

    def __init__(self, channel: Channel, way: Way, room: Any, request: Any):
        self.channel, self.way, self.room, self.request = channel, way, room, request


def start_allreduce(channel: Channel, array: Array) -> Summation:
    """Start to add up arrays; on the host, such as nobody changes meanwhile, and on devices copies."""
    arrays = arrays_of(array)
    way = way_of(channel, arrays)
    room = way.room(array.shape, array.dtype)
    sent, into = array if arrays is None else way.copied(array), way.buffer(room)
    request = channel.data.Iallreduce(sent, into, MPI.SUM)
    channel.hold("reduction", request, (sent, into, room))
    return Summation(channel, way, room, request)


def start_sum_in_place(channel: Channel, array: np.ndarray) -> Summation:
    """Start to add up arrays in their own memory, which nobody uses meanwhile."""
    request = channel.data.Iallreduce(MPI.IN_PLACE, array, MPI.SUM)
    channel.hold("reduction", request, array)
    return Summation(channel, HOST, array, request)


def sum_in_place(channel: Channel, array: np.ndarray) -> None:
    """Add up arrays in their own memory."""
    channel.data.Allreduce(MPI.IN_PLACE, array, MPI.SUM)


def finish_allreduce(summation: Summation) -> Array:
    """Wait for the sum and return it."""
    summation.request.Wait()
    summation.channel.release(summation.request)
    return summation.way.home(summation.room)
