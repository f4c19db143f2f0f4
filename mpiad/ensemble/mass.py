"""The mass matrix of a Rosenbrock step, as its systems and right-hand sides have it: M/γ, M x and Mᵀ x.

Products are sums over the entries that aren't zero, one after the other, so that a column's numbers depend on none beside
it.
"""

from __future__ import annotations

import numpy as np

from mpiad._typing import Array

__all__ = ["Mass", "entries_of"]


def entries_of(matrix: Array) -> tuple[tuple[int, int, float], ...]:
    """Return the entries that aren't zero, with their places."""
    return tuple((i, j, float(matrix[i, j])) for i, j in np.argwhere(matrix).tolist())


class Mass:
    """The mass matrix, or the identity, which costs nothing.

    Parameters
    ----------
    matrix : array, shape (d, d), or None
    """

    def __init__(self, matrix: Array | None, gamma: float):
        self._gamma, self._entries = gamma, None if matrix is None else entries_of(matrix)

    def add_to(self, matrices: Array) -> None:
        """Add M/γ to matrices, shape (d, d, n)."""
        if self._entries is None:
            diagonal = matrices.dtype.type(1 / self._gamma)
            if isinstance(matrices, np.ndarray):
                np.einsum("iin->in", matrices)[...] += diagonal
            else:  # elsewhere it may be no view
                for i in range(len(matrices)):
                    matrices[i, i] += diagonal
            return
        for i, j, value in self._entries:
            matrices[i, j] += np.array(value / self._gamma, matrices.dtype)

    def times(self, x: Array, transposed: bool = False) -> Array:
        """Return M x, or Mᵀ x, of x of shape (..., d, n)."""
        if self._entries is None:
            return x
        total = np.zeros_like(x)
        for i, j, value in self._entries:
            i, j = (j, i) if transposed else (i, j)
            total[..., i, :] += np.array(value, x.dtype) * x[..., j, :]
        return total
