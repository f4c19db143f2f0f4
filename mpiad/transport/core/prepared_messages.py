"""Repeated communication of fixed arrays: nothing is looked up or created except MPI's requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiad._typing import Rank
from mpiad.transport.core.buffers import Spec
from mpiad.transport.core.channels import ABANDONED, Channel
from mpiad.transport.core.messages import Envelope, receive_error, require_whole


def as_message(array: np.ndarray) -> list[Any]:
    """Return the buffer of a contiguous host array with its datatype, whose lookup would take as long as the call."""
    return [array, array.size, MPI.Datatype.fromcode(array.dtype.char)]


def prepared_sum(channel: Channel, array: np.ndarray, out: np.ndarray) -> Callable[[], object]:
    """Return the function that sums the ranks' small arrays, with the result on all ranks."""
    sent, received = as_message(array), as_message(out)
    return lambda: channel.data.Allreduce(sent, received)


def prepared_swap(
    array: np.ndarray, there: Envelope, destination: np.ndarray, back: Envelope, call: str
) -> Callable[[], object]:
    """Return the function that sends one array and receives another; before a call renew the envelopes (of one tag)."""
    sent, received, status, channel = as_message(array), as_message(destination), MPI.Status(), there.channel
    dest, source, reverse, size, byte = there.peer, back.peer, there.reverse, destination.nbytes, MPI.BYTE
    # The tag of both forward messages; tags of adjoints depend on the message's number.
    tag = there.tag

    def swap() -> None:
        try:
            if reverse:
                channel.reverse.Sendrecv(sent, dest, there.mpi_tag, received, source, back.mpi_tag, status)
            else:
                channel.data.Sendrecv(sent, dest, tag, received, source, tag, status)
        except MPI.Exception as error:
            ABANDONED.append((sent, received))  # MPI may still use them
            raise receive_error(error, Spec.of(destination), back, call) from None
        if status.Get_count(byte) != size:  # tested here, since a function call would take a tenth of the time
            require_whole(destination, status, back, call)

    to_itself = dest == source == channel.rank
    if not to_itself or (array.shape, array.dtype) != (destination.shape, destination.dtype):
        return swap

    def copied() -> None:
        # A rank's messages to itself arrive in order. So this message is the next, unless an earlier one is in flight.
        if there.number == back.number:
            destination[...] = array
        else:
            swap()

    return copied


class PreparedMessages:
    """One message to and one from each of several ranks, all in flight at once.

    `sent`, `received`: for each of these ranks a contiguous host array to send, and one to receive into.
    """

    def __init__(
        self, channel: Channel, peers: Sequence[Rank], tag: int, sent: Sequence[np.ndarray], received: Sequence[np.ndarray]
    ):
        self._channel, self._tag = channel, tag
        self._outgoing = [(Envelope(channel, peer, tag, True, 0), x, as_message(x)) for peer, x in zip(peers, sent)]
        self._incoming = [(Envelope(channel, peer, tag, False, 0), x, as_message(x)) for peer, x in zip(peers, received)]
        self._sends: list[Any] = []
        self._receives: list[Any] = []
        self._status = MPI.Status()

    def start(self) -> None:
        """Start all messages; until `finish`, arrays to send mustn't be changed, and the others mustn't be read."""
        comm, tag = self._channel.data, self._tag
        # Receives first, so that MPI needn't buffer messages.
        for envelope, _, message in self._incoming:
            envelope.renew()
            # Uninterruptible, as in `Channel.begin`.
            self._receives.extend(map(comm.Irecv, (message,), (envelope.peer,), (tag,)))
        for envelope, _, message in self._outgoing:
            envelope.renew()
            self._sends.extend(map(comm.Isend, (message,), (envelope.peer,), (tag,)))

    def finish(self, call: str) -> None:
        """Wait for all messages; raise a ValueError if one has another number of bytes than its array.

        The waits end, since each peer posts its receives before it waits.
        """
        status = self._status
        for request, (envelope, destination, _) in zip(self._receives, self._incoming):
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
        """Abandon the messages after an exception; calls on the channel are refused until it is renewed."""
        for request, (_, destination, _) in zip(self._receives, self._incoming):
            if request != MPI.REQUEST_NULL:
                self._channel.hold("receive", request, destination)
        for request, (_, array, _) in zip(self._sends, self._outgoing):
            self._channel.hold("send", request, array)
        self._receives.clear()
        self._sends.clear()
        self._channel.mark(reason)
