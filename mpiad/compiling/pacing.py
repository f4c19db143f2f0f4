"""Calls of a kernel that come back to Python about ten times a second, and go on.

While machine code runs, Python handles no signals: a Ctrl-C would wait until all trajectories have ended. So a kernel takes
as many turns as it is given, and leaves off with its lanes as they are. It looks at no clock, which its loop would feel:
how many turns fit is found out from call to call, and remembered for the next solve by the same kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from mpiad._typing import Array

__all__ = ["Paced"]

# Between two returns.
_SECONDS = 0.1
# Of a kernel that nobody knows yet: those of the largest f take a tenth of a second, of the smallest less than a call.
_FIRST = 64
# By which factor the turns change at most, from one call to the next: the process may have been stopped for a while.
_CHANGE = 64.0

_known: WeakKeyDictionary[Callable[..., None], int] = WeakKeyDictionary()


class Paced:
    """A kernel that leaves off after a while.

    Parameters
    ----------
    function : callable
        The kernel.
    state : array of int
        Where it leaves off, and last how many turns it is to take, from which it counts down.
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
