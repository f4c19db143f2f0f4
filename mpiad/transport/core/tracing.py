"""The state of this thread: open tapes, the trace of a compiled program, operators, recorded calls.

Code that changes the state restores it. But an interrupt may prevent this, even at the start of an `__exit__` or `finally`.
So such code runs inside a second context, `restoring_state`, which restores the state after an exception.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Set
from types import TracebackType
from typing import Any, Protocol, TypeVar

from mpiad._typing import Array

T = TypeVar("T")


class ProgramRecorder(Protocol):
    """The methods of the trace of a compiled program."""

    ended: bool  # whether functions of this library run as without a trace
    is_abstract: bool  # whether the trace doesn't communicate, so that its calls aren't reported to debugging tools

    def communicate(self, operation: object, x: Array, params: object) -> Any:
        """Run an operation on plain arrays, and record it."""

    def operate(self, operator: object, args: tuple, kwargs: dict[str, object]) -> Any:
        """Run an operator of `mpiad.extend` on plain arrays, and record it."""

    def settle(self, fun: Callable[..., T], args: tuple) -> T:
        """Run a function whose result determines the further course of a call, and record it with its result."""
        ...

    def once(self, fun: Callable[..., T], args: tuple) -> T:
        """Run a function that is called once per communicator, and don't record it."""
        ...

    def opaque(self, fun: Callable[..., tuple], args: tuple, specs: Any = None) -> tuple:
        """Run a function that returns arrays followed by one other object, and record it as one step."""
        ...

    def call_as_it_is(self, fun: Callable[..., T], args: tuple, kwargs: dict[str, object]) -> T:
        """Run a function without tracing inside, and record it as one step."""
        ...

    def refuse(self, reason: str) -> None:
        """Abandon the trace, and report the reason to the user."""

    def looked_up(self, call: str) -> None:
        """Handle the lookup of a communicator's channel by the function named `call`."""

    def entered_body(self) -> None:
        """Handle the beginning of an operator's body."""

    def communicated_by_itself(self) -> None:
        """Handle communication that isn't made by a recorded operation."""

    def marked(self, channel: object, reason: str, messages: bool) -> bool:
        """Return whether the recorder, not the caller, marks the channel as unusable, unless the function runs again."""
        ...


class Context(Protocol):
    """A context that must be ended after an exception; `around` is the enclosing one."""

    around: Context | None

    def end(self, error: BaseException | None, trace: TracebackType | None) -> None:
        """Restore the state from before the context."""


class _ThreadState(threading.local):
    """The state of a thread."""

    def __init__(self) -> None:
        self.recorder: ProgramRecorder | None = None  # the trace of a compiled program
        self.arguments: Any = ()  # the traced arguments of the function that is compiled, which it mustn't change in place
        self.tape: Any = None  # the current tape
        self.lane = 0  # the index of the current reverse pass
        self.channels: Any = None  # those on which the current tape, or an operator that is one node, has communicated
        self.call: Any = None  # the innermost call in progress, if calls are recorded
        self.site: Any = None  # the user's line, if a transformation repeats the calls of a program
        self.for_main = False  # whether this thread communicates in place of the main thread, which doesn't in the meantime
        self.root_copies: Any = None  # the innermost solve whose variables are on the root
        # The innermost open tape, even if it isn't current, and the innermost other context that must be ended after an
        # exception; `around` is the enclosing one.
        self.tapes: Any = None
        self.contexts: Context | None = None

    @property
    def is_abstract(self) -> bool:
        """Whether a program is traced, so that arrays have arbitrary values."""
        return self.recorder is not None and self.recorder.is_abstract


tracing = _ThreadState()


class restoring_state:
    """A context that restores the thread's state after an exception, and ends the contexts and tapes opened inside."""

    __slots__ = ("_kept",)

    def __enter__(self) -> None:
        self._kept = tracing.__dict__.copy()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            restore_state(self._kept, error)


def restore_state(kept: dict[str, object], error: BaseException) -> None:
    """Restore a copy of the thread's state, and end contexts and tapes opened since; faster than `restoring_state`."""
    left = tracing.__dict__.copy()
    tracing.__dict__.update(kept)
    for opened, known in ((left["contexts"], kept["contexts"]), (left["tapes"], kept["tapes"])):
        while opened is not known and opened is not None:
            opened.end(error, error.__traceback__)
            opened.around, opened = None, opened.around


def checked_on_replay(fun: Callable[..., T], *args: object) -> T:
    """Return ``fun(*args)``, which a compiled program runs again; it continues only if the result is that of the trace."""
    recorder = tracing.recorder
    return fun(*args) if recorder is None else recorder.settle(fun, args)


def note_channels(channels: Set[object]) -> None:
    """Note the channels of a program before it runs: if it raises, messages may be left on them."""
    if tracing.channels is not None:
        tracing.channels |= channels


def once(fun: Callable[..., T], *args: object) -> T:
    """Run a function at the first use of a communicator; compiled programs don't record it."""
    recorder = tracing.recorder
    return fun(*args) if recorder is None else recorder.once(fun, args)


def opaque_step(fun: Callable[..., tuple], *args: object, specs: object) -> tuple:
    """Return ``fun(*args)``, new arrays with these specs followed by one other object: a step of compiled programs."""
    recorder = tracing.recorder
    return fun(*args) if recorder is None else recorder.opaque(fun, args, specs)


def opaque(fun: Callable[..., T]) -> Callable[..., T]:
    """Turn a function that returns a pytree of arrays into one step of compiled programs, without a trace inside."""

    @functools.wraps(fun)
    def called(*args: object, **kwargs: object) -> T:
        recorder = tracing.recorder
        if recorder is None or recorder.ended:
            return fun(*args, **kwargs)
        return recorder.call_as_it_is(fun, args, kwargs)

    return called
