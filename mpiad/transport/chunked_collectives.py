"""Collectives on large arrays, cut alike on all ranks: on devices one piece is copied while another one travels.

A rank whose array lies on the host makes the same calls on parts of it, so the ranks' arrays may lie anywhere.
"""

from __future__ import annotations

from collections.abc import Callable

from mpi4py import MPI

from mpiad._typing import Array, Comm, Op
from mpiad.transport.buffers import Spec
from mpiad.transport.channels import Channel
from mpiad.transport.chunked_staging import (
    ChunkedTransfer,
    Ranges,
    arriving,
    departing,
    of_block,
    of_blocks,
    of_whole,
    passing,
)
from mpiad.transport.device_arrays import arrays_of


def _cut(array: Array, chunk: int | None = None) -> list[Ranges]:
    return of_whole(array.nbytes // array.dtype.itemsize, array.dtype.itemsize, chunk)


def _like(array: Array) -> Spec:
    return Spec(array.shape, array.dtype, arrays_of(array))


def compare(comm: Comm, step: str, array: Array, op: Op | None = None, root: int | None = None) -> None:
    """Have the ranks compare the whole under watch: MPI sees pieces, and would wait for those that others don't have."""
    if getattr(comm, "agreement", None) is not None:
        comm.agree(step, array, op, root)


def _passed(passage: ChunkedTransfer, count: int, call: Callable[[int], object]) -> Array:
    """Make `count` calls, one for each piece, which MPI writes, and return their array."""
    for number in range(count):
        call(number)
        passage.take(number)
    return passage.home()


def allreduce(channel: Channel, array: Array, op: Op) -> Array:
    """Combine every rank's array, with the result on all ranks."""
    compare(channel.data, "Allreduce", array, op)
    pieces = _cut(array)
    passage = passing(array, pieces)
    return _passed(passage, len(pieces), lambda k: channel.data.Allreduce(MPI.IN_PLACE, passage.piece(k), op))


def reduce(channel: Channel, array: Array, root: int) -> Array:
    """Add up every rank's array on the root; zeros elsewhere."""
    compare(channel.data, "Reduce", array, MPI.SUM, root)
    pieces = _cut(array)
    if channel.rank != root:
        going = departing(array, pieces)
        for number in range(len(pieces)):
            channel.data.Reduce(going.piece(number), None, MPI.SUM, root)
        return _like(array).zeros()
    passage = passing(array, pieces)
    return _passed(passage, len(pieces), lambda k: channel.data.Reduce(MPI.IN_PLACE, passage.piece(k), MPI.SUM, root))


def bcast_from_here(channel: Channel, array: Array, chunk: int) -> None:
    """Copy this rank's array to all ranks, in pieces of `chunk` bytes."""
    pieces = _cut(array, chunk)
    going = departing(array, pieces)
    for number in range(len(pieces)):
        channel.data.Bcast(going.piece(number), channel.rank)


def bcast_to_here(channel: Channel, spec: Spec, root: int, chunk: int) -> Array:
    """Return the root's array, which comes in pieces of `chunk` bytes, on the device of the spec."""
    pieces = _cut(spec, chunk)
    coming = arriving(spec, pieces)
    return _passed(coming, len(pieces), lambda k: channel.data.Bcast(coming.piece(k), root))


def scan(comm: Comm, array: Array, exclusive: bool) -> Array:
    """Sum over the ranks of `comm` before this one, with its own unless `exclusive`: then the first rank's isn't used."""
    compare(comm, "Scan", array)
    pieces = _cut(array)
    passage = passing(array, pieces)
    # MPI leaves the first rank's exclusive sum as it is, or writes to it all the same.
    nothing = exclusive and comm.rank == 0
    call = comm.Exscan if exclusive else comm.Scan
    for number in range(len(pieces)):
        call(MPI.IN_PLACE, passage.piece(number), MPI.SUM)
        if not nothing:
            passage.take(number)
    return _like(array).zeros() if nothing else passage.home()


def alltoall(channel: Channel, array: Array) -> Array:
    """Transpose blocks: block s of rank r becomes block r of rank s."""
    compare(channel.data, "Alltoall", array)
    # Cut within each block, so that a piece has as many entries for every rank and all send at once.
    counts = [array.size // channel.size] * channel.size
    pieces = of_blocks(counts, array.dtype.itemsize)
    going, coming = departing(array, pieces), arriving(_like(array), pieces)
    return _passed(coming, len(pieces), lambda k: channel.data.Alltoallv(going.blocks(k), coming.blocks(k)))


def gather(channel: Channel, array: Array, root: int | None, counts: list[int], whole: Spec) -> Array:
    """Concatenate all ranks' arrays, of `counts` entries, on the root, or on all ranks.

    `whole` is the spec of the result, which is empty on ranks that get nothing.
    """
    own, pieces = of_block(counts, channel.rank, whole.dtype.itemsize), of_blocks(counts, whole.dtype.itemsize)
    going = departing(array, own)
    if root is not None and channel.rank != root:
        for number in range(len(own)):
            channel.data.Gatherv(going.piece(number), None, root)
        return whole.empty()
    coming = arriving(whole, pieces)
    if root is None:
        return _passed(coming, len(own), lambda k: channel.data.Allgatherv(going.piece(k), coming.blocks(k)))
    return _passed(coming, len(own), lambda k: channel.data.Gatherv(going.piece(k), coming.blocks(k), root))


def scatter(channel: Channel, array: Array | None, root: int | None, counts: list[int], block: Spec) -> Array:
    """Give each rank its block of the root's array, which is None elsewhere."""
    own = of_block(counts, channel.rank, block.dtype.itemsize)
    coming = arriving(block, own)
    going = None if array is None else departing(array, of_blocks(counts, block.dtype.itemsize))
    sent = (lambda k: None) if going is None else going.blocks
    return _passed(coming, len(own), lambda k: channel.data.Scatterv(sent(k), coming.piece(k), root))


def reduce_scatter(channel: Channel, array: Array, counts: list[int], block: Spec) -> Array:
    """Sum every rank's array and give each rank its block of the sum."""
    compare(channel.data, "Reduce_scatter", array)
    pieces = of_blocks(counts, block.dtype.itemsize)
    going, coming = departing(array, pieces), arriving(block, of_block(counts, channel.rank, block.dtype.itemsize))
    # The ranks' parts of a piece may differ in length, zero included: blocks needn't be equal.
    lengths = [[end - start for start, end in ranges] for ranges in pieces]
    return _passed(
        coming, len(pieces), lambda k: channel.data.Reduce_scatter(going.piece(k), coming.piece(k), lengths[k], MPI.SUM)
    )
