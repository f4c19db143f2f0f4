"""`DistributedMatrix`: a sparse matrix whose rows are divided among the ranks, SciPy's within each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse
from autograd.tracer import getval

from mpiad._typing import Array, Comm, Function, LocalArray, Rank
from mpiad.device.assembly import concatenate
from mpiad.device.constants import Constants
from mpiad.domain import Domain
from mpiad.linalg.gathered_factors import GatheredFactors
from mpiad.linalg.ghosts import GhostPlan
from mpiad.linalg.host_and_device import require_floats, require_together
from mpiad.linalg.probing import operator_rows
from mpiad.linalg.rows import local_rows, rows_of
from mpiad.linalg.solve import solve
from mpiad.linalg.sparse_products import Pattern, ProductWith, Transposed, product, transposed_product
from mpiad.linalg.vectors import on_host
from mpiad.primitives import stop_gradient
from mpiad.primitives.operation import suspended
from mpiad.transport import channel
from mpiad.transport.agreement import raising_together
from mpiad.transport.device_arrays import arrays_of
from mpiad.transport.tracing import restoring_state


class DistributedMatrix:
    """Hold this rank's rows of a sparse matrix, and multiply and solve with the whole.

    Parameters
    ----------
    rows : SciPy sparse matrix or sparse array of shape (m, N)
        This rank's rows, one after the other in the order of ranks; N columns on all ranks. Their numbers may differ by
        rank. Entries that are given twice are added up.
    columns : int, optional
        How many of the columns, in the order of ranks, belong to this rank's part of x; as many as rows by default, where
        the matrix is square.
    comm : mpi4py intracommunicator, optional

    Attributes
    ----------
    shape : tuple of int
        Of the whole matrix.
    owned_rows, owned_columns : slice
        This rank's, in the whole.
    local_shape : tuple of int
        Their numbers.
    values : array of shape (nnz,)
        This rank's entries, row by row, by increasing column in each.
    indices : tuple of two arrays of int
        Row and column of each entry in the whole matrix.

    Raises
    ------
    TypeError, ValueError
        On all ranks, where `rows` isn't a sparse matrix of floats, or the numbers of columns don't fit.

    Ranks
    -----
    All ranks of `comm` call it, and all methods but `with_values` and `repr`.

    Examples
    --------
    >>> import scipy.sparse
    >>> rows = scipy.sparse.diags_array(np.full(2, 4.0), offsets=2 * rank, shape=(2, 2 * size))
    >>> matrix = mpiad.linalg.DistributedMatrix(rows.tocsr())  # 4 on the diagonal; this rank's two rows
    >>> print(matrix.solve(np.ones(2)))
    [0.25 0.25]
    """

    def __init__(self, rows: object, *, columns: int | None = None, comm: Comm = None):
        used = channel(comm, "DistributedMatrix")
        matrix, own, offsets, starts = local_rows(used, rows, columns)
        self.comm, self._channel = comm, used
        self.shape = int(offsets[0][-1]), int(offsets[1][-1])
        self.owned_rows, self.owned_columns = own
        self.local_shape = matrix.shape[0], own[1].stop - own[1].start
        self.offsets, self.values = offsets, matrix.data
        self.indices = own[0].start + np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr)), matrix.indices
        mine = (matrix.indices >= own[1].start) & (matrix.indices < own[1].stop)
        ghosts = np.unique(matrix.indices[~mine])
        # Columns of this rank come first, ghosts behind them: so x with its ghosts is one vector for SciPy.
        numbers = np.where(
            mine, matrix.indices - own[1].start, self.local_shape[1] + np.searchsorted(ghosts, matrix.indices)
        )
        self._pattern = Pattern(numbers, starts, self.local_shape, GhostPlan(ghosts, offsets[1], comm))

    @classmethod
    def from_scipy(
        cls, matrix: object, *, root: Rank = 0, counts: Sequence[int] | None = None, comm: Comm = None
    ) -> DistributedMatrix:
        """Divide the root's matrix among the ranks.

        Parameters
        ----------
        matrix : SciPy sparse matrix or sparse array
            Counts on the root; other ranks may pass None.
        root : int
        counts : sequence of int, optional
            Rows of each rank; as even as can be by default, the first ranks with one more. Of a square matrix the columns
            are divided alike, of others evenly.
        comm : mpi4py intracommunicator, optional

        Returns
        -------
        DistributedMatrix

        Raises
        ------
        TypeError, ValueError
            On all ranks, where the root's `matrix` isn't a sparse matrix of floats, or `counts` doesn't add up to its rows.

        Ranks
        -----
        All ranks call it.
        """
        rows, columns = rows_of(channel(comm, "DistributedMatrix.from_scipy"), matrix, root, counts)
        return cls(rows, columns=columns, comm=comm)

    @classmethod
    def from_operator(cls, matvec: Function, domain: Domain, *params: Any) -> DistributedMatrix:
        """Find the matrix of an operator on a domain, by products with (2 halo + 1) fields for each dimension.

        Parameters
        ----------
        matvec : callable
            ``matvec(u, *params)``, linear in u, which looks no further than the domain's halo.
        domain : Domain
        *params : pytree of arrays
            No derivative flows to them.

        Returns
        -------
        DistributedMatrix
            Its vectors are the blocks, flattened: ``A @ u.ravel()`` is ``matvec(u, *params).ravel()``.

        Raises
        ------
        TypeError, ValueError
            On all ranks, where the operator returns something else than an array of the block's shape, isn't linear, or
            looks further than the halo.
        Exception
            On all ranks, what `matvec` raises on one.

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
            f"of {self._channel.size}: rows {rows.start} to {rows.stop}, {nnz} entries, {self._pattern.plan.count} ghosts)"
        )

    def with_values(self, values: LocalArray) -> DistributedMatrix:
        """Return a matrix with the same pattern and other values, which may be traced.

        Parameters
        ----------
        values : array of shape (nnz,)
            In the order of the attribute `values`. With values on a device the matrix multiplies and solves there:
            ``A.with_values(mpiad.device.to_device(A.values))``.

        Raises
        ------
        ValueError
            Where there are more or fewer.
        """
        expected, found = (len(self._pattern.columns),), np.shape(getval(values))
        if found != expected:
            raise ValueError(
                f"DistributedMatrix.with_values: values must have shape {expected}, one for each entry of the rows of rank "
                f"{self._channel.rank}, but got {found}."
            )
        other = object.__new__(type(self))  # not by the constructor: it would find the pattern anew, with messages
        other.__dict__.update(self.__dict__, values=values)
        return other

    def matvec(self, x: LocalArray) -> LocalArray:
        """Multiply: return this rank's part of A x.

        Parameters
        ----------
        x : array of shape (..., local_shape[1])
            This rank's part; leading axes count vectors.

        Returns
        -------
        array of shape (..., local_shape[0])

        Raises
        ------
        TypeError, ValueError
            Where `x` isn't an array of that shape.

        Ranks
        -----
        All ranks call it.

        Adjoint
        -------
        x gets Aᵀ ȳ, and each of the values the sum of x_column ȳ_row.
        """
        return product(self.values, self._checked(x, 1, "matvec"), self._pattern)

    def rmatvec(self, y: LocalArray) -> LocalArray:
        """Multiply by the transpose, without conjugation: return this rank's part of Aᵀ y; otherwise as `matvec`."""
        return transposed_product(self.values, self._checked(y, 0, "rmatvec"), self._pattern)

    def __matmul__(self, x: LocalArray) -> LocalArray:
        return self.matvec(x)

    @property
    def T(self) -> Transposed:
        """The transposed matrix, as what multiplies and solves; its rows are divided as the columns are."""
        return Transposed(self)

    def diagonal(self) -> LocalArray:
        """Return this rank's part of the diagonal of a square matrix; zero where there is no entry. No communication.

        Adjoint
        -------
        Each entry's value gets its cotangent.
        """
        self._require_square("diagonal")
        home = arrays_of(getval(self.values))
        kind, (places,) = getval(self.values).dtype, self._diagonal.on(home)
        zero = np.zeros(1, kind) if home is None else home.full((1,), 0, kind)
        return concatenate([self.values, zero])[places]

    @cached_property
    def _diagonal(self) -> Constants:
        row, column = self.indices
        found = np.full(self.local_shape[0], len(row))
        on_diagonal = np.flatnonzero(row == column)
        # Rows without an entry on the diagonal point to the zero behind the values.
        found[row[on_diagonal] - self.owned_rows.start] = on_diagonal
        return Constants(found)

    def solve(
        self, b: LocalArray, *, method: str = "gmres", preconditioner: Function | None = None, **settings: Any
    ) -> LocalArray:
        """Solve A x = b; differentiable with respect to b and the values.

        Parameters
        ----------
        b : array of shape (..., local_shape[0])
            This rank's part.
        method : {"gmres", "bicgstab", "cg", "direct"}
            "direct" gathers the matrix on rank 0 and factorises it there: for small ones.
        preconditioner : callable, optional
            ``preconditioner(r)``, as `AdditiveSchwarz` of this matrix.
        **settings
            As `solve` takes them.

        Returns
        -------
        array of the shape of `b`

        Raises
        ------
        TypeError, ValueError, ConvergenceError
            On all ranks, as `solve` does; where the matrix isn't square, or "direct" finds it singular.

        Ranks
        -----
        All ranks call it.

        Adjoint
        -------
        One solve with the transpose: b gets λ = A⁻ᵀ x̄, and each of the values -x_column λ_row.
        """
        return self._solve(self.operator(), b, method, preconditioner, settings)

    def _solve(
        self, matvec: ProductWith, b: LocalArray, method: str, preconditioner: Function | None, settings: dict
    ) -> LocalArray:
        self._require_square("solve")
        # A product would raise here alone, while the others wait for entries.
        with raising_together(self._channel):
            self._checked(b, 0, "solve")
        if method == "direct":
            # Exact factors leave one or two iterations, which also repair what rounding lost.
            method, preconditioner = "gmres", GatheredFactors(self)
            preconditioner = preconditioner.T if matvec.transposed else preconditioner
            settings = {"rtol": 1e-12, **settings}
        return solve(matvec, b, self.values, method=method, preconditioner=preconditioner, comm=self.comm, **settings)

    def operator(self, transposed: bool = False) -> ProductWith:
        """Return ``operator(u, values)``, the product as `solve` takes it, with its transpose."""
        return ProductWith(self._pattern, transposed)

    def local_rows(self) -> Any:
        """Return this rank's rows as SciPy's CSR with all columns; values alone, without derivatives."""
        plain = on_host(stop_gradient(self.values)), self.indices[1], self._pattern.starts
        return scipy.sparse.csr_matrix(plain, (self.local_shape[0], self.shape[1]))

    def gathered(self, root: Rank = 0) -> Any:
        """Return the whole matrix on the root, as SciPy's CSR, and None elsewhere; values alone, without derivatives."""
        pieces = self._channel.data.gather(self.local_rows(), root)
        return None if pieces is None else scipy.sparse.vstack(pieces, format="csr")

    def _require_square(self, call: str) -> None:
        if self.shape[0] != self.shape[1] or (self.offsets[0] != self.offsets[1]).any():  # all know them, so all raise
            raise ValueError(
                f"DistributedMatrix.{call}: the matrix must be square, with rows and columns divided alike, but has shape "
                "{}, and rank {} has {} rows and {} columns.".format(self.shape, self._channel.rank, *self.local_shape)
            )

    def _checked(self, x: Array, axis: int, call: str) -> Any:
        found, length = getval(x), self.local_shape[axis]
        if type(found) is not np.ndarray or found.dtype.kind not in "fc":
            require_floats(f"DistributedMatrix.{call}", found, length)
        values = getval(self.values)
        if type(found) is not type(values) or arrays_of(found) != arrays_of(values):
            require_together(f"DistributedMatrix.{call}", x=found, values=values)
        if not found.ndim or found.shape[-1] != length:
            raise ValueError(
                f"DistributedMatrix.{call}: expected an array of shape (..., {length}), rank {self._channel.rank}'s part "
                f"of {self.shape[axis]}, but got {found.shape}."
            )
        return x
