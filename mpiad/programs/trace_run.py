"""One call of a function on traced arrays, on a tape of its own or without, and the same call without a trace."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Function
from mpiad.differentiation.trace import Variables, trace_backwards
from mpiad.programs.array_module import TracedArrays
from mpiad.programs.playback import Playback
from mpiad.programs.recorder import Recorder
from mpiad.programs.signature import Arguments
from mpiad.programs.steps import Abandoned
from mpiad.programs.tracing_numpy import arrays_are_traced
from mpiad.transport import calls
from mpiad.transport.channels import Channel, live_channels, tell_recorders
from mpiad.transport.tracing import tracing

__all__ = ["PlayingBack", "TraceRun", "as_value", "message_counts"]


class TraceRun:
    """A trace of one call.

    `recorder`: `Recorder` or `ShapeRecorder`.
    """

    def __init__(self, given: Arguments, recorder: type[Recorder] = Recorder):
        self.given, self.recorder = given, recorder(TracedArrays.kind)
        self.counts = message_counts()

    def run(self, fun: Function) -> Any:
        """Call the function with traced arrays."""
        args, kwargs = self.given.build(self.leaves())
        return fun(*args, **kwargs)

    def run_backwards(self, fun: Function, boxed: Sequence[int], leaves: list[Any] | None = None) -> Any:
        """Call the function on a tape, with these leaves of its arguments, or traced ones."""
        leaves = self.leaves() if leaves is None else leaves

        def called(variables: list[Any]) -> Any:
            filled = list(leaves)
            for place, x in zip(boxed, variables):
                filled[place] = x
            args, kwargs = self.given.build(filled)
            return fun(*args, **kwargs)

        variables = Variables([leaves[k] for k in boxed], list(range(len(boxed))), list)
        return trace_backwards(called, variables)

    def leaves(self) -> list[Any]:
        """Return the leaves of the arguments, traced."""
        leaves = list(self.given.leaves)
        for place in self.given.traced:
            plain = getval(leaves[place])
            leaves[place] = self.recorder.input(as_value(plain), type(plain) in (int, float))
        return leaves

    def noting(self, part: int = 0) -> _Noting:
        """Return a context in which what is done with traced arrays is noted."""
        return _Noting(self.recorder, part)

    def raise_own(self, error: BaseException) -> None:
        """Raise the exception under way where a communication has raised it: all others end the trace alone."""
        if error is self.recorder.failed:
            self.recorder.mark()
            raise error

    @contextmanager
    def reread(self) -> Iterator[None]:
        """Let its arrays be constants, for another reverse pass along its tape."""
        self.recorder.reread = True
        try:
            with PlayingBack([]):
                yield
        finally:
            self.recorder.reread = False

    def playing_back(self) -> PlayingBack:
        """Return a context in which the function runs again without a second communication."""
        return PlayingBack(self.recorder.log, self.counts)


class _Noting:
    def __init__(self, recorder: Recorder, part: int):
        self.recorder, self.part, self._arrays = recorder, part, arrays_are_traced()

    def __enter__(self) -> None:
        self.recorder.open, self.recorder.part = True, self.part
        tracing.recorder = self.recorder
        self._arrays.__enter__()
        calls.note(self)  # so that it is known whose adjoint it is that communicates
        _watched(1)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        tracing.recorder = None
        self.recorder.check_requests()
        self._arrays.__exit__(None, None, None)
        calls.forget(self)
        _watched(-1)
        self.recorder.close()
        # An interrupt isn't caught, and the function doesn't run once more.
        if kind is not None and not issubclass(kind, (Abandoned, Exception)):
            self.recorder.mark()
        # Where the function has caught it by itself.
        if kind is None and self.recorder.refused is not None:
            raise self.recorder.refused


_lock = threading.Lock()
_traces = 0


def _watched(more: int) -> None:
    """Let channels tell of uses while there are traces in any thread."""
    global _traces
    with _lock:
        _traces += more
        if _traces in (0, 1):
            tell_recorders(_traces > 0)


class PlayingBack:
    """A context in which communications give what they gave in a trace, as far as that went.

    `log`: of its recorder. `counts`: of each channel's messages before it, which are counted again: partners have counted
    them once.
    """

    def __init__(self, log: Sequence[Any], counts: Sequence[_Counts] | None = None):
        self._playback, self._before = Playback(log), counts
        self._later: list[_Counts] = []

    def __enter__(self) -> None:
        self._later = [] if self._before is None else message_counts()
        before = {channel: counts for channel, *counts in self._before or ()}
        for channel, *_ in self._later:  # one that was made in the trace had none
            channel.sent, channel.received = map(dict, before.get(channel, ({}, {})))
        tracing.recorder = self._playback

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        tracing.recorder = None
        for channel, *counts in self._later:
            for again, later in zip((channel.sent, channel.received), counts):
                again.update({key: max(number, again.get(key, 0)) for key, number in later.items()})


_Counts: TypeAlias = "tuple[Channel, dict[tuple[int, int], int], dict[tuple[int, int], int]]"


def message_counts() -> list[_Counts]:
    """Return how many messages each channel has numbered until now."""
    return [(channel, dict(channel.sent), dict(channel.received)) for channel in live_channels()]


def as_value(x: Any) -> Any:
    """Return a number of Python's as one of NumPy's."""
    if isinstance(x, (np.ndarray, np.generic)):
        return x
    if isinstance(x, int):
        return np.int64(x)
    return np.complex128(x) if isinstance(x, complex) else np.float64(x)
