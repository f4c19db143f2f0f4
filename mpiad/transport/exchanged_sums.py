"""Sums of large arrays when MPI takes device memory: blocks are exchanged, and each rank adds up one of them on its device.

Many MPI libraries that take device memory move it directly in messages, but copy it to the host for reductions and add up
there. An exchange of blocks moves as many bytes as the best reductions of large arrays do. Each block is added up by one
rank, in the order of the ranks, so all ranks have the same bits. A rank doesn't know the devices of the others' arrays, so
all ranks call these functions for arrays of the same size, arrays of the host included: see `device_settings`.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from mpiad._typing import Array
from mpiad.transport.buffers import Spec, even_lengths
from mpiad.transport.channels import Channel
from mpiad.transport.chunked_collectives import compare
from mpiad.transport.device_arrays import arrays_of
from mpiad.transport.staging import way_of


def reduce_scatter(channel: Channel, array: Array, counts: list[int], block: Spec) -> Array:
    """Sum every rank's array and return this rank's block of the sum, of its number of entries."""
    compare(channel.data, "Reduce_scatter", array)
    return _own_block(channel, array, counts).reshape(block.shape)


def allreduce(channel: Channel, array: Array) -> Array:
    """Sum every rank's array, with the result on all ranks."""
    compare(channel.data, "Allreduce", array, MPI.SUM)
    counts = even_lengths(array.size, channel.size)
    block, way = _own_block(channel, array, counts), way_of(arrays_of(array))
    room = way.room(array.shape, array.dtype)
    channel.data.Allgatherv(way.lent(block), [way.buffer(room), counts])
    return way.home(room)


def reduce(channel: Channel, array: Array, root: int) -> Array:
    """Sum every rank's array on the root; zeros elsewhere."""
    compare(channel.data, "Reduce", array, MPI.SUM, root)
    counts = even_lengths(array.size, channel.size)
    block, way = _own_block(channel, array, counts), way_of(arrays_of(array))
    if channel.rank != root:
        channel.data.Gatherv(way.lent(block), None, root)
        return Spec(array.shape, array.dtype, arrays_of(array)).zeros()
    room = way.room(array.shape, array.dtype)
    channel.data.Gatherv(way.lent(block), [way.buffer(room), counts], root)
    return way.home(room)


def _own_block(channel: Channel, array: Array, counts: list[int]) -> Array:
    way, mine = way_of(arrays_of(array)), counts[channel.rank]
    room = way.room((channel.size, mine), array.dtype)
    channel.data.Alltoallv([way.lent(array), counts], [way.buffer(room), [mine] * channel.size])
    return np.sum(way.home(room), axis=0, dtype=array.dtype)
