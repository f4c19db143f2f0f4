"""Which rows of a matrix each rank holds: given by each, or cut from the root's whole."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse

from mpiad._typing import Array, Rank
from mpiad.transport import Channel
from mpiad.transport.agreement import raise_together, raising_together
from mpiad.transport.buffers import even_lengths


def local_rows(used: Channel, rows: object, columns: int | None) -> tuple:
    """Return this rank's rows in CSR form, its slices of rows and columns, all ranks' offsets, and the row pointers.

    Raises on all ranks as `DistributedMatrix`.
    """
    with raising_together(used):
        _require_matrix(rows, "DistributedMatrix: rows")
        if columns is not None and (not isinstance(columns, (int, np.integer)) or columns < 0):
            raise ValueError(f"DistributedMatrix: columns must be zero or more, but got {columns!r}.")
    matrix: Any = scipy.sparse.csr_matrix(rows)
    if not matrix.has_canonical_format:
        # A copy, because entries named twice are added up in place, and the matrix is the caller's.
        matrix = matrix.copy()
        matrix.sum_duplicates()
    mine = np.array([matrix.shape[0], matrix.shape[0] if columns is None else columns, matrix.shape[1]], np.int64)
    every = np.empty((used.size, 3), np.int64)
    used.data.Allgather(mine, every)
    raise_together(used, _misfit(every, columns))
    offsets = [np.concatenate([[0], np.cumsum(every[:, k])]) for k in (0, 1)]
    own = [slice(int(at[used.rank]), int(at[used.rank + 1])) for at in offsets]
    return matrix, own, offsets, matrix.indptr


def _require_matrix(matrix: Array, what: str) -> None:
    if not scipy.sparse.issparse(matrix):
        raise TypeError(
            f"{what} must be a sparse matrix or sparse array of SciPy's, but got {type(matrix).__name__}. "
            "scipy.sparse.csr_array makes one of an array."
        )
    if matrix.dtype.char not in "fdFD":
        raise TypeError(f"{what} must have dtype float32, float64, complex64 or complex128, but got {matrix.dtype}.")
    if matrix.ndim != 2:
        raise ValueError(f"{what} must have two dimensions, but got shape {matrix.shape}.")


def _misfit(every: np.ndarray, columns: int | None) -> Exception | None:
    rows, parts, totals = (every[:, k].tolist() for k in range(3))
    if len(set(totals)) > 1:
        return ValueError(f"DistributedMatrix: rows of all ranks must have one number of columns, but got {totals}.")
    if sum(parts) != totals[0]:
        said = f"the ranks' rows, {rows}, add up to {sum(rows)}"
        if columns is not None:
            said = f"columns={parts} adds up to {sum(parts)}"
        return ValueError(
            f"DistributedMatrix: {said}, but the matrix has {totals[0]} columns. Say with columns= how many of them "
            "belong to each rank."
        )
    return None


def rows_of(used: Channel, matrix: Any, root: Rank, counts: Sequence[int] | None) -> tuple[Any, int]:
    """Return this rank's rows of the root's matrix, and its number of columns; raises as `DistributedMatrix.from_scipy`."""
    if not 0 <= root < used.size:
        raise ValueError(f"DistributedMatrix.from_scipy: root must be a rank from 0 to {used.size - 1}, but got {root!r}.")
    pieces = None
    with raising_together(used):
        if used.rank == root:
            _require_matrix(matrix, "DistributedMatrix.from_scipy: matrix")
            _require_counts(counts, used.size, matrix.shape[0])
            pieces = _cut(scipy.sparse.csr_matrix(matrix), used.size, counts)
    return used.data.scatter(pieces, root)


def _require_counts(counts: Sequence[int] | None, size: int, total: int) -> None:
    if counts is None:
        return
    try:
        rows = [operator.index(count) for count in counts]
    except TypeError:  # whatever it is, the other ranks wait to hear of it
        rows = []
    if not (len(rows) == size and min(rows) >= 0 and sum(rows) == total):
        raise ValueError(
            f"DistributedMatrix.from_scipy: counts must be {size} numbers, none negative, that add up to {total} rows, but "
            f"got {counts!r}."
        )


def _cut(matrix: Array, size: int, counts: Sequence[int] | None) -> list[tuple[Any, int]]:
    rows = even_lengths(matrix.shape[0], size) if counts is None else list(counts)
    columns = rows if matrix.shape[0] == matrix.shape[1] else even_lengths(matrix.shape[1], size)
    stops = np.cumsum(rows)
    return [(matrix[stop - n : stop], int(m)) for stop, n, m in zip(stops, rows, columns)]
