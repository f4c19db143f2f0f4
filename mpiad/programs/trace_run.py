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
from mpiad.programs.array_module import TracedArrays, let_arrays_be_traced
from mpiad.programs.playback import Playback
from mpiad.programs.recorder import Recorder
from mpiad.programs.signature import Arguments
from mpiad.programs.steps import Abandoned
from mpiad.transport import calls
from mpiad.transport.channels import Channel, live_channels, tell_recorders
from mpiad.transport.tracing import tracing


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
        variables = Variables(self.leaves() if leaves is None else leaves, list(boxed), self.given.build)
        return trace_backwards(lambda given: fun(*given[0], **given[1]), variables)

    def leaves(self) -> list[Any]:
        """Return the leaves of the arguments, traced."""
        leaves = list(self.given.leaves)
        for place in self.given.traced:
            plain = getval(leaves[place])
            leaves[place] = self.recorder.input(as_value(plain), type(plain) in (int, float))
        return leaves

    @contextmanager
    def noting(self, part: int = 0) -> Iterator[None]:
        """Note what is done with traced arrays."""
        recorder, interrupted = self.recorder, True
        recorder.open, recorder.part = True, part
        tracing.recorder = recorder
        calls.note(recorder)  # so that it is known whose adjoint it is that communicates
        _count(1)
        try:
            yield
            interrupted = False
        except (Abandoned, Exception):
            interrupted = False
            raise
        finally:
            tracing.recorder = None
            recorder.check_requests()
            calls.forget(recorder)
            _count(-1)
            recorder.close()
            if interrupted:  # which isn't caught, and the function doesn't run once more
                recorder.mark()
        # Where the function has caught it by itself.
        if recorder.refused is not None:
            raise recorder.refused

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


_lock = threading.Lock()
_traces = 0


def _count(more: int) -> None:
    """Let channels and autograd.numpy know of traces while there are any in any thread."""
    global _traces
    with _lock:
        _traces += more
        if _traces in (0, 1):
            tell_recorders(_traces > 0)
            let_arrays_be_traced(_traces > 0)


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
