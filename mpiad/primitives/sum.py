"""`mpi_sum`: sum the arrays of all ranks on the root."""

from __future__ import annotations

from mpiad._typing import Array, Comm, Function, LocalArray, Rank, RootArray
from mpiad.primitives.catalogue import BCAST, SUM_TO_ROOT, Rooted
from mpiad.primitives.checks import reduction_of, root_of
from mpiad.primitives.cotangents import spec_like
from mpiad.primitives.operation import communicate, like_sent
from mpiad.transport import SUM, channel
from mpiad.transport.core import collectives


def mpi_sum(x: LocalArray, root: Rank = 0, *, comm: Comm = None) -> RootArray:
    """Sum the arrays of all ranks on the root.

    Parameters
    ----------
    x : array or number, the same shape and dtype on all ranks
    root : int
    comm : mpi4py intracommunicator, optional

    Returns
    -------
    array
        Same shape and dtype as `x`: the sum on the root, zeros elsewhere.

    Raises
    ------
    TypeError, ValueError
        If `x` can't be summed, or `root` isn't a rank of `comm`.

    Ranks
    -----
    All ranks of `comm` call it, with the same root.

    Adjoint
    -------
    The cotangent of every rank's `x` is the root's cotangent; cotangents on other ranks are ignored.

    Examples
    --------
    >>> rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
    >>> total = mpiad.mpi_sum(np.ones(2))
    >>> print(total == (size if rank == 0 else 0))
    [ True  True]
    """
    used = channel(comm, "mpi_sum")
    reduction_of(SUM, x, "mpi_sum")
    return communicate(SUM_TO_ROOT, x, Rooted(used, root_of(root, used, "mpi_sum")))


def _forward(x: Array, p: Rooted) -> Array:
    return collectives.reduce(p.channel, x, p.root, "mpi_sum")


def _adjoint(ans: Array, x: Array, p: Rooted) -> Function:
    """Return the transpose of a sum on one rank: the cotangent is broadcast to all ranks."""
    spec = spec_like(ans)
    return lambda g: communicate(BCAST, g, Rooted(p.channel, p.root, spec))


SUM_TO_ROOT.define(_forward, _adjoint, abstract=like_sent)
