"""A function and its reverse pass on a tape around both, which is run backwards in two steps: the reverse pass first.

So are the parts of a program traced whose reverse pass is differentiated in turn (`reverse_over_reverse`), and so is its
function run where that program can't serve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from autograd.tracer import Box, getval, new_box

from mpiad._typing import Function
from mpiad.differentiation.backward import Lane, accumulate, run_backward, sweep, sweep_together
from mpiad.differentiation.nodes import OrderedNode
from mpiad.differentiation.tape import OrderedTape
from mpiad.primitives.cotangents import spec_like
from mpiad.primitives.operation import suspended
from mpiad.programs.shape_recorder import like
from mpiad.programs.steps import Traced
from mpiad.programs.tape_node import conformed
from mpiad.programs.trace_run import TraceRun
from mpiad.pytrees import is_variable

_boxes = Box.types


class By(NamedTuple):
    """By which leaves of the arguments a function is differentiated."""

    inner: list[int]  # by its own reverse pass
    outer: list[int]  # by the one of both
    # Of the program: 2 without a reverse pass of both, 3 with one by the cotangents alone, 4 with one by outer leaves, too.
    parts: int


class Record(NamedTuple):
    """A function and its reverse pass on a tape around both."""

    # Of type OrderedNode: of variables and function up to `end`, of cotangents of the results in the program up to `start`,
    # and of the reverse pass.
    nodes: list[Any]
    # `values`, `found`: results and cotangents of variables, with their places; -1 for constants.
    values: list[tuple[Any, int]]
    found: list[tuple[Any, int]]
    end: int
    start: int
    build: Callable[[list[Any]], Any]  # from leaves to the function's result

    def lane(self, seeds: Iterable[tuple[int, Any]]) -> Lane:
        """Return a reverse pass that begins."""
        lane = Lane([None] * len(self.nodes), bytearray(len(self.nodes)))
        seed(lane, seeds)
        return lane

    def sweep(self, lanes: Sequence[Lane], places: range, together: bool) -> None:
        """Run nodes backwards."""
        if together:
            sweep_together(self.nodes, lanes, places.stop, places.start)
            return
        for lane in lanes:
            sweep(self.nodes, lane.totals, places[::-1], True, lane.owned)


def seed(lane: Lane, pairs: Iterable[tuple[int, Any]]) -> None:
    """Add cotangents to those of nodes; a place of -1 is none."""
    for place, g in pairs:
        if place >= 0:
            lane.totals[place], lane.owned[place] = accumulate(lane.totals[place], bool(lane.owned[place]), g)


def recorded(
    fun: Function, trace: TraceRun, by: By, leaves: Sequence[Any], seeds: Callable[[list[Any]], list[Any]],
    contexts: Sequence[AbstractContextManager],
) -> Record:  # fmt: skip
    """Run a function and its reverse pass on a tape around both.

    `seeds` makes of the results their cotangents, None for constants. `contexts`: two, for the function and for its reverse
    pass.
    """
    with OrderedTape(of_cotangents=by.parts == 3) as tape:
        given = list(leaves)
        for k in by.outer:
            given[k] = _variable(tape, given[k])
        with contexts[0]:
            run = trace.run_backwards(fun, by.inner, given)
        values, end = [_lowered(x, tape) for x in run.values], len(tape.record)
        gs = [None if g is None else _variable(tape, g) for g in seeds([x for x, _ in values])]
        start = len(tape.record)
        with contexts[1]:
            pairs = [(place, g) for place, g in zip(run.places, gs) if place >= 0 and g is not None]
            found = run_backward(run.recording, pairs, len(by.inner), True)
            specs = [spec_like(getval(leaves[k])) for k in by.inner]
            cotangents = [_lowered(conformed(g, spec), tape) for g, spec in zip(found, specs)]
    return Record(tape.close().nodes, values, cotangents, end, start, run.build)


def _variable(tape: Any, x: Any) -> Any:
    """Return a variable; what can be none gets a place on the tape all the same."""
    node = OrderedNode.variable(tape)
    return new_box(x, tape.number, node) if is_variable(x) else x


def _lowered(x: Any, tape: Any) -> tuple[Any, int]:
    """Return a value below a tape, and its place on it; -1 for a constant."""
    if type(x) in _boxes and x._trace == tape.number:
        return x._value, x._node.index
    return x, -1


def noted(fun: Function, by: By, trace: TraceRun) -> tuple:
    """Trace the parts of a program, and return their leaves, and what builds the result.

    Its inputs are the arguments, and those of each part: the cotangents of the results, what multiplies those of the
    variables, and again cotangents of the results.
    """
    recorder = trace.recorder

    def inputs_like(values: list[Any]) -> list[Any]:
        """Return inputs like those values that belong to the program."""
        return [recorder.input(like(spec_like(x.value))) if isinstance(x, Traced) else None for x in values]

    def seeds(values: list[Any]) -> list[Any]:
        recorder.part = 1
        return inputs_like(values)

    def cotangents(lane: Lane, places: Iterable[int], of: list[Any]) -> list[Any]:
        return [conformed(lane.totals[place], spec_like(x)) for place, x in zip(places, of)]

    with suspended(body=False), trace.noting():
        leaves = trace.leaves()
        record = recorded(fun, trace, by, leaves, seeds, (nullcontext(), nullcontext()))
        inside = [(x, place) for x, place in record.values if isinstance(x, Traced)]
        values, parts = [x for x, _ in inside], [[x for x, _ in pairs] for pairs in (record.values, record.found)]
        recorder.logged = min(by.parts - 1, 2)
        if by.parts > 2:
            recorder.part = 2
            vs = inputs_like([leaves[k] for k in by.inner])
            lane = record.lane(zip([place for _, place in record.found], vs))
            record.sweep([lane], range(record.start, len(record.nodes)), False)
            parts.append(cotangents(lane, range(record.end, record.start), values))
        if by.parts > 3:
            recorder.part = 3
            seed(lane, zip([place for _, place in inside], inputs_like(values)))
            record.sweep([lane], range(len(by.outer), record.end), False)
            parts.append(cotangents(lane, range(len(by.outer)), [leaves[k] for k in by.outer]))
    return parts, record.build
