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
from mpiad.programs.loops import LoopText, divided
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
        return math.prod(self.shape[1:-1]) * (self.pitch if len(self.shape) > 1 else 1) * self.dtype.itemsize

    def overlaps(self, other: _Memory) -> bool:
        stop, other_stop = (x.start + x.plane * math.prod(x.shape[:1]) for x in (self, other))
        return self.pool == other.pool and self.start < other_stop and other.start < stop


class _Tiler:
    # Collects consecutive loops, with the ends of their tiles relative to those of the first loop.
    def __init__(self, schedule: Schedule, texts: Sequence[LoopText | None], allocations: dict[int, Allocation]):
        self.schedule, self.texts, self.allocations = schedule, texts, allocations
        self.actions: list[Action] = []
        self.loops: list[tuple[Action, int]] = []
        self.height = 1  # the number of planes in a tile
        # For each memory the first and last plane in use, and the first one that is written, relative to the end of a tile;
        # inf if no plane is written.
        self.spans: dict[_Memory, tuple[float, float, float]] = {}
        self.early = self._early()

    def append(self, action: Action) -> None:
        at, text = action.at, self.texts[action.at]
        if self.loops and self.schedule.part(at) != self.schedule.part(self.loops[0][0].at):
            self.flush()
        if text is not None and text.divisible and len(action.shares) == 1 and len(text.loop.shape) > 1:
            if not self._collected(action, text):
                self.flush()
                self._collected(action, text)
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
                inner = [(start, done[k]), *[(0, n) for n in shape[1:]]]
                boxes = [divided(rows, inner)[0] for rows in action.shares[0]]
                if any(map(len, boxes)):
                    self.actions.append(Action("loop", action.at, (tuple(boxes),)))
        self.loops, self.spans = [], {}

    def _collected(self, action: Action, text: LoopText) -> bool:
        """Collect a loop if it can share the tiles of the collected loops and they use little memory; return whether."""
        shift, accesses = 0.0, self._accesses(text)
        for memory, offset, writes in accesses:
            for other, (lowest, _, written) in self.spans.items():
                bound = lowest if writes else written
                if bound < math.inf and memory.overlaps(other):
                    shift = min(shift, bound - offset if memory == other and offset > -math.inf else -math.inf)
        spans = dict(self.spans)
        for memory, offset, writes in accesses:
            lowest, highest, written = spans.get(memory, (math.inf, -math.inf, math.inf))
            at, last = shift + offset, shift + max(offset, 0)
            spans[memory] = min(lowest, at), max(highest, last), min(written, at) if writes else written
        used = sum(
            x.plane * min(highest - lowest + self.height, math.prod(x.shape[:1]))
            for x, (lowest, highest, _) in spans.items()
        )
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

    def _accesses(self, text: LoopText) -> list[tuple[_Memory, float, bool]]:
        """Return reads and writes: at index i, a loop uses plane i + offset of a memory; -inf if it uses other planes."""
        used = [(b, map, False) for b, map in text.loads]
        used += [(item.place.buffer, item.place.map, True) for item in text.loop.items]
        made = []
        for b, map, writes in used:
            axis, memory = map[0] if map else None, self._memory(b)
            by_planes = axis is not None and axis[:2] == (0, 1) and self.schedule.buffers[b].shape == memory.shape
            made.append((memory, axis.offset if by_planes else -math.inf, writes))  # type: ignore[union-attr]
        looked_up = set(text.buffers) - {b for b, *_ in used}  # arrays of indices
        return made + [(self._memory(b), -math.inf, False) for b in looked_up]

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
            # Zeros of both signs are equal, but differ in text.
            alike = all(call == calls[0] and repr(call) == repr(calls[0]) for call in calls)
            if alike and operator.in_place.constant(*rest) and writes[memory] <= inside:
                early.update(steps)
        return early


def tiled(
    schedule: Schedule, texts: Sequence[LoopText | None], allocations: dict[int, Allocation], actions: Sequence[Action]
) -> list[Action]:
    """Return the actions of a program, with consecutive loops over large arrays in tiles."""
    tiler = _Tiler(schedule, texts, allocations)
    for action in actions:
        tiler.append(action)
    tiler.flush()
    return tiler.actions
