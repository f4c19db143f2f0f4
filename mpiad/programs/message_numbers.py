"""Message numbers in replays.

Sender and receiver number their point-to-point messages, and a message and its adjoint have the same number (see
`transport.core.messages.Envelope`). Each run of a program needs new numbers, so it replaces the envelopes of the trace by
new ones. The envelopes of prepared communications (see `primitives.operation.Operation`) are copied once, and each run
gives new numbers to the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np

from mpiad.programs.fusion import Loop, Schedule
from mpiad.transport import Channel, Envelope
from mpiad.transport.core.channels import Counts, Used, live_channels


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
        if isinstance(params, Envelope):
            return self._of(params)
        if hasattr(params, "numbered"):
            owner, number = params.numbered
            key = id(owner), number
            if key not in self._numbers:
                self._numbers[key] = params.renumbered()
            return params._replace(number=self._numbers[key])
        return params._replace(**{name: self._of(x) for name, x in zip(params._fields, params) if isinstance(x, Envelope)})

    def _of(self, envelope: Envelope) -> Envelope:
        first = envelope.answers or envelope
        if first not in self._made:
            self._made[first] = Envelope(first.channel, *first.asked, first.outgoing)
        made = self._made[first]
        if envelope is first:
            return made
        # A message from any rank may have another sender than in the trace.
        return Envelope(made.channel, made.peer, made.tag, envelope.outgoing, made.number, made)

    def with_copies(self, params: Any) -> tuple[Any, list[Envelope]]:
        """Return parameters with copies of the envelopes, and the copies that need a new number in each run."""
        known = set(self._made)
        params, given = self.addressed(params), envelopes_of(params)
        renewed = [made for made, envelope in zip(envelopes_of(params), given) if envelope not in known]
        for envelope in renewed:
            envelope.give_back()  # its message is counted when a run renews it
        return params, renewed


def envelopes_of(params: Any) -> list[Envelope]:
    """Return the envelopes among the parameters of an operation."""
    parts = params if isinstance(params, tuple) else (params,)
    return [part for part in parts if isinstance(part, Envelope)]


def is_numbered(params: Any) -> bool:
    """Return whether the parameters of an operation have message numbers."""
    return bool(envelopes_of(params)) or hasattr(params, "numbered")


def channels_of(params: Any) -> set[Used]:
    """Return the channels of an operation's parameters, each with True if it is used for point-to-point messages."""
    parts = params if isinstance(params, tuple) else (params,)
    messages = {(part.channel, True) for part in envelopes_of(params)}
    return {(part, False) for part in parts if isinstance(part, Channel)} | messages


class WildcardMessage(NamedTuple):
    """A message that was received from any rank or with any tag: its contents, sender and tag."""

    value: Any
    peer: int
    tag: int


class Uncounted(NamedTuple):
    """A logged result, and the message counts after the operation, which a playback of the result restores."""

    made: Any
    counts: list[tuple[Channel, Counts]]


def message_counts() -> list[tuple[Channel, Counts]]:
    """Return all channels with their numbers of messages."""
    return [(channel, channel.counts()) for channel in live_channels()]


def logged(made: Any, params: Any = None) -> Any:
    """Return the log entry of an operation's result, for playback; `params`: the parameters of a communication."""
    kept = made.copy() if isinstance(made, np.ndarray) else made
    envelopes = envelopes_of(params)
    for envelope in envelopes:
        if min(envelope.asked) < 0:
            return WildcardMessage(kept, envelope.peer, envelope.tag)
    # A playback counts messages when it creates the envelopes of communications again. It doesn't create the envelopes
    # inside operators and solves, so the counts after them are logged.
    return kept if envelopes or channels_of(params) else Uncounted(kept, message_counts())


def result_of(entry: Any) -> Any:
    """Return the result of an operation, given its log entry."""
    return entry.made if isinstance(entry, Uncounted) else entry.value if isinstance(entry, WildcardMessage) else entry


def prepared_steps(
    schedule: Schedule, is_large: Callable[[int], bool], in_kernels: Collection[int]
) -> tuple[set[int], set[int]]:
    """Return the communications that can be prepared, and the communications whose messages have numbers, by step.

    A communication from one buffer into another can be prepared if both are small and at fixed addresses. `is_large(b)`:
    whether the address of a buffer may differ between runs. `in_kernels`: the buffers that kernels read or write.
    """
    found: set[int] = set()
    numbered: set[int] = set()
    fixed: set[int] = set()  # result buffers at fixed addresses
    for at, step in enumerate(schedule.steps):
        if isinstance(step, Loop) or step.in_place:
            continue
        node = schedule.program.nodes[step.node]
        if node.kind != "communicate" or node.data.kind != "communicate":
            continue
        call, results = node.data, step.results
        if is_numbered(call.args[1]):
            numbered.add(at)
        if call.fun.prepared is None or len(results) != 1 or is_large(results[0]) or len(step.inputs) != 1:
            continue
        x = step.inputs[0]
        kind = schedule.buffers[x].kind
        if is_large(x) or kind == "alias" or kind == "result" and x not in fixed and x not in in_kernels:
            continue
        if call.fun.prepared(call.args[1], np.empty(0), np.empty(0)) is not None:
            found.add(at)
            fixed.add(results[0])
    # Either all communications with message numbers are prepared, or none of them.
    return (found if numbered <= found else found - numbered), numbered
