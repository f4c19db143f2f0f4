"""The text of loops in the kernel language: loads at shifted indices, a scalar program as the body, stores, reductions.

In a concatenation of arrays, the expression of an entry depends on the index of the entry. Therefore a loop has a body
without branches, for the largest box of indices in which one expression is valid, and two bodies that branch on the
indices, for the edges around this box. In one of these, branches don't depend on the last index, so that a processor can
vectorize the rows.

A reduction is a "fold". The fold of an array, or of each of its rows, to one number uses sixteen partial results ("lanes"),
so that the processor can vectorize it. For a given shape, the order of the operations is the same on all processors.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from operator import and_

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.program import OPERATIONS, Builder
from mpiad.compiling.source import indented, lines, lowered, number
from mpiad.compiling.symbols import Symbol, choose, number_of
from mpiad.programs.array_program import (
    BOOLEAN,
    FLOATS,
    PRECISIONS,
    Axis,
    IndexMap,
    Lookup,
    Node,
    broadcast,
    composed,
    identity,
    parts_of,
    shifted,
    within,
)
from mpiad.programs.fusion import Box, Loop, Place, Schedule, nodes_read, reads_of

LANES = 16
NAME = "loop"
_LONG = 16  # minimum length of rows that are worth vectorizing: they have a body of their own
FIRST = {"add": 0.0, "multiply": 1.0, "maximum": -math.inf, "minimum": math.inf}

# The range of indices along each axis in which one expression is valid; None for axes whose indices select the expression.
Known = Sequence[tuple[int, int] | None]


class LoopText:
    """The loop at step `at` of a schedule, as a kernel; `divisible`: parts may be computed separately (no folds)."""

    def __init__(self, schedule: Schedule, at: int, divisible: bool):
        loop: Loop = schedule.steps[at]
        self.schedule, self.loop, self.nodes, self.at = schedule, loop, schedule.program.nodes, at
        self.buffers: dict[int, str] = {}  # the buffers among the arguments, in their order, and their names
        self.loads: set[tuple[int, IndexMap]] = set()  # the buffers that are read, with maps from the loop's indices
        self.reads: dict[int, int] = {}  # at how many indices the loop reads each buffer
        self._read: set[int] = set()
        self.written = {item.place.buffer for item in loop.items}
        program = schedule.program
        precisions = {program.precision(item.of) or PRECISIONS.get(self.nodes[item.of].dtype) for item in loop.items}
        single, double = FLOATS
        self.real = single if precisions - {None} == {single} else double
        # The real numbers that are reduced: an item, and 0 for a real number or the real part, 1 for the imaginary part.
        self.folds = [
            (item, part) for item in loop.items if item.reduction for part in range(parts_of(self.nodes[item.of].dtype))
        ]
        shape = loop.shape
        self.divisible = divisible and bool(math.prod(shape)) and bool(shape) and not self.folds and not loop.without
        self._write(*self._boxes() if math.prod(shape) else ([(0, 0)] * len(shape), None, None))

    def _write(self, inside: Box, rows: Array | None, edges: Array | None) -> None:
        """Write the nested loops, given the box without branches, and the boxes around it; see `_boxes`."""
        shape, last = self.loop.shape, len(self.loop.shape) - 1
        # Folds along the last axis, of long rows, have partial results for each row.
        sources = {axis.source for item, _ in self.folds for axis in item.place.map}
        is_number = all(item.fold == "number" for item, _ in self.folds)
        is_single = rows is None and edges is None  # whether one expression is valid for all indices
        self._by_rows = bool(self.folds and shape) and not is_number and is_single and shape[-1] >= 2 * LANES
        self._by_rows &= last not in sources and all(isinstance(source, int | None) for source in sources)
        # Length of the array of partial results, the last argument if > 0.
        self.lanes = LANES * len(self.folds) * (bool(shape) and is_number or self._by_rows)
        body = self._before()
        boxes: dict[str, Array] = {}
        if self.divisible:
            boxes["b"] = as_rows([inside], 2 * len(shape))
            body += ["for q in range(b.shape[0]):", *indented(self._nest(inside, self._ranges("b"), boxes["b"]))]
        elif all(hi > lo for lo, hi in inside):
            ranges = [f"range({lo}, {hi})" for lo, hi in inside]
            body += self._nest(inside, ranges, as_rows([inside], 2 * len(shape)))
        unknown: list[tuple[int, int] | None] = [None] * len(shape)
        for name, around, known in (("r", rows, [*unknown[1:], *inside[-1:]]), ("e", edges, unknown)):
            if around is not None:
                boxes[name] = around
                count = f"{name}.shape[0]" if self.divisible else str(len(around))
                ranges = self._ranges(name)
                is_short = (around[:, -1] - around[:, -2]).max() < _LONG
                ranges[-1] = ranges[-1].replace("range", "few" if is_short else "rolled" if name == "r" else "range")
                body += [f"for q in range({count}):", *indented(self._nest(known, ranges, around))]
        if self.lanes and not self._by_rows:
            body += self._combined_lanes()
        # The arguments after the buffers: arrays of shape (n, 2 d) with one box per row. The first array of a divisible
        # loop has the boxes without branches. If there are boxes at the edges, the last arrays have these.
        self.boxes = tuple(boxes.values())
        self._others = dict.fromkeys(boxes, "int64[:, ::1]") | ({"w": "float64[::1]"} if self.lanes else {})
        self._body = "\n".join(indented(body or ["pass"]))

    @property
    def text(self) -> str:
        """The kernel's function."""
        return f"def {NAME}({', '.join([*self.buffers.values(), *self._others])}):\n{self._body}\n"

    @property
    def signature(self) -> str:
        """The types of the arguments, for `kernel_of`."""
        return f"linked({', '.join([*map(self._kind, self.buffers), *self._others.values()])})"

    def overwrite(self, c: int, b: int) -> None:
        """Store array b in buffer c, whose entries the loop reads at the indices at which it writes b."""
        self._body = f"    {self.buffers.pop(b)} = {self.buffers[c]}\n{self._body}"
        self.written = self.written - {b} | {c}

    def _ranges(self, boxes: str) -> list[str]:
        return [f"range({boxes}[q, {2 * k}], {boxes}[q, {2 * k + 1}])" for k in range(len(self.loop.shape))]

    def _kind(self, buffer: int) -> str:
        _, shape, dtype, *_ = self.schedule.buffers[buffer]
        name = "boolean" if dtype == BOOLEAN else PRECISIONS.get(dtype, dtype).name
        return f"{name}[{', '.join([':'] * len(shape[1:]) + ['::1'])}]"

    def _boxes(self) -> tuple[Box, Array | None, Array | None]:
        """Return the largest box that needs no branches, and the boxes around it as rows of arrays, or None.

        In the boxes of the first array, branches don't depend on the last index.
        """
        shape = self.loop.shape
        points: list[set[int]] = [{0, n} for n in shape]
        starts = [(item.of, item.reads) for item in self.loop.items]
        for n, map in nodes_read(self.schedule.program, starts, self.is_load):
            node = self.nodes[n]
            if self.is_load(n):
                self._read.add(n)
            elif node.kind == "join":
                for stop in self.schedule.program.bounds_of(node)[1:]:
                    _note(points, map[node.data], stop)
            elif node.kind == "update":
                for axis, start, length in zip(map, node.data, self.nodes[node.inputs[1]].shape):
                    _note(points, axis, start)
                    _note(points, axis, start + length)
        inside = [max(pairwise(sorted(indices)), key=lambda pair: pair[1] - pair[0]) for indices in points]
        inside = list(self.loop.without or inside)
        boxes: list[Box] = []
        cut([(0, n) for n in shape], inside, [], boxes)
        rows: list[Box] = []
        if len(shape) > 1 and inside[-1][1] - inside[-1][0] >= _LONG:
            whole, boxes = boxes, []
            for box in whole:
                cut(box, [*box[:-1], inside[-1]], rows, boxes)
        of_rows, of_edges = (as_rows(x, 2 * len(shape)) if x else None for x in (rows, boxes))
        return [(0, 0)] * len(shape) if self.loop.without else inside, of_rows, of_edges

    def is_load(self, n: int) -> bool:
        """Return whether a node is read from memory."""
        if n not in self.schedule.places or n in self.loop.inside or self.nodes[n].kind == "number":
            return False
        return self.schedule.since.get(n, -1) < self.at

    def place_of(self, n: int) -> Place:
        """Return the place from which a node is read: the place of a copy, if the copy's buffer is in memory anyway."""
        schedule = self.schedule
        since, copy = schedule.copies.get(n, (math.inf, None))
        if copy is not None and self.at >= since:
            is_read = any(schedule.places[x].buffer == copy.buffer for x in self._read)
            if is_read or schedule.is_read_by(copy.buffer, schedule.part(self.at)) and schedule.part(self.at) > 0:
                return copy
        return schedule.places[n]

    def _nest(self, box: Known, ranges: Sequence[str], boxes: Array) -> list[str]:
        """Return nested loops over the box in which one expression is valid, or over boxes in `ranges` at its edges."""
        body = LoopBody(self, box)
        inner, last = body.text(), len(ranges) - 1
        for buffer in {buffer for buffer, _, _ in body.loads}:
            self.reads[buffer] = self.reads.get(buffer, 0) + int(np.prod(boxes[:, 1::2] - boxes[:, ::2], axis=1).sum())
        if not ranges:
            return inner + self._folded("0")
        heads = [line for k, span in enumerate(ranges[:-1]) for line in indented([f"for i{k} in {span}:"], k)]
        if self.lanes and None not in box:
            lo, hi = box[last]  # type: ignore[misc]
            middle = lo + (hi - lo) // LANES * LANES
            block = [
                f"for j in range({lo}, {middle}, {LANES}):",
                *indented([f"for l in range({LANES}):"]),
                *indented([f"i{last} = j + l", *inner, *self._folded("l")], 2),
            ]
            rest = [f"for i{last} in range({middle}, {hi}):", *indented([*inner, *self._folded("0")])]
            if self._by_rows:
                return heads + indented([*self._first_lanes(), *block, *rest, *self._combined_lanes()], last)
            return heads + indented([*block, *rest], last)
        return heads + indented([f"for i{last} in {ranges[-1]}:", *indented([*inner, *self._folded("0")])], last)

    def _folded(self, lane: str) -> list[str]:
        """Return the lines that combine the values f0, f1, ... with the partial results at index `lane`."""
        text = []
        for k, (fold, part) in enumerate(self.folds):
            target = f"w[{LANES * k} + {lane}]" if self.lanes else self.entry(*fold.place, part)
            text.append(f"{target} = {OPERATIONS[fold.reduction].text.format(target, f'f{k}')}")
        return text

    def _before(self) -> list[str]:
        if self.lanes and not self._by_rows:
            return self._first_lanes()
        text = []
        for fold, part in self.folds:
            buffer = fold.place.buffer
            shape = self.schedule.buffers[buffer].shape
            for axis, n in enumerate(shape):
                text += indented([f"for i{axis} in range({n}):"], axis)
            first = number(FIRST[fold.reduction])
            text += indented([f"{self.entry(buffer, identity(len(shape)), part)} = {first}"], len(shape))
        return text

    def _first_lanes(self) -> list[str]:
        text = []
        for k, (fold, _) in enumerate(self.folds):
            text += [f"for l in range({LANES}):", *indented([f"w[{LANES * k} + l] = {number(FIRST[fold.reduction])}"])]
        return text

    def _combined_lanes(self) -> list[str]:
        """Return the lines that combine the partial results, for rows also with the result for earlier indices."""
        text = []
        for k, (fold, part) in enumerate(self.folds):
            width, target, combined = LANES, self.entry(*fold.place, part), OPERATIONS[fold.reduction].text
            while width > 1:
                width //= 2
                both = combined.format(f"w[{LANES * k} + l]", f"w[{LANES * k + width} + l]")
                text += [f"for l in range({width}):", *indented([f"w[{LANES * k} + l] = {both}"])]
            result = f"w[{LANES * k}]"
            text.append(f"{target} = {combined.format(target, result) if self._by_rows else result}")
        return text

    def entry(self, buffer: int, map: IndexMap, part: int = 0, box: Known = ()) -> str:
        """Return the expression of a part of an entry; indices that aren't known in `box` are moved into the bounds."""
        name = self.buffers.setdefault(buffer, f"a{len(self.buffers)}")
        if not map:
            return f"{name}[{part}]"
        _, shape, dtype, *_ = self.schedule.buffers[buffer]
        *rows, last = [self._index(axis, n, box) for axis, n in zip(map, shape)]
        return f"{name}[{', '.join([*rows, last if parts_of(dtype) == 1 else f'2 * ({last}) + {part}'])}]"

    def _index(self, axis: Axis, length: int, box: Known) -> str:
        """Return the expression of an index along one axis, of which an array has `length` entries."""
        clamped = None in (box[axis.source : axis.source + 1] if isinstance(axis.source, int) else box)
        if axis.source is None:
            return str(min(max(axis.offset, 0), length - 1) if clamped else axis.offset)
        text = f"i{axis.source}"
        if isinstance(axis.source, Lookup):
            buffer, map = self.schedule.places[axis.source.node]
            text = self.entry(buffer, composed(map, axis.source.map), box=box)
        text = text if axis.stride == 1 else f"{axis.stride} * {text}"
        if axis.offset:
            text += f" {'+' if axis.offset > 0 else '-'} {abs(axis.offset)}"
        if clamped and isinstance(axis.source, int):  # an index that is looked up is within the bounds
            ends = axis.offset, axis.offset + axis.stride * (self.loop.shape[axis.source] - 1)
            text = f"max({text}, 0)" if min(ends) < 0 else text
            text = f"min({text}, {length - 1})" if max(ends) >= length else text
        return text


def _note(points: list[set[int]], axis: Axis, at: int) -> None:
    """Add the loop index at which the array index given by `axis` reaches `at`, or for a negative stride falls below it."""
    if not isinstance(axis.source, int) or not axis.stride:
        return
    distance = at - axis.offset
    first = -(-distance // axis.stride) if axis.stride > 0 else -distance // -axis.stride + 1
    indices = points[axis.source]
    if 0 < first < max(indices):
        indices.add(first)


def cut(box: Box, inner: Box, inside: list[Box], outside: list[Box]) -> None:
    """Divide a box: append its intersection with `inner` to `inside`, and boxes that make up the rest to `outside`."""
    left = list(box)
    for k, ((low, high), (first, last)) in enumerate(zip(box, inner)):
        first, last = min(max(first, low), high), max(min(last, high), low)
        if last <= first:
            outside.append(left)
            return
        for start, stop in ((low, first), (last, high)):
            if stop > start:
                outside.append([*left[:k], (start, stop), *left[k + 1 :]])
        left[k] = (first, last)
    inside.append(left)


def as_rows(boxes: Sequence[Box], width: int) -> Array:
    """Return boxes as an array of shape (n, width), where width is twice the number of axes."""
    return np.array([[place for pair in box for place in pair] for box in boxes], np.int64).reshape(len(boxes), width)


def divided(rows: Array, inner: Box) -> tuple[Array, Array]:
    """Return the intersections of boxes with `inner`, and boxes that make up the rest, as rows (see `as_rows`)."""
    inside: list[Box] = []
    outside: list[Box] = []
    for row in rows.tolist():
        cut(list(zip(row[::2], row[1::2])), inner, inside, outside)
    return as_rows(inside, rows.shape[1]), as_rows(outside, rows.shape[1])


class LoopBody:
    """A scalar program that computes the stores and folds of a loop at one index; for `box` see `LoopText._nest`."""

    def __init__(self, writer: LoopText, box: Known):
        self.writer, self.nodes, self.box = writer, writer.nodes, box
        self.builder = Builder(single=writer.real == np.float32)
        self.loads: dict[tuple[int, IndexMap, int], int] = {}  # numbers of the parts of entries (see `LoopText.entry`)
        self._known: dict[tuple[int, IndexMap], Symbol] = {}

    def text(self) -> list[str]:
        """Return the lines that load, compute and store; they assign the values to be folded to f0, f1, ..."""
        loop, writer = self.writer.loop, self.writer
        outputs, targets = [], []
        for item in loop.items:
            read = item.copies and item.node not in loop.inside
            entry = self._load(item.node, item.reads) if read else self.value(item.of, item.reads)
            entry = entry.as_number() if item.reduction else entry
            for part, x in enumerate((entry.real, entry.imag) if entry.is_complex else (entry,)):
                outputs.append(x.number)
                place = f"f{writer.folds.index((item, part))}" if item.reduction else writer.entry(*item.place, part)
                targets.append(place)
        writer.loads.update((buffer, map) for buffer, map, _ in self.loads)
        program = self.builder.program({"x": len(self.loads), "i": len(loop.shape)}, outputs)
        # The bodies use different names, since a variable has one type in the whole kernel.
        x, v = ("x", "v") if None not in self.box else ("y", "u") if not any(self.box) else ("z", "s")
        names = {"x": [f"{x}{k}" for k in range(len(self.loads))], "i": [f"t{k}" for k in range(len(loop.shape))]}
        inputs = {value for op, _, value in program.instructions if op == "input"}
        loads = []
        for (buffer, map, part), place in self.loads.items():
            if ("x", place) in inputs:
                text = writer.entry(buffer, map, part, self.box)
                loads.append(f"{x}{place} = {self._converted(buffer, text)}")
        loads += [f"t{k} = np.{writer.real.name}(i{k})" for k in range(len(loop.shape)) if ("i", k) in inputs]
        self._program, self._prefix = program, v
        return loads + lines(program, names, targets, dtype=writer.real, prefix=v)

    @property
    def booleans(self) -> set[str]:
        """The boolean variables of the text, once it has been written."""
        return {f"{self._prefix}{i}" for i, is_boolean in enumerate(lowered(self._program).booleans) if is_boolean}

    def _converted(self, buffer: int, text: str) -> str:
        dtype, real = self.writer.schedule.buffers[buffer].dtype, self.writer.real
        return text if dtype == BOOLEAN or PRECISIONS.get(dtype) == real else f"np.{real.name}({text})"

    def value(self, n: int, map: IndexMap) -> Symbol:
        """Return the symbol for an entry of node n; `map` computes its index from the loop's indices."""
        key = n, map
        if key not in self._known:
            self._known[key] = self._load(n, map) if self.writer.is_load(n) else self._computed(n, map)
        return self._known[key]

    def _load(self, n: int, map: IndexMap) -> Symbol:
        place = self.writer.place_of(n)
        key, dtype = (place.buffer, composed(place.map, map)), self.nodes[n].dtype
        real, *imag = [
            Symbol(self.builder, self.builder.input("x", self.loads.setdefault((*key, part), len(self.loads))))
            for part in range(parts_of(dtype))
        ]
        return real.plus_i(*imag) if imag else real.of_kind(dtype.kind)

    def _computed(self, n: int, map: IndexMap) -> Symbol:
        node = self.nodes[n]
        if node.kind == "number":
            return Symbol(self.builder, number_of(self.builder, node.data)).of_kind(node.dtype.kind)
        if node.kind == "elementwise":
            operands = [self.value(x, composed(broadcast(self.nodes[x].shape, node.shape), map)) for x in node.inputs]
            return node.data[1](*operands).of_kind(node.dtype.kind)
        if node.kind in ("view", "gather"):
            ((x, inner),) = reads_of(self.writer.schedule.program, node)
            return self.value(x, composed(inner, map))
        if node.kind == "join":
            return self._joined(node, map)
        return self._updated(node.inputs, node.data, map)  # the remaining kind is "update"

    def _joined(self, node: Node, map: IndexMap) -> Symbol:
        parts, axis, starts = node.inputs, node.data, self.writer.schedule.program.bounds_of(node)
        known = self._known_index(map[axis])

        def entry(k: int) -> Symbol:
            return self.value(parts[k], shifted(map, axis, -starts[k]))

        if known is not None:
            return entry(bisect(starts, known) - 1)
        result = entry(len(parts) - 1)
        for k in range(len(parts) - 1)[::-1]:
            result = choose(self._index(map[axis]) < float(starts[k + 1]), entry(k), result)
        return result

    def _updated(self, inputs: Sequence[int], starts: Sequence[int], map: IndexMap) -> Symbol:
        base, block = inputs
        conditions = []
        for axis, start, n, length in zip(map, starts, self.nodes[block].shape, self.nodes[base].shape):
            known = self._known_index(axis)
            if known is None:
                if start > 0:
                    conditions.append(self._index(axis) >= float(start))
                if start + n < length:
                    conditions.append(self._index(axis) < float(start + n))
            elif not start <= known < start + n:
                return self.value(base, map)
        inner = self.value(block, within(map, starts))
        return choose(reduce(and_, conditions), inner, self.value(base, map)) if conditions else inner

    def _known_index(self, axis: Axis) -> int | None:
        """Return an index as a number, which selects a branch when the text is generated; None if it isn't known."""
        # If all indices of the box select the same branch, the first one stands for the others.
        known = None if axis.source is None else self.box[axis.source]  # type: ignore[index]
        if axis.source is None:
            return axis.offset
        return None if known is None else axis.stride * known[0] + axis.offset

    def _index(self, axis: Axis) -> Symbol:
        i = Symbol(self.builder, self.builder.input("i", axis.source))  # type: ignore[arg-type]
        index = i if axis.stride == 1 else i * float(axis.stride)
        return index + float(axis.offset) if axis.offset else index
