"""`mpi_reduce_scatter`: add up the arrays of all ranks and give each rank its piece of the sum."""

from __future__ import annotations

from typing import Any

from autograd.tracer import getval

from mpiad._typing import Array, Comm, LocalArray
from mpiad.primitives.catalogue import ALLGATHER, REDUCE_SCATTER, Dividing
from mpiad.primitives.checks import axis_of, lengths_along, piece_of, reduction_of
from mpiad.primitives.cotangents import spec_like
from mpiad.primitives.operation import communicate
from mpiad.transport import SUM, channel, collectives
from mpiad.transport.buffers import outgoing


def mpi_reduce_scatter(x: Array, axis: int | None = None, counts: list[int] | None = None, comm: Comm = None) -> LocalArray:
    """Add up the arrays of all ranks and give each rank its piece of the sum.

    Parameters
    ----------
    x : array, the same shape and dtype on all ranks
        Without `axis` its first axis is the number of ranks.
    axis : int, optional
        Axis along which the sum is divided; None takes one block of the first axis for each rank, without that axis.
    counts : list of int, optional
        Each rank's length along `axis`, the same on all ranks. Even shares by default, the first ranks' longer by one.
    comm : mpi4py intracommunicator, optional

    Returns
    -------
    array
        This rank's piece of the sum.

    Raises
    ------
    TypeError
        If `x` can't be sent.
    ValueError
        If `x` can't be divided so.

    Ranks
    -----
    All ranks of `comm` call it, with the same axis and counts.

    Adjoint
    -------
    The pieces' cotangents are collected, and every rank gets the whole.

    Examples
    --------
    >>> print(mpiad.mpi_reduce_scatter(np.ones((size, 2))) / size)
    [1. 1.]
    """
    call = "mpi_reduce_scatter"
    used = channel(comm, call)
    reduction_of(SUM, x, call)
    spec = spec_like(outgoing(getval(x), call))
    place = axis_of(axis, len(spec.shape), call)
    # No message is needed for them: shape and counts are the same on all ranks.
    lengths = lengths_along(place, counts, spec.shape, used, call)
    return communicate(REDUCE_SCATTER, x, Dividing(used, None, place, lengths, piece_of(spec, place, lengths[used.rank])))


def _forward(x: Array, p: Dividing) -> Any:
    return collectives.reduce_scatter(p.channel, x, p.axis, p.lengths, "mpi_reduce_scatter")


def _adjoint(ans: Array, x: Array, p: Dividing) -> Any:
    """Return the transpose: each rank's array had a part in every piece, so it gets all pieces' cotangents."""
    return lambda g: communicate(ALLGATHER, g, p)


REDUCE_SCATTER.define(_forward, _adjoint)
