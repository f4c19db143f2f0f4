"""`mpi_irecv`: start to receive an array from another rank."""

from __future__ import annotations

from functools import partial

from autograd.tracer import getval

from mpiad._typing import Array, Comm, Function, Rank
from mpiad.primitives.catalogue import IRECV, WAIT, Receiving
from mpiad.primitives.checks import address_from
from mpiad.primitives.operation import communicate
from mpiad.primitives.recv import prepared
from mpiad.primitives.request import Request, started
from mpiad.transport import spec_of
from mpiad.transport.core.messages import Receipt


def mpi_irecv(like: Array, source: Rank, *, tag: int = 0, comm: Comm = None) -> Request:
    """Start to receive an array from another rank.

    Parameters
    ----------
    like, source, tag, comm
        As in `mpi_recv`, but without wildcards.

    Returns
    -------
    Request
        The active receive; `mpi_wait` returns the array sent, or zeros if there is no sender.

    Raises
    ------
    TypeError, ValueError
        As in `mpi_recv`; a message of another size than `like` raises an error in `mpi_wait`.

    Ranks
    -----
    The receiver calls it, and the sender a matching `mpi_isend` or `mpi_send`.

    Adjoint
    -------
    The adjoint of the wait starts to send the cotangent back; the adjoint of this call completes the send.

    Examples
    --------
    >>> rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
    >>> after, before = (rank + 1) % size, (rank - 1) % size
    >>> request = mpiad.mpi_irecv(np.zeros(1), before)
    >>> _ = mpiad.mpi_send(np.array([float(rank)]), after)
    >>> print(mpiad.mpi_wait(request) == before)
    [ True]
    """
    spec = spec_of(getval(like), "mpi_irecv", "like")
    return started(communicate(IRECV, None, Receiving(spec, address_from(source, tag, comm, "mpi_irecv"))))


def _forward(x: None, p: Receiving) -> Request:
    if p.source is None:
        return Request("mpi_irecv", None, None, p.spec.zeros(), p.spec)
    return Request("mpi_irecv", p.source.channel, Receipt(p.spec, p.source), None, p.spec, p.source)


def _adjoint(ans: Request, x: None, p: Receiving, level: int) -> Function:
    """Return the function that completes the send of the cotangent, which the adjoint of the wait started."""
    cell = ans.cell(level)

    def vjp(g: None) -> None:
        if cell.request is not None:  # None if there is no sender
            communicate(WAIT, None, cell.request)
            cell.request = None

    return vjp


def _tangent(dx: None, ans: Request, x: None, p: Receiving, level: int) -> None:
    ans.cell(level).request = communicate(IRECV, None, p._replace(source=p.source and p.source.along()))


def _abstract(x: None, p: Receiving) -> Request:
    return Request("mpi_irecv", p.source and p.source.channel, None, None, p.spec, p.source)


IRECV.define(_forward, _adjoint, _tangent, _abstract)
IRECV.prepared = partial(prepared, call="mpi_irecv")
