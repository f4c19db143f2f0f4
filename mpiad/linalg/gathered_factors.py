"""The factors of a whole matrix on rank 0, for matrices that fit there: a preconditioner that is the inverse."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.sparse.linalg import splu

from mpiad._typing import LocalArray
from mpiad.linalg.host_and_device import through_host
from mpiad.primitives import mpi_gather, mpi_scatter
from mpiad.transport import channel
from mpiad.transport.agreement import raising_together

if TYPE_CHECKING:
    from mpiad.linalg.distributed_matrix import DistributedMatrix


class GatheredFactors:
    """Factorize a matrix on rank 0, and solve with the factors for all ranks, which make it together.

    A ValueError on all ranks if the matrix is singular.
    """

    def __init__(self, matrix: DistributedMatrix):
        self.comm, self.counts = matrix.comm, np.diff(matrix.offsets[0]).tolist()
        whole, self._factors, self._kind = matrix.gathered(), None, "N"
        # Only rank 0 can detect that there are no factors, and the others would wait for its solutions.
        with raising_together(channel(matrix.comm, "DistributedMatrix.solve")):
            if whole is not None:
                self._factors = factors_of(whole.tocsc(), f"DistributedMatrix.solve: the matrix {matrix.shape}")

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
        # The distributed axis first, and all right-hand sides as columns: one call of SciPy for all of them.
        whole = mpi_gather(np.moveaxis(r, -1, 0), 0, axis=0, comm=self.comm)
        if self._factors is not None:
            columns = whole.reshape(len(whole), math.prod(whole.shape[1:]))
            whole = self._factors.solve(columns, self._kind).reshape(whole.shape)
        return np.moveaxis(mpi_scatter(whole, 0, axis=0, counts=self.counts, comm=self.comm), 0, -1)


def factors_of(matrix: object, said: str) -> Any:
    """Return SciPy's factors of a sparse matrix; a ValueError if it is singular."""
    try:
        return splu(matrix)
    except RuntimeError as error:
        raise ValueError(f"{said} can't be factorised: {error}.") from error
