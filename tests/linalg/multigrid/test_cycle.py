"""One cycle as an operator: symmetric, positive, the same on any number of ranks; what it sends."""

import numpy as np
import pytest
from elliptic_matrix import blocks, elliptic_matrix, fixed_sides
from mpi4py import MPI

import mpiad
import mpiad.linalg.multigrid.hierarchy as levels
import mpiad.linalg.multigrid.preconditioner as preconditioner
from mpiad.domain import Domain, halo
from mpiad.linalg import Elliptic, Multigrid
from mpiad.linalg.multigrid import stencil

CASES = [
    ((13, 10), {"boundary": ("neumann", ("dirichlet", "neumann"))}, False),
    ((6, 12), {}, (True, False)),
    ((7, 6, 5), {"spacing": (1.0, 0.8, 1.2)}, False),
]


@pytest.fixture(autouse=True)
def many_levels(monkeypatch):
    monkeypatch.setattr(levels, "_FACTORIZED", {1: 3, 2: 8, 3: 8})
    monkeypatch.setattr(levels, "_SHORTEST", {1: 2, 2: 2, 3: 2})


def as_matrix(shape, operator):
    """Return the whole matrix of an operator."""
    return np.array([operator(unit.reshape(shape)).ravel() for unit in np.eye(int(np.prod(shape)))]).T


@pytest.mark.serial
@pytest.mark.parametrize("twice", [0, 2])
@pytest.mark.parametrize(("shape", "settings", "periodic"), CASES, ids=lambda value: str(value))
def test_symmetric_and_positive(shape, settings, periodic, twice, rank_rng, monkeypatch):
    monkeypatch.setattr(preconditioner, "_DOUBLED", twice)
    kappa = blocks(shape, rank_rng(100), 4)
    multigrid = Multigrid(Domain(shape, periodic=periodic), kappa, 0.01, **settings)
    found = as_matrix(shape, multigrid)
    np.testing.assert_allclose(found, found.T, rtol=1e-9, atol=1e-12 * abs(found).max())
    assert np.linalg.eigvalsh((found + found.T) / 2)[0] > 0
    # A cycle reduces the error in the energy norm: all eigenvalues of B A are between 0 and 1.
    fixed = fixed_sides(multigrid.operator.sides)
    matrix = elliptic_matrix(kappa, 0.01, settings.get("spacing", 1.0), fixed, False, periodic).toarray()
    eigenvalues = np.linalg.eigvals(found @ matrix).real
    assert 0 < eigenvalues.min() and eigenvalues.max() < 1 + 1e-9


@pytest.mark.serial
def test_symmetric_where_constants_are_in_the_kernel(rank_rng):
    """Means are taken away before a cycle and after it, so that it remains its own transpose."""
    shape = (9, 8)
    found = as_matrix(shape, Multigrid(Domain(shape), blocks(shape, rank_rng(100), 4), boundary="neumann", mean_zero=True))
    np.testing.assert_allclose(found, found.T, rtol=1e-9, atol=1e-12 * abs(found).max())
    np.testing.assert_allclose(found.sum(axis=0), 0.0, atol=1e-10 * abs(found).max())


@pytest.mark.also_on(2, 4)
@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize(("shape", "settings", "periodic"), CASES, ids=lambda value: str(value))
def test_as_on_one_rank(shape, settings, periodic, axis, rank_rng, size):
    """Divided as the domain says, also a ring by two ranks that are each other's neighbour on both sides."""
    kappa, r = blocks(shape, rank_rng(100), 4), rank_rng(101).standard_normal(shape)
    dims = [1] * len(shape)
    dims[axis] = size
    domain, alone = Domain(shape, periodic=periodic, dims=dims), Domain(shape, periodic=periodic, comm=MPI.COMM_SELF)
    expected = Multigrid(alone, kappa, 0.01, **settings)(r)
    found = Multigrid(domain, kappa[domain.owned], 0.01, **settings)(r[domain.owned])
    np.testing.assert_allclose(found, expected[domain.owned], rtol=1e-9, atol=1e-12 * abs(expected).max())


def test_halo_of_the_domain_may_be_wider(rank_rng):
    shape = (12, 16)
    r = rank_rng(101).standard_normal(shape)
    domain, wider = Domain(shape), Domain(shape, halo=2)
    np.testing.assert_array_equal(Multigrid(domain, 2.0)(r[domain.owned]), Multigrid(wider, 2.0)(r[domain.owned]))


def test_operator_in_single_precision(rank_rng):
    domain, (u, kappa) = Domain((12, 10)), rank_rng(101).random((2, 12, 10))
    operator, u, kappa = Elliptic(domain), u[domain.owned], kappa[domain.owned]
    found = operator(u.astype("f4"), kappa, 0.5)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, operator(u, kappa, 0.5), atol=1e-5)


def test_several_right_hand_sides(rank_rng):
    domain = Domain((12, 10))
    r = rank_rng(101).standard_normal((3, 3, 12, 10))[(..., *domain.owned)]  # more than one cycle takes
    multigrid = Multigrid(domain, 1.5)
    found = multigrid(r)
    for index in np.ndindex(3, 3):
        np.testing.assert_array_equal(found[index], multigrid(r[index]))
    assert multigrid(r.astype("f4")).dtype == np.float32


def test_messages_of_a_cycle(rank, size, monkeypatch):
    """One message for each side, dimension and step of a level at most, whatever the size of the blocks."""
    sent, steps = [], []
    monkeypatch.setattr(halo, "mpi_send", lambda x, *rest, **tag: (sent.append(x.size), mpiad.mpi_send(x, *rest, **tag))[1])
    fill = stencil.LevelHalo.fill
    monkeypatch.setattr(stencil.LevelHalo, "fill", lambda self, *given: (steps.append(self), fill(self, *given))[1])
    domain = Domain((24, 28))
    multigrid, r = Multigrid(domain, 1.0), np.ones(domain.local_shape)
    sent.clear(), steps.clear()
    multigrid(r)
    neighbours = sum(rank is not None for pair in domain.neighbours for rank in pair)
    assert len(sent) <= neighbours * len(steps)
    fine = [level for level in steps if level is multigrid._level._halo]
    assert len(fine) == 6  # two groups of colors before, the residual, the correction, two groups after
    assert (size == 1) == (not sent)
