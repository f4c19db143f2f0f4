"""A call of a compiled function as a node on the tape of a derivative around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from autograd.tracer import new_box

from mpiad.differentiation.nodes import OrderedNode, TangentNode
from mpiad.differentiation.tape import OrderedTape, TangentTape
from mpiad.differentiation.trees import is_variable
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.programs.replay import Replays
from mpiad.programs.steps import Traced
from mpiad.transport import Spec

__all__ = ["Lease", "is_simple", "placed", "with_tangents"]

_NO_VALUE = Spec(None, None)  # type: ignore[arg-type]


class Lease:
    """A replay, until nobody can run it backwards any more."""

    def __init__(self, replays: Replays):
        self.replays, self.replay = replays, replays.take()

    def __del__(self) -> None:
        self.replays.give_back(self.replay)


def is_simple(tape: Any, boxes: Sequence[Any]) -> bool:
    """Tell whether there is one trace around a call, and it is of ours."""
    return (
        type(tape) in (OrderedTape, TangentTape) and tape.outer is None
        and all(box._trace == tape.number and getattr(box._node, "tape", None) is tape for box in boxes)
        and all(isinstance(box._value, (np.ndarray, np.generic, Traced)) for box in boxes)
    )  # fmt: skip


def with_tangents(tape: Any, values: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """Put the results of a call onto a tape that carries tangents along."""
    return [
        new_box(x, tape.number, TangentNode.placed(tape, along)) if is_variable(x) else x
        for x, along in zip(values, tangents, strict=True)
    ]


def placed(
    tape: Any, values: Sequence[Any], in_program: Sequence[bool], parents: Sequence[Any], pull: Callable, communicates: bool
) -> list[Any]:
    """Put a call onto the tape: a node for it, which runs backwards, and one for each result, which keeps its cotangent."""
    slots: list[Any] = [None] * sum(in_program)
    specs = [spec_like(x) for x, is_in in zip(values, in_program) if is_in]

    def all_pulled(g: Any) -> Sequence[Any]:
        gs = [spec.zeros() if g is None else conform(g, *spec) for g, spec in zip(slots, specs)]
        slots[:] = [None] * len(slots)
        return pull(gs)

    # Visited always where it communicates: other ranks wait for its messages.
    main = OrderedNode.placed(tape, tuple([p.index for p in parents]), all_pulled, _NO_VALUE if communicates else None)
    made, k = [], 0
    for value, is_in in zip(values, in_program):
        if is_in and is_variable(value):
            made.append(new_box(value, tape.number, OrderedNode.placed(tape, (main.index,), _Slot(slots, k), None)))
        else:
            made.append(value)
        k += is_in
    return made


class _Slot:
    """Keeps a result's cotangent for the node of the call; what it returns tells that node that there is one."""

    __slots__ = ("place", "slots")

    def __init__(self, slots: list[Any], place: int):
        self.slots, self.place = slots, place

    def __call__(self, g: Any) -> tuple[int]:
        self.slots[self.place] = g
        return (1,)
