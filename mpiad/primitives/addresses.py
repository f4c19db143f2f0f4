"""Addresses of messages, made from the arguments of point-to-point calls.

An address is an `Envelope`, and contains the number of its message. The creation of an address counts the message, on the
sender and on the receiver separately. So all arguments are checked first: if the call raised an error after counting, the
counts of the two ranks would differ.
"""

from __future__ import annotations

from autograd.tracer import getval

from mpiad._typing import Array, Comm
from mpiad.primitives.checks import partner_of, tag_of
from mpiad.primitives.foreign import refuse_foreign_trace
from mpiad.transport import Channel, Envelope, channel
from mpiad.transport.core.buffers import require_sendable
from mpiad.transport.core.tracing import tracing


def point_to_point(comm: Comm, call: str) -> Channel:
    """Return the channel of a point-to-point call, and record that an exception may leave messages on it."""
    used, tape = channel(comm, call, collective=False), tracing.tape
    refuse_foreign_trace(tape, call)
    if tape is not None:
        tape.channels.add((used, True))
    elif tracing.channels is not None:
        tracing.channels.add((used, True))
    return used


def address_to(x: Array, dest: object, tag: object, comm: Comm, call: str) -> Envelope | None:
    """Return the address of a message with `x` to `dest`; None if there is no receiver."""
    require_sendable(getval(x), call)
    used = point_to_point(comm, call)
    peer, tag = partner_of(dest, used, call, "dest"), tag_of(tag, used, call)
    return None if peer is None else Envelope(used, peer, tag, True)


def addresses(
    x: Array, dest: object, source: object, tag: object, comm: Comm, call: str
) -> tuple[Envelope | None, Envelope | None]:
    """Return the addresses of a message with `x` to `dest` and of a message from `source`; None if there is no partner."""
    require_sendable(getval(x), call)
    used = point_to_point(comm, call)
    receiver, sender = partner_of(dest, used, call, "dest"), partner_of(source, used, call, "source")
    tag = tag_of(tag, used, call)
    return (
        None if receiver is None else Envelope(used, receiver, tag, True),
        None if sender is None else Envelope(used, sender, tag, False),
    )


def address_from(source: object, tag: object, comm: Comm, call: str, wildcard: bool = False) -> Envelope | None:
    """Return the address of a message from `source`; None if there is no sender."""
    used = point_to_point(comm, call)
    peer, tag = partner_of(source, used, call, "source", wildcard), tag_of(tag, used, call, wildcard)
    return None if peer is None else Envelope(used, peer, tag, False)
