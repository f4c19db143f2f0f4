"""Collectives on large arrays in pieces or blocks.

Staged arrays are cut into pieces; copies between device and host overlap with communication. With a CUDA-aware MPI, sums
are computed by an exchange of blocks, and each rank sums one of them on its device, since many CUDA-aware MPI libraries
reduce on the host. The exchange transfers as many bytes as optimal reductions of large arrays. One rank sums each block, in
the order of the ranks, so the result is bitwise the same on all ranks. These functions are chosen by the size of the array
alone, since a rank doesn't know the devices of the others' arrays.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from mpiad._typing import Array, Comm, Op
from mpiad.transport.core.buffers import even_lengths
from mpiad.transport.core.channels import Channel
from mpiad.transport.devices.chunked_staging import (
    ChunkedTransfer,
    Ranges,
    in_place_transfer,
    incoming_transfer,
    of_block,
    of_blocks,
    of_whole,
    outgoing_transfer,
)
from mpiad.transport.devices.device_arrays import Spec
from mpiad.transport.devices.staging import communicate, send_buffer


def _cut(array: Array, chunk: int | None = None) -> list[Ranges]:
    return of_whole(array.nbytes // array.dtype.itemsize, array.dtype.itemsize, chunk)


def compare(comm: Comm, step: str, array: Array, op: Op | None = None, root: int | None = None) -> None:
    """Compare the ranks' calls on a guarded communicator: different sizes would lead to different numbers of MPI calls."""
    if getattr(comm, "agreement", None) is not None:
        comm.agree(step, array, op, root)


def _passed(transfer: ChunkedTransfer, count: int, call: Callable[[int], object]) -> Array:
    """Call ``call(k)``, in which MPI writes piece k, for each of `count` pieces; return the complete array."""
    for number in range(count):
        call(number)
        transfer.take(number)
    return transfer.received()


def allreduce(channel: Channel, array: Array, op: Op) -> Array:
    """Combine every rank's array, with the result on all ranks."""
    compare(channel.data, "Allreduce", array, op)
    pieces = _cut(array)
    transfer = in_place_transfer(array, pieces)
    return _passed(transfer, len(pieces), lambda k: channel.data.Allreduce(MPI.IN_PLACE, transfer.piece(k), op))


def reduce(channel: Channel, array: Array, root: int) -> Array:
    """Sum the ranks' arrays on the root; return zeros on other ranks."""
    compare(channel.data, "Reduce", array, MPI.SUM, root)
    pieces = _cut(array)
    if channel.rank != root:
        outgoing = outgoing_transfer(array, pieces)
        for number in range(len(pieces)):
            channel.data.Reduce(outgoing.piece(number), None, MPI.SUM, root)
        return Spec.of(array).zeros()
    transfer = in_place_transfer(array, pieces)
    return _passed(transfer, len(pieces), lambda k: channel.data.Reduce(MPI.IN_PLACE, transfer.piece(k), MPI.SUM, root))


def bcast_from_here(channel: Channel, array: Array, chunk: int) -> None:
    """Copy this rank's array to all ranks, in pieces of `chunk` bytes."""
    pieces = _cut(array, chunk)
    outgoing = outgoing_transfer(array, pieces)
    for number in range(len(pieces)):
        channel.data.Bcast(outgoing.piece(number), channel.rank)


def bcast_to_here(channel: Channel, spec: Spec, root: int, chunk: int) -> Array:
    """Return the root's array, received in pieces of `chunk` bytes, on the device of the spec."""
    pieces = _cut(spec, chunk)
    incoming = incoming_transfer(spec, pieces)
    return _passed(incoming, len(pieces), lambda k: channel.data.Bcast(incoming.piece(k), root))


def scan(comm: Comm, array: Array, exclusive: bool) -> Array:
    """Return the sum over the ranks of `comm` up to this one, or up to the previous one if `exclusive`."""
    compare(comm, "Scan", array)
    pieces = _cut(array)
    transfer = in_place_transfer(array, pieces)
    is_zero = exclusive and comm.rank == 0
    call = comm.Exscan if exclusive else comm.Scan
    for number in range(len(pieces)):
        call(MPI.IN_PLACE, transfer.piece(number), MPI.SUM)
        if not is_zero:
            transfer.take(number)
    return Spec.of(array).zeros() if is_zero else transfer.received()


def alltoall(channel: Channel, array: Array) -> Array:
    """Transpose blocks: block s of rank r becomes block r of rank s."""
    compare(channel.data, "Alltoall", array)
    counts = [array.size // channel.size] * channel.size
    pieces = of_blocks(counts, array.dtype.itemsize)
    outgoing, incoming = outgoing_transfer(array, pieces), incoming_transfer(Spec.of(array), pieces)
    return _passed(incoming, len(pieces), lambda k: channel.data.Alltoallv(outgoing.blocks(k), incoming.blocks(k)))


def gather(channel: Channel, array: Array, root: int | None, counts: list[int], whole: Spec) -> Array:
    """Concatenate the ranks' arrays on the root, or on all ranks if `root` is None.

    `counts`: the arrays' numbers of entries. `whole`: the spec of the result; empty on ranks without a result.
    """
    own, pieces = of_block(counts, channel.rank, whole.dtype.itemsize), of_blocks(counts, whole.dtype.itemsize)
    outgoing = outgoing_transfer(array, own)
    if root is not None and channel.rank != root:
        for number in range(len(own)):
            channel.data.Gatherv(outgoing.piece(number), None, root)
        return whole.empty()
    incoming = incoming_transfer(whole, pieces)
    if root is None:
        return _passed(incoming, len(own), lambda k: channel.data.Allgatherv(outgoing.piece(k), incoming.blocks(k)))
    return _passed(incoming, len(own), lambda k: channel.data.Gatherv(outgoing.piece(k), incoming.blocks(k), root))


def scatter(channel: Channel, array: Array | None, root: int | None, counts: list[int], block: Spec) -> Array:
    """Return this rank's block of the root's array; `array` is None on other ranks."""
    own = of_block(counts, channel.rank, block.dtype.itemsize)
    incoming = incoming_transfer(block, own)
    outgoing = None if array is None else outgoing_transfer(array, of_blocks(counts, block.dtype.itemsize))
    sent = (lambda k: None) if outgoing is None else outgoing.blocks
    return _passed(incoming, len(own), lambda k: channel.data.Scatterv(sent(k), incoming.piece(k), root))


def reduce_scatter(channel: Channel, array: Array, counts: list[int], block: Spec) -> Array:
    """Sum the ranks' arrays, and return this rank's block of the sum."""
    compare(channel.data, "Reduce_scatter", array)
    pieces = of_blocks(counts, block.dtype.itemsize)
    outgoing = outgoing_transfer(array, pieces)
    incoming = incoming_transfer(block, of_block(counts, channel.rank, block.dtype.itemsize))
    # If blocks have different lengths, the ranks' ranges of a piece may differ, and may be empty.
    lengths = [[end - start for start, end in ranges] for ranges in pieces]
    return _passed(
        incoming,
        len(pieces),
        lambda k: channel.data.Reduce_scatter(outgoing.piece(k), incoming.piece(k), lengths[k], MPI.SUM),
    )


def exchanged_reduce_scatter(channel: Channel, array: Array, counts: list[int], block: Spec) -> Array:
    """Sum the ranks' arrays, and return this rank's block of the sum; `counts`: the lengths of all blocks."""
    compare(channel.data, "Reduce_scatter", array)
    return _own_block(channel, array, counts).reshape(block.shape)


def exchanged_sum(channel: Channel, array: Array, root: int | None = None) -> Array:
    """Sum the ranks' arrays on all ranks, or on the root; return zeros on ranks without the sum."""
    compare(channel.data, "Allreduce" if root is None else "Reduce", array, MPI.SUM, root)
    counts = even_lengths(array.size, channel.size)
    block = _own_block(channel, array, counts)
    if root is None:
        return communicate(lambda sent, out: channel.data.Allgatherv(sent, [out, counts]), block, Spec.of(array))
    if channel.rank == root:
        return communicate(lambda sent, out: channel.data.Gatherv(sent, [out, counts], root), block, Spec.of(array))
    channel.data.Gatherv(send_buffer(block), None, root)
    return Spec.of(array).zeros()


def _own_block(channel: Channel, array: Array, counts: list[int]) -> Array:
    own, spec = [counts[channel.rank]] * channel.size, Spec.of(array)._replace(shape=(channel.size, counts[channel.rank]))
    parts = communicate(lambda sent, out: channel.data.Alltoallv([sent, counts], [out, own]), array, spec)
    return np.sum(parts, axis=0, dtype=array.dtype)
