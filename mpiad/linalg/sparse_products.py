"""Products with sparse matrices, differentiable to any order.

`sparse_matmul` is the product with a constant matrix of one rank. The other products are with a matrix A whose rows are
distributed over the ranks. They are the derivatives of the trilinear form T(v, x, y) = Σ_k v_k x_col(k) y_row(k), a sum
over the entries k of A: the derivative with respect to y is A x, with respect to x it is Aᵀ y, and with respect to the
values v it consists of the products x_col(k) y_row(k). Since T is linear in each argument, the adjoints of each of these
operators are the other two, and derivatives of any order consist of the three operators. No factor is conjugated. The sums
are computed by SciPy on the host, and by `Segments` on devices.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse
from autograd.tracer import getval

from mpiad._typing import Array, LocalArray
from mpiad.device.transfer import Constants
from mpiad.differentiation.segment_sum import Segments, add_segments
from mpiad.extend import custom_operator, defjvp, defvjp
from mpiad.linalg.vectors import require_block
from mpiad.redistribution import GhostExchange
from mpiad.redistribution.ghosts import accumulate_ghosts, fetch_ghosts
from mpiad.transport.core.tracing import tracing
from mpiad.transport.devices.device_arrays import arrays_of, contiguous, named


def fetch_entries(x: LocalArray, ghosts: GhostExchange) -> LocalArray:
    """Return the needed entries (..., n_needed) of x (..., n_owned); collective."""
    return np.moveaxis(fetch_ghosts(np.moveaxis(x, -1, 0), ghosts), 0, -1)


def add_to_owners(entries: LocalArray, ghosts: GhostExchange, out: LocalArray) -> None:
    """Add entries (..., n_needed) to the owners' `out` (..., n_owned): the transpose of `fetch_entries`; collective."""
    if ghosts.sources or ghosts.destinations:
        out += np.moveaxis(accumulate_ghosts(contiguous(np.moveaxis(entries, -1, 0)), ghosts), 0, -1)


class Pattern:
    """The sparsity pattern of this rank's rows, with row pointers `starts`; ghost columns follow this rank's columns."""

    def __init__(self, columns: np.ndarray, starts: np.ndarray, shape: tuple[int, int], ghosts: GhostExchange):
        self.width, self.comm = shape[1] + ghosts.n_needed, ghosts.comm
        # If the types of the index arrays differed, SciPy would copy them for each product.
        kind = np.int32 if max(len(columns), self.width) < 2**31 else np.int64
        self.columns, self.starts, self.shape, self.ghosts = columns.astype(kind), starts.astype(kind), shape, ghosts
        self.rows = np.repeat(np.arange(shape[0]), np.diff(starts))  # the row of each entry

    @cached_property
    def indices(self) -> Constants:
        """The column and row of each entry, for use on devices."""
        return Constants(self.columns, self.rows.astype(self.columns.dtype))

    @cached_property
    def by_row(self) -> Segments:
        """The sums of entries in each row, for use on devices."""
        return Segments(self.rows.astype(self.columns.dtype), self.shape[0])

    @cached_property
    def by_column(self) -> Segments:
        """The sums of entries in each column, for use on devices."""
        return Segments(self.columns, self.width)

    def matrix(self, values: LocalArray) -> scipy.sparse.csr_matrix:
        """Return this rank's rows as a matrix that shares the memory of the values; its columns include the ghosts."""
        return scipy.sparse.csr_matrix((values, self.columns, self.starts), (self.shape[0], self.width), copy=False)

    def extended(self, x: LocalArray) -> LocalArray:
        """Return this rank's part of x followed by the ghosts; collective."""
        if not (self.ghosts.sources or self.ghosts.destinations):
            return x
        return np.concatenate([x, fetch_entries(x, self.ghosts)], axis=-1)


@custom_operator
def product(values: LocalArray, x: LocalArray, pattern: Pattern) -> LocalArray:
    """Return this rank's part of A x, shape (..., rows), from the values of A's entries and x, shape (..., columns)."""
    extended = pattern.extended(x)
    xp = arrays_of(values)
    if xp is None:
        return _times(pattern.matrix(values), extended)
    columns, _ = pattern.indices.on(xp)
    return pattern.by_row.of_padded(_entry_products(values, extended[..., columns]))


@custom_operator
def transposed_product(values: LocalArray, y: LocalArray, pattern: Pattern) -> LocalArray:
    """Return this rank's part of Aᵀ y, shape (..., columns), from the values of A's entries and y, shape (..., rows)."""
    own, xp = pattern.shape[1], arrays_of(values)
    if xp is None:
        extended = _times(pattern.matrix(values).T, y)
    else:
        _, rows = pattern.indices.on(xp)
        extended = pattern.by_column.of_padded(_entry_products(values, y[..., rows]))
    out = contiguous(extended[..., :own])
    add_to_owners(extended[..., own:], pattern.ghosts, out)
    return out


@custom_operator
def values_product(x: LocalArray, y: LocalArray, pattern: Pattern) -> LocalArray:
    """Return x_col(k) y_row(k) for each entry k of this rank's rows, shape (nnz,), summed over leading axes."""
    xp = arrays_of(x)
    columns, rows = (pattern.columns, pattern.rows) if xp is None else pattern.indices.on(xp)
    parts = pattern.extended(x)[..., columns] * y[..., rows]
    return parts.sum(axis=tuple(range(parts.ndim - 1)))


def _entry_products(values: LocalArray, of_vector: LocalArray) -> LocalArray:
    """Return the elementwise products of matrix values and vector entries on a device, followed by a zero."""
    xp: Any = arrays_of(values)
    lead, count = of_vector.shape[:-1], of_vector.shape[-1]
    out = xp.empty((*lead, count + 1), np.result_type(values.dtype, of_vector.dtype))
    np.multiply(values, of_vector, out=out[..., :count])
    out[..., count] = 0
    return out


def _times(matrix: scipy.sparse.spmatrix, x: LocalArray) -> LocalArray:
    if x.ndim == 1:
        return matrix @ x
    # All vectors are the columns of one product, so that the matrix is read only once.
    flat = matrix @ x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).T
    return np.ascontiguousarray(flat.T).reshape(*x.shape[:-1], matrix.shape[0])


# The vector-Jacobian products follow from the trilinear form (see the top of the file).
defvjp(
    product,
    lambda ans, values, x, pattern: lambda g: values_product(x, g, pattern),
    lambda ans, values, x, pattern: lambda g: transposed_product(values, g, pattern),
)
defvjp(
    transposed_product,
    lambda ans, values, y, pattern: lambda g: values_product(g, y, pattern),
    lambda ans, values, y, pattern: lambda g: product(values, g, pattern),
)
defvjp(
    values_product,
    lambda ans, x, y, pattern: lambda g: transposed_product(g, y, pattern),
    lambda ans, x, y, pattern: lambda g: product(g, x, pattern),
)
# Each operator is linear in each of its two arrays.
for _operator in (product, transposed_product, values_product):
    defjvp(
        _operator,
        lambda g, ans, a, b, pattern, fun=_operator: fun(g, b, pattern),
        lambda g, ans, a, b, pattern, fun=_operator: fun(a, g, pattern),
    )


class ProductWith:
    """A matrix, or its transpose if `transposed`, as an operator for `solve`."""

    def __init__(self, pattern: Pattern, transposed: bool):
        self.pattern, self.transposed = pattern, transposed

    def __call__(self, u: LocalArray, values: LocalArray) -> LocalArray:
        """Return this rank's part of the product."""
        return (transposed_product if self.transposed else product)(values, u, self.pattern)

    def transpose(self, u: LocalArray, values: LocalArray) -> LocalArray:
        """Return this rank's part of the product with the transpose."""
        return (product if self.transposed else transposed_product)(values, u, self.pattern)


def sparse_matmul(A: Array, x: LocalArray) -> LocalArray:  # noqa: N803 the name of SciPy's argument
    """Return the product A x of a constant sparse matrix and an array, both of this rank.

    Parameters
    ----------
    A : SciPy sparse matrix or sparse array of shape (m, n)
        The matrix, of dtype float32, float64, complex64 or complex128. It must not change before the reverse pass.
    x : array of shape (n,) or (..., n, k)
        A vector, or the k columns of a matrix, as for ``A @ x``.

    Returns
    -------
    array of shape (m,) or (..., m, k)

    Raises
    ------
    TypeError
        If `A` isn't a sparse matrix of floats, or `x` isn't an array of floats on the host.
    ValueError
        If the shapes don't match.

    Ranks
    -----
    Each rank calls it independently. For matrices whose rows are distributed over the ranks, use `DistributedMatrix`.

    Adjoint
    -------
    x gets Aᵀ times the cotangent, without conjugation. No derivative flows to A.

    Examples
    --------
    >>> import scipy.sparse
    >>> A = scipy.sparse.csr_array([[1.0, 2.0], [0.0, 3.0]])
    >>> print(mpiad.linalg.sparse_matmul(A, np.ones(2)))
    [3. 3.]
    >>> print(mpiad.grad(lambda x: np.sum(mpiad.linalg.sparse_matmul(A, x)), objective="sum")(np.ones(2)))
    [1. 5.]
    """
    call, plain = "linalg.sparse_matmul", getval(x)
    require_matrix(A, f"{call}: A")
    require_block(call, "x", plain)
    axis = -1 if plain.ndim == 1 else -2
    if not plain.ndim or plain.shape[axis] != A.shape[1]:
        raise ValueError(
            f"{call}: for A of shape {A.shape}, x must have shape ({A.shape[1]},) or (..., {A.shape[1]}, k), but has "
            f"{plain.shape}."
        )
    if tracing.recorder is not None and plain.ndim == 1:  # the loops of a compiled program contain the product
        rows = A.tocsr()
        numbers = np.repeat(np.arange(A.shape[0]), np.diff(rows.indptr))
        return add_segments(x[rows.indices] * rows.data, Segments(numbers, A.shape[0]))
    return _constant_product(x, A, axis)


@custom_operator
def _constant_product(x: LocalArray, matrix: Any, axis: int) -> LocalArray:
    """Return the product of a constant matrix with an array along one of its axes."""
    if arrays_of(x) is not None:
        raise TypeError(
            f"linalg.sparse_matmul: x must be on the host, like A, but is {named(x)}. See mpiad.device.to_host."
        )
    moved = np.moveaxis(x, axis, 0)
    out = matrix @ moved.reshape(len(moved), math.prod(moved.shape[1:]))
    return np.moveaxis(out.reshape(matrix.shape[0], *moved.shape[1:]), 0, axis)


defvjp(_constant_product, lambda ans, x, matrix, axis: lambda g: _constant_product(g, matrix.T, axis))
defjvp(_constant_product, lambda g, ans, x, matrix, axis: _constant_product(g, matrix, axis))
_constant_product.batched_adjoint = True


def require_matrix(matrix: Array, name: str) -> None:
    """Raise a TypeError or ValueError if an argument isn't a sparse matrix of floats with two dimensions."""
    if not scipy.sparse.issparse(matrix):
        raise TypeError(
            f"{name} must be a sparse matrix or sparse array of SciPy, but got {type(matrix).__name__}. "
            "scipy.sparse.csr_array(x) converts an array x."
        )
    if matrix.dtype.char not in "fdFD":
        raise TypeError(f"{name} must have dtype float32, float64, complex64 or complex128, but got {matrix.dtype}.")
    if matrix.ndim != 2:
        raise ValueError(f"{name} must have two dimensions, but got shape {matrix.shape}.")
