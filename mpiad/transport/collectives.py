"""Collectives on arrays, without derivatives: shapes are agreed where the caller can't know them."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from mpiad._typing import Array, Op
from mpiad.transport.agreement import raise_first
from mpiad.transport.buffers import Spec, outgoing, result
from mpiad.transport.channels import Channel

__all__ = [
    "allreduce", "alltoall", "barrier", "bcast", "gather", "lengths_of_all", "reduce", "reduce_scatter",
    "scan", "scatter", "Summation", "finish_allreduce", "start_allreduce", "start_sum_in_place", "sum_in_place",
]


_WRONG = -1
_NOTHING = np.zeros(0)


def allreduce(channel: Channel, x: Array, op: Op, call: str) -> Array:
    """Combine every rank's array, with the result on all ranks."""
    array = outgoing(x, call)
    out = np.empty(array.shape, array.dtype)
    channel.data.Allreduce(array, out, op)
    return out if array.ndim else out[()]


def reduce(channel: Channel, x: Array, op: Op, root: int, call: str) -> Array:
    """Combine every rank's array on the root; zeros elsewhere."""
    array = outgoing(x, call)
    if channel.rank != root:
        channel.data.Reduce(array, None, op, root)
        return result(np.zeros(array.shape, array.dtype))
    out = np.empty(array.shape, array.dtype)
    channel.data.Reduce(array, out, op, root)
    return result(out)


def bcast(channel: Channel, x: Array, spec: Spec, root: int, call: str) -> Array:
    """Copy the root's array, of a spec that all ranks know, to all ranks."""
    if channel.rank == root:
        array = outgoing(x, call)
        channel.data.Bcast(array, root)
        return result(array.copy())
    out = spec.empty()
    channel.data.Bcast(out, root)
    return result(out)


def scan(channel: Channel, x: Array, exclusive: bool, backwards: bool, call: str) -> Array:
    """Sum over the ranks before this one (after it, where `backwards`), with its own unless `exclusive`."""
    array = outgoing(x, call)
    out = np.zeros(array.shape, array.dtype)  # MPI leaves the first rank's exclusive sum undefined
    comm = channel.backwards() if backwards else channel.data
    (comm.Exscan if exclusive else comm.Scan)(array, out, MPI.SUM)
    if exclusive and comm.rank == 0:
        out[...] = 0  # some MPIs write to it all the same
    return result(out)


def alltoall(channel: Channel, x: Array, call: str) -> Array:
    """Transpose blocks: block s of rank r becomes block r of rank s."""
    array = outgoing(x, call)
    out = np.empty_like(array)
    channel.data.Alltoall(array, out)
    return out


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
        array, axis = _NOTHING, None
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
    value = 1469598103934665603
    for byte in text:
        value = ((value ^ byte) * 1099511628211) & 0x7FFFFFFFFFFFFFFF
    return value


def gather(channel: Channel, x: Array, root: int | None, axis: int | None, lengths: list[int], call: str) -> Array:
    """Stack (`axis` None) or concatenate every rank's array on the root, or on all ranks where `root` is None."""
    array = _front(outgoing(x, call), axis)
    rest = array.shape if axis is None else array.shape[1:]
    mine = root is None or channel.rank == root
    out = np.empty(((sum(lengths) if mine else 0), *rest), array.dtype)
    counts = [length * _count(rest) for length in lengths]
    if root is None:
        channel.data.Allgatherv(array, [out, counts])
    else:
        channel.data.Gatherv(array, [out, counts] if mine else None, root)
    return _back(out, axis)


def scatter(
    channel: Channel, x: Array, root: int | None, axis: int | None, lengths: list[int], piece: Spec, call: str
) -> Array:
    """Give each rank its piece of the root's array; every rank knows the spec of its own piece."""
    shape = piece.shape if axis is None else (piece.shape[axis], *piece.shape[:axis], *piece.shape[axis + 1 :])
    out, whole = np.empty(shape, piece.dtype), None
    if channel.rank == root:
        array = _front(outgoing(x, call), axis)
        counts = [length * _count(array.shape[1:]) for length in lengths]
        whole = [array, counts]
    channel.data.Scatterv(whole, out, root)
    return result(_back(out, axis)) if axis is not None else result(out)


def reduce_scatter(channel: Channel, x: Array, axis: int | None, lengths: list[int], call: str) -> Array:
    """Sum every rank's array and give each rank its piece of the sum."""
    array = _front(outgoing(x, call), axis)
    rest = array.shape[1:]
    mine = rest if axis is None else (lengths[channel.rank], *rest)
    out = np.empty(mine, array.dtype)
    channel.data.Reduce_scatter(array, out, [length * _count(rest) for length in lengths], MPI.SUM)
    return result(out) if axis is None else _back(out, axis)


def _front(array: np.ndarray, axis: int | None) -> np.ndarray:
    # MPI counts in contiguous entries, so the divided axis comes first while it travels.
    return array if not axis else np.ascontiguousarray(np.moveaxis(array, axis, 0))


def _back(array: np.ndarray, axis: int | None) -> np.ndarray:
    return array if not axis else np.ascontiguousarray(np.moveaxis(array, 0, axis))


def _count(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape)) if shape else 1


class Summation:
    """A reduction under way and its result."""

    __slots__ = ("channel", "out", "request")

    def __init__(self, channel: Channel, out: np.ndarray, request: Any):
        self.channel, self.out, self.request = channel, out, request


def start_allreduce(channel: Channel, array: np.ndarray) -> Summation:
    """Start to add up arrays that nobody changes meanwhile."""
    out = np.empty(array.shape, array.dtype)
    request = channel.data.Iallreduce(array, out, MPI.SUM)
    channel.hold("reduction", request, (array, out))
    return Summation(channel, out, request)


def start_sum_in_place(channel: Channel, array: np.ndarray) -> Summation:
    """Start to add up arrays in their own memory, which nobody uses meanwhile."""
    request = channel.data.Iallreduce(MPI.IN_PLACE, array, MPI.SUM)
    channel.hold("reduction", request, array)
    return Summation(channel, array, request)


def sum_in_place(channel: Channel, array: np.ndarray) -> None:
    """Add up arrays in their own memory."""
    channel.data.Allreduce(MPI.IN_PLACE, array, MPI.SUM)


def finish_allreduce(summation: Summation) -> Array:
    """Wait for the sum and return it."""
    summation.request.Wait()
    summation.channel.release(summation.request)
    return result(summation.out)
