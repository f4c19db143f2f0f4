"""Take the messages that nobody will receive off a communicator, before it is freed.

MPI may give the number of a freed communicator to the next one that is made, and a message left on the first would be
received on the second, in the place of a new one. Messages between two ranks come in the order in which they were
sent, so each rank sends a last one to each, and receives from each until that has come.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from mpiad._typing import Comm

__all__ = ["drain"]

# Tells the last message from one of the user's with the same tag; each communicator is drained once.
_LAST = np.frombuffer(b"mpiad: last one.", dtype=np.uint8)


def drain(comm: Comm, tag: int) -> None:
    """Receive and drop all messages on a communicator; collective.

    Parameters
    ----------
    comm : mpi4py communicator
        On which this rank has no receive posted.
    tag : int
        Tag of the last messages.
    """
    for part in getattr(comm, "parts", (comm,)):  # under watch, the messages and their headers
        _drain(part, tag)


def _drain(comm: Comm, tag: int) -> None:
    sending = [comm.Isend(_LAST, peer, tag) for peer in range(comm.size)]
    for peer in range(comm.size):
        _receive_until_last(comm, peer, tag)
    for request in sending:
        request.Wait()


def _receive_until_last(comm: Comm, peer: int, tag: int) -> None:
    status, last = MPI.Status(), False
    while not last:
        comm.Probe(peer, MPI.ANY_TAG, status)
        buffer = np.empty(status.Get_count(MPI.BYTE), dtype=np.uint8)
        comm.Recv(buffer, peer, status.tag, status)
        last = status.tag == tag and np.array_equal(buffer, _LAST)
