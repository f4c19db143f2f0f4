"""`mpi_sendrecv`: all ranks name one pair, whose first sends to its second."""

from __future__ import annotations

from mpiad._typing import Comm, LocalArray, Rank
from mpiad.primitives.addresses import point_to_point
from mpiad.primitives.checks import partner_of
from mpiad.primitives.recv import mpi_recv
from mpiad.primitives.send import mpi_send
from mpiad.transport import Channel, channel
from mpiad.transport.tracing import once


def mpi_sendrecv(x: LocalArray, dest: Rank, source: Rank, tag: int = 0, comm: Comm = None) -> LocalArray:
    """Send x of rank `source` to rank `dest`, named alike by all ranks.

    Parameters
    ----------
    x : array or number
        On `dest` the template of the received array.
    dest, source : int
        The pair. Neighbors of each rank's own, as in MPI's call of this name, belong in `mpi_exchange`.
    tag : int
    comm : mpi4py intracommunicator, optional

    Returns
    -------
    array
        The received array on rank `dest`; `x` elsewhere.

    Raises
    ------
    TypeError
        If `x` can't be sent.
    ValueError
        If there is no such rank; on all ranks, if the ranks name different pairs in a communicator's first call.

    Ranks
    -----
    All ranks of `comm` call it, with the same pair.

    Adjoint
    -------
    The cotangent of `dest` goes to x of `source`, which also keeps its own; x of `dest` gets zero.

    Examples
    --------
    >>> x = mpiad.mpi_sendrecv(float(rank), dest=0, source=size - 1)
    >>> print(x == (size - 1 if rank == 0 else rank))
    True
    """
    used = channel(comm, "mpi_sendrecv")
    pair = [partner_of(rank, used, "mpi_sendrecv", name) for rank, name in ((dest, "dest"), (source, "source"))]
    # Once for each communicator: a program that mistakes the call for MPI's does so everywhere.
    if not used.pairs_compared:
        once(_compare_pairs, used, pair)
    # On all ranks, those too that only pass x on: plain autograd is refused by all or by none.
    point_to_point(comm, "mpi_sendrecv")
    receiver, sender = pair
    # No message: the pair is one rank, or one of it is none.
    if receiver == sender or receiver is None or sender is None:
        return x
    if used.rank == sender:
        return mpi_send(x, receiver, tag, comm)
    return mpi_recv(x, sender, tag, comm) if used.rank == receiver else x


def _compare_pairs(used: Channel, pair: list) -> None:
    pairs = used.data.allgather(pair)
    if any(other != pair for other in pairs):
        listed = ", ".join(f"rank {rank}: ({dest}, {source})" for rank, (dest, source) in enumerate(pairs))
        raise ValueError(
            f"mpi_sendrecv: all ranks must name the same pair (dest, source), but got {listed}. "
            "For neighbours of each rank's own use mpi_exchange."
        )
    used.pairs_compared = True
