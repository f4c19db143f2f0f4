"""Message numbers in replays.

Sender and receiver number their point-to-point messages, and a message and its adjoint have the same number (see
`transport.core.messages.Envelope`). Each run of a program needs new numbers, so it replaces the envelopes of the trace by
new ones. The envelopes of prepared communications (see `primitives.operation.Operation`) are copied once, and each run
gives new numbers to the copies.
"""

from __future__ import annotations

from typing import Any

from mpiad.programs.traced_array import replaced
from mpiad.transport import Channel, Envelope, Spec
from mpiad.transport.core.channels import Used


class MessageNumbers:
    """The envelopes of a replay, which replace the envelopes of the trace."""

    def __init__(self) -> None:
        self._made: dict[Envelope, Envelope] = {}
        self._numbers: dict[tuple[int, int], int] = {}  # numbers of halo exchanges, by id of the halo and traced number

    def begin(self) -> None:
        """Begin a run, whose messages have new numbers."""
        self._made.clear()
        self._numbers.clear()

    def addressed(self, params: Any) -> Any:
        """Return an operation's parameters with this run's envelopes, or this run's number of a halo exchange."""
        if hasattr(params, "numbered"):
            owner, number = params.numbered
            key = id(owner), number
            if key not in self._numbers:
                self._numbers[key] = params.renumbered()
            return params._replace(number=self._numbers[key])
        return replaced(params, Envelope, self._of)

    def _of(self, envelope: Envelope) -> Envelope:
        first = envelope.answers or envelope
        if first not in self._made:
            self._made[first] = Envelope(first.channel, *first.asked, first.outgoing)
        made = self._made[first]
        if envelope is first:
            return made
        # A message from any rank may have another sender than in the trace.
        return Envelope(made.channel, made.peer, made.tag, envelope.outgoing, made)

    def with_copies(self, params: Any) -> tuple[Any, list[Envelope]]:
        """Return parameters with copies of the envelopes, and the copies that need a new number in each run."""
        known = set(self._made)
        params, given = self.addressed(params), envelopes_of(params)
        renewed = [made for made, envelope in zip(envelopes_of(params), given) if envelope not in known]
        for envelope in renewed:
            envelope.give_back()  # its message is counted when a run renews it
        return params, renewed


def envelopes_of(params: Any) -> list[Envelope]:
    """Return the envelopes among the parameters of an operation, also those in nested tuples and lists."""
    if isinstance(params, Envelope):
        return [params]
    nested = isinstance(params, (tuple, list)) and not isinstance(params, Spec)
    return [envelope for part in params for envelope in envelopes_of(part)] if nested else []


def is_numbered(params: Any) -> bool:
    """Return whether the parameters of an operation have message numbers."""
    return bool(envelopes_of(params)) or hasattr(params, "numbered")


def channels_of(params: Any) -> set[Used]:
    """Return the channels of an operation's parameters, each with True if it is used for point-to-point messages."""
    parts = params if isinstance(params, tuple) else (params,)
    messages = {(part.channel, True) for part in envelopes_of(params)}
    return {(part, False) for part in parts if isinstance(part, Channel)} | messages
