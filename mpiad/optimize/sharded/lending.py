"""The variables that a user's function gets, and the gradient that it gives, without new memory in each evaluation.

A new large array costs a page fault for each of its pages, every time: as much as a tenth of an iteration. The function
may keep what it gets, or change it, so it gets a copy; but where nobody holds the last copy any more, the next is made
in the same place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.optimize.variables import Packing

__all__ = ["PiecePacking"]

_LARGE = 1 << 20  # bytes; smaller arrays come from the heap, without page faults


class PiecePacking(Packing):
    """As `Packing`, but a gradient's vector is valid only until the next evaluation: it may be the function's own."""

    def __init__(self, template: Tree):
        super().__init__(template)
        self._shape, dtype = self._specs[0]
        # One array of doubles, as large pieces are, lies in memory as its vector does.
        self._plain = len(self._specs) == 1 and dtype == np.float64 and len(self._shape) > 0
        self._gradient = np.empty(self.size)  # takes no memory until it is used
        self._kept: list[np.ndarray] = []
        self._lent: np.ndarray | None = None

    def lend(self) -> np.ndarray | None:
        """Return where the next variables may be written, shape (size,), so that `unpack` needn't copy them."""
        if self._plain and 8 * self.size >= _LARGE:
            self._lent = self._unheld()
        return self._lent

    def _unheld(self) -> np.ndarray:
        """Return an array that nobody else holds, nor a view of it."""
        for array in self._kept:
            if _holders(array) <= _UNHELD:
                return array
        self._kept = [np.empty(self.size)]
        return self._kept[0]

    def _unpacked(self, vector: np.ndarray, view: Callable[[Array], Array]) -> Tree:
        lent, self._lent = self._lent, None
        if lent is None:
            return super()._unpacked(vector, view)
        leaves = list(self._leaves)
        leaves[self._places[0]] = lent.reshape(self._shape)
        return self._build(leaves)

    def pack_gradient(self, tree: Tree) -> np.ndarray:
        """Return a gradient as a vector, shape (size,)."""
        if self._plain and isinstance(tree, np.ndarray) and tree.shape == self._shape and tree.dtype == np.float64:
            return tree.reshape(-1)
        return self._packed(tree, np.conj, self._gradient)


def _holders(array: np.ndarray) -> float:
    # Only CPython counts.
    return sys.getrefcount(array) if hasattr(sys, "getrefcount") else np.inf


def _count_of_unheld() -> float:
    kept = [np.empty(1)]
    for array in kept:
        return _holders(array)
    return 0.0


_UNHELD = _count_of_unheld()
