"""`mpi_barrier`: wait for all ranks, also in the reverse pass."""

from __future__ import annotations

from mpiad._typing import Comm, Function
from mpiad.primitives.catalogue import BARRIER
from mpiad.primitives.operation import communicate
from mpiad.transport import Channel, channel


def mpi_barrier(*, comm: Comm = None) -> None:
    """Wait until all ranks have called this function.

    Ranks
    -----
    All ranks of `comm` call it.

    Adjoint
    -------
    There are no cotangents, but the reverse pass also waits for all ranks at this call.

    Examples
    --------
    >>> mpiad.mpi_barrier()
    """
    communicate(BARRIER, None, channel(comm, "mpi_barrier"))


def _forward(x: None, p: Channel) -> None:
    p.data.Barrier()


def _adjoint(ans: None, x: None, p: Channel) -> Function:
    """Return a barrier, which separates the adjoints of the steps before and after the forward barrier."""
    return lambda g: communicate(BARRIER, None, p)


def _tangent(dx: None, ans: None, x: None, p: Channel) -> None:
    return None


BARRIER.define(_forward, _adjoint, _tangent, lambda x, p: None)
