"""The division of the trajectories of a solve into shares for threads, and of the run of a kernel into short calls.

While machine code runs, Python handles no signals: a Ctrl-C would wait until all trajectories have ended. So a kernel
returns after a given number of turns (see `forward_kernel`), about ten times a second, and continues in the next call. It
doesn't read the clock, which would slow it down: the number of turns is adapted from call to call.
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

# Bounds on the size of a share. At the end of a share lanes are empty: for the least size this wastes 2 % of the work.
_LEAST, _MOST = 512, 16_384
# A share has at most 1 / (_EACH * threads) of the trajectories that are left.
_EACH = 2
# Seconds for which a finished thread polls the others before it sleeps.
_POLLING = 0.0005
_SECONDS = 0.1  # between two returns of a kernel
_FIRST = 64  # number of turns in the first call of a kernel; for the largest f they take a tenth of a second
# Maximum change of the number of turns between calls, since the process may have been suspended.
_CHANGE = 64.0

_executors: dict[int, ThreadPoolExecutor] = {}
_known: WeakKeyDictionary[Callable[..., None], int] = WeakKeyDictionary()

Result = TypeVar("Result")


def shares_of(count: int, threads: int) -> list[tuple[int, int]]:
    """Return the bounds of the shares; for several threads their sizes decrease, so that all end at about the same time."""
    bounds = [0]
    while bounds[-1] < count:
        size = _MOST if threads == 1 else max(_LEAST, (count - bounds[-1]) // (_EACH * threads))
        bounds.append(min(count, bounds[-1] + min(size, _MOST)))
    return list(pairwise(bounds))


def each(fun: Callable[[Any, Callable[[], None]], Result], items: Iterable[Any], threads: int) -> list[Result]:
    """Return the results of a function for all items, computed in several threads including this one.

    ``fun(item, pause)`` calls ``pause()`` regularly, which raises if another thread has raised an exception.
    """
    items = list(items)
    if threads == 1 or len(items) < 2:
        return [fun(item, lambda: None) for item in items]
    results: list[Any] = [None] * len(items)
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
                results[i] = fun(items[i], pause)
        except _Ended:
            return  # another thread raises
        except BaseException:
            ended.set()
            raise

    # Threads are reused, since starting one takes as long as a thousand trajectories. No lock is used, since a process
    # could be forked while the lock is held. `setdefault` may create an executor in vain, but it starts no threads.
    executor = _executors.get(threads - 1) or _executors.setdefault(
        threads - 1, ThreadPoolExecutor(threads - 1, thread_name_prefix="mpiad-kernels")
    )
    others: list[Future] = []
    try:
        for _ in range(min(threads, len(items)) - 1):
            others.append(executor.submit(work))
        # This thread works, too: if it waited for results, it would wake up for each result, on a core that others need.
        work()
    except BaseException:
        ended.set()
        raise
    finally:
        _wait(others, ended)
    for other in others:
        if not other.cancelled():
            other.result()
    return results


class _Ended(Exception):  # noqa: N818 control flow, not an error
    """Stops a thread after an exception in another thread."""


def _wait(others: list[Future], ended: threading.Event) -> None:
    """Wait for the running threads, even if interrupted, so that none writes to arrays of this solve afterwards."""
    try:
        running = [other for other in others if not other.cancel()]
        # Poll first, since sleeping and waking up takes 0.1 to 0.2 ms.
        end = time.perf_counter() + _POLLING
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
    """A kernel in calls of about `_SECONDS`; the last entry of `state` is the number of turns that are left in a call."""

    def __init__(self, function: Callable[..., None], state: Array):
        self._function, self._state = function, state
        self._turns = _known.get(function, _FIRST)

    def __call__(self, *given: Any) -> None:
        """Call the kernel once, and adapt the number of turns."""
        self._state[-1] = self._turns
        started = time.perf_counter()
        self._function(*given)
        # If the kernel returned for another reason, the overhead of the call may dominate its time.
        if not self._state[-1]:
            fits = _SECONDS / max(time.perf_counter() - started, 1e-9)
            self._turns = _known[self._function] = max(1, int(self._turns * min(max(fits, 1 / _CHANGE), _CHANGE)))
