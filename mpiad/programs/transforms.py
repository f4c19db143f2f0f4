"""Programs, and their derivatives as programs, without another call of the user's function.

A `Program` is recorded on a tape of its own, the `ProgramTape`, whose nodes are the calls of differentiable functions and
the communications. So derivatives of a program use the same rules as those of the interpreted function, including rules
of the user, and treat results of `stop_gradient` as constants. An `Evaluation` repeats the nodes on other values:
on plain or traced arrays, or on boxes of them. Values without derivatives, such as masks, are computed again by the steps
of the recorder if a node needs them.

A derivative is an evaluation on the boxes of a tape that is enclosed by a new `ProgramTape`. So it is a program again:

- `jvp`: a program of values and tangents.
- `linearized`: two programs. The forward one also returns *residuals*: the arrays that the backward one, the reverse pass,
  reads besides the cotangents of the results. The backward one computes cheap values again (see `residuals`).
- `vjp`: the forward and the backward program as two parts of one trace, which share their buffers. A first derivative is
  compiled in this form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from autograd.builtins import SequenceVSpace
from autograd.core import VSpace, vspace
from autograd.tracer import Box, new_box, notrace_primitives

from mpiad._typing import Array, Function
from mpiad.device.assembly import stack
from mpiad.differentiation.backward import Lane, sweep
from mpiad.differentiation.forward import TangentTape
from mpiad.differentiation.in_place import keeping_arguments, note_sharing, noted
from mpiad.differentiation.tape import OrderedNode, OrderedTape
from mpiad.primitives.cotangents import conformed, spec_like
from mpiad.primitives.operation import Recorded, VectorizedVjp, apply, recorded_call, suspended
from mpiad.primitives.request import Request
from mpiad.programs.message_numbers import MessageNumbers, is_numbered
from mpiad.programs.recorder import Recorder, like
from mpiad.programs.residuals import chosen
from mpiad.programs.signature import Arguments
from mpiad.programs.traced_array import Constant, Ref, Step, TracedArray, hides_traced, mapped, take, untraced
from mpiad.pytrees import flatten, is_variable
from mpiad.transport import Spec
from mpiad.transport.core import calls
from mpiad.transport.core.channels import communications
from mpiad.transport.core.tracing import checked_on_replay, tracing

_boxes = Box.types


class Call(NamedTuple):
    """The call of a node, with arguments as in a `Step`; `params`: keyword arguments, or parameters of a communication."""

    fun: Any
    args: tuple[Any, ...]  # None for inputs of the node
    params: Any
    argnums: list[int]  # the positions of the node's inputs among the arguments
    step: Step | None  # the last step before the node was recorded, which has the user's line

    @property
    def is_combined(self) -> bool:
        """Whether reverse passes that run together make the communication once for all of them."""
        return self.step is not None and self.step.combined


class Settled(NamedTuple):
    """A function whose result determines the program; see `Recorder.settle`."""

    fun: Function
    outcome: object


class CallNode(OrderedNode):
    """A node of a program; `pull`: its `Call`, or None for variables; `like`: its result, with a `Ref` for each array."""

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

    records_constants = True

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder
        recorder.on_settled = self.settled

    def variable(self, x: Array) -> Array:
        """Return x as a variable, or x itself if it can't be a variable."""
        return new_box(x, self.number, CallNode.on_tape(self, like=self.referenced(x))) if is_variable(x) else x

    def referenced(self, x: Any) -> Any:
        """Return nested arguments, with references to the values that the arrays have at this time."""
        return self.recorder.referenced(mapped(x, _innermost))

    def nodes(self) -> list[Any]:
        """Close the tape and return its nodes; they contain all communications, or the trace fails."""
        nodes, recorder = self.close().nodes, self.recorder
        count = sum(node.pull is not None and isinstance(node.pull.fun, Recorded) for node in nodes)
        if count != recorder.communications or any(step.kind == "opaque" for step in recorder.steps):
            recorder.refuse("it communicates in a way that derivatives can't repeat")
        return nodes

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
        # The parameter of a wait is a request, the result of an earlier call.
        params = self._argument(params) if isinstance(params, (dict, Request)) else untraced(params, self.recorder.device)
        node.tape, node.like, node.index = self, self.referenced(value), len(self.record)
        node.inputs, node.pull = [index for _, index in pairs], Call(fun, args, params, own, steps[-1] if steps else None)
        self.record.append(node)

    def settled(self, fun: Function, args: tuple, outcome: object) -> None:
        """Record a function whose result determines the program, so that the programs of derivatives call it, too."""
        node = CallNode.__new__(CallNode)
        self.add(node, None, Settled(fun, outcome), args, {}, (), ())

    def communicated(
        self, operator: Recorded, ans: Array, args: tuple, params: object, argnums: Sequence[int], parents: Sequence[Any]
    ) -> Any:
        """Record a communication; return its node, or None if the result isn't an array or has no derivatives."""
        node = CallNode.__new__(CallNode)
        note_sharing(node, ans, args, argnums, parents)
        self.add(node, ans, operator, args, params, argnums, parents)
        return node if is_variable(ans) else None


class Program(NamedTuple):
    """A function of a list of values, which returns a list of values."""

    recorder: Recorder
    nodes: list[Any]  # list of CallNode
    # References to the trace, each with the index of its node, -1 for constants.
    inputs: list[tuple[Any, int]]
    outputs: list[tuple[Any, int]]
    size: int  # the number of results of nodes
    kept: frozenset[int] = frozenset()  # the positions of outputs that only other programs read: residuals

    @property
    def communicates(self) -> bool:
        """Whether a node communicates."""
        return any(node.pull is not None and isinstance(node.pull.fun, Recorded) for node in self.nodes)

    @property
    def is_derivable(self) -> bool:
        """Whether all shapes are known, and all results that derivatives may read are single arrays."""
        # If the length of a slice depends on values, a run may differ from the trace.
        keys = [step.args[1] for step in self.recorder.steps if step.fun is take]
        slices = [part for key in keys for part in (key if type(key) is tuple else (key,)) if type(part) is slice]
        is_open = any(Ref in map(type, (part.start, part.stop, part.step)) for part in slices)
        return not is_open and not any(
            isinstance(node.like, (tuple, list)) and type(node.like) is not Ref for node in self.nodes
        )


def _innermost(x: Array) -> Array:
    while type(x) in _boxes:
        x = x._value
    return x


def _spec(x: Array) -> Spec:
    x = _innermost(x)
    return spec_like(x.value if isinstance(x, TracedArray) else x)


def recorded(
    fun: Function, arguments: Arguments, variables: Iterable[int], recorder: Recorder
) -> tuple[Program, Callable[[list[Any]], Any]]:
    """Record the program of a function, and return it with the builder of the function's result.

    `variables`: positions of the leaves with respect to which it is differentiated.
    """
    with np.errstate(all="ignore"), recorder, suspended(body=False), ProgramTape(recorder) as tape:
        leaves = recorder.arguments(arguments)
        for k in set(variables):
            leaves[k] = tape.variable(leaves[k])
        inputs = tape.with_indices([leaves[k] for k in arguments.traced])
        args, kwargs = arguments.build(leaves)
        values, build = flatten(keeping_arguments(fun)(*args, **kwargs))
        recorder.check_results(values)
        outputs = tape.with_indices(values)
    nodes = tape.nodes()
    return Program(recorder, nodes, inputs, outputs, len(nodes)), build


class Evaluation:
    """The evaluation of a program: in a new trace, or if there is no recorder, on any values."""

    def __init__(self, program: Program, recorder: Recorder | None, numbers: MessageNumbers | None = None):
        self._program, self._recorder, self.numbers = program, recorder, numbers or MessageNumbers()
        self._results: list[Any] = [None] * program.size
        self._known: dict[int, Any] = {}  # the new values, without boxes, by their numbers in the old trace
        self._lane = 0  # the current lane in `run_lanes`
        self._steps = {out: step for step in program.recorder.steps for out in step.outs}

    def inputs(self) -> list[Array]:
        """Return new inputs."""
        old, recorder = self._program.recorder, self._recorder
        numbers = [x.number for x, _ in self._program.inputs]
        flags = [(Spec(*old.specs[k]), k in old.weak, k in old.on_host) for k in numbers]
        return [recorder.input(like(spec), weak, is_on_host) for spec, weak, is_on_host in flags]  # type: ignore[union-attr]

    def run(self, inputs: Sequence[Array], call: Callable[..., Any] | None = None) -> list[Array]:
        """Return the outputs of the program; `call` replaces the method `called`."""
        program, call = self._program, call or self.called
        for (x, index), value in zip(program.inputs, inputs, strict=True):
            if index >= 0:
                self._results[index] = value
            self._note(x, value)
        around = tracing.site
        try:
            for node in program.nodes:
                if node.pull is not None:
                    self._results[node.index] = made = call(node.pull, [self._results[index] for index in node.inputs])
                    self._note(node.like, made)
            return [self._results[index] if index >= 0 else mapped(x, self._constant) for x, index in program.outputs]
        finally:
            tracing.site = around

    def called(self, call: Call, inputs: Sequence[Any]) -> Any:
        """Repeat the call of a node."""
        args, step, recorder = [mapped(x, self._constant) for x in call.args], call.step, self._recorder
        for k, x in zip(call.argnums, inputs):
            args[k] = x
        tracing.site = None if step is None else step.site
        if isinstance(call.fun, Settled):
            self._settle(call.fun, args)
            return None
        if not isinstance(call.fun, Recorded):
            return call.fun(*args, **mapped(call.params, self._constant))
        if is_numbered(call.params):
            params = self.numbers.addressed(call.params, recorder is not None)
        else:
            params = mapped(call.params, self._constant)
        if recorder is None:
            next(communications)
            return self._communicated(call, tuple(args), params)
        recorder.combined, outcome = call.is_combined, NotImplemented
        if step is not None and step.fun is call.fun and len(step.outs) == 1:
            outcome = Spec(*self._program.recorder.specs[step.outs[0]])
        with recorder.knowing(outcome):
            return self._communicated(call, tuple(args), params)

    def _communicated(self, call: Call, args: tuple, params: object) -> Array:
        """Repeat a communication, in the rule that has made it."""
        if call.step is None or call.step.rule is None:
            return apply(call.fun, tracing.tape, args, params)
        arguments = *call.step.rule, None, None
        return recorded_call(calls.begin_rule, arguments, apply, call.fun, tracing.tape, args, params)

    def _settle(self, settled: Settled, args: Sequence[object]) -> None:
        """Repeat a call whose result determines the program."""
        fun, outcome = settled
        if self._recorder is not None:
            with self._recorder.knowing(outcome):
                self._recorder.settle(fun, tuple(args))
        elif checked_on_replay(fun, *args) != outcome:
            raise RuntimeError(
                f"jit: {getattr(fun, '__name__', fun)} returns another result than when the function was compiled, while "
                "its program is differentiated. Call it outside of the jitted function."
            )

    def run_lanes(self, inputs: Sequence[Array], lanes: Sequence[Sequence[Array]]) -> list[list[Array]]:
        """Return the outputs for several reverse passes that run together; `lanes`: the last inputs, for each of them."""
        numbers = range(len(lanes))

        def call(of_node: Call, inputs: Sequence[Any]) -> Any:
            if isinstance(of_node.fun, Recorded):
                if of_node.is_combined:
                    if not inputs:  # a constant cotangent
                        inputs, of_node = [mapped(of_node.args[0], self._constant)], of_node._replace(argnums=[0])
                    made = self.called(of_node, [stack([_of_lane(x, k) for k in numbers]) for x in inputs])
                    return _Lanes([made[k] for k in numbers])
            elif not any(type(x) is _Lanes for x in inputs):
                return self.called(of_node, inputs)
            return _Lanes(map(in_lane, numbers, repeat(of_node), repeat(inputs)))

        def in_lane(lane: int, of_node: Call, inputs: Sequence[Any]) -> Any:
            self._lane = lane
            return self.called(of_node, [_of_lane(x, lane) for x in inputs])

        made = self.run([*inputs, *map(_Lanes, zip(*lanes))], call)
        return [[_of_lane(x, k) for x in made] for k in numbers]

    def _note(self, old: Any, new: Any) -> None:
        """Remember the new value for a reference, or for each reference in nested results."""
        olds, news = list[Any](), list[Any]()
        mapped(old, olds.append)
        # A wait gets the request of its lane.
        is_request = type(new) is _Lanes and isinstance(new[0], Request)
        mapped(new, news.append) if is_request else mapped(_innermost(_of_lane(new, 0)), news.append)
        for reference, value in zip(olds, map(_innermost, news)):
            if type(reference) is Ref:
                self._known.setdefault(reference.number, value)
                if reference.number in self._program.recorder.weak and self._recorder is not None:
                    self._recorder.weaken(value)

    def _constant(self, x: Any) -> Any:
        """Return an argument that isn't an input of its node."""
        old = self._program.recorder
        if type(x) is Ref:
            return _of_lane(self._value(x.number), self._lane)
        if type(x) is Constant:
            return old.constants[x.number]
        if isinstance(x, VSpace) and getattr(getattr(x, "arrays", None), "recorder", None) is old:
            space: Any = x
            if self._recorder is None:
                return vspace(Spec(space.shape, space.dtype, old.device).empty())
            x = copy(x)
            x.arrays = type(space.arrays)(self._recorder)
        elif isinstance(x, SequenceVSpace):
            x = copy(x)
            x.shape = [self._constant(part) for part in x.shape]
        return x

    def _value(self, number: int) -> Any:
        """Return the new value for one of the old trace; if necessary, its step is repeated."""
        captured = self._program.recorder.captured
        if number not in self._known and number in captured:
            x, device = captured[number], self._program.recorder.device
            if self._recorder is not None:
                x = self._recorder.capture(x)
            self._known[number] = device.to_device(x) if isinstance(x, np.ndarray) else x  # type: ignore[union-attr]
        if number not in self._known:
            step, weak, recorder = self._steps[number], self._program.recorder.weak, self._recorder
            args, kwargs = mapped(step.args, self._constant), mapped(step.kwargs, self._constant)
            if recorder is None:
                device = self._program.recorder.device
                made = (device.full if step.fun is np.full and device is not None else step.fun)(*args, **kwargs)
            else:
                if step.kind != "call":
                    recorder.refuse(f"a derivative uses the result of {step.fun} as a constant")
                made = recorder.call(step.fun, args, kwargs)
            for out, x in zip(step.outs, made if isinstance(made, (tuple, list)) else [made]):
                self._known[out] = recorder.weaken(x) if out in weak and recorder is not None else x
        return self._known[number]


class _Lanes(list[Any]):
    """The values of several reverse passes that run together."""


def _of_lane(x: Any, lane: int) -> Any:
    return x[lane] if type(x) is _Lanes else x


def vjp(program: Program, recorder: Recorder, inner: Sequence[int]) -> list[list[Array]]:
    """Return the parts of a program and its reverse pass, from cotangents of results to those of the inputs `inner`."""
    with recorder, suspended(body=False):
        evaluation = Evaluation(program, recorder)
        return _with_reverse_pass(recorder, evaluation, evaluation.inputs(), inner, lambda gs: gs)


def _with_reverse_pass(
    recorder: Recorder, evaluation: Evaluation, inputs: list[Array], inner: Sequence[int], seeded: Callable[[list], list]
) -> list[list[Array]]:
    """Record an evaluation and its reverse pass; `seeded` is called between them, with the cotangents of the results."""
    # On a device, zeros are made by the trace, on the host by NumPy.
    specs = [_spec(inputs[k]) if recorder.device is None else Spec.of(_innermost(inputs[k])) for k in inner]
    with OrderedTape() as tape:
        for k in inner:
            inputs[k] = tape.variable(inputs[k])
        pairs = [tape.value_and_place(x) for x in evaluation.run(inputs)]
    nodes = tape.close().nodes
    results = [x for x, _ in pairs]
    recorder.part = 1
    traced = [(x, index) for x, index in pairs if isinstance(_innermost(x), TracedArray)]
    gs = [recorder.input(like(_spec(x))) for x, _ in traced]
    lane = Lane.of(nodes)
    lane.add(zip([index for _, index in traced], seeded(gs)))
    for place in reversed(range(len(specs), len(nodes))):
        recorder.combined = type(nodes[place].pull) is VectorizedVjp
        sweep(nodes, lane.totals, range(place, place - 1, -1), True, lane.owned)
    recorder.combined = False
    return [results, [conformed(lane.totals[index], spec) for index, spec in enumerate(specs)]]


def jvp(program: Program, chosen: Sequence[int], recorder: Recorder) -> tuple[Program, list[int]]:
    """Return the program of values and tangents, and the positions of the values that have a tangent.

    Its inputs are followed by the tangents of those at the positions `chosen`.
    """
    with _retraced(program, recorder) as (outer, evaluation):
        given = list(map(outer.variable, evaluation.inputs()))
        tangents = [outer.variable(recorder.input(like(_spec(given[k])))) for k in chosen]
        inputs = outer.with_indices([*given, *tangents])
        with TangentTape() as tape:
            for k, v in zip(chosen, tangents):
                given[k] = tape.variable(given[k], v)
            pairs = [tape.value_and_tangent(x) for x in evaluation.run(given)]
        tape.close()
        with_tangents = [k for k, (x, _) in enumerate(pairs) if isinstance(_innermost(x), TracedArray) and is_variable(x)]
        outputs = outer.with_indices([x for x, _ in pairs] + [pairs[k][1] for k in with_tangents])
    nodes = outer.nodes()
    kept = {place for place, k in enumerate([*range(len(pairs)), *with_tangents]) if k in program.kept}
    return Program(recorder, nodes, inputs, outputs, len(nodes), frozenset(kept)), with_tangents


def linearized(program: Program, inner: Sequence[int], recorder: Recorder) -> tuple[Program, Program]:
    """Return two programs: results followed by residuals, and from residuals and cotangents of results those of inputs."""
    middle, seeds, first_seed = 0, list[tuple[Any, int]](), 0
    with _retraced(program, recorder) as (outer, evaluation):
        given = list(map(outer.variable, evaluation.inputs()))
        inputs = outer.with_indices(given)

        def seeded(gs: list[Array]) -> list[Array]:
            nonlocal middle, seeds, first_seed
            middle, first_seed = len(outer.record), len(recorder.specs) - len(gs)
            gs = list(map(outer.variable, gs))
            seeds = outer.with_indices(gs)
            return gs

        results, cotangents = map(outer.with_indices, _with_reverse_pass(recorder, evaluation, given, inner, seeded))
    nodes = outer.nodes()
    read = _read(recorder, nodes, middle, first_seed, [*seeds, *cotangents])
    free = {x.number for x, _ in (*inputs, *results) if type(x) is Ref}
    residuals, repeated = chosen(recorder, nodes[:middle], read, free)
    kept = program.kept.union(range(len(results), len(results) + len(residuals)))
    forward = Program(recorder, nodes[:middle], inputs, [*results, *residuals], len(nodes), kept)
    return forward, Program(recorder, [*repeated, *nodes[middle:]], [*residuals, *seeds], cotangents, len(nodes))


def _read(
    recorder: Recorder, nodes: list[Any], middle: int, first_seed: int, ends: Sequence[tuple[Any, int]]
) -> list[tuple[Any, int]]:
    """Return references to the values of the nodes before `middle`, and of earlier steps, that the other nodes read."""
    # Values have increasing numbers in the trace; `first_seed`: the number of the first cotangent, or of the next value.
    steps = {out: step for step in recorder.steps for out in step.outs}
    found: dict[tuple[Ref, int], None] = {}
    computed: set[int] = set()  # the numbers of values that the later nodes return, and of untraced ones that were visited

    def visit(x: Any) -> None:
        if type(x) is not Ref or x.number in computed:
            return
        if x.number < first_seed:
            found[x, -1] = None
            return
        computed.add(x.number)
        if x.number in steps:  # the evaluation repeats the step of a value that no node returns
            mapped((steps[x.number].args, steps[x.number].kwargs), visit)

    def read(index: int) -> None:
        if 0 <= index < middle:
            like = nodes[index].like
            if type(like) is not Ref:
                recorder.refuse("a derivative reads a result that isn't one array")
            found[like, index] = None

    for node in nodes[middle:]:
        mapped(node.like, lambda x: computed.add(x.number) if type(x) is Ref else None)
        for index in node.inputs:
            read(index)
        if node.pull is not None:
            mapped((node.pull.args, node.pull.params), visit)
    for x, index in ends:
        read(index)
        if index < 0:
            mapped(x, visit)
    numbers = {x.number for x, index in found if index >= 0}
    return [(x, index) for x, index in found if index >= 0 or x.number not in numbers]


@contextmanager
def _retraced(program: Program, recorder: Recorder) -> Iterator[tuple[ProgramTape, Evaluation]]:
    """Open a new trace of a program, with a tape that records a program."""
    with np.errstate(all="ignore"), recorder, suspended(body=False), ProgramTape(recorder) as outer:
        yield outer, Evaluation(program, recorder)
