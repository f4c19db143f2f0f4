"""`Schedule`: the steps of a program in order: loops over arrays and Python calls, which use numbered buffers."""

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

    # "input", "constant", "temporary", "result" (of a Python call), "output" (allocated in each run), or "alias" (the
    # memory of another buffer, in another shape)
    kind: str
    shape: Shape
    dtype: np.dtype
    data: int = -1  # number of the input, constant or output; for a result, of the node; for an alias, of the buffer


class Place(NamedTuple):
    """The place of an array in memory: a buffer, and the map from indices of the array to indices of the buffer."""

    buffer: int
    map: IndexMap


class Store(NamedTuple):
    """An array that a loop computes or copies, and writes."""

    node: int
    reads: IndexMap  # map from the loop's indices to indices of the node
    place: Place  # buffer, and map from the loop's indices to indices of the buffer
    copies: bool  # whether the loop copies the node from its place in memory

    @property
    def of(self) -> int:
        """The node whose entries the loop computes or copies."""
        return self.node


class Fold(NamedTuple):
    """A reduction of an array by a loop, along some or all of its axes."""

    node: int  # the result
    of: int  # the array
    reads: IndexMap  # map from the loop's indices to indices of the array
    name: str  # of the operation
    place: Place  # buffer of the result, and map from the loop's indices to indices of this buffer

    copies = False

    @property
    def is_full(self) -> bool:
        """Whether the result is one number."""
        return all(axis.source is None for axis in self.place.map)


class Loop(NamedTuple):
    """A loop that computes arrays with one index space."""

    shape: Shape
    items: tuple[Store | Fold, ...]
    inside: frozenset[int]  # nodes that this loop computes, and therefore doesn't read from memory


class Run(NamedTuple):
    """A Python call."""

    node: int
    inputs: tuple[int, ...]  # buffers of its array arguments
    in_place: bool  # whether it writes its result into the buffer of its argument


class Schedule(NamedTuple):
    """The steps of a program in order."""

    program: ArrayProgram
    buffers: list[Buffer]
    places: dict[int, Place]  # of the nodes in memory
    # For arguments of the program with a copy in another buffer: the first step after the copy, and the place of the copy.
    copies: dict[int, tuple[int, Place]]
    since: dict[int, int]  # for computed nodes, the step that stores them; earlier loops compute the entries that they need
    steps: list[Any]  # list of Loop and Run
    outputs: list[int]  # buffers
    cuts: list[int]  # the first step of each part but the first

    def part(self, at: int) -> int:
        """Return the part of the program that a step belongs to."""
        return bisect(self.cuts, at)


def root_of(buffers: Sequence[Buffer], b: int) -> int:
    """Return the buffer itself, or for an alias the buffer that owns the memory."""
    while buffers[b].kind == "alias":
        b = buffers[b].data
    return b


def working_in_place(node: Node) -> Any:
    """Return the in-place implementation of a node's operator, None if there is none or it doesn't apply."""
    call = node.data
    if node.kind != "communicate" or call.kind != "operate" or len(node.inputs) != 1 or not isinstance(call.args[0], Slot):
        return None
    if node.dtype not in FLOATS or call.kwargs:
        return None
    return call.fun.in_place
