"""Point-to-point messages: Isend, Irecv and Wait, with every buffer kept until MPI is done with it."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from mpiad.errors import MessageMismatch
from mpiad.transport.buffers import Spec, result
from mpiad.transport.envelopes import Envelope

__all__ = ["Receipt", "finish_receive", "finish_send", "post_receive", "post_send", "receive", "send", "swap"]

# Open MPI 5 writes a message that is too long past the end of the buffer before it reports it.
_LOOKS_FIRST = MPI.get_vendor()[0] == "Open MPI"


class Receipt:
    """A receive under way: its buffer, its MPI request and its address."""

    __slots__ = ("buffer", "envelope", "request")

    def __init__(self, buffer: np.ndarray, request: Any, envelope: Envelope):
        self.buffer, self.request, self.envelope = buffer, request, envelope


def send(array: np.ndarray, envelope: Envelope) -> None:
    """Send without waiting for the receiver; `array` must be private memory."""
    request = envelope.comm.Isend(array, envelope.peer, envelope.mpi_tag)
    if not request.Test():
        envelope.channel.keep(request, array)


def post_send(array: np.ndarray, envelope: Envelope) -> Any:
    """Start a send of memory that nobody changes before `finish_send`; return MPI's request."""
    request = envelope.comm.Isend(array, envelope.peer, envelope.mpi_tag)
    envelope.channel.hold("send", request, array)
    return request


def finish_send(request: Any, envelope: Envelope) -> None:
    """End a send without waiting for its receiver, who may come only after what this rank does next."""
    array = envelope.channel.release(request)
    if not request.Test():
        envelope.channel.keep(request, array)


def post_receive(spec: Spec, envelope: Envelope) -> Receipt:
    """Start a receive of an array of known shape and dtype."""
    receipt = _receipt(spec, envelope)
    envelope.channel.hold("receive", receipt.request, receipt.buffer)
    return receipt


def _receipt(spec: Spec, envelope: Envelope) -> Receipt:
    buffer = spec.empty()
    return Receipt(buffer, envelope.comm.Irecv(buffer, envelope.peer, envelope.mpi_tag), envelope)


def finish_receive(receipt: Receipt, call: str) -> Any:
    """Wait for a receive and return its array.

    Raises
    ------
    ValueError
        Where the message has another number of bytes than the array it is received into.
    """
    receipt.envelope.channel.release(receipt.request)
    return _completed(receipt, MPI.Status(), call)


def receive(spec: Spec, envelope: Envelope, call: str) -> Any:
    """Receive an array; the envelope of a receive from anyone learns who it was."""
    status = MPI.Status()
    if _LOOKS_FIRST:
        return _matched(spec, envelope, status, call)
    return _completed(_receipt(spec, envelope), status, call)


def _answered(envelope: Envelope, status: Any) -> None:
    # Also for a message that is refused: its sender has counted it.
    if envelope.number is None and status.source >= 0:
        envelope.answered_from(status.source, status.tag)


def _matched(spec: Spec, envelope: Envelope, status: Any, call: str) -> Any:
    """Receive a message whose size is looked at first; one of another size is taken and dropped."""
    buffer = spec.empty()
    message = envelope.comm.Mprobe(envelope.peer, envelope.mpi_tag, status)
    got = status.Get_count(MPI.BYTE)
    _answered(envelope, status)
    if got == buffer.nbytes:
        message.Recv(buffer)
        return result(buffer)
    dropped = np.empty(got, dtype=np.uint8)
    if isinstance(message, MPI.Message):
        message.Recv(dropped)
    else:  # under watch its header is looked at
        message.refuse(dropped, buffer)
    raise ValueError(_mismatch(buffer, f"{got} bytes", envelope, call))


def swap(array: np.ndarray, there: Envelope, spec: Spec, back: Envelope, call: str) -> Any:
    """Send to one rank and receive from another, and wait for both."""
    receipt = _receipt(spec, back)
    sending = there.comm.Isend(array, there.peer, there.mpi_tag)
    try:
        value = _completed(receipt, MPI.Status(), call)
    except (ValueError, MPI.Exception):
        there.channel.keep(sending, array)
        raise
    sending.Wait()
    return value


def _completed(receipt: Receipt, status: Any, call: str) -> Any:
    buffer = receipt.buffer
    try:
        receipt.request.Wait(status)
    except MessageMismatch:  # under watch its header is looked at
        _answered(receipt.envelope, status)
        raise
    except MPI.Exception as error:
        _answered(receipt.envelope, status)
        _raise_if_truncated(error, buffer, receipt.envelope, call)
        raise
    _answered(receipt.envelope, status)
    # MPI reports what is too long; what is too short it receives without a word.
    got = status.Get_count(MPI.BYTE)
    if got != buffer.nbytes:
        raise ValueError(_mismatch(buffer, f"{got} bytes", receipt.envelope, call))
    return result(buffer)


def _raise_if_truncated(error: Any, buffer: np.ndarray, envelope: Envelope, call: str) -> None:
    if error.Get_error_class() == MPI.ERR_TRUNCATE:
        raise ValueError(_mismatch(buffer, "more bytes", envelope, call)) from None


def _mismatch(buffer: np.ndarray, got: str, envelope: Envelope, call: str) -> str:
    return (
        f"{call}: rank {envelope.peer} sent {got} with tag {envelope.tag}, but the array it is received into has "
        f"shape {buffer.shape} and dtype {buffer.dtype}: {buffer.nbytes} bytes. "
        "Give a template (`like`) with the shape and dtype of what is sent."
    )
