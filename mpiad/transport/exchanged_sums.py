"""Sums of large device arrays with a CUDA-aware MPI: blocks are exchanged, and each rank sums one of them on its device.

Many CUDA-aware MPI libraries transfer device memory directly in messages, but reduce on the host. The exchange of blocks
transfers as many bytes as optimal algorithms for reductions of large arrays. Each block is summed by one rank, in the order
of the ranks, so the result is bitwise the same on all ranks. Whether these functions are used depends on the size of the
array only (see `device_settings`), since a rank doesn't know whether the others' arrays are on devices.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from mpiad._typing import Array
from mpiad.transport.buffers import Spec, even_lengths
from mpiad.transport.channels import Channel
from mpiad.transport.chunked_collectives import compare
from mpiad.transport.device_arrays import arrays_of
from mpiad.transport.staging import transfer_of


def reduce_scatter(channel: Channel, array: Array, counts: list[int], block: Spec) -> Array:
    """Sum the ranks' arrays, and return this rank's block of the sum; `counts`: the lengths of all blocks."""
    compare(channel.data, "Reduce_scatter", array)
    return _own_block(channel, array, counts).reshape(block.shape)


def allreduce(channel: Channel, array: Array) -> Array:
    """Sum the ranks' arrays, with the result on all ranks."""
    compare(channel.data, "Allreduce", array, MPI.SUM)
    counts = even_lengths(array.size, channel.size)
    block, transfer = _own_block(channel, array, counts), transfer_of(arrays_of(array))
    destination = transfer.destination(array.shape, array.dtype)
    channel.data.Allgatherv(transfer.send_buffer(block), [transfer.recv_buffer(destination), counts])
    return transfer.received(destination)


def reduce(channel: Channel, array: Array, root: int) -> Array:
    """Sum the ranks' arrays on the root; return zeros on other ranks."""
    compare(channel.data, "Reduce", array, MPI.SUM, root)
    counts = even_lengths(array.size, channel.size)
    block, transfer = _own_block(channel, array, counts), transfer_of(arrays_of(array))
    if channel.rank != root:
        channel.data.Gatherv(transfer.send_buffer(block), None, root)
        return Spec(array.shape, array.dtype, arrays_of(array)).zeros()
    destination = transfer.destination(array.shape, array.dtype)
    channel.data.Gatherv(transfer.send_buffer(block), [transfer.recv_buffer(destination), counts], root)
    return transfer.received(destination)


def _own_block(channel: Channel, array: Array, counts: list[int]) -> Array:
    transfer, mine = transfer_of(arrays_of(array)), counts[channel.rank]
    destination = transfer.destination((channel.size, mine), array.dtype)
    sent, buffer = transfer.send_buffer(array), transfer.recv_buffer(destination)
    channel.data.Alltoallv([sent, counts], [buffer, [mine] * channel.size])
    return np.sum(transfer.received(destination), axis=0, dtype=array.dtype)
