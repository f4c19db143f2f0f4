"""`mpi_reduce`: combine the arrays of all ranks on the root."""

from __future__ import annotations

from autograd.tracer import getval

from mpiad._typing import Comm, LocalArray, Op, Rank, RootArray
from mpiad.primitives.catalogue import ALLREDUCE, Reduction
from mpiad.primitives.checks import reduction_of, root_of
from mpiad.primitives.cotangents import spec_like
from mpiad.primitives.operation import communicate
from mpiad.primitives.sum import mpi_sum
from mpiad.transport import SUM, channel
from mpiad.transport.core.buffers import require_sendable


def mpi_reduce(x: LocalArray, op: Op = SUM, root: Rank = 0, *, comm: Comm = None) -> RootArray:
    """Combine the arrays of all ranks, entry by entry, on the root.

    Parameters
    ----------
    x, op, comm
        As in `mpi_allreduce`.
    root : int

    Returns
    -------
    array
        Same shape and dtype as `x`: the result on the root, zeros elsewhere.

    Raises
    ------
    TypeError, ValueError
        As in `mpi_allreduce`; and if `root` isn't a rank of `comm`.

    Ranks
    -----
    All ranks of `comm` call it, with the same operation and root.

    Adjoint
    -------
    As for `mpi_allreduce`, with the root's cotangent instead of the sum of all ranks' cotangents.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> rank = mpiad.mpi_rank()
    >>> smallest = mpiad.mpi_reduce(np.array([1.0, rank]), MPI.MIN)
    >>> print(smallest if rank == 0 else np.array([1.0, 0.0]))
    [1. 0.]
    """
    used = channel(comm, "mpi_reduce")
    op = reduction_of(op, x, "mpi_reduce")
    root = root_of(root, used, "mpi_reduce")
    if op == SUM:
        return mpi_sum(x, root, comm=comm)
    require_sendable(getval(x), "mpi_reduce")
    # Other reductions need the result on all ranks for their adjoints.
    result = communicate(ALLREDUCE, x, Reduction(used, op, root))
    return result if used.rank == root else spec_like(result).zeros()
