"""`mpi_isend`: start to send an array to another rank."""

from __future__ import annotations

import numpy as np

from mpiad._typing import Array, Comm, Function, Rank
from mpiad.primitives.catalogue import ISEND, WAIT
from mpiad.primitives.checks import address_to
from mpiad.primitives.cotangents import spec_like
from mpiad.primitives.operation import communicate
from mpiad.primitives.request import Request, started
from mpiad.primitives.send import prepared
from mpiad.transport import Envelope
from mpiad.transport.core.buffers import outgoing, private_copy
from mpiad.transport.core.messages import post_send
from mpiad.transport.devices.device_arrays import copied, result


def mpi_isend(x: Array, dest: Rank, *, tag: int = 0, comm: Comm = None) -> Request:
    """Start to send an array to another rank.

    Parameters
    ----------
    x : array or number
        It may be overwritten after the call, since a copy is sent. It may be empty.
    dest, tag, comm
        As in `mpi_send`.

    Returns
    -------
    Request
        The active send; `mpi_wait` returns the values sent.

    Raises
    ------
    TypeError, ValueError
        As in `mpi_send`.

    Ranks
    -----
    The sender calls it, and the receiver a matching `mpi_irecv` or `mpi_recv`.

    Adjoint
    -------
    The adjoint of the wait starts to receive the cotangent from `dest`. The adjoint of this call completes the receive, and
    adds the cotangent of the value that `mpi_wait` returned.

    Examples
    --------
    >>> rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
    >>> after, before = (rank + 1) % size, (rank - 1) % size
    >>> requests = [mpiad.mpi_irecv(np.zeros(1), before), mpiad.mpi_isend(np.array([float(rank)]), after)]
    >>> received, _ = mpiad.mpi_waitall(requests)
    >>> print(received == before)
    [ True]
    """
    return started(communicate(ISEND, x, address_to(x, dest, tag, comm, "mpi_isend")))


def _forward(x: Array, p: Envelope | None) -> Request:
    array = private_copy(outgoing(x, "mpi_isend"), x)
    handle = None if p is None else post_send(array, p)
    # The result of the wait: on the host the sent array itself, read-only since MPI may still read it, on a device a copy.
    value = _read_only(array) if type(array) is np.ndarray else copied(array)
    return Request("mpi_isend", p and p.channel, handle, value, spec_like(value), p)


def _read_only(array: np.ndarray) -> Array:
    view = array.view()
    view.flags.writeable = False
    return result(view)


def _adjoint(ans: Request, x: Array, p: Envelope | None, level: int) -> Function:
    """Return the transpose of copying x to `dest` and to the result of the wait: the sum of the two cotangents."""
    cell = ans.cell(level)

    def vjp(g: None) -> Array:
        request, g_wait = cell.request, cell.cotangent
        cell.request = cell.cotangent = None
        if request is None:  # if there is no receiver
            return g_wait
        received = communicate(WAIT, None, request)
        return received if g_wait is None else g_wait + received

    return vjp


def _tangent(dx: Array, ans: Request, x: Array, p: Envelope | None, level: int) -> None:
    ans.cell(level).request = communicate(ISEND, dx, p and p.along())


def _abstract(x: Array, p: Envelope | None) -> Request:
    array = outgoing(x, "mpi_isend")
    return Request("mpi_isend", p and p.channel, None, None, spec_like(array), p)


ISEND.define(_forward, _adjoint, _tangent, _abstract)
ISEND.prepared = prepared
