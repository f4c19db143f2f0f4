"""The matrices W = M/γ - h J of Rosenbrock steps, J and M/τ - J of searches for steady states, and their LU factorizations.

They are sparse if this takes less work. `ColumnLU` factorizes dense matrices. Matrices with a small bandwidth, in reverse
Cuthill-McKee order, are factorized by compiled loops over the band, and others one by one by SuperLU, in an order of
minimum degree. The choice depends on the pattern only, by counted operations: not on the number of trajectories, whose
results it would change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import scipy

from mpiad._typing import Array
from mpiad.compiling.cache import functions_of
from mpiad.ensemble.column_lu import ColumnLU, Mass, Places

# Number of unknowns from which matrices may be sparse.
LEAST_SPARSE = 40
# The number of solves per factorization, and the costs, in operations of a banded factorization, of an operation of
# SuperLU, of a call of it, and of an operation of `ColumnLU`.
_SOLVES, _SUPERLU, _CALL, _COLUMNS = 8, 4, 50_000, 2
# Scaled matrices count as singular up to this ratio of the smallest to the largest singular value.
_SINGULAR = 1e-13


class SparseLU:
    """LU factorizations by SuperLU, one per matrix; None for singular matrices."""

    def __init__(self, factors: Sequence[scipy.sparse.linalg.SuperLU | None]):
        self._factors = factors

    def solve(self, x: Array, transposed: bool = False) -> None:
        """Replace right-hand sides, shape (d, n), by the solutions."""
        for c, lu in enumerate(self._factors):
            x[:, c] = np.nan if lu is None else lu.solve(np.ascontiguousarray(x[:, c]), "T" if transposed else "N")


class BandedLU:
    """LU factorizations of banded matrices; the factors overwrite the matrices, shape (d, height, n): see `Banded`."""

    def __init__(self, matrices: Array, band: Banded):
        self._factors, self._swaps = matrices, np.empty((len(matrices), band.lower, matrices.shape[2]), matrices.dtype)
        self._band = band.order, band.lower, band.upper
        factorize, *self._solve = _compiled(matrices.dtype.name)
        factorize(matrices, self._swaps, *self._band[1:])

    def solve(self, x: Array, transposed: bool = False) -> None:
        """Replace right-hand sides, shape (d, n), by the solutions."""
        self._solve[transposed](self._factors, self._swaps, x, *self._band)


LU: TypeAlias = "ColumnLU | BandedLU | SparseLU"


def reverse_cuthill_mckee(pattern: Places, d: int) -> Array:
    """Return the reverse Cuthill-McKee order of the symmetrized pattern."""
    # That of `scipy.sparse.csgraph`, whose import takes as long as the compilation of a small kernel.
    neighbors: list[set[int]] = [set() for _ in range(d)]
    for i, j in zip(pattern.rows.tolist(), pattern.columns.tolist()):
        neighbors[i].add(j)
        neighbors[j].add(i)
    degrees = [len(others) + (i in others) for i, others in enumerate(neighbors)]
    order, rest = list[int](), set(range(d))
    for start in np.argsort(np.array(degrees, np.int32)).tolist():
        following, place = {start} & rest, len(order)
        while following or place < len(order):
            order += sorted(following, key=lambda i: (degrees[i], i))
            rest -= following
            following = neighbors[order[place]] & rest
            place += 1
    return np.array(order[::-1])


class Banded:
    """A pattern with a small bandwidth, in reverse Cuthill-McKee order."""

    def __init__(self, pattern: Places, d: int):
        self.order = reverse_cuthill_mckee(pattern, d)
        row, column = (np.argsort(self.order)[indices] for indices in pattern)
        self.lower, self.upper = int((row - column).max(initial=0)), int((column - row).max(initial=0))
        # Entry (i, j) is at [j, lower + upper + i - j]; row exchanges need `lower` further diagonals.
        self._shape = d, 2 * self.lower + self.upper + 1
        self._index = column * self._shape[1] + self.lower + self.upper + row - column
        self.work = 2 * d * (self.lower * (self.lower + self.upper) + _SOLVES * self._shape[1])

    def factorized(self, entries: Array) -> BandedLU:
        """Return the factors of matrices with `entries`, shape (m, n)."""
        matrices = np.zeros((math.prod(self._shape), entries.shape[1]), entries.dtype)
        matrices[self._index] = entries
        return BandedLU(matrices.reshape(*self._shape, -1), self)


# Compiled functions; the innermost loops are over the matrices. Pivoting is pairwise: row k and each row below in which the
# entry may be nonzero are exchanged, if this entry is larger, before the entry is eliminated. Exchanges are selections, so
# that the loops have no branches. The diagonal of U is stored as reciprocals.
#
# References
# ----------
# D. C. Sorensen, Analysis of pairwise pivoting in Gaussian elimination, IEEE Transactions on Computers C-34 (1985).


@cache
def _compiled(dtype: str) -> list[Callable[..., None]]:
    matrices, vectors = f"{dtype}[:, :, ::1], {dtype}[:, :, ::1]", f"{dtype}[:, ::1], int64[::1]"
    solve = f"void({matrices}, {vectors}, int64, int64)"
    signatures = {_factorize: f"void({matrices}, int64, int64)", _substitute: solve, _substitute_transposed: solve}
    return functions_of(__name__, {f.__name__: signature for f, signature in signatures.items()})


def _factorize(w: np.ndarray, swaps: np.ndarray, lower: int, upper: int) -> None:
    d, n, width = w.shape[0], w.shape[2], lower + upper
    for k in range(d):
        for i in range(k + 1, min(k + lower + 1, d)):
            for c in range(n):
                upper_entry = w[k, width, c]
                other = w[k, width + i - k, c]
                exchanged = abs(other) > abs(upper_entry)
                swaps[k, i - k - 1, c] = 1 if exchanged else 0
                w[k, width, c] = other if exchanged else upper_entry
                quotient = upper_entry / other if exchanged else other / upper_entry
                w[k, width + i - k, c] = 0 * upper_entry if other == 0 else quotient
            for j in range(k + 1, min(k + width + 1, d)):
                for c in range(n):
                    upper_entry = w[j, width + k - j, c]
                    other = w[j, width + i - j, c]
                    pivot = other if swaps[k, i - k - 1, c] > 0 else upper_entry
                    w[j, width + k - j, c] = pivot
                    other = upper_entry if swaps[k, i - k - 1, c] > 0 else other
                    w[j, width + i - j, c] = other - w[k, width + i - k, c] * pivot
        for c in range(n):
            w[k, width, c] = 1 / w[k, width, c] + (w[k, width, c] - w[k, width, c])


def _substitute(w: np.ndarray, swaps: np.ndarray, x: np.ndarray, order: np.ndarray, lower: int, upper: int) -> None:
    d, n, width = w.shape[0], w.shape[2], lower + upper
    for k in range(d):
        for i in range(k + 1, min(k + lower + 1, d)):
            for c in range(n):
                upper_entry = x[order[k], c]
                other = x[order[i], c]
                pivot = other if swaps[k, i - k - 1, c] > 0 else upper_entry
                other = upper_entry if swaps[k, i - k - 1, c] > 0 else other
                x[order[k], c] = pivot
                x[order[i], c] = other - w[k, width + i - k, c] * pivot
    for k in range(d - 1, -1, -1):
        for c in range(n):
            x[order[k], c] = x[order[k], c] * w[k, width, c]
        for i in range(max(k - width, 0), k):
            for c in range(n):
                x[order[i], c] = x[order[i], c] - w[k, width + i - k, c] * x[order[k], c]


def _substitute_transposed(
    w: np.ndarray, swaps: np.ndarray, x: np.ndarray, order: np.ndarray, lower: int, upper: int
) -> None:
    d, n, width = w.shape[0], w.shape[2], lower + upper
    for k in range(d):
        for i in range(max(k - width, 0), k):
            for c in range(n):
                x[order[k], c] = x[order[k], c] - w[k, width + i - k, c] * x[order[i], c]
        for c in range(n):
            x[order[k], c] = x[order[k], c] * w[k, width, c]
    for k in range(d - 1, -1, -1):
        for i in range(min(k + lower, d - 1), k, -1):
            for c in range(n):
                other = x[order[i], c]
                upper_entry = x[order[k], c] - w[k, width + i - k, c] * other
                x[order[k], c] = other if swaps[k, i - k - 1, c] > 0 else upper_entry
                x[order[i], c] = upper_entry if swaps[k, i - k - 1, c] > 0 else other


class _MinimumDegree:
    """Any other pattern, in an order of minimum degree."""

    def __init__(self, pattern: Places, d: int):
        self._sorted, self._shape = np.lexsort(pattern), (d, d)
        rows, columns = (indices[self._sorted] for indices in pattern)
        self._structure = rows, np.searchsorted(columns, np.arange(d + 1))
        entries = np.where(pattern.rows == pattern.columns, 2.0 * d, 1.0)[:, None]  # no rows are exchanged
        works = {}
        for self._order in ("COLAMD", "MMD_AT_PLUS_A"):
            (lu,) = filter(None, self._factors_of(entries))
            # Counted products of a factorization: for each pivot, its column of L times its row of U.
            products = np.diff(lu.L.tocsc().indptr).astype(float) @ np.diff(lu.U.tocsr().indptr)
            works[self._order] = _SUPERLU * 2 * (products + _SOLVES * lu.nnz) + _CALL
        self._order = min(works, key=lambda order: works[order])
        self.work = works[self._order]

    def factorized(self, entries: Array) -> SparseLU:
        """Return the factors of matrices with `entries`, shape (m, n)."""
        return SparseLU(self._factors_of(entries))

    def _factors_of(self, entries: Array) -> list[scipy.sparse.linalg.SuperLU | None]:
        factors: list[scipy.sparse.linalg.SuperLU | None] = []
        for values in np.ascontiguousarray(entries[self._sorted].T):
            factors.append(None)
            if np.isfinite(values).all():
                with suppress(RuntimeError):  # exactly singular
                    factors[-1] = scipy.sparse.linalg.splu(
                        scipy.sparse.csc_array((values, *self._structure), self._shape), self._order
                    )
        return factors


def elimination_of(pattern: Places, d: int) -> Banded | _MinimumDegree | None:
    """Return how to factorize matrices with a pattern; None if `ColumnLU` takes less work."""
    dense = _COLUMNS * 2 * d * d * (d / 3 + _SOLVES)
    if d < LEAST_SPARSE or len(pattern.rows) > d * d / 4:
        return None
    elimination: Banded | _MinimumDegree = Banded(pattern, d)
    if elimination.work > _CALL:
        elimination = min(elimination, _MinimumDegree(pattern, d), key=lambda elimination: elimination.work)
    return elimination if elimination.work < dense else None


class StepMatrices:
    """The matrices W = M/γ - h J of many trajectories; J has entries at `places`."""

    def __init__(self, places: Places, mass: Mass, d: int, on_host: bool = True):
        self.mass, self._d = mass, d
        # W has entries at the places of J and M, and on the diagonal, which are numbered by row and column.
        parts = [rows * d + columns for rows, columns in (places, mass.places(d), (np.arange(d), np.arange(d)))]
        numbers = np.unique(np.concatenate(parts))
        self._pattern = Places(*np.divmod(numbers, d))
        self.elimination = elimination_of(self._pattern, d) if on_host else None
        self._of_jacobian, self._of_mass = (np.searchsorted(numbers, part) for part in parts[:2])

    def factorized(self, entries: Array, scale: Array | float = 1.0) -> LU:
        """Return the factors, given the entries of -h J, shape (m, n); M/γ may have a scale, shape (n,)."""
        matrices = np.zeros_like(entries, shape=(len(self._pattern.rows), entries.shape[1]))
        matrices[self._of_jacobian] = entries
        matrices[self._of_mass] += self.mass.scaled(entries.dtype) * scale
        if self.elimination is not None:
            return self.elimination.factorized(matrices)
        dense = np.zeros_like(entries, shape=(self._d, self._d, entries.shape[1]))
        dense[self._pattern] = matrices
        return ColumnLU(dense)


class Matrices:
    """Matrices J with entries at common places, shape (n, m). If this takes less work, `sparse_lu` factorizes them."""

    def __init__(self, places: Places, d: int, mass: Array | None):
        self.places, self._d, self._mass = places, d, np.eye(d) if mass is None else mass
        matrices = StepMatrices(places, Mass(mass, 1.0), d)
        self._sparse = matrices if matrices.elimination else None

    def solver(self, entries: Array, rates: Array | None = None, transposed: bool = False) -> Callable[[Array], Array]:
        """Return a function that solves J x = b, or (rate M - J) x = b, for right-hand sides b of shape (d, n)."""
        if self._sparse is None:
            matrices = self.dense(entries)
            matrices = matrices if rates is None else rates[:, None, None] * self._mass - matrices
            matrices = np.swapaxes(matrices, 1, 2) if transposed else matrices
            return lambda right: solved_each(matrices, right.T).T
        signed, scale = (entries.T, 0.0) if rates is None else (-entries.T, rates)
        lu = self._sparse.factorized(signed, scale)

        def solved(right: Array) -> Array:
            x = np.array(right, signed.dtype, order="C")  # rates are doubles
            lu.solve(x, transposed)
            x[:, ~right.any(axis=0)] = 0.0  # also if the matrix is singular
            return x

        return solved

    def singular(self, entries: Array, weight: Array) -> Array:
        """Return a mask of the singular matrices, shape (n,), independent of the units of components."""
        if self._sparse is None:
            scaled = self.dense(entries) * weight.T[:, None]
            rows = np.abs(scaled).max(axis=2, keepdims=True)
            rows[rows == 0] = 1.0
            values = np.linalg.svd(scaled / rows, compute_uv=False)
            return values[:, -1] <= _SINGULAR * values[:, 0]
        return np.array([self._singular(*one) for one in zip(entries, weight.T)], bool)

    def _singular(self, entries: Array, weight: Array) -> bool:
        d, (rows, columns) = self._d, self.places
        scaled: Any = scipy.sparse.csr_array((entries * weight[columns], (rows, columns)), (d, d))
        size = abs(scaled).max(axis=1).toarray().ravel()
        size[size == 0] = 1.0
        solve, transposed = (self.solver(entries[None], transposed=along) for along in (False, True))
        operator: Any = scipy.sparse.linalg.LinearOperator
        inverse = operator(
            (d, d),
            dtype=entries.dtype,
            matvec=lambda x: solve((size * x.ravel())[:, None])[:, 0] / weight,
            rmatvec=lambda x: transposed((x.ravel() / weight)[:, None])[:, 0] * size,
        )
        if not np.isfinite(inverse.matvec(np.ones(d))).all():
            return True
        norm: Any = scipy.sparse.linalg.onenormest(inverse)
        return bool(_SINGULAR * norm * abs(scaled / size[:, None]).sum(axis=0).max() >= 1)

    def dense(self, entries: Array) -> Array:
        """Return the matrices as an array of shape (n, d, d); NaN if any entry is NaN."""
        matrices = np.zeros((len(entries), self._d, self._d), entries.dtype)
        matrices[:, self.places.rows, self.places.columns] = entries
        matrices[np.isnan(entries).any(axis=1)] = np.nan
        return matrices


def solved_each(matrices: Array, right: Array) -> Array:
    """Return the solutions of n small systems, (n, d); for singular systems, least-squares solutions of minimum norm."""
    # Rows are scaled, since they may differ by powers of ten, for example in reaction networks.
    rows = np.abs(matrices).max(axis=2, keepdims=True, initial=0.0)
    rows[rows == 0] = 1.0
    matrices, right = matrices / rows, right[..., None] / rows
    try:
        return np.linalg.solve(matrices, right)[..., 0]
    except np.linalg.LinAlgError:
        # The systems are solved one by one, so that a singular system doesn't affect the others.
        x = np.empty_like(right[..., 0])
        for i, (matrix, b) in enumerate(zip(matrices, right[..., 0])):
            try:
                x[i] = np.linalg.solve(matrix, b)
            except np.linalg.LinAlgError:
                x[i] = np.linalg.pinv(matrix, rcond=_SINGULAR) @ b
        return x
