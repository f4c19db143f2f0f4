"""SuperLU's factors of a sparse matrix on one rank, and solves with them for one or several right-hand sides.

After some solves by SuperLU, a compiled loop is used instead, which takes half the time for one right-hand side, and reads
each entry of the factors once for several of them. It is written in the kernel language of `mpiad.compiling.translation`,
and compiled from the source code of this file. The right-hand sides are the innermost axis of its array x.

With permutation matrices P and Q, the factors of A are P A Q = L U. The columns of L and the rows of U are stored. A solve
with A runs forward along the columns of L, and backward along the rows of U. Since Qᵀ Aᵀ Pᵀ = Uᵀ Lᵀ, a solve with Aᵀ runs
forward along the rows of U, and backward along the columns of L. Four successive columns are used together, so that x is
read and written once for all four. Most of them have entries in the same rows ("supernodes"); missing entries are zeros.

References
----------
J. W. Demmel, S. C. Eisenstat, J. R. Gilbert, X. S. Li and J. W. H. Liu, A supernodal approach to sparse partial pivoting,
SIAM Journal on Matrix Analysis and Applications 20 (1999).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
from scipy.sparse.csgraph import depth_first_order
from scipy.sparse.linalg import splu

from mpiad._typing import LocalArray
from mpiad.compiling.arguments import address_of
from mpiad.compiling.cache import functions_of

_MOST = 32  # right-hand sides of one call of the compiled loop
lanes = range  # a loop by vectors of the kernel language
# The number of solves by SuperLU for one right-hand side, and those that count as much as one for several right-hand sides:
# preparing the compiled loop takes as long as they take.
_FIRST_SOLVES, _SEVERAL = 1000, 250


class SparseFactors:
    """The factors of a square CSR or CSC matrix; raises a ValueError if the matrix, called `name`, is singular."""

    def __init__(self, matrix: Any, name: str):
        columns = matrix.tocsc()
        ordering = "MMD_AT_PLUS_A" if _has_diagonal_pivots(matrix.tocsr(), columns) else None
        try:
            # Panels of one column take the least time for stencils in two dimensions, at least up to 256 x 256 unknowns.
            self._factors: Any = splu(columns, ordering, panel_size=1)
        except RuntimeError as error:
            text = f"{name} can't be factorized: {error}."
            # The null vector, by one inverse iteration with a small shift, is largest in the unknowns that cause this.
            shift = 1e-10 * max(float(np.abs(matrix.data).max(initial=0.0)), 1.0)
            start = np.random.default_rng(0).standard_normal(matrix.shape[0]).astype(matrix.dtype)
            with contextlib.suppress(RuntimeError):
                vector = splu((columns + shift * scipy.sparse.eye_array(matrix.shape[0])).tocsc()).solve(start)
                text += f" The null vector is largest in row {int(np.abs(vector).argmax())}."
            raise ValueError(text) from error
        self._dtype, self._solves = np.result_type(matrix.dtype, np.float32), 0  # see `_FIRST_SOLVES`
        self._block_solver: _BlockSolver | None = None
        self._matrix, self._name = matrix, name
        self._wider: SparseFactors | None = None  # in the precision of right-hand sides with more digits

    def solve(self, rows: LocalArray, kind: str = "N") -> LocalArray:
        """Return the solutions for right-hand sides (k, n), or the transposed matrix's if `kind` is "T"."""
        if rows.dtype.kind == "c" and self._dtype.kind == "f":
            return self.solve(rows.real, kind) + 1j * self.solve(rows.imag, kind)
        if not np.can_cast(rows.dtype, self._dtype):  # SuperLU doesn't convert them
            dtype = np.result_type(rows, self._dtype)
            self._wider = self._wider or SparseFactors(self._matrix.astype(dtype), self._name)
            return self._wider.solve(rows, kind)
        if not len(rows):
            return rows.copy()
        rows = np.ascontiguousarray(rows)
        compiled = self._compiled_solver(rows)
        return self._factors.solve(rows.T, kind).T if compiled is None else compiled(rows, kind)

    def prepared(self, rows: np.ndarray, out: np.ndarray, kind: str) -> Callable[[], None]:
        """Return a function that solves for a fixed right-hand side, both contiguous arrays of shape (1, n)."""
        addresses = address_of(rows), address_of(out)

        def run() -> None:
            compiled = self._compiled_solver(rows)
            if compiled is None:
                out[...] = self._factors.solve(rows.T, kind).T
            else:
                compiled.run(*addresses, 1, kind)

        return run

    def _compiled_solver(self, rows: np.ndarray) -> _BlockSolver | None:
        """Return the compiled loop; None if SuperLU solves for these right-hand sides."""
        if rows.dtype != np.float64 or self._dtype != np.float64:
            return None
        if self._block_solver is None:
            if self._solves < _FIRST_SOLVES:
                self._solves += 1 if len(rows) == 1 else _SEVERAL
                return None
            self._block_solver = _BlockSolver(self._factors)
        return self._block_solver


def _has_diagonal_pivots(rows: Any, columns: Any) -> bool:
    """Return whether a matrix, in both formats, has a symmetric pattern, and is diagonally dominant in each column."""
    # Then SuperLU takes pivots on the diagonal, and the minimum degree ordering of the pattern leads to about half the
    # entries that COLAMD leads to for stencils in two dimensions: COLAMD allows for any choice of the pivots.
    diagonal = np.abs(columns.diagonal())
    is_symmetric = np.array_equal(rows.indptr, columns.indptr) and np.array_equal(rows.indices, columns.indices)
    if not (is_symmetric and diagonal.all()):
        return False
    sums = np.add.reduceat(np.abs(columns.data), columns.indptr[:-1])
    return bool((sums <= (2.0 + 1e-6) * diagonal).all())  # dominance may hold up to rounding


class _Triangle(NamedTuple):
    """A lower triangular matrix in groups of four columns; its size is a multiple of four."""

    starts: np.ndarray  # the first entry in `rows` of each group, and the number of entries
    rows: np.ndarray  # the rows below each group with nonzero entries
    # For each group, first the six entries within the group, column by column, then four entries for each of its rows.
    values: np.ndarray
    inverses: np.ndarray  # of the diagonal

    @classmethod
    def of(cls, matrix: Any, order: np.ndarray) -> _Triangle:
        """Return a lower triangular matrix; `order`: the new number of each row and column."""
        below: Any = scipy.sparse.tril(matrix, -1, format="coo")
        rows, columns, n = order[below.row], order[below.col], -(-len(order) // 4) * 4
        groups, first = columns // 4, columns % 4
        inside = rows // 4 == groups
        keys, places = np.unique((groups * n + rows)[~inside], return_inverse=True)
        starts = np.searchsorted(keys, np.arange(n // 4 + 1) * n)
        values, inverses = np.zeros(6 * (n // 4) + 4 * len(keys)), np.ones(n)
        values[(6 * (groups + 1) + first)[~inside] + 4 * places] = below.data[~inside]
        begins = 6 * groups + 4 * starts[groups] + first * (7 - first) // 2
        values[(begins + rows % 4 - first - 1)[inside]] = below.data[inside]
        inverses[order] = 1.0 / matrix.diagonal()
        return cls(starts, (keys % n).astype(np.int32), values, inverses)


class _Block(NamedTuple):
    """The block of a call (see `compiling.cache`), the number of its right-hand sides, and its arrays."""

    words: np.ndarray
    address: int
    count: int
    arrays: list[np.ndarray]


class _BlockSolver:
    """Solves with SuperLU's factors by a compiled loop."""

    def __init__(self, factors: Any):
        matrices = factors.L, factors.U.T.tocsc()
        places = _places(*matrices)
        lower, upper = (_Triangle.of(matrix, places) for matrix in matrices)
        into, out_of = (places[permutation] for permutation in (factors.perm_r, factors.perm_c))
        self._arrays = {"N": [*lower, *upper, into, out_of], "T": [*upper, *lower, out_of, into]}
        self._kernel = _kernel()
        # The unused block of a kind.
        self._unused: dict[str, _Block] = {}

    def __call__(self, rows: np.ndarray, kind: str) -> np.ndarray:
        """Return the solutions for rows (k, n) of doubles, or the transposed matrix's if `kind` is "T"."""
        out = np.empty_like(rows)
        for start in range(0, len(rows), _MOST):
            part = slice(start, start + _MOST)
            self.run(address_of(rows[part]), address_of(out[part]), len(rows[part]), kind)
        return out

    def run(self, rows: int, out: int, count: int, kind: str) -> None:
        """Solve for at most `_MOST` right-hand sides at an address."""
        block = self._unused.pop(kind, None)  # another thread may use one at the same time
        if block is None or block.count != count:
            block = self._block(kind, count)
        block.words[-4], block.words[-2] = rows, out
        self._kernel(block.address)
        self._unused[kind] = block

    def _block(self, kind: str, count: int) -> _Block:
        """Return a block, in which the addresses of the right-hand sides and solutions are still missing."""
        # Vectors of the loop have 8 entries; a single right-hand side needs none.
        n, width = len(self._arrays[kind][-1]), 1 if count == 1 else count + -count % 8
        arrays = [np.array([width, count]), *self._arrays[kind], np.zeros((n + 3) * width)]
        words = [word for array in arrays for word in (array.ctypes.data, array.size)]
        block = np.array([0, 0, *words, 0, n * count, 0, n * count])
        return _Block(block, address_of(block), count, arrays)


def _places(lower: Any, upper: Any) -> np.ndarray:
    """Return the new place of each row and column of two lower triangular CSC matrices, which remain triangular."""
    # In a postorder of the elimination tree, most successive columns have entries in the same rows.
    n, below = lower.shape[0], scipy.sparse.tril(lower, -1, format="coo")
    parents = np.full(n, n)
    np.minimum.at(parents, below.col, below.row)
    # A reversed preorder is a postorder. In it the child that was visited first precedes the parent: the last one.
    tree = scipy.sparse.csr_array((np.ones(n), (n - parents, np.arange(n, 0, -1))), shape=(n + 1, n + 1))
    places = np.argsort(n - depth_first_order(tree, 0, return_predecessors=False)[:0:-1])
    # Without a symmetric pattern, a row isn't always an ancestor of the columns in which it has entries.
    is_valid = all((places[matrix.indices] >= np.repeat(places, np.diff(matrix.indptr))).all() for matrix in (lower, upper))
    return places if is_valid else np.arange(n)


@functools.cache
def _kernel() -> Callable[[int], object]:
    numbers, values = "int64[::1]", "float64[::1]"
    triangle = [numbers, "int32[::1]", values, values]
    signature = f"linked({', '.join([numbers, *triangle, *triangle, numbers, numbers, *[values] * 3])})"
    return functions_of(__name__, {"substitute": signature})[0]


def substitute(
    widths: np.ndarray,
    starts: np.ndarray, below: np.ndarray, values: np.ndarray, inverses: np.ndarray,
    starts_2: np.ndarray, below_2: np.ndarray, values_2: np.ndarray, inverses_2: np.ndarray,
    into: np.ndarray, out_of: np.ndarray, x: np.ndarray, rows: np.ndarray, out: np.ndarray,
) -> None:  # fmt: skip
    """Solve with the first triangle, and then with the transpose of the second; x has `width` numbers per unknown."""
    w, count, n = widths[0], widths[1], into.shape[0]
    for part in range(0, n, 8):  # 8 doubles are a cache line of most processors
        for k in range(count):
            for i in range(part, min(part + 8, n)):
                x[into[i] * w + k] = rows[k * n + i]
    for k in range(n * w, x.shape[0]):  # rows that complete the last group
        x[k] = 0.0
    for g in range(starts.shape[0] - 1):
        j = 4 * g
        if w == 1:
            x[j], x[j + 1], x[j + 2], x[j + 3] = _forward(0, w, g, starts, below, values, inverses, x)
        else:
            for k in lanes(w):
                a, b, c, d = _forward(k, w, g, starts, below, values, inverses, x)
                x[j * w + k], x[(j + 1) * w + k], x[(j + 2) * w + k], x[(j + 3) * w + k] = a, b, c, d
    for g in range(starts_2.shape[0] - 2, -1, -1):
        j = 4 * g
        if w == 1:
            x[j], x[j + 1], x[j + 2], x[j + 3] = _backward(0, w, g, starts_2, below_2, values_2, inverses_2, x)
        else:
            for k in lanes(w):
                a, b, c, d = _backward(k, w, g, starts_2, below_2, values_2, inverses_2, x)
                x[j * w + k], x[(j + 1) * w + k], x[(j + 2) * w + k], x[(j + 3) * w + k] = a, b, c, d
    for part in range(0, n, 8):
        for k in range(count):
            for i in range(part, min(part + 8, n)):
                out[k * n + i] = x[out_of[i] * w + k]


def _forward(
    k: int, w: int, g: int, starts: np.ndarray, below: np.ndarray, values: np.ndarray, inverses: np.ndarray, x: np.ndarray
) -> tuple[float, float, float, float]:
    """Return the unknowns of group g for the right-hand side k, and eliminate them from the following rows."""
    p, j = 6 * g + 4 * starts[g], 4 * g
    a = inverses[j] * x[j * w + k]
    b = inverses[j + 1] * (x[(j + 1) * w + k] - values[p] * a)
    c = inverses[j + 2] * (x[(j + 2) * w + k] - values[p + 1] * a - values[p + 3] * b)
    d = inverses[j + 3] * (x[(j + 3) * w + k] - values[p + 2] * a - values[p + 4] * b - values[p + 5] * c)
    i = p + 6
    for q in range(starts[g], starts[g + 1]):
        x[below[q] * w + k] -= values[i] * a + values[i + 1] * b + values[i + 2] * c + values[i + 3] * d
        i += 4
    return a, b, c, d


def _backward(
    k: int, w: int, g: int, starts: np.ndarray, below: np.ndarray, values: np.ndarray, inverses: np.ndarray, x: np.ndarray
) -> tuple[float, float, float, float]:
    """Return the unknowns of group g for the right-hand side k, given the following ones."""
    p, j = 6 * g + 4 * starts[g], 4 * g
    a, b, c, d = x[j * w + k], x[(j + 1) * w + k], x[(j + 2) * w + k], x[(j + 3) * w + k]
    i = p + 6
    for q in range(starts[g], starts[g + 1]):
        other = x[below[q] * w + k]
        a -= values[i] * other
        b -= values[i + 1] * other
        c -= values[i + 2] * other
        d -= values[i + 3] * other
        i += 4
    d *= inverses[j + 3]
    c = inverses[j + 2] * (c - values[p + 5] * d)
    b = inverses[j + 1] * (b - values[p + 3] * c - values[p + 4] * d)
    a = inverses[j] * (a - values[p] * b - values[p + 1] * c - values[p + 2] * d)
    return a, b, c, d
