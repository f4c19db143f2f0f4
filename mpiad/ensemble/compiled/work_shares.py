"""The division of a solve's trajectories into shares, for threads and to bound memory; and into turns.

While machine code runs, Python handles no signals: a Ctrl-C would wait until all trajectories have ended. So a kernel
runs a given number of turns, and returns with the state of its lanes kept, about ten times a second. It doesn't read the
clock, which would slow down its loop: the number of turns is adapted from call to call, and remembered for the next solve
by the same kernel.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from mpiad._typing import Array

# At the end of a share its last trajectories leave lanes empty: 2% of the work, for this number of trajectories.
_LEAST, _MOST = 512, 16_384
# A share has at most 1 / (_EACH * threads) of the trajectories that are left.
_EACH = 2
# Seconds for which a finished thread polls the others before it sleeps.
_AWAKE = 0.0005
# Seconds between two returns of a kernel.
_SECONDS = 0.1
# Of a new kernel: the turns of the largest f take a tenth of a second, of the smallest less than a call.
_FIRST = 64
# Maximum factor of change in the number of turns between calls: the process may have been suspended for a while.
_CHANGE = 64.0

_executors: dict[int, ThreadPoolExecutor] = {}
_known: WeakKeyDictionary[Callable[..., None], int] = WeakKeyDictionary()

Result = TypeVar("Result")


def shares_of(count: int, threads: int) -> list[tuple[int, int]]:
    """Return the bounds of the shares: for several threads of decreasing size, so that all end at about the same time."""
    bounds = [0]
    while bounds[-1] < count:
        size = _MOST if threads == 1 else max(_LEAST, (count - bounds[-1]) // (_EACH * threads))
        bounds.append(min(count, bounds[-1] + min(size, _MOST)))
    return list(pairwise(bounds))


def each(fun: Callable[[Any, Callable[[], None]], Result], items: Iterable[Any], threads: int) -> list[Result]:
    """Apply a function to all items in several threads, of which this one is one, and return its results.

    ``fun(item, pause)`` calls ``pause()`` regularly: an exception in one thread stops the others there.
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
            return  # another thread raises
        except BaseException:
            ended.set()
            raise

    # Threads are kept from the last solve: starting one takes as long as a thousand trajectories. Without a lock, since a
    # process could be forked while it is held; an unused executor has no threads.
    executor = _executors.get(threads - 1) or _executors.setdefault(
        threads - 1, ThreadPoolExecutor(threads - 1, thread_name_prefix="mpiad-kernels")
    )
    others: list[Future] = []
    try:
        for _ in range(min(threads, len(items)) - 1):
            others.append(executor.submit(work))
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


class _Ended(Exception):  # noqa: N818 control flow, not an error
    """Stops a thread whose result is no longer needed."""


def _wait(others: list[Future], ended: threading.Event) -> None:
    """Wait for the running threads, also after an interrupt: none may write to arrays of this solve afterwards."""
    try:
        running = [other for other in others if not other.cancel()]
        # Sleeping and waking up takes 0.1 to 0.2 ms, and the others will finish soon.
        end = time.perf_counter() + _AWAKE
        while not all(other.done() for other in running) and time.perf_counter() < end:
            time.sleep(0)
        wait(running)
    except BaseException:
        ended.set()
        _wait(others, ended)
        raise


# A forked process doesn't inherit the threads.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_executors.clear)


class Paced:
    """A kernel that returns after a while.

    `state`: the kernel's state when it returns, of which the last entry counts down the turns that are left.
    """

    def __init__(self, function: Callable[..., None], state: Array):
        self._function, self._state = function, state
        self._turns = _known.get(function, _FIRST)

    def __call__(self, *given: Any) -> None:
        """Run the kernel until its turns are used up, or until it returns for another reason or has finished."""
        self._state[-1] = self._turns
        started = time.perf_counter()
        self._function(*given)
        # If it returned for another reason, it has run fewer turns, and the overhead of the call may dominate.
        if not self._state[-1]:
            fits = _SECONDS / max(time.perf_counter() - started, 1e-9)
            self._turns = _known[self._function] = max(1, int(self._turns * min(max(fits, 1 / _CHANGE), _CHANGE)))
