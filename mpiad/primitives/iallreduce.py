"""`mpi_iallreduce`: start to sum the arrays of all ranks."""

from __future__ import annotations

from mpiad._typing import Array, Comm, Function, LocalArray
from mpiad.primitives.catalogue import ALLREDUCE, IALLREDUCE, Reduction
from mpiad.primitives.checks import point_to_point, reduction_of
from mpiad.primitives.cotangents import spec_like
from mpiad.primitives.operation import communicate
from mpiad.primitives.request import Request, started
from mpiad.transport import SUM, channel
from mpiad.transport.core.buffers import outgoing, private_copy
from mpiad.transport.core.collectives import start_allreduce


def mpi_iallreduce(x: LocalArray, *, comm: Comm = None) -> Request:
    """Start to sum the arrays of all ranks, with the result on all ranks.

    Parameters
    ----------
    x : array or number, the same shape and dtype on all ranks
        It may be overwritten after the call, since a copy is summed.
    comm : mpi4py intracommunicator, optional

    Returns
    -------
    Request
        The active sum; `mpi_wait` returns its result.

    Raises
    ------
    TypeError
        If `x` can't be summed.

    Ranks
    -----
    All ranks of `comm` call it, in the same order relative to other collectives. They may wait for requests in different
    orders.

    Adjoint
    -------
    The cotangent of `x` is the sum of all ranks' cotangents, computed in the adjoint of this call, which waits for all
    ranks. So a call of `mpi_allreduce` in place of this one mustn't deadlock.

    Examples
    --------
    >>> size = mpiad.mpi_size()
    >>> request = mpiad.mpi_iallreduce(np.ones(2))
    >>> y = np.sin(0.0)  # other computations, while the sum is active
    >>> print(mpiad.mpi_wait(request) / size)
    [1. 1.]
    """
    used = channel(comm, "mpi_iallreduce")
    reduction_of(SUM, x, "mpi_iallreduce")
    # Registered like a point-to-point call: an exception may leave it unfinished, and traces of plain autograd are refused.
    point_to_point(comm, "mpi_iallreduce")
    return started(communicate(IALLREDUCE, x, Reduction(used, SUM)))


def _forward(x: Array, p: Reduction) -> Request:
    # A copy, because MPI reads the array until the wait, and the caller may overwrite x.
    array = private_copy(outgoing(x, "mpi_iallreduce"), x)
    handle = start_allreduce(p.channel, array)
    return Request("mpi_iallreduce", p.channel, handle, None, spec_like(array))


def _adjoint(ans: Request, x: Array, p: Reduction, level: int) -> Function:
    """Return the transpose, a sum over all ranks; all ranks start sums in one order, but may wait in different orders."""
    cell, spec = ans.cell(level), ans.spec

    def vjp(g: None) -> Array:
        cotangent, cell.cotangent = cell.cotangent, None
        # The sum is collective, so this rank calls it even if its cotangent is zero.
        return communicate(ALLREDUCE, spec.zeros() if cotangent is None else cotangent, p)

    return vjp


def _tangent(dx: Array, ans: Request, x: Array, p: Reduction, level: int) -> None:
    ans.cell(level).request = communicate(IALLREDUCE, dx, p)


def _abstract(x: Array, p: Reduction) -> Request:
    return Request("mpi_iallreduce", p.channel, None, None, spec_like(outgoing(x, "mpi_iallreduce")))


IALLREDUCE.define(_forward, _adjoint, _tangent, _abstract)
