"""Interpretation: a run of a function on plain arrays, which notes what a trace of the function can't tell.

A trace is abstract (see `recorder`): it never communicates. If it meets a call whose result only a run can tell, it ends
before any message is sent, and the function is interpreted. The interpretation notes shapes of received arrays and outcomes
of agreements, in the order of the calls, and a second trace reads the notes.

An interpretation may continue the run of a program, if the shape of a message differs from the trace (`replay.Changed`).
Then the function runs from its beginning, but its communications return the results that the program has logged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.primitives.request import Request
from mpiad.programs.message_numbers import channels_of, envelopes_of
from mpiad.programs.opaque_calls import Outcome, as_array, opaque_call
from mpiad.programs.traced_array import untraced
from mpiad.transport import Spec
from mpiad.transport.core.channels import Channel, Counts, communications, live_channels
from mpiad.transport.core.tracing import tracing
from mpiad.transport.devices.device_arrays import is_array


class Note(NamedTuple):
    """What a run has told about a call of the function `name`: the spec of its result, or an outcome."""

    name: str
    value: Any


class Logged(NamedTuple):
    """A logged result, with data that an interpretation restores when it returns the result."""

    value: Any
    senders: Sequence[tuple[int, int]] = ()  # ranks and tags of messages that were received from any rank or with any tag
    counts: Sequence[tuple[Channel, Counts]] = ()  # the message counts after an operation that has its own messages


def message_counts() -> list[tuple[Channel, Counts]]:
    """Return all channels with their numbers of messages."""
    return [(channel, channel.counts()) for channel in live_channels()]


def logged(result: Array, params: object = None) -> Array:
    """Return the log entry of an operation's result; `params`: the parameters of a communication."""
    kept = result.copy() if is_array(result) else result
    envelopes = envelopes_of(params)
    senders = [(envelope.peer, envelope.tag) for envelope in envelopes if min(envelope.asked) < 0]
    if senders:
        return Logged(kept, senders)
    # An interpretation counts messages when it creates the envelopes of communications again. It doesn't create the
    # envelopes inside operators and solves, so the counts after them are logged.
    return kept if envelopes or channels_of(params) else Logged(kept, counts=message_counts())


class Interpretation:
    """A context in which a function runs on plain arrays.

    `log`: results of communications, which the first communications return; `counts`: the message counts before them.
    """

    ended = is_abstract = False  # see `ProgramRecorder`

    def __init__(self, log: Sequence[Any] = (), counts: Sequence[tuple[Channel, Counts]] | None = None):
        self.notes: list[Note] = []
        self._rest, self._before = list(log)[::-1], counts
        self._later: list[tuple[Channel, Counts]] = []

    def __enter__(self) -> None:
        self.around, tracing.contexts = tracing.contexts, self
        if self._before is not None:
            self._later, before = message_counts(), dict(self._before)
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

    def communicate(self, operation: Any, x: Array, params: Any) -> Any:
        """Run a communication, or return its logged result."""
        params = untraced(params)
        if not self._rest:
            made = self._run(operation.forward, x, params)
            if operation.abstract(x, params) is NotImplemented:
                self._note(operation, _described(made))
            return made
        entry = self._rest[-1]
        senders = iter(entry.senders if isinstance(entry, Logged) else ())
        for envelope in envelopes_of(params):
            if min(envelope.asked) < 0 and (sender := next(senders, None)) is not None:
                envelope.answered_from(*sender)
        made = self._logged()
        return made.again() if isinstance(made, Request) else made

    def operate(self, operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an operator, or return its logged result."""
        if self._rest:
            return self._logged()
        made = self._run(operator.body, args, kwargs)
        if operator.abstract(args, kwargs) is NotImplemented:
            self._note(operator, _described(made))
        return made

    def settle(self, fun: Callable, args: tuple) -> Any:
        """Run a function whose result determines how a call continues, or return its logged result."""
        if self._rest:
            return self._logged()
        made = self._run(fun, *args)
        self._note(fun, made)
        return made

    def opaque(self, fun: Callable, args: tuple, specs: Any = None) -> Any:
        """Run a function that returns arrays followed by one other object, or return its logged result."""
        if self._rest:
            return self._logged()
        start = next(communications)
        *arrays, rest = self._run(fun, *args)
        arrays = list(map(as_array, arrays))
        if specs is None:
            communicates = next(communications) > start + 1
            outcome = rest._replace(traced=None) if isinstance(rest, Outcome) else rest
            self._note(fun, (list(map(_described, arrays)), outcome, communicates))
        return *arrays, rest

    call_as_it_is = opaque_call

    def once(self, fun: Callable, args: tuple) -> Any:
        """Run a function that isn't part of programs."""
        return self._run(fun, *args)

    def _logged(self) -> Any:
        entry = self._rest.pop()
        if not isinstance(entry, Logged):
            return entry
        for channel, counts in entry.counts:
            channel.count_from(counts)
        return entry.value

    def _run(self, fun: Callable, *args: Any) -> Any:
        tracing.recorder = None
        try:
            return fun(*args)
        finally:
            tracing.recorder = self

    def _note(self, fun: Any, value: Any) -> None:
        self.notes.append(Note(getattr(fun, "__name__", repr(fun)), value))

    def refuse(self, reason: str = "") -> None:
        """Do nothing: operations that would end a trace are allowed."""

    looked_up: Any = refuse
    communicated_by_itself = refuse

    def entered_body(self) -> None:
        """End the interpretation's part at an operator's body: traces end there, and logs contain operations before it."""
        tracing.recorder = None

    def marked(self, channel: object, reason: str, messages: bool) -> bool:
        """Return False: the channel is marked at once."""
        return False


def _described(result: Any) -> Any:
    """Return the spec of an array, and other results unchanged."""
    is_known = (isinstance(result, np.generic) or is_array(result)) and result.dtype.kind in "fciub"
    return Spec.of(result) if is_known else result
