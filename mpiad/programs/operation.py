"""Compiled programs as differentiable operations.

The tangent of a compiled program is a program, and its reverse pass is two: a forward program, which also returns
residuals, and a backward program from residuals and cotangents (see `transforms`). Each of them is an operation again. So a
call is differentiated as a communication is: the innermost trace records it as one node, and calls the derived operation
with the next outer trace as the current one, until all values are plain. Derivatives of every order and in both modes are
compiled by this rule, in the order of the communications of the interpreted function.

Several reverse passes that run together ("lanes") use a program that is derived from the backward program (see `batching`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import numpy as np
from autograd.core import JVPNode, VJPNode
from autograd.tracer import Box, new_box

from mpiad._typing import Array
from mpiad.compiling.watch import Watch
from mpiad.device.transfer import beside
from mpiad.differentiation.forward import TangentTape
from mpiad.differentiation.tape import OrderedTape
from mpiad.primitives.cotangents import conform, conformed, spec_like
from mpiad.primitives.operation import suspended
from mpiad.programs.batching import Batched
from mpiad.programs.message_numbers import MessageNumbers, Numbers
from mpiad.programs.program_cache import Entry, FailedTrace, count, entry_of_trace, raising_failures
from mpiad.programs.recorder import Recorder
from mpiad.programs.traced_array import Ref
from mpiad.programs.transforms import Evaluation, Program, jvp, linearized
from mpiad.pytrees import is_variable
from mpiad.transport import Spec
from mpiad.transport.core.channels import live_channels
from mpiad.transport.core.tracing import note_channels, tracing

_boxes = Box.types
_CACHE = 1 << 20  # bytes of the arrays of all lanes that run together, on one rank
_MOST_BATCHES = 16  # maximum number of programs for several lanes; for further numbers of lanes there is no program


@contextmanager
def _optional() -> Iterator[None]:
    """Ignore a failure of a trace, unless it is an exception of the user's."""
    try:
        yield
    except FailedTrace as failure:
        if failure.is_raised_by_user:
            raise failure.error from None


class Made(NamedTuple):
    """The results of a call, and the envelopes of its messages."""

    values: list[Any]
    numbers: Numbers


class CompiledOperation:
    """A program as an operation: a differentiable function of a list of values, which returns a list of values."""

    def __init__(self, program: Program):
        self.program = program
        self.communicates, self.channels = program.communicates, program.recorder.channels
        self._derived: dict[Any, Any] = {}
        self._batches: dict[int, Batched | None] = {}

    def _recorder(self) -> Recorder:
        """Return a new trace, for a program that is derived from this one."""
        return Recorder(self.program.recorder.exact, device=self.program.recorder.device)

    @functools.cached_property
    def entry(self) -> Entry | None:
        """The compiled program; None if it can't be compiled."""

        def traced(recorder: Recorder, watch: Watch) -> tuple[list[list[Any]], Callable[[list[Any]], Any]]:
            with recorder, suspended(body=False):
                evaluation = Evaluation(self.program, recorder)
                return [evaluation.run(evaluation.inputs())], list

        with _optional():
            return entry_of_trace(self._recorder(), Watch(), traced, self.program.kept)
        return None

    def __call__(self, inputs: Sequence[Any], numbers: Numbers | None = None) -> Made:
        """Call the operation, and record it on the current tape and the enclosing tapes."""
        tape, numbers = tracing.tape, numbers or {}
        level = max([x._trace for x in inputs if type(x) in _boxes], default=-1)
        if tape is None and level < 0:
            return self._run(inputs, numbers)
        # As for a communication (see `apply` in `primitives.operation`): inner traces have higher numbers.
        ours: Any = tape if tape is not None and tape.number >= level else None  # None: the innermost is autograd's
        number = level if ours is None else ours.number
        boxed = [k for k, x in enumerate(inputs) if type(x) in _boxes and x._trace == number]
        # Values of an ended trace with the same number are constants.
        variables = [k for k in boxed if ours is None or getattr(inputs[k]._node, "tape", None) is ours]
        nodes = [inputs[k]._node for k in variables]
        below = [x._value if k in boxed else x for k, x in enumerate(inputs)]
        kind = type(nodes[0] if ours is None else ours)
        made: Any = None
        with nullcontext() if ours is None else suspended(ours.outer, body=False):
            if not variables and not self.communicates:
                return self(below, numbers)
            if kind in (TangentTape, JVPNode):
                made = self._with_tangents(variables, below, [node.g for node in nodes], numbers)
            elif kind is OrderedTape or kind is VJPNode and not self.communicates:
                made = self._with_reverse_pass(variables, below, numbers)
        if made is None:
            return self._evaluated(inputs, numbers)
        values = made.recorded_by_autograd(level, nodes) if ours is None else made.recorded_on(ours, nodes)
        return Made(values, made.numbers)

    def _run(self, inputs: Sequence[Any], numbers: Numbers) -> Made:
        entry = None if tracing.recorder is not None else self.entry
        if entry is None:
            return self._evaluated(inputs, numbers)
        lease = entry.replays.lease()
        replay = lease.replay
        count(entry.communications)
        note_channels(entry.channels)
        replay.numbers.known = numbers
        values = replay.first(*inputs)
        return Made(entry.leaves(values), replay.numbers.all() if replay.is_numbered else numbers)

    def _evaluated(self, inputs: Sequence[Any], numbers: Numbers) -> Made:
        """Call the functions of the program one by one, so that the tapes record each of them."""
        evaluation = self._evaluation(numbers)
        return Made(evaluation.run(inputs), evaluation.numbers.all())

    def _evaluation(self, numbers: Numbers) -> Evaluation:
        used = tracing.channels if tracing.tape is None else tracing.tape.channels
        if used is not None:
            used |= self.channels
        return Evaluation(self.program, None, MessageNumbers(numbers))

    def _derive(self, kind: Callable[..., Any], variables: list[int]) -> Any:
        """Return the derivative with respect to the inputs at the positions `variables`; None if it can't be traced."""
        key = kind, *variables
        if key not in self._derived:
            self._derived[key] = None
            with _optional(), raising_failures(self._recorder(), Watch()) as recorder:
                first, second = kind(self.program, variables, recorder)
                self._derived[key] = [CompiledOperation(x) if isinstance(x, Program) else x for x in (first, second)]
        return self._derived[key]

    def _with_tangents(
        self, variables: list[int], inputs: list[Any], tangents: list[Any], numbers: Numbers
    ) -> _WithTangents | None:
        derived = self._derive(jvp, variables)
        if derived is None or any(type(v) is list for v in tangents):
            return None
        operation, places = derived
        tangents = [conform(v, *spec_like(inputs[k])) for k, v in zip(variables, tangents)]
        made, n = operation([*inputs, *tangents], numbers), len(self.program.outputs)
        values, tangents = made.values[:n], made.values[n:]
        if self.program.recorder.device is not None:
            tangents = beside(tangents, [spec_like(values[k]) for k in places])
        return _WithTangents(values, dict(zip(places, tangents)), made.numbers)

    def _with_reverse_pass(self, variables: list[int], inputs: list[Any], numbers: Numbers) -> _WithReversePass | None:
        derived = self._derive(linearized, variables)
        if derived is None:
            return None
        forward, backward = derived
        made, n = forward(inputs, numbers), len(self.program.outputs)
        inside = [type(x) is Ref for x, _ in forward.program.outputs[:n]]
        specs = [spec_like(inputs[k]) for k in variables] if self.program.recorder.device is not None else None
        return _WithReversePass(made.values[:n], inside, backward, made.values[n:], made.numbers, specs)

    def lanes(self, residuals: list[Any], lanes: list[list[Array]], numbers: Numbers) -> list[list[Array]] | None:
        """Run several reverse passes by the backward program; return None if each of them must run alone."""
        # A single rank may communicate in any order, and needn't combine messages.
        is_alone = not self.communicates or all(channel.size == 1 for channel in live_channels())
        together = _in_cache(lanes) if is_alone else len(lanes)
        is_plain = tracing.tape is None and tracing.recorder is None
        if is_plain and together > 1 and not any(type(x) in _boxes for part in (residuals, *lanes) for x in part):
            batched = self._batched(len(residuals), together)
            if batched is not None and self.entry is not None:
                parts = [lanes[k : k + together] for k in range(0, len(lanes), together)]
                return [values for part in parts for values in self._run_batch(batched, residuals, part, numbers)]
        return None if is_alone else self._evaluation(numbers).run_lanes(residuals, lanes)

    def _run_batch(
        self, batched: Batched, residuals: list[Any], lanes: list[list[Array]], numbers: Numbers
    ) -> list[list[Array]]:
        entry: Any = self.entry
        count(entry.communications)
        note_channels(self.channels)
        replay = batched.replays.take()
        replay.numbers.known = numbers
        made = replay.first(*residuals, *map(_stacked, zip(*lanes)))
        batched.replays.give_back(replay)
        return [entry.leaves([x[k] for x in made]) for k in range(len(lanes))]

    def _batched(self, residuals: int, lanes: int) -> Batched | None:
        if lanes not in self._batches and len(self._batches) < _MOST_BATCHES:
            self._batches[lanes] = None
            if self.entry is not None:
                with suppress(NotImplementedError):  # a step that has no form for several lanes
                    self._batches[lanes] = Batched(self.entry.replays.schedule.program, residuals, lanes)
        return self._batches.get(lanes)


class _WithTangents(NamedTuple):
    """The results of a call in forward mode; `tangents`: by position."""

    values: list[Any]
    tangents: dict[int, Any]
    numbers: Numbers

    def recorded_on(self, tape: TangentTape, nodes: Sequence[Any]) -> list[Any]:
        return [tape.variable(x, self.tangents[k]) if k in self.tangents else x for k, x in enumerate(self.values)]

    def recorded_by_autograd(self, level: int, nodes: Sequence[Any]) -> list[Any]:
        made = list(self.values)
        for k, tangent in self.tangents.items():
            node = JVPNode.__new__(JVPNode)
            node.g = tangent
            made[k] = new_box(made[k], level, node)
        return made


class _WithReversePass(NamedTuple):
    """The results of a call in reverse mode; `inside`: whether each of them is computed by the forward program."""

    values: list[Any]
    inside: list[bool]
    backward: CompiledOperation
    residuals: list[Any]
    numbers: Numbers
    specs: list[Spec] | None  # of the variables, on a device

    def pull(self, gs: list[Array]) -> list[Array]:
        """Return the cotangents of the variables, given those of the results that are `inside`."""
        made = self.backward([*self.residuals, *gs], self.numbers).values
        return made if self.specs is None else beside(made, self.specs)

    def pull_all(self, lanes: list[list[Array]]) -> list[list[Array]] | None:
        """Return the cotangents of several reverse passes that run together; None if each of them must run alone."""
        made = self.backward.lanes(self.residuals, lanes, self.numbers)
        return made if made is None or self.specs is None else [beside(lane, self.specs) for lane in made]

    def recorded_on(self, tape: Any, nodes: Sequence[Any]) -> list[Any]:
        """Record the call as one node on a tape of this library."""
        backward, places = self.backward, [node.index for node in nodes]
        together = self.pull_all
        return tape.record_call(
            backward.channels, self.values, self.inside, places, self.pull, backward.communicates, together
        )

    def recorded_by_autograd(self, level: int, nodes: Sequence[Any]) -> list[Any]:
        """Record the call as one node of plain autograd, and a node for each result, which stores its cotangent."""
        specs = [spec_like(x) for x, is_in in zip(self.values, self.inside) if is_in]
        cotangents: dict[int, Any] = {}

        def pulled(_: Any) -> list[Array]:
            gs = [conformed(cotangents.pop(k, None), spec) for k, spec in enumerate(specs)]
            return self.pull(gs)

        main, made, k = _autograd_node(nodes, pulled), [], 0
        for x, is_in in zip(self.values, self.inside):
            if is_in and is_variable(x):
                x = new_box(x, level, _autograd_node([main], functools.partial(_stored, cotangents, k)))
            made.append(x)
            k += is_in
        return made


def _in_cache(lanes: list[list[Array]]) -> int:
    """Return the number of lanes to run together, a divisor of their number: as many as stay in the processor's cache.

    The steps of a program for more lanes would read their arrays from memory.
    """
    nbytes = sum([x.nbytes for x in lanes[0] if type(x) is np.ndarray])
    return next((n for n in range(len(lanes), 1, -1) if len(lanes) % n == 0 and n * nbytes <= _CACHE), 1)


def _stacked(lanes: Sequence[Array]) -> Array:
    """Return the arrays of all lanes along a new first axis, without a copy if they are the rows of one array."""
    whole = getattr(lanes[0], "base", None)
    if type(whole) is np.ndarray and whole.shape == (len(lanes), *lanes[0].shape) and whole.flags.c_contiguous:
        if all(x.base is whole and x.ctypes.data == row.ctypes.data for x, row in zip(lanes, whole)):
            return whole
    return np.stack(lanes)


def _autograd_node(parents: Sequence[Any], vjp: Callable[[Any], Sequence[Any]]) -> VJPNode:
    node = VJPNode.__new__(VJPNode)
    node.parents, node.vjp = list(parents), vjp
    return node


def _stored(cotangents: dict[int, Any], k: int, g: Any) -> tuple[float]:
    """Store the cotangent of a result; the returned number makes autograd visit the node of the call."""
    cotangents[k] = g
    return (1.0,)
