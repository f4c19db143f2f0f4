"""A cycle as the preconditioner of `solve`, also for systems that aren't those of its levels."""

import numpy as np
import pytest
from elliptic_matrix import blocks

import mpiad
from mpiad.domain import Domain
from mpiad.linalg import Elliptic, Multigrid, solve


def test_preconditioner_of_solve(rank_rng):
    shape, norms = (40, 36), []
    kappa, b = blocks(shape, rank_rng(100), 8), rank_rng(101).standard_normal(shape)
    domain = Domain(shape)
    multigrid, operator = Multigrid(domain, kappa[domain.owned]), Elliptic(domain)
    u = solve(
        operator, b[domain.owned], kappa[domain.owned], preconditioner=multigrid, rtol=1e-8,
        callback=norms.append,
    )  # fmt: skip
    assert len(norms) <= 25
    np.testing.assert_allclose(operator(u, kappa[domain.owned]), b[domain.owned], atol=1e-6 * np.linalg.norm(b))


@pytest.mark.not_on(4)
def test_preconditioner_of_a_complex_system_that_is_not_symmetric(rank_rng):
    """Diffusion with a current and an imaginary shift; its derivative takes the transposed cycle."""
    shape, rng = (14, 11), rank_rng(100)
    kappa, current = np.exp(rng.standard_normal(shape)), 0.1
    b = rng.standard_normal(shape) + 1j * rng.standard_normal(shape)
    domain = Domain(shape)
    mine, norms = (..., *domain.owned), []
    multigrid, operator = Multigrid(domain, kappa[mine]), Elliptic(domain)

    def matvec(u, current):
        padded = domain.exchange(u)
        return operator(u, kappa[mine]) + current * (padded[2:, 1:-1] - padded[:-2, 1:-1]) + 0.02j * u

    def loss(current):
        u = solve(matvec, b[mine], current, method="gmres", preconditioner=multigrid, rtol=1e-11, callback=norms.append)
        return domain.norm(u) ** 2

    slope = mpiad.mpi_allreduce(mpiad.grad(loss)(current))
    assert len(norms) <= 25 and multigrid.T is multigrid
    np.testing.assert_allclose(slope, (loss(current + 1e-4) - loss(current - 1e-4)) / 2e-4, rtol=1e-5)
