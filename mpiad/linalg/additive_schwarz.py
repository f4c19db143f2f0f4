"""`AdditiveSchwarz`: a domain decomposition preconditioner for sparse matrices; SciPy or PyAMG solve local systems.

Each rank solves a local system, which consists of this rank's rows and some layers of its neighbors' rows around them.
The solutions are added. Since global components of the error converge slowly on many ranks, a coarse problem with one
unknown per rank is also solved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse

from mpiad._typing import LocalArray
from mpiad.linalg.distributed_matrix import DistributedMatrix
from mpiad.linalg.sparse_factors import SparseFactors
from mpiad.linalg.sparse_products import add_to_owners, fetch_entries
from mpiad.linalg.vectors import through_host
from mpiad.optional_packages import optional_package
from mpiad.primitives import mpi_allgather
from mpiad.primitives.catalogue import ALLGATHER, Dividing
from mpiad.primitives.checks import positive_count
from mpiad.primitives.cotangents import spec_like
from mpiad.primitives.operation import communicate, suspended
from mpiad.redistribution import GhostExchange
from mpiad.transport import Channel, channel
from mpiad.transport.core.agreement import raising_together
from mpiad.transport.core.tracing import restoring_state

_CALL = "linalg.AdditiveSchwarz"


class AdditiveSchwarz:
    """A preconditioner: the sum of the solutions of overlapping local systems, one per rank.

    Parameters
    ----------
    matrix : DistributedMatrix
        A square matrix, whose rows and columns are distributed in the same way.
    overlap : int
        Number of layers of the neighbors' rows in each local system; with 0, the local systems are those of block Jacobi.
    restricted : bool
        Whether each rank uses the local solution on the rank's rows only. This takes fewer iterations and messages, but the
        preconditioner isn't symmetric, so only "gmres" and "bicgstab" can use it.
    coarse : bool
        Whether to solve a coarse problem with one unknown per rank. The number of iterations then grows less with the
        number of ranks. Each rank stores a dense matrix of shape (ranks, ranks).
    local : {"lu", "amg"}
        "lu" solves the local systems by SciPy's factors. "amg" applies a V-cycle of algebraic multigrid (smoothed
        aggregation) to each of them, which needs much less memory and time for large systems of elliptic problems. It
        needs PyAMG: ``pip install "mpiad[amg]"``.
    options : dict, optional
        Further arguments of ``pyamg.smoothed_aggregation_solver``, for "amg".

    Raises
    ------
    TypeError, ValueError
        On all ranks, if an argument is invalid, or a local system is singular.
    ImportError
        On all ranks, if `local` is "amg" and PyAMG can't be imported.

    Ranks
    -----
    All ranks of the matrix call the constructor, and later ``preconditioner(r)`` with r of shape (..., rows). If r is on a
    device, it is copied to the host, and the result is copied to the device. `T` is the transpose, for derivatives.

    References
    ----------
    X.-C. Cai and M. Sarkis, A restricted additive Schwarz preconditioner for general sparse linear systems, SIAM Journal on
    Scientific Computing 21 (1999).
    P. Vaněk, J. Mandel and M. Brezina, Algebraic multigrid by smoothed aggregation for second and fourth order elliptic
    problems, Computing 56 (1996).
    R. A. Nicolaides, Deflation of conjugate gradients with applications to boundary value problems, SIAM Journal on
    Numerical Analysis 24 (1987).

    Examples
    --------
    >>> import scipy.sparse
    >>> from mpiad.linalg import AdditiveSchwarz, DistributedMatrix
    >>> rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
    >>> whole = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(24, 24)).tocsr()
    >>> rows = slice(24 * rank // size, 24 * (rank + 1) // size)
    >>> matrix = DistributedMatrix(whole[rows])
    >>> x = matrix.solve(np.ones(rows.stop - rows.start), method="cg", preconditioner=AdditiveSchwarz(matrix))
    >>> print(round(float(mpiad.mpi_allreduce(np.sum(x))), 6))
    1300.0
    """

    takes_blocks = True  # arrays with leading axes, as a preconditioner of `solve`

    def __init__(
        self, matrix: DistributedMatrix, *, overlap: int = 1, restricted: bool = False, coarse: bool = True,
        local: str = "lu", options: dict[str, object] | None = None,
    ):  # fmt: skip
        if not isinstance(matrix, DistributedMatrix):
            raise TypeError(f"{_CALL}: matrix must be a DistributedMatrix, but got {type(matrix).__name__}.")
        group = channel(matrix.comm, _CALL)
        with raising_together(group):
            matrix._require_square(_CALL)
            positive_count(overlap, f"{_CALL}: overlap", 0)
            if local not in ("lu", "amg") or (options and local == "lu"):
                expected = 'local must be "lu", or "amg", which takes options'
                raise ValueError(f"{_CALL}: {expected}, but got local={local!r}, options={options!r}.")
        self.comm, self.rank, self._channel = matrix.comm, group.rank, group
        self.rows, self.restricted, self._transposed = matrix.local_shape[0], restricted, False
        with restoring_state(), suspended():
            rows = matrix.local_rows()
            part, self._ghosts = _overlapping_part(matrix, rows, overlap, group)
            with raising_together(group):
                self._local: Callable[[LocalArray, str], LocalArray] | None = None
                if part.shape[0] and local == "amg":
                    self._local = _algebraic_multigrid(part, options or {})
                elif part.shape[0]:
                    name = f"{_CALL}: the local matrix of rank {group.rank}, {part.shape},"
                    self._local = SparseFactors(part, name).solve
            self._coarse = None
            if coarse:
                # The pseudoinverse of the coarse matrix, which is its inverse unless the matrix is singular.
                sums = np.zeros(group.size, rows.dtype)
                np.add.at(sums, np.searchsorted(matrix.offsets[1], matrix.indices[1], side="right") - 1, rows.data)
                self._coarse = np.linalg.pinv(mpi_allgather(sums, comm=matrix.comm))

    @property
    def T(self) -> AdditiveSchwarz:
        """The transpose: the preconditioner of the transposed matrix."""
        other = object.__new__(AdditiveSchwarz)
        other.__dict__.update(self.__dict__, _transposed=not self._transposed)
        return other

    def __call__(self, r: LocalArray) -> LocalArray:
        """Return an approximation of this rank's part of the solution, on the host or device of `r`.

        Parameters
        ----------
        r : array of shape (..., n)
            The residual; n is the number of this rank's rows.

        Raises
        ------
        ValueError
            If the length of `r` isn't n. `solve` and `newton` raise this error on all ranks.

        Ranks
        -----
        All ranks of the matrix call it.
        """
        self.require_fit(r)
        return through_host(self._corrected, r)

    def _corrected(self, r: LocalArray) -> LocalArray:
        # The first call compares the number and dtype of residuals on all ranks.
        self._ghosts.agree(r, -1, _CALL, lambda: None)
        # The restricted variant uses the solution on this rank's rows only; its transpose uses the residual on these only.
        needs_ghosts, adds_ghosts = (not self.restricted or not self._transposed), (not self.restricted or self._transposed)
        shape = *r.shape[:-1], self._ghosts.n_needed
        entries = fetch_entries(r, self._ghosts) if needs_ghosts else np.zeros(shape, r.dtype)
        extended = np.concatenate([r, entries], axis=-1)
        if self._local is not None:
            rows = extended.reshape(-1, extended.shape[-1])
            extended = self._local(rows, "T" if self._transposed else "N").reshape(extended.shape)
        out = np.ascontiguousarray(extended[..., : r.shape[-1]])
        if adds_ghosts:
            add_to_owners(extended[..., r.shape[-1] :], self._ghosts, out)
        if self._coarse is not None:
            own = np.asarray(r.sum(axis=-1))
            sums = communicate(
                ALLGATHER, own, Dividing(self._channel, None, None, [1] * self._channel.size, spec_like(own))
            )
            # Each rank needs only its own entry of the coarse solution.
            inverse = self._coarse.T if self._transposed else self._coarse
            out += np.tensordot(inverse[self.rank], sums, 1)[..., None]
        return out

    def require_fit(self, r: LocalArray) -> None:
        """Raise a ValueError if `r` doesn't match the rows of this rank."""
        if r.shape[-1:] != (self.rows,):
            raise ValueError(
                f"{_CALL}: the preconditioner's matrix has {self.rows} rows on rank {self.rank}, but the residual has "
                f"shape {r.shape}. Create it from the system's matrix, divided among the ranks in the same way."
            )


def _algebraic_multigrid(matrix: Any, options: dict[str, object]) -> Callable[[LocalArray, str], LocalArray]:
    """Return ``cycle(rows, kind)``: PyAMG's V-cycle for the matrix ("N") or its transpose ("T"), on rows (k, n)."""
    pyamg = optional_package("pyamg", "PyAMG", "mpiad[amg]", _CALL)
    hermitian = abs(matrix - matrix.conj().T).max() <= 1e-12 * abs(matrix).max()

    def cycle_of(a: Any) -> Any:
        # PyAMG draws start vectors from NumPy's global generator, whose state is the user's.
        state = np.random.get_state()  # noqa: NPY002
        try:
            np.random.seed(0)  # noqa: NPY002
            settings = {"symmetry": "hermitian" if hermitian else "nonsymmetric", **options}
            return pyamg.smoothed_aggregation_solver(a.tocsr(), **settings).aspreconditioner()
        finally:
            np.random.set_state(state)  # noqa: NPY002

    cycles = {"N": cycle_of(matrix)}

    def cycled(rows: LocalArray, kind: str) -> LocalArray:
        if rows.dtype.kind == "c" and matrix.dtype.kind == "f":
            return cycled(rows.real, kind) + 1j * cycled(rows.imag, kind)
        if kind not in cycles:
            cycles[kind] = cycles["N"] if hermitian and matrix.dtype.kind == "f" else cycle_of(matrix.T)
        return np.stack([cycles[kind].matvec(row) for row in rows]) if len(rows) else rows.copy()

    return cycled


def _overlapping_part(
    matrix: DistributedMatrix, rows: LocalArray, overlap: int, group: Channel
) -> tuple[Any, GhostExchange]:
    """Return the matrix of this rank's rows and `overlap` layers around them, and the exchange of these layers."""
    owned = matrix.owned_rows.start, matrix.owned_rows.stop
    own, surrounding = np.arange(*owned), np.zeros(0, np.int64)
    ghosts = GhostExchange(surrounding, owned, matrix.comm)
    whole: Any = rows
    # Each pass, which is collective, adds a layer: the rows whose indices are columns of the matrix so far.
    for _ in range(overlap):
        columns = np.unique(whole.indices)
        surrounding = np.union1d(surrounding, np.setdiff1d(columns, own)).astype(np.int64)
        ghosts = GhostExchange(surrounding, owned, matrix.comm)
        whole = scipy.sparse.vstack([rows, _ghost_rows(rows, ghosts, group)], format="csr")
    return whole[:, np.concatenate([own, surrounding])].tocsc(), ghosts


def _ghost_rows(rows: LocalArray, ghosts: GhostExchange, group: Channel) -> Any:
    """Return the needed matrix rows, in the order of their numbers."""
    sent: list[Any] = [None] * group.size
    for rank, indices in ghosts.destinations:
        sent[rank] = rows[indices]
    received = group.data.alltoall(sent)
    blocks: list[Any] = [scipy.sparse.csr_matrix((0, rows.shape[1]), dtype=rows.dtype)]
    # Ranks own consecutive rows, so the order of the owners is that of the numbers.
    blocks.extend(received[rank] for rank, _ in ghosts.sources)
    return scipy.sparse.vstack(blocks, format="csr")
