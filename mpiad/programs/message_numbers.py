"""Message numbers in replays.

Sender and receiver number their point-to-point messages, and a message and its adjoint have the same number (see
`transport.core.messages.Envelope`). Each run of a program needs new numbers, so it replaces the envelopes of the trace by
new ones. The envelopes of prepared communications (see `primitives.operation.Operation`) are copied once, and each run
gives new numbers to the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from mpiad.programs.traced_array import replaced
from mpiad.transport import Channel, Envelope, Spec
from mpiad.transport.core.channels import Counts, Used


class _Replacement(Envelope):
    """An envelope of a program; `origin`: the one in the first trace of the function, from which it is derived."""

    __slots__ = ("origin",)


# The envelopes of a call, by origin, and its numbers of halo exchanges, by channel and number in the first trace.
Numbers: TypeAlias = dict[Any, Any]


class MessageNumbers:
    """The envelopes of a run, which replace those of the trace; `known`: those of programs that have run before.

    The programs of a function and of its derivatives share their envelopes: forward messages are numbered by the program
    that communicates them, and the messages of their adjoints are in later programs.
    """

    def __init__(self, known: Numbers | None = None) -> None:
        self.known = known or {}
        self.current = dict(self.known)
        self._received: dict[Envelope, Envelope] = {}  # copies of envelopes in `known`, by origin

    def begin(self) -> None:
        """Begin a run, whose messages have new numbers."""
        self.current = dict(self.known)

    def take_known(self) -> None:
        """Give the copies of known envelopes the numbers of this run."""
        for origin, made in self._received.items():
            known = self.known[origin]
            made.number, made.peer, made.tag = known.number, known.peer, known.tag

    @property
    def has_known(self) -> bool:
        """Whether messages have the numbers of other programs."""
        return bool(self._received)

    def all(self) -> Numbers:
        """Return the numbers of this run, for later programs."""
        new = [(origin, made) for origin, made in self.current.items() if origin not in self.known]
        return {**self.known, **{origin: _copied(x, origin) if isinstance(x, Envelope) else x for origin, x in new}}

    def addressed(self, params: Any, is_traced: bool = False) -> Any:
        """Return an operation's parameters with this run's envelopes, or this run's number of a halo exchange.

        `is_traced`: whether the parameters are those of a derived trace, in which halo exchanges keep their numbers.
        """
        if hasattr(params, "numbered"):
            if is_traced:
                return params
            key = params.numbered
            if key not in self.current:
                self.current[key] = params.renumbered()
            return params._replace(number=self.current[key])
        return replaced(params, Envelope, self._of)

    def _of(self, envelope: Envelope) -> Envelope:
        first = envelope.answers or envelope
        origin = _origin(first)
        made = self.current.get(origin)
        if made is None and envelope is first:
            made = _Replacement(first.channel, *first.asked, first.outgoing)
            made.origin = origin
        elif made is None:
            made = self._received[origin] = _copied(first, origin)
        self.current[origin] = made
        if envelope is first:
            return made
        # A message from any rank may have another sender than in the trace.
        return Envelope(made.channel, made.peer, made.tag, envelope.outgoing, made)

    def with_copies(self, params: Any) -> tuple[Any, list[Envelope]]:
        """Return parameters with copies of the envelopes, and the copies that need a new number in each run."""
        known = set(self.current)
        params, given = self.addressed(params), envelopes_of(params)
        pairs = zip(envelopes_of(params), given)
        renewed = [made for made, envelope in pairs if envelope.answers is not None or _origin(envelope) not in known]
        for envelope in renewed:
            envelope.give_back()  # its message is counted when a run renews it
        return params, renewed


def numbers_of(messages: Sequence[Any], traced: Mapping[Channel, Counts], counted: Mapping[Channel, Counts]) -> Numbers:
    """Return the numbers of messages that took place before a program, in which their adjoints are.

    `messages`: their parameters in a trace; `traced` and `counted`: the message counts before them, in the trace and when
    they took place.
    """
    numbers: Numbers = {}
    counts = lambda channel: [x.get(channel, Counts({}, {}, 0)) for x in (traced, counted)]  # noqa: E731
    for params in messages:
        if hasattr(params, "numbered"):
            channel, number = params.numbered
            before, after = counts(channel)
            numbers[channel, number] = number + after.exchanges - before.exchanges
        for envelope in envelopes_of(params):
            before, after = (x.sent if envelope.outgoing else x.received for x in counts(envelope.channel))
            numbers[envelope] = made = _copied(envelope, envelope)
            made.number = (envelope.number or 0) + after.get(envelope.asked, 0) - before.get(envelope.asked, 0)
    return numbers


def _origin(envelope: Envelope) -> Envelope:
    return getattr(envelope, "origin", envelope)


def _copied(envelope: Envelope, origin: Envelope) -> _Replacement:
    """Return a copy of an envelope, whose message isn't counted."""
    made = _Replacement.__new__(_Replacement)
    for name in Envelope.__slots__:
        setattr(made, name, getattr(envelope, name))
    made.origin = origin
    return made


def renewal_text(envelope: Envelope, bound: Callable[[object], str]) -> str:
    """Return the statement of a replay for `Envelope.renew`; ``bound(value)`` returns a name for a value."""
    name = bound(envelope)
    if envelope.answers is not None:
        return f"{name}.number = {bound(envelope.answers)}.number"
    if not envelope.is_fixed:
        return f"{name}.renew()"
    counts, key = f"{bound(envelope.channel)}.{'sent' if envelope.outgoing else 'received'}", (envelope.peer, envelope.tag)
    return f"c = {counts}; {name}.number = n = c.get({key}, 0); c[{key}] = n + 1"


def tag_text(envelope: Envelope, bound: Callable[[object], str]) -> str:
    """Return the expression of a replay for `Envelope.mpi_tag` of the message of an adjoint."""
    if not envelope.is_fixed:
        return f"{bound(envelope)}.mpi_tag"
    channel = envelope.channel
    return f"({envelope.tag * channel.tag_stride} + {bound(envelope)}.number) % {channel.tag_limit}"


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
