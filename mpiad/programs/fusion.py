"""Loop fusion: from a program of arrays to a schedule of loops and Python calls on buffers.

The nodes that Python runs, communications and untraced calls, are the cuts of a program. Before each cut, loops compute the
operands of the cut, and all other arrays that are kept in memory and precede the cut in the program. Arrays with the same
index space are computed in one loop, unless one of them reads neighboring entries of another.

Operands of communications and calls, and the program's results, must be in memory. Another array is kept if this is cheaper
than computing its entries again at each read, or if otherwise many of its operands would have to stay in memory. The parts
of a join are stored directly in the join's buffer. The argument of an operator that works in place, such as a halo
exchange, is computed directly in the operator's buffer.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpiad._typing import Shape
from mpiad.primitives.custom_operator import InPlace
from mpiad.programs.array_program import (
    COMPUTED,
    FLOATS,
    IN_MEMORY,
    ArrayProgram,
    IndexMap,
    Lookup,
    Node,
    Slot,
    beginning_at,
    broadcast,
    composed,
    identity,
    inverse,
    long_axes,
    looked_up,
    moved,
    shifted,
    strides_of,
    to_long,
    within,
)

# The schedule: loops over arrays and Python calls in order, which use numbered buffers.


class Buffer(NamedTuple):
    """The memory of an array."""

    # "input", "constant", "temporary", "result" (of a Python call), "output" (allocated in each run), or "alias" (the
    # memory of another buffer, in another shape)
    kind: str
    shape: Shape
    dtype: np.dtype
    data: int = -1  # number of the input, constant or output; for a result, of the node; for an alias, of the buffer
    map: IndexMap | None = None  # for an alias that is a view: the map from its indices to those of the buffer

    @property
    def nbytes(self) -> int:
        """The number of bytes of its entries."""
        return math.prod(self.shape) * self.dtype.itemsize


class Place(NamedTuple):
    """The place of an array in memory: a buffer, and the map from indices of the array to indices of the buffer."""

    buffer: int
    map: IndexMap

    @classmethod
    def of(cls, buffer: int, shape: Shape) -> Place:
        """Return the place of an array that has the shape of its buffer."""
        return cls(buffer, identity(len(shape)))


class Item(NamedTuple):
    """An array that a loop computes, copies or reduces, and writes."""

    node: int  # the array that is written
    of: int  # the array whose entries the loop computes or copies: the node itself, or the array that is reduced
    reads: IndexMap  # map from the loop's indices to indices of the array `of`
    place: Place  # buffer, and map from the loop's indices to indices of the buffer
    copies: bool = False  # whether the loop copies the node from its place in memory
    reduction: str = ""  # name of the operation that reduces the array along some or all axes; "" if there is none

    @property
    def fold(self) -> str:
        """Whether the array is reduced to a "number", along "axes", or by "segments"; "" if it isn't reduced."""
        sources = [axis.source for axis in self.place.map if axis.source is not None]
        if not self.reduction or not sources:
            return "number" if self.reduction else ""
        return "segments" if any(isinstance(source, Lookup) for source in sources) else "axes"


Box: TypeAlias = Sequence[tuple[int, int]]  # the first index, and the last index plus one, along each axis


class Loop(NamedTuple):
    """A loop that computes arrays with one index space."""

    shape: Shape
    items: tuple[Item, ...]
    inside: frozenset[int]  # nodes that this loop computes, and therefore doesn't read from memory
    without: Box | None = None  # a box of indices that the loop leaves out


class Run(NamedTuple):
    """A Python call."""

    node: int
    inputs: tuple[int, ...]  # buffers of its array arguments
    in_place: bool  # whether it writes its result into the buffer of its argument
    results: tuple[int, ...] = ()  # buffers of its results, unless it works in place


def root_of(buffers: Sequence[Buffer], b: int) -> int:
    """Return the buffer itself, or for an alias the buffer that owns the memory."""
    while buffers[b].kind == "alias":
        b = buffers[b].data
    return b


def working_in_place(node: Node) -> InPlace | None:
    """Return the in-place implementation of a node's operator, None if there is none or it doesn't apply."""
    call = node.data
    if node.kind != "communicate" or call.kind != "operate" or len(node.inputs) != 1 or not isinstance(call.args[0], Slot):
        return None
    if node.dtype not in FLOATS or call.kwargs:
        return None
    return call.fun.in_place


# An argument of a program isn't copied to the buffer of its halo if an exchange leaves at least so many entries unread, and
# at least this share of all, in programs of at most so many exchanges. The loops that read it take about twice as long to
# compile, and can't share their kernels with later steps, whose arrays are computed in such buffers. With thicker margins,
# as those of blocks of 96³ cells, they take longer than the copy.
LEAST_UNREAD, LEAST_SHARE, _MOST_EXCHANGES = 1 << 17, 15 / 16, 4


def unread(node: Node, shape: Shape) -> Box:
    """Return the box that an operator doesn't read of its argument, or of a part of it, of this shape."""
    call = node.data
    layers = call.fun.in_place.reads(*call.args[1:])
    pairs = zip((*[0] * (len(shape) - len(layers)), *layers), shape)
    return [(h, max(length - h, h)) for h, length in pairs]


def source_of(program: ArrayProgram, node: Node, x: int) -> int:
    """Return the array that must be in memory for an operand of a call: that of a view which BLAS reads as it is, or x."""
    operand = program.nodes[x]
    is_product = node.kind == "call" and node.data.fun in (np.dot, np.matmul) and program.device is None
    if not is_product or operand.kind != "view" or len(operand.shape) < 2:
        return x
    source = program.nodes[operand.inputs[0]]
    is_cheap = source.kind in ("input", "constant") or inverse(operand.data, source.shape, operand.shape) is not None
    strides, _ = strides_of(operand.data, source.shape, operand.shape) or ([0], 0)
    if not is_cheap or min(strides) <= 0:
        return x
    # The entries of rows or of columns must be adjacent, and rows or columns mustn't overlap.
    (least, length), (most, _) = sorted(zip(strides[-2:], operand.shape[-2:]))
    return operand.inputs[0] if least == 1 and most >= length else x


# Materialization: the choice of the arrays that are kept in memory.

# Kinds of nodes that Python runs ("cuts"), which read and write whole arrays.
CUTS = frozenset({"communicate", "call"})

# Kinds of nodes that are computed by a loop over the entries of their first operand.
_BY_SOURCE = frozenset({"reduce", "reshape", "segment_sum"})

# Costs of operations, in units of an addition: `_CALL` for other functions, such as exp, `KEEPING` for storing an entry and
# reading it again, and `_READING` for reading an entry of an array of which the loop reads neighboring entries anyway. The
# weight of a read in a narrow block, which takes code but little time.
_CALL, KEEPING, _READING, _NARROW = 20, 8, 0.3, 0.5
_SIMPLE = """add subtract multiply negative absolute maximum minimum fmax fmin less less_equal greater greater_equal equal
    not_equal logical_and logical_or logical_not invert square positive fabs sign cast truth conjugate isnan isfinite isinf
    at_least at_most where real imag scale"""
COSTS = {**dict.fromkeys(_SIMPLE.split(), 1), "divide": 4, "sqrt": 5, "power": 8}
# Limits of an expression: its depth, up to which number the arrays that it reads are counted, and the number of stages at
# which these are computed (see `_expressions`). Iterations in `kept`.
_DEEPEST, _MOST_LEAVES, _MOST_STAGES, _ROUNDS = 120, 12, 6, 4


class _Use(NamedTuple):
    # A read of a node in a loop.
    cut: float  # index of the cut before which the loop runs
    level: int  # of the loop; see `Materialization._levels`
    shape: Shape  # index space of the loop
    map: IndexMap  # from the loop's indices to those of the node


class Materialization:
    """Decides which arrays are kept in memory."""

    def __init__(self, program: ArrayProgram):
        self.program, self.nodes = program, program.nodes
        self.needed = program.needed()
        self.cuts = [n for n in self.needed if self.nodes[n].kind in CUTS]
        self.users: dict[int, list[int]] = {}  # for each node, the needed nodes that read it
        for n in self.needed:
            for x in self.nodes[n].inputs:
                self.users.setdefault(x, []).append(n)
        self.anchored: set[int] = set()  # operands of cuts, stored before the cuts; outputs, stored at the end of a part

    def kept(self) -> set[int]:
        """Return the nodes that are kept in memory, except those whose kind is always in memory."""
        # A fixed-point iteration: the costs depend on the kept nodes, and the decision which nodes to keep on the costs. At
        # first all nodes with several users are kept, so that alike parts of a program, such as its time steps, have alike
        # costs, and the same kernels.
        forced = self._forced()
        kept = forced | {n for n, users in self.users.items() if len(users) > 1 and self._is_computed(n)}
        for _ in range(_ROUNDS):
            costs, leaves, levels, long = self._expressions(kept)
            before, kept = kept, self._decided_by(forced | long, costs, leaves, levels)
            if kept == before:
                break
        return kept

    def _is_computed(self, n: int) -> bool:
        """Return whether a loop computes the entries of a node, unless it is kept in memory."""
        return self.nodes[n].kind not in (*IN_MEMORY, "number")

    def _decided_by(
        self, forced: set[int], costs: dict[int, int], leaves: dict[int, int], levels: dict[int, int]
    ) -> set[int]:
        position = {n: k for k, n in enumerate(self.cuts)}
        uses: dict[int, dict[_Use, float]] = {n: {} for n in self.needed}  # with their weights
        kept: set[int] = set()
        before = [sum(self.nodes[n].part <= part for n in self.cuts) for part in range(len(self.program.ends))]
        for place, n in enumerate(self.program.outputs):
            # Outputs are read between the last cut of their part and the next cut.
            part = bisect(self.program.ends, place)
            at = before[part] - 0.5 if part < len(before) else len(self.cuts)
            uses[n][_Use(at, levels[n], long_axes(self.nodes[n].shape), to_long(self.nodes[n].shape))] = 1
        for n in reversed(self.needed):
            node = self.nodes[n]
            if node.kind in IN_MEMORY:
                at = position.get(n)
                for x in [source_of(self.program, node, x) for x in node.inputs] if at is not None else ():
                    shape = self.nodes[x].shape
                    uses[x][_Use(at, levels[x], long_axes(shape), to_long(shape))] = 1  # type: ignore[arg-type]
                continue
            is_cheap = len(uses[n]) < 2 or node.kind in ("number", "view")
            again = 0 if is_cheap else (sum(uses[n].values()) - 1) * (costs[n] + (leaves[n] - 1) * _READING)
            repeated = self._branches(node, costs) if node.kind == "join" else again
            if n in forced or repeated > KEEPING:
                kept.add(n)
                cut = min((use.cut for use in uses[n]), default=len(self.cuts)) if n in self.anchored else self._era(n)
                shape = self.nodes[node.inputs[0]].shape if node.kind in _BY_SOURCE else node.shape
                uses[n] = {_Use(cut, levels[n], long_axes(shape), to_long(shape)): 1}
            for x, map in reads_of(self.program, node):
                is_narrow = node.kind == "update" and 4 * math.prod(self.nodes[x].shape) < math.prod(node.shape)
                for use, weight in uses[n].items():
                    read = _Use(*use[:3], composed(map, use.map))
                    uses[x][read] = max(uses[x].get(read, 0), weight * _NARROW if is_narrow else weight)
        return kept

    def _branches(self, join: Node, costs: dict[int, int]) -> float:
        """Return the cost of an entry of a join that is computed where it is read, beyond that of a loop for each part."""
        # Outside of the largest part, loops compute the entries of all parts and choose one of them.
        lengths = [self.nodes[x].shape[join.data] for x in join.inputs]
        return (1 - max(lengths) / sum(lengths)) * sum(costs[x] + 1 for x in join.inputs)

    def _era(self, n: int) -> int:
        """Return the index of the first cut after a node: the era in which it is computed."""
        return bisect(self.cuts, n)

    def _expressions(self, kept: set[int]) -> tuple[dict[int, int], dict[int, int], dict[int, int], set[int]]:
        """Return the cost of an entry of each node, the number of arrays that it reads, its level, and nodes to be kept.

        The level of the loop that computes a node is one more than those of the loops whose results it reads. Results are
        read within the loop that computes them only at the index of the loop, without a view or a join between.
        """
        # The nodes to be kept are deep expressions, and those that read arrays of many stages: of many eras, or computed by
        # loops of many levels, such as a sum over all time steps. Otherwise all these arrays would have to stay in memory.
        costs: dict[int, int] = {}
        sets: dict[int, frozenset[int]] = {}
        deep: dict[int, int] = {}
        stages: dict[int, frozenset[tuple[int, int]]] = {}
        long: set[int] = set()
        levels: dict[int, int] = {}
        # The largest levels of the kept nodes that the expression of a node reads, at its own index and at others.
        read: dict[int, tuple[int, int]] = {}
        for n in self.needed:
            node, here, elsewhere = self.nodes[n], -1, -1
            is_stored = node.kind in IN_MEMORY
            stored = [] if is_stored else [x for x in node.inputs if x in kept or x in long]
            computed = [] if is_stored else [x for x in node.inputs if x not in kept and x not in long]
            for x in () if is_stored else node.inputs:
                own, other = (levels[x], -1) if x in kept or x in long else read[x]
                here, elsewhere = max(here, own), max(elsewhere, other)
            if node.kind != "elementwise":
                here, elsewhere = -1, max(here, elsewhere)
            read[n], levels[n] = (here, elsewhere), max(here, elsewhere + 1, 0)
            if is_stored:
                costs[n], sets[n], deep[n] = 0, frozenset([n]), 0
                stages[n] = frozenset() if node.kind in ("input", "constant") else frozenset([(self._era(n), 0)])
                continue
            costs[n] = sum(costs[x] for x in computed)
            if node.kind == "elementwise":
                exponent = self.nodes[node.inputs[-1]]
                by_products = node.data[0] == "power" and exponent.kind == "number" and exponent.data in (2.0, 3.0)
                costs[n] += 2 if by_products else COSTS.get(node.data[0], _CALL)
            arrays = frozenset(stored).union(*(sets[x] for x in computed))
            sets[n] = arrays if len(arrays) <= _MOST_LEAVES else frozenset(sorted(arrays)[:_MOST_LEAVES])
            deep[n] = 1 + max((deep[x] for x in computed), default=0)
            stages[n] = frozenset([(self._era(x), levels[x]) for x in stored]).union(*(stages[x] for x in computed))
            if node.kind == "elementwise" and (deep[n] > _DEEPEST or len(stages[n]) > _MOST_STAGES):
                long.add(n)
        return costs, {n: len(arrays) for n, arrays in sets.items()}, levels, long

    def _forced(self) -> set[int]:
        forced = self.program.stored & set(self.needed)
        for n in self.needed:
            node = self.nodes[n]
            if node.kind in ("reduce", "segment_sum"):
                forced.add(n)
            elif node.kind == "gather":
                forced.add(node.inputs[0])
            elif node.kind == "reshape":
                forced.update((n, node.inputs[0]))
            elif node.kind == "elementwise":
                # The dtype of doubles equals None.
                precisions = ((x, self.program.precision(x)) for x in node.inputs)
                forced.update(x for x, one in precisions if one is not None and one != self.program.precision(n))
            elif node.kind in CUTS:
                operator = working_in_place(node)
                for x in [source_of(self.program, node, x) for x in node.inputs]:
                    self._force(x, self.anchored)
                    if operator is None or not operator.changes_given or self.is_shared(x):
                        self._force(x, forced)
        for n in self.program.outputs:
            self._force(n, forced)
            self._force(n, self.anchored)
        return set(filter(self._is_computed, forced))

    def _force(self, n: int, forced: set[int]) -> None:
        """Add a node to `forced`; instead of a join, add its parts; instead of a view of all entries, add its source."""
        node = self.nodes[n]
        if node.kind == "join":
            for x in node.inputs:
                self._force(x, forced)
        elif node.kind == "view" and inverse(node.data, self.nodes[node.inputs[0]].shape, node.shape) is not None:
            self._force(node.inputs[0], forced)
        elif node.kind != "view":
            forced.add(n)

    def is_shared(self, n: int) -> bool:
        """Return whether several nodes read a node, or it is an output."""
        return len(self.users[n]) > 1 or n in self.program.outputs


def reads_of(program: ArrayProgram, node: Node) -> Iterable[tuple[int, IndexMap]]:
    """Yield the nodes that a node reads, with their index maps."""
    if node.kind == "elementwise":
        for x in node.inputs:
            yield x, broadcast(program.nodes[x].shape, node.shape)
    elif node.kind == "view":
        yield node.inputs[0], node.data
    elif node.kind == "join":
        for x, start in zip(node.inputs, program.bounds_of(node)):
            yield x, shifted(identity(len(node.shape)), node.data, -start)
    elif node.kind == "update":
        entire = identity(len(node.shape))
        yield from zip(node.inputs, (entire, within(entire, node.data)))
    elif node.kind == "gather":
        x, index = node.inputs
        map, axis = node.data
        along = len(program.nodes[index].shape)
        yield x, composed(map, looked_up(index, along, axis, len(node.shape) - along + 1))
    elif node.kind in _BY_SOURCE:
        yield node.inputs[0], identity(len(program.nodes[node.inputs[0]].shape))


def nodes_read(
    program: ArrayProgram, starts: Iterable[tuple[int, IndexMap]], is_load: Callable[[int], bool]
) -> Iterable[tuple[int, IndexMap]]:
    """Yield the nodes in the expressions of the nodes `starts`, with their index maps; expressions end at loads."""
    stack, seen = list(starts), set[tuple[int, IndexMap]]()
    while stack:
        n, map = read = stack.pop()
        if read not in seen:
            seen.add(read)
            yield read
            if not is_load(n):
                stack += [(x, composed(inner, map)) for x, inner in reads_of(program, program.nodes[n])]


class Schedule:
    """The steps of a program in order."""

    def __init__(self, program: ArrayProgram):
        self.program, self.nodes = program, program.nodes
        self._decision = Materialization(program)
        self.needed, self.cuts, self._users = self._decision.needed, self._decision.cuts, self._decision.users
        self._kept = self._decision.kept()
        self._waiting = deque(sorted(self._kept - self._decision.anchored))
        # The cuts that work in place, and the last cut on which each node depends.
        self._operators = {n: operator for n in self.cuts if (operator := working_in_place(self.nodes[n])) is not None}
        self._latest: dict[int, int] = {}
        for n in self.needed:
            is_cut, before = self.nodes[n].kind in CUTS, [self._latest[x] for x in self.nodes[n].inputs]
            self._latest[n] = n if is_cut else max(before, default=-1)
        self.buffers: list[Buffer] = []
        self.places: dict[int, Place] = {}  # of the nodes in memory
        self._nodes_in: dict[int, list[int]] = {}  # the nodes stored in each buffer
        self._items_of: dict[int, list[Item]] = {}  # the items that store each node and its parts
        self._views: set[int] = set()  # views that the next loops store, each with all entries of its source
        # For arguments of the program with a copy in another buffer: the first step after the copy, and the copy's place.
        self.copies: dict[int, tuple[int, Place]] = {}
        # For computed nodes, the step that stores them; earlier loops that read one compute it again.
        self.since: dict[int, int] = {}
        self.steps: list[Any] = []  # list of Loop and Run
        self._exchanges = len(self._groups([n for n in self.cuts if n in self._operators]))
        self.outputs: list[int] = []  # buffers
        self.part_starts: list[int] = []  # the first step of each part but the first
        for n in self.needed:
            node = self.nodes[n]
            if node.kind in ("input", "constant"):
                self._record(n, Place.of(self._buffer(node.kind, node.shape, node.dtype, node.data), node.shape))
        for part, (start, end) in enumerate(pairwise([0, *program.ends, len(program.outputs)])):
            self.part_starts += [len(self.steps)] * (part > 0)
            for group in self._groups([n for n in self.cuts if self.nodes[n].part == part]):
                if group[0] in self._operators:
                    self._run_in_place(group)
                else:
                    self._run(group[0])
            self.outputs += self._compute_outputs(range(start, end), part)

    @property
    def kept(self) -> set[int]:
        """The buffers of outputs that only other programs read."""
        return {self._root(self.outputs[place]) for place in self.program.kept}

    def part(self, at: int) -> int:
        """Return the part of the program that a step belongs to."""
        return bisect(self.part_starts, at)

    def is_read_by(self, buffer: int, part: int) -> bool:
        """Return whether nodes of a part of the program read a buffer, possibly through nodes that aren't in memory."""
        stack, seen = list(self._nodes_in.get(self._root(buffer), ())), set[int]()
        while stack:
            found = {x for x in self._users.get(stack.pop(), ()) if x not in seen}
            if any(self.nodes[x].part == part for x in found):
                return True
            seen |= found
            stack += [x for x in found if x not in self.places]
        return False

    def outputs_of_parts(self) -> list[list[int]]:
        """Return the buffers that each part returns."""
        return [self.outputs[start:end] for start, end in pairwise([0, *self.program.ends, len(self.outputs)])]

    def _compute_outputs(self, places: Iterable[int], part: int) -> list[int]:
        """Append loops that compute the outputs of a part, given by their positions, and return their buffers."""
        # Later parts mustn't read the buffers of outputs, which the caller may change.
        last = part == len(self.program.ends)
        targets: list[tuple[int, Place | None, bool]] = []
        buffers: dict[int, int] = {}
        for place in sorted(places, key=lambda place: place not in self.program.kept):
            n = self.program.outputs[place]
            node, buffer = self.nodes[n], self._buffer_of(n)
            is_kept = place in self.program.kept
            is_new = (
                buffer is not None
                and self.buffers[buffer].kind == "result"
                and buffer not in map(self._root, buffers.values())
            )
            if node.dtype not in COMPUTED or (is_kept and buffer is not None) or (last and is_new):
                buffers[place] = buffer  # type: ignore[assignment]  # loops copy no integers: the replay does
                continue
            buffers[place] = self._buffer("temporary" if is_kept else "output", node.shape, node.dtype, place)
            targets.append((n, Place.of(buffers[place], node.shape), last or is_kept))
        end = next((n for n in self.needed if self.nodes[n].part > part), len(self.nodes))  # the first node of later parts
        self._compute(targets, end)
        return [buffers[place] for place in sorted(buffers)]

    def _buffer(self, kind: str, shape: Shape, dtype: np.dtype, data: int = -1, map: IndexMap | None = None) -> int:
        self.buffers.append(Buffer(kind, tuple(shape), np.dtype(dtype), data, map))
        return len(self.buffers) - 1

    def _temporary(self, n: int) -> Place:
        node = self.nodes[n]
        return Place.of(self._buffer("temporary", node.shape, node.dtype), node.shape)

    def _record(self, n: int, place: Place) -> None:
        """Record the place from which a node is read."""
        self.places[n] = place
        self._nodes_in.setdefault(self._root(place.buffer), []).append(n)

    def _buffer_of(self, n: int) -> int | None:
        """Return a buffer that contains the entries of a node and nothing else, in the node's shape; None if none does."""
        place, shape = self.places.get(n), self.nodes[n].shape
        if place is None:
            return None
        buffer = self.buffers[place.buffer]
        long = [k for k, length in enumerate(buffer.shape) if length != 1]
        order = [place.map[k].source for k in long]
        plain = all(place.map[k][1:] == (1, 0) for k in long) and None not in order and order == sorted(order)  # type: ignore[type-var]
        if not plain or math.prod(buffer.shape) != math.prod(shape):
            return None
        return place.buffer if buffer.shape == shape else self._buffer("alias", shape, buffer.dtype, place.buffer)

    def _groups(self, cuts: Sequence[int]) -> list[list[int]]:
        """Return cuts in order, those together that follow each other, work in place, and don't depend on each other."""
        groups: list[list[int]] = []
        for n in cuts:
            joins = groups and {n, groups[-1][0]} <= self._operators.keys()
            if joins and self._latest[self.nodes[n].inputs[0]] < groups[-1][0]:
                groups[-1].append(n)
            else:
                groups.append([n])
        return groups

    def _run(self, n: int) -> None:
        """Append loops that compute the operands of a cut, and the Python call."""
        node = self.nodes[n]
        sources = [source_of(self.program, node, x) for x in node.inputs]
        missing = [x for x in dict.fromkeys(sources) if self._buffer_of(x) is None]
        places = {x: self._temporary(x) for x in missing if x in self.places}
        self._compute([(x, places.get(x), x not in self.places) for x in missing], n)
        inputs: list[int] = [places[x].buffer if x in places else self._buffer_of(x) for x in sources]  # type: ignore[misc]
        for k, (x, source) in enumerate(zip(node.inputs, sources)):
            if x != source:
                view = self.nodes[x]
                inputs[k] = self._buffer("alias", view.shape, view.dtype, inputs[k], view.data)
        items = [user for user in self._users.get(n, ()) if self.nodes[user].kind == "item"]
        arrays = items or ([n] if n in self._users or n in self.program.outputs else [])
        results = [self._buffer("result", self.nodes[x].shape, self.nodes[x].dtype, x) for x in arrays]
        self.steps.append(Run(n, tuple(inputs), False, tuple(results)))
        for x, buffer in zip(arrays, results):
            self._record(x, Place.of(buffer, self.nodes[x].shape))

    def _run_in_place(self, group: Sequence[int]) -> None:
        """Append loops that compute the operands of cuts in their buffers, and the Python calls."""
        targets: list[tuple[int, Place | None, bool]] = []
        places: list[Place] = []
        before = len(self.steps)
        margins: dict[tuple[Shape, Box], list[Item]] = {}  # items of loops, by their index spaces and boxes left out
        for n in group:
            operator, node, (x,) = self._operators[n], self.nodes[n], self.nodes[n].inputs
            rest, shape = node.data.args[1:], self.nodes[x].shape
            given = operator.given(*rest)
            lead = (0,) * (len(shape) - len(given))
            buffer = self._buffer("temporary", shape[: len(lead)] + tuple(operator.shape(*rest)), node.dtype)
            places.append(Place(buffer, beginning_at(lead + tuple(given))))
            if self._is_read_in_place(n):
                for loop, item in self._margins(n, places[-1]):
                    margins.setdefault(loop, []).append(item)
                continue
            # If the operator changes its argument and other nodes read the argument, these read a copy.
            if operator.changes_given and self._decision.is_shared(x):
                targets.append((x, None, True))
            targets.append((x, places[-1], not operator.changes_given))
        self._compute(targets, group[0])
        loops = self.steps[before:]
        self.steps += [Loop(shape, tuple(items), frozenset(), inner) for (shape, inner), items in margins.items()]
        for n, (buffer, _) in zip(group, places):
            operator = self._operators[n]
            result = tuple(operator.result(*self.nodes[n].data.args[1:]))
            if not operator.changes_given:
                self._note_copies(buffer, loops)
            self.steps.append(Run(n, (buffer,), True))
            lead = (0,) * (len(self.nodes[n].shape) - len(result))
            self._record(n, Place(buffer, beginning_at(lead + result)))
            if not self._is_read_in_place(n):
                for user in self._users.get(n, ()):
                    if self._is_around(user, n):
                        self._record(user, self.places[n])

    def _is_around(self, user: int, n: int) -> bool:
        """Return whether a node is the result of an operator, with its argument where the operator doesn't change it."""
        node = self.nodes[user]
        return node.kind == "update" and node.inputs == (n, *self.nodes[n].inputs)

    def _is_read_in_place(self, n: int) -> bool:
        """Return whether loops read the argument of an operator itself, and its buffer gets what the operator reads."""
        users = self._users.get(n, ())
        # Reverse passes read results and arguments of the forward part, of which they keep copies.
        if len(users) != 1 or not self._is_around(users[0], n) or self.program.ends:
            return False
        is_stored = users[0] in self._kept or users[0] in self.program.outputs
        return self._exchanges <= _MOST_EXCHANGES and not is_stored

    def _margins(self, n: int, place: Place) -> Iterable[tuple[tuple[Shape, Box], Item]]:
        """Yield items that store what an operator reads, with the shapes of loops and the boxes that these leave out."""
        (x,) = self.nodes[n].inputs
        node = self.nodes[x]
        axis, parts = (node.data, zip(node.inputs, self.program.bounds_of(node))) if node.kind == "join" else (0, [(x, 0)])
        for part, start in parts:
            shape = self.nodes[part].shape
            box = [pair for pair, length in zip(unread(self.nodes[n], shape), shape) if length != 1]
            reads = to_long(shape)
            at = Place(place.buffer, composed(moved(place.map, axis, start), reads))
            yield (long_axes(shape), tuple(box)), Item(part, part, reads, at, part in self.places)

    def _note_copies(self, buffer: int, loops: Sequence[Loop]) -> None:
        """Record arguments of the program that were copied to entries of the buffer that its operator doesn't change."""
        for loop in loops:
            for item in [item for item in loop.items if item.place.buffer == buffer]:
                n, map = item.node, item.reads
                while self.nodes[n].kind == "view":
                    n, map = self.nodes[n].inputs[0], composed(self.nodes[n].data, map)
                node, alike = self.nodes[n], ("input", loop.shape, self.buffers[buffer].dtype)
                if (node.kind, node.shape, node.dtype) == alike and map == identity(len(loop.shape)):
                    self.copies.setdefault(n, (len(self.steps), item.place))

    def _compute(self, targets: Sequence[tuple[int, Place | None, bool]], cut: int) -> None:
        """Append loops that compute the nodes in `targets`, and all nodes before `cut` that are kept in memory."""
        # `targets`: a node, the place for it (None for a new buffer), and whether it may be read from there later.
        items: list[Item] = []
        for n, place, is_readable in targets:
            if place is not None or n not in self.places:
                self._store(n, place, is_readable, items)
        # The order is that of the program, so that the memory of operands can be reused.
        while self._waiting and self._waiting[0] < cut:
            n = self._waiting.popleft()
            if n not in self.places:
                self._store(n, None, True, items)
        # Operands that are kept in memory are appended to `items`, so that the `for` visits their operands, too.
        seen: set[int] = set()
        for item in items:
            if item.copies:
                continue
            stack = [item.of] if item.reduction else list(self.nodes[item.node].inputs)
            while stack:
                n = stack.pop()
                if n in self.places or n in seen:
                    continue
                if n in self._kept:
                    self._store(n, None, True, items)
                else:
                    seen.add(n)
                    stack.extend(self.nodes[n].inputs)
        self._group(items)
        # These loops read the sources of such views, which they may compute themselves.
        self.since.update(dict.fromkeys(self._views, len(self.steps) - 1))
        self._views.clear()

    def _store(self, n: int, place: Place | None, is_readable: bool, items: list[Item]) -> None:
        """Append the items that store a node at a place, by default in a new buffer.

        The node may be read from there later if `is_readable`.
        """
        first, is_new = len(items), n not in self.places
        self._append(n, place, is_readable, items)
        if is_new:
            self._items_of[n] = items[first:]

    def _append(self, n: int, place: Place | None, is_readable: bool, items: list[Item]) -> None:
        node = self.nodes[n]
        if place is None and node.kind == "reshape":
            (x,) = node.inputs
            if x not in self.places:
                self._store(x, None, True, items)
            buffer = self._buffer_of(x)
            if buffer is None:
                copy = self._temporary(x)
                self._store(x, copy, False, items)
                buffer = copy.buffer
            self._record(n, Place.of(self._buffer("alias", node.shape, node.dtype, buffer), node.shape))
            return
        place = place or self._temporary(n)
        copies = n in self.places
        fills_buffer = place == Place.of(place.buffer, node.shape) and self.buffers[place.buffer].shape == node.shape
        if not copies and node.kind in _BY_SOURCE and not fills_buffer:
            self._store(n, None, True, items)
            copies = True
        if is_readable and not copies:
            self._record(n, place)
        if not copies and node.kind in _BY_SOURCE:
            x = node.inputs[0]
            shape = self.nodes[x].shape
            reads = to_long(shape)
            if node.kind == "reduce":
                name, axes = node.data
                kept = tuple([reads[k] for k in range(len(shape)) if k not in axes])
                items.append(Item(n, x, reads, Place(place.buffer, kept), reduction=name))
            elif node.kind == "segment_sum":
                sums = Place(place.buffer, composed(self.program.sums_of(n), reads))
                items.append(Item(n, x, reads, sums, reduction="add"))
            else:
                alias = self._buffer("alias", shape, node.dtype, place.buffer)
                self._store(x, Place.of(alias, shape), is_readable, items)
            return
        # A join is stored part by part. If it is copied within one buffer, so are its parts: a copy of the whole join would
        # wait for all stores to that buffer.
        if node.kind == "join" and (not copies or self._root(self.places[n].buffer) == self._root(place.buffer)):
            for x, start in zip(node.inputs, self.program.bounds_of(node)):
                self._store(x, place._replace(map=moved(place.map, node.data, start)), is_readable, items)
            return
        # If the view contains all entries of its source, the source is stored in the order of the view. This is done
        # only if both are in memory, or neither is.
        if node.kind == "view" and copies == (node.inputs[0] in self.places):
            back = inverse(node.data, self.nodes[node.inputs[0]].shape, node.shape)
            if back is not None:
                if is_readable and not copies:
                    self._views.add(n)
                self._store(node.inputs[0], Place(place.buffer, composed(place.map, back)), is_readable, items)
                return
        reads = to_long(node.shape)
        items.append(Item(n, n, reads, Place(place.buffer, composed(place.map, reads)), copies))

    def _group(self, items: list[Item]) -> None:
        pending = sorted(items, key=lambda item: (item.node, item.copies))
        computed = {item.node for item in pending if not item.copies}
        written = {self._root(item.place.buffer) for item in pending}
        # A read of a node that isn't an item itself, such as a join or a reshaped array, waits for all stores to its
        # buffer; if these depend on the read, for the stores of the node.
        wholes = {n for buffer in written for n in self._nodes_in.get(buffer, ()) if n not in computed | self._views}
        reads = {id(item): self._needs(item, computed | wholes) for item in pending}
        by_buffer = True
        while pending:
            loop: list[Item] = []
            inside: dict[int, IndexMap] = {}
            waiting = {item.node for item in pending if not item.copies}
            buffers, left = {self._root(item.place.buffer) for item in pending}, set(map(id, pending))
            waiting |= {
                n
                for n in wholes
                if self._root(self.places[n].buffer) in buffers
                and (by_buffer or not left.isdisjoint(map(id, self._items_of.get(n, ()))))
            }
            shape: Shape | None = None
            precision, fold = None, ""
            for item in pending:
                item_shape, item_precision = long_axes(self.nodes[item.of].shape), self.program.precision(item.of)
                if shape is not None and (item_shape != shape or "axes" in (item.fold, fold)):
                    continue
                if item.fold and fold and item.fold != fold:
                    continue
                if item_precision is not None and precision is not None and item_precision != precision:
                    continue  # a loop computes in one precision, and doesn't round values to another one
                if all(inside[n] == map if n in inside else n not in waiting for n, map in reads[id(item)]):
                    loop.append(item)
                    shape, precision, fold = item_shape, precision or item_precision, fold or item.fold
                    if not item.reduction and not item.copies:
                        inside[item.node] = item.reads
            if shape is None:
                if not by_buffer:
                    raise AssertionError(f"no order of loops for {pending}")
                by_buffer = False
                continue
            by_buffer = True
            pending = [item for item in pending if item not in loop]
            self.since.update(dict.fromkeys(inside, len(self.steps)))
            self.steps.append(Loop(shape, tuple(loop), frozenset(inside)))
            # The next loops may read a buffer after all stores to it.
            left = {self._root(item.place.buffer) for item in pending}
            for n in wholes:
                if self._root(self.places[n].buffer) not in left:
                    self.since.setdefault(n, len(self.steps) - 1)

    def _root(self, buffer: int) -> int:
        return root_of(self.buffers, buffer)

    def _needs(self, item: Item, written: set[int]) -> set[tuple[int, IndexMap]]:
        """Return the nodes that an item reads from memory and that are in `written`, with their index maps."""
        if item.copies:
            return {(item.node, item.reads)}
        if item.reduction:
            starts = [(item.of, item.reads)]
        else:
            starts = [(x, composed(map, item.reads)) for x, map in reads_of(self.program, self.nodes[item.node])]
        visited = nodes_read(self.program, starts, lambda n: n in self.places and n not in self._views)
        return {(n, map) for n, map in visited if n in written and n in self.places}
