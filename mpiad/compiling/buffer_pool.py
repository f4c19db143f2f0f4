"""Memory for records of steps, used again by the next solve.

Fresh memory is given by the system page by page, which takes longer than the solve that writes to it. A training loop
records the same ensemble again and again.
"""

from __future__ import annotations

import threading

import numpy as np

from mpiad._typing import Array

__all__ = ["give_back", "room"]

# What is kept at most, in numbers: 128 MiB.
_MOST = 1 << 24

_lock = threading.Lock()
_spare: list[Array] = []


def room(size: int) -> Array:
    """Return an array of at least so many numbers, with anything in it."""
    with _lock:
        for i, array in enumerate(_spare):
            if size <= len(array) <= 2 * size:
                return _spare.pop(i)
    return np.empty(size)


def give_back(arrays: list[Array]) -> None:
    """Keep arrays from `room` for later, of which nobody has any view."""
    with _lock:
        for array in arrays:
            if sum(map(len, _spare)) + len(array) <= _MOST:
                _spare.append(array)
