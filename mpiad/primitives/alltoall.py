"""`mpi_alltoall`: transpose blocks between all ranks."""

from __future__ import annotations

from autograd.tracer import getval

from mpiad._typing import Array, Comm, Function, LocalArray
from mpiad.primitives.catalogue import ALLTOALL, Reduction
from mpiad.primitives.operation import communicate
from mpiad.transport import SUM, channel
from mpiad.transport.core import collectives
from mpiad.transport.core.buffers import outgoing


def mpi_alltoall(x: LocalArray, comm: Comm = None) -> LocalArray:
    """Exchange blocks between all ranks: block s of rank r becomes block r of rank s.

    Parameters
    ----------
    x : array, shape (size, ...), the same shape and dtype on all ranks
    comm : mpi4py intracommunicator, optional

    Returns
    -------
    array
        Same shape and dtype as `x`; block s is the block that rank s sends to this rank.

    Raises
    ------
    TypeError
        If `x` can't be sent.
    ValueError
        If the length of the first axis of `x` isn't the number of ranks.

    Ranks
    -----
    All ranks of `comm` call it.

    Adjoint
    -------
    The same exchange of the cotangents.

    Examples
    --------
    >>> print(np.array_equal(mpiad.mpi_alltoall(np.full(size, float(rank))), np.arange(size)))
    True
    """
    used = channel(comm, "mpi_alltoall")
    shape = outgoing(getval(x), "mpi_alltoall").shape
    if shape[:1] != (used.size,):
        raise ValueError(
            f"mpi_alltoall: the first axis of x must be the number of ranks, {used.size}, but x has shape {shape}. Reshape "
            f"x to ({used.size}, ...), or pad it if its size isn't a multiple of {used.size}."
        )
    return communicate(ALLTOALL, x, Reduction(used, SUM))  # the operation is ignored


def _forward(x: Array, p: Reduction) -> Array:
    return collectives.alltoall(p.channel, x, "mpi_alltoall")


def _adjoint(ans: Array, x: Array, p: Reduction) -> Function:
    """Return the transpose, the same exchange: the permutation that swaps blocks (r, s) and (s, r) is symmetric."""
    return lambda g: communicate(ALLTOALL, g, p)


ALLTOALL.define(_forward, _adjoint)
