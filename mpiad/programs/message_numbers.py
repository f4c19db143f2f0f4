"""The numbers of a replay's messages: new ones in each run, and one for a message and for what answers it.

The number of a point-to-point message is part of its adjoint's address, and both sides count alike. So the addresses of a
trace, which hold the numbers of that call, are made anew when the program runs again.
"""

from __future__ import annotations

from typing import Any

from mpiad.transport import Envelope

__all__ = ["MessageNumbers", "envelopes_of"]


class MessageNumbers:
    """Addresses of one replay, in place of those of the trace."""

    def __init__(self) -> None:
        self._made: dict[Envelope, Envelope] = {}

    def begin(self) -> None:
        """Begin a run."""
        self._made.clear()

    def addressed(self, params: Any) -> Any:
        """Return an operation's parameters with the addresses of this run."""
        if isinstance(params, Envelope):
            return self._of(params)
        changed = {name: self._of(part) for name, part in zip(params._fields, params) if isinstance(part, Envelope)}
        return params._replace(**changed)

    def _of(self, envelope: Envelope) -> Envelope:
        first = envelope.answers or envelope
        if first not in self._made:
            self._made[first] = Envelope(first.channel, first.peer, first.tag, first.outgoing)
        made = self._made[first]
        if envelope is first:
            return made
        channel, peer, tag, outgoing = envelope.channel, envelope.peer, envelope.tag, envelope.outgoing
        return Envelope(channel, peer, tag, outgoing, made.number, envelope.reverse, made)


def envelopes_of(params: Any) -> list[Envelope]:
    """Return the addresses among the parameters of an operation."""
    parts = params if isinstance(params, tuple) else (params,)
    return [part for part in parts if isinstance(part, Envelope)]
