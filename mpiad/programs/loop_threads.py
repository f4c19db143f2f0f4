"""Loops over several threads, where a rank has more than one core to itself.

A large loop is divided along its first axis, and each thread computes its part with the same machine code: what an entry is
doesn't depend on how many threads there are. Sums aren't divided, since they have an order.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.transport.threads import loop_threads

LARGE = 1 << 20
"""Entries of a loop from which on it is divided: below, a thread may wait longer for a core than it computes."""


class _Team:
    """Threads that wait for parts of loops."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._given: list[SimpleQueue[Any]] = []
        self._done: SimpleQueue[None] = SimpleQueue()

    def run(self, kernel: Callable[[int], None], blocks: Sequence[int]) -> None:
        """Run a kernel on blocks, the first in this thread."""
        while len(self._given) < len(blocks) - 1:
            self._given.append(SimpleQueue())
            threading.Thread(target=self._work, args=(self._given[-1],), daemon=True, name="mpiad loops").start()
        for queue, block in zip(self._given, blocks[1:]):
            queue.put((kernel, block))
        kernel(blocks[0])
        left, interrupt = len(blocks) - 1, None
        while left:
            try:
                self._done.get()
                left -= 1
            except KeyboardInterrupt as error:  # the others write to arrays that must stay until they end
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _work(self, queue: SimpleQueue[Any]) -> None:
        while True:
            kernel, block = queue.get()
            kernel(block)
            self._done.put(None)


_team = _Team()


def _renew() -> None:
    global _team
    _team = _Team()  # a child process has none of its parent's threads


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def run_together(kernel: Callable[[int], None], blocks: Sequence[int]) -> None:
    """Run a linked kernel on several blocks at the same time; in turn, where another thread of the user's is at that."""
    team = _team
    if team.lock.acquire(blocking=False):
        try:
            team.run(kernel, blocks)
        finally:
            team.lock.release()
    else:
        for block in blocks:
            kernel(block)


def shares_of(boxes: tuple[Array, ...], entries: int) -> tuple[tuple[Array, ...], ...]:
    """Return the boxes of each thread, all of them for one where a loop of so many entries is too little.

    The boxes, each of shape (n, 2 d), are of a divisible loop: those without decisions, and those at the edges, which the
    last thread computes.
    """
    threads = loop_threads()
    if entries < LARGE or threads < 2:
        return (boxes,)
    plain, edges = boxes[0], boxes[1:]
    first, last = plain[:, :1], plain[:, 1:2]
    shares = []
    for k in range(threads):
        low, high = (first + (last - first) * place // threads for place in (k, k + 1))
        part = np.hstack([low, high, plain[:, 2:]])
        shares.append((part, *(edges if k == threads - 1 else [x[:0] for x in edges])))
    return tuple(shares)
