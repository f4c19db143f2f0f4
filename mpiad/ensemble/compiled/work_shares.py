"""The trajectories of a solve divided into shares, for threads and so that what is kept of one stays small; and into turns.

While machine code runs, Python handles no signals: a Ctrl-C would wait until all trajectories have ended. So a kernel takes
as many turns as it is given, and leaves off with its lanes as they are, about ten times a second. It looks at no clock,
which its loop would feel: how many turns fit is found out from call to call, and remembered for the next solve by the same
kernel.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from mpiad._typing import Array

# At the end of a share its last trajectories leave lanes empty: two hundredths of the work, for so few trajectories.
_LEAST, _MOST = 512, 16_384
# A share is at most one in so many, for each thread, of the trajectories that nobody has taken yet.
_EACH = 2
# In seconds.
_AWAKE = 0.0005
# Between two returns of a kernel.
_SECONDS = 0.1
# Of a kernel that nobody knows yet: those of the largest f take a tenth of a second, of the smallest less than a call.
_FIRST = 64
# By which factor the turns change at most, from one call to the next: the process may have been stopped for a while.
_CHANGE = 64.0

_executors: dict[int, ThreadPoolExecutor] = {}
_known: WeakKeyDictionary[Callable[..., None], int] = WeakKeyDictionary()

Result = TypeVar("Result")


def shares_of(count: int, threads: int) -> list[tuple[int, int]]:
    """Return where shares begin and end: for several threads ever smaller ones, so that all end at about the same time."""
    if threads == 1:
        parts = -(-count // _MOST)
        bounds = [count * i // parts for i in range(parts + 1)] if parts else [0]
    else:
        bounds = [0]
        while bounds[-1] < count:
            size = min(_MOST, max(_LEAST, (count - bounds[-1]) // (_EACH * threads)))
            bounds.append(min(count, bounds[-1] + size))
    return list(zip(bounds, bounds[1:]))


def each(fun: Callable[[Any, Callable[[], None]], Result], items: Iterable[Any], threads: int) -> list[Result]:
    """Return what a function makes of all items, by so many threads, of which this one is one.

    ``fun(item, pause)`` calls ``pause()`` now and then: what is raised in one thread ends it there in the others.
    """
    items = list(items)
    if threads == 1 or len(items) < 2:
        return [fun(item, lambda: None) for item in items]
    made: list[Any] = [None] * len(items)
    left, ended = deque(range(len(items))), threading.Event()

    def pause() -> None:
        if ended.is_set():
            raise _Ended

    def work() -> None:
        try:
            while not ended.is_set():
                try:
                    i = left.popleft()
                except IndexError:
                    return
                made[i] = fun(items[i], pause)
        except _Ended:
            return  # another thread has something to raise
        except BaseException:
            ended.set()
            raise

    others: list[Future] = []
    try:
        for _ in range(min(threads, len(items)) - 1):
            others.append(_executor(threads - 1).submit(work))
        # A thread that only waited for the others' results would wake up at each of them, on a core that one of them needs.
        work()
    except BaseException:
        ended.set()
        raise
    finally:
        _wait(others, ended)
    for other in others:
        if not other.cancelled():
            other.result()
    return made


class _Ended(Exception):  # noqa: N818 no error, and nobody sees it
    """What ends a thread's work whose result nobody wants any more."""


def _executor(threads: int) -> ThreadPoolExecutor:
    """Return threads that wait for work since the last solve: to start one takes as long as a thousand trajectories."""
    kept = _executors.get(threads)
    # Without a lock, which a process could be forked under; an executor that isn't used has no threads.
    return kept or _executors.setdefault(threads, ThreadPoolExecutor(threads, thread_name_prefix="mpiad-kernels"))


def _wait(others: list[Future], ended: threading.Event) -> None:
    """Wait for those that have begun: none is left behind, also by an interrupt, that writes to arrays of this solve."""
    try:
        running = [other for other in others if not other.cancel()]
        # To fall asleep and be woken takes a tenth of a millisecond or two, and what is waited for is near.
        end = time.perf_counter() + _AWAKE
        while not all(other.done() for other in running) and time.perf_counter() < end:
            time.sleep(0)
        wait(running)
    except BaseException:
        ended.set()
        _wait(others, ended)
        raise


# A forked process has none of the threads.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_executors.clear)


class Paced:
    """A kernel that leaves off after a while.

    `state`: where it leaves off, and last how many turns it is to take, from which it counts down.
    """

    def __init__(self, function: Callable[..., None], state: Array):
        self._function, self._state = function, state
        self._turns = _known.get(function, _FIRST)

    def __call__(self, *given: Any) -> None:
        """Let the kernel take turns, until it leaves off or has done all."""
        self._state[-1] = self._turns
        started = time.perf_counter()
        self._function(*given)
        # One that left off for another reason has taken fewer turns, of which the call itself may be the most.
        if not self._state[-1]:
            fits = _SECONDS / max(time.perf_counter() - started, 1e-9)
            self._turns = _known[self._function] = max(1, int(self._turns * min(max(fits, 1 / _CHANGE), _CHANGE)))
