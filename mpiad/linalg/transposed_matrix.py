"""The transpose of a matrix that is divided by rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpiad._typing import Function, LocalArray

if TYPE_CHECKING:  # the matrix makes its transpose, and so imports this file
    from mpiad.linalg.matrix_row_block import MatrixRowBlock

__all__ = ["Transposed"]


class Transposed:
    """The transpose of a matrix: `matvec`, `rmatvec` and `solve` with it, and its `T`."""

    def __init__(self, matrix: MatrixRowBlock):
        self.T = matrix
        self.shape, self.local_shape = matrix.shape[::-1], matrix.local_shape[::-1]

    def __repr__(self) -> str:
        return f"{self.T!r}.T"

    def matvec(self, x: LocalArray) -> LocalArray:
        """Return this rank's part of Aᵀ x, as `MatrixRowBlock.rmatvec`."""
        return self.T.rmatvec(x)

    def rmatvec(self, y: LocalArray) -> LocalArray:
        """Return this rank's part of A y, as `MatrixRowBlock.matvec`."""
        return self.T.matvec(y)

    def __matmul__(self, x: LocalArray) -> LocalArray:
        return self.matvec(x)

    def solve(
        self, b: LocalArray, *, method: str = "gmres", preconditioner: Function | None = None, **settings: Any
    ) -> LocalArray:
        """Solve Aᵀ x = b; otherwise as `MatrixRowBlock.solve`, with a preconditioner for the transpose."""
        return self.T._solve(self.T.operator(transposed=True), b, method, preconditioner, settings)
