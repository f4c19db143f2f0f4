"""Scatter and gather between the root's whole grid and the blocks."""

import autograd.numpy as anp
import numpy as np
import pytest
from whole_grid import owned

import mpiad
from mpiad.domain import Domain
from mpiad.testing import check_adjoint

SHAPES = [(13,), (9, 7), (5, 6, 7)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def whole(rank_rng, shape):
    return rank_rng(100).standard_normal(shape)


@each_shape
@pytest.mark.parametrize("lead", [(), (2,), (3, 2)], ids=str)
def test_there_and_back(rank, size, rank_rng, shape, lead):
    domain, root = Domain(shape), size - 1
    u = whole(rank_rng, lead + shape)
    block = domain.scatter(u if rank == root else None, root)
    np.testing.assert_array_equal(block, u[(..., *owned(shape, domain.dims, rank))])
    back = domain.gather(block, root)
    if rank == root:
        np.testing.assert_array_equal(back, u)
    else:
        assert back.shape == (*lead, 0, *shape[1:])


@each_shape
def test_dot_product(rank, size, rng, shape):
    domain = Domain(shape)
    for root in {0, size - 1}:
        check_adjoint(lambda u: domain.gather(u, root), rng.standard_normal(domain.local_shape))  # noqa: B023
        check_adjoint(lambda u: domain.scatter(u, root), rng.standard_normal(shape))  # noqa: B023


def test_gradient_and_hessian(rank, size, rank_rng):
    # J = Σ w (S u)³ / 6 over all blocks; u on the root.
    shape, root = (9, 7), size // 2
    domain = Domain(shape)
    u, w, v = (rank_rng(k).standard_normal(shape) for k in (100, 101, 102))

    def loss(x):
        blocks = domain.scatter(x, root)
        whole_again = domain.gather(w[domain.owned] * blocks**3, root)
        return anp.sum(whole_again) / 6

    mine = float(rank == root)
    gradient = mpiad.grad(loss, objective="sum")(u)
    np.testing.assert_allclose(gradient, mine * w * u**2 / 2, 1e-12, 1e-12)
    direction = v if rank == root else np.zeros(shape)
    product = mpiad.hvp(loss, objective="sum")(u, direction)
    np.testing.assert_allclose(product, mine * w * u * v, 1e-12, 1e-12)


@pytest.mark.parametrize("dtype", ["f4", "c16", "i8", "?"])
def test_dtypes(rank, rank_rng, dtype):
    domain = Domain((9, 7))
    u = (3 * whole(rank_rng, (9, 7))).astype(dtype)
    block = domain.scatter(u if rank == 0 else None)
    assert block.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(block, u[domain.owned])
    assert domain.gather(block).dtype == np.dtype(dtype)


def test_mistakes_of_the_root_are_raised_on_all_ranks(rank, size):
    domain, root = Domain((9, 7)), size - 1
    with pytest.raises(ValueError, match=r"Domain.scatter: expected an array of shape \(..., 9, 7\), but got \(7, 9\)"):
        domain.scatter(np.ones((7, 9)) if rank == root else None, root)
    with pytest.raises(TypeError, match=r"Domain.scatter: expected an array .* but got NoneType"):
        domain.scatter(None, root)
    with pytest.raises(TypeError, match=r"dtype\('O'\)"):
        domain.scatter(np.full((9, 7), None), root)
    with pytest.raises(ValueError, match=f"root must be a rank from 0 to {size - 1}"):
        domain.scatter(np.ones((9, 7)), size)
    with pytest.raises(ValueError, match="Domain.gather: expected an array of shape"):
        domain.gather(np.ones(domain.padded_shape))
    assert mpiad.mpi_allreduce(1) == size


@pytest.mark.unguarded
def test_scatter_takes_one_header_and_one_message(operations, rank):
    domain, u = Domain((9, 7)), np.arange(126.0).reshape(2, 9, 7)
    assert operations(lambda: domain.scatter(u if rank == 0 else None)) == ["Bcast", "Scatterv"]
