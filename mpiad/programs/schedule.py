"""What a program does, one after the other: loops over arrays, and calls of Python's, on numbered buffers."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Shape
from mpiad.programs.array_program import FLOATS, ArrayProgram, Node, Slot
from mpiad.programs.index_maps import IndexMap


class Buffer(NamedTuple):
    """Memory of an array."""

    # "input", "constant", "temporary", "result", "output" or "alias"; a result comes from a call of Python's; outputs are
    # made anew at each call of the program; an alias is another buffer in another shape.
    kind: str
    shape: Shape
    dtype: np.dtype
    data: int = -1  # which input, constant, output or buffer


class Place(NamedTuple):
    """Where an array is: a buffer, and for each of its axes the index of the array."""

    buffer: int
    map: IndexMap


class Store(NamedTuple):
    """What a loop puts into memory at each place of its index space."""

    node: int
    reads: IndexMap  # the node's indices by those of the loop
    place: Place  # the buffer's indices by those of the loop
    copies: bool  # whether the node is read from where it is kept; else it is computed

    @property
    def of(self) -> int:
        """The node whose entries the loop takes: this one."""
        return self.node


class Fold(NamedTuple):
    """What a loop adds up over its index space, or folds otherwise."""

    node: int  # the result
    of: int  # what is folded
    reads: IndexMap  # its indices by those of the loop
    name: str  # of the operation
    place: Place  # the buffer's indices by those of the loop; an axis that is folded occurs in none

    copies = False  # it is computed, whatever it is folded of

    @property
    def is_full(self) -> bool:
        """Whether one number is left."""
        return all(axis.source is None for axis in self.place.map)


class Loop(NamedTuple):
    """Stores and folds over one index space."""

    shape: Shape
    items: tuple[Store | Fold, ...]
    inside: frozenset[int]  # nodes that are computed here, and read from here and not from memory


class Run(NamedTuple):
    """A call of Python's."""

    node: int
    inputs: tuple[int, ...]  # buffers of its arrays
    in_place: bool  # whether it works in a buffer that holds its argument already


class Schedule(NamedTuple):
    """What a program does, one after the other."""

    program: ArrayProgram
    buffers: list[Buffer]
    places: dict[int, Place]  # where nodes are in memory
    # From which step on arguments of the program are in a buffer of its own, too, and where.
    copies: dict[int, tuple[int, Place]]
    since: dict[int, int]  # after which step those are that loops compute; loops before it compute them again
    steps: list[Any]  # of Loop or Run
    outputs: list[int]  # buffers
    cuts: list[int]  # how many steps come before each part that is run later

    def part(self, at: int) -> int:
        """Return the part of the program that a step belongs to."""
        return bisect(self.cuts, at)


def root_of(buffers: Sequence[Buffer], b: int) -> int:
    """Return the buffer whose memory one has: another one's, where it is that in another shape."""
    while buffers[b].kind == "alias":
        b = buffers[b].data
    return b


def working_in_place(node: Node) -> Any:
    """Return how a call works in one buffer, None where it doesn't."""
    call = node.data
    if node.kind != "communicate" or call.kind != "operate" or len(node.inputs) != 1 or not isinstance(call.args[0], Slot):
        return None
    if node.dtype not in FLOATS or call.kwargs:
        return None
    return call.fun.in_place
