"""`mpi_send`: send an array to another rank, without waiting for the receiver."""

from __future__ import annotations

from mpiad._typing import Array, Comm, Function, Rank
from mpiad.primitives.catalogue import RECV, SEND, Receiving
from mpiad.primitives.checks import address_to
from mpiad.primitives.cotangents import spec_like
from mpiad.primitives.operation import communicate
from mpiad.transport import Envelope, Spec
from mpiad.transport.core.buffers import outgoing, private_copy
from mpiad.transport.core.messages import Prepared, prepared_send, send


def mpi_send(x: Array, dest: Rank, *, tag: int = 0, comm: Comm = None) -> Array:
    """Send an array to another rank, without waiting for the receiver.

    Parameters
    ----------
    x : array or number
    dest : int
        The receiver, which may be this rank; None or `MPI.PROC_NULL` for no receiver.
    tag : int
    comm : mpi4py intracommunicator, optional
        Its first use must be a collective call, for example `mpi_init(comm)`.

    Returns
    -------
    array
        `x` itself, which may be overwritten after the call, since a copy is sent.

    Raises
    ------
    TypeError, ValueError
        If `x` can't be sent, `dest` isn't a rank of `comm`, or `tag` is invalid.

    Ranks
    -----
    The sender calls it, and the receiver a matching `mpi_recv`.

    Adjoint
    -------
    The cotangent of `x` is the sum of the result's cotangent and the cotangent received from `dest`.

    Examples
    --------
    A shift around a ring, in which all ranks send first:

    >>> rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
    >>> after, before = (rank + 1) % size, (rank - 1) % size
    >>> _ = mpiad.mpi_send(np.ones(2) * rank, after)
    >>> print(mpiad.mpi_recv(np.zeros(2), before) == before)
    [ True  True]
    """
    return communicate(SEND, x, address_to(x, dest, tag, comm, "mpi_send"))


def _forward(x: Array, p: Envelope | None) -> Array:
    array = outgoing(x, "mpi_send")
    if p is not None:
        # A copy, because the call doesn't wait for the receiver, and the caller may overwrite x.
        send(private_copy(array, x), p)
    return x if hasattr(x, "dtype") else array[()]


def prepared(p: Envelope, x: Array, out: None) -> Prepared | None:
    """Return the send of the array x, which is also the result, or None; see `Operation`."""
    return prepared_send(x, p)


def _adjoint(ans: Array, x: Array, p: Envelope | None) -> Function:
    """Return the transpose of copying x to the receiver and to the result: the sum of the two cotangents."""
    if p is None:
        return lambda g: g
    receiving = Receiving(spec_like(ans), p.back())
    return lambda g: g + communicate(RECV, None, receiving)


def _tangent(dx: Array, ans: Array, x: Array, p: Envelope | None) -> Array:
    return communicate(SEND, dx, p and p.along())


def _abstract(x: Array, p: Envelope | None) -> Array | Spec:
    return x if hasattr(x, "dtype") else spec_like(outgoing(x, "mpi_send"))


SEND.define(_forward, _adjoint, _tangent, _abstract)
SEND.prepared = prepared
