"""The mass matrix of a Rosenbrock step, as its systems and right-hand sides have it: M/γ, M x and Mᵀ x.

Products are sums over the entries that aren't zero, one after the other, so that a column's numbers depend on none beside
it.
"""

from __future__ import annotations

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.batch import Batch

__all__ = ["Mass", "entries_of", "mass_of"]


def mass_of(given: Array | None, batch: Batch) -> Array | None:
    """Return the mass matrix of a problem in the precision of the states.

    Raises
    ------
    ValueError
        Where it has another shape.
    """
    if given is None:
        return None
    d = len(batch.u0)
    if given.shape != (d, d):
        raise ValueError(f"solve: mass_matrix must have shape {(d, d)}, as u0 has {d} components, but has {given.shape}.")
    return given.astype(batch.u0.real.dtype)


def entries_of(matrix: Array | None) -> tuple[tuple[int, int, float], ...] | None:
    """Return the entries that aren't zero, with their places."""
    return None if matrix is None else tuple((i, j, float(matrix[i, j])) for i, j in np.argwhere(matrix).tolist())


class Mass:
    """The mass matrix, or the identity, which costs nothing.

    Parameters
    ----------
    matrix : array, shape (d, d), or None
    """

    def __init__(self, matrix: Array | None, gamma: float):
        self._gamma, self._entries = gamma, entries_of(matrix)

    def add_to(self, matrices: Array) -> None:
        """Add M/γ to matrices, shape (d, d, n)."""
        if self._entries is None:
            np.einsum("iin->in", matrices)[...] += np.array(1 / self._gamma, matrices.dtype)
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
