"""`mpi_wait`, `mpi_waitall`: completion of requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mpiad._typing import Array, Function
from mpiad.primitives.catalogue import IRECV, ISEND, WAIT, Receiving
from mpiad.primitives.operation import communicate
from mpiad.primitives.request import CombinedRequest, Request, claim
from mpiad.transport.core.collectives import Summation
from mpiad.transport.core.messages import Receipt, finish_receive


def mpi_wait(request: Request | CombinedRequest) -> Array:
    """Complete a request and return its value.

    Parameters
    ----------
    request : Request
        Result of `mpi_isend`, `mpi_irecv`, `mpi_iallreduce` or `GhostExchange.begin_fetch`.

    Returns
    -------
    array
        The received array, or the sum. For a send, the sent values, as a read-only array; the call doesn't wait for the
        receiver.

    Raises
    ------
    RequestError
        If the request was waited for before, or was started in another trace.
    ValueError
        If the received message and the template passed to `mpi_irecv` differ in size.

    Ranks
    -----
    Each rank waits for the requests that it started, in any order.

    Adjoint
    -------
    The adjoint starts to communicate the cotangent; the adjoint of the call that started the request completes this
    communication. For `mpi_iallreduce`, the latter adjoint does both.

    Examples
    --------
    >>> size = mpiad.mpi_size()
    >>> request = mpiad.mpi_iallreduce(1.0)
    >>> print(mpiad.mpi_wait(request) == size)
    True
    """
    if isinstance(request, CombinedRequest):
        return request.finish(mpi_waitall(request.parts))
    return communicate(WAIT, None, claim(request, "mpi_wait"))


def mpi_waitall(requests: Iterable[Request]) -> list[Array]:
    """Complete several requests with `mpi_wait`; return the values in the order of the requests.

    Adjoint
    -------
    As for `mpi_wait`, from the last request to the first.

    Examples
    --------
    >>> size = mpiad.mpi_size()
    >>> requests = [mpiad.mpi_iallreduce(1.0), mpiad.mpi_iallreduce(2.0)]
    >>> print([float(total) / size for total in mpiad.mpi_waitall(requests)])
    [1.0, 2.0]
    """
    return [mpi_wait(request) for request in requests]


def _forward(x: None, request: Request) -> Array:
    handle: Any = request.handle
    request.done = True  # for requests of adjoints and tangents, which skip `claim`
    request.handle = None  # frees the buffers even if the user keeps the request
    if isinstance(handle, Receipt):
        return finish_receive(handle, request.call)
    if isinstance(handle, Summation):
        return handle.finish()
    if request.envelope is not None:
        # In the background, since its receive may depend on this rank's next operations.
        request.envelope.channel.leave(handle)
    return request.value


def _adjoint(ans: Array, x: None, request: Request, level: int) -> Function:
    """Return the function that sends or stores the cotangent; the adjoint of the start completes the communication."""
    cell, return_address = request.cell(level), request.envelope and request.envelope.back()
    # The adjoint must not refer to the request, which would keep the value in memory until the reverse pass.
    kind, spec = request.call, request.spec

    def vjp(g: Array) -> None:
        # The transpose of a receive is a send.
        if kind == "mpi_irecv":
            cell.request = return_address and communicate(ISEND, g, return_address)
            return
        # All ranks start their sums in the same order, but may wait for them in different orders. So the cotangent of a
        # sum is communicated by the adjoint of the start.
        cell.cotangent = g
        if return_address is not None:
            cell.request = communicate(IRECV, None, Receiving(spec, return_address))

    return vjp


def _tangent(dx: None, ans: Array, x: None, request: Request, level: int) -> Array:
    cell = request.cell(level)
    # The tangent of the start has stored the request in the cell.
    pending, cell.request = cell.request, None
    return communicate(WAIT, None, pending)


WAIT.define(_forward, _adjoint, _tangent)
