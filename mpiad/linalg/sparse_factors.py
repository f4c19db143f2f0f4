"""SuperLU's factors of a sparse matrix on one rank, and solves with them for one or several right-hand sides.

SuperLU solves for right-hand sides one by one, or for a few at a time. For several right-hand sides, a compiled loop is
used instead, which reads each entry of the factors once for all of them. It is written in the kernel language (see
`mpiad.compiling.translation`), and compiled from the source code of this file. The right-hand sides are the innermost axis
of its array x.

With permutation matrices P and Q, the factors of A are P A Q = L U. The columns of L and the rows of U are stored. A solve
with A runs forward along the columns of L, and backward along the rows of U. Since Qᵀ Aᵀ Pᵀ = Uᵀ Lᵀ, a solve with Aᵀ runs
forward along the rows of U, and backward along the columns of L. Four successive columns with entries in the same rows,
which is common in factors of large matrices ("supernodes"), are used together: x is read and written once for all four.

References
----------
J. W. Demmel, S. C. Eisenstat, J. R. Gilbert, X. S. Li and J. W. H. Liu, A supernodal approach to sparse partial pivoting,
SIAM Journal on Matrix Analysis and Applications 20 (1999).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
from scipy.sparse.linalg import splu

from mpiad._typing import LocalArray
from mpiad.compiling.cache import functions_of

_MOST = 32  # right-hand sides of one call of the compiled loop
_MOST_AT_ONCE = 2000  # unknowns up to which SuperLU takes all right-hand sides at once


class SparseFactors:
    """The factors of a square sparse matrix; raises a ValueError if the matrix, called `name`, is singular."""

    def __init__(self, matrix: Any, name: str):
        try:
            self._factors: Any = splu(matrix)
        except RuntimeError as error:
            raise ValueError(f"{name} can't be factorized: {error}.") from error
        self._dtype = np.result_type(matrix.dtype, np.float32)

    def solve(self, rows: LocalArray, kind: str = "N") -> LocalArray:
        """Return the solutions for right-hand sides (k, n), or the transposed matrix's if `kind` is "T"."""
        if rows.dtype.kind == "c" and self._dtype.kind == "f":
            return self.solve(rows.real, kind) + 1j * self.solve(rows.imag, kind)
        if not len(rows):
            return rows.copy()
        if len(rows) == 1:
            return self._factors.solve(np.ascontiguousarray(rows[0]), kind)[None]
        if rows.dtype == self._dtype == np.float64:
            return self._block_solver(rows, kind)
        # More columns at once than fit into the caches would take longer than one by one.
        step = len(rows) if rows.shape[1] <= _MOST_AT_ONCE else 3
        parts = [self._factors.solve(np.ascontiguousarray(rows[k : k + step]).T, kind).T for k in range(0, len(rows), step)]
        return np.concatenate(parts)

    @functools.cached_property
    def _block_solver(self) -> _BlockSolver:
        return _BlockSolver(self._factors)


class _Triangle(NamedTuple):
    """The columns of a lower triangular matrix in groups of one or four.

    The values of a group begin with its entries within the group, column by column.
    """

    groups: np.ndarray  # for each group: first column, number of columns, start and stop in `rows`, start in `values`
    rows: np.ndarray  # the rows below each group with nonzero entries
    values: np.ndarray
    inverses: np.ndarray  # of the diagonal

    @classmethod
    def of(cls, matrix: Any) -> _Triangle:
        below: Any = scipy.sparse.tril(matrix, -1, format="csc")
        below.sort_indices()
        starts, rows, values, n = below.indptr, below.indices, below.data, below.shape[0]
        # Two columns are alike if the first one has entries in the row of the second one, and in the rows of its entries.
        counts, column = np.diff(starts), np.repeat(np.arange(n), np.diff(starts))
        partner = starts[column - 1] + 1 + np.arange(len(rows)) - starts[column]
        equal = np.bincount(column[rows[partner % max(len(rows), 1)] == rows], minlength=n)
        alike = (counts[:-1] == counts[1:] + 1) & (equal[1:] == counts[1:])
        alike[alike] = rows[starts[:-2][alike]] == np.flatnonzero(alike) + 1
        groups: list[tuple[int, ...]] = []
        row_parts, value_parts, j, row, value = [rows[:0]], [values[:0]], 0, 0, 0
        while j < n:
            size = 4 if j + 4 <= n and alike[j : j + 3].all() else 1
            columns = [values[starts[k] : starts[k + 1]] for k in range(j, j + size)]
            shared = rows[starts[j + size - 1] : starts[j + size]]
            groups.append((j, size, row, row + len(shared), value))
            row_parts.append(shared)
            value_parts += [entries[: size - 1 - k] for k, entries in enumerate(columns)]
            value_parts.append(np.stack([entries[size - 1 - k :] for k, entries in enumerate(columns)], axis=1).ravel())
            j, row, value = j + size, row + len(shared), value + sum(map(len, columns))
        table, joined = np.array(groups, np.int64).ravel(), np.concatenate(row_parts).astype(np.int32)
        return cls(table, joined, np.concatenate(value_parts), 1.0 / matrix.diagonal())


class _BlockSolver:
    """Solves for several right-hand sides with SuperLU's factors."""

    def __init__(self, factors: Any):
        lower, upper = _Triangle.of(factors.L), _Triangle.of(factors.U.T)
        into, out_of = (permutation.astype(np.int64) for permutation in (factors.perm_r, factors.perm_c))
        self._arrays = {"N": [*lower, *upper, into, out_of], "T": [*upper, *lower, out_of, into]}
        # The unused block of a kind (see `compiling.cache`), its number of right-hand sides, and its arrays.
        self._unused: dict[str, tuple[np.ndarray, int, list[np.ndarray]]] = {}

    def __call__(self, rows: np.ndarray, kind: str) -> np.ndarray:
        """Return the solutions for rows (k, n) of doubles, or the transposed matrix's if `kind` is "T"."""
        rows = np.ascontiguousarray(rows)
        out, kernel = np.empty_like(rows), _kernel()
        for start in range(0, len(rows), _MOST):
            count = min(_MOST, len(rows) - start)
            taken = self._unused.pop(kind, None)  # another thread may use one at the same time
            if taken is None or taken[1] != count:
                taken = self._block(kind, count)
            block = taken[0]
            block[-4], block[-2] = rows[start:].ctypes.data, out[start:].ctypes.data
            kernel(block.ctypes.data)
            self._unused[kind] = taken
        return out

    def _block(self, kind: str, count: int) -> tuple[np.ndarray, int, list[np.ndarray]]:
        """Return a block, in which the addresses of the right-hand sides and solutions are still missing."""
        n, width = len(self._arrays[kind][-1]), count + -count % 4  # a multiple of the processor's vectors
        arrays = [np.array([width, count]), *self._arrays[kind], np.zeros(n * width), np.zeros(4 * width)]
        words = [word for array in arrays for word in (array.ctypes.data, array.size)]
        return np.array([0, 0, *words, 0, n * count, 0, n * count]), count, arrays


@functools.cache
def _kernel() -> Any:
    numbers, values = "int64[::1]", "float64[::1]"
    triangle = [numbers, "int32[::1]", values, values]
    signature = f"linked({', '.join([numbers, *triangle, *triangle, numbers, numbers, *[values] * 4])})"
    return functions_of(__name__, {"substitute": signature}, "contract")[0]


def substitute(
    widths: np.ndarray,
    groups: np.ndarray, below: np.ndarray, values: np.ndarray, inverses: np.ndarray,
    groups_2: np.ndarray, below_2: np.ndarray, values_2: np.ndarray, inverses_2: np.ndarray,
    into: np.ndarray, out_of: np.ndarray, x: np.ndarray, part: np.ndarray, rows: np.ndarray, out: np.ndarray,
) -> None:  # fmt: skip
    """Solve with the first triangle, and then with the transpose of the second; x has `width` numbers per unknown."""
    w, count, n = widths[0], widths[1], inverses.shape[0]
    a, b, c, d = part[0:w], part[w : 2 * w], part[2 * w : 3 * w], part[3 * w : 4 * w]
    for i in range(n):
        first = into[i] * w
        for k in range(count):
            x[first + k] = rows[k * n + i]
    for g in range(0, groups.shape[0], 5):
        j, size, start, stop, p = groups[g], groups[g + 1], groups[g + 2], groups[g + 3], groups[g + 4]
        for r in range(size):
            scale, own, copy = inverses[j + r], x[(j + r) * w : (j + r + 1) * w], part[r * w : r * w + w]
            for k in range(w):
                copy[k] = scale * own[k]
            for k in range(w):
                own[k] = copy[k]
            for s in range(r + 1, size):
                value, other = values[p], x[(j + s) * w : (j + s + 1) * w]
                p += 1
                for k in range(w):
                    other[k] -= value * copy[k]
        if size == 4:
            for q in range(start, stop):
                e, f, g_, h = values[p], values[p + 1], values[p + 2], values[p + 3]
                p += 4
                first = below[q] * w
                other = x[first : first + w]
                for k in range(w):
                    other[k] -= e * a[k] + f * b[k] + g_ * c[k] + h * d[k]
        else:
            for q in range(start, stop):
                value, first = values[p + q - start], below[q] * w
                other = x[first : first + w]
                for k in range(w):
                    other[k] -= value * a[k]
    for g in range(groups_2.shape[0] - 5, -1, -5):
        j, size, start, stop, p = groups_2[g], groups_2[g + 1], groups_2[g + 2], groups_2[g + 3], groups_2[g + 4]
        within = p
        for r in range(size):
            own, copy = x[(j + r) * w : (j + r + 1) * w], part[r * w : r * w + w]
            for k in range(w):
                copy[k] = own[k]
        if size == 4:
            p += 6
            for q in range(start, stop):
                e, f, g_, h = values_2[p], values_2[p + 1], values_2[p + 2], values_2[p + 3]
                p += 4
                first = below_2[q] * w
                other = x[first : first + w]
                for k in range(w):
                    a[k] -= e * other[k]
                    b[k] -= f * other[k]
                    c[k] -= g_ * other[k]
                    d[k] -= h * other[k]
        else:
            for q in range(start, stop - 1, 2):
                e, f, first, second = values_2[p], values_2[p + 1], below_2[q] * w, below_2[q + 1] * w
                p += 2
                other, last = x[first : first + w], x[second : second + w]
                for k in range(w):
                    a[k] -= e * other[k] + f * last[k]
            if (stop - start) & 1:
                value, first = values_2[p], below_2[stop - 1] * w
                other = x[first : first + w]
                for k in range(w):
                    a[k] -= value * other[k]
        for r in range(size - 1, -1, -1):
            scale, own, copy = inverses_2[j + r], x[(j + r) * w : (j + r + 1) * w], part[r * w : r * w + w]
            p = within + ((r * (7 - r)) >> 1)
            for s in range(r + 1, size):
                value, other = values_2[p], x[(j + s) * w : (j + s + 1) * w]
                p += 1
                for k in range(w):
                    copy[k] -= value * other[k]
            for k in range(w):
                own[k] = scale * copy[k]
    for i in range(n):
        first = out_of[i] * w
        for k in range(count):
            out[k * n + i] = x[first + k]
