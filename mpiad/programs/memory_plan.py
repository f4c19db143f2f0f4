"""Allocation of memory for a program's temporary buffers. Buffers that aren't used at the same time share memory.

If a loop is the last step that uses an array, and reads its entries only at the indices that it writes, it overwrites the
array. For example, the field at time n + 1 overwrites that at time n - 1, so that the loop accesses one array less.

A replay (an executable instance of a program) that waits for its reverse pass needs the arrays that this pass reads. Its
other large arrays are in scratch memory, which all replays of all programs share. For example, the gradient of a time loop
with a hundred steps needs a hundred replays, but scratch memory for one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import ClassVar, NamedTuple
from weakref import ReferenceType, ref

import numpy as np

from mpiad._typing import Array, Shape
from mpiad.compiling.arguments import aligned
from mpiad.programs.fusion import Run, Schedule, root_of
from mpiad.programs.loops import LoopText

SMALL = 4096  # bytes up to which copying an array is faster than looking up its address
_SHARED = 1 << 20  # in programs without a reverse pass, bytes above which a buffer is in scratch memory
_LARGER = 4  # maximum ratio of the size of scratch memory to the required size
_LINE, _SHORT, _PAGE = 64, 1024, 4096  # bytes in a cache line, in the longest rows that aren't padded, and in a page


class Allocation(NamedTuple):
    """The place of a temporary buffer in memory."""

    is_scratch: bool  # whether it is in scratch memory, otherwise in memory of the replay
    start: int  # the first byte of the array in that memory
    pitch: int  # entries from one row to the next

    def array(self, memory: Array, shape: Shape, dtype: np.dtype) -> Array:
        """Return the buffer's array in the given memory."""
        whole = memory[self.start :][: math.prod(shape[:-1]) * self.pitch * dtype.itemsize].view(dtype)
        return whole.reshape(*shape[:-1], self.pitch)[..., : shape[-1]] if shape else whole.reshape(())


class Scratch:
    """Scratch memory for the runs of a program, which needs `size` bytes."""

    # The free scratch memory of all programs. The references are weak: replays that have used a piece of memory keep it
    # alive.
    _free: ClassVar[list[ReferenceType[Array]]] = []

    def __init__(self, size: int):
        self.size = size

    def take(self, last: Array | None = None) -> Array:
        """Return free memory of suitable size, or allocate some: if possible `last`, to which a replay's buffers are bound.

        The next best is the memory that was used last, which is likely in a cache.
        """
        free: list[Array] = []
        with suppress(IndexError):
            while True:
                memory = self._free.pop()()
                if memory is not None:
                    free.append(memory)
        suitable = [memory for memory in free if self.size <= memory.nbytes <= _LARGER * self.size]
        taken = next((memory for memory in suitable if memory is last), suitable[0] if suitable else None)
        self._free.extend([ref(memory) for memory in reversed(free) if memory is not taken])
        # Twice the required size, so that larger programs can use this memory, too; unused pages take no memory.
        return aligned(2 * self.size, np.dtype(np.uint8), np.empty) if taken is None else taken

    def give_back(self, memory: Array) -> None:
        """Return memory to the free list."""
        self._free.append(ref(memory))


def overwrite(schedule: Schedule, texts: Sequence[LoopText | None]) -> None:
    """Change loops so that they overwrite large arrays that aren't used afterwards."""
    buffers, spans = schedule.buffers, spans_of(schedule, texts)
    has_other_shapes = {found.data for found in buffers if found.kind == "alias"}
    own = {b for b in spans if buffers[b].kind == "temporary" and buffers[b].nbytes > SMALL} - has_other_shapes
    for text in filter(None, texts):
        at = text.at
        # A later part of the program may run again, and then needs the buffers of an earlier part once more.
        here = [b for b in text.buffers if b in own and schedule.part(spans[b][0]) == schedule.part(at)]
        dead = [c for c in here if spans[c][-1] == at and c not in text.written]
        maps = {c: {map for b, map in text.loads if b == c} for c in dead}
        for b in [b for b in here if spans[b][0] == at and b in text.written]:
            # A reduction updates its result repeatedly. Two items write two parts of an array, at different indices.
            items = [item for item in text.loop.items if item.place.buffer == b]
            places, like = {items[0].place.map}, buffers[b]
            # A dead buffer may itself be an alias of one that it has overwritten.
            alike = [c for c in dead if (buffers[c].shape, buffers[c].dtype) == (like.shape, like.dtype)]
            c = next((c for c in alike if maps[c] == places), None)
            if c is not None and len(items) == 1 and not items[0].reduction:
                dead.remove(c)
                text.overwrite(c, b)
                buffers[b] = like._replace(kind="alias", data=c)


def allocate(schedule: Schedule, spans: dict[int, list[int]]) -> tuple[dict[int, Allocation], int, int]:
    """Return the memory of temporary buffers with these `spans_of`, and the bytes of a replay's and of scratch memory."""
    layouts, kept = _layouts(schedule, spans), schedule.kept
    last = len(schedule.steps)
    sizes = {False: 0, True: 0}
    ends: list[int] = []  # the last step that uses each piece of memory
    pieces: list[tuple[bool, int, int]] = []  # whether it is scratch, first byte, bytes
    allocations: dict[int, Allocation] = {}
    for buffer in sorted((b for b in spans if schedule.buffers[b].kind == "temporary"), key=lambda b: spans[b][0]):
        found, (pitch, shift) = schedule.buffers[buffer], layouts[buffer]
        nbytes = math.prod(found.shape[:-1]) * pitch * found.dtype.itemsize + shift
        start, end = spans[buffer][0], spans[buffer][-1]
        # If a later part of the program reads a buffer of an earlier part, the buffer's memory isn't reused, since the
        # later part may run several times. Small buffers aren't in scratch memory.
        is_scratch = nbytes > (SMALL if schedule.part(last - 1) > 0 else _SHARED)
        if schedule.part(start) < schedule.part(end) or buffer in kept:
            end, is_scratch = last, False
        free = [k for k, piece in enumerate(pieces) if ends[k] < start and piece[0] == is_scratch]
        fitting = [k for k in free if nbytes <= pieces[k][2] <= 2 * nbytes]
        # The memory that was used last is likely in a cache.
        piece = max(fitting, key=lambda k: (pieces[k][2] == nbytes, ends[k]), default=len(pieces))
        if piece == len(pieces):
            # At the same places of pages, rows of two arrays don't delay each other: a processor compares the last bits of
            # addresses to find out whether it loads what it has just stored.
            first = sizes[is_scratch] + -sizes[is_scratch] % (_PAGE if nbytes > SMALL else _LINE)
            pieces.append((is_scratch, first, nbytes))
            sizes[is_scratch] = first + nbytes
            ends.append(end)
        ends[piece] = end
        allocations[buffer] = Allocation(is_scratch, pieces[piece][1] + shift, pitch)
    return allocations, sizes[False], sizes[True]


def _layouts(schedule: Schedule, spans: Iterable[int]) -> dict[int, tuple[int, int]]:
    """Return for each buffer the pitch, and the bytes before it, with which rows written by loops begin at cache lines."""
    buffers, shifts = schedule.buffers, {}
    # Arguments of calls that don't work in place, and buffers that are also used in another shape, must be contiguous.
    roots = {b: root_of(buffers, b) for b, found in enumerate(buffers) if found.kind == "alias"}
    dense = {root for b, root in roots.items() if buffers[b].shape != buffers[root].shape} | schedule.kept
    for step in schedule.steps:
        if isinstance(step, Run):
            dense |= set() if step.in_place else {roots.get(b, b) for b in step.inputs}
            continue
        for item in step.items:
            b, map = item.place
            if map and map[-1].source is not None:
                shifts.setdefault(roots.get(b, b), -map[-1].offset * buffers[b].dtype.itemsize % _LINE)
    made = {}
    for b in spans:
        shape, itemsize = buffers[b].shape, buffers[b].dtype.itemsize
        pitch = shape[-1] if shape else 1
        if len(shape) > 1 and b not in dense and pitch * itemsize > _SHORT:
            pitch += -pitch % (_LINE // itemsize)
            # If rows were a multiple of a page apart, they would evict each other from the cache.
            pitch += _LINE // itemsize * (pitch * itemsize % _PAGE == 0)
        made[b] = pitch, shifts.get(b, 0)
    return made


def spans_of(schedule: Schedule, texts: Sequence[LoopText | None]) -> dict[int, list[int]]:
    """Return for each buffer the steps that use it, in order."""
    spans: dict[int, list[int]] = {}
    for at, (step, text) in enumerate(zip(schedule.steps, texts)):
        for buffer in step.inputs if isinstance(step, Run) else text.buffers:  # type: ignore[union-attr]
            spans.setdefault(root_of(schedule.buffers, buffer), []).append(at)
    for buffer in schedule.kept:
        spans.setdefault(buffer, []).append(len(schedule.steps))
    return spans
