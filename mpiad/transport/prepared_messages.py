"""Repeated communication of fixed arrays: nothing is looked up or created except MPI's requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiad._typing import Rank
from mpiad.transport.buffers import Spec
from mpiad.transport.channels import ABANDONED, Channel
from mpiad.transport.messages import Envelope, receive_error, require_whole


def as_message(array: np.ndarray) -> list[Any]:
    """Return a contiguous array on the host as MPI takes it without asking for its type, which would take as long again."""
    return [array, array.size, MPI.Datatype.fromcode(array.dtype.char)]


def prepared_sum(channel: Channel, array: np.ndarray, out: np.ndarray) -> Callable[[], object]:
    """Return the function that adds up every rank's array, too small to be divided, with the result on all ranks."""
    going, coming = as_message(array), as_message(out)
    return lambda: channel.data.Allreduce(going, coming)


def prepared_swap(
    array: np.ndarray, there: Envelope, destination: np.ndarray, back: Envelope, call: str
) -> Callable[[], object]:
    """Return the function that swaps two arrays by addresses of one tag that are renewed before."""
    going, coming, status, channel = as_message(array), as_message(destination), MPI.Status(), there.channel
    dest, source, reverse, size, byte = there.peer, back.peer, there.reverse, destination.nbytes, MPI.BYTE
    # That of both forward messages, which have one; those of adjoints have the message's number in them.
    tag = there.tag

    def swap() -> None:
        try:
            if reverse:
                channel.reverse.Sendrecv(going, dest, there.mpi_tag, coming, source, back.mpi_tag, status)
            else:
                channel.data.Sendrecv(going, dest, tag, coming, source, tag, status)
        except MPI.Exception as error:
            ABANDONED.append((going, coming))  # MPI may still use them
            raise receive_error(error, Spec.of(destination), back, call) from None
        if status.Get_count(byte) != size:  # asked here, since a call costs a tenth of all
            require_whole(destination, status, back, call)

    to_itself = dest == source == channel.rank
    if not to_itself or (array.shape, array.dtype) != (destination.shape, destination.dtype):
        return swap

    def copied() -> None:
        # Messages from a rank to itself come in their order: this one next, unless an earlier one hasn't been received.
        if there.number == back.number:
            destination[...] = array
        else:
            swap()

    return copied


class PreparedMessages:
    """One message to and one from each of several ranks, all under way at once.

    `going`, `coming`: on the host and contiguous, one for each of these ranks: the arrays to send, and those to receive
    into.
    """

    def __init__(
        self, channel: Channel, peers: Sequence[Rank], tag: int, going: Sequence[np.ndarray], coming: Sequence[np.ndarray]
    ):
        self._channel, self._tag = channel, tag
        self._going = [(Envelope(channel, peer, tag, True, 0), x, as_message(x)) for peer, x in zip(peers, going)]
        self._coming = [(Envelope(channel, peer, tag, False, 0), x, as_message(x)) for peer, x in zip(peers, coming)]
        self._sends: list[Any] = []
        self._receives: list[Any] = []
        self._status = MPI.Status()

    def start(self) -> None:
        """Start all; arrays to send mustn't be changed, and those to receive mustn't be read, before `finish`."""
        comm, tag = self._channel.data, self._tag
        # Receives first: messages then need no buffer of MPI's. They are counted as those of other ranks are.
        for envelope, _, message in self._coming:
            envelope.renew()
            self._receives.extend(map(comm.Irecv, (message,), (envelope.peer,), (tag,)))  # in one step, as `Channel.begin`
        for envelope, _, message in self._going:
            envelope.renew()
            self._sends.extend(map(comm.Isend, (message,), (envelope.peer,), (tag,)))

    def finish(self, call: str) -> None:
        """Wait for all; a ValueError if a message has another number of bytes than the array that it is received into.

        Each peer receives before it waits, and waits for this rank's messages: so these waits end, too.
        """
        status = self._status
        for request, (envelope, destination, _) in zip(self._receives, self._coming):
            try:
                request.Wait(status)
            except MPI.Exception as error:
                raise receive_error(error, Spec.of(destination), envelope, call) from None
            require_whole(destination, status, envelope, call)
        for request in self._sends:
            request.Wait()
        self._receives.clear()
        self._sends.clear()

    def leave(self, reason: str) -> None:
        """Give up in the middle: the channel is refused until it is renewed, which ends pending messages."""
        for request, (_, destination, _) in zip(self._receives, self._coming):
            if request != MPI.REQUEST_NULL:
                self._channel.hold("receive", request, destination)
        for request, (_, array, _) in zip(self._sends, self._going):
            self._channel.hold("send", request, array)
        self._receives.clear()
        self._sends.clear()
        self._channel.mark(reason)
