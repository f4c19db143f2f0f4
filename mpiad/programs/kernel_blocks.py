"""The memory from which a replay's kernels take their arguments (see `compiling.machine_code`).

Kernels between two calls of Python's are linked: the first one's call runs them all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.cache import Kernel
from mpiad.programs.loops import LoopText
from mpiad.programs.memory_plan import Home
from mpiad.programs.overlap import Action
from mpiad.programs.schedule import Schedule, root_of

_WORD = 8


class KernelBlocks:
    """A block for each loop among actions, and for each thread that computes a part of it.

    `texts`, `kernels`: of each step, None for calls. `words`: all blocks, one after the other.
    """

    def __init__(
        self, schedule: Schedule, texts: Sequence[LoopText | None], kernels: Sequence[Kernel | None],
        actions: Sequence[Action], homes: dict[int, Home],
    ):  # fmt: skip
        self._places: dict[int, list[int]] = {}
        self._starts: dict[tuple[int, int], int] = {}
        self._held: list[Array] = []
        words: list[int] = []
        for k, action in enumerate(actions):
            text = texts[action.at]
            for thread, boxes in enumerate(action.shares):
                self._starts[k, thread] = len(words)
                words += [0, 0]
                for b in text.buffers:  # type: ignore[union-attr]
                    self._places.setdefault(root_of(schedule.buffers, b), []).append(len(words))
                    shape = schedule.buffers[b].shape
                    words += [0, *shape[:-1], homes[b].layout.pitch if b in homes else (shape or (1,))[-1]]
                for array in (*boxes, *([np.empty(text.lanes)] if text.lanes else [])):  # type: ignore[union-attr]
                    self._held.append(np.ascontiguousarray(array))
                    words += [self._held[-1].ctypes.data, *array.shape]
        self.words = (ctypes.c_int64 * max(len(words), 1))(*words)
        alone = {k for k, action in enumerate(actions) if len(action.shares) == 1}
        self._linked = {k for k in alone if k - 1 in alone and actions[k].at not in schedule.cuts}
        for k in self._linked:
            start = self._starts[k - 1, 0]
            self.words[start] = kernels[actions[k].at].function.address  # type: ignore[union-attr]
            self.words[start + 1] = self.address(k)

    def address(self, k: int, thread: int = 0) -> int:
        """Return the address of the block of an action."""
        return ctypes.addressof(self.words) + _WORD * self._starts[k, thread]

    def is_called(self, k: int) -> bool:
        """Tell whether a loop is called, and isn't run by the one before it."""
        return k not in self._linked

    def bind(self, b: int, address: int) -> None:
        """Let kernels find a buffer at an address."""
        for place in self._places.get(b, ()):
            self.words[place] = address

    def assignment(self, b: int, address: str) -> str:
        """Return the text that lets kernels find a buffer at an address, where `words` is called t."""
        targets = "".join(f"t[{place}] = " for place in self._places.get(b, ()))
        return f"{targets}{address}" if targets else ""


def address_of(array: Array) -> int:
    """Return the address of an array's first entry."""
    return array.__array_interface__["data"][0]


def as_kernels_take(x: Any, dtype: np.dtype) -> Array:
    """Return what kernels take of an array."""
    if type(x) is np.ndarray and x.flags.c_contiguous and x.flags.aligned and x.dtype == dtype:
        return x
    return np.require(x, dtype, ["C", "A"])
