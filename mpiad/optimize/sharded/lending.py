"""The variables that a user's function gets, and the gradient that it gives, without new memory in each evaluation.

A new large array costs a page fault for each of its pages, every time: as much as a tenth of an iteration. So the copy that
the function gets is made where nobody holds the last one any more.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.optimize.loans import Loans
from mpiad.optimize.variables import Packing

__all__ = ["PiecePacking"]

_LARGE = 1 << 20  # bytes; smaller arrays come from the heap, without page faults


class PiecePacking(Packing):
    """As `Packing`, but a gradient's vector is valid only until the next evaluation: it may be the function's own."""

    def __init__(self, template: Tree):
        super().__init__(template)
        self._shape = self._specs[0][0]
        self._gradient = np.empty(self.size)  # takes no memory until it is used
        self._loans = Loans(self.size)
        self._lent: np.ndarray | None = None

    def lend(self) -> np.ndarray | None:
        """Return where the next variables may be written, shape (size,), so that `unpack` needn't copy them."""
        if self._plain and 8 * self.size >= _LARGE:
            self._lent = self._loans.vector()
        return self._lent

    def nest_in(self, vector: np.ndarray) -> Tree:
        """Return the nest of a vector that the solve goes on working with: in what was lent, or in new memory."""
        return self.unpack(vector)

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
