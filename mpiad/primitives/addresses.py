"""From the arguments of point-to-point calls to the addresses of their messages."""

from __future__ import annotations

from typing import Any

from autograd.tracer import getval

from mpiad._typing import Comm
from mpiad.primitives.checks import partner_of, tag_of
from mpiad.primitives.foreign import refuse_foreign_trace
from mpiad.primitives.operation import current
from mpiad.transport import Channel, Envelope, Spec, channel, spec_of

__all__ = ["address_from", "address_to", "point_to_point", "template"]


def point_to_point(comm: Comm, call: str) -> Channel:
    """Return the channel of a point-to-point call, noted on the tape as one that an exception can leave unfinished."""
    used, tape = channel(comm, call, collective=False), current.tape
    refuse_foreign_trace(tape, call)
    if tape is not None:
        tape.channels.add(used)
    return used


def address_to(dest: Any, tag: Any, comm: Comm, call: str) -> Envelope | None:
    """Return the address of a message to `dest`, None for no partner."""
    used = point_to_point(comm, call)
    peer, tag = partner_of(dest, used, call, "dest"), tag_of(tag, used, call)
    return None if peer is None else Envelope(used, peer, tag, True)


def address_from(source: Any, tag: Any, comm: Comm, call: str, wildcard: bool = False) -> Envelope | None:
    """Return the address of a message from `source`, None for no partner."""
    used = point_to_point(comm, call)
    peer, tag = partner_of(source, used, call, "source", wildcard), tag_of(tag, used, call, wildcard)
    return None if peer is None else Envelope(used, peer, tag, False)


def template(like: Any, call: str, argument: str = "like") -> Spec:
    """Return shape and dtype of the template of a receive."""
    return spec_of(getval(like), call, argument)
