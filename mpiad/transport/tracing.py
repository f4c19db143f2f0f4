"""The state of this thread: traces, the trace of a compiled program, operators, recorded calls.

Whoever changes it puts it back. An interrupt may arrive at any moment, also at the start of an `__exit__` or `finally`, and
then nothing is put back. So each operation that changes the state runs in a second context, `restoring_state`, which an
exception leaves with the state that it had at the start.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TypeVar

from mpiad._typing import Array

T = TypeVar("T")


class ProgramRecorder(Protocol):
    """The methods of a trace under way."""

    @property
    def ended(self) -> bool:
        """Whether the function runs as it is: its trace was given up, and all that it noted is played back."""
        ...

    def communicate(self, operation: object, x: Array, params: object) -> Any:
        """Run an operation on plain arrays, and note it."""

    def operate(self, operator: object, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an operator of `mpiad.extend` on plain arrays, and note it."""

    def settle(self, fun: Callable[..., T], args: tuple) -> T:
        """Run a function whose result determines how a call continues, and record it with its result."""
        ...

    def once(self, fun: Callable[..., T], args: tuple) -> T:
        """Run a function that is called once per communicator, and don't record it."""
        ...

    def call_as_it_is(self, fun: Callable[..., T], args: tuple, kwargs: dict[str, Any]) -> T:
        """Run a function that isn't traced inside, and record it as one step."""
        ...

    def refuse(self, reason: str) -> None:
        """Give the trace up, for a reason that is reported to the user."""

    def looked_up(self, call: str) -> None:
        """Take note that a function looks for the channel of a communicator."""

    def entered_body(self) -> None:
        """Take note that an operator runs its body."""

    def communicated_by_itself(self) -> None:
        """Take note that a function communicates other than by an operation."""

    def marked(self, channel: object, reason: str, messages: bool) -> bool:
        """Return whether the trace decides later that messages were left on a channel: it may be run once more."""
        ...


class _ThreadState(threading.local):
    """The state of a thread.

    - `recorder`: of the compiled program that is traced; None if there is none.
    - `tape`, `lane`: the current tape, and which of several reverse passes is under way.
    - `channels`: inside an operator that is one node, the channels on which it has communicated, which no tape notes.
    - `call`: the innermost call that is noted.
    - `root_copies`: the innermost solve whose root holds the variables.
    - `tapes`, `contexts`: the innermost tape that isn't closed, and the innermost other context that changes more than this
      state; each refers to the next outer one as `around`.
    """

    def __init__(self) -> None:
        self.recorder: ProgramRecorder | None = None
        self.tape: Any = None
        self.lane = 0
        self.channels: Any = None
        self.call: Any = None
        self.root_copies: Any = None
        self.tapes: Any = None
        self.contexts: Any = None


tracing = _ThreadState()


class restoring_state:
    """A context that an exception leaves with the thread's state as it was; contexts still open inside are ended."""

    __slots__ = ("_kept",)

    def __enter__(self) -> None:
        self._kept = tracing.__dict__.copy()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            restore_state(self._kept, error)


def restore_state(kept: dict[str, Any], error: BaseException) -> None:
    """Restore a copy of the thread's state after an exception, and end contexts and tapes opened since.

    Frequently used contexts call this directly instead of `restoring_state`, which costs as much as a simple operation.
    """
    left = tracing.__dict__.copy()
    tracing.__dict__.update(kept)
    for opened, known in ((left["contexts"], kept["contexts"]), (left["tapes"], kept["tapes"])):
        while opened is not known and opened is not None:
            opened.end(error, error.__traceback__)
            opened.around, opened = None, opened.around


def settled(fun: Callable[..., T], *args: Any) -> T:
    """Run a function whose result decides how a call continues and may vary, such as lengths that ranks exchange.

    A compiled program runs it again, and continues only if the result is as in the trace.
    """
    recorder = tracing.recorder
    return fun(*args) if recorder is None else recorder.settle(fun, args)


def once(fun: Callable[..., T], *args: Any) -> T:
    """Run a function at the first use of a communicator; it is no part of a compiled program."""
    recorder = tracing.recorder
    return fun(*args) if recorder is None else recorder.once(fun, args)


def opaque(fun: Callable[..., T]) -> Callable[..., T]:
    """Let compiled programs call a function as it is; its results are arrays, in any pytree."""

    @functools.wraps(fun)
    def called(*args: Any, **kwargs: Any) -> T:
        recorder = tracing.recorder
        if recorder is None or recorder.ended:
            return fun(*args, **kwargs)
        return recorder.call_as_it_is(fun, args, kwargs)

    return called
