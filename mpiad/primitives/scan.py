"""`mpi_scan`, `mpi_exscan`: prefix sums over the ranks, including or excluding this rank."""

from __future__ import annotations

from mpiad._typing import Array, Comm, Function, LocalArray
from mpiad.primitives.catalogue import SCAN, Prefix
from mpiad.primitives.checks import reduction_of
from mpiad.primitives.operation import communicate, like_sent
from mpiad.transport import SUM, channel
from mpiad.transport.core import collectives


def mpi_scan(x: LocalArray, *, comm: Comm = None) -> LocalArray:
    """Sum the arrays of the ranks from 0 to this rank.

    Parameters
    ----------
    x : array or number, the same shape and dtype on all ranks
    comm : mpi4py intracommunicator, optional

    Returns
    -------
    array
        Same shape and dtype as `x`.

    Raises
    ------
    TypeError
        If `x` can't be summed.

    Ranks
    -----
    All ranks of `comm` call it.

    Adjoint
    -------
    The sum of the cotangents of the ranks from this rank to the last.

    Examples
    --------
    >>> rank = mpiad.mpi_rank()
    >>> print(mpiad.mpi_scan(1.0) - rank)
    1.0
    """
    return communicate(SCAN, x, _prefix(x, comm, False, "mpi_scan"))


def mpi_exscan(x: LocalArray, *, comm: Comm = None) -> LocalArray:
    """Sum the arrays of the ranks before this rank; zeros on rank 0. For the parameters see `mpi_scan`.

    Ranks
    -----
    All ranks of `comm` call it.

    Adjoint
    -------
    The sum of the cotangents of the ranks after this rank; zeros on the last rank.

    Examples
    --------
    >>> rank = mpiad.mpi_rank()
    >>> print(mpiad.mpi_exscan(1.0) - rank)
    0.0
    """
    return communicate(SCAN, x, _prefix(x, comm, True, "mpi_exscan"))


def _prefix(x: Array, comm: Comm, exclusive: bool, call: str) -> Prefix:
    reduction_of(SUM, x, call)
    return Prefix(channel(comm, call), exclusive, False)


def _forward(x: Array, p: Prefix) -> Array:
    return collectives.scan(p.channel, x, p.exclusive, p.backwards, "mpi_exscan" if p.exclusive else "mpi_scan")


def _adjoint(ans: Array, x: Array, p: Prefix) -> Function:
    """Return the transpose of a lower triangular matrix of ones over the ranks: a sum in the opposite direction."""
    return lambda g: communicate(SCAN, g, p._replace(backwards=not p.backwards))


SCAN.define(_forward, _adjoint, abstract=like_sent)
