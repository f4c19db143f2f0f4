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
from contextlib import ExitStack, nullcontext
from copy import copy
from typing import Any, NamedTuple

import numpy as np
from autograd.core import VJPNode, VSpace
from autograd.tracer import Box, new_box, notrace_primitives

from mpiad._typing import Function
from mpiad.differentiation.backward import Lane, accumulate, sweep
from mpiad.differentiation.nodes import OrderedNode
from mpiad.differentiation.tape import OrderedTape, TangentTape
from mpiad.primitives.cotangents import spec_like
from mpiad.primitives.operation import Recorded, apply, suspended
from mpiad.programs.closure import Watch
from mpiad.programs.entry import Entry, entry_of, is_shown
from mpiad.programs.message_numbers import MessageNumbers, is_numbered
from mpiad.programs.recorder import Recorder
from mpiad.programs.shape_recorder import ShapeRecorder, like
from mpiad.programs.signature import Arguments
from mpiad.programs.steps import Abandoned, Constant, Ref, Step, Traced, hides_traced, mapped, on_host
from mpiad.programs.tape_node import conformed, value_and_node, value_and_tangent, with_tangent
from mpiad.programs.trace_run import Noting, TraceRun, raise_own
from mpiad.pytrees import flatten, is_variable
from mpiad.transport import Spec
from mpiad.transport.core import calls
from mpiad.transport.core.tracing import tracing

_boxes = Box.types


class _Call(NamedTuple):
    """The call of a node; its arguments are those of a `Step`, and `params` the keyword arguments, or a communication's."""

    fun: Any
    args: tuple[Any, ...]  # None for inputs of the node
    params: Any
    argnums: list[int]  # the positions of the node's inputs among the arguments
    step: Step | None  # the last step before the node was recorded, which has the user's line


class CallNode(OrderedNode):
    """A node of a program: `pull` is its `_Call`, None for variables, and `like` its result, with references."""

    __slots__ = ()

    def __init__(
        self, value: Any, fun: Any, args: tuple, params: Any, parent_argnums: Sequence[int], parents: Sequence[Any]
    ):
        tape = next(parent.tape for parent in parents if type(getattr(parent, "tape", None)) is ProgramTape)
        tape.add(self, value, fun, args, params, parent_argnums, parents)


notrace_primitives[CallNode] = notrace_primitives[VJPNode]


class ProgramTape(OrderedTape):
    """The tape that records a program, whose steps are in the trace `recorder`."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder

    def referenced(self, x: Any) -> Any:
        """Return the value of a nest at this time, with references to the trace."""
        return self.recorder.referenced(mapped(x, _innermost))

    def _argument(self, x: Any) -> Any:
        if type(x) not in _boxes and not isinstance(x, (Traced, VSpace)) and hides_traced(x):
            self.recorder.refuse("a derivative gets objects that contain traced values")
        return self.referenced(x)

    def add(self, node: Any, value: Any, fun: Any, args: tuple, params: Any, argnums: Sequence[int], parents: Any) -> None:
        """Append the node of a call."""
        pairs = [(k, parent.index) for k, parent in zip(argnums, parents) if getattr(parent, "tape", None) is self]
        own, steps = [k for k, _ in pairs], self.recorder.steps
        args = tuple([None if k in own else self._argument(x) for k, x in enumerate(args)])
        params = self._argument(params) if type(params) is dict else on_host(params)
        node.tape, node.like, node.index = self, self.referenced(value), len(self.record)
        node.inputs, node.pull = [index for _, index in pairs], _Call(fun, args, params, own, steps[-1] if steps else None)
        self.record.append(node)

    def communicated(
        self, operator: Recorded, ans: Any, args: tuple, params: object, argnums: Sequence[int], parents: Sequence[Any]
    ) -> Any:
        """Record a communication; return its node, or None if its result isn't an array."""
        node = CallNode.__new__(CallNode)
        self.add(node, ans, operator, args, params, argnums, parents)
        return None if getattr(ans, "dtype", None) is None else node


class Program:
    """A program, and the context in which it is recorded.

    `again`: whether it will be transformed again; if not, only the trace is recorded, and its results in `parts`. Otherwise
    `inputs` and `outputs` of each part are pairs of a reference to the trace and the index of a node, -1 for constants, and
    `ends` are the numbers of nodes at the ends of the parts. `build` assembles the function's result from its leaves.
    """

    build: Any = None

    def __init__(self, recorder: Recorder, again: bool):
        self.recorder, self._tape = recorder, ProgramTape(recorder) if again else None
        self.nodes: list[Any] = []
        self.inputs: list[list[tuple[Any, int]]] = []
        self.outputs: list[list[tuple[Any, int]]] = []
        self.ends: list[int] = []
        self.parts: list[list[Any]] = []

    def __enter__(self) -> Program:
        with ExitStack() as stack:
            for context in (Noting(self.recorder), suspended(body=False), self._tape or nullcontext()):
                stack.enter_context(context)
            self._contexts = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._contexts.__exit__(*error)
        if self._tape is not None and error[0] is None:
            self.nodes, self._tape = self._tape.close().nodes, None
            self._drop_unused()
        del self._contexts

    def begin_part(self, inputs: Sequence[Any], variables: Sequence[bool] | None = None) -> list[Any]:
        """Begin a part with some inputs, and return them, on the tape if they are `variables`; by default all are."""
        made, tape = list(inputs), self._tape
        if tape is not None:
            for k, x in enumerate(made):
                if is_variable(x) and (variables is None or variables[k]):
                    made[k] = new_box(x, tape.number, CallNode.on_tape(tape))
            self.inputs.append(self._with_indices(tape, made))
        return made

    def end_part(self, outputs: Sequence[Any]) -> None:
        """End a part."""
        if self._tape is None:
            self.parts.append(list(outputs))
        else:
            self.outputs.append(self._with_indices(self._tape, outputs))
            self.ends.append(len(self._tape.record))

    def _with_indices(self, tape: ProgramTape, values: Sequence[Any]) -> list[tuple[Any, int]]:
        return [(tape.referenced(x), index) for x, index in [value_and_node(x, tape) for x in values]]

    def _drop_unused(self) -> None:
        """Drop the steps and constants that no evaluation needs, and the references to arguments."""
        recorder, calls = self.recorder, [node.pull for node in self.nodes if node.pull is not None]
        computed, _ = _numbers([[node.like for node in self.nodes], *self.inputs])
        needed, constants = _numbers([*[(call.args, call.params) for call in calls], *self.outputs])
        steps = []
        for step in recorder.steps[::-1]:
            if not needed.isdisjoint(step.outs) and computed.isdisjoint(step.outs):
                steps.append(step)
                found = _numbers([step.args, step.kwargs])
                needed, constants = needed | found[0], constants | found[1]
        recorder.steps = steps[::-1]
        recorder.drop_arrays(constants)


def _innermost(x: Any) -> Any:
    while type(x) in _boxes:
        x = x._value
    return x


def _spec(x: Any) -> Spec:
    x = _innermost(x)
    return spec_like(x.value if isinstance(x, Traced) else x)


def _numbers(nest: Any) -> tuple[set[int], set[int]]:
    """Return the numbers of the values, and of the constants, to which a nest refers."""
    found: list[Any] = []
    mapped(nest, found.append)
    return {x.number for x in found if type(x) is Ref}, {x.number for x in found if type(x) is Constant}


def recorded(fun: Function, trace: TraceRun, variables: Collection[int]) -> Program:
    """Record the program of a function; `variables`: positions of the leaves with respect to which it is differentiated."""
    traced = trace.given.traced
    with Program(trace.recorder, True) as made:
        leaves = trace.leaves()
        for k, x in zip(traced, made.begin_part([leaves[k] for k in traced], [k in variables for k in traced])):
            leaves[k] = x
        args, kwargs = trace.given.build(leaves)
        values, made.build = flatten(fun(*args, **kwargs))
        made.end_part(values)
    return made


class Evaluation:
    """The evaluation of the parts of a program, one after the other, in a new trace."""

    def __init__(self, program: Program, recorder: Recorder):
        self._program, self._recorder, self._numbers = program, recorder, MessageNumbers()
        self._results: list[Any] = [None] * len(program.nodes)
        self._known: dict[int, Any] = {}  # values without derivatives in the new trace, by their numbers in the old one
        self._steps = {out: step for step in program.recorder.steps for out in step.outs}

    def inputs(self, number: int) -> list[Any]:
        """Return new inputs of a part."""
        old, recorder = self._program.recorder, self._recorder
        numbers = [x.number for x, _ in self._program.inputs[number]]
        return [recorder.input(like(Spec(*old.specs[k])), k in old.weak) for k in numbers]

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
                    self._results[node.index] = made = self._called(node.pull, node.inputs)
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
        """Remember the new value for a reference, or for each reference in a nest."""
        new = _innermost(new)
        if type(old) is Ref:
            self._known.setdefault(old.number, new)
            if old.number in self._program.recorder.weak:
                self._recorder.weaken(new)
        elif type(old) in (tuple, list):
            for a, b in zip(old, new):
                self._note(a, b)
        elif type(old) is dict:
            for key, a in old.items():
                self._note(a, new[key])

    def _constant(self, x: Any) -> Any:
        """Return an argument that isn't an input of its node, in the new trace."""
        old = self._program.recorder
        if type(x) is Ref:
            return self._value(x.number)
        if type(x) is Constant:
            return old.constants[x.number]
        if isinstance(x, VSpace) and getattr(getattr(x, "arrays", None), "recorder", None) is old:
            x = copy(x)
            x.arrays = type(x.arrays)(self._recorder)
        return x

    def _value(self, number: int) -> Any:
        """Return a value of the old trace in the new one; if necessary, its step is repeated."""
        if number not in self._known:
            step, weak = self._steps[number], self._program.recorder.weak
            if step.kind != "call":
                self._recorder.refuse(f"a derivative uses the result of {step.fun} as a constant")
            made = self._recorder.call(step.fun, mapped(step.args, self._constant), mapped(step.kwargs, self._constant))
            for out, x in zip(step.outs, made if isinstance(made, (tuple, list)) else [made]):
                self._known[out] = self._recorder.weaken(x) if out in weak else x
        return self._known[number]


def vjp(program: Program, of: Sequence[Sequence[int]], recorder: Recorder, last: int = 0, again: bool = False) -> Program:
    """Return a program followed by its reverse pass, recorded in a new trace.

    `of`: for each part, the positions of the inputs with respect to which it is differentiated. The reverse pass ends with
    the part `last`. Its inputs are the cotangents of the traced outputs of a part, and its outputs those of the inputs.
    """
    count = len(program.inputs)
    seeds: list[list[tuple[int, Spec]]] = []  # per part: indices of nodes, -1 for constants, and specs of the outputs
    variables: list[list[tuple[int, Spec]]] = []
    ranges: list[range] = []
    with Program(recorder, again) as made:
        evaluation = Evaluation(program, recorder)
        with OrderedTape() as tape:
            for part in range(count):
                recorder.part = part
                given = made.begin_part(evaluation.inputs(part))
                variables.append([])
                for k in of[part]:
                    variables[-1].append((len(tape.record), _spec(given[k])))
                    given[k] = new_box(given[k], tape.number, OrderedNode.on_tape(tape))
                start = len(tape.record)
                pairs = [value_and_node(x, tape) for x in evaluation.part(part, given)]
                ranges.append(range(start, len(tape.record)))
                made.end_part([x for x, _ in pairs])
                seeds.append([(index, _spec(x)) for x, index in pairs if isinstance(_innermost(x), Traced)])
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
    with Program(recorder, False) as made:
        evaluation = Evaluation(program, recorder)
        with TangentTape() as tape:
            for part, chosen in enumerate(of):
                recorder.part = part
                plain = evaluation.inputs(part)
                given = made.begin_part([*plain, *[recorder.input(like(_spec(plain[k]))) for k in chosen]])
                tangents = given[len(plain) :]
                del given[len(plain) :]
                for k, tangent in zip(chosen, tangents):
                    given[k] = with_tangent(tape, given[k], tangent)
                pairs = [value_and_tangent(x, tape) for x in evaluation.part(part, given)]
                made.end_part([x for x, _ in pairs] + [tangent for _, tangent in pairs])
        tape.close()
    made.build = program.build
    return made


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
            made = None if program is None else derive(program, recorder)
            # For complex numbers a warning must be logged, which the trace that runs the function does.
            if made is None or recorder.complex_line():
                return None
            return entry_of(recorder, made.parts, made.build, watch)
    except (Abandoned, Exception) as error:  # noqa: BLE001
        raise_own(recorder if trace is None else trace.recorder, error)
        return None
