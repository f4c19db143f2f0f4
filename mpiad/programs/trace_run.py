"""Traces of calls, and playback: another run of a call, on plain arrays, without repeating its communications."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from autograd.tracer import Box, getval

from mpiad._typing import Array, Function, Tree
from mpiad.differentiation.trace import Traced as TracedRun
from mpiad.differentiation.trace import Variables, trace_backwards
from mpiad.primitives.request import Request
from mpiad.programs.message_numbers import Uncounted, WildcardMessage, envelopes_of, message_counts
from mpiad.programs.opaque_calls import opaque_call
from mpiad.programs.recorder import Recorder
from mpiad.programs.traced_array import Abandoned, TracedArray, let_arrays_be_traced, on_host, plain
from mpiad.pytrees import LEAF_TYPES, flatten
from mpiad.transport.core import calls
from mpiad.transport.core.channels import Channel, Counts, report_to_recorders
from mpiad.transport.core.tracing import tracing

# The signature of a call: structure, shapes and dtypes of the arguments, and the values of untraced arguments.

_boxes = Box.types
_MOST = 2**62
_NUMBERS = (float, np.floating, np.complexfloating, complex)


class Arguments(NamedTuple):
    """The flattened arguments of a call."""

    leaves: list[Any]
    build: Any  # function that assembles (args, kwargs) from leaves
    traced: list[int]  # positions of the leaves that are traced; the other leaves are constants of the trace
    key: tuple[Any, ...]  # the signature; calls with equal keys can use the same program
    form: Hashable  # the structure of the pytree, as a hashable object
    args: tuple  # the arguments of the call
    kwargs: dict[str, Any]

    def constants(self) -> list[Any]:
        """Return the leaves that are constants of a trace."""
        return [leaf for place, leaf in enumerate(self.leaves) if place not in self.traced]

    def values(self) -> list[Any]:
        """Return the leaves without autograd's boxes."""
        return [getval(leaf) for leaf in self.leaves]


class _Object:
    """An object in a signature, which is compared by identity."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


_COMPARED = (type(None), bool, int, str, bytes, np.generic, np.dtype, type, type(...), slice, range)


def arguments_of(args: tuple, kwargs: dict[str, Any], asked: Collection[tuple[Hashable, int]] = ()) -> Arguments:
    """Flatten the arguments of a call.

    `asked`: the integers on which the function branches, as pairs (structure of the arguments, position of the leaf).
    """
    if not kwargs and LEAF_TYPES.issuperset(map(type, args)):  # the most common case
        leaves, build, form = list(args), lambda new: (tuple(new), {}), len(args)
    else:
        (leaves, build), form = flatten((args, kwargs)), _form((args, kwargs))
    traced: list[int] = []
    key: list[Any] = [form]
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, np.ndarray) or type(leaf) in _boxes:
            traced.append(place)
            key.append((leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else ())
            continue
        integer = isinstance(leaf, (int, np.integer)) and type(leaf) is not bool and abs(leaf) < _MOST
        if isinstance(leaf, _NUMBERS) or integer and (form, place) not in asked:
            traced.append(place)
            key.append(type(leaf))
        else:
            key.append((type(leaf), leaf if isinstance(leaf, _COMPARED) else _Object(leaf)))
    return Arguments(leaves, build, traced, tuple(key), form, args, kwargs)


def _form(tree: Tree) -> Hashable:
    """Return the structure of a pytree as nested tuples."""
    if isinstance(tree, dict):
        return type(tree), tuple(tree), tuple([_form(part) for part in tree.values()])
    if isinstance(tree, (list, tuple)):
        return type(tree), tuple([_form(part) for part in tree])
    return None


class TraceRun:
    """The trace of one call; `recorder` is the class `Recorder` or `ShapeRecorder`."""

    def __init__(self, given: Arguments, recorder: type[Recorder] = Recorder):
        self.given, self.recorder = given, recorder()
        self.counts = message_counts()

    def run_on_tape(self, fun: Function, boxed: Sequence[int], leaves: list[Any] | None = None) -> TracedRun:
        """Call the function on a tape; `boxed`: the indices of the variables among the leaves.

        By default the leaves are the result of the method `leaves`, with traced arrays.
        """
        variables = Variables(self.leaves() if leaves is None else leaves, list(boxed), self.given.build)
        return trace_backwards(lambda given: fun(*given[0], **given[1]), variables)

    def leaves(self) -> list[Any]:
        """Return the leaves of the arguments, with traced arrays in place of those that are traced."""
        leaves = list(self.given.leaves)
        for place in self.given.traced:
            plain = getval(leaves[place])
            leaves[place] = self.recorder.input(as_value(plain), type(plain) in (int, float))
        return leaves


def raise_own(recorder: Recorder, error: BaseException) -> None:
    """Raise the exception that ended a trace if it comes from a communication, the user's function or a signal handler.

    Another exception is due to the trace: the function will run again on plain arrays.
    """
    has_traced = any(isinstance(getval(part), TracedArray) for part in error.args)
    if error is recorder.failed or not has_traced and calls.is_raised_by_user(error):
        recorder.mark()
        raise error


class Noting:
    """A context in which operations on traced arrays are recorded.

    `part`: the part of the compiled program to which they are appended: 0 for the call, 1 for its reverse pass.
    """

    def __init__(self, recorder: Recorder, part: int = 0):
        self._recorder, self._part = recorder, part

    def __enter__(self) -> None:
        recorder = self._recorder
        recorder.open, recorder.part = True, self._part
        self.around, tracing.contexts = tracing.contexts, self
        calls.note(recorder)  # so that communications of adjoints are attributed to their forward calls
        with _lock:
            _recorders.add(recorder)
            _report_recording(True)
        tracing.recorder = recorder

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        tracing.recorder = None
        self.end(error, trace)
        tracing.contexts, self.around = self.around, None
        # The exception that ended the trace is raised again, since the function may have caught it.
        if error is None and self._recorder.refused is not None:
            raise self._recorder.refused

    def end(self, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the trace; a second call has no effect."""
        recorder = self._recorder
        recorder.check_requests()
        calls.forget(recorder)
        with _lock:
            if _recorders == {recorder}:
                _report_recording(False)
            _recorders.discard(recorder)
        recorder.close()
        if not isinstance(error, (Abandoned, Exception, type(None))):  # KeyboardInterrupt, after which nothing runs again
            recorder.mark()


_lock = threading.Lock()
_recorders: set[Recorder] = set()


def _report_recording(on: bool) -> None:
    """Notify channels and autograd.numpy whether some thread has a trace."""
    report_to_recorders(on)
    let_arrays_be_traced(on)


class PlayingBack:
    """A context in which a function runs again on plain arrays: communications return the results in a log.

    When the log is exhausted, they communicate. In this context, the object replaces the recorder.

    `log`: the log of a failed trace or of a replay. `counts`: the message counts of each channel before the logged
    messages. They are restored, since a playback counts these messages again.
    """

    def __init__(self, log: Sequence[Any], counts: Sequence[tuple[Channel, Counts]] | None):
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
        params = on_host(params)
        made = self._next(operation.forward, plain(x), params)
        if isinstance(made, WildcardMessage):
            envelopes_of(params)[0].answered_from(made.peer, made.tag)
            return made.value
        return made.again() if isinstance(made, Request) else made

    def operate(self, operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the logged result of an operator."""
        return self._next(operator.body, plain(args), plain(kwargs))

    def settle(self, fun: Callable, args: tuple) -> Any:
        """Return the logged result of an untraced function."""
        return self._next(fun, *plain(args))

    opaque, call_as_it_is = settle, opaque_call

    def once(self, fun: Callable, args: tuple) -> Any:
        """Run a function that isn't logged."""
        return self._untraced(fun, *args)

    def _next(self, fun: Callable, *args: Any) -> Any:
        if not self._rest:
            return self._untraced(fun, *args)
        made = self._rest.pop()
        if not isinstance(made, Uncounted):
            return made
        for channel, counts in made.counts:
            channel.count_from(counts)
        return made.made

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


def as_value(x: Array | complex) -> Array:
    """Return a Python number as a NumPy scalar."""
    return x if isinstance(x, (np.ndarray, np.generic)) else np.asarray(x)[()]
