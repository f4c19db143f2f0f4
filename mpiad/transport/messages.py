"""Point-to-point messages: Isend, Irecv and Wait, with every buffer kept until MPI is done with it."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from mpiad._typing import Array, Buffer, Request, Status
from mpiad.errors import DeadlockError, MessageMismatchError
from mpiad.transport import device_messages
from mpiad.transport.buffers import Spec
from mpiad.transport.channels import is_watched
from mpiad.transport.envelopes import Envelope
from mpiad.transport.staging import HOST, Way, way_of
from mpiad.transport.unreceived import ABANDONED

# Open MPI 5 writes a message that is too long past the end of the buffer before it reports it.
_LOOKS_FIRST = MPI.get_vendor()[0] == "Open MPI"


class Receipt:
    """A receive under way: the room for its array, MPI's buffer and request, and its address.

    Without a `kind` it is begun when it is waited for, by one call of MPI's that also sends `sent`: array, rank and tag.
    """

    __slots__ = ("buffer", "envelope", "requests", "room", "sent", "spec", "way")

    def __init__(
        self, spec: Spec, way: Way, room: Array, buffer: Buffer, envelope: Envelope, kind: str, sent: tuple | None = None
    ):
        self.spec, self.way, self.room, self.buffer, self.envelope = spec, way, room, buffer, envelope
        self.sent, self.requests = sent, list[Request]()
        if kind:
            begin, call = envelope.channel.begin, envelope.comm.Irecv
            self.requests = begin(kind, (buffer, room), call, buffer, envelope.peer, envelope.mpi_tag)


def post_send(array: Array, envelope: Envelope, kind: str = "send") -> list[Request]:
    """Start a send; an array of the host is memory that nobody changes before `finish_send`. Return MPI's request."""
    if type(array) is np.ndarray:
        return envelope.channel.begin(kind, array, envelope.comm.Isend, array, envelope.peer, envelope.mpi_tag)
    return device_messages.ship(array, envelope, kind)


def finish_send(requests: list[Request], envelope: Envelope) -> None:
    """End a send without waiting for its receiver, who may come only after what this rank does next."""
    envelope.channel.leave(requests)


def send(array: Array, envelope: Envelope) -> None:
    """Send without waiting for the receiver; an array of the host must be private memory."""
    envelope.channel.leave(post_send(array, envelope, "blocking send"))


def post_receive(spec: Spec, envelope: Envelope, kind: str = "receive") -> Receipt:
    """Start a receive of an array of known shape and dtype."""
    if spec.arrays is None:
        buffer = np.empty(spec.shape, spec.dtype)
        return Receipt(spec, HOST, buffer, buffer, envelope, kind)
    way = way_of(spec.arrays)
    room = way.room(spec.shape, spec.dtype)
    return Receipt(spec, way, room, way.buffer(room), envelope, kind)


def finish_receive(receipt: Receipt, call: str) -> Array:
    """Wait for a receive and return its array; a ValueError where the message has another number of bytes than that."""
    return _completed(receipt, MPI.Status(), call)


def receive(spec: Spec, envelope: Envelope, call: str) -> Array:
    """Receive an array; the envelope of a receive from anyone learns who it was."""
    status = MPI.Status()
    # MPICH 5, over UCX, loses messages of other nodes for which a receive from any rank is posted, but finds them.
    if _LOOKS_FIRST or envelope.peer == MPI.ANY_SOURCE:
        return _matched(spec, envelope, status, call)
    return _completed(post_receive(spec, envelope, "" if spec.arrays is None else "blocking receive"), status, call)


def _answered(envelope: Envelope, status: Status) -> None:
    # Also for a message that is refused: its sender has counted it.
    if envelope.number is None and status.source >= 0:
        envelope.answered_from(status.source, status.tag)


def _matched(spec: Spec, envelope: Envelope, status: Status, call: str) -> Array:
    """Receive a message whose size is looked at first; one of another size is taken and dropped."""
    way = way_of(spec.arrays)
    room = way.room(spec.shape, spec.dtype)
    buffer = way.buffer(room)
    message = envelope.comm.Mprobe(envelope.peer, envelope.mpi_tag, status)
    got = status.Get_count(MPI.BYTE)
    _answered(envelope, status)
    if got == spec.nbytes:
        message.Recv(buffer)
        return way.home(room)
    dropped = np.empty(got, dtype=np.uint8)
    if isinstance(message, MPI.Message):
        message.Recv(dropped)
    else:  # under watch its header is looked at
        _refused(message, dropped, buffer, spec, envelope)
    return _in_pieces(dropped, got, spec, envelope, room, call)


def _refused(message: Any, dropped: np.ndarray, buffer: Buffer, spec: Spec, envelope: Envelope) -> None:
    try:
        message.refuse(dropped, buffer)
    except MessageMismatchError:
        _drop_pieces(dropped, dropped.size, spec, envelope)
        raise


def _drop_pieces(buffer: Buffer, got: int, spec: Spec, envelope: Envelope) -> None:
    """Receive and drop what a message announces that isn't wanted: nobody else will."""
    announced = device_messages.read_announcement(buffer, got, spec)
    if announced is not None:
        device_messages.discard(*announced, envelope)


def swap(array: Array, there: Envelope, spec: Spec, back: Envelope, call: str) -> Array:
    """Send to one rank and receive from another, and wait for both."""
    if type(array) is np.ndarray and spec.arrays is None and there.comm is back.comm and not is_watched():
        buffer = np.empty(spec.shape, spec.dtype)
        return _completed(
            Receipt(spec, HOST, buffer, buffer, back, "", (array, there.peer, there.mpi_tag)), MPI.Status(), call
        )
    receipt = post_receive(spec, back, "blocking receive")
    sending = post_send(array, there, "blocking send")
    try:
        value = _completed(receipt, MPI.Status(), call)
    except BaseException:
        there.channel.leave(sending)  # it may be under way still, and its receiver may not come
        raise
    sending[0].Wait()
    there.channel.release(sending)
    return value


def too_long(error: MPI.Exception, room: np.ndarray, back: Envelope, call: str) -> ValueError | None:
    """Return what is raised for an error of MPI's while an array was received, None where it isn't the message's length."""
    if error.Get_error_class() != MPI.ERR_TRUNCATE:
        return None
    return ValueError(_mismatch(Spec(room.shape, room.dtype), "more bytes", back, call))


def require_whole(room: np.ndarray, status: Status, back: Envelope, call: str) -> None:
    """Raise a ValueError where a message had fewer bytes than the array that it was received into, or get its pieces."""
    got = status.Get_count(MPI.BYTE)
    if got != room.nbytes:
        room[...] = _in_pieces(room, got, Spec(room.shape, room.dtype), back, np.empty_like(room), call)


def _completed(receipt: Receipt, status: Status, call: str) -> Array:
    try:
        _await(receipt, status, call)
    except (MPI.Exception, ValueError, MessageMismatchError, DeadlockError):  # else, as by an interrupt, MPI may still write
        receipt.envelope.channel.release(receipt.requests)
        raise
    receipt.envelope.channel.release(receipt.requests)
    # MPI reports what is too long; what is too short it receives without a word.
    got = status.Get_count(MPI.BYTE)
    if got != receipt.buffer.nbytes:
        return _in_pieces(receipt.buffer, got, receipt.spec, receipt.envelope, receipt.room, call)
    return receipt.way.home(receipt.room)


def _await(receipt: Receipt, status: Status, call: str) -> None:
    there = receipt.envelope
    try:
        if receipt.requests:
            receipt.requests[0].Wait(status)
        elif receipt.sent is None:
            there.comm.Recv(receipt.buffer, there.peer, there.mpi_tag, status)
        else:
            there.comm.Sendrecv(*receipt.sent, receipt.buffer, there.peer, there.mpi_tag, status)
    except MessageMismatchError:  # under watch its header is looked at
        _answered(receipt.envelope, status)
        _drop_pieces(receipt.buffer, status.Get_count(MPI.BYTE), receipt.spec, receipt.envelope)
        raise
    except MPI.Exception as error:
        if receipt.sent is not None:
            ABANDONED.append(receipt.sent)  # it may be under way still
        _answered(receipt.envelope, status)
        if error.Get_error_class() == MPI.ERR_TRUNCATE:
            raise ValueError(_mismatch(receipt.spec, "more bytes", receipt.envelope, call)) from None
        raise
    _answered(receipt.envelope, status)


def _in_pieces(buffer: Buffer, got: int, spec: Spec, envelope: Envelope, room: Array, call: str) -> Array:
    """Receive what a message of another size announces; a ValueError where that isn't the array that is expected."""
    announced = device_messages.read_announcement(buffer, got, spec)
    if announced is None:
        raise ValueError(_mismatch(spec, f"{got} bytes", envelope, call))
    total, chunk = announced
    if total != spec.nbytes:
        device_messages.discard(total, chunk, envelope)
        raise ValueError(_mismatch(spec, f"{total} bytes", envelope, call))
    return device_messages.collect(spec, envelope, chunk, room)


def _mismatch(spec: Spec, got: str, envelope: Envelope, call: str) -> str:
    return (
        f"{call}: rank {envelope.peer} sent {got} with tag {envelope.tag}, but the array it is received into has "
        f"shape {spec.shape} and dtype {spec.dtype}: {spec.nbytes} bytes. "
        "Give a template (`like`) with the shape and dtype of what is sent."
    )
