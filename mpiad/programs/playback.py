"""Playback: another run of a function, on plain arrays, without repeating its communications.

A trace, or a replay of a program, logs the results of its communications. If it can't be completed, the function runs
again, and its communications return the logged results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.primitives.request import Request
from mpiad.programs.message_numbers import channels_of, envelopes_of
from mpiad.programs.opaque_calls import opaque_call
from mpiad.programs.traced_array import on_host, plain
from mpiad.transport.core.channels import Channel, Counts, live_channels
from mpiad.transport.core.tracing import tracing


class Logged(NamedTuple):
    """A logged result with data that its playback restores."""

    value: Any
    senders: Sequence[tuple[int, int]] = ()  # ranks and tags of messages that were received from any rank or with any tag
    counts: Sequence[tuple[Channel, Counts]] = ()  # the message counts after an operation that has its own messages


def message_counts() -> list[tuple[Channel, Counts]]:
    """Return all channels with their numbers of messages."""
    return [(channel, channel.counts()) for channel in live_channels()]


def logged(made: Any, params: Any = None) -> Any:
    """Return the log entry of an operation's result, for playback; `params`: the parameters of a communication."""
    kept = made.copy() if isinstance(made, np.ndarray) else made
    envelopes = envelopes_of(params)
    senders = [(envelope.peer, envelope.tag) for envelope in envelopes if min(envelope.asked) < 0]
    if senders:
        return Logged(kept, senders)
    # A playback counts messages when it creates the envelopes of communications again. It doesn't create the envelopes
    # inside operators and solves, so the counts after them are logged.
    return kept if envelopes or channels_of(params) else Logged(kept, counts=message_counts())


class PlayingBack:
    """A context in which a function runs again on plain arrays; communications return results in `log` until its end."""

    def __init__(self, log: Sequence[Any], counts: Sequence[tuple[Channel, Counts]] | None):
        # `counts`: of messages before the logged messages; restored, since a playback counts the logged ones again.
        self._rest, self._before = list(log)[::-1], counts
        self._later: list[tuple[Channel, Counts]] = []

    def __enter__(self) -> None:
        self._later = message_counts()
        self.around, tracing.contexts = tracing.contexts, self
        if self._before is not None:
            before = dict(self._before)
            for channel, _ in self._later:  # a channel that was created in the trace had counts of zero before it
                channel.count_from(before.get(channel, Counts({}, {}, 0)))
        tracing.recorder = self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        tracing.recorder = None
        self.end(error, trace)
        tracing.contexts, self.around = self.around, None

    def end(self, error: BaseException | None, trace: TracebackType | None) -> None:
        """Set the message counts to at least those at the entry; a second call has no effect."""
        for channel, counts in self._later:
            channel.count_on(counts)

    @property
    def ended(self) -> bool:
        """Whether the log is exhausted."""
        return not self._rest

    def communicate(self, operation: Any, x: Array, params: Any) -> Any:
        """Return the logged result of a communication."""
        params, entry = on_host(params), self._rest[-1] if self._rest else None
        senders = iter(entry.senders if isinstance(entry, Logged) else ())
        for envelope in envelopes_of(params):
            if min(envelope.asked) < 0 and (sender := next(senders, None)) is not None:
                envelope.answered_from(*sender)
        made = self._next(operation.forward, plain(x), params)
        return made.again() if isinstance(made, Request) else made

    def operate(self, operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the logged result of an operator."""
        return self._next(operator.body, plain(args), plain(kwargs))

    def opaque(self, fun: Callable, args: tuple, specs: Any = None) -> Any:
        """Return the logged result of an untraced function."""
        return self._next(fun, *plain(args))

    settle, call_as_it_is = opaque, opaque_call

    def once(self, fun: Callable, args: tuple) -> Any:
        """Run a function that isn't logged."""
        return self._untraced(fun, *args)

    def _next(self, fun: Callable, *args: Any) -> Any:
        if not self._rest:
            return self._untraced(fun, *args)
        entry = self._rest.pop()
        if not isinstance(entry, Logged):
            return entry
        for channel, counts in entry.counts:
            channel.count_from(counts)
        return entry.value

    def _untraced(self, fun: Callable, *args: Any) -> Any:
        tracing.recorder = None
        try:
            return fun(*args)
        finally:
            tracing.recorder = self

    def refuse(self, reason: str = "") -> None:
        """Do nothing: operations that would end a trace are allowed."""

    looked_up: Any = refuse
    communicated_by_itself = refuse

    def entered_body(self) -> None:
        """End the playback at an operator's body, since the log contains only operations before the body."""
        tracing.recorder = None

    def marked(self, channel: object, reason: str, messages: bool) -> bool:
        """Return False: the channel is marked at once."""
        return False
