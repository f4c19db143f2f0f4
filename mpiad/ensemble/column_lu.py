"""LU factorizations of small matrices, one per trajectory (column), and products with the mass matrix.

All operations are elementwise over the columns. If a matrix is singular or isn't finite, the solutions of its column are
infinite or NaN; a Rosenbrock step is then rejected because of its error.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from autograd.extend import primitive

from mpiad._typing import Array
from mpiad.transport.devices.device_arrays import arrays_of


class ColumnLU:
    """LU factorizations with partial pivoting; the factors overwrite the matrices, shape (d, d, n)."""

    def __init__(self, matrices: Array):
        self._factors = lu = matrices  # the diagonal of U is stored as reciprocals
        xp = arrays_of(matrices)
        # Entries (k, rows, columns): rows k and rows[i] of the matrix of trajectory columns[i] have been exchanged.
        self._swaps: list[tuple[int, Array, Array]] = []
        for k in range(len(lu)):
            offset = np.argmax(np.abs(lu[k:, k]), axis=0)
            # On a device rows may be exchanged with themselves, to avoid a copy of the indices to the host.
            columns = np.flatnonzero(offset) if xp is None else xp.arange(lu.shape[-1])
            if columns.shape[0]:
                rows = k + offset[columns]
                self._swaps.append((k, rows, columns))
                _swap(lu, k, rows, columns)
            # The reciprocal of an infinite pivot is zero, which looks valid. The added difference is then NaN.
            lu[k, k] = 1 / lu[k, k] + (lu[k, k] - lu[k, k])
            lu[k + 1 :, k] *= lu[k, k]
            lu[k + 1 :, k + 1 :] -= lu[k + 1 :, k, None] * lu[k, k + 1 :]

    def solve(self, x: Array, transposed: bool = False) -> None:
        """Replace right-hand sides, shape (d, n), by the solutions, optionally with the transposed matrices."""
        lu, d = self._factors, len(x)
        if transposed:
            for k in range(d):
                x[k] *= lu[k, k]
                x[k + 1 :] -= lu[k, k + 1 :] * x[k]
            for k in range(d - 1, 0, -1):
                x[:k] -= lu[k, :k] * x[k]
        for k, rows, columns in reversed(self._swaps) if transposed else self._swaps:
            _swap(x, k, rows, columns)
        if not transposed:
            for k in range(d - 1):
                x[k + 1 :] -= lu[k + 1 :, k] * x[k]
            for k in range(d - 1, -1, -1):
                x[k] *= lu[k, k]
                x[:k] -= lu[:k, k] * x[k]


def _swap(x: Array, k: int, rows: Array, columns: Array) -> None:
    """Exchange row k of some columns (on the last axis) with another row of each column."""
    row = x[k][..., columns]
    x[k][..., columns] = np.moveaxis(x[rows, ..., columns], 0, -1)
    x[rows, ..., columns] = np.moveaxis(row, -1, 0)


class Places(NamedTuple):
    """The rows and the columns of entries of matrices: int arrays of shape (m,)."""

    rows: Array
    columns: Array


@primitive
def sums_by_row(terms: Array, rows: Array, count: int) -> Array:
    """Return the sum of the terms, shape (m, ..., n), of each of `count` rows, by elementwise operations."""
    order = np.argsort(rows, kind="stable")
    # The number of each term among those of its row; terms with the same number are added at once.
    number = np.arange(len(rows)) - np.searchsorted(rows[order], rows[order])
    out = np.zeros_like(terms, shape=(count, *terms.shape[1:]))
    for k in range(number.max(initial=-1) + 1):
        chosen = order[number == k]
        out[rows[chosen]] += terms[chosen]
    return out


def products(matrix: Array, x: Array) -> Array:
    """Return a constant matrix times x, (d, ..., n), which may be traced, by operations that keep columns independent."""
    rows, columns = np.nonzero(matrix)
    values = matrix[rows, columns].astype(x.dtype)
    return sums_by_row(values.reshape(-1, *(1,) * (x.ndim - 1)) * x[columns], rows, len(matrix))


def entries_of(matrix: Array) -> tuple[tuple[int, int, float], ...]:
    """Return the row, the column and the value of each nonzero entry."""
    return tuple((i, j, float(matrix[i, j])) for i, j in np.argwhere(matrix).tolist())


class Mass:
    """Products with the mass matrix M, shape (d, d), and M/γ; `matrix` is None for the identity."""

    def __init__(self, matrix: Array | None, gamma: float):
        self._gamma, self._matrix = gamma, matrix

    def places(self, d: int) -> Places:
        """Return the places of the nonzero entries of M."""
        return Places(np.arange(d), np.arange(d)) if self._matrix is None else Places(*np.nonzero(self._matrix))

    def scaled(self, dtype: np.dtype) -> Array:
        """Return the nonzero entries of M/γ, shape (m, 1), or one number for the identity."""
        entries = np.float64(1.0) if self._matrix is None else self._matrix[np.nonzero(self._matrix)].astype(float)[:, None]
        return (entries / self._gamma).astype(dtype)

    def times(self, x: Array) -> Array:
        """Return M x, for x of shape (d, n)."""
        return x if self._matrix is None else products(self._matrix, x)
