"""`DistributedMatrix`: a sparse matrix whose rows are distributed over the ranks; each rank uses SciPy's matrices."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import autograd.numpy as anp
import numpy as np
import scipy.sparse
from autograd.tracer import getval, isbox

from mpiad._typing import Array, Comm, Function, LocalArray, Rank
from mpiad.device.assembly import concatenate
from mpiad.device.transfer import Constants
from mpiad.differentiation.segment_sum import segment_sum
from mpiad.domain import Domain
from mpiad.linalg.probing import Probing, checked_product, kind_of, local_numbers, positions, probing_of, require_pattern
from mpiad.linalg.solve import require_functions, solve
from mpiad.linalg.sparse_factors import SparseFactors
from mpiad.linalg.sparse_products import (
    Pattern,
    ProductWith,
    product,
    require_matrix,
    transposed_product,
)
from mpiad.linalg.vectors import on_host, require_block, require_on_host, require_together, through_host
from mpiad.primitives import stop_gradient
from mpiad.primitives.catalogue import ALLGATHER, ALLTOALL, Blocks, Dividing
from mpiad.primitives.checks import positive_count
from mpiad.primitives.cotangents import spec_like
from mpiad.primitives.operation import communicate, suspended
from mpiad.pytrees import flatten
from mpiad.transport import Channel, channel
from mpiad.transport.core.agreement import agreed, alike_on_all, raising_together
from mpiad.transport.core.buffers import even_lengths
from mpiad.transport.core.channels import on_any_rank
from mpiad.transport.core.messages import prepared_gather
from mpiad.transport.core.tracing import restoring_state
from mpiad.transport.devices.device_arrays import arrays_of, is_array, zeros_like
from mpiad.transport.exits.user_failures import DeferredFailures

_MOST_COPIED = 20_000  # unknowns up to which each rank has the factors of a gathered matrix


def probed_matrix(
    matvec: Function, params: tuple, shape: tuple[int, ...], comm: Comm, call: str, takes_batches: bool, probing: Probing
) -> DistributedMatrix:
    """Return the matrix of an operator; its values may be traced."""
    values = probing.values(matvec, params, shape, comm, call, takes_batches)
    # Most operators use some neighbors in a domain's halo only. Derivatives of zeros may differ from zero.
    all_contained = probing.halo is None or isbox(values)
    contained = np.full(len(probing.rows.data), True) if all_contained else values != 0.0
    kept = probing.latest
    changed = kept is None or kept[1].comm is not comm or not np.array_equal(contained, kept[0])
    if on_any_rank(channel(comm, call).data, changed) or kept is None:
        rows = probing.rows.copy()
        rows.data = contained.astype(float)
        rows.eliminate_zeros()
        kept = probing.latest = contained, DistributedMatrix(rows, columns=rows.shape[0], comm=comm)
    return kept[1].with_values(values if all_contained else values[contained])


def require_complete(matvec: Function, params: tuple, shape: tuple[int, ...], matrix: DistributedMatrix, call: str) -> None:
    """Compare a product with the operator, in a random direction, with the matrix's; raise an error on all ranks."""
    group, failures = channel(matrix.comm, call), DeferredFailures(matrix.comm, call)
    columns = np.arange(matrix.owned_columns.start, matrix.owned_columns.stop)
    direction = np.random.default_rng(group.rank).standard_normal(len(columns))
    plain = matrix.with_values(stop_gradient(matrix.values))
    scale = max(1.0, float(np.abs(plain.values).max(initial=0.0))) * np.abs(direction).max(initial=1.0)

    def difference(first: int, last: int) -> np.ndarray:
        own = np.where((columns >= first) & (columns < last), direction, 0.0)
        # A copy: the operator may write into its argument.
        image = checked_product(matvec, own.reshape(shape).copy(), params, failures, call).ravel()
        gap = np.abs(image - plain.matvec(own))
        return np.where(gap <= np.finfo(image.dtype).eps ** 0.5 * scale, 0.0, gap)  # NaN remains

    found, (first, last) = difference(0, matrix.shape[1]), (0, matrix.shape[1])
    if not on_any_rank(group.data, bool(found.any())):
        return
    wrong = group.data.allgather(int(np.flatnonzero(found != 0.0)[0]) if found.any() else -1)
    rank = next(k for k, row in enumerate(wrong) if row >= 0)
    while last - first > 1:  # a column with a missing entry in this row, by bisection
        middle = (first + last) // 2
        gap = difference(first, middle)
        left = group.data.bcast(bool(gap[wrong[rank]]) if group.rank == rank else None, rank)
        first, last = (first, middle) if left else (middle, last)
    row = int(matrix.offsets[0][rank]) + wrong[rank]
    text = f"in row {row}, the entry of column {first} is missing in the pattern, or matvec isn't linear."
    advice = "Pass a pattern with this entry, or a Domain with a wider halo."
    raise agreed(group, ValueError(f"{call}: the matrix doesn't reproduce the operator: {text} {advice}"))


def _counts(counts: Sequence[int] | None, size: int, total: int, call: str) -> list[int]:
    """Return the numbers of rows per rank, by default even; raise a ValueError if they don't match the matrix."""
    if counts is None:
        return even_lengths(total, size)
    try:
        rows = [operator.index(count) for count in counts]
    except TypeError:  # raised below, with a better message
        rows = []
    if len(rows) == size and min(rows) >= 0 and sum(rows) == total:
        return rows
    raise ValueError(
        f"{call}: counts must be {size} numbers, none negative, that add up to {total} rows, but got {counts!r}."
    )


def _entries_of_rank(
    rows: Array,
    columns: Array,
    values: Array,
    shape: tuple[int, int],
    counts: Sequence[int] | None,
    channel: Channel,
    call: str,
) -> tuple[np.ndarray, np.ndarray, list[int], list[int]]:
    """Return row and column of each entry, and the ranks' numbers of rows and columns; raise an error for invalid ones."""
    n, m = (operator.index(length) for length in shape)
    row_counts = _counts(counts, channel.size, n, call)
    require_block(call, "values", values)
    require_on_host(call, "values", values)
    offsets, remedy = np.concatenate([[0], np.cumsum(row_counts)]), ", or set the numbers of rows with counts="
    row, column = positions(rows, columns, values.shape, (n, m), offsets, channel.rank, call, remedy)
    return row, column, row_counts, row_counts if n == m else even_lengths(m, channel.size)


class DistributedMatrix:
    """A sparse matrix whose rows are divided among the ranks, for products with vectors and linear solves.

    Parameters
    ----------
    rows : SciPy sparse matrix or sparse array of shape (m, N)
        This rank's rows; rows are numbered in the order of ranks. m may differ between ranks. The values of duplicate
        entries are added.
    columns : int, optional
        This rank's number of columns, which is the length of this rank's part of x; by default its number of rows.
    comm : mpi4py intracommunicator, optional

    Attributes
    ----------
    shape : tuple of int
        Shape of the whole matrix.
    owned_rows, owned_columns : slice
        The ranges of this rank's rows and columns in the whole matrix.
    local_shape : tuple of int
        Numbers of rows and columns of this rank.
    values : array of shape (nnz,)
        This rank's entries, row by row, with increasing columns in each row.
    indices : tuple of two arrays of int
        Row and column of each entry in the whole matrix.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if `rows` isn't a sparse matrix of floats, or the numbers of columns are inconsistent.

    Ranks
    -----
    All ranks of `comm` call the constructors, the products, `solve` and `gathered`; other methods don't communicate.

    Examples
    --------
    >>> import scipy.sparse
    >>> rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
    >>> rows = scipy.sparse.diags_array(np.full(2, 4.0), offsets=2 * rank, shape=(2, 2 * size))
    >>> matrix = mpiad.linalg.DistributedMatrix(rows.tocsr())  # 4 on the diagonal; this rank's two rows
    >>> print(matrix.solve(np.ones(2)))
    [0.25 0.25]
    """

    attributes_of_programs = ("values",)  # what compiled programs with this object must compare in each call

    def __init__(self, rows: object, *, columns: int | None = None, comm: Comm = None):
        self.comm, self._channel = comm, channel(comm, "DistributedMatrix")
        group = self._channel
        with raising_together(group):
            require_matrix(rows, "DistributedMatrix: rows")
            if columns is not None:
                positive_count(columns, "DistributedMatrix: columns", 0)
        matrix: Any = scipy.sparse.csr_matrix(rows)
        if not matrix.has_canonical_format:
            # The caller's matrix is copied, because duplicate entries are added in place.
            matrix = matrix.copy()
            matrix.sum_duplicates()
        local = np.array([matrix.shape[0], matrix.shape[0] if columns is None else columns, matrix.shape[1]], np.int64)
        all_sizes = np.empty((group.size, 3), np.int64)
        group.data.Allgather(local, all_sizes)
        rows_of, columns_of, totals = all_sizes.T.tolist()
        if len(set(totals)) > 1:
            problem = f"rows of all ranks must have the same number of columns, but got {totals}."
            raise agreed(group, ValueError(f"DistributedMatrix: {problem}"))
        if sum(columns_of) != totals[0]:
            problem = f"the ranks' rows, {rows_of}, add up to {sum(rows_of)}"
            if columns is not None:
                problem = f"columns={columns_of} adds up to {sum(columns_of)}"
            advice = "Pass each rank's number of columns as columns=."
            text = f"DistributedMatrix: {problem}, but the matrix has {totals[0]} columns. {advice}"
            raise agreed(group, ValueError(text))
        self.offsets = [np.concatenate([[0], np.cumsum(all_sizes[:, k])]) for k in (0, 1)]
        own = [slice(int(offsets[group.rank]), int(offsets[group.rank + 1])) for offsets in self.offsets]
        self.owned_rows, self.owned_columns = own
        self.shape = int(self.offsets[0][-1]), int(self.offsets[1][-1])
        self.local_shape, self.values = (matrix.shape[0], own[1].stop - own[1].start), matrix.data
        self.indices = own[0].start + np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr)), matrix.indices
        numbers, exchange = local_numbers(matrix.indices, own[1].start, own[1].stop, comm)
        self._pattern = Pattern(numbers, matrix.indptr, self.local_shape, exchange)

    @classmethod
    def from_scipy(
        cls, matrix: object, *, root: Rank = 0, counts: Sequence[int] | None = None, comm: Comm = None
    ) -> DistributedMatrix:
        """Divide the root's matrix among the ranks.

        Parameters
        ----------
        matrix : SciPy sparse matrix or sparse array
            The matrix on the root; other ranks may pass None.
        root : int
        counts : sequence of int, optional
            Number of rows per rank. By default, rows are divided evenly: the first ranks may have one more row. The columns
            of a square matrix are distributed like its rows; the columns of other matrices are divided evenly.
        comm : mpi4py intracommunicator, optional

        Returns
        -------
        DistributedMatrix

        Raises
        ------
        TypeError, ValueError
            On all ranks, if the root's `matrix` isn't a sparse matrix of floats, or `counts` don't add up to its rows.

        Ranks
        -----
        All ranks call it.
        """
        call, parts = "DistributedMatrix.from_scipy", None
        group = channel(comm, call)
        if not 0 <= root < group.size:
            raise ValueError(f"{call}: root must be a rank from 0 to {group.size - 1}, but got {root!r}.")
        with raising_together(group):
            if group.rank == root:
                require_matrix(matrix, f"{call}: matrix")
                whole: Any = scipy.sparse.csr_matrix(matrix)
                n, m = whole.shape
                rows = _counts(counts, group.size, n, call)
                columns = rows if n == m else even_lengths(m, group.size)
                parts = [(whole[stop - k : stop], int(own)) for stop, k, own in zip(np.cumsum(rows), rows, columns)]
        local, length = group.data.scatter(parts, root)
        return cls(local, columns=length, comm=comm)

    @classmethod
    def from_entries(
        cls,
        rows: np.ndarray,
        columns: np.ndarray,
        values: LocalArray,
        shape: tuple[int, int],
        *,
        counts: Sequence[int] | None = None,
        comm: Comm = None,
    ) -> DistributedMatrix:
        """Assemble a matrix from entries, for example from the matrices of finite elements.

        Parameters
        ----------
        rows, columns : array of int
            Row and column of each entry in the whole matrix; the arrays broadcast to the shape of `values`. Each rank
            passes entries of its own rows. For finite elements, these come from all elements that have a node among
            the rows.
        values : array
            The entries, which may be traced. Entries with the same row and column are added.
        shape : tuple of two ints
            The shape of the whole matrix.
        counts : sequence of int, optional
            Number of rows per rank, as in `from_scipy`.
        comm : mpi4py intracommunicator, optional

        Returns
        -------
        DistributedMatrix

        Raises
        ------
        TypeError, ValueError
            On all ranks, if an argument is invalid on any rank, or if an entry lies outside of the shape or in a row of
            another rank.

        Ranks
        -----
        All ranks call it, with the same `shape` and `counts`.

        Adjoint
        -------
        Each value gets the cotangent of the entry of the matrix to which it was added.

        Examples
        --------
        >>> rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
        >>> first = 2 * rank  # this rank has two rows
        >>> nodes = np.array([first, first + 1])
        >>> stiffness = np.array([[[1.0, -1.0], [-1.0, 1.0]], [[2.0, 0.0], [0.0, 2.0]]])  # of two elements
        >>> A = mpiad.linalg.DistributedMatrix.from_entries(
        ...     nodes[:, None], nodes, stiffness, (2 * size, 2 * size)
        ... )
        >>> print(A.local_rows().toarray()[:, first : first + 2])
        [[ 3. -1.]
         [-1.  3.]]
        """
        call = "DistributedMatrix.from_entries"
        group = channel(comm, call)

        entries = partial(_entries_of_rank, rows, columns, getval(values), shape, counts, group, call)
        described = lambda _: [f"shape={shape!r}, counts={counts!r}"]  # noqa: E731
        row, column, row_counts, column_counts = alike_on_all(group, entries, described, call)
        # A matrix of stored zeros at the positions of entries, row by row, and the number of each entry's stored zero.
        n, m = row_counts[group.rank], shape[1]
        places, numbers = np.unique(row * m + column, return_inverse=True)
        zeros, starts = np.zeros(len(places), getval(values).dtype), np.searchsorted(places, m * np.arange(n + 1))
        pattern = scipy.sparse.csr_matrix((zeros, places % max(1, m), starts), (n, m))
        matrix = cls(pattern, columns=column_counts[group.rank], comm=comm)
        return matrix.with_values(segment_sum(anp.reshape(values, (-1,)), numbers, len(places)))

    @classmethod
    def from_pattern(
        cls, matvec: Function, pattern: Any, like: LocalArray, *params: Any, comm: Comm = None
    ) -> DistributedMatrix:
        """Compute the matrix of a linear operator with a known sparsity pattern from products with a few vectors.

        The number of products is that of the *colors* of columns: columns that have a row in common have different colors.
        For the stencil of a Domain's halo, there are (2 halo + 1)ᵈ colors in d dimensions; along a periodic dimension, the
        factor is the smallest divisor of the number of points that is at least 2 halo + 1.

        Parameters
        ----------
        matvec : callable
            ``matvec(u, *params)`` returns this rank's block of A u, linear in u, from this rank's block of u. For the
            Jacobian of a function at x, pass ``mpiad.linearize(function)(x).jvp``.
        pattern : SciPy sparse matrix or array, pair of integer arrays, or Domain
            The entries that may differ from zero: the stored entries of a sparse matrix of shape (n, N) with this rank's n
            rows; or ``(rows, columns)``, numbers in the whole matrix, for entries in this rank's rows, in any order and
            possibly repeated; or the stencil of a Domain's halo. Unknowns are numbered block by block, in the order of
            ranks.
        like : array of floats
            An array of the shape of this rank's blocks; only its shape is used.
        *params : pytree of arrays
            Further arguments of `matvec`.
        comm : mpi4py intracommunicator, optional
            By default, for a Domain, its ranks.

        Returns
        -------
        DistributedMatrix
            The matrix A for flattened blocks: ``A @ u.ravel()`` is ``matvec(u, *params).ravel()``.

        Raises
        ------
        TypeError, ValueError
            On all ranks, if an argument is invalid on any rank, if `matvec` doesn't return an array of floats of the shape
            of `like` or isn't linear, or if an entry is missing in the pattern; the message names its row and column.
        Exception
            On all ranks, if `matvec` raises it on any rank.

        Ranks
        -----
        All ranks of `comm` call it. No rank stores anything about the whole pattern.

        Adjoint
        -------
        Each product with `matvec` gets the cotangents of the entries that were read from it; so derivatives flow to the
        params.

        Examples
        --------
        >>> rank = mpiad.mpi_rank()
        >>> first = 2 * rank  # this rank has two unknowns, each of which is coupled with itself and with its partner
        >>> rows, columns = first + np.array([0, 0, 1, 1]), first + np.array([0, 1, 0, 1])
        >>> matvec = lambda u, k: k * u + u[::-1]
        >>> A = mpiad.linalg.DistributedMatrix.from_pattern(matvec, (rows, columns), np.zeros(2), 3.0)
        >>> print(A.values)
        [3. 1. 1. 3.]
        """
        call, plain = "DistributedMatrix.from_pattern", stop_gradient(like)
        comm = pattern.comm if isinstance(pattern, Domain) and comm is None else comm
        group = channel(comm, call)

        def check() -> None:
            require_functions(call, {"matvec": matvec})
            require_block(call, "like", plain)
            require_pattern(call, "like", plain.shape, pattern, group)

        alike_on_all(group, check, lambda _: [f"pattern={kind_of(pattern)}"], call)
        with restoring_state(), suspended():
            probing = probing_of(pattern, plain.size, comm, call)
        matrix = probed_matrix(matvec, params, plain.shape, comm, call, False, probing)
        leaves, build = flatten(params)
        with restoring_state(), suspended():
            require_complete(matvec, tuple(build(list(map(stop_gradient, leaves)))), plain.shape, matrix, call)
        return matrix

    @classmethod
    def from_operator(cls, matvec: Function, domain: Domain, *params: Any) -> DistributedMatrix:
        """Compute the matrix of an operator on a domain; no derivative flows to the params.

        Parameters
        ----------
        matvec : callable
            ``matvec(u, *params)``, linear in u, with a stencil no wider than the domain's halo.
        domain : Domain
        *params : pytree of arrays
            Further arguments of `matvec`.

        Returns
        -------
        DistributedMatrix
            The matrix of ``from_pattern(matvec, domain, ...)``, without entries that are zero.

        Raises
        ------
        TypeError, ValueError
            On all ranks, if the operator doesn't return an array of the block's shape, isn't linear, or has a stencil wider
            than the halo.
        Exception
            On all ranks, if `matvec` raises it on any rank.

        Ranks
        -----
        All ranks of the domain call it.
        """
        call, shape = "DistributedMatrix.from_operator", domain.local_shape
        with restoring_state(), suspended():
            probing = probing_of(domain, math.prod(shape), domain.comm, call)
            matrix = probed_matrix(matvec, params, shape, domain.comm, call, False, probing)
            require_complete(matvec, params, shape, matrix, call)
            return matrix

    def __repr__(self) -> str:
        rows, nnz = self.owned_rows, len(self._pattern.columns)
        return (
            f"DistributedMatrix({self.shape[0]} x {self.shape[1]}, {getval(self.values).dtype}; rank {self._channel.rank} "
            f"of {self._channel.size}: rows {rows.start}:{rows.stop}, {nnz} entries, "
            f"ghosts: {self._pattern.ghosts.n_needed})"
        )

    def with_values(self, values: LocalArray) -> DistributedMatrix:
        """Return a matrix with the same pattern and other values, which may be traced.

        Parameters
        ----------
        values : array of shape (nnz,)
            The entries, in the order of the attribute `values`. If `values` is on a device, products and solves run on this
            device, for example with ``A.with_values(mpiad.device.to_device(A.values))``.

        Raises
        ------
        ValueError
            If the number of values is wrong.
        """
        expected, shape = (len(self._pattern.columns),), np.shape(getval(values))
        if shape != expected:
            raise ValueError(
                f"DistributedMatrix.with_values: values must have shape {expected}, one for each entry of the rows of rank "
                f"{self._channel.rank}, but got {shape}."
            )
        other = object.__new__(type(self))  # without the constructor, which communicates
        other.__dict__.update(self.__dict__, values=values)
        return other

    def matvec(self, x: LocalArray) -> LocalArray:
        """Return this rank's part of the product A x.

        Parameters
        ----------
        x : array of shape (..., local_shape[1])
            This rank's part of x; leading axes are for several vectors.

        Returns
        -------
        array of shape (..., local_shape[0])

        Raises
        ------
        TypeError, ValueError
            If `x` isn't an array of floats of that shape on the host or device of the values; in the first product with
            this pattern, and in debug mode, on all ranks, also if dtypes or leading axes differ between ranks.

        Ranks
        -----
        All ranks call it.

        Adjoint
        -------
        For the cotangent ȳ, x gets Aᵀ ȳ, and each value gets the sum of x_column ȳ_row over all vectors.
        """
        return product(self.values, self._agreed(x, 1, "matvec"), self._pattern)

    def rmatvec(self, y: LocalArray) -> LocalArray:
        """Return this rank's part of the product Aᵀ y with the transpose, without conjugation; see `matvec`."""
        return transposed_product(self.values, self._agreed(y, 0, "rmatvec"), self._pattern)

    def __matmul__(self, x: LocalArray) -> LocalArray:
        return self.matvec(x)

    @property
    def T(self) -> Transposed:
        """The transposed matrix, for products and solves; its rows are distributed like the columns."""
        return Transposed(self)

    def diagonal(self) -> LocalArray:
        """Return this rank's part of a square matrix's diagonal, with zeros for missing entries, without communication.

        Adjoint
        -------
        Each value on the diagonal gets the cotangent of its entry.
        """
        self._require_square("DistributedMatrix.diagonal")
        plain = getval(self.values)
        (entries,) = self._diagonal.on(arrays_of(plain))
        return concatenate([self.values, zeros_like(plain, (1,))])[entries]

    @cached_property
    def _diagonal(self) -> Constants:
        row, column = self.indices
        entries = np.full(self.local_shape[0], len(row))
        on_diagonal = np.flatnonzero(row == column)
        # Rows without a diagonal entry refer to a zero that is appended to the values.
        entries[row[on_diagonal] - self.owned_rows.start] = on_diagonal
        return Constants(entries)

    def solve(
        self, b: LocalArray, *, method: str = "gmres", preconditioner: Function | None = None, **settings: Any
    ) -> LocalArray:
        """Solve A x = b; differentiable with respect to b and the values.

        Parameters
        ----------
        b : array of shape (..., local_shape[0])
            This rank's part of the right-hand side.
        method : {"gmres", "bicgstab", "cg", "direct"}
            "direct", for small matrices, gathers the matrix, and factorizes it on each rank (above 20,000 rows, on rank 0).
        preconditioner : callable, optional
            ``preconditioner(r)``, such as `AdditiveSchwarz` of this matrix.
        **settings
            As in `solve`.

        Returns
        -------
        array of the shape of `b`

        Raises
        ------
        TypeError, ValueError, ConvergenceError
            On all ranks, as in `solve`, and if the matrix isn't square, or if it is singular with "direct".

        Ranks
        -----
        All ranks call it.

        Adjoint
        -------
        One solve with the transpose, for the cotangent x̄: b gets λ = A⁻ᵀ x̄, and each value gets -x_column λ_row.
        """
        return self._solve(self.operator(), b, method, preconditioner, settings)

    def _solve(
        self, matvec: ProductWith, b: LocalArray, method: str, preconditioner: Function | None, settings: dict
    ) -> LocalArray:
        call = "DistributedMatrix.solve"
        self._require_square(call)
        # All ranks check b together. If a rank raised during a product, the other ranks would wait for its messages.
        alike_on_all(self._channel, lambda: self._checked(b, 0, "solve"), lambda b: [f"{b.shape[:-1]=}, {b.dtype=}"], call)
        if method == "direct":
            # With exact factors, one or two iterations suffice; they also correct rounding errors.
            method, preconditioner = "gmres", GatheredFactors(self)
            preconditioner = preconditioner.T if matvec.transposed else preconditioner
            settings = {"rtol": 1e-12, **settings}
        return solve(matvec, b, self.values, method=method, preconditioner=preconditioner, comm=self.comm, **settings)

    def operator(self, transposed: bool = False) -> ProductWith:
        """Return the product as an operator for `solve`: ``operator(u, values)``, with a method `transpose`."""
        return ProductWith(self._pattern, transposed)

    def local_rows(self) -> Any:
        """Return this rank's rows, with all columns, as an untraced CSR matrix of SciPy."""
        plain = on_host(stop_gradient(self.values)), self.indices[1], self._pattern.starts
        return scipy.sparse.csr_matrix(plain, (self.local_shape[0], self.shape[1]))

    def gathered(self, root: Rank = 0) -> Any:
        """Return the whole matrix as an untraced CSR matrix of SciPy on the root, and None on other ranks."""
        return _joined(self._channel.data.gather(self.local_rows(), root))

    def _require_square(self, call: str) -> None:
        if self.shape[0] != self.shape[1] or (self.offsets[0] != self.offsets[1]).any():  # the same on all ranks
            raise ValueError(
                f"{call}: the matrix must be square, with equally distributed rows and columns, but is {self!r}, and has "
                f"{self.local_shape[1]} columns there."
            )

    def _agreed(self, x: Array, axis: int, call: str) -> LocalArray:
        """Return `x`, checked; errors are those of the exchange of ghosts: in its first call all ranks raise them."""
        self._pattern.ghosts.agree(getval(x), -1, f"DistributedMatrix.{call}", lambda: self._checked(x, axis, call))
        return x

    def _checked(self, x: Array, axis: int, call: str) -> LocalArray:
        plain, length = getval(x), self.local_shape[axis]
        if not is_array(plain) or plain.dtype.kind not in "fc":
            kind = f"an array of dtype {plain.dtype}" if is_array(plain) else type(plain).__name__
            text = f"expected an array of floats of shape (..., {length}), but got {kind}."
            raise TypeError(f"DistributedMatrix.{call}: {text}")
        values = getval(self.values)
        if type(plain) is not type(values) or arrays_of(plain) != arrays_of(values):
            require_together(f"DistributedMatrix.{call}", x=plain, values=values)
        if not plain.ndim or plain.shape[-1] != length:
            raise ValueError(
                f"DistributedMatrix.{call}: expected an array of shape (..., {length}), rank {self._channel.rank}'s part "
                f"of {self.shape[axis]}, but got {plain.shape}."
            )
        return x


class Transposed:
    """The transpose of a `DistributedMatrix`, which is its attribute `T`; it has `matvec`, `rmatvec` and `solve`, too."""

    attributes_of_programs = ("T",)

    def __init__(self, matrix: DistributedMatrix):
        self.T, self.matvec, self.rmatvec = matrix, matrix.rmatvec, matrix.matvec
        self.shape, self.local_shape = matrix.shape[::-1], matrix.local_shape[::-1]

    def __repr__(self) -> str:
        return f"{self.T!r}.T"

    def __matmul__(self, x: LocalArray) -> LocalArray:
        return self.matvec(x)

    def solve(
        self, b: LocalArray, *, method: str = "gmres", preconditioner: Function | None = None, **settings: Any
    ) -> LocalArray:
        """Solve Aᵀ x = b; see `DistributedMatrix.solve`. The preconditioner must be an approximation of A⁻ᵀ."""
        return self.T._solve(self.T.operator(transposed=True), b, method, preconditioner, settings)


def _joined(parts: Sequence[Any] | None) -> Any:
    """Return the ranks' rows as one CSR matrix; None on a rank that hasn't got them."""
    return None if parts is None else scipy.sparse.vstack(parts, format="csr")


class GatheredFactors:
    """A preconditioner that applies the exact inverse, with factors of the whole matrix.

    Each rank factorizes a small matrix: all solve for a single right-hand side, which takes one message instead of two,
    and several right-hand sides are divided among them. Only rank 0 factorizes a large one, and solves for all ranks.
    """

    takes_blocks = True  # arrays with leading axes

    def __init__(self, matrix: DistributedMatrix, call: str = "DistributedMatrix.solve"):
        self._channel, self._lengths = channel(matrix.comm, call), np.diff(matrix.offsets[0]).tolist()
        self._solvers = self._channel.size if matrix.shape[0] <= _MOST_COPIED else 1  # these ranks have factors
        self._factors: Any = None
        self._kind = "N"
        comm, rows = self._channel.data, matrix.local_rows()
        whole = _joined(comm.allgather(rows) if self._solvers > 1 else comm.gather(rows))
        # Only ranks with factors detect a singular matrix. All raise, since the others would wait for them.
        with raising_together(self._channel):
            if whole is not None:
                self._factors = SparseFactors(whole, f"{call}: the matrix {matrix.shape}")
        self._dtype = np.dtype(comm.bcast(None if whole is None else whole.dtype.str, 0))

    @property
    def T(self) -> GatheredFactors:
        """The factors of the transpose."""
        other = object.__new__(GatheredFactors)
        other.__dict__.update(self.__dict__, _kind="T" if self._kind == "N" else "N")
        return other

    def __call__(self, r: LocalArray) -> LocalArray:
        """Return this rank's part of the solution, on the device of `r`."""
        return through_host(self._solved, r)

    def _solved(self, r: LocalArray) -> LocalArray:
        # The lengths are the matrix's, and the callers have compared the dtype and the number of right-hand sides.
        rows = r.reshape(math.prod(r.shape[:-1]), r.shape[-1]).astype(np.result_type(r, self._dtype), copy=False)
        rank, lengths = self._channel.rank, self._lengths
        if len(rows) < self._solvers:
            whole = communicate(ALLGATHER, rows, Dividing(self._channel, None, 1, lengths, spec_like(rows)))
            first = sum(lengths[:rank])
            return self._inverse(whole)[:, first : first + lengths[rank]].reshape(r.shape)
        shares = [*even_lengths(len(rows), self._solvers), *[0] * (self._channel.size - self._solvers)]
        sent, received = [share * lengths[rank] for share in shares], [shares[rank] * length for length in lengths]
        parts = np.split(self._exchanged(rows, sent, received), np.cumsum(received)[:-1])
        whole = np.concatenate([part.reshape(shares[rank], n) for part, n in zip(parts, lengths)], axis=1)
        parts = np.split(self._inverse(whole), np.cumsum(lengths)[:-1], axis=1)
        return self._exchanged(np.concatenate([part.reshape(-1) for part in parts]), received, sent).reshape(r.shape)

    def prepared(self, r: np.ndarray, out: np.ndarray) -> Callable[[], None] | None:
        """Return a function that solves for a fixed right-hand side of doubles; None if one rank solves for all."""
        if self._solvers == 1:
            return None
        rank, rows = self._channel.rank, r.reshape(1, -1)
        whole = np.empty((1, sum(self._lengths)))
        solution, first = np.empty_like(whole), sum(self._lengths[:rank])
        gather = prepared_gather(self._channel, rows, whole, self._lengths).call
        solve = self._factors.prepared(whole, solution, self._kind)
        part, flat = solution[0, first : first + rows.size], out.reshape(-1)

        def run() -> None:
            gather()
            solve()
            flat[...] = part

        return run

    def _inverse(self, whole: np.ndarray) -> np.ndarray:
        """Return the solutions for whole right-hand sides (k, n); k is zero on ranks without factors."""
        return whole if self._factors is None else self._factors.solve(whole, self._kind).astype(whole.dtype, copy=False)

    def _exchanged(self, entries: np.ndarray, sent: list[int], received: list[int]) -> np.ndarray:
        flat = entries.reshape(-1)
        blocks = Blocks(self._channel, 0, (sent, received), spec_like(flat)._replace(shape=(sum(received),)))
        return communicate(ALLTOALL, flat, blocks)
