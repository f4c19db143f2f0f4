"""Vectors that the user's function gets, without new memory in each evaluation.

The function may keep what it gets, or change it, so no other part of a solve may work in that memory. But once nobody holds
a vector any more, the next variables can be written in the same place.
"""

from __future__ import annotations

import sys

import numpy as np

__all__ = ["BufferPool"]


class BufferPool:
    """Vectors of one length."""

    def __init__(self, size: int):
        self._size = size
        self._kept: list[np.ndarray] = []

    def vector(self) -> np.ndarray:
        """Return a vector that nobody else holds, nor a view of it, shape (size,)."""
        for array in self._kept:
            if _holders(array) <= _UNHELD:
                return array
        self._kept = [np.empty(self._size)]
        return self._kept[0]


def _holders(array: np.ndarray) -> float:
    # Only CPython counts.
    return sys.getrefcount(array) if hasattr(sys, "getrefcount") else np.inf


def _count_of_unheld() -> float:
    kept = [np.empty(1)]
    for array in kept:
        return _holders(array)
    return 0.0


_UNHELD = _count_of_unheld()
