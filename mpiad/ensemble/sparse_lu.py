"""The matrices W = M/γ - h J of Rosenbrock steps, and their LU factorizations, sparse if this takes less work.

Sparse matrices are factorized one by one, in an order of the unknowns that is computed once from the pattern: by LAPACK as
banded matrices in reverse Cuthill-McKee order, or by SuperLU in an order of minimum degree. Dense ones are factorized
together by `ColumnLU`. The choice depends on counted operations of the pattern only, not on the number of trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse
from scipy.linalg.lapack import get_lapack_funcs
from scipy.sparse.csgraph import reverse_cuthill_mckee
from scipy.sparse.linalg import splu

from mpiad._typing import Array
from mpiad.ensemble.column_lu import ColumnLU, Mass, Places

# Number of unknowns from which matrices may be factorized one by one.
LEAST_SPARSE = 40
# The number of solves per factorization, and the costs, in operations of LAPACK, of an operation of SuperLU, of a call of
# it, and of an operation of `ColumnLU`.
_SOLVES, _SUPERLU, _CALL, _COLUMNS = 8, 4, 50_000, 2


class SparseLU:
    """LU factorizations of matrices whose unknowns are permuted: column j is solved by ``solvers[j](x, transposed)``."""

    def __init__(self, order: Array, solvers: Sequence[Callable[[Array, int], Array] | None]):
        self._order, self._solvers = order, solvers

    def solve(self, x: Array, transposed: int = 0) -> None:
        """Replace right-hand sides, shape (d, n), by the solutions; columns without a solver aren't changed."""
        rows = np.ascontiguousarray(x[self._order].T)
        for row, solver in zip(rows, self._solvers):
            if solver is not None:
                row[...] = solver(row, transposed)
        x[self._order] = rows.T

    def solve_transposed(self, x: Array) -> None:
        """Replace right-hand sides by the solutions with the transposed matrices."""
        self.solve(x, 1)


LU: TypeAlias = "ColumnLU | SparseLU"


def _no_solution(row: Array, transposed: int) -> Array:
    return np.full_like(row, np.nan)


class Banded:
    """A pattern with a small bandwidth."""

    def __init__(self, pattern: Places, d: int):
        ones = scipy.sparse.csr_array((np.ones(len(pattern.rows)), pattern), (d, d))
        self.order = reverse_cuthill_mckee(scipy.sparse.csr_array(ones + ones.T), symmetric_mode=True)
        row, column = (np.argsort(self.order)[indices] for indices in pattern)
        self.lower, self.upper = int((row - column).max(initial=0)), int((column - row).max(initial=0))
        # LAPACK needs `lower` further diagonals for row exchanges.
        self._shape = d, 2 * self.lower + self.upper + 1
        self._index = column * self._shape[1] + self.lower + self.upper + row - column
        self.work = 2 * d * (self.lower * (self.lower + self.upper) + _SOLVES * self._shape[1])

    def solvers(self, entries: Array, columns: Array) -> list[Callable[[Array, int], Array]]:
        """Factorize the matrices of some columns; `entries` has the shape (m, n)."""
        factorize, solve = get_lapack_funcs(("gbtrf", "gbtrs"), (entries,))
        bands, found = np.zeros((len(columns), *self._shape), entries.dtype), []
        bands.reshape(len(columns), -1)[:, self._index] = entries[:, columns].T
        for band in bands:
            lu, exchanges, singular = factorize(band.T, self.lower, self.upper, overwrite_ab=1)
            found.append(_no_solution if singular else partial(self._solved, solve, lu, exchanges))
        finite = np.isfinite(bands).all(axis=(1, 2))
        return [solver if usable else _no_solution for solver, usable in zip(found, finite)]

    def _solved(self, solve: Callable, lu: Array, exchanges: Array, row: Array, transposed: int) -> Array:
        return solve(lu, self.lower, self.upper, row, exchanges, transposed, overwrite_b=1)[0]


class _MinimumDegree:
    """Any other pattern."""

    def __init__(self, pattern: Places, d: int):
        values = np.where(pattern.rows == pattern.columns, 2.0 * d, 1.0)  # no rows are exchanged
        matrix = scipy.sparse.csc_array((values, pattern), (d, d))
        trials = [splu(matrix, permc_spec=spec) for spec in ("COLAMD", "MMD_AT_PLUS_A")]
        best: Any = min(trials, key=lambda lu: lu.nnz)
        # Counted products of a factorization: for each pivot, its column of L times its row of U.
        products = np.diff(best.L.tocsc().indptr).astype(float) @ np.diff(best.U.tocsr().indptr)
        self.order = np.argsort(best.perm_c)
        self.work = _SUPERLU * 2 * (products + _SOLVES * best.nnz) + _CALL
        row, column = (best.perm_c[indices] for indices in pattern)
        self._sorted = np.lexsort((row, column))
        starts = np.searchsorted(column[self._sorted], np.arange(d + 1))
        self._structure, self._shape = (row[self._sorted], starts), (d, d)

    def solvers(self, entries: Array, columns: Array) -> list[Callable[[Array, int], Array]]:
        """Factorize the matrices of some columns; `entries` has the shape (m, n)."""
        found: list[Any] = []
        for values in entries[self._sorted][:, columns].T:
            found.append(_no_solution)
            if np.isfinite(values).all():
                matrix = scipy.sparse.csc_array((values, *self._structure), self._shape)
                try:
                    found[-1] = partial(self._solved, splu(matrix, permc_spec="NATURAL"))
                except RuntimeError:
                    pass  # exactly singular
        return found

    @staticmethod
    def _solved(lu: Any, row: Array, transposed: int) -> Array:
        return lu.solve(row, "T" if transposed else "N")


def elimination_of(pattern: Places, d: int) -> Banded | _MinimumDegree | None:
    """Return how to factorize matrices with a pattern one by one; None if `ColumnLU` takes less work."""
    dense = _COLUMNS * 2 * d * d * (d / 3 + _SOLVES)
    if d < LEAST_SPARSE or len(pattern.rows) > d * d / 4:
        return None
    found: Banded | _MinimumDegree = Banded(pattern, d)
    if found.work > _CALL:
        found = min(found, _MinimumDegree(pattern, d), key=lambda elimination: elimination.work)
    return found if found.work < dense else None


class StepMatrices:
    """The matrices W = M/γ - h J of many trajectories; J has entries at `places`."""

    def __init__(self, places: Places, mass: Mass, d: int, on_host: bool = True):
        self._places, self._mass, self._d = places, mass, d
        # W has entries at the places of J and M, and on the diagonal, which are numbered by row and column.
        parts = [rows * d + columns for rows, columns in (places, mass.places(d), (np.arange(d), np.arange(d)))]
        numbers = np.unique(np.concatenate(parts))
        self.elimination = elimination_of(Places(*np.divmod(numbers, d)), d) if on_host else None
        self._count = len(numbers)
        self._of_jacobian, self._of_mass = (np.searchsorted(numbers, part) for part in parts[:2])

    def factorized(self, entries: Array, h: Array, scale: Array | float = 1.0) -> LU:
        """Return the factors, given the entries of -h J, shape (m, n); steps of size 0 need no factors if W is sparse.

        For sparse matrices, M/γ may be multiplied by a `scale`, shape (n,).
        """
        n = entries.shape[1]
        if self.elimination is None:
            matrices = np.zeros_like(entries, shape=(self._d, self._d, n))
            matrices[self._places] = entries
            self._mass.add_to(matrices)
            return ColumnLU(matrices)
        matrices = np.zeros((self._count, n), entries.dtype)
        matrices[self._of_jacobian] = entries
        matrices[self._of_mass] += self._mass.scaled(self._d).astype(entries.dtype)[:, None] * scale
        columns, solvers = np.flatnonzero(h), np.full(n, None)
        solvers[columns] = self.elimination.solvers(matrices, columns)
        return SparseLU(self.elimination.order, solvers)
