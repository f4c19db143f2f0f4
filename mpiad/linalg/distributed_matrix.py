"""`DistributedMatrix`: a sparse matrix whose rows are distributed over the ranks; each rank uses SciPy's matrices."""

from __future__ import annotations

import itertools
import math
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, reduce
from typing import Any, NamedTuple

import autograd.numpy as anp
import numpy as np
import scipy.sparse
from autograd.tracer import getval

from mpiad._typing import Array, Comm, Function, LocalArray, Rank
from mpiad.device.assembly import concatenate
from mpiad.device.transfer import Constants
from mpiad.domain import Domain
from mpiad.linalg.solve import solve
from mpiad.linalg.sparse_factors import SparseFactors
from mpiad.linalg.sparse_products import (
    Pattern,
    ProductWith,
    product,
    require_matrix,
    sparse_matmul,
    transposed_product,
)
from mpiad.linalg.vectors import block_error, on_host, require_floats, require_together, through_host
from mpiad.primitives import mpi_allgather, mpi_gather, mpi_scatter, stop_gradient
from mpiad.primitives.operation import suspended
from mpiad.redistribution import GhostExchange
from mpiad.transport import channel
from mpiad.transport.core.agreement import alike_on_all, raise_together, raising_together
from mpiad.transport.core.buffers import even_lengths
from mpiad.transport.core.tracing import restoring_state
from mpiad.transport.devices.device_arrays import arrays_of, named
from mpiad.transport.exits.user_failures import DeferredFailures

# Probing: the matrix of an operator on a domain is computed from products with a few fields.
#
# If the stencil isn't wider than the halo, no point couples with two points whose distance is more than 2 halo. Points
# whose indices are equal modulo the number of colors, at least 2 halo + 1 per dimension, have the same *color*: the product
# with a field that is one at these points, and zero elsewhere, gives their columns. Along a periodic dimension the number
# of colors must divide the number of points, so it may be larger.

_CALL = "DistributedMatrix.from_operator"


class _Probe(NamedTuple):
    """Points of a color: a field that is 1 there, and the entries of the matrix that its image contains."""

    field: np.ndarray
    rows: np.ndarray  # numbers of this rank's points
    columns: np.ndarray  # numbers of all ranks' points


def operator_rows(
    matvec: Function, domain: Domain, params: tuple, call: str = _CALL, takes_batches: bool = False
) -> tuple[Any, int]:
    """Return this rank's rows of an operator's matrix, and this rank's number of columns; points are numbered by blocks."""
    group, failures, values = channel(domain.comm, call), DeferredFailures(domain.comm, call), []
    if domain not in _probes:
        _probes[domain] = _probes_of(domain)
    total, probes = _probes[domain]
    fields = [probe.field for probe in probes]
    for probe, image in zip(probes, checked_products(matvec, fields, params, failures, call, takes_batches)):
        values.append(image.ravel()[probe.rows])
        missing = np.count_nonzero(image) != np.count_nonzero(values[-1])
        raise_together(group, _halo_error(image, probe, domain, call) if missing else None)
    rows, columns = (np.concatenate([probe[k] for probe in probes]) for k in (1, 2))
    count = math.prod(domain.local_shape)
    matrix = scipy.sparse.csr_matrix((np.concatenate(values), (rows, columns)), (count, total))
    matrix.eliminate_zeros()
    return matrix, count


_probes: weakref.WeakKeyDictionary[Domain, tuple[int, list[_Probe]]] = weakref.WeakKeyDictionary()


def _probes_of(domain: Domain) -> tuple[int, list[_Probe]]:
    """Return the number of all ranks' points, and a probe for each color; collective."""
    count = math.prod(domain.local_shape)
    counts = mpi_allgather(np.array(count), comm=domain.comm)
    start = int(sum(counts[: channel(domain.comm, _CALL).rank]))
    # Each halo cell gets the number of the point of which it is a copy, or -1 beyond a physical side.
    numbers = domain.exchange((start + np.arange(count, dtype=float)).reshape(domain.local_shape), -1.0)
    colors = tuple(_color_count(n, h, p) for n, h, p in zip(domain.shape, domain.halo, domain.periodic))
    probes = []
    for color in itertools.product(*map(range, colors)):
        entries, remaining = [], np.ones(domain.local_shape, bool)
        for offset in itertools.product(*[range(-h, h + 1) for h in domain.halo]):
            window = tuple(slice(h + d, h + d + n) for h, d, n in zip(domain.halo, offset, domain.local_shape))
            # In these rows, the neighbor at this offset is the only point of this color in the stencil.
            selected = remaining & (numbers[window] >= 0.0) & _has_color(domain, colors, color, offset)
            entries.append((np.flatnonzero(selected), numbers[window][selected].astype(np.int64)))
            remaining &= ~selected
        field = _has_color(domain, colors, color, (0,) * len(colors)).astype(float)
        probes.append(_Probe(field, *(np.concatenate(part) for part in zip(*entries))))
    return int(sum(counts)), probes


def _has_color(domain: Domain, colors: tuple[int, ...], color: tuple[int, ...], offset: tuple[int, ...]) -> np.ndarray:
    """Return a mask of this rank's points whose neighbor at an offset has the given color."""
    masks = []
    for cells, d, n, wraps, count, c in zip(domain.owned, offset, domain.shape, domain.periodic, colors, color):
        points = np.arange(cells.start, cells.stop) + d
        masks.append((points % n if wraps else points) % count == c)
    return reduce(np.logical_and.outer, masks)


def _color_count(n: int, halo: int, periodic: bool) -> int:
    minimum = 2 * halo + 1
    if not periodic:
        return min(n, minimum)
    return next((k for k in range(minimum, n + 1) if n % k == 0), n)


def checked_products(
    matvec: Function, fields: list[np.ndarray], params: tuple, failures: DeferredFailures, call: str, takes_batches: bool
) -> Iterator[np.ndarray]:
    """Yield the operator's products with fields, computed one by one or all together; errors as in `checked_product`."""
    blocks = [np.stack(fields)] if takes_batches and fields else fields
    for block in blocks:
        images = checked_product(matvec, block.copy(), params, failures, call)  # matvec may overwrite its argument
        yield from images if takes_batches else [images]


def checked_product(
    matvec: Function, field: np.ndarray, params: tuple, failures: DeferredFailures, call: str
) -> np.ndarray:
    """Return the operator's product with a field; raise on all ranks if it fails or isn't an array like the field."""
    image = failures.attempt("matvec", lambda u: matvec(u, *params), field, again=lambda: np.zeros(field.shape))
    if not isinstance(image, np.ndarray) or image.shape != field.shape or image.dtype.kind not in "fc":
        result = f"{image.shape} {image.dtype}" if isinstance(image, np.ndarray) else type(image).__name__
        text = f"{call}: matvec must return an array of floats of shape {field.shape}, but returned {result}."
        failures.note(TypeError(text))  # ignored if matvec has already raised an exception
    failures.raise_together()
    return image


def _halo_error(image: np.ndarray, probe: _Probe, domain: Domain, call: str) -> Exception:
    is_outside = image != 0.0
    is_outside.flat[probe.rows] = False
    point = tuple(int(k) for k in np.argwhere(is_outside)[0])
    return ValueError(
        f"{call}: at point {point} of a block, matvec depends on points beyond the halo of {domain.halo}, or isn't linear "
        "(it adds a constant). Give the domain a halo as wide as the stencil of the operator."
    )


def _column_error(all_sizes: np.ndarray, columns: int | None) -> Exception | None:
    rows, parts, totals = (all_sizes[:, k].tolist() for k in range(3))
    if len(set(totals)) > 1:
        return ValueError(f"DistributedMatrix: rows of all ranks must have the same number of columns, but got {totals}.")
    if sum(parts) != totals[0]:
        problem = f"the ranks' rows, {rows}, add up to {sum(rows)}"
        if columns is not None:
            problem = f"columns={parts} adds up to {sum(parts)}"
        return ValueError(
            f"DistributedMatrix: {problem}, but the matrix has {totals[0]} columns. Pass each rank's number of "
            "columns as columns=."
        )
    return None


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


def _positions(
    rows: np.ndarray, columns: np.ndarray, values: Array, shape: tuple[int, int], counts: list[int], rank: Rank, call: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the row, in this rank's part, and the column of each entry; raise an error if an entry is invalid."""
    if (error := block_error(call, "values", values)) is not None:
        raise error
    if arrays_of(values) is not None:
        raise TypeError(f"{call}: values must be on the host, but are {named(values)}. See mpiad.device.to_host.")
    positions = []
    for name, given in (("rows", rows), ("columns", columns)):
        indices = np.asarray(given)
        if indices.dtype.kind not in "iu":
            raise TypeError(f"{call}: {name} must be an array of integers, but has dtype {indices.dtype}.")
        try:
            positions.append(np.broadcast_to(indices, values.shape).reshape(-1).astype(np.int64))
        except ValueError:
            raise ValueError(
                f"{call}: {name} must broadcast to the shape of values, {values.shape}, but has shape {indices.shape}."
            ) from None
    (row, column), first, stop = positions, sum(counts[:rank]), sum(counts[: rank + 1])
    outside = (row < 0) | (row >= shape[0]) | (column < 0) | (column >= shape[1])
    foreign = (row < first) | (row >= stop)
    owned = f"rows {first} to {stop - 1}" if stop > first else "no rows"
    problems = (
        (outside, f"is outside of the shape {shape}. Rows and columns are numbered from 0"),
        (foreign, f"belongs to another rank: this rank owns {owned}. Pass each entry on the rank that owns its row, or set "
         "the numbers of rows with counts="),
    )  # fmt: skip
    for wrong, problem in problems:
        if wrong.any():
            entry = f"an entry of rank {rank}, in row {row[np.argmax(wrong)]} and column {column[np.argmax(wrong)]}"
            raise ValueError(f"{call}: {entry} ({np.count_nonzero(wrong)} of {wrong.size} entries), {problem}.")
    return row - first, column


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
    >>> rows = scipy.sparse.diags_array(np.full(2, 4.0), offsets=2 * rank, shape=(2, 2 * size))
    >>> matrix = mpiad.linalg.DistributedMatrix(rows.tocsr())  # 4 on the diagonal; this rank's two rows
    >>> print(matrix.solve(np.ones(2)))
    [0.25 0.25]
    """

    def __init__(self, rows: object, *, columns: int | None = None, comm: Comm = None):
        self.comm, self._channel = comm, channel(comm, "DistributedMatrix")
        group = self._channel
        with raising_together(group):
            require_matrix(rows, "DistributedMatrix: rows")
            if columns is not None and (not isinstance(columns, (int, np.integer)) or columns < 0):
                raise ValueError(f"DistributedMatrix: columns must be zero or more, but got {columns!r}.")
        matrix: Any = scipy.sparse.csr_matrix(rows)
        if not matrix.has_canonical_format:
            # The caller's matrix is copied, because duplicate entries are added in place.
            matrix = matrix.copy()
            matrix.sum_duplicates()
        local = np.array([matrix.shape[0], matrix.shape[0] if columns is None else columns, matrix.shape[1]], np.int64)
        all_sizes = np.empty((group.size, 3), np.int64)
        group.data.Allgather(local, all_sizes)
        raise_together(group, _column_error(all_sizes, columns))
        self.offsets = [np.concatenate([[0], np.cumsum(all_sizes[:, k])]) for k in (0, 1)]
        own = [slice(int(offsets[group.rank]), int(offsets[group.rank + 1])) for offsets in self.offsets]
        self.owned_rows, self.owned_columns = own
        self.shape = int(self.offsets[0][-1]), int(self.offsets[1][-1])
        self.local_shape, self.values = (matrix.shape[0], own[1].stop - own[1].start), matrix.data
        self.indices = own[0].start + np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr)), matrix.indices
        owned = (matrix.indices >= own[1].start) & (matrix.indices < own[1].stop)
        ghosts = np.unique(matrix.indices[~owned])
        # In a `Pattern`, this rank's columns are followed by the columns of ghosts.
        numbers = np.where(
            owned, matrix.indices - own[1].start, self.local_shape[1] + np.searchsorted(ghosts, matrix.indices)
        )
        exchange = GhostExchange(ghosts, (own[1].start, own[1].stop), comm)
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
        cls, rows: np.ndarray, columns: np.ndarray, values: LocalArray, shape: tuple[int, int], *,
        counts: Sequence[int] | None = None, comm: Comm = None,
    ) -> DistributedMatrix:  # fmt: skip
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

        def entries() -> tuple[np.ndarray, np.ndarray, list[int], list[int]]:
            n, m = (operator.index(length) for length in shape)
            row_counts = _counts(counts, group.size, n, call)
            row, column = _positions(rows, columns, getval(values), (n, m), row_counts, group.rank, call)
            return row, column, row_counts, row_counts if n == m else even_lengths(m, group.size)

        described = [f"shape={shape!r}, counts={counts!r}"]
        row, column, row_counts, column_counts = alike_on_all(group, entries, lambda _: described, call)
        total, kind = shape[1], getval(values).dtype
        # The pattern, row by row, and for each entry its number in the pattern.
        pattern, numbers = np.unique(row * total + column, return_inverse=True)
        starts = np.searchsorted(pattern, total * np.arange(row_counts[group.rank] + 1))
        local = np.zeros(len(pattern), kind), pattern % total if total else pattern, starts
        empty = scipy.sparse.csr_matrix(local, (row_counts[group.rank], total))
        ones = np.ones(len(row), kind.char.lower()), numbers, np.arange(len(row) + 1)
        sums = scipy.sparse.csc_matrix(ones, (len(pattern), len(row)))
        matrix = cls(empty, columns=column_counts[group.rank], comm=comm)
        return matrix.with_values(sparse_matmul(sums, anp.reshape(values, (-1,))))

    @classmethod
    def from_operator(cls, matvec: Function, domain: Domain, *params: Any) -> DistributedMatrix:
        """Compute the matrix of an operator on a domain from products with fields.

        The number of products is (2 halo + 1)ᵈ for d dimensions. Along a periodic dimension, the factor is
        the smallest divisor of the number of points that is at least 2 halo + 1.

        Parameters
        ----------
        matvec : callable
            ``matvec(u, *params)``, linear in u, with a stencil no wider than the domain's halo.
        domain : Domain
        *params : pytree of arrays
            Further arguments of `matvec`. No derivative flows to them.

        Returns
        -------
        DistributedMatrix
            The matrix A for flattened blocks: ``A @ u.ravel()`` is ``matvec(u, *params).ravel()``.

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
        with restoring_state(), suspended():
            rows, columns = operator_rows(matvec, domain, params)
        return cls(rows, columns=columns, comm=domain.comm)

    def __repr__(self) -> str:
        rows, nnz = self.owned_rows, len(self._pattern.columns)
        return (
            f"DistributedMatrix({self.shape[0]} x {self.shape[1]}, {getval(self.values).dtype}; rank {self._channel.rank} "
            f"of {self._channel.size}: rows {rows.start}:{rows.stop}, {nnz} entries, "
            f"{self._pattern.ghosts.n_needed} ghosts)"
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
            If `x` isn't an array of floats of that shape on the host or device of the values.

        Ranks
        -----
        All ranks call it.

        Adjoint
        -------
        For the cotangent ȳ, x gets Aᵀ ȳ, and each value gets the sum of x_column ȳ_row over all vectors.
        """
        return product(self.values, self._checked(x, 1, "matvec"), self._pattern)

    def rmatvec(self, y: LocalArray) -> LocalArray:
        """Return this rank's part of the product Aᵀ y with the transpose, without conjugation; see `matvec`."""
        return transposed_product(self.values, self._checked(y, 0, "rmatvec"), self._pattern)

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
        self._require_square("diagonal")
        xp = arrays_of(getval(self.values))
        kind, (entries,) = getval(self.values).dtype, self._diagonal.on(xp)
        zero = np.zeros(1, kind) if xp is None else xp.full((1,), 0, kind)
        return concatenate([self.values, zero])[entries]

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
            "direct", for small matrices, gathers the matrix on rank 0 and factorizes it there.
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
        self._require_square("solve")
        # All ranks check b together. If a rank raised during a product, the other ranks would wait for its messages.
        with raising_together(self._channel):
            self._checked(b, 0, "solve")
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
        parts = self._channel.data.gather(self.local_rows(), root)
        return None if parts is None else scipy.sparse.vstack(parts, format="csr")

    def _require_square(self, call: str) -> None:
        if self.shape[0] != self.shape[1] or (self.offsets[0] != self.offsets[1]).any():  # the same on all ranks
            raise ValueError(
                f"DistributedMatrix.{call}: the matrix must be square, with equally distributed rows and columns, but is "
                "{}, and rank {} has {} rows and {} columns.".format(self.shape, self._channel.rank, *self.local_shape)
            )

    def _checked(self, x: Array, axis: int, call: str) -> Any:
        plain, length = getval(x), self.local_shape[axis]
        if type(plain) is not np.ndarray or plain.dtype.kind not in "fc":
            require_floats(f"DistributedMatrix.{call}", plain, length)
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

    def __init__(self, matrix: DistributedMatrix):
        self.T = matrix
        self.shape, self.local_shape = matrix.shape[::-1], matrix.local_shape[::-1]

    def __repr__(self) -> str:
        return f"{self.T!r}.T"

    def matvec(self, x: LocalArray) -> LocalArray:
        """Return this rank's part of Aᵀ x; see `DistributedMatrix.rmatvec`."""
        return self.T.rmatvec(x)

    def rmatvec(self, y: LocalArray) -> LocalArray:
        """Return this rank's part of A y; see `DistributedMatrix.matvec`."""
        return self.T.matvec(y)

    def __matmul__(self, x: LocalArray) -> LocalArray:
        return self.matvec(x)

    def solve(
        self, b: LocalArray, *, method: str = "gmres", preconditioner: Function | None = None, **settings: Any
    ) -> LocalArray:
        """Solve Aᵀ x = b; see `DistributedMatrix.solve`. The preconditioner must be an approximation of A⁻ᵀ."""
        return self.T._solve(self.T.operator(transposed=True), b, method, preconditioner, settings)


class GatheredFactors:
    """A preconditioner that applies the exact inverse: rank 0 factorizes the matrix, and solves for all ranks."""

    takes_blocks = True  # arrays with leading axes

    def __init__(self, matrix: DistributedMatrix, factored: Callable[[Any], Any] | None = None):
        # `factored`: returns the factors of the whole matrix.
        self.comm, self.counts = matrix.comm, np.diff(matrix.offsets[0]).tolist()
        whole, self._factors, self._kind = matrix.gathered(), None, "N"
        # Only rank 0 detects a singular matrix. All ranks raise, since the other ranks would wait for rank 0.
        with raising_together(channel(matrix.comm, "DistributedMatrix.solve")):
            if whole is not None and factored is not None:
                self._factors = factored(whole)
            elif whole is not None:
                self._factors = SparseFactors(whole.tocsc(), f"DistributedMatrix.solve: the matrix {matrix.shape}")

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
        # The distributed axis comes first, so that all right-hand sides are columns of one array, for one call of SciPy.
        whole = mpi_gather(np.moveaxis(r, -1, 0), 0, axis=0, comm=self.comm)
        if self._factors is not None:
            columns = whole.reshape(len(whole), math.prod(whole.shape[1:]))
            whole = self._factors.solve(columns.T, self._kind).T.reshape(whole.shape)
        return np.moveaxis(mpi_scatter(whole, 0, axis=0, counts=self.counts, comm=self.comm), 0, -1)
