"""Reductions over the grid."""

import copy
import pickle

import autograd.numpy as anp
import numpy as np
import pytest

import mpiad
from mpiad.domain import Domain

SHAPE = (9, 7)


def fields(rank_rng, number, lead=()):
    return [rank_rng(100 + k).standard_normal(lead + SHAPE) for k in range(number)]


def test_values(rank_rng):
    domain = Domain(SHAPE)
    u, v = fields(rank_rng, 2)
    mine = domain.owned
    np.testing.assert_allclose(domain.sum(u[mine]), u.sum(), 1e-13)
    np.testing.assert_allclose(domain.mean(u[mine]), u.mean(), 1e-13)
    np.testing.assert_allclose(domain.dot(u[mine], v[mine]), (u * v).sum(), 1e-13)
    np.testing.assert_allclose(domain.norm(u[mine]), np.linalg.norm(u), 1e-13)
    z = u + 1j * v
    np.testing.assert_allclose(domain.dot(z[mine], z[mine]), (z * z).sum(), 1e-13)
    np.testing.assert_allclose(domain.norm(z[mine]), np.linalg.norm(z), 1e-13)
    (several,) = fields(rank_rng, 1, (3,))
    np.testing.assert_allclose(domain.mean(several[(..., *mine)]), several.mean(), 1e-13)
    assert domain.sum(np.ones(domain.local_shape, int)) == 63


def test_norms_of_integers_and_booleans(rank_rng):
    domain = Domain(SHAPE)
    image = rank_rng(100).integers(0, 256, SHAPE).astype(np.uint8)
    for field in (image, image.astype(np.int16) * 99, image > 99, image * 0):
        np.testing.assert_allclose(domain.norm(field[domain.owned]), np.linalg.norm(field.astype(float)), 1e-13)


def test_gradients(rank_rng):
    domain = Domain(SHAPE)
    u, v = fields(rank_rng, 2)
    mine = domain.owned
    norm = np.linalg.norm(u)
    cases = [
        (lambda x: domain.sum(x**2), 2 * u),
        (lambda x: domain.mean(x) ** 2, np.full(SHAPE, 2 * u.mean() / 63)),
        (lambda x: domain.dot(x, x * v[mine]), 2 * u * v),
        (lambda x: domain.norm(x) ** 3, 3 * norm * u),
    ]
    for fun, expected in cases:
        np.testing.assert_allclose(mpiad.grad(fun)(u[mine]), expected[mine], 1e-12, 1e-13)
    # H of |x|³ is 3 (|x| I + x xᵀ / |x|).
    product = mpiad.hvp(cases[-1][0])(u[mine], v[mine])
    np.testing.assert_allclose(product, (3 * (norm * v + u * (u * v).sum() / norm))[mine], 1e-12, 1e-13)


@pytest.mark.not_on(4)
def test_norm_of_nothing_has_a_derivative():
    domain = Domain(SHAPE)
    value, gradient = mpiad.value_and_grad(domain.norm)(np.zeros(domain.local_shape))
    assert value == 0 and not gradient.any()
    # The norm has no second derivative there, and that of its square isn't zero.
    v = np.ones(domain.local_shape)
    for fun in (domain.norm, lambda u: domain.norm(u) ** 2):
        assert np.all(np.isnan(mpiad.hvp(fun)(0 * v, v)))
        assert np.all(np.isnan(mpiad.hvp(mpiad.jit(fun))(0 * v, v)))


def test_extrema(rank_rng):
    # Both ends of u³, each reached in one cell; and a tie of all cells, which the ranks share.
    domain = Domain(SHAPE)
    (u,) = fields(rank_rng, 1)
    mine = domain.owned
    assert domain.max(u[mine]) == u.max() and domain.min(u[mine]) == u.min()
    expected = np.where(u == u.max(), 3 * u**2, 0) + np.where(u == u.min(), 6 * u**2, 0)
    gradient = mpiad.grad(lambda x: domain.max(x**3) + 2 * domain.min(x**3))(u[mine])
    np.testing.assert_allclose(gradient, expected[mine], 1e-12)
    tie = mpiad.grad(domain.max)(np.ones(domain.local_shape))
    np.testing.assert_allclose(domain.sum(tie), 1.0, 1e-12)


def test_a_nan_in_any_cell_is_the_largest_and_the_smallest(rank, size):
    domain = Domain(SHAPE)
    for where in range(size):
        u = np.full(domain.local_shape, 1.0 + rank)
        u[0, -1] = np.nan if rank == where else 0.5
        for fun in (domain.max, domain.min):
            with np.errstate(invalid="ignore"):  # none of the block's cells is its NaN
                value, gradient = mpiad.value_and_grad(fun)(u)
            assert np.isnan(value) and np.isnan(gradient).all()


def test_blocks_with_halo_are_refused():
    domain = Domain(SHAPE)
    padded = np.ones(domain.padded_shape)
    for fun in (domain.sum, domain.mean, domain.norm, lambda u: domain.dot(np.ones(domain.local_shape), u)):
        with pytest.raises(ValueError, match="expected an array of shape"):
            fun(padded)
    with pytest.raises(TypeError, match="expected an array .* but got float"):
        domain.sum(1.0)


def test_objective_of_a_whole_program(rank_rng):
    # The energy of a stretched string, its ends fixed: ½ Σ (x_{i+1} - x_i)², by the rows of its matrix.
    n = 11
    domain = Domain((n,))
    x = rank_rng(100).standard_normal(n)

    def energy(block):
        padded = domain.exchange(block)
        stretch = anp.sum((padded[1:-1] - padded[:-2]) ** 2)
        last = padded[-2] ** 2 if domain.neighbours[0][1] is None else 0.0
        return mpiad.mpi_sum(stretch + last) / 2

    matrix = 2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)
    value, gradient = mpiad.value_and_grad(energy)(x[domain.owned])
    np.testing.assert_allclose(value, x @ matrix @ x / 2, 1e-12)
    np.testing.assert_allclose(gradient, (matrix @ x)[domain.owned], 1e-11, 1e-12)


def test_a_domain_is_copied_by_reference_and_described_for_a_pickle(size):
    domain = mpiad.Domain((8 * size, 6), halo=(2, 1), periodic=(True, False), dims=(size, 1))
    assert copy.copy(domain) is domain and copy.deepcopy([domain])[0] is domain
    with pytest.raises(TypeError, match=r"contains a communicator.*domain\.arguments.*Domain\(\*\*arguments, comm=comm\)"):
        pickle.dumps(domain)
    arguments = pickle.loads(pickle.dumps(domain.arguments))
    assert repr(mpiad.Domain(**arguments)) == repr(domain)
