"""Tiling: consecutive loops over large arrays run in tiles, and read each other's results from the cache.

A tile is a range of indices along the first axis. All loops compute their first tile, then all compute their second one,
and so on. The tiles of a loop end a few indices earlier than those of an earlier loop if it reads neighboring entries of
what that loop writes, or overwrites entries that it reads (skewed tiles, also called wavefront tiling).

Messages separate loops from each other. An exchange that only sets the halo to constants, as on a rank without neighbors,
runs before all tiles, so that the loops of several time steps are tiled together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpiad._typing import Shape
from mpiad.programs.array_program import IndexMap, beginning_at
from mpiad.programs.fusion import Loop, Schedule, root_of
from mpiad.programs.loops import Box, LoopText, as_rows, cut
from mpiad.programs.memory_plan import Allocation
from mpiad.programs.overlap import Action

_TILE = 1 << 15  # minimum number of entries of an array in a tile
_CACHE = 1 << 22  # bytes of all arrays that loops in tiles may use at a time: a part of the last level of the cache


class _Memory(NamedTuple):
    # The memory of a buffer, whose planes (entries with the same first index) follow each other.
    pool: int  # 0 for memory of the replay, 1 for scratch memory, 2 + b for the own memory of buffer b
    start: int  # the first byte
    shape: Shape
    dtype: np.dtype
    pitch: int  # entries from one row to the next

    @property
    def plane(self) -> int:
        """The bytes of a plane."""
        return math.prod(self.shape[1:-1]) * self.pitch * self.dtype.itemsize

    def overlaps(self, other: _Memory) -> bool:
        stop, other_stop = (x.start + x.plane * math.prod(x.shape[:1]) for x in (self, other))
        return self.pool == other.pool and self.start < other_stop and other.start < stop


class _Access(NamedTuple):
    # A read or write of a loop. At index i along its first axis, the loop uses plane i + offset; -inf: it uses others, too.
    memory: _Memory
    offset: float
    writes: bool


class _Span(NamedTuple):
    # The planes that loops in tiles use at a time, relative to the end of a tile.
    lowest: float
    highest: float
    lowest_written: float  # inf if no loop writes to this memory


class _Tiler:
    # Collects consecutive loops, with the ends of their tiles relative to those of the first loop.
    def __init__(self, schedule: Schedule, texts: Sequence[LoopText | None], allocations: dict[int, Allocation]):
        self.schedule, self.texts, self.allocations = schedule, texts, allocations
        self.actions: list[Action] = []
        self.loops: list[tuple[Action, int]] = []
        self.height = 1  # the number of planes in a tile
        self.spans: dict[_Memory, _Span] = {}
        self.early = self._early()

    def append(self, action: Action) -> None:
        at, text = action.at, self.texts[action.at]
        if self.loops and self.schedule.part(at) != self.schedule.part(self.loops[0][0].at):
            self.flush()
        if text is not None and text.divisible and len(action.shares) == 1 and len(text.loop.shape) > 1:
            accesses = self._accesses(text)
            if not self._collected(action, accesses):
                self.flush()
                self._collected(action, accesses)
            return
        if at not in self.early:
            self.flush()
        self.actions.append(action)  # if it is early: before the tiles

    def flush(self) -> None:
        """Append the tiles of the collected loops."""
        shapes = [self.schedule.steps[action.at].shape for action, _ in self.loops]
        done, end = [0] * len(shapes), 0
        while done != [shape[0] for shape in shapes]:
            end += self.height if len(shapes) > 1 else shapes[0][0]
            for k, ((action, shift), shape) in enumerate(zip(self.loops, shapes)):
                start, done[k] = done[k], min(max(end + shift, 0), shape[0])
                boxes = [_cut(rows, start, done[k], shape) for rows in action.shares[0]]
                if any(map(len, boxes)):
                    self.actions.append(Action("loop", action.at, (tuple(boxes),)))
        self.loops, self.spans = [], {}

    def _collected(self, action: Action, accesses: Sequence[_Access]) -> bool:
        """Collect a loop, if it can be computed in tiles together with the collected loops, and these use little memory."""
        shift = 0.0
        for memory, offset, writes in accesses:
            for other, span in self.spans.items():
                bound = span.lowest if writes else span.lowest_written
                if bound < math.inf and memory.overlaps(other):
                    shift = min(shift, bound - offset if memory == other and offset > -math.inf else -math.inf)
        spans = dict(self.spans)
        for memory, offset, writes in accesses:
            at = shift + offset
            lowest, highest, lowest_written = spans.get(memory, (math.inf, -math.inf, math.inf))
            written = min(lowest_written, at) if writes else lowest_written
            spans[memory] = _Span(min(lowest, at), max(highest, at), written)
        used = sum(memory.plane * (span.highest - span.lowest + self.height) for memory, span in spans.items())
        if self.loops and (shift == -math.inf or used > _CACHE):
            return False
        if not self.loops:
            self.height = -(-_TILE // math.prod(self.schedule.steps[action.at].shape[1:]))
        self.loops.append((action, int(shift)))
        self.spans = spans
        return True

    def _memory(self, buffer: int) -> _Memory:
        b = root_of(self.schedule.buffers, buffer)
        found, place = self.schedule.buffers[b], self.allocations.get(b)
        if place is None:
            return _Memory(2 + b, 0, found.shape, found.dtype, math.prod(found.shape[-1:]))
        return _Memory(int(place.is_scratch), place.start, found.shape, found.dtype, place.pitch)

    def _accesses(self, text: LoopText) -> list[_Access]:
        used = [(b, map, False) for b, map in text.loads]
        used += [(item.place.buffer, item.place.map, True) for item in text.loop.items]
        made = []
        for b, map, writes in used:
            axis, memory = map[0] if map else None, self._memory(b)
            by_planes = axis is not None and axis[:2] == (0, 1) and self.schedule.buffers[b].shape == memory.shape
            made.append(_Access(memory, axis.offset if by_planes else -math.inf, writes))  # type: ignore[union-attr]
        looked_up = set(text.buffers) - {b for b, *_ in used}  # arrays of indices
        return made + [_Access(self._memory(b), -math.inf, False) for b in looked_up]

    def _early(self) -> set[int]:
        """Return the exchanges that may run before a sequence of loops, since they only set halos to constants."""
        # Nothing else may write to these halos. If another buffer overlaps the memory, its loops aren't in the sequence:
        # they can't be tiled with the loop that writes the exchanged block.
        exchanges: dict[_Memory, list[int]] = {}
        writes: dict[_Memory, set[tuple[Shape, IndexMap]]] = {}
        for at, step in enumerate(self.schedule.steps):
            if isinstance(step, Loop):
                for item in step.items:
                    writes.setdefault(self._memory(item.place.buffer), set()).add((step.shape, item.place.map))
            elif step.in_place:
                exchanges.setdefault(self._memory(step.inputs[0]), []).append(at)
        early: set[int] = set()
        for memory, steps in exchanges.items():
            nodes = [self.schedule.program.nodes[self.schedule.steps[at].node] for at in steps]
            calls = [(node.data.fun, *node.data.args[1:]) for node in nodes]
            (operator, *rest), block = calls[0], self.schedule.program.nodes[nodes[0].inputs[0]].shape
            start = operator.in_place.given(*rest)
            inside = {(block, beginning_at((0,) * (len(block) - len(start)) + tuple(start)))}
            if operator.in_place.constant(*rest) and all(call == calls[0] for call in calls) and writes[memory] <= inside:
                early.update(steps)
        return early


def _cut(rows: np.ndarray, start: int, stop: int, shape: Shape) -> np.ndarray:
    """Return the parts of boxes (see `LoopText`) whose first index is in a range."""
    inside: list[Box] = []
    for row in rows.tolist():
        cut(list(zip(row[::2], row[1::2])), [(start, stop), *[(0, n) for n in shape[1:]]], inside, [])
    return as_rows(inside, rows.shape[1])


def tiled(
    schedule: Schedule, texts: Sequence[LoopText | None], allocations: dict[int, Allocation], actions: Sequence[Action]
) -> list[Action]:
    """Return the actions of a program, with consecutive loops over large arrays in tiles."""
    tiler = _Tiler(schedule, texts, allocations)
    for action in actions:
        tiler.append(action)
    tiler.flush()
    return tiler.actions
