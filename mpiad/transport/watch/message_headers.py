"""Messages of debug mode: a header with shape, dtype and line precedes each message, on a separate communicator.

The k-th header of a sender and tag belongs to the k-th message of that sender and tag. Messages are also counted, with the
lines of their calls, for reports of unreceived ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from mpi4py import MPI

from mpiad._typing import Buffer, Comm, Status
from mpiad.errors import MessageMismatchError
from mpiad.transport.core.channels import live_channels
from mpiad.transport.core.lookup import open_world
from mpiad.transport.devices.device_arrays import Spec
from mpiad.transport.watch import watch_settings
from mpiad.transport.watch.call_agreement import name_and_place
from mpiad.transport.watch.communicator import Guarded, MessageWait, live
from mpiad.transport.watch.timed_waits import GuardedRequest

_SITES = 32  # number of lines stored for each peer and tag, the latest ones, since unreceived messages are usually these


class Entry(NamedTuple):
    """The number of messages to or from a peer with a tag, and the lines of the latest; `peer`: its rank in the world."""

    communicator: str
    peer: int
    tag: int
    count: int
    places: tuple[str, ...]


class Summary(NamedTuple):
    """A rank's messages, and the communicator, call and line of each request that hasn't been waited for."""

    sends: list[Entry]
    receives: list[Entry]
    requests: list[tuple[str, str, str]]


def summary() -> Summary:
    """Return this rank's entries of all channels."""
    parts = [comm.entries() for comm in live() if isinstance(comm, HeadedMessages)]
    return Summary(
        [entry for part in parts for entry in part.sends],
        [entry for part in parts for entry in part.receives],
        [request for part in parts for request in part.requests],
    )


def left_over() -> list[str]:
    """Return sentences about unreceived messages and pending requests; collective over the world in debug mode."""
    # Exceptions that were caught have already reported their pending communication.
    faulted = {channel.label for channel in live_channels() if channel.fault is not None}
    every = open_world().reverse.allgather((summary(), faulted))
    known = set().union(*[labels for _, labels in every])
    summaries = [Summary(*[[entry for entry in part if entry[0] not in known] for part in parts]) for parts, _ in every]
    requests = [
        f"Rank {rank} started {call} at {place} and never waited for it."
        for rank, here in enumerate(summaries)
        for _, call, place in here.requests
    ]
    return unreceived(summaries) + requests


def unreceived(summaries: Sequence[Summary | None]) -> list[str]:
    """Return a sentence for each peer and tag with messages that weren't received; `summaries`: of all ranks."""
    answers = [(rank, here) for rank, here in enumerate(summaries) if here]
    received = [(entry, rank) for rank, here in answers for entry in here.receives]
    taken = {(entry.communicator, entry.peer, rank, entry.tag): entry.count for entry, rank in received}
    lines = []
    for rank, here in answers:
        for entry in here.sends:
            # The receives of a rank that hasn't answered are unknown.
            if summaries[entry.peer] is None:
                continue
            lost = entry.count - taken.get((entry.communicator, rank, entry.peer, entry.tag), 0)
            if lost > 0:
                messages = "a message" if lost == 1 else f"{lost} messages"
                on = "" if entry.communicator == "world" else f" on {entry.communicator}"
                sent = f"Rank {rank} sent {messages} to rank {entry.peer} with tag {entry.tag}{on}"
                lines.append(f"{sent} at {', '.join(dict.fromkeys(entry.places[-lost:]))}, not received there.")
    return lines


_BYTES = 256  # fixed length of headers, since receives are posted before the headers arrive

Expected: TypeAlias = "tuple[GuardedRequest, bytearray]"  # the pending receive of a header, and its buffer


def _form(array: np.ndarray | Spec) -> bytes:
    array = getattr(array, "form", array)  # of the array that a message's memory stands for
    return f"shape {array.shape}, dtype {array.dtype}, {array.nbytes} bytes|".encode()


class HeadedMessages(Guarded):
    """A guarded communicator whose messages have headers; `metadata_comm`: the communicator for the headers."""

    def __init__(self, bare: Comm, metadata_comm: Comm, *args: Any, **keywords: Any):
        super().__init__(bare, *args, **keywords)
        self.metadata_comm = metadata_comm
        # By rank and tag: the numbers of messages; the lines of the latest sends; the number of messages still to be
        # received that were sent before debug mode, without headers; and the number of messages still to be sent whose
        # receives were started before it.
        self._sent, self._received = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        self._places = defaultdict[tuple[int, int], deque[str]](lambda: deque(maxlen=_SITES))
        self.skipped, self.unannounced = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        self.parts = tuple(  # the communicators that `channels.drain` empties
            Guarded(comm, f"{self.label}, {name}", self.members, None, self.owner())
            for comm, name in ((bare, "drained"), (metadata_comm, "headers"))
        )

    def count_send(self, peer: int, tag: int, place: str) -> None:
        """Count a sent message."""
        self._places[peer, tag].append(place)
        self._sent[peer, tag] += 1

    def entries(self) -> Summary:
        """Return the messages sent, the messages received, and the requests started and not waited for."""
        # `copy` is atomic; during a loop over the items another thread may add some.
        label, rank = self.label, self.members
        sent = [Entry(label, rank[p], tag, n, tuple(self._places[p, tag])) for (p, tag), n in self._sent.copy().items()]
        received = [Entry(label, rank[peer], tag, n, ()) for (peer, tag), n in self._received.copy().items()]
        channel = self.owner()
        started = () if channel is None else tuple(channel.started.values())
        waited_for = [held for kind, held, _ in started if not kind.startswith(("blocking", "background"))]
        requests = [request for held in waited_for for request in held]
        return Summary(sent, received, [(label, *request.caller) for request in requests if hasattr(request, "caller")])

    def skip(self, sent: dict[tuple[int, int], int], received: dict[tuple[int, int], int]) -> None:
        """Expect no headers for as many messages, by (rank, tag), as were started before debug mode; collective."""

        def of_peer(counts: dict[tuple[int, int], int], peer: int) -> Counter[int]:
            return Counter({tag: count for (rank, tag), count in counts.items() if rank == peer})

        here = [(of_peer(sent, peer), of_peer(received, peer)) for peer in range(self.size)]
        for peer, (their_sent, their_received) in enumerate(self.bare.alltoall(here)):
            # The difference of two Counters contains positive counts only.
            self.skipped.update({(peer, tag): count for tag, count in (their_sent - here[peer][1]).items()})
            self.unannounced.update({(peer, tag): count for tag, count in (their_received - here[peer][0]).items()})

    def Isend(self, message: Buffer, dest: int, tag: int) -> HeadedSend:
        """Start to send a header and the array of a message."""
        return HeadedSend(self, message, dest, tag)

    def Irecv(self, buffer: Buffer, source: int, tag: int) -> HeadedReceive:
        """Start to receive a header and the array."""
        return HeadedReceive(self, buffer, source, tag)

    def Mprobe(self, source: int, tag: int, status: Status = None) -> Any:
        """Wait for a message and match it; its header is compared when it is received."""
        status = MPI.Status() if status is None else status
        message = super().Mprobe(source, tag, status)
        return _Matched(self, message, status.source, status.tag)

    def expect(self, source: int, tag: int) -> Expected | None:
        """Start to receive the next header; None if the message has none."""
        if _counted_down(self.skipped, source, tag):
            return None
        header = bytearray(_BYTES)
        make = partial(MessageWait, self, False, source, tag)
        return GuardedRequest(self, make, self.metadata_comm.Irecv, [header, MPI.BYTE], source, tag, receives=True), header

    def compare(
        self, expected: Expected | None, buffer: np.ndarray | Spec, source: int, tag: int, by: tuple[str, str]
    ) -> None:
        """Raise an error if a received message differs from the array that it was received into."""
        buffer = getattr(buffer, "form", buffer)
        self._received[source, tag] += 1
        if expected is None:
            return
        request, header = expected
        request.Wait()
        if not header.startswith(_form(buffer)):
            form, _, sender = header.decode(errors="replace").rstrip().partition("|")
            name, place = by
            raise MessageMismatchError(
                f"{name}: rank {source} sent {form} with tag {tag}, but the array it is received into has shape "
                f"{buffer.shape} and dtype {buffer.dtype}: {buffer.nbytes} bytes. It was sent by {sender}, and received by "
                f"{name} at {place}. Give a template (`like`) with the shape and dtype of what is sent.",
                ranks=(self.members[source], self.members[self.rank]),
            )


def _counted_down(counts: Counter[tuple[int, int]], peer: int, tag: int) -> bool:
    if not counts[peer, tag]:
        return False
    counts[peer, tag] -= 1
    return True


class HeadedSend(GuardedRequest):
    """A send of a header and an array."""

    def __init__(self, comm: HeadedMessages, message: Buffer, dest: int, tag: int):
        self.caller = name, place = name_and_place()
        header = (_form(message[0]) + f"{name} at {place}".encode())[:_BYTES].ljust(_BYTES)
        make, self._ahead = partial(MessageWait, comm, True, dest, tag), None
        # The header is sent first, so after a message has arrived, a wait for its header ends.
        if not _counted_down(comm.unannounced, dest, tag):
            self._ahead = GuardedRequest(comm, make, comm.metadata_comm.Isend, [header, MPI.BYTE], dest, tag)
        comm.count_send(dest, tag, place)
        super().__init__(comm, make, comm.bare.Isend, message, dest, tag)

    def Test(self, status: Status = None) -> bool:
        """Return whether MPI has completed it."""
        return super().Test(status) and (self._ahead is None or self._ahead.Test())


class HeadedReceive(GuardedRequest):
    """A receive of a header and an array."""

    def __init__(self, comm: HeadedMessages, buffer: Buffer, source: int, tag: int):
        make = partial(MessageWait, comm, False, source, tag)
        super().__init__(comm, make, comm.bare.Irecv, buffer, source, tag, receives=True)
        self._buffer, self.caller = buffer[0], name_and_place()
        # Posted together with the receive of the array, since receives may be waited for in another order.
        self._known = source >= 0 and tag >= 0
        self._expected = comm.expect(source, tag) if self._known else None

    def Wait(self, status: Status = None) -> None:
        """Wait for the array and compare its header."""
        if not self._requests[0]:  # the null request: the receive was canceled
            return
        status = MPI.Status() if status is None else status
        try:
            super().Wait(status)
        except MPI.Exception as error:
            # MPI reports only that the message was too long; the header tells its size.
            if error.Get_error_class() == MPI.ERR_TRUNCATE:
                self._compare(status)
            raise
        self._compare(status)

    def _compare(self, status: Status) -> None:
        if not watch_settings.debug():  # debug mode has ended, and the sender may have sent no header
            self._take_back_header()
            return
        source, tag = status.source, status.tag
        expected = self._expected if self._known else self.owner.expect(source, tag)
        self.owner.compare(expected, self._buffer, source, tag, self.caller)

    def Cancel(self) -> None:
        """Cancel the receive."""
        super().Cancel()
        self._take_back_header()

    def _take_back_header(self) -> None:
        if self._expected is not None:
            self._expected[0].Cancel()


class _Matched:
    def __init__(self, comm: HeadedMessages, message: MPI.Message, source: int, tag: int):
        self._comm, self._message, self._source, self._tag = comm, message, source, tag
        self._caller = name_and_place()

    def Recv(self, buffer: np.ndarray) -> None:
        self.receive_and_compare(buffer, buffer)

    def receive_and_compare(self, buffer: np.ndarray, wanted: np.ndarray | Spec) -> None:
        """Receive the message, and compare its header with `wanted`; another `buffer` is given if `wanted` is too small."""
        self._message.Recv(buffer)
        self._comm.compare(self._comm.expect(self._source, self._tag), wanted, self._source, self._tag, self._caller)
