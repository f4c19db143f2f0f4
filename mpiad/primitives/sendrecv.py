"""`mpi_sendrecv`: send an array from one rank to another, in a call on all ranks."""

from __future__ import annotations

from typing import NoReturn

from mpiad._typing import Comm, LocalArray, Rank
from mpiad.primitives.checks import partner_of, point_to_point, refuse_keywords
from mpiad.primitives.recv import mpi_recv
from mpiad.primitives.send import mpi_send
from mpiad.transport import Channel, channel
from mpiad.transport.core.tracing import once


def mpi_sendrecv(
    x: LocalArray, dest: Rank, source: Rank, *, tag: int = 0, comm: Comm = None, **unsupported: NoReturn
) -> LocalArray:
    """Send `x` of rank `source` to rank `dest`; all ranks pass the same pair of ranks.

    Parameters
    ----------
    x : array or number
        The array to send on `source`, and the template of the received array on `dest`.
    dest, source : int
        The pair of ranks. If each rank has different neighbors, as in MPI's Sendrecv, use `mpi_exchange`.
    tag : int
    comm : mpi4py intracommunicator, optional
    **unsupported
        There is no `sendtag`, `recvtag` or `status`: one message is sent, from `source`, with `tag`.

    Returns
    -------
    array
        The received array on rank `dest`; `x` on other ranks.

    Raises
    ------
    TypeError
        If `x` can't be sent, or a keyword is unsupported.
    ValueError
        If `dest` or `source` isn't a rank of `comm`. On all ranks, if ranks pass different pairs; only the first
        call on a communicator checks this.

    Ranks
    -----
    All ranks of `comm` call it, with the same pair.

    Adjoint
    -------
    The cotangent of the result on `dest` is added to the cotangent of `x` on `source`; the cotangent of `x` on `dest` is
    zero.

    Examples
    --------
    >>> rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
    >>> x = mpiad.mpi_sendrecv(float(rank), dest=0, source=size - 1)
    >>> print(x == (size - 1 if rank == 0 else rank))
    True
    """
    if unsupported:
        refuse_keywords(unsupported, "mpi_sendrecv")
    used = channel(comm, "mpi_sendrecv")
    pair = [partner_of(rank, used, "mpi_sendrecv", name) for rank, name in ((dest, "dest"), (source, "source"))]
    # In the first call only: a program that mistakes this function for MPI's Sendrecv does so in every call.
    if not used.pairs_compared:
        once(_compare_pairs, used, pair)
    # Called on all ranks, not only on the pair, so that under plain autograd all ranks raise, and no rank waits.
    point_to_point(comm, "mpi_sendrecv")
    receiver, sender = pair
    if receiver == sender or receiver is None or sender is None:
        return x
    if used.rank == sender:
        return mpi_send(x, receiver, tag=tag, comm=comm)
    return mpi_recv(x, sender, tag=tag, comm=comm) if used.rank == receiver else x


def _compare_pairs(channel: Channel, pair: list) -> None:
    pairs = channel.data.allgather(pair)
    if any(other != pair for other in pairs):
        listed = ", ".join(f"rank {rank}: ({dest}, {source})" for rank, (dest, source) in enumerate(pairs))
        raise ValueError(
            f"mpi_sendrecv: all ranks must name the same pair (dest, source), but got {listed}. "
            "For neighbors that differ between ranks use mpi_exchange."
        )
    channel.pairs_compared = True
