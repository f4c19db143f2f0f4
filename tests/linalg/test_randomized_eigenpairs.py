"""`eigsh` beside SciPy's dense solver."""

import numpy as np
import pytest
import scipy.linalg
from mpi4py import MPI

import mpiad
from mpiad.linalg import eigsh


def joined(piece):
    return np.concatenate(MPI.COMM_WORLD.allgather(piece))


def problem(n, rng):
    q = np.linalg.qr(rng.standard_normal((n, n)))[0]
    b = q @ np.diag(np.geomspace(1.0, 50.0, n)) @ q.T
    root = np.linalg.cholesky(b)
    u = np.linalg.qr(rng.standard_normal((n, n)))[0]
    return root @ (u * 1e4 * 0.8 ** np.arange(n)) @ u.T @ root.T, b


def on_pieces(matrix, n, rank, size, count):
    mine = np.array_split(np.arange(n), size)[rank]

    def product(v):
        count.append(1)
        return matrix[mine] @ joined(v)

    return product, mine


def test_pairs_are_the_dense_ones(rank, size):
    n, k, counts = 200, 40, []
    a, b = problem(n, np.random.default_rng(1))
    product, mine = on_pieces(a, n, rank, size, counts)
    mass, _ = on_pieces(b, n, rank, size, [])
    solve, _ = on_pieces(np.linalg.inv(b), n, rank, size, [])
    pairs = eigsh(product, np.zeros(len(mine)), k, mass=mass, mass_solve=solve, oversample=20, seed=2)
    expected = scipy.linalg.eigh(a, b, eigvals_only=True)[::-1][:k]
    np.testing.assert_allclose(pairs.values, expected, rtol=1e-3)
    assert len(counts) <= 2 * (k + 20)
    vectors = np.concatenate(MPI.COMM_WORLD.allgather(pairs.vectors), axis=1)
    np.testing.assert_allclose(vectors @ b @ vectors.T, np.eye(k), atol=1e-9)
    leading = vectors[:10]
    residual = leading @ a - pairs.values[:10, None] * (leading @ b)
    assert np.linalg.norm(residual) < 1e-3 * np.linalg.norm(leading @ a)


def test_low_rank_and_no_mass(rank, size):
    """Of rank three, all else is dependent: the values are exact, and zeros fill the rest."""
    n = 30
    u = np.linalg.qr(np.random.default_rng(3).standard_normal((n, 3)))[0]
    product, mine = on_pieces((u * [5.0, 3.0, -1.0]) @ u.T, n, rank, size, [])
    pairs = eigsh(product, np.zeros((len(mine), 1))[:, 0], 2)
    np.testing.assert_allclose(pairs.values, [5.0, 3.0], rtol=1e-10)


class Own(KeyError):
    pass


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("which", ["product", "mass", "mass_solve"])
@pytest.mark.parametrize("number", [0, 1])
def test_what_a_product_raises_on_one_rank_is_raised_on_all(number, which, where, batch, rank, size):
    """Before or after its communication, at its first call or later; no sum of what doesn't belong together follows."""
    a, calls = np.diag(np.arange(12.0)), []

    def function(name):
        def product(v):
            calls.append(name)
            fails = rank == size - 1 and name == which and calls.count(name) == number + 1
            if fails and where == "before":
                raise Own("on one rank")
            total = mpiad.mpi_allreduce(v)
            if fails:
                raise Own("on one rank")
            return total / size

        return product

    like = np.zeros(12)
    with pytest.raises(KeyError, match="on one rank") as caught:
        eigsh(
            function("product"),
            like,
            3,
            mass=function("mass"),
            mass_solve=function("mass_solve"),
            oversample=40,
            batch=batch,
        )
    assert (type(caught.value) is Own) == (rank == size - 1)
    assert mpiad.mpi_allreduce(1.0) == size
    rows = np.array_split(np.arange(12), size)[rank]
    pairs = eigsh(lambda v: a[rows] @ joined(v), np.zeros(len(rows)), 3, oversample=9)
    np.testing.assert_allclose(pairs.values, [11.0, 10.0, 9.0], rtol=1e-10)


def test_wrong_operators_are_refused_on_all_ranks(rank, size):
    n, a = 12, np.triu(np.ones((12, 12)))
    skewed, mine = on_pieces(a, n, rank, size, [])
    plain, _ = on_pieces(np.eye(n), n, rank, size, [])
    like = np.zeros(len(mine))
    with pytest.raises(ValueError, match="product must be symmetric"):
        eigsh(skewed, like, 3)
    with pytest.raises(ValueError, match="mass must be symmetric and positive"):
        eigsh(plain, like, 3, mass=lambda v: -v, mass_solve=lambda v: -v)
    with pytest.raises(ValueError, match="together"):
        eigsh(plain, like, 3, mass=plain if rank == size - 1 else None)
    with pytest.raises(ValueError, match="k must be 1 or more and oversample 0 or more, but got 2 and -1"):
        eigsh(plain, like, 2, oversample=-1 if rank == size - 1 else 0)
    with pytest.raises(
        ValueError, match=rf"seed must be an integer, or directions of shape \(5, {len(mine)}\), but .* \(3,\)"
    ):
        eigsh(plain, like, 3, oversample=2, seed=np.ones(3))
    with pytest.raises(ValueError, match="k must be at most 12"):
        eigsh(plain, like, 13)
    with pytest.raises(ValueError, match="mass_solve must return an array of the shape .*another grid"):
        eigsh(plain, like, 3, mass=plain, mass_solve=lambda v: v[1:] if rank == size - 1 else v)
    with pytest.raises(TypeError, match="real numbers"):
        eigsh(plain, like.astype(complex), 3)
