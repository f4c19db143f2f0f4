"""The body of a loop: loads at shifted indices, and one scalar program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.builder import Builder
from mpiad.compiling.source import lines
from mpiad.compiling.symbols import Symbol, choose
from mpiad.programs.array_program import BOOLEAN, described
from mpiad.programs.index_maps import Axis, IndexMap, broadcast, composed, shifted, within
from mpiad.programs.schedule import Fold

if TYPE_CHECKING:
    from mpiad.programs.loops import LoopWriter

Box = Sequence[tuple[int, int]]
"""First and last place along each axis."""


def cut(box: Box, inner: Box, inside: list[Box], outside: list[Box]) -> None:
    """Append the part of a box within another one, and the boxes around that."""
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
    """Return boxes as an array of shape (n, 2 d), as kernels require."""
    return np.array([[place for pair in box for place in pair] for box in boxes], np.int64).reshape(len(boxes), width)


class LoopBody:
    """A scalar program that computes the stores and folds of a loop at one index."""

    def __init__(self, writer: LoopWriter, box: Box | None, edges: bool):
        self.writer, self.nodes, self.box, self.edges = writer, writer.nodes, box, edges
        self.builder = Builder()
        self.loads: dict[tuple[int, IndexMap], int] = {}
        self._known: dict[tuple[int, IndexMap], Symbol] = {}

    def text(self) -> list[str]:
        """Return the lines that load, compute and store; folds are left in f0, f1 and so on."""
        loop, writer = self.writer.loop, self.writer
        outputs, targets, folds = [], [], 0
        for item in loop.items:
            if isinstance(item, Fold):
                outputs.append(self.value(item.of, item.reads).as_number().number)
                targets.append(f"f{folds}")
                folds += 1
            else:
                read = item.copies and item.node not in loop.inside
                made = self._load(item.node, item.reads) if read else self.value(item.node, item.reads)
                outputs.append(made.number)
                targets.append(writer.entry(item.place.buffer, item.place.map))
        writer.loads.update(self.loads)
        groups = {"x": len(self.loads), "i": len(loop.shape)}
        program = self.builder.program(groups, outputs)
        # A variable has the same kind in the whole kernel, so each body has names of its own.
        x, v = ("y", "u") if self.edges else ("x", "v")
        names = {"x": [f"{x}{k}" for k in range(len(self.loads))], "i": [f"t{k}" for k in range(len(loop.shape))]}
        used = {value for op, _, value in program.instructions if op == "input"}
        made_lines = []
        for (buffer, map), place in self.loads.items():
            if ("x", place) in used:
                made_lines.append(f"{x}{place} = {self._converted(buffer, writer.entry(buffer, map, self.edges))}")
        made_lines += [f"t{k} = np.{writer.real.name}(i{k})" for k in range(len(loop.shape)) if ("i", k) in used]
        return made_lines + lines(program, names, targets, dtype=writer.real, prefix=v)

    def _converted(self, buffer: int, text: str) -> str:
        dtype = self.writer.schedule.buffers[buffer].dtype
        return text if dtype in (BOOLEAN, self.writer.real) else f"np.{self.writer.real.name}({text})"

    def value(self, n: int, map: IndexMap) -> Symbol:
        """Return the symbol of a node's entry."""
        key = n, map
        if key not in self._known:
            self._known[key] = self._load(n, map) if self.writer.is_load(n) else self._computed(n, map)
        return self._known[key]

    def _load(self, n: int, map: IndexMap) -> Symbol:
        place = self.writer.place_of(n)
        key = place.buffer, composed(place.map, map)
        number = self.builder.input("x", self.loads.setdefault(key, len(self.loads)))
        made = Symbol(self.builder, number)
        return made.truth() if self.nodes[n].dtype == bool else made

    def _computed(self, n: int, map: IndexMap) -> Symbol:
        node = self.nodes[n]
        if node.kind == "number":
            return Symbol(self.builder, self.builder.constant(node.data if node.dtype == bool else float(node.data)))
        if node.kind == "elementwise":
            given = [self.value(x, composed(broadcast(self.nodes[x].shape, node.shape), map)) for x in node.inputs]
            made = node.data[1](*given)
            return made.truth() if node.dtype == bool else made.as_number()
        if node.kind == "view":
            return self.value(node.inputs[0], composed(node.data, map))
        if node.kind == "join":
            return self._joined(node.inputs, node.data, map)
        if node.kind == "update":
            return self._updated(node.inputs, node.data, map)
        raise AssertionError(f"{described(node)} isn't computed in loops")

    def _joined(self, parts: Sequence[int], axis: int, map: IndexMap) -> Symbol:
        start, made = 0, []
        for x in parts:
            stop = start + self.nodes[x].shape[axis]
            made.append((x, start, stop))
            start = stop
        at = map[axis]
        known = self._known_index(at)
        if known is not None:
            x, start, _ = next(part for part in made if part[1] <= known < part[2])
            return self.value(x, shifted(map, axis, -start))
        x, start, _ = made[-1]
        result = self.value(x, shifted(map, axis, -start))
        for x, start, stop in reversed(made[:-1]):
            result = choose(self._index(at) < float(stop), self.value(x, shifted(map, axis, -start)), result)
        return result

    def _updated(self, inputs: Sequence[int], starts: Sequence[int], map: IndexMap) -> Symbol:
        base, block = inputs
        conditions = []
        for axis, start, n, whole in zip(map, starts, self.nodes[block].shape, self.nodes[base].shape):
            known = self._known_index(axis)
            if known is None:
                if start > 0:
                    conditions.append(self._index(axis) >= float(start))
                if start + n < whole:
                    conditions.append(self._index(axis) < float(start + n))
            elif not start <= known < start + n:
                return self.value(base, map)
        inner = self.value(block, within(map, starts))
        if not conditions:
            return inner
        both = conditions[0]
        for other in conditions[1:]:
            both = both & other
        return choose(both, inner, self.value(base, map))

    def _known_index(self, axis: Axis) -> int | None:
        """Return an index that is one number, or that is on the same side of every break as in the box's first index."""
        if axis.source is None:
            return axis.offset
        return None if self.box is None else axis.stride * self.box[axis.source][0] + axis.offset

    def _index(self, axis: Axis) -> Symbol:
        i = Symbol(self.builder, self.builder.input("i", axis.source))  # type: ignore[arg-type]
        made = i if axis.stride == 1 else i * float(axis.stride)
        return made + float(axis.offset) if axis.offset else made
