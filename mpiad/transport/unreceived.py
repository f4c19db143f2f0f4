"""What is still under way on a communicator before it is freed: messages that nobody will receive are taken off it.

MPI may give the number of a freed communicator to the next one that is made, and a message left on the first would be
received on the second, in the place of a new one. Messages between two ranks come in the order in which they were
sent, so each rank sends a last one to each, and receives from each until that has come.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from mpi4py import MPI

from mpiad._typing import Comm, Request

ABANDONED: list[tuple] = []
"""What MPI may still use: buffers, and communicators that can't be freed."""


def drain(comm: Comm, tag: int, attempt: int = 1) -> None:
    """Receive and drop all messages on a communicator on which this rank has no receive posted; collective.

    The last ones have the `tag`. An exception may end it before its end: the next `attempt` drops what that has left.
    """
    for part in getattr(comm, "parts", (comm,)):  # under watch, the messages and their headers
        _drain(part, tag, attempt)


@cache
def _final(attempt: int) -> np.ndarray:
    """Return a message that differs from the user's and from other attempts'; kept: MPI may send it after an exception."""
    return np.frombuffer(b"mpiad: last one %d." % attempt, dtype=np.uint8)


def _drain(comm: Comm, tag: int, attempt: int) -> None:
    final = _final(attempt)
    sending = [comm.Isend(final, peer, tag) for peer in range(comm.size)]
    for peer in range(comm.size):
        _receive_until_last(comm, peer, tag, final)
    for request in sending:
        request.Wait()


def _receive_until_last(comm: Comm, peer: int, tag: int, final: np.ndarray) -> None:
    status, last = MPI.Status(), False
    while not last:
        comm.Probe(peer, MPI.ANY_TAG, status)
        buffer = np.empty(status.Get_count(MPI.BYTE), dtype=np.uint8)
        comm.Recv(buffer, peer, status.tag, status)
        last = status.tag == tag and np.array_equal(buffer, final)


def has_ended(reduction: Request) -> bool:
    """Tell whether a reduction has ended as it should, so that nothing of it is under way."""
    try:
        return reduction.Test()
    except MPI.Exception:  # Open MPI gives up in its middle where the ranks' sizes differ
        return False


def give_back(comms: list[Comm], unended: bool) -> None:
    """Free communicators; collective. Not where a rank has begun a collective on them that others never come to."""
    # What it has sent stays under way, and MPI gives the numbers of those that are freed to others, who would receive it:
    # the sums of a communicator made later would be wrong.
    if unended:
        ABANDONED.append(tuple(comms))
        return
    for comm in comms:
        if comm != MPI.COMM_NULL:
            comm.Free()


def cancel(receive: Request) -> None:
    """Cancel a receive, and wait for its end."""
    if not receive:  # an exception came after its end
        return
    receive.Cancel()
    try:
        receive.Wait()
    except MPI.Exception:  # it had come, and was too long
        pass
