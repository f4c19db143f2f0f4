"""Allocation of memory for a program's temporary buffers. Buffers that aren't used at the same time share memory.

A loop may overwrite an array that isn't used afterwards, if it reads each entry at the index that it writes.

A replay that waits for its reverse pass keeps only the arrays that this pass reads. All other memory is scratch memory,
which is shared with other replays, of any program. For example, a time loop of a hundred steps needs a hundred replays for
its gradient, but scratch memory for one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple
from weakref import ReferenceType, ref

import numpy as np

from mpiad._typing import Array, Shape
from mpiad.programs.loops import LoopText
from mpiad.programs.schedule import Loop, Run, Schedule, Store, root_of

SMALL = 4096
"""Bytes up to which copying an array is faster than looking up its address."""


# Minimum number of bytes of scratch buffers in programs without a later part. And the maximum ratio of the size of reused
# memory to the required size, since a program keeps the memory that it uses alive.
_SHARED, _LARGER = 1 << 20, 4
# Bytes in a cache line, and in the longest rows that aren't padded.
_LINE, _SHORT = 64, 1024


class Layout(NamedTuple):
    """The layout of an array in memory that begins at a cache line."""

    pitch: int  # entries from one row to the next
    shift: int  # bytes before the array

    def of(self, memory: Array, shape: Shape, dtype: np.dtype) -> Array:
        """Return the array in this memory."""
        rows = math.prod(shape[:-1])
        whole = memory[self.shift :][: rows * self.pitch * dtype.itemsize].view(dtype)
        return whole.reshape(*shape[:-1], self.pitch)[..., : shape[-1]] if shape else whole.reshape(())


class Allocation(NamedTuple):
    """The memory of a temporary buffer."""

    memory: int  # number of the memory; buffers with the same number share it
    nbytes: int
    is_scratch: bool  # whether it is in scratch memory
    layout: Layout


class Scratch:
    """The scratch memory of a program, used by one run at a time."""

    # The free scratch memory of all programs. Memory is released with the last replay that has used it.
    _free: ClassVar[list[ReferenceType[Array]]] = []

    def __init__(self, allocations: dict[int, Allocation]):
        self._places: dict[int, int] = {}
        self._size = 0
        for allocation in allocations.values():
            if allocation.is_scratch and allocation.memory not in self._places:
                self._places[allocation.memory] = self._size
                self._size += allocation.nbytes + -allocation.nbytes % _LINE

    def take(self) -> Array:
        """Return the last used free memory of suitable size, which is most likely in a cache, or allocate some."""
        others = []
        try:
            while True:
                reference = self._free.pop()
                memory = reference()
                if memory is not None and self._size <= memory.nbytes <= _LARGER * self._size:
                    return memory
                others += [reference] * (memory is not None)
        except IndexError:
            # Twice the required size, so that larger programs can use it, too; unused pages take no physical memory.
            return aligned(2 * self._size)
        finally:
            self._free.extend(others[::-1])

    def give_back(self, memory: Array) -> None:
        """Return memory to the free list."""
        self._free.append(ref(memory))

    def part(self, memory: Array, allocation: Allocation) -> Array:
        """Return the part of scratch memory for an allocation."""
        return memory[self._places[allocation.memory] :][: allocation.nbytes]


def allocate(schedule: Schedule, texts: Sequence[LoopText | None]) -> dict[int, Allocation]:
    """Return the memory of each temporary buffer."""
    spans = spans_of(schedule, texts)
    # A buffer that overwrites another one is in use from the first use of the other.
    first = {}
    for text in texts:
        if text is not None and text.over:
            b, c = text.over
            first[b] = first.get(c, c)
            spans[first[b]] += spans.pop(b)
    layouts = _layouts(schedule, spans, first)
    last = len(schedule.steps)
    ends: list[int] = []  # the last step that uses each memory
    memories: list[tuple[int, bool]] = []  # bytes, and whether it is scratch
    allocations: dict[int, Allocation] = {}
    for buffer in sorted((b for b in spans if schedule.buffers[b].kind == "temporary"), key=lambda b: spans[b][0]):
        found, layout = schedule.buffers[buffer], layouts[buffer]
        nbytes = math.prod(found.shape[:-1]) * layout.pitch * found.dtype.itemsize + layout.shift
        start, end = spans[buffer][0], spans[buffer][-1]
        # Buffers that a later part reads from an earlier one are never reused, since the later part may run again. Small
        # buffers aren't scratch.
        is_scratch = nbytes > (SMALL if schedule.part(last - 1) > 0 else _SHARED)
        if schedule.part(start) < schedule.part(end):
            end, is_scratch = last, False
        free = [k for k, memory in enumerate(memories) if ends[k] < start and memory[1] == is_scratch]
        fitting = [k for k in free if nbytes <= memories[k][0] <= 2 * nbytes]
        # The last used memory is most likely in a cache.
        memory = max(fitting, key=lambda k: (memories[k][0] == nbytes, ends[k]), default=len(memories))
        if memory == len(memories):
            memories.append((nbytes, is_scratch))
            ends.append(end)
        ends[memory] = end
        allocations[buffer] = Allocation(memory, memories[memory][0], is_scratch, layout)
    return allocations | {b: allocations[c] for b, c in first.items()}


def aligned(nbytes: int) -> Array:
    """Return memory that is aligned to a cache line."""
    memory = np.empty(nbytes + _LINE, np.uint8)
    return memory[-memory.ctypes.data % _LINE :][:nbytes]


def _layouts(schedule: Schedule, spans: Iterable[int], first: dict[int, int]) -> dict[int, Layout]:
    """Return layouts in which the rows that loops write begin at cache lines."""
    buffers, shifts = schedule.buffers, {}
    # Arguments of calls that don't work in place, and buffers with aliases of another shape, must be contiguous.
    dense = {first.get(found.data, found.data) for found in buffers if found.kind == "alias"}
    for step in schedule.steps:
        if isinstance(step, Run):
            dense |= set() if step.in_place else {first.get(b, b) for b in step.inputs}
            continue
        for item in step.items:
            b, map = item.place
            if map and map[-1].source is not None:
                shifts.setdefault(first.get(b, b), -map[-1].offset * buffers[b].dtype.itemsize % _LINE)
    made = {}
    for b in spans:
        shape, itemsize = buffers[b].shape, buffers[b].dtype.itemsize
        pitch = shape[-1] if shape else 1
        if len(shape) > 1 and b not in dense and pitch * itemsize > _SHORT:
            pitch += -pitch % (_LINE // itemsize)
            # Rows at the same offset in their pages would evict one another from the cache.
            pitch += _LINE // itemsize * (pitch * itemsize % SMALL == 0)
        made[b] = Layout(pitch, shifts.get(b, 0))
    return made


def spans_of(schedule: Schedule, texts: Sequence[LoopText | None]) -> dict[int, list[int]]:
    """Return the steps that use each buffer."""
    spans: dict[int, list[int]] = {}
    for at, (step, text) in enumerate(zip(schedule.steps, texts)):
        for buffer in step.inputs if isinstance(step, Run) else text.buffers:  # type: ignore[union-attr]
            spans.setdefault(root_of(schedule.buffers, buffer), []).append(at)
    return spans


def with_overwriting(schedule: Schedule, texts: Sequence[LoopText | None]) -> list[LoopText | None]:
    """Return the texts of loops, changed to overwrite input buffers that aren't used afterwards, if possible.

    For example, the new field of a time step overwrites the field before the last, so the loop accesses one array less.
    """
    spans = spans_of(schedule, texts)
    has_other_shapes = {found.data for found in schedule.buffers if found.kind == "alias"}
    own = {b for b in spans if schedule.buffers[b].kind == "temporary" and b not in has_other_shapes}
    made = list(texts)
    for at, (step, text) in enumerate(zip(schedule.steps, texts)):
        if text is None or not isinstance(step, Loop):
            continue
        for item in step.items:
            b, map = item.place
            several = sum(other.place.buffer == b for other in step.items) > 1
            # A store writes each entry once, but a fold updates entries repeatedly.
            if not isinstance(item, Store) or several or b not in own or spans[b][0] != at:
                continue
            for c in own & set(text.buffers) - text.written:
                # A later part may run again, and needs the buffers that it reads from an earlier one.
                same_part = schedule.part(spans[c][0]) == schedule.part(at)
                alike = schedule.buffers[b] == schedule.buffers[c]
                if alike and same_part and spans[c][-1] == at and {m for x, m in text.loads if x == c} == {map}:
                    made[at] = text = _over(text, b, c)
                    break
            if text.over:
                break
    return made


def _over(text: LoopText, b: int, c: int) -> LoopText:
    """Return a loop in which buffer c is replaced by buffer b."""
    place = text.buffers.index(c)
    old, new = text.arguments[place][0], text.arguments[text.buffers.index(b)][0]
    return text._replace(
        body=re.sub(rf"\b{old}\[", f"{new}[", text.body),
        arguments=text.arguments[:place] + text.arguments[place + 1 :],
        buffers=text.buffers[:place] + text.buffers[place + 1 :],
        loads=frozenset((b if x == c else x, map) for x, map in text.loads),
        over=(b, c),
    )
