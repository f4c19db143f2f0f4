"""Calls of compiled functions as nodes on the tape of an enclosing derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from autograd.tracer import Box, new_box

from mpiad._typing import Array
from mpiad.differentiation.backward import run_backward
from mpiad.differentiation.forward import TangentNode, TangentTape
from mpiad.differentiation.nodes import OrderedNode
from mpiad.differentiation.tape import LibraryTape, OrderedTape
from mpiad.differentiation.trace import Traced as TracedRun
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.primitives.operation import BatchedVjp, Tape
from mpiad.programs.replay import Replays
from mpiad.programs.traced_array import TracedArray
from mpiad.pytrees import is_variable
from mpiad.transport import Spec
from mpiad.transport.core.channels import Used
from mpiad.transport.core.tracing import tracing

_boxes = Box.types
_NO_VALUE = Spec(None, None)  # type: ignore[arg-type]


class Lease:
    """Keeps a replay in use as long as its reverse pass may run."""

    def __init__(self, replays: Replays):
        self.replays, self.replay = replays, replays.take()

    def __del__(self) -> None:
        if hasattr(self, "replay"):  # an interrupt may have prevented the assignment
            self.replays.give_back(self.replay)


def is_simple(tape: Any, boxes: Sequence[Box]) -> bool:
    """Return whether exactly one derivative encloses a call, and this library computes it; `boxes`: its variables."""
    if type(tape) not in (OrderedTape, TangentTape) or tape.outer is not None:
        return False
    is_own = all(box._trace == tape.number and getattr(box._node, "tape", None) is tape for box in boxes)
    return is_own and all(isinstance(box._value, (np.ndarray, np.generic, TracedArray)) for box in boxes)


def is_above(tape: Tape, boxes: Sequence[Box]) -> bool:
    """Return whether the tape has an outer tape, and all boxes belong to this tape or to traces around it."""
    return tape.outer is not None and all(
        getattr(box._node, "tape", None) is tape if box._trace == tape.number else box._trace < tape.number for box in boxes
    )


def is_gradient_within(outer: type, tape: Tape | None, boxes: Sequence[Box]) -> bool:
    """Return whether exactly two tapes enclose a call: the tape of a gradient, and around it a tape of type `outer`."""
    if type(tape) is not OrderedTape or type(tape.outer) is not outer or not is_above(tape, boxes):
        return False
    below = [box._value if box._trace == tape.number else box for box in boxes]
    return is_simple(tape.outer, [x for x in below if type(x) in _boxes])


def with_tangent(tape: TangentTape, x: Array, tangent: Array) -> Array:
    """Return a value of a tape that propagates tangents; x itself if it can't have a tangent."""
    return new_box(x, tape.number, TangentNode.on_tape(tape, tangent)) if is_variable(x) else x


def value_and_node(x: Array, tape: OrderedTape) -> tuple[Array, int]:
    """Return a value without its box of this tape, and the index of its node on the tape, -1 for a constant."""
    if type(x) in _boxes and x._trace == tape.number:
        return x._value, x._node.index
    return x, -1


def value_and_tangent(x: Array, tape: TangentTape) -> tuple[Array, Array]:
    """Return a value and its tangent on a tape: zeros if it has none, and the value itself if it can't have one."""
    if type(x) in _boxes and x._trace == tape.number:
        return x._value, conform(x._node.g, *spec_like(x._value))
    return x, spec_like(x).zeros() if is_variable(x) else x


def put_on_tape(
    tape: LibraryTape, channels: set[Used], values: Sequence[Array], in_program: Sequence[bool], inputs: Sequence[int],
    pull: Callable, communicates: bool, pull_all: Callable | None = None,
) -> list[Array]:  # fmt: skip
    """Record a call on the tape, and return its results as values of the tape.

    A node for each result stores the cotangent of the result, and one node for the call runs the reverse pass.

    `channels`: those of the call. `inputs`: the nodes of the variables. `pull`: returns their cotangents, given the
    results'. `pull_all`: does the same for the cotangents of several reverse passes that run together ("lanes"), or returns
    None if each of them must run alone.
    """
    tape.channels |= channels
    slots: dict[int, list[Any]] = {}  # the cotangents of the results, by lane
    specs = [spec_like(x) for x, is_in in zip(values, in_program) if is_in]

    def given(lane: int) -> list[Array]:
        return [conformed(g, spec) for g, spec in zip(slots.pop(lane, None) or [None] * len(specs), specs)]

    def pulled(g: Array) -> Sequence[Array]:
        return pull(given(tracing.lane))

    def all_pulled(lanes: int) -> Sequence[list[Array]] | None:
        gs = [given(lane) for lane in range(lanes)]
        found = pull_all(gs)  # type: ignore[misc]
        if found is None:
            slots.update(enumerate(gs))
        return found

    def kept(place: int) -> Callable[[Array], tuple[int]]:
        def keep(g: Array) -> tuple[int]:
            slots.setdefault(tracing.lane, [None] * len(specs))[place] = g
            return (1,)  # a cotangent other than None, so that the reverse pass runs the call's node

        return keep

    # A reverse pass always runs a node that communicates, since other ranks wait for its messages.
    like = _NO_VALUE if communicates else None
    run = pulled if pull_all is None else BatchedVjp(pulled, all_pulled)
    main = OrderedNode.on_tape(tape, tuple(inputs), run, like)
    made, k = [], 0
    for value, is_in in zip(values, in_program):
        if is_in and is_variable(value):
            made.append(new_box(value, tape.number, OrderedNode.on_tape(tape, (main.index,), kept(k), None)))
        else:
            made.append(value)
        k += is_in
    return made


def require_of(tape: Tape | None, gs: Sequence[Array], name: str) -> None:
    """Raise a TypeError for traced cotangents, except for cotangents on `tape`: programs take plain arrays."""
    if any(type(g) in _boxes and (tape is None or getattr(g._node, "tape", None) is not tape) for g in gs):
        raise TypeError(
            f"jit: the reverse pass of {name} is differentiated with respect to its cotangent, in a derivative that began "
            "after the call of the compiled function; its program takes plain numbers only. Call make_vjp inside of this "
            "derivative, or use linearize instead."
        )


def conformed(g: Array, spec: Spec) -> Array:
    """Return a cotangent with the given shape and dtype; zeros for None."""
    return spec.zeros() if g is None else conform(g, *spec)


def backwards(run: TracedRun, inside: Sequence[bool], gs: Sequence[Array], specs: Sequence[Spec]) -> list[Array]:
    """Return the cotangents of the variables of a traced run.

    `inside`: for each leaf of the result, whether it belongs to the program. `gs`: the cotangents of those leaves.
    """
    places = [place for place, is_in in zip(run.places, inside) if is_in]
    seeds = [(place, g) for place, g in zip(places, gs) if place >= 0]
    found = run_backward(run.recording, seeds, len(specs), True)
    return [conformed(g, spec) for g, spec in zip(found, specs)]
