"""A small program of several primitives, whose gradient on every rank is compared with its closed form."""

from __future__ import annotations

from typing import NamedTuple

import autograd.numpy as anp
import numpy as np

from mpiad._typing import Array, Comm, Scalar
from mpiad.differentiation import value_and_grad
from mpiad.primitives import mpi_allreduce, mpi_bcast, mpi_irecv, mpi_isend, mpi_rank, mpi_size, mpi_sum, mpi_wait

_TOLERANCE = 1e-12
_LENGTH = 5


class SelfTest(NamedTuple):
    """How far value and gradient of the program are from their closed form, relative, at most over all ranks."""

    error: float  # NaN or infinite where a rank has no number
    rank: int  # where it is largest

    @property
    def passed(self) -> bool:
        """Whether they are equal to rounding."""
        return self.error < _TOLERANCE

    def __str__(self) -> str:
        verdict = "right" if self.passed else f"WRONG on rank {self.rank}"
        return f"{verdict} (error {self.error:.1e}): allreduce, bcast, isend, irecv and sum against a closed form"


def run_selftest(comm: Comm = None) -> SelfTest:
    """Run it; collective, with the same result on all ranks."""
    rank, size = mpi_rank(comm), mpi_size(comm)
    before, after = (rank - 1) % size, (rank + 1) % size

    def loss(x: Array) -> Scalar:
        received = mpi_irecv(x, before, tag=7, comm=comm)
        sent = mpi_isend(x, after, tag=7, comm=comm)
        squares = mpi_allreduce(anp.sum(x**2), comm=comm)
        last = mpi_bcast(x, root=size - 1, comm=comm)
        mixed = anp.sum(anp.sin(x) * mpi_wait(received))
        mpi_wait(sent)
        return mpi_sum(mixed, comm=comm) + squares * anp.sum(last)

    xs = [_input(r) for r in range(size)]
    value, gradient = value_and_grad(loss, comm=comm)(xs[rank])
    expected_value, expected = _closed_form(xs, rank)
    of_value, of_gradient = abs(value - expected_value) / abs(expected_value), np.abs(gradient - expected)
    error = np.maximum(of_value, of_gradient.max() / np.abs(expected).max())  # a NaN stays one
    errors = mpi_allreduce(np.where(np.arange(size) == rank, error, 0.0), comm=comm)
    worst = int(np.argmax(np.where(np.isnan(errors), np.inf, errors)))
    return SelfTest(float(errors[worst]), worst)


def _input(rank: int) -> np.ndarray:
    return 0.5 + np.sin(1.0 + rank + np.arange(_LENGTH) ** 2) / 3


def _closed_form(xs: list[np.ndarray], rank: int) -> tuple[float, np.ndarray]:
    size = len(xs)
    squares, last = sum(np.sum(x**2) for x in xs), np.sum(xs[-1])
    value = sum(np.sum(np.sin(xs[r]) * xs[r - 1]) for r in range(size)) + squares * last
    # A rank's x is in its own sine, in the product of the rank after it, and in the squares; the last one's also in `last`.
    gradient = np.cos(xs[rank]) * xs[rank - 1] + np.sin(xs[(rank + 1) % size]) + 2 * xs[rank] * last
    return float(value), gradient + (squares if rank == size - 1 else 0.0)
