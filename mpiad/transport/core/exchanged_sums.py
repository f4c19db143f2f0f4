"""Sums of large device arrays with a CUDA-aware MPI: blocks are exchanged, and each rank sums one of them on its device.

Many CUDA-aware MPI libraries reduce on the host. The exchange transfers as many bytes as optimal reductions of large
arrays. One rank sums each block, in the order of the ranks, so the result is bitwise the same on all ranks. These functions
are chosen by the size of the array alone, since a rank doesn't know the devices of the others' arrays.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from mpiad._typing import Array
from mpiad.transport.core.buffers import Spec, even_lengths
from mpiad.transport.core.channels import Channel
from mpiad.transport.core.chunked_collectives import compare
from mpiad.transport.devices.staging import communicate, send_buffer


def reduce_scatter(channel: Channel, array: Array, counts: list[int], block: Spec) -> Array:
    """Sum the ranks' arrays, and return this rank's block of the sum; `counts`: the lengths of all blocks."""
    compare(channel.data, "Reduce_scatter", array)
    return _own_block(channel, array, counts).reshape(block.shape)


def allreduce(channel: Channel, array: Array) -> Array:
    """Sum the ranks' arrays, with the result on all ranks."""
    compare(channel.data, "Allreduce", array, MPI.SUM)
    counts = even_lengths(array.size, channel.size)
    block = _own_block(channel, array, counts)
    return communicate(lambda sent, out: channel.data.Allgatherv(sent, [out, counts]), block, Spec.of(array))


def reduce(channel: Channel, array: Array, root: int) -> Array:
    """Sum the ranks' arrays on the root; return zeros on other ranks."""
    compare(channel.data, "Reduce", array, MPI.SUM, root)
    counts = even_lengths(array.size, channel.size)
    block = _own_block(channel, array, counts)
    if channel.rank != root:
        channel.data.Gatherv(send_buffer(block), None, root)
        return Spec.of(array).zeros()
    return communicate(lambda sent, out: channel.data.Gatherv(sent, [out, counts], root), block, Spec.of(array))


def _own_block(channel: Channel, array: Array, counts: list[int]) -> Array:
    own, spec = [counts[channel.rank]] * channel.size, Spec.of(array)._replace(shape=(channel.size, counts[channel.rank]))
    parts = communicate(lambda sent, out: channel.data.Alltoallv([sent, counts], [out, own]), array, spec)
    return np.sum(parts, axis=0, dtype=array.dtype)
