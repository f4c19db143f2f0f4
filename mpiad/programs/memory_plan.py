"""Which memory the temporary buffers of a program are in: what one needs no more is another one's.

A replay that waits for its reverse pass keeps what that reads. The rest is scratch memory, which the next replay of the
program uses in the meantime: a loop of a hundred steps has a hundred replays, and scratch memory once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.programs.loops import LoopText
from mpiad.programs.schedule import Run, Schedule, root_of

__all__ = ["SMALL", "Home", "Scratch", "homes_of"]

SMALL = 4096
"""Bytes of an array that is copied sooner than its address is found."""


class Home(NamedTuple):
    """Which memory a temporary buffer is in.

    Parameters
    ----------
    memory, nbytes : int
    is_scratch : bool
        Whether it is one that replays have in common.
    """

    memory: int
    nbytes: int
    is_scratch: bool


class Scratch:
    """Scratch memory of a program, used by one run at a time; made again where all of it is in use."""

    def __init__(self, homes: dict[int, Home]):
        self._sizes = {home.memory: home.nbytes for home in homes.values() if home.is_scratch}
        self._free: list[dict[int, Array]] = []

    def take(self) -> dict[int, Array]:
        """Return memories, by their numbers."""
        try:
            return self._free.pop()
        except IndexError:
            return {memory: np.empty(nbytes, np.uint8) for memory, nbytes in self._sizes.items()}

    def give_back(self, memories: dict[int, Array]) -> None:
        """Take memories back."""
        self._free.append(memories)


def homes_of(schedule: Schedule, texts: Sequence[LoopText | None]) -> dict[int, Home]:
    """Return the memory of temporary buffers: what one needs no more is another one's."""
    spans: dict[int, list[int]] = {}
    for at, (step, text) in enumerate(zip(schedule.steps, texts)):
        used = step.inputs if isinstance(step, Run) else text.buffers  # type: ignore[union-attr]
        for buffer in used:
            spans.setdefault(root_of(schedule.buffers, buffer), []).append(at)
    last = len(schedule.steps)
    free: list[tuple[int, int, int, bool]] = []  # (from which step on, bytes, memory, whether it is scratch)
    homes: dict[int, Home] = {}
    memories = 0
    ends: list[tuple[int, int, int, bool]] = []
    for buffer in sorted((b for b in spans if schedule.buffers[b].kind == "temporary"), key=lambda b: spans[b][0]):
        found = schedule.buffers[buffer]
        nbytes = max(math.prod(found.shape), 1) * found.dtype.itemsize
        start, end = spans[buffer][0], spans[buffer][-1]
        # What the later part reads of the first is there for as long as that may be run again. Small ones aren't worth it.
        is_scratch = schedule.cut < last and nbytes > SMALL
        if start < schedule.cut <= end:
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
        homes[buffer] = Home(memory, size, is_scratch)
        ends.append((end, size, memory, is_scratch))
    return homes
