"""A program of arrays in static single assignment: each node defines one array in terms of earlier nodes.

Kinds of nodes, and in parentheses the contents of `Node.data`:

- "input": an argument of the function (its position among the arguments).
- "constant": an array that the function reads besides its arguments (its position among the constants).
- "number": an array of equal entries (their value).
- "elementwise": an elementwise function of arrays that are broadcast (its name, and a function of `Symbol`s).
- "view": entries of one array (the `IndexMap` that selects them).
- "gather": entries of an array at indices along an axis (the `IndexMap` that selects them before, and the axis).
- "segment_sum": the transpose: sums of the entries of an array that have the same index (the axis of the result).
- "reshape": the entries of one array in another shape.
- "join": a concatenation of arrays (the axis).
- "update": the first array, with a block replaced by the second array (the first indices of the block).
- "reduce": a reduction of an array along axes (the name of the operation, and the axes).
- "call": a function that NumPy runs on whole arrays (its `Step`, in which a `Slot` replaces each array).
- "communicate": a communication (its `Step`, likewise).
- "item": one of several results of a call (its position).

Communications are never dropped or reordered. Other nodes, except inputs, are dropped if no output or communication depends
on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided

from mpiad._typing import Array, Shape
from mpiad.programs.traced_array import Step
from mpiad.transport.core.calls import Site
from mpiad.transport.devices.device_arrays import ArrayModule, is_device_array

# Affine maps from the indices of a result to indices of the source that it reads: slices, transposes, broadcasts. In
# gathers and segment sums, an index of the source is an entry of an array of indices.


class Lookup(NamedTuple):
    """An entry of an array of indices: the array's node, and the map from indices of the result to indices of the array."""

    node: int
    map: tuple[Axis, ...]


class Axis(NamedTuple):
    """The index along one axis of the source: `stride` times the index along the result's axis `source`, plus `offset`."""

    # An axis of the result (not of the source), or an index that is looked up; None if the index is constant, and then the
    # stride is 0.
    source: int | Lookup | None
    stride: int
    offset: int


IndexMap: TypeAlias = tuple[Axis, ...]  # an `Axis` for each axis of the source


@cache
def identity(ndim: int) -> IndexMap:
    """Return the map of an array to itself."""
    return tuple([Axis(k, 1, 0) for k in range(ndim)])


def is_identity(map: IndexMap, shape: Shape, result: Shape) -> bool:
    """Return whether a map is the identity, for a source of shape `shape` and a result of shape `result`."""
    return shape == result and all(axis == (k, 1, 0) or shape[k] == 1 for k, axis in enumerate(map))


def composed(inner: IndexMap, outer: IndexMap) -> IndexMap:
    """Return the composition of two maps: `inner` reads the source, and `outer` reads the result of `inner`."""
    if inner is identity(len(outer)):
        return outer
    axes = []
    for source, stride, offset in inner:
        if isinstance(source, Lookup):
            through = Axis(Lookup(source.node, composed(source.map, outer)), 1, 0)
        else:
            through = Axis(None, 0, 0) if source is None else outer[source]
        axes.append(Axis(through.source, stride * through.stride, stride * through.offset + offset))
    return tuple(axes)


def looked_up(index: int, along: int, axis: int, ndim: int) -> IndexMap:
    """Return the map of a gather from an array of `ndim` axes: a node with `along` axes has the indices along `axis`."""
    lookup = Lookup(index, tuple([Axis(axis + k, 1, 0) for k in range(along)]))
    axes = [Axis(k if k < axis else k + along - 1, 1, 0) for k in range(ndim)]
    return (*axes[:axis], Axis(lookup, 1, 0), *axes[axis + 1 :])


def with_lanes(map: IndexMap) -> IndexMap:
    """Return the map of arrays with one more axis, the first one."""
    return (Axis(0, 1, 0), *[axis if axis.source is None else axis._replace(source=axis.source + 1) for axis in map])  # type: ignore[operator]


def shifted(map: IndexMap, axis: int, by: int) -> IndexMap:
    """Return a map with `by` added to the index along one axis of the source."""
    return tuple([old._replace(offset=old.offset + by) if k == axis else old for k, old in enumerate(map)])


def within(map: IndexMap, starts: Sequence[int]) -> IndexMap:
    """Return the map that reads from a block of the source, which begins at these indices, instead of the source."""
    return tuple([axis._replace(offset=axis.offset - start) for axis, start in zip(map, starts)])


@lru_cache(1000)
def broadcast(shape: Shape, target: Shape) -> IndexMap:
    """Return the map that broadcasts an array of shape `shape` to shape `target`."""
    if shape == target:
        return identity(len(shape))
    lead = len(target) - len(shape)
    pairs = enumerate(zip(shape, target[lead:]), lead)
    return tuple([Axis(None, 0, 0) if n == 1 != length else Axis(k, 1, 0) for k, (n, length) in pairs])


def without_memory(shape: Shape) -> np.ndarray:
    """Return an array for `of_view`, whose entries mustn't be read: it has the memory of one entry."""
    strides = [math.prod([max(n, 1) for n in shape[k + 1 :]]) for k in range(len(shape))]
    return as_strided(np.empty(1, np.int8), shape, strides)


def of_view(array: np.ndarray, view: np.ndarray) -> IndexMap:
    """Return the map of a view of an array returned by `without_memory`, from its strides and its first entry."""
    offset = view.__array_interface__["data"][0] - array.__array_interface__["data"][0]
    axes = []
    for n, stride in zip(array.shape, array.strides):
        ends = enumerate(zip(view.shape, view.strides))
        source = next((k for k, (length, by) in ends if length > 1 and stride <= abs(by) < n * stride), None)
        axes.append(Axis(source, 0 if source is None else view.strides[source] // stride, offset // stride))
        offset %= stride
    return tuple(axes)


def strides_of(map: IndexMap, shape: Shape, result: Shape) -> tuple[list[int], int] | None:
    """Return the strides and the offset, in entries, of a view of a contiguous array; None if it isn't one of NumPy's."""
    strides, start = [0] * len(result), 0
    for (source, stride, offset), step in zip(map, [math.prod(shape[k + 1 :]) for k in range(len(shape))]):
        if isinstance(source, Lookup) or source is not None and strides[source]:
            return None
        if source is not None:
            strides[source] = stride * step
        start += offset * step
    return strides, start


def long_axes(shape: Shape) -> Shape:
    """Return the shape without axes of length 1: the index space of a loop over the array."""
    return tuple([n for n in shape if n != 1])


def to_long(shape: Shape) -> IndexMap:
    """Return the map from the indices of a loop over an array to indices of the array."""
    axes, place = [], 0
    for n in shape:
        axes.append(Axis(None, 0, 0) if n == 1 else Axis(place, 1, 0))
        place += n != 1
    return tuple(axes)


def beginning_at(starts: Sequence[int]) -> IndexMap:
    """Return the map from indices of a block to indices of the buffer in which the block begins at `starts`."""
    return tuple([Axis(k, 1, start) for k, start in enumerate(starts)])


def moved(map: IndexMap, axis: int, by: int) -> IndexMap:
    """Return a map with `by` added to the index along one axis of the result."""
    return tuple([old._replace(offset=old.offset + by * old.stride) if old.source == axis else old for old in map])


def inverse(map: IndexMap, shape: Shape, result: Shape) -> IndexMap | None:
    """Return the inverse of a view's map, None if the view lacks or repeats entries of its source, or reverses an axis."""
    back: list[Axis] = [Axis(None, 0, 0)] * len(result)
    for k, (source, stride, offset) in enumerate(map):
        if source is None:
            if shape[k] != 1:
                return None
        elif isinstance(source, Lookup) or (stride, offset) != (1, 0):
            return None
        elif result[source] != shape[k] or back[source].source is not None:
            return None
        else:
            back[source] = Axis(k, 1, 0)
    return tuple(back) if all(result[k] == 1 or axis.source is not None for k, axis in enumerate(back)) else None


# Elementwise functions of joins along axes of at most this length are computed separately for each part of the join.
SHORT = 8
# Updates of one entry along an axis of at most this length, such as a component of a field, are joins.
COMPONENTS = 32
FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
BOOLEAN = np.dtype(bool)
# The precision in which loops compute values of a dtype. A complex number is a pair of real numbers.
PRECISIONS = {**{dtype: dtype for dtype in FLOATS}, **{np.result_type(dtype, np.complex64): dtype for dtype in FLOATS}}
# The dtypes that loops compute with.
COMPUTED = (*PRECISIONS, BOOLEAN)


def parts_of(dtype: np.dtype) -> int:
    """Return the number of real numbers in an entry."""
    return 2 if dtype.kind == "c" else 1


# Kinds of nodes that loops don't compute.
IN_MEMORY = frozenset({"input", "constant", "communicate", "call", "item"})


class Slot(NamedTuple):
    """A placeholder for an array in the arguments of a node's `Step`: the position of this array in the node's `inputs`."""

    place: int


class Node(NamedTuple):
    """One array."""

    kind: str
    inputs: tuple[int, ...]  # the nodes that this node reads, by their positions in the program
    shape: Shape
    dtype: np.dtype
    data: Any
    site: Site | None = None  # the user's line
    part: int = 0  # part of the program: 0 is the function, and later parts are reverse passes


def operation_of(node: Node) -> str:
    """Return the name of a node's operation."""
    if node.kind == "elementwise":
        return node.data[0]
    if isinstance(node.data, Step):
        fun: Any = node.data.fun
        return getattr(fun, "__name__", repr(fun))
    if node.kind == "reduce":
        return f"{node.data[0]} over {list(node.data[1])}"
    return f"{node.kind} {node.data}" if node.kind == "number" else node.kind


def described(node: Node) -> str:
    """Return the operation of a node, and the user's line."""
    return operation_of(node) if node.site is None else f"{operation_of(node)} at {node.site.text}"


class ArrayProgram:
    """A program, and its builder. Each method that appends a node returns the number of that node."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.inputs: list[int] = []  # the nodes of the arguments
        self.constants: list[Array] = []
        self.outputs: list[int] = []
        self.ends: list[int] = []  # for each part but the last, the number of outputs of this part and the earlier ones
        self.stored: set[int] = set()  # nodes that are kept in memory
        self.weak: set[int] = set()  # the nodes of Python scalars, which take the precision of the other operand
        self.device: ArrayModule | None = None  # of the arrays; None for the host
        self.on_host: set[int] = set()  # the nodes of numbers on the host, in a program for a device
        self.kept: frozenset[int] = frozenset()  # positions of outputs that only other programs read (see `Replay.lease`)
        self.site: Site | None = None  # the user's line, for new nodes
        self.part = 0  # the part of the program, for new nodes
        self._known: dict[Any, int] = {}
        self._precisions: dict[int, np.dtype | None] = {}

    def add(self, kind: str, inputs: Sequence[int], shape: Shape, dtype: np.dtype, data: Any = None) -> int:
        """Append a node, or return an existing node with the same value."""
        node = Node(kind, tuple(inputs), tuple(shape), np.dtype(dtype), data, self.site, self.part)
        if kind in ("call", "communicate", "item", "input"):
            self.nodes.append(node)
            return len(self.nodes) - 1
        # The key contains the digits of a number instead of the number, so that 0 differs from -0, and NaN equals itself.
        mark = (type(data), repr(data)) if isinstance(data, (float, complex)) else data
        key = (kind, node.inputs, node.shape, node.dtype, mark)
        if key not in self._known:
            self.nodes.append(node)
            self._known[key] = len(self.nodes) - 1
        return self._known[key]

    def input(self, shape: Shape, dtype: np.dtype) -> int:
        """Append an argument of the function."""
        self.inputs.append(self.add("input", (), shape, dtype, len(self.inputs)))
        return self.inputs[-1]

    def constant(self, value: Array) -> int:
        """Append a constant array."""
        is_known = not is_device_array(value)  # its entries may change
        if is_known and value.dtype in COMPUTED and (value.size == 1 or (value.size and not any(value.strides))):
            return self.number(value.reshape(-1)[0].item(), value.shape, value.dtype)
        place = next((k for k, known in enumerate(self.constants) if known is value), len(self.constants))
        if place == len(self.constants):
            self.constants.append(value)
        return self.add("constant", (), value.shape, value.dtype, place)

    def number(self, value: complex | np.number | bool, shape: Shape = (), dtype: Any = np.float64) -> int:
        """Append an array whose entries are one number."""
        dtype = np.dtype(dtype)
        return self.add("number", (), shape, dtype, dtype.type(value).item())

    def view(self, x: int, map: IndexMap, shape: Shape) -> int:
        """Append a view of an array. The index map computes an index of the array from one of the view."""
        node = self.nodes[x]
        if is_identity(map, node.shape, shape):
            return x
        if node.kind == "number" or not math.prod(shape):
            return self.number(node.data if node.kind == "number" else 0, shape, node.dtype)
        if node.kind == "view":
            return self.view(node.inputs[0], composed(node.data, map), shape)
        if node.kind == "join":
            return self._view_of_join(x, map, shape)
        return self.add("view", (x,), shape, node.dtype, map)

    def slice(self, x: int, axis: int, start: int, stop: int) -> int:
        """Append the entries from `start` to `stop` of an array along an axis."""
        shape = self.nodes[x].shape
        return self.view(x, shifted(identity(len(shape)), axis, start), (*shape[:axis], stop - start, *shape[axis + 1 :]))

    def _view_of_join(self, x: int, map: IndexMap, shape: Shape) -> int:
        """Append a view of a join: a view of one part or a join of views of the parts, if possible."""
        node = self.nodes[x]
        source, stride, offset = map[node.data]
        low, high = sorted((offset, offset + stride * (0 if source is None else max(shape[source] - 1, 0))))
        parts, done = [], 0
        for part, (start, stop) in zip(node.inputs, pairwise(self.bounds_of(node))):
            if start <= low and high < stop:
                return self.view(part, shifted(map, node.data, -start), shape)
            if source is not None and stride == 1:
                # The view has entries of this part at indices from `first` to `last`.
                first, last = max(start - offset, 0), min(stop - offset, shape[source])
                if last > first:
                    inner = shifted(moved(map, source, first), node.data, -start)
                    parts.append(self.view(part, inner, (*shape[:source], last - first, *shape[source + 1 :])))
                    done += last - first
        if source is not None and done == shape[source] and sum(a.source == source for a in map) == 1:
            return self.join(parts, source)
        return self.add("view", (x,), shape, node.dtype, map)

    def bounds_of(self, node: Node) -> list[int]:
        """Return the indices at which the parts of a join begin along its axis, followed by the length of the axis."""
        return list(accumulate([self.nodes[x].shape[node.data] for x in node.inputs], initial=0))

    def elementwise(self, inputs: Sequence[int], shape: Shape, dtype: np.dtype, data: tuple[str, Any]) -> int:
        """Append an elementwise function; for a join of components, append the join of the functions of its parts."""
        for x in inputs:
            node = self.nodes[x]
            if node.kind != "join" or node.shape != tuple(shape) or node.shape[node.data] > SHORT:
                continue
            # Components are single; constants may be longer. The parts of a padded grid are longer, too: each function of
            # shifted views would have more parts than its arguments.
            parts = [self.nodes[part] for part in node.inputs]
            if all(part.kind == "number" or part.shape[node.data] == 1 for part in parts):
                break
        else:
            return self.add("elementwise", inputs, shape, dtype, data)
        full = [self.view(y, broadcast(self.nodes[y].shape, shape), shape) for y in inputs]
        made = []
        for start, stop in pairwise(self.bounds_of(node)):
            operands = [self.slice(y, node.data, start, stop) for y in full]
            made.append(self.elementwise(operands, self.nodes[operands[0]].shape, dtype, data))
        return self.join(made, node.data)

    def gather(self, x: int, index: int, axis: int) -> int:
        """Append the entries of an array at indices, the entries of a node, along an axis."""
        node, indices = self.nodes[x], self.nodes[index].shape
        shape, map = (*node.shape[:axis], *indices, *node.shape[axis + 1 :]), identity(len(node.shape))
        if node.kind == "number" or not math.prod(shape):
            return self.number(node.data if node.kind == "number" else 0, shape, node.dtype)
        if node.kind == "view":
            (x,), map = node.inputs, node.data
        return self.add("gather", (x, index), shape, node.dtype, (map, axis))

    def segment_sum(self, x: int, index: int, axis: int, count: int) -> int:
        """Append the transpose of `gather`: sums of the entries of an array, of which `count` are along the axis."""
        node, along = self.nodes[x], len(self.nodes[index].shape)
        shape = (*node.shape[:axis], count, *node.shape[axis + along :])
        if not math.prod(node.shape):
            return self.number(0, shape, node.dtype)
        # The parts of a join along a short axis are summed in one loop without branches.
        if node.kind == "join" and node.data >= axis + along and node.shape[node.data] <= SHORT:
            return self.join([self.segment_sum(part, index, axis, count) for part in node.inputs], node.data - along + 1)
        return self.add("segment_sum", (x, index), shape, node.dtype, axis)

    def sums_of(self, n: int) -> IndexMap:
        """Return the map from the indices of the entries that a segment sum adds to indices of the sums."""
        node = self.nodes[n]
        return looked_up(node.inputs[1], len(self.nodes[node.inputs[1]].shape), node.data, len(node.shape))

    def reshape(self, x: int, shape: Shape) -> int:
        """Append an array in another shape: a view if only axes of length 1 are added or removed."""
        node = self.nodes[x]
        if node.shape == tuple(shape):
            return x
        if node.kind == "number":
            return self.number(node.data, shape, node.dtype)
        if node.kind == "reshape":
            return self.reshape(node.inputs[0], shape)
        if long_axes(node.shape) == long_axes(shape):
            axes = iter([Axis(k, 1, 0) for k, n in enumerate(shape) if n != 1])
            return self.view(x, tuple([Axis(None, 0, 0) if n == 1 else next(axes) for n in node.shape]), shape)
        return self.add("reshape", (x,), shape, node.dtype)

    def join(self, parts: Sequence[int], axis: int) -> int:
        """Append the concatenation of arrays along an axis."""
        found = []
        for x in parts:
            node = self.nodes[x]
            found += node.inputs if node.kind == "join" and node.data == axis else [x]
        parts = [x for x in found if self.nodes[x].shape[axis]] or found[:1]
        if len(parts) == 1:
            return parts[0]
        first = self.nodes[parts[0]]
        shape = (*first.shape[:axis], sum(self.nodes[x].shape[axis] for x in parts), *first.shape[axis + 1 :])
        return self.add("join", parts, shape, first.dtype, axis)

    def update(self, x: int, block: int, starts: Sequence[int]) -> int:
        """Append a copy of an array with a block replaced by another array of the same number of axes."""
        node, part = self.nodes[x], self.nodes[block]
        if not math.prod(part.shape):
            return x
        if part.shape == node.shape:
            return block
        for axis, (start, n, length) in enumerate(zip(starts, part.shape, node.shape)):
            # Along a short axis, the result is a join of the entries before, inside and after the block.
            if n < length <= (COMPONENTS if n == 1 else SHORT) and len(node.shape) > 1:
                before, inside, after = [self.slice(x, axis, *pair) for pair in pairwise((0, start, start + n, length))]
                updated = self.update(inside, block, [0 if k == axis else s for k, s in enumerate(starts)])
                return self.join([before, updated, after], axis)
        return self.add("update", (x, block), node.shape, node.dtype, tuple(starts))

    def needed(self) -> list[int]:
        """Return, in order, the inputs and the nodes that outputs and communications need."""
        found = {*self.outputs, *self.inputs}
        for number in range(len(self.nodes) - 1, -1, -1):
            if number in found or self.nodes[number].kind == "communicate":
                found.add(number)
                found.update(self.nodes[number].inputs)
        return sorted(found)

    def precision(self, x: int) -> np.dtype | None:
        """Return the dtype in which loops compute a node; None if loops don't compute it, or compute it without floats."""
        if x not in self._precisions:
            node, found = self.nodes[x], []
            if node.kind not in IN_MEMORY and node.kind != "number":
                # A boolean is computed in the precision of its operands.
                operand_dtypes = [self.precision(y) or self.nodes[y].dtype for y in node.inputs]
                dtypes = [node.dtype] if node.dtype in PRECISIONS else operand_dtypes
                found = [PRECISIONS[y] for y in dtypes if y in PRECISIONS]
            self._precisions[x] = max(found, key=lambda y: y.itemsize, default=None)
        return self._precisions[x]


class Value:
    """A node among the arguments of a call that is translated to a program."""

    __slots__ = ("dtype", "number", "program", "shape")

    def __init__(self, program: ArrayProgram, number: int):
        node = program.nodes[number]
        self.program, self.number, self.shape, self.dtype = program, number, node.shape, node.dtype

    def view(self, map: IndexMap, shape: Shape) -> Value:
        """Append a view; see `ArrayProgram.view`."""
        return Value(self.program, self.program.view(self.number, map, shape))

    def broadcast_to(self, shape: Shape) -> Value:
        """Append the array broadcast to a shape."""
        return self.view(broadcast(self.shape, shape), shape)

    def slice(self, axis: int, start: int, stop: int) -> Value:
        """Append the entries from `start` to `stop` along an axis."""
        return Value(self.program, self.program.slice(self.number, axis, start, stop))

    def run(self, axis: int, start: int, step: int, count: int) -> Value:
        """Append `count` entries along an axis, the first at `start`; if the step is 0, they are equal."""
        map, shape = identity(len(self.shape)), (*self.shape[:axis], count, *self.shape[axis + 1 :])
        along = Axis(axis if step else None, step, start)
        return self.view((*map[:axis], along, *map[axis + 1 :]), shape)

    def reshape(self, shape: Shape) -> Value:
        """Append the array in another shape."""
        return Value(self.program, self.program.reshape(self.number, shape))
