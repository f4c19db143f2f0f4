"""The ordered tape: the steps of one trace in execution order, including every communication.

While a trace is open, its nodes and its tape refer to each other. At the end the tape drops its reference to the nodes;
otherwise this reference cycle would keep the memory allocated.

An inner trace must have a higher number than the outer trace, even if one of the two is a trace of plain autograd.
Therefore the numbers come from autograd's counter. All threads share this counter, and autograd doesn't reset it after an
exception. This module resets it, but never below the number of a trace that another thread has open.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from autograd.tracer import Box, new_box, trace_stack

from mpiad._typing import Array
from mpiad.differentiation.advice import explain
from mpiad.differentiation.nodes import DetachedNode, OrderedNode
from mpiad.primitives.cotangents import spec_like
from mpiad.primitives.operation import Recorded, Tape, VectorizedVjp
from mpiad.transport import Spec
from mpiad.transport.core.agreement import mark_left
from mpiad.transport.core.channels import Used
from mpiad.transport.core.tracing import restore_state, tracing

_box_types = Box.types

_NO_VALUE = Spec(None, None)  # type: ignore[arg-type]


class Recording(NamedTuple):
    """The record of a closed tape and the channels that it used."""

    nodes: list[Any]
    channels: set[Used]


class LibraryTape(Tape):
    """State of reverse-mode and forward-mode tapes: number, enclosing tapes, unfinished requests and used channels."""

    number = before = -1  # the number of this trace, and the counter's value before this trace

    def __init__(self, of_cotangents: bool = False, passes: str = "several") -> None:
        self.of_cotangents, self.passes = of_cotangents, passes
        self.record: Any = []
        self.requests: dict[int, Any] = {}
        self.channels: set[Used] = set()

    def __enter__(self) -> Any:
        self.outer: Tape | None = tracing.tape
        self.around: LibraryTape | None = tracing.tapes  # the next outer open tape, even if it isn't current
        self.outer_channels = tracing.channels
        tracing.tapes = self  # first, so that an interrupt in this function also ends the trace
        _open_number(self)
        tracing.tape, tracing.channels = self, self.channels
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        outer, outer_channels = self.outer, self.outer_channels
        tracing.tape, tracing.channels = outer, outer_channels
        if error is not None:
            self.end(error, trace)
            tracing.tapes, self.around = self.around, None
            return
        _close_number(self)
        self.end_values()
        self.outer = self.outer_channels = None  # frees the enclosing tapes
        if outer is not None and self.channels:
            # The enclosing trace also runs these communications backwards.
            outer.channels |= self.channels
        elif self.channels and outer_channels is not None:
            outer_channels.update([(channel, False) for channel, _ in self.channels])

    def close(self) -> Recording:
        """Return the record; traced values become constants."""
        recording = Recording(self.record, self.channels)
        tracing.tapes, self.record, self.around = self.around, None, None
        return recording

    def end(self, error: BaseException, trace: TracebackType | None) -> None:
        """End the trace after an exception; traced values become constants. A second call does nothing."""
        _close_number(self)
        self.end_values()
        self.outer = self.outer_channels = None
        if self.record is not None:
            explain(error, trace)
            mark_left(self.channels, error, "a trace")
            # Dropping the record ends the reference cycle of tape and nodes.
            self.record = None

    def end_values(self) -> None:
        """Turn the values of this trace into constants."""


class OrderedTape(LibraryTape):
    """The tape of a reverse-mode trace."""

    def end_values(self) -> None:
        """Turn the values of this trace into constants, by changing the type of their nodes."""
        for node in self.record or ():
            node.__class__ = DetachedNode

    def communicated(
        self, operator: Recorded, ans: Array, args: tuple, params: object, argnums: Sequence[int], parents: Sequence[Any]
    ) -> Any:
        """Record a communication; return its node, or None if its result isn't an array."""
        dtype = getattr(ans, "dtype", None)
        # The node keeps only the result's spec, for cotangents of zeros, so that the memory of the result can be freed.
        like = _NO_VALUE if dtype is None else spec_like(ans)
        inputs = [(k, node.index) for k, node in zip(argnums, parents) if node.tape is self]
        vjp = operator.vjp(ans, args, params, tuple([k for k, _ in inputs]), self.number)
        if operator.batched_adjoint:
            vjp = VectorizedVjp(vjp)
        node = OrderedNode.on_tape(self, tuple([position for _, position in inputs]), vjp, like)
        return None if dtype is None else node


_lock = threading.Lock()
_open: dict[LibraryTape, int] = {}  # open tapes, and the thread of each
_base = -1


def _open_number(tape: LibraryTape) -> None:
    """Open a trace: assign its number, and save the previous value of the counter."""
    global _base
    with _lock:
        tape.before = trace_stack.top
        tape.number = tape.before + 1
        if not _open:
            _base = tape.before  # the counter's value when no thread has a trace open
        _open[tape] = threading.get_ident()
        trace_stack.top = tape.number


def _close_number(tape: LibraryTape) -> None:
    """Close a trace, and inner traces that an exception left open; do nothing if the trace is already closed."""
    with _lock:
        thread = _open.get(tape)
        if thread is None:
            return
        if len(_open) == 1:
            trace_stack.top = _base
            _open.clear()
            return
        closed = [other for other, owner in _open.items() if owner == thread and other.number >= tape.number]
        if len(closed) == len(_open):
            trace_stack.top = _base
        # If all other open traces have lower numbers, the counter is reset.
        elif trace_stack.top == tape.number or all(owner == thread for owner in _open.values()):
            trace_stack.top = tape.before
        for other in closed:
            del _open[other]


def trace_list(
    fun: Callable[[list[Any]], Sequence[Any]], variables: Sequence[Any]
) -> tuple[list[Any], list[int], Recording]:
    """Call a function of a list in reverse mode; return its results, their positions (-1 for constants), and the record."""
    tape, saved = OrderedTape(), tracing.__dict__.copy()
    try:
        with tape:
            number, node = tape.number, OrderedNode.on_tape
            results = [unboxed(value, tape) for value in fun([new_box(x, number, node(tape)) for x in variables])]
        places = [-1 if node is None else node.index for _, node in results]
        return [value for value, _ in results], places, tape.close()
    except BaseException as error:
        restore_state(saved, error)
        raise


def unboxed(value: Array, tape: Tape) -> tuple[Any, Any]:
    """Return a result's value and its node on this tape; the node is None for a constant."""
    number = tape.number
    while type(value) in _box_types and value._trace > number:
        value = value._value  # the value of an inner trace that has ended
    if type(value) in _box_types and value._trace == number:
        node = value._node
        return value._value, node if getattr(node, "tape", None) is tape else None
    return without_ended_traces(value), None


def without_ended_traces(value: Array) -> Array:
    """Return a value without the boxes of ended traces."""
    while type(value) in _box_types:
        tape = getattr(value._node, "tape", None)
        if tape is None or tape.record is not None:
            break
        value = value._value
    return value
