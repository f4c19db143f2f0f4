"""Derivatives of programs: `vjp` and `jvp` map a program to a program, without another call of the user's function.

A `Program` is recorded on a tape of its own, the `ProgramTape`, whose nodes are the calls of differentiable functions and
the communications. So its derivatives have the rules of the interpreted function, with rules that the user has defined, and
with the constants of `stop_gradient`. An `Evaluation` repeats the nodes on other values: on traced arrays, or on boxes of
them. Values without derivatives, such as masks, are computed again by the steps of the recorder if a node needs them.

Both transformations evaluate a program on the boxes of one tape, and so record its derivative in a new trace of shapes.
Programs have parts, which run one after the other:

- `vjp` of the parts P0 .. Pn is P0 .. Pn, Rn .. R0: the parts, and then the reverse pass of each, beginning with the last.
- `jvp` of the parts P0 .. Pn is the same parts, with tangents.

The gradient is vjp(P). A product with the Hessian is jvp(vjp(P)), or vjp(vjp(P)) if it is computed repeatedly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from copy import copy
from typing import Any, NamedTuple

import numpy as np
from autograd.core import VJPNode, VSpace
from autograd.tracer import Box, new_box, notrace_primitives

from mpiad._typing import Function
from mpiad.differentiation.backward import Lane, accumulate, sweep
from mpiad.differentiation.nodes import OrderedNode, TangentNode
from mpiad.differentiation.tape import OrderedTape, TangentTape
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.primitives.operation import Recorded, apply, suspended
from mpiad.programs.closure import Watch
from mpiad.programs.entry import Entry, entry_of, is_shown
from mpiad.programs.message_numbers import MessageNumbers, is_numbered
from mpiad.programs.recorder import Recorder
from mpiad.programs.shape_recorder import ShapeRecorder, like
from mpiad.programs.signature import Arguments
from mpiad.programs.steps import Abandoned, Constant, Ref, Step, Traced, hides_traced, mapped
from mpiad.programs.tape_node import conformed
from mpiad.programs.trace_run import Noting, TraceRun, raise_own
from mpiad.pytrees import flatten, is_variable
from mpiad.transport import Spec, calls
from mpiad.transport.tracing import tracing

_boxes = Box.types


class _Call(NamedTuple):
    """The call of a node; `params`: keyword arguments, or the parameters of a communication."""

    fun: Any
    args: tuple[Any, ...]
    params: Any
    argnums: list[int]  # the positions of the node's inputs among the arguments
    step: Step | None  # the last step before the node was recorded, which has the user's line


class CallNode(OrderedNode):
    """A node of a program: `pull` is its `_Call`, None for variables, and `like` its result."""

    __slots__ = ()

    def __init__(
        self, value: Any, fun: Any, args: tuple, params: Any, parent_argnums: Sequence[int], parents: Sequence[Any]
    ):
        self.tape = tape = next(parent.tape for parent in parents if type(parent.tape) is ProgramTape)
        tape.add(self, value, fun, args, params, parent_argnums, parents)


notrace_primitives[CallNode] = notrace_primitives[VJPNode]


class ProgramTape(OrderedTape):
    """The tape that records a program, whose steps are in the trace `recorder`."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder

    def add(self, node: Any, value: Any, fun: Any, args: tuple, params: Any, argnums: Sequence[int], parents: Any) -> None:
        """Append the node of a call."""
        pairs = [(k, parent.index) for k, parent in zip(argnums, parents) if parent.tape is self]
        steps = self.recorder.steps
        node.tape, node.like, node.index, node.inputs = self, value, len(self.record), [index for _, index in pairs]
        node.pull = _Call(fun, args, params, [k for k, _ in pairs], steps[-1] if steps else None)
        self.record.append(node)

    def communicated(
        self, operator: Recorded, ans: Any, args: tuple, params: object, argnums: Sequence[int], parents: Sequence[Any]
    ) -> Any:
        """Record a communication; return its node, or None if its result isn't an array."""
        node = CallNode.__new__(CallNode)
        self.add(node, ans, operator, args, params, argnums, parents)
        return None if getattr(ans, "dtype", None) is None else node

    def with_node(self, x: Any) -> tuple[Any, int]:
        """Return a value without its box of this tape, and the index of its node, -1 for a constant."""
        x, node = _without_box(x, self)
        return x, -1 if node is None else node.index


_Values = list[tuple[Any, int]]  # values in a trace, and the indices of their nodes, -1 for constants


class Program:
    """A program, and the context in which it is recorded; `inputs`, `outputs`, and `ends` of its nodes, by part."""

    def __init__(self, recorder: Recorder):
        self.recorder, self._tape = recorder, ProgramTape(recorder)
        self.inputs: list[_Values] = []
        self.outputs: list[_Values] = []
        self.ends: list[int] = []
        self.build: Any = None  # assembles the function's result from the outputs of the first part

    def __enter__(self) -> Program:
        with ExitStack() as stack:
            for context in (Noting(self.recorder), suspended(body=False), self._tape):
                stack.enter_context(context)
            self._contexts = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._contexts.__exit__(*error)
        if error[0] is None:
            self.nodes: list[CallNode] = self._tape.close().nodes
            del self._tape, self._contexts

    def begin_part(self, inputs: Sequence[Any], variables: Sequence[bool] | None = None) -> list[Any]:
        """Begin a part with some inputs, and return them, on the tape if they are `variables`; by default all are."""
        number, tape = self._tape.number, self._tape
        made = [
            new_box(x, number, CallNode.on_tape(tape)) if is_variable(x) and (variables is None or variables[k]) else x
            for k, x in enumerate(inputs)
        ]
        self.inputs.append([tape.with_node(x) for x in made])
        return made

    def end_part(self, outputs: Sequence[Any]) -> None:
        """End a part."""
        self.outputs.append([self._tape.with_node(x) for x in outputs])
        self.ends.append(len(self._tape.record))

    def shrink(self) -> None:
        """Free the memory of traced values, and drop the steps and constants that no evaluation needs."""
        recorder = self.recorder
        made, needed = _numbers([node.like for node in self.nodes]), set[int]()
        made |= _numbers([x for part in self.inputs for x, _ in part])
        for call in [node.pull for node in self.nodes if node.pull is not None]:
            _numbers(list(call.args))
            needed |= _numbers(([x for k, x in enumerate(call.args) if k not in call.argnums], call.params))
        needed |= _numbers([x for part in self.outputs for x, _ in part])
        steps, constants = [], set()
        for step in recorder.steps[::-1]:
            if not needed.isdisjoint(step.outs) and made.isdisjoint(step.outs):
                steps.append(step)
                references: list[Any] = []
                mapped((step.args, step.kwargs), references.append)
                needed |= {x.number for x in references if type(x) is Ref}
                constants |= {x.number for x in references if type(x) is Constant}
        recorder.steps = steps[::-1]
        recorder.constants = [x if k in constants else None for k, x in enumerate(recorder.constants)]  # type: ignore[misc]
        recorder._inputs.clear()


def _without_box(x: Any, tape: Any) -> tuple[Any, Any]:
    """Return a value without its box of the tape, and its node, None for a constant."""
    return (x._value, x._node) if type(x) in _boxes and x._trace == tape.number else (x, None)


def _innermost(x: Any) -> Any:
    while type(x) in _boxes:
        x = x._value
    return x


def _spec(x: Any) -> Spec:
    x = _innermost(x)
    return spec_like(x.value if isinstance(x, Traced) else x)


def _numbers(nest: Any) -> set[int]:
    """Return the numbers of the traced values in a nest; their values are replaced by arrays that take no memory."""
    found = set()

    def visit(x: Any) -> None:
        x = _innermost(x)
        if isinstance(x, Traced):
            found.add(x.number)
            if isinstance(x.value, np.ndarray):
                x.value = np.broadcast_to(np.empty((), x.value.dtype), x.value.shape)
        elif type(x) in (tuple, list, dict):
            mapped(x, visit)

    mapped(nest, visit)
    return found


def recorded(fun: Function, trace: TraceRun, variables: Collection[int]) -> Program:
    """Record the program of a function; `variables`: positions of the leaves with respect to which it is differentiated."""
    traced = trace.given.traced
    with Program(trace.recorder) as made:
        leaves = trace.leaves()
        for k, x in zip(traced, made.begin_part([leaves[k] for k in traced], [k in variables for k in traced])):
            leaves[k] = x
        args, kwargs = trace.given.build(leaves)
        values, made.build = flatten(fun(*args, **kwargs))
        made.end_part(values)
    made.shrink()
    return made


class Evaluation:
    """The evaluation of the parts of a program, one after the other, in a new trace."""

    def __init__(self, program: Program, recorder: Recorder):
        self._program, self._recorder, self._numbers = program, recorder, MessageNumbers()
        self._results: list[Any] = [None] * len(program.nodes)
        self._known: dict[int, Any] = {}  # values without derivatives in the new trace, by their numbers in the old one
        self._steps = {out: step for step in program.recorder.steps for out in step.outs}

    def part(self, number: int, given: Sequence[Any]) -> list[Any]:
        """Return the outputs of a part, given its inputs."""
        program, ends = self._program, self._program.ends
        for (x, index), value in zip(program.inputs[number], given, strict=True):
            if index >= 0:
                self._results[index] = value
            self._note(x, value)
        around = tracing.site
        try:
            for node in program.nodes[ends[number - 1] if number else 0 : ends[number]]:
                if node.pull is not None:
                    self._results[node.index] = made = self._called(node.pull, node.inputs)  # type: ignore[arg-type]
                    self._note(node.like, made)
            pairs = program.outputs[number]
            return [self._results[index] if index >= 0 else mapped(x, self._constant) for x, index in pairs]
        finally:
            tracing.site = around

    def _called(self, call: _Call, inputs: Sequence[int]) -> Any:
        args = [mapped(x, self._constant) for x in call.args]
        for k, index in zip(call.argnums, inputs):
            args[k] = self._results[index]
        step = call.step
        tracing.site = None if step is None else step.site
        if not isinstance(call.fun, Recorded):
            return call.fun(*args, **mapped(call.params, self._constant))
        params = self._numbers.addressed(call.params) if is_numbered(call.params) else mapped(call.params, self._constant)
        if step is None or step.rule is None:
            return apply(call.fun, tracing.tape, tuple(args), params)
        direction, name, site = step.rule
        rule = calls.begin_rule(direction, name, site, None, None)
        try:
            return apply(call.fun, tracing.tape, tuple(args), params)
        finally:
            calls.end(rule)

    def _note(self, old: Any, new: Any) -> None:
        """Remember the new value of an old one."""
        old, new = _innermost(old), _innermost(new)
        if isinstance(old, Traced):
            self._known.setdefault(old.number, new)
            if old.number in self._program.recorder.weak:
                self._recorder.weaken(new)
        elif isinstance(old, (tuple, list)):
            for a, b in zip(old, new):
                self._note(a, b)
        elif isinstance(old, dict):
            for key, a in old.items():
                self._note(a, new[key])

    def _constant(self, x: Any) -> Any:
        """Return an argument that isn't an input of its node, in the new trace."""
        x, old = _innermost(x), self._program.recorder
        if isinstance(x, Traced):
            return self._value(x.number) if x.recorder is old else x
        if isinstance(x, VSpace):
            if getattr(getattr(x, "arrays", None), "recorder", None) is old:
                x = copy(x)
                x.arrays = type(x.arrays)(self._recorder)
        elif not callable(x) and hides_traced(x):
            self._recorder.refuse("a derivative gets objects that contain traced values")
        return x

    def _value(self, number: int) -> Any:
        """Return a value of the old trace in the new one; if necessary, its step is repeated."""
        if number not in self._known:
            step, old = self._steps[number], self._program.recorder
            if step.kind != "call":
                self._recorder.refuse(f"a derivative uses the result of {step.fun} as a constant")

            def value(x: Any) -> Any:
                if type(x) is Ref:
                    return self._value(x.number)
                return old.constants[x.number] if type(x) is Constant else x

            made = self._recorder.call(step.fun, mapped(step.args, value), mapped(step.kwargs, value))
            for out, x in zip(step.outs, made if isinstance(made, (tuple, list)) else [made]):
                self._known[out] = self._recorder.weaken(x) if out in old.weak else x
        return self._known[number]


def _new_inputs(recorder: Recorder, program: Program, part: int) -> list[Any]:
    weak = program.recorder.weak
    return [recorder.input(like(_spec(x)), x.number in weak) for x, _ in program.inputs[part]]


def vjp(program: Program, of: Sequence[Sequence[int]], recorder: Recorder, last: int = 0) -> Program:
    """Return a program followed by its reverse pass, recorded in a new trace.

    `of`: for each part, the positions of the inputs with respect to which it is differentiated. The reverse pass ends with
    the part `last`. Its inputs are the cotangents of the traced outputs of a part, and its outputs those of the inputs.
    """
    count = len(program.inputs)
    seeds: list[list[tuple[int, Spec]]] = []  # per part: indices of nodes, -1 for constants, and specs of the outputs
    variables: list[list[tuple[int, Spec]]] = []
    ranges: list[range] = []
    with Program(recorder) as made:
        evaluation = Evaluation(program, recorder)
        with OrderedTape() as tape:
            for part in range(count):
                recorder.part = part
                given = made.begin_part(_new_inputs(recorder, program, part))
                variables.append([])
                for k in of[part]:
                    variables[-1].append((len(tape.record), _spec(given[k])))
                    given[k] = new_box(given[k], tape.number, OrderedNode.on_tape(tape))
                start = len(tape.record)
                pairs = [_without_box(x, tape) for x in evaluation.part(part, given)]
                ranges.append(range(start, len(tape.record)))
                made.end_part([x for x, _ in pairs])
                traced = [(x, node) for x, node in pairs if isinstance(_innermost(x), Traced)]
                seeds.append([(-1 if node is None else node.index, _spec(x)) for x, node in traced])
        nodes = tape.close().nodes
        lane = Lane([None] * len(nodes), bytearray(len(nodes)))
        for part in range(count - 1, last - 1, -1):
            recorder.part += 1
            gs = made.begin_part([recorder.input(like(spec)) for _, spec in seeds[part]])
            for (index, _), g in zip(seeds[part], gs):
                if index >= 0:
                    lane.totals[index], lane.owned[index] = accumulate(lane.totals[index], bool(lane.owned[index]), g)
            sweep(nodes, lane.totals, ranges[part][::-1], True, lane.owned)
            made.end_part([conformed(lane.totals[index], spec) for index, spec in variables[part]])
    made.build = program.build
    return made


def jvp(program: Program, of: Sequence[Sequence[int]], recorder: Recorder) -> Program:
    """Return a program with tangents, recorded in a new trace.

    The inputs of a part are followed by the tangents of its inputs `of`, and the outputs by their tangents.
    """
    with Program(recorder) as made:
        evaluation = Evaluation(program, recorder)
        with TangentTape() as tape:
            for part, chosen in enumerate(of):
                recorder.part = part
                plain = _new_inputs(recorder, program, part)
                given = made.begin_part([*plain, *[recorder.input(like(_spec(plain[k]))) for k in chosen]])
                tangents = given[len(plain) :]
                del given[len(plain) :]
                for k, tangent in zip(chosen, tangents):
                    given[k] = new_box(given[k], tape.number, TangentNode.on_tape(tape, tangent))
                pairs = [_without_box(x, tape) for x in evaluation.part(part, given)]
                made.end_part([x for x, _ in pairs] + [_tangent(x, node) for x, node in pairs])
        tape.close()
    made.build = program.build
    return made


def _tangent(x: Any, node: Any) -> Any:
    if node is not None:
        return conform(node.g, *_spec(x))
    return _spec(x).zeros() if is_variable(x) else x


def derived_entry(
    jitted: Any, given: Arguments, watch: Watch, variables: Sequence[int], derive: Callable[[Program, Recorder], Program]
) -> Entry | None:
    """Compile a derivative of a function from the shapes of its arguments; return None if that fails.

    ``derive(program, recorder)`` transforms the function's program, which is recorded once for each signature and choice of
    `variables`, the positions of the leaves with respect to which it may be differentiated.
    """
    if is_shown():
        return None
    key, chosen = (given.key, tuple(sorted(set(variables)))), set(variables)
    program, valid = jitted._programs.get(key, (None, None))
    trace = TraceRun(given, ShapeRecorder) if valid is None or not valid.is_the_same() else None
    recorder = ShapeRecorder()
    try:
        with np.errstate(all="ignore"):  # the values are those of uninitialized memory
            if trace is not None:
                jitted._programs[key] = None, watch
                program = recorded(jitted.fun, trace, chosen)
                jitted._programs[key] = program, watch
            if program is None:
                return None
            made = derive(program, recorder)
            # For complex numbers a warning must be logged, which the trace that runs the function does.
            if recorder.complex_line():
                return None
            return entry_of(recorder, [[x for x, _ in part] for part in made.outputs], made.build, watch)
    except (Abandoned, Exception) as error:  # noqa: BLE001
        import traceback

        traceback.print_exc(limit=-4)
        raise_own(recorder if trace is None else trace.recorder, error)
        return None
