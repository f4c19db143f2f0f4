"""`Schedule`: the steps of a program in order, which are loops over arrays and Python calls, on numbered buffers."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Shape
from mpiad.programs.array_program import FLOATS, ArrayProgram, Node, Slot
from mpiad.programs.index_maps import IndexMap


class Buffer(NamedTuple):
    """The memory of an array."""

    # "input", "constant", "temporary", "result" (of a Python call), "output" (allocated at each call of the program), or
    # "alias" (another buffer with another shape).
    kind: str
    shape: Shape
    dtype: np.dtype
    data: int = -1  # number of the input, constant, output or buffer


class Place(NamedTuple):
    """The place of an array in memory: a buffer, and an index map that reads from it."""

    buffer: int
    map: IndexMap


class Store(NamedTuple):
    """An array that a loop writes."""

    node: int
    reads: IndexMap  # map from the loop's indices to the node's
    place: Place  # map from the loop's indices to the buffer's
    copies: bool  # whether the node is read from its place in memory; otherwise it is computed

    @property
    def of(self) -> int:
        """The node whose entries the loop computes."""
        return self.node


class Fold(NamedTuple):
    """A sum, or another reduction, of an array over a loop's index space."""

    node: int  # the result
    of: int  # the array that is folded
    reads: IndexMap  # map from the loop's indices to the array's
    name: str  # of the operation
    place: Place  # map from the loop's indices to the buffer's, without the folded axes

    copies = False

    @property
    def is_full(self) -> bool:
        """Whether the result is one number."""
        return all(axis.source is None for axis in self.place.map)


class Loop(NamedTuple):
    """Stores and folds over one index space."""

    shape: Shape
    items: tuple[Store | Fold, ...]
    inside: frozenset[int]  # nodes that this loop computes, and uses from registers instead of memory


class Run(NamedTuple):
    """A Python call."""

    node: int
    inputs: tuple[int, ...]  # buffers of its array arguments
    in_place: bool  # whether it works in place, in the buffer of its argument


class Schedule(NamedTuple):
    """The steps of a program in order."""

    program: ArrayProgram
    buffers: list[Buffer]
    places: dict[int, Place]  # of nodes in memory
    # Copies of the program's arguments in other buffers: the step from which they exist, and their places.
    copies: dict[int, tuple[int, Place]]
    since: dict[int, int]  # the step that stores each computed node; loops before that compute the node themselves
    steps: list[Any]  # list of Loop and Run
    outputs: list[int]  # buffers
    cuts: list[int]  # the first step of each part but the first

    def part(self, at: int) -> int:
        """Return the part of the program that a step belongs to."""
        return bisect(self.cuts, at)


def root_of(buffers: Sequence[Buffer], b: int) -> int:
    """Return the buffer that owns a buffer's memory, which differs for an alias."""
    while buffers[b].kind == "alias":
        b = buffers[b].data
    return b


def working_in_place(node: Node) -> Any:
    """Return the in-place implementation of a call, None if it has none."""
    call = node.data
    if node.kind != "communicate" or call.kind != "operate" or len(node.inputs) != 1 or not isinstance(call.args[0], Slot):
        return None
    if node.dtype not in FLOATS or call.kwargs:
        return None
    return call.fun.in_place
