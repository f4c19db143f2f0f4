"""Which memory the temporary buffers of a program are in: what one needs no more is another one's.

A loop may write over an array that nobody needs any more, where it reads each entry in its own place.

A replay that waits for its reverse pass keeps what that reads. The rest is scratch memory, which the next replay uses in
the meantime, of this program or another: a loop of a hundred steps has a hundred replays, and scratch memory once.
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
"""Bytes of an array that is copied sooner than its address is found."""


# From so many bytes on an array is worth sharing where nothing else runs in the meantime; and by how much the memory of
# another program may be larger, which this one keeps from being freed.
_SHARED, _LARGER = 1 << 20, 4
# Bytes that a processor loads at once; and of rows that aren't worth a gap behind them.
_LINE, _SHORT = 64, 1024


class Layout(NamedTuple):
    """How an array lies in memory that begins at a line."""

    pitch: int  # entries from a row to the next
    shift: int  # bytes before it

    def of(self, memory: Array, shape: Shape, dtype: np.dtype) -> Array:
        """Return the array."""
        rows = math.prod(shape[:-1])
        whole = memory[self.shift :][: rows * self.pitch * dtype.itemsize].view(dtype)
        return whole.reshape(*shape[:-1], self.pitch)[..., : shape[-1]] if shape else whole.reshape(())


class Home(NamedTuple):
    """Which memory a temporary buffer is in."""

    memory: int
    nbytes: int
    is_scratch: bool  # whether it is one that replays have in common
    layout: Layout


class Scratch:
    """Scratch memory of a program, used by one run at a time; made where none that is free has about its size."""

    # Of all programs. It is there as long as a replay is that has used it.
    _free: ClassVar[list[ReferenceType[Array]]] = []

    def __init__(self, homes: dict[int, Home]):
        self._places: dict[int, int] = {}
        self._size = 0
        for home in homes.values():
            if home.is_scratch and home.memory not in self._places:
                self._places[home.memory] = self._size
                self._size += home.nbytes + -home.nbytes % _LINE

    def take(self) -> Array:
        """Return memory that is free, and about as large; the latest, which is the likeliest to be in a cache."""
        others = []
        try:
            while True:
                reference = self._free.pop()
                memory = reference()
                if memory is not None and self._size <= memory.nbytes <= _LARGER * self._size:
                    return memory
                others += [reference] * (memory is not None)
        except IndexError:
            # What nobody writes to is only an address; a larger program finds room there.
            return aligned(2 * self._size)
        finally:
            self._free.extend(others[::-1])

    def give_back(self, memory: Array) -> None:
        """Take memory back."""
        self._free.append(ref(memory))

    def part(self, memory: Array, home: Home) -> Array:
        """Return which part of it a home is."""
        return memory[self._places[home.memory] :][: home.nbytes]


def homes_of(schedule: Schedule, texts: Sequence[LoopText | None]) -> dict[int, Home]:
    """Return the memory of temporary buffers: what one needs no more is another one's."""
    spans = spans_of(schedule, texts)
    # What is written over another one is there from the first of them on.
    first = {}
    for text in texts:
        if text is not None and text.over:
            b, c = text.over
            first[b] = first.get(c, c)
            spans[first[b]] += spans.pop(b)
    layouts = _layouts(schedule, spans, first)
    last = len(schedule.steps)
    free: list[tuple[int, int, int, bool]] = []  # (from which step on, bytes, memory, whether it is scratch)
    homes: dict[int, Home] = {}
    memories = 0
    ends: list[tuple[int, int, int, bool]] = []
    for buffer in sorted((b for b in spans if schedule.buffers[b].kind == "temporary"), key=lambda b: spans[b][0]):
        found, layout = schedule.buffers[buffer], layouts[buffer]
        nbytes = math.prod(found.shape[:-1]) * layout.pitch * found.dtype.itemsize + layout.shift
        start, end = spans[buffer][0], spans[buffer][-1]
        # What the later part reads of the first is there for as long as that may be run again. Small ones aren't worth it.
        is_scratch = nbytes > (SMALL if schedule.part(last - 1) > 0 else _SHARED)
        if schedule.part(start) < schedule.part(end):
            end, is_scratch = last, False
        ready = [entry for entry in ends if entry[0] < start]
        for entry in ready:
            ends.remove(entry)
            free.append(entry)
        fitting = [entry for entry in free if nbytes <= entry[1] <= 2 * nbytes and entry[3] == is_scratch]
        if fitting:
            # The one that was used last is the likeliest to be in a cache.
            entry = max(fitting, key=lambda entry: (entry[1] == nbytes, entry[0]))
            free.remove(entry)
            size, memory = entry[1], entry[2]
        else:
            size, memory = nbytes, memories
            memories += 1
        homes[buffer] = Home(memory, size, is_scratch, layout)
        ends.append((end, size, memory, is_scratch))
    return homes | {b: homes[c] for b, c in first.items()}


def aligned(nbytes: int) -> Array:
    """Return memory that begins at a line."""
    memory = np.empty(nbytes + _LINE, np.uint8)
    return memory[-memory.ctypes.data % _LINE :][:nbytes]


def _layouts(schedule: Schedule, spans: Iterable[int], first: dict[int, int]) -> dict[int, Layout]:
    """Return layouts in which loops write their rows from the start of a line on."""
    buffers, shifts = schedule.buffers, {}
    # What is called, other than in place, or has another shape, too, lies without gaps.
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
            # Rows at the same place of their pages would push one another out of the cache.
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


def written_over(schedule: Schedule, texts: Sequence[LoopText | None]) -> list[LoopText | None]:
    """Return the texts of loops, in which one array stands for what is read and what is written over it.

    A field of a time step goes where the one before the last was, so that the loop passes over one array less.
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
            # A store meets each entry once; a fold, the same ones again and again.
            if not isinstance(item, Store) or several or b not in own or spans[b][0] != at:
                continue
            for c in own & set(text.buffers) - text.written:
                # The later part may be run again, with what it reads of the first.
                same_part = schedule.part(spans[c][0]) == schedule.part(at)
                alike = schedule.buffers[b] == schedule.buffers[c]
                if alike and same_part and spans[c][-1] == at and {m for x, m in text.loads if x == c} == {map}:
                    made[at] = text = _over(text, b, c)
                    break
            if text.over:
                break
    return made


def _over(text: LoopText, b: int, c: int) -> LoopText:
    """Return a loop whose buffer c is b."""
    place = text.buffers.index(c)
    old, new = text.arguments[place][0], text.arguments[text.buffers.index(b)][0]
    return text._replace(
        body=re.sub(rf"\b{old}\[", f"{new}[", text.body),
        arguments=text.arguments[:place] + text.arguments[place + 1 :],
        buffers=text.buffers[:place] + text.buffers[place + 1 :],
        loads=frozenset((b if x == c else x, map) for x, map in text.loads),
        over=(b, c),
    )
