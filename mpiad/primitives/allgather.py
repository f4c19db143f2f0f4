"""`mpi_allgather`: collect the arrays of all ranks on all ranks."""

from __future__ import annotations

from autograd.tracer import getval

from mpiad._typing import Array, Comm, Function, LocalArray, ReplicatedArray
from mpiad.primitives.catalogue import ALLGATHER, REDUCE_SCATTER, Dividing
from mpiad.primitives.checks import gathered, pieces_of_all
from mpiad.primitives.operation import communicate
from mpiad.transport import Channel, channel
from mpiad.transport.core import collectives
from mpiad.transport.core.buffers import spec_of


def mpi_allgather(x: LocalArray, axis: int | None = None, *, comm: Comm = None) -> ReplicatedArray:
    """Collect the arrays of all ranks on all ranks.

    Parameters
    ----------
    x : array or number
        Same shape and dtype on all ranks; with `axis`, the lengths along this axis may differ.
    axis : int, optional
        Axis along which the arrays are concatenated, in the order of ranks; None stacks them along a new first axis.
    comm : mpi4py intracommunicator, optional

    Returns
    -------
    array
        Shape ``(size, *x.shape)``, or the shape of the concatenation; equal on all ranks.

    Raises
    ------
    TypeError
        On all ranks, if `x` can't be sent.
    ValueError
        On all ranks, if an array has no such axis, or if shapes or dtypes differ.

    Ranks
    -----
    All ranks of `comm` call it, with the same axis.

    Adjoint
    -------
    The cotangents of all ranks are summed and scattered: each rank gets the sum for its part.

    Examples
    --------
    >>> rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
    >>> print(np.array_equal(mpiad.mpi_allgather(float(rank)), np.arange(size)))
    True
    """
    used = channel(comm, "mpi_allgather")
    return communicate(ALLGATHER, x, pieces_of_all(x, axis, used, None, "mpi_allgather"))


def gather_pieces(x: LocalArray, axis: int, lengths: list[int], channel: Channel) -> ReplicatedArray:
    """Collect arrays like `mpi_allgather`; `axis` isn't negative, and `lengths` are those of all ranks along `axis`."""
    return communicate(ALLGATHER, x, Dividing(channel, None, axis, lengths, spec_of(getval(x), "mpi_allgather")))


def _forward(x: Array, p: Dividing) -> Array:
    return collectives.gather(p.channel, x, None, p.axis, p.lengths, "mpi_allgather")


def _adjoint(ans: Array, x: Array, p: Dividing) -> Function:
    """Return the transpose of copying each rank's array to all ranks: the sum of the cotangents of the copies."""
    return lambda g: communicate(REDUCE_SCATTER, g, p)


ALLGATHER.define(_forward, _adjoint, abstract=gathered)
