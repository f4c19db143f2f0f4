"""The matrix of an operator on a domain, against the operator itself, and as what a preconditioner is made of."""

import numpy as np
import pytest

import mpiad
from mpiad.domain import Domain
from mpiad.linalg import AdditiveSchwarz, DistributedMatrix, solve


def weighted(domain, dtype=float):
    """Return an operator that takes every neighbour within the halo by a weight of its own, different at each point."""
    rng = np.random.default_rng(3)
    windows = list(np.ndindex(*[2 * h + 1 for h in domain.halo]))
    weights = rng.standard_normal((len(windows), *domain.shape)) + (1j if dtype is complex else 0)
    weights[len(windows) // 2] += 3.0 * len(windows)

    def matvec(u, scale=1.0):
        v = domain.exchange(u)
        parts = [
            w[domain.owned] * v[tuple(slice(k, k + n) for k, n in zip(window, domain.local_shape))]
            for w, window in zip(weights, windows)
        ]
        return scale * sum(parts)

    return matvec


CASES = [
    {"shape": 13}, {"shape": (9, 8)}, {"shape": (9, 8), "halo": (1, 2)}, {"shape": (10, 9), "periodic": True},
    {"shape": (12, 7), "periodic": (True, False), "halo": (2, 1)}, {"shape": (4, 4, 5)}, {"shape": (8, 11), "halo": (1, 0)},
]  # fmt: skip


@pytest.mark.parametrize("dtype", [float, complex])
@pytest.mark.parametrize("given", CASES, ids=str)
def test_matrix_of_an_operator(rank_rng, rank, given, dtype):
    domain = Domain(**given)
    matvec = weighted(domain, dtype)
    a = DistributedMatrix.from_operator(matvec, domain, 1.5)
    u = rank_rng(rank).standard_normal(domain.local_shape)
    assert a.shape == (np.prod(domain.shape),) * 2
    np.testing.assert_allclose(a @ u.ravel(), matvec(u, 1.5).ravel(), 1e-12, 1e-12)


def test_an_operator_that_overwrites_its_argument():
    """A second matrix on the same domain is computed from the same fields."""
    domain = Domain(7)

    def doubled(u):
        u *= 2.0
        return u

    for _ in range(2):
        values = DistributedMatrix.from_operator(doubled, domain).values
        np.testing.assert_array_equal(values, np.full(domain.local_shape, 2.0))


def test_preconditioner_of_a_domain(rank_rng):
    domain, norms, plain = Domain((12, 11)), [], []
    kappa = np.exp(2 * rank_rng(100).standard_normal((12, 11)))[domain.owned]

    def matvec(u, kappa):
        k, v = domain.exchange(kappa, "edge"), domain.exchange(u)
        down = (k[1:, 1:-1] + k[:-1, 1:-1]) * (v[1:, 1:-1] - v[:-1, 1:-1])
        right = (k[1:-1, 1:] + k[1:-1, :-1]) * (v[1:-1, 1:] - v[1:-1, :-1])
        return down[:-1] - down[1:] + right[:, :-1] - right[:, 1:]

    schwarz = AdditiveSchwarz(DistributedMatrix.from_operator(matvec, domain, kappa), overlap=2)
    b = np.ones(domain.local_shape)

    def precondition(r):
        return schwarz(r.ravel()).reshape(r.shape)

    u = solve(matvec, b, kappa, preconditioner=precondition, callback=norms.append)
    np.testing.assert_allclose(u, solve(matvec, b, kappa, rtol=1e-11, callback=plain.append), 1e-5)
    assert len(norms) < 0.5 * len(plain)


def test_what_is_refused(rank, size):
    domain, wide = Domain((11, 8)), Domain((11, 8), halo=2)
    with pytest.raises(ValueError, match=r"depends on points beyond the halo of \(1, 1\), or isn't linear"):
        DistributedMatrix.from_operator(lambda u: u + wide.exchange(u)[4:, 2:-2], domain)
    with pytest.raises(ValueError, match="isn't linear"):
        DistributedMatrix.from_operator(lambda u: u + 1.0, domain)
    # An entry three columns away has the same color as the diagonal, which a count of the entries can't see.
    domain, wide = Domain(4 * size + 3), Domain(4 * size + 3, halo=3)
    with pytest.raises(ValueError, match="in row 3, the entry of column 0 is missing in the pattern"):
        DistributedMatrix.from_operator(lambda u: 4 * u - wide.exchange(u)[:-6], domain)
    domain = Domain((11, 8))
    with pytest.raises(TypeError, match="matvec must return an array of floats of shape .* but returned list"):
        DistributedMatrix.from_operator(lambda u: [1.0] if rank == size - 1 else u, domain)
    assert mpiad.mpi_allreduce(1) == size
