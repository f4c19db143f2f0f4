"""Messages between arrays that stay, sent and received again and again: nothing is looked up or made but MPI's requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiad._typing import Rank
from mpiad.transport.channels import Channel
from mpiad.transport.envelopes import Envelope
from mpiad.transport.messages import received_into

__all__ = ["PreparedMessages"]


class PreparedMessages:
    """One message to and one from each of several ranks, all under way at once.

    Parameters
    ----------
    channel : Channel
    peers : sequence of int
    tag : int
    going, coming : sequence of array
        On the host and contiguous, one for each of these ranks: what is sent, and where what comes is written.
    """

    def __init__(
        self, channel: Channel, peers: Sequence[Rank], tag: int, going: Sequence[np.ndarray], coming: Sequence[np.ndarray]
    ):
        self._channel, self._tag = channel, tag
        self._going = [(Envelope(channel, peer, tag, True, 0), array) for peer, array in zip(peers, going)]
        self._coming = [(Envelope(channel, peer, tag, False, 0), array) for peer, array in zip(peers, coming)]
        self._sends: list[Any] = []
        self._receives: list[Any] = []
        self._status = MPI.Status()

    def start(self) -> None:
        """Start all; what is sent isn't changed, and what is received isn't read, before `finish`."""
        comm, tag = self._channel.data, self._tag
        # Receives first: what comes then needs no buffer of MPI's. They are counted as those of other ranks are.
        for envelope, room in self._coming:
            envelope.renew()
            self._receives.append(comm.Irecv(room, envelope.peer, tag))
        for envelope, array in self._going:
            envelope.renew()
            self._sends.append(comm.Isend(array, envelope.peer, tag))

    def finish(self, call: str) -> None:
        """Wait for all.

        Each peer receives before it waits, and waits for what this rank has sent: so these end, too.

        Raises
        ------
        ValueError
            Where a message has another number of bytes than the array that it is received into.
        """
        status = self._status
        for request, (envelope, room) in zip(self._receives, self._coming):
            received_into(room, request, status, envelope, call)
        for request in self._sends:
            request.Wait()
        self._receives.clear()
        self._sends.clear()

    def leave(self, reason: str) -> None:
        """Give up in the middle: the channel is refused until it is renewed, which ends what is under way."""
        for request, (_, room) in zip(self._receives, self._coming):
            if request != MPI.REQUEST_NULL:
                self._channel.hold("receive", request, room)
        for request, (_, array) in zip(self._sends, self._going):
            self._channel.hold("send", request, array)
        self._receives.clear()
        self._sends.clear()
        self._channel.mark(reason)
