"""The division of the trajectories of a solve into shares for threads, and of the run of a kernel into short calls.

While machine code runs, Python handles no signals: a Ctrl-C would wait until all trajectories have ended. So a kernel
returns after a given number of turns (see `forward_kernel`), about ten times a second, and continues in the next call.
Reading the clock would slow the kernel down; instead, the number of turns is adapted from call to call.

An interrupt may be raised between any two bytecodes of the main thread. If it is raised between the acquisition of a lock
and the statement that releases the lock, the lock is never released. So the threads share only objects whose operations
are single calls in C (lists, deques, `SimpleQueue`), and neither futures nor events.
"""

from __future__ import annotations

import contextlib
import os
import time
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from mpiad._typing import Array

# Bounds on the size of a share. At the end of a share some lanes are idle; this wastes 2 % of the time at the lower bound.
_LEAST, _MOST = 512, 16_384
# Above the lower bound, a share has at most 1 / (_SHARES_PER_THREAD * threads) of the remaining trajectories.
_SHARES_PER_THREAD = 2
# Seconds for which a finished thread polls the others before it sleeps.
_POLLING = 0.0005
_SECONDS = 0.1  # intended time between two returns of a kernel
_FIRST = 64  # number of turns in the first call of a kernel; for the largest f this call takes a tenth of a second
# Maximum factor between the numbers of turns of two calls, since the process may have been suspended.
_CHANGE = 64.0

_queues: dict[int, SimpleQueue[Callable[[], None]]] = {}  # calls to run, by the number of threads
_turns_of: WeakKeyDictionary[Callable[..., None], int] = WeakKeyDictionary()

Result = TypeVar("Result")


def shares_of(count: int, threads: int) -> list[tuple[int, int]]:
    """Return the bounds of the shares; for several threads their sizes decrease, so that all end at about the same time."""
    bounds = [0]
    while bounds[-1] < count:
        size = _MOST if threads == 1 else max(_LEAST, (count - bounds[-1]) // (_SHARES_PER_THREAD * threads))
        bounds.append(min(count, bounds[-1] + min(size, _MOST)))
    return list(pairwise(bounds))


def each(fun: Callable[[Any, Callable[[], None]], Result], items: Iterable[Any], threads: int) -> list[Result]:
    """Return ``fun(item, pause)`` for each item, computed in threads; ``pause()`` raises if another thread has failed."""
    items = list(items)
    if threads == 1 or len(items) < 2:
        return [fun(item, lambda: None) for item in items]
    results: list[Any] = [None] * len(items)
    remaining, count = deque(range(len(items))), min(threads, len(items)) - 1
    errors: list[BaseException] = []  # after the first one all threads end
    # Each of the other threads takes a ticket when it starts. `wait` withdraws the unused tickets; False marks the end.
    tickets, returned, finished = deque([*[True] * count, False]), list[bool](), list[bool]()
    signals: SimpleQueue[None] = SimpleQueue()

    def pause() -> None:
        if errors:
            raise _Ended

    def work() -> None:
        try:
            while not errors:
                try:
                    i = remaining.popleft()
                except IndexError:
                    return
                results[i] = fun(items[i], pause)
        except _Ended:
            return  # another thread raises
        except BaseException as error:  # noqa: BLE001 the calling thread raises it
            errors.append(error)

    def work_in_another_thread() -> None:
        with contextlib.suppress(IndexError):
            if tickets.popleft():
                work()
                finished.append(True)
                signals.put(None)

    def wait() -> None:
        """Wait for the running threads, even if interrupted, so that none writes to arrays of this solve afterwards."""
        try:
            with contextlib.suppress(IndexError):
                returned.extend(iter(tickets.popleft, False))
            # Poll first, since sleeping and waking up takes 0.1 to 0.2 ms.
            end = time.perf_counter() + _POLLING
            while len(finished) < count - len(returned):
                if time.perf_counter() < end:
                    time.sleep(0)
                else:
                    signals.get()
        except BaseException as error:
            errors.append(error)
            wait()
            raise

    try:
        for _ in range(count):
            _queue_for(threads - 1).put(work_in_another_thread)
        # This thread works, too: if it waited for results, it would wake up for each one, on a core in use.
        work()
        wait()
    except BaseException as error:  # an interrupt may also be raised in the first instruction of `wait`, before its `try`
        errors.append(error)
        wait()
        raise
    if errors:
        raise min(errors, key=lambda error: isinstance(error, Exception))  # an interrupt, otherwise the first error
    return results


class _Ended(Exception):  # noqa: N818 control flow, not an error
    """Stops a thread after an exception in another thread."""


def _queue_for(threads: int) -> SimpleQueue[Callable[[], None]]:
    """Return the queue whose calls are run by this number of threads; these are started once and end with the process."""
    # Threads are reused, since starting one takes as long as solving a thousand trajectories. Two concurrent callers start
    # more threads than needed, and an interrupt may leave fewer; neither does harm.
    queue = _queues.get(threads)
    if queue is None:
        queue = _queues.setdefault(threads, SimpleQueue())
        for _ in range(threads):
            start_new_thread(_serve, (queue,))  # `Thread.start` waits for an event
    return queue


def _serve(queue: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        queue.get()()


# A forked process doesn't inherit the threads.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_queues.clear)


class Paced:
    """A kernel that runs in calls of about `_SECONDS`; the last entry of `state` counts down the turns of a call."""

    def __init__(self, function: Callable[..., None], state: Array):
        self._function, self._state = function, state
        self._turns = _turns_of.get(function, _FIRST)

    def __call__(self, *arguments: Any) -> None:
        """Call the kernel once, and adapt the number of turns."""
        self._state[-1] = self._turns
        started = time.perf_counter()
        self._function(*arguments)
        # If turns remain, the kernel returned early, and the overhead of the call may dominate its time.
        if not self._state[-1]:
            ratio = _SECONDS / max(time.perf_counter() - started, 1e-9)
            self._turns = _turns_of[self._function] = max(1, int(self._turns * min(max(ratio, 1 / _CHANGE), _CHANGE)))
