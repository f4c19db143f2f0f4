"""`mpi_reduce_scatter`: sum the arrays of all ranks; each rank gets a part of the sum."""

from __future__ import annotations

from autograd.tracer import getval

from mpiad._typing import Array, Comm, Function, LocalArray
from mpiad.primitives.catalogue import ALLGATHER, REDUCE_SCATTER, Dividing
from mpiad.primitives.checks import axis_of, lengths_along, piece_of, reduction_of
from mpiad.primitives.cotangents import spec_like
from mpiad.primitives.operation import communicate
from mpiad.transport import SUM, channel
from mpiad.transport.core import collectives
from mpiad.transport.core.buffers import outgoing


def mpi_reduce_scatter(
    x: Array, axis: int | None = None, counts: list[int] | None = None, *, comm: Comm = None
) -> LocalArray:
    """Sum the arrays of all ranks; each rank gets a part of the sum.

    Parameters
    ----------
    x : array, the same shape and dtype on all ranks
        Without `axis`, the length of the first axis is the number of ranks.
    axis : int, optional
        Axis along which the sum is divided. For None, rank r gets entry r along the first axis.
    counts : list of int, optional
        Each rank's length along `axis`, the same on all ranks. By default as in
        `numpy.array_split`: equal, or longer by one on the first ranks.
    comm : mpi4py intracommunicator, optional

    Returns
    -------
    array
        This rank's part of the sum.

    Raises
    ------
    TypeError, ValueError
        If `x` can't be summed, or divided along `axis` into parts of the lengths `counts`.

    Ranks
    -----
    All ranks of `comm` call it, with the same axis and counts.

    Adjoint
    -------
    The cotangent of `x` is the concatenation of all ranks' cotangents, on every rank.

    Examples
    --------
    >>> size = mpiad.mpi_size()
    >>> print(mpiad.mpi_reduce_scatter(np.ones((size, 2))) / size)
    [1. 1.]
    """
    call = "mpi_reduce_scatter"
    used = channel(comm, call)
    reduction_of(SUM, x, call)
    spec = spec_like(outgoing(getval(x), call))
    axis = axis_of(axis, len(spec.shape), call)
    lengths = lengths_along(axis, counts, spec.shape, used, call)
    return communicate(REDUCE_SCATTER, x, Dividing(used, None, axis, lengths, piece_of(spec, axis, lengths[used.rank])))


def _forward(x: Array, p: Dividing) -> Array:
    return collectives.reduce_scatter(p.channel, x, p.axis, p.lengths, "mpi_reduce_scatter")


def _adjoint(ans: Array, x: Array, p: Dividing) -> Function:
    """Return the transpose: each rank's array contributes to all parts, so it gets the cotangents of all parts."""
    return lambda g: communicate(ALLGATHER, g, p)


REDUCE_SCATTER.define(_forward, _adjoint)
