"""Derivatives of programs, without another call of the user's function.

A `Program` is recorded on a tape of its own, the `ProgramTape`, whose nodes are the calls of differentiable functions and
the communications. So derivatives of a program use the same rules as those of the interpreted function, including rules
of the user, and treat results of `stop_gradient` as constants. An `Evaluation` repeats the nodes on other values:
on traced arrays, or on boxes of them. Values without derivatives, such as masks, are computed again by the steps of the
recorder if a node needs them.

A derivative is an evaluation on the boxes of a tape, followed by the reverse pass along this tape, recorded in a new trace
of shapes. A second derivative is the same under an enclosing tape. The result consists of parts, which run one after the
other; each part is the list of its results:

- `vjp`: the function and its reverse pass.
- `jvp_of_vjp`: the same parts, with tangents. A product with the Hessian is computed in this way.
- `vjp_of_vjp`: the same parts, the reverse pass of the second part, and the reverse pass of the first part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, NamedTuple

from autograd.core import VSpace
from autograd.tracer import Box, new_box, notrace_primitives

from mpiad._typing import Array, Function
from mpiad.differentiation.backward import Lane, sweep
from mpiad.differentiation.forward import TangentTape
from mpiad.differentiation.in_place import keeping_arguments, note_sharing, noted
from mpiad.differentiation.tape import OrderedNode, OrderedTape
from mpiad.primitives.cotangents import conformed, spec_like
from mpiad.primitives.operation import Recorded, VectorizedVjp, apply, recorded_call, suspended
from mpiad.programs.message_numbers import MessageNumbers, is_numbered
from mpiad.programs.recorder import Recorder, ShapeRecorder, like
from mpiad.programs.signature import Arguments
from mpiad.programs.traced_array import Constant, Ref, Step, TracedArray, hides_traced, mapped, on_host
from mpiad.pytrees import flatten
from mpiad.transport import Spec
from mpiad.transport.core import calls
from mpiad.transport.core.tracing import tracing

_boxes = Box.types


class _Call(NamedTuple):
    """The call of a node, with arguments as in a `Step`; `params`: keyword arguments, or parameters of a communication."""

    fun: Any
    args: tuple[Any, ...]  # None for inputs of the node
    params: Any
    argnums: list[int]  # the positions of the node's inputs among the arguments
    step: Step | None  # the last step before the node was recorded, which has the user's line


class CallNode(OrderedNode):
    """A node of a program; `pull`: its `_Call`, or None for variables; `like`: its result, with a `Ref` for each array."""

    __slots__ = ()

    def __init__(
        self, value: Any, fun: Any, args: tuple, params: Any, parent_argnums: Sequence[int], parents: Sequence[Any]
    ):
        tape = next(parent.tape for parent in parents if type(getattr(parent, "tape", None)) is ProgramTape)
        noted(self, value, fun, args, params, parent_argnums, parents)
        tape.add(self, value, fun, args, params, parent_argnums, parents)


notrace_primitives[CallNode] = notrace_primitives[OrderedNode]


class ProgramTape(OrderedTape):
    """The tape that records a program, whose steps are in the trace `recorder`."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder

    def referenced(self, x: Any) -> Any:
        """Return nested arguments, with references to the values that the arrays have at this time."""
        return self.recorder.referenced(mapped(x, _innermost))

    def with_indices(self, values: Sequence[Array]) -> list[tuple[Ref, int]]:
        """Return references to values, each with the index of its node, -1 for a constant."""
        return [(self.referenced(x), index) for x, index in map(self.value_and_place, values)]

    def _argument(self, x: Any) -> Any:
        if type(x) not in _boxes and not isinstance(x, (TracedArray, VSpace)) and hides_traced(x):
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
        self, operator: Recorded, ans: Array, args: tuple, params: object, argnums: Sequence[int], parents: Sequence[Any]
    ) -> Any:
        """Record a communication; return its node, or None if its result isn't an array."""
        node = CallNode.__new__(CallNode)
        note_sharing(node, ans, args, argnums, parents)
        self.add(node, ans, operator, args, params, argnums, parents)
        return None if getattr(ans, "dtype", None) is None else node


class Program(NamedTuple):
    """The program of a function; `build` assembles the function's result from its leaves."""

    recorder: Recorder
    nodes: list[Any]  # list of CallNode
    # References to the trace, each with the index of its node, -1 for constants.
    inputs: list[tuple[Any, int]]
    outputs: list[tuple[Any, int]]
    build: Callable[[list[Any]], Any]


def _innermost(x: Array) -> Array:
    while type(x) in _boxes:
        x = x._value
    return x


def _spec(x: Array) -> Spec:
    x = _innermost(x)
    return spec_like(x.value if isinstance(x, TracedArray) else x)


def recorded(fun: Function, given: Arguments, variables: Iterable[int], exact: bool = False) -> Program:
    """Record the program of a function; `variables`: positions of the leaves with respect to which it is differentiated."""
    recorder = ShapeRecorder(exact)
    with recorder, suspended(body=False), ProgramTape(recorder) as tape:
        leaves = recorder.arguments(given)
        for k in set(variables):
            leaves[k] = new_box(leaves[k], tape.number, CallNode.on_tape(tape))
        inputs = tape.with_indices([leaves[k] for k in given.traced])
        args, kwargs = given.build(leaves)
        values, build = flatten(keeping_arguments(fun)(*args, **kwargs))
        outputs = tape.with_indices(values)
    return Program(recorder, tape.close().nodes, inputs, outputs, build)


class Evaluation:
    """The evaluation of a program in a new trace."""

    def __init__(self, program: Program, recorder: Recorder):
        self._program, self._recorder, self._numbers = program, recorder, MessageNumbers()
        self._results: list[Any] = [None] * len(program.nodes)
        self._known: dict[int, Any] = {}  # values in the new trace, without boxes, by their numbers in the old one
        self._steps = {out: step for step in program.recorder.steps for out in step.outs}

    def inputs(self) -> list[Array]:
        """Return new inputs."""
        old, recorder = self._program.recorder, self._recorder
        return [recorder.input(like(Spec(*old.specs[x.number])), x.number in old.weak) for x, _ in self._program.inputs]

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        """Return the outputs of the program."""
        program = self._program
        for (x, index), value in zip(program.inputs, inputs, strict=True):
            if index >= 0:
                self._results[index] = value
            self._note(x, value)
        around = tracing.site
        try:
            for node in program.nodes:
                if node.pull is not None:
                    self._results[node.index] = made = self._called(node.pull, node.inputs)
                    self._note(node.like, made)
            return [self._results[index] if index >= 0 else mapped(x, self._constant) for x, index in program.outputs]
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
        arguments = *step.rule, None, None
        return recorded_call(calls.begin_rule, arguments, apply, call.fun, tracing.tape, tuple(args), params)

    def _note(self, old: Any, new: Any) -> None:
        """Remember the new value for a reference, or for each reference in nested results."""
        olds, news = list[Any](), list[Any]()
        mapped(old, olds.append)
        mapped(_innermost(new), news.append)
        for reference, value in zip(olds, map(_innermost, news)):
            if type(reference) is Ref:
                self._known.setdefault(reference.number, value)
                if reference.number in self._program.recorder.weak:
                    self._recorder.weaken(value)

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


def _record_sweep(recorder: Recorder, nodes: list[OrderedNode], lane: Lane, places: range) -> None:
    """Record the reverse pass through a range of nodes."""
    for place in reversed(places):
        recorder.combined = type(nodes[place].pull) is VectorizedVjp
        sweep(nodes, lane.totals, range(place, place - 1, -1), True, lane.owned)
    recorder.combined = False


class _Parts:
    """The parts of a derivative; a subclass differentiates them by an enclosing tape."""

    def __init__(self, recorder: Recorder):
        self.recorder, self.made = recorder, list[list[Any]]()

    def variables(self, values: list[Array], chosen: Sequence[int]) -> list[Array]:
        """Return the inputs of a part; those at the positions `chosen` are variables of the enclosing tape."""
        return values

    def end(self, results: Sequence[Array]) -> None:
        """End a part, which returns `results`."""
        self.made.append(list(results))

    def run(self, program: Program, inner: Sequence[int], outer: Sequence[int] = ()) -> None:
        """Record a program and its reverse pass; the results' cotangents are also variables of the enclosing tape."""
        # `inner`, `outer`: the positions of the inputs that are variables of the reverse pass and of the enclosing tape.
        recorder, evaluation = self.recorder, Evaluation(program, self.recorder)
        given = self.variables(evaluation.inputs(), outer)
        specs = [_spec(given[k]) for k in inner]
        with OrderedTape() as tape:
            for k in inner:
                given[k] = tape.variable(given[k])
            pairs = [tape.value_and_place(x) for x in evaluation.run(given)]
        nodes = tape.close().nodes
        self.end([x for x, _ in pairs])
        recorder.part = 1
        pairs = [(x, index) for x, index in pairs if isinstance(_innermost(x), TracedArray)]
        gs = self.variables([recorder.input(like(_spec(x))) for x, _ in pairs], range(len(pairs)))
        lane = Lane.of(nodes)
        lane.add(zip([index for _, index in pairs], gs))
        _record_sweep(recorder, nodes, lane, range(len(specs), len(nodes)))
        self.end([conformed(lane.totals[index], spec) for index, spec in enumerate(specs)])


class _PartsWithTangents(_Parts):
    """The inputs of a part are followed by the tangents of its variables, and the results by their tangents."""

    def __init__(self, recorder: Recorder, tape: TangentTape):
        super().__init__(recorder)
        self._tape = tape

    def variables(self, values: list[Array], chosen: Sequence[int]) -> list[Array]:
        for k in chosen:
            values[k] = self._tape.variable(values[k], self.recorder.input(like(_spec(values[k]))))
        return values

    def end(self, results: Sequence[Array]) -> None:
        self.made.append([x for part in zip(*map(self._tape.value_and_tangent, results)) for x in part])


class _PartsWithReversePasses(_Parts):
    """Each part has a reverse pass along the enclosing tape, which is a further part."""

    def __init__(self, recorder: Recorder, tape: OrderedTape):
        super().__init__(recorder)
        self._tape = tape
        self._variables: list[list[tuple[int, Spec]]] = []  # per part, the indices and specs of its variables
        self._results: list[list[tuple[int, Spec]]] = []
        self._starts: list[int] = []
        self._ranges: list[range] = []  # the nodes of each part

    def variables(self, values: list[Array], chosen: Sequence[int]) -> list[Array]:
        record = self._tape.record
        self._variables.append([(index, _spec(values[k])) for index, k in enumerate(chosen, len(record))])
        for k in chosen:
            values[k] = self._tape.variable(values[k])
        self._starts.append(len(record))
        return values

    def end(self, results: Sequence[Array]) -> None:
        pairs = [self._tape.value_and_place(x) for x in results]
        self.made.append([x for x, _ in pairs])
        # The caller passes a cotangent for each result of the reverse pass, also where a variable has no influence.
        self._results.append([(k, _spec(x)) for x, k in pairs if self._results or isinstance(_innermost(x), TracedArray)])
        self._ranges.append(range(self._starts[-1], len(self._tape.record)))

    def end_with_reverse_passes(self, nodes: list[OrderedNode], last: int) -> None:
        """Record the reverse passes of the parts, in reverse order; the last one recorded is that of the part `last`."""
        lane = Lane.of(nodes)
        for part in range(len(self._ranges) - 1, last - 1, -1):
            self.recorder.part += 1
            gs = [self.recorder.input(like(spec)) for _, spec in self._results[part]]
            lane.add(zip([index for index, _ in self._results[part]], gs))
            _record_sweep(self.recorder, nodes, lane, self._ranges[part])
            self.made.append([conformed(lane.totals[index], spec) for index, spec in self._variables[part]])


def vjp(program: Program, recorder: Recorder, inner: Sequence[int]) -> list[list[Array]]:
    """Return the parts of a program and its reverse pass, from cotangents of results to those of the inputs `inner`."""
    parts = _Parts(recorder)
    with recorder, suspended(body=False):
        parts.run(program, inner)
    return parts.made


def jvp_of_vjp(program: Program, recorder: Recorder, inner: Sequence[int], outer: Sequence[int]) -> list[list[Array]]:
    """Return the parts of `vjp` with tangents, with respect to the inputs `outer` and the cotangents of the results."""
    with recorder, suspended(body=False), TangentTape() as tape:
        parts = _PartsWithTangents(recorder, tape)
        parts.run(program, inner, outer)
    tape.close()
    return parts.made


def vjp_of_vjp(
    program: Program, recorder: Recorder, inner: Sequence[int], outer: Sequence[int], last: int
) -> list[list[Array]]:
    """Return the two parts of `vjp`, and the reverse pass of part 1, followed by that of part 0 if `last` is 0."""
    with recorder, suspended(body=False):
        with OrderedTape() as tape:
            parts = _PartsWithReversePasses(recorder, tape)
            parts.run(program, inner, outer)
        parts.end_with_reverse_passes(tape.close().nodes, last)
    return parts.made
