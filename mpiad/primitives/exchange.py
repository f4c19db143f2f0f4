"""`mpi_exchange`: each rank sends to one neighbor and receives from another."""

from __future__ import annotations

from typing import NoReturn

from autograd.tracer import getval

from mpiad._typing import Array, Comm, Function, LocalArray, Rank
from mpiad.primitives.catalogue import EXCHANGE, Exchange
from mpiad.primitives.checks import addresses, refuse_keywords
from mpiad.primitives.cotangents import spec_like
from mpiad.primitives.operation import communicate
from mpiad.transport.core.buffers import outgoing, private_copy, spec_of
from mpiad.transport.core.messages import Prepared, prepared_receive, prepared_send, prepared_swap, receive, send, swap


def mpi_exchange(
    x: LocalArray,
    dest: Rank | None,
    source: Rank | None,
    *,
    like: Array = None,
    tag: int = 0,
    comm: Comm = None,
    **unsupported: NoReturn,
) -> LocalArray:
    """Send x to one rank and receive an array from another, as in shifts around a ring, swaps and halo exchanges.

    Parameters
    ----------
    x : array or number
    dest, source : int
        The receiver of this rank's x, and the sender of this rank's result; None or `MPI.PROC_NULL` (as returned by
        `Cart.Shift`) for no partner.
    like : array or number, optional
        Template with the shape and dtype of the received array; `x` by default.
    tag : int
        The tag of both messages, the same on both ends of each: in a ring, on all ranks. Otherwise the ranks wait forever.
    comm : mpi4py intracommunicator, optional
        Its first use must be a collective call, for example `mpi_init(comm)`.
    **unsupported
        There is no `sendtag`, `recvtag` or `status`. For two tags call `mpi_irecv`, `mpi_isend` and `mpi_waitall`.

    Returns
    -------
    array
        The array sent by `source`; zeros if `source` is None.

    Raises
    ------
    TypeError
        If `x` can't be sent or `like` can't be received, or a keyword is unsupported.
    ValueError
        If `dest` or `source` isn't a rank of `comm`, `tag` is invalid, or the message and `like` differ in size.

    Ranks
    -----
    All ranks that exchange arrays call it: `dest` must receive from this rank, and `source` must send to this rank.

    Adjoint
    -------
    The reversed exchange: the cotangent of the result is sent to `source`, and the cotangent of x is received from `dest`.

    Examples
    --------
    >>> rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
    >>> after, before = (rank + 1) % size, (rank - 1) % size
    >>> print(mpiad.mpi_exchange(float(rank), dest=after, source=before) == before)
    True
    """
    if unsupported:
        refuse_keywords(unsupported, "mpi_exchange")
    template, argument = (x, "x") if like is None else (like, "like")
    spec = spec_of(getval(template), "mpi_exchange", argument)
    receiver, sender = addresses(x, dest, source, tag, comm, "mpi_exchange")
    return communicate(EXCHANGE, x, Exchange(receiver, spec, sender))


def _forward(x: Array, p: Exchange) -> Array:
    array = outgoing(x, "mpi_exchange")
    # Send and receive are active at the same time; otherwise a ring of ranks would deadlock.
    if p.dest is not None and p.source is not None:
        return swap(array, p.dest, p.spec, p.source, "mpi_exchange")
    if p.dest is not None:
        # A copy, because the call doesn't wait for the receiver, and the caller may overwrite x.
        send(private_copy(array, x), p.dest)
    return p.spec.zeros() if p.source is None else receive(p.spec, p.source, "mpi_exchange")


def _prepared(p: Exchange, x: Array, out: Array | None) -> Prepared | None:
    if p.source is None:  # programs read zeros instead of a result from nobody
        return prepared_send(x, p.dest)  # type: ignore[arg-type]
    target = p.spec.empty() if out is None else out
    if p.dest is None:
        return prepared_receive(target, p.source, "mpi_exchange")
    return prepared_swap(x, p.dest, target, p.source, "mpi_exchange")


def _adjoint(ans: Array, x: Array, p: Exchange) -> Function:
    """Return the transpose of a permutation between ranks: its inverse, with both directions reversed."""
    reverse = Exchange(p.source and p.source.back(), spec_like(x), p.dest and p.dest.back())
    return lambda g: communicate(EXCHANGE, g, reverse)


def _tangent(dx: Array, ans: Array, x: Array, p: Exchange) -> Array:
    return communicate(EXCHANGE, dx, Exchange(p.dest and p.dest.along(), p.spec, p.source and p.source.along()))


EXCHANGE.define(_forward, _adjoint, _tangent)
EXCHANGE.prepared = _prepared
