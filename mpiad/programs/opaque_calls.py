"""Opaque calls: functions of this library that compiled programs call untraced, such as solves and checkpointed loops.

In a program, an opaque call is one step, which runs the function with all its communications. In reverse mode it is two
steps: the first runs the function on a separate tape, and returns this tape's record together with the results; the second,
in the reverse pass, runs backwards along the record. So the derivative has the rules of the interpreted function.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
from autograd.tracer import Box, getval

from mpiad._typing import Array, Function, Tree
from mpiad.differentiation.backward import cotangents_of
from mpiad.differentiation.forward import TangentTape
from mpiad.differentiation.trace import Traced, Variables, trace_backwards, trace_forwards
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.primitives.operation import suspended
from mpiad.programs.traced_array import TracedArray, hides_traced
from mpiad.pytrees import flatten
from mpiad.transport import Spec
from mpiad.transport.core.channels import Used, communications
from mpiad.transport.core.tracing import tracing

_boxes = Box.types


class Outcome(NamedTuple):
    """The structure of an opaque call's result, and in reverse mode the record of its tape."""

    build: Callable[[list[Any]], Any]  # assembles the result from its arrays
    traced: Traced | None = None
    # In reverse mode: the channels of the tape, and whether the call has communicated.
    channels: set[Used] = set()  # noqa: RUF012
    communicates: bool = False


class _Call:
    """A function of the leaves of its arguments; `build` assembles the arguments from the leaves.

    `is_recorded`: whether its reverse pass may be differentiated.
    """

    def __init__(self, fun: Function, build: Callable[[list[Any]], tuple[tuple, dict]], is_recorded: bool):
        self._fun, self._build, self._is_recorded = fun, build, is_recorded
        self.__name__ = fun.__name__

    def __call__(
        self, leaves: list[Any], places: list[int] | None = None, tangents: list[Array] | None = None
    ) -> tuple[Any, ...]:
        """Return the leaves of the result, in forward mode their tangents, and the outcome; `places`: of the variables."""
        # The function may keep or return its arguments. They are copied, since the program reuses their memory.
        leaves = [x.copy() if type(x) is np.ndarray else x for x in leaves]
        if places is None:
            values, build = flatten(self._called(self._build(leaves)))
            return *map(as_array, values), Outcome(build)
        variables = Variables(leaves, places, self._build)
        # A run of a program that contains the reverse pass makes it once.
        passes = "recorded" if self._is_recorded else "one" if tracing.tape is None else tracing.tape.passes
        with suspended(body=False):
            if tangents is not None:
                (values, build), (result_tangents, _) = map(flatten, trace_forwards(self._called, variables, tangents))
                return *map(as_array, values), *map(as_array, result_tangents), Outcome(build)
            start = next(communications)
            made = trace_backwards(self._called, variables, passes=passes)
        if made.problem is not None:
            raise made.problem.kind(made.problem.text)
        communicates = next(communications) > start + 1
        return *map(as_array, made.values), Outcome(made.build, made, made.recording.channels, communicates)

    def _called(self, call: tuple[tuple, dict]) -> Tree:
        return self._fun(*call[0], **call[1])


def as_array(x: Any) -> Any:
    """Return an array, or a Python float as a NumPy scalar."""
    return np.float64(x) if type(x) is float else x


def _spec_in_run(recorder: Any, x: Array) -> Spec:
    """Return the spec of a variable in a run of the program."""
    if not isinstance(x, TracedArray):
        return spec_like(x)
    is_on_device = recorder.device is not None and x.number not in recorder.on_host
    return Spec(x.shape, x.dtype, recorder.device if is_on_device else None)


def opaque_call(recorder: Any, fun: Function, args: tuple, kwargs: dict[str, Any]) -> Tree:
    """Run an untraced function, which returns a pytree of arrays; `recorder`: a `Recorder` or an `Interpretation`."""
    leaves, build = flatten((args, kwargs))
    tape: Any = tracing.tape
    # Record again what `linearize` records, whose reverse pass may be differentiated with respect to its cotangent.
    call = _Call(fun, build, getattr(tape, "passes", None) == "recorded")
    places = [k for k, leaf in enumerate(leaves) if type(leaf) in _boxes]
    plain = [getval(leaf) for leaf in leaves]
    if recorder.is_abstract and any(hides_traced(leaf) for leaf in plain if not isinstance(leaf, TracedArray)):
        name = fun.__name__.lstrip("_")
        recorder.refuse(f"{name} gets functions or objects that contain traced values: pass the values as arguments")
    if tape is None and not places:
        *values, outcome = recorder.opaque(call, (plain,))
        return outcome.build(values)
    if tape is None or not tape.is_only_trace_of([leaves[k] for k in places]):
        recorder.refuse(f"it calls {fun.__name__} in a derivative of higher order, and that isn't compiled yet")
        return fun(*args, **kwargs)  # reached in an interpretation only
    nodes = [leaves[k]._node for k in places]
    if type(tape) is TangentTape:
        *made, outcome = recorder.opaque(call, (plain, places, [node.g for node in nodes]))
        half = len(made) // 2
        return outcome.build(list(map(tape.variable, made[:half], made[half:])))
    *values, outcome = recorder.opaque(call, (plain, places))
    likes = [spec_like(plain[k]) for k in places]
    specs = [_spec_in_run(recorder, plain[k]) for k in places]

    def adjoint(outcome: Any, gs: list[Array]) -> tuple[Any, ...]:
        """Return the cotangents of the variables followed by None, since a step returns arrays and one other object."""
        # Cotangents that are traced by a derivative around this reverse pass stay so.
        is_traced = any(type(g) in _boxes for g in gs)
        with nullcontext() if is_traced else suspended(body=False):
            return *cotangents_of(outcome.traced.recording, zip(outcome.traced.places, gs), specs), None

    adjoint.__name__ = f"adjoint of {fun.__name__}"

    def pull(gs: list[Array]) -> list[Array]:
        recorder: Any = tracing.recorder
        *found, _ = adjoint(outcome, gs) if recorder is None else recorder.opaque(adjoint, (outcome, gs))
        return [conform(g, *like) for g, like in zip(found, likes)]

    indices, inside = [node.index for node in nodes], [True] * len(values)
    return outcome.build(tape.record_call(outcome.channels, values, inside, indices, pull, outcome.communicates))
