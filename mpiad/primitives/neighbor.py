"""`mpi_neighbor_allgather`, `mpi_neighbor_alltoall`: messages along the edges of a process topology.

Both functions consist of a message for each edge, so they have the derivatives of `mpi_isend` and `mpi_irecv`.
"""

from __future__ import annotations

from collections.abc import Sequence

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array, Comm, LocalArray
from mpiad.device.assembly import concatenate
from mpiad.primitives.checks import axis_of, counts_of
from mpiad.primitives.cotangents import spec_like
from mpiad.primitives.irecv import mpi_irecv
from mpiad.primitives.isend import mpi_isend
from mpiad.primitives.wait import mpi_waitall
from mpiad.transport import Spec, channel
from mpiad.transport.core.buffers import require_sendable
from mpiad.transport.core.lookup import Edges, edges_of

_TAG = 32448  # of direction 0; a Cartesian communicator has at most 32 axes, and so at most 64 directions


def mpi_neighbor_allgather(
    x: LocalArray, axis: int | None = None, *, received: Sequence[int] | None = None, comm: Comm = None
) -> LocalArray:
    """Send x to each neighbor of a process topology, and collect the neighbors' arrays.

    Parameters
    ----------
    x : array or number
        The same dtype on all ranks. The same shape, or different lengths along `axis`.
    axis : int, optional
        Axis along which the arrays are concatenated; by default they are stacked along a new first axis.
    received : sequence of int, optional
        The length along `axis` of each neighbor's array; by default the length of `x`.
    comm : mpi4py Cartcomm, Distgraphcomm or Graphcomm
        On a grid, the neighbors are those at distance 1 along each axis, in the negative direction first, and may be
        missing at the sides. In a graph, they are the sources and destinations of `comm.inoutedges`.

    Returns
    -------
    array
        The neighbors' arrays in the order of the neighbors, with zeros for a missing neighbor.

    Raises
    ------
    TypeError
        If `x` can't be sent, or `received` isn't a sequence of integers.
    ValueError
        If `x` has no such axis, `received` hasn't one length for each neighbor, or a length differs from the array sent.
    CommunicatorError
        If `comm` has no topology.

    Ranks
    -----
    All ranks of `comm` call it.

    Adjoint
    -------
    The cotangents of the collected arrays are sent back, and each rank adds those that arrive.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
    >>> ring = MPI.COMM_WORLD.Create_cart([size], periods=[True])
    >>> print(mpiad.mpi_neighbor_allgather(ring.rank, comm=ring) == [(rank - 1) % size, (rank + 1) % size])
    [ True  True]
    """
    call = "mpi_neighbor_allgather"
    spec, edges = _checked(x, comm, call)
    index = axis_of(axis, len(spec.shape), call)
    if index is None:
        if received is not None:
            raise ValueError(f"{call}: received needs an axis along which the arrays are concatenated, but axis is None.")
        x, spec, index = anp.reshape(x, (1, *spec.shape)), spec._replace(shape=(1, *spec.shape)), 0
    if received is None:
        received = [spec.shape[index]] * len(edges.sources)
    return _exchanged([x] * len(edges.destinations), spec, index, received, edges, comm, call)


def mpi_neighbor_alltoall(
    x: LocalArray,
    counts: Sequence[int] | None = None,
    axis: int = 0,
    *,
    received: Sequence[int] | None = None,
    comm: Comm = None,
) -> LocalArray:
    """Send a block of x to each neighbor of a process topology, and concatenate the blocks that arrive.

    Parameters
    ----------
    x : array
        The same dtype on all ranks. Without `counts`, its first axis has an entry for each neighbor that receives from this
        rank.
    counts : sequence of int, optional
        ``counts[k]`` consecutive entries of `x` along `axis` are sent to the k-th neighbor; they add up to the length.
    axis : int
        Axis along which `x` is divided.
    received : sequence of int, optional
        The number of entries that arrive from each neighbor; by default as many as are sent to it. If a rank receives from
        another number of neighbors than it sends to, it must pass `received` with `counts`.
    comm : mpi4py Cartcomm, Distgraphcomm or Graphcomm
        As in `mpi_neighbor_allgather`. Entries for a missing neighbor aren't sent.

    Returns
    -------
    array
        The blocks along `axis` in the order of the neighbors that send to this rank, with zeros for a missing neighbor.

    Raises
    ------
    TypeError, ValueError, CommunicatorError
        As in `mpi_neighbor_allgather`; and if the counts aren't one for each neighbor, or don't add up to the length.

    Ranks
    -----
    All ranks of `comm` call it.

    Adjoint
    -------
    The cotangents of the blocks return along the same edges.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
    >>> ring = MPI.COMM_WORLD.Create_cart([size], periods=[True])
    >>> first_and_last = mpiad.mpi_neighbor_alltoall(np.array([10.0 * rank, 10.0 * rank + 1]), comm=ring)
    >>> print(first_and_last == [10 * ((rank - 1) % size) + 1, 10 * ((rank + 1) % size)])
    [ True  True]
    """
    call = "mpi_neighbor_alltoall"
    spec, edges = _checked(x, comm, call)
    index, places = axis_of(axis, len(spec.shape), call), len(edges.destinations)
    sent = [1] * places if counts is None else counts_of(counts, places, call, "counts")
    if index is None or sum(sent) != spec.shape[index]:
        raise ValueError(
            f"{call}: the entries of x for the {places} neighbors, {sent} (1 by default), must add up to its length along "
            f"axis {axis}, but x has shape {spec.shape}."
        )
    if received is None:
        received = [1] * len(edges.sources) if counts is None else sent
    lead = (slice(None),) * index
    ends = np.cumsum(sent, dtype=int).tolist()
    blocks = [x[(*lead, slice(end - count, end))] for count, end in zip(sent, ends)]
    return _exchanged(blocks, spec, index, received, edges, comm, call)


def _checked(x: Array, comm: Comm, call: str) -> tuple[Spec, Edges]:
    require_sendable(getval(x), call)
    channel(comm, call)
    return spec_like(getval(x)), edges_of(comm, call)


def _exchanged(
    blocks: list[Array], like: Spec, axis: int, received: Sequence[int], edges: Edges, comm: Comm, call: str
) -> Array:
    """Send a block along each edge, and join the arriving blocks, with these lengths along the axis."""
    lengths = counts_of(received, len(edges.sources), call, "received")
    empty = [like._replace(shape=(*like.shape[:axis], n, *like.shape[axis + 1 :])).empty() for n in (*lengths, 0)]
    requests = [
        mpi_irecv(template, edge.peer, tag=_TAG + edge.direction, comm=comm) for template, edge in zip(empty, edges.sources)
    ]
    requests += [
        mpi_isend(block, edge.peer, tag=_TAG + edge.direction, comm=comm) for block, edge in zip(blocks, edges.destinations)
    ]
    try:
        arrays = mpi_waitall(requests)[: len(lengths)]
    except ValueError as error:
        raise ValueError(
            f"{call}: a neighbor sends another length or dtype than is expected here. Pass received, the number of entries "
            f"that arrive from each neighbor along axis {axis}, and the same dtype on all ranks ({error})"
        ) from error
    return concatenate(arrays or empty, axis)
