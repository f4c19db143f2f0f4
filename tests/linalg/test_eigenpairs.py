"""`eigsh` beside SciPy's dense solver."""

import numpy as np
import pytest
import scipy.linalg
from mpi4py import MPI

import mpiad
from mpiad.linalg import eigsh


def joined(piece):
    return np.concatenate(MPI.COMM_WORLD.allgather(piece))


def problem(spectrum, rng):
    n = len(spectrum)
    q = np.linalg.qr(rng.standard_normal((n, n)))[0]
    b = q @ np.diag(np.geomspace(1.0, 50.0, n)) @ q.T
    root = np.linalg.cholesky(b)
    u = np.linalg.qr(rng.standard_normal((n, n)))[0]
    return root @ (u * spectrum) @ u.T @ root.T, b


def on_pieces(matrix, n, rank, size, count):
    mine = np.array_split(np.arange(n), size)[rank]

    def product(v):
        count.append(1)
        return matrix[mine] @ joined(v)

    return product, mine


SPECTRA = {  # values, k, largest number of products
    "geometric": (10.0 ** (4 - 4 * np.arange(200) / 39), 40, 100),
    "inverse squares": (1e3 / np.arange(1.0, 201.0) ** 2, 12, 75),
    "repeated": (np.concatenate([np.full(13, 7.0), 0.7 ** np.arange(1.0, 108.0)]), 20, 100),
    "few": (np.concatenate([[9.0, 4.0, 4.0, -2.0], np.zeros(56)]), 10, 40),
}


@pytest.mark.parametrize("name, batch", [(name, name == "geometric") for name in SPECTRA] + [("repeated", True)])
def test_pairs_are_the_dense_ones_to_the_tolerance(name, batch, rank, size):
    """With a mass matrix: values, orthonormal vectors, and residuals computed from the dense matrices."""
    spectrum, k, bound = SPECTRA[name]
    n, rng, counts = len(spectrum), np.random.default_rng(1), []
    a, b = problem(spectrum, rng)
    mine = np.array_split(np.arange(n), size)[rank]
    shared = [np.ascontiguousarray(m[:, mine]) for m in (a, b, np.linalg.inv(b))]

    def operator(matrix, count):
        def apply(v):
            count.extend([1] * (len(v) if batch else 1))
            assert not batch or (v.ndim == 2 and len(v) <= 8)
            return np.concatenate(MPI.COMM_WORLD.allgather(v), axis=-1) @ matrix

        return apply

    product, mass, solve = operator(shared[0], counts), operator(shared[1], []), operator(shared[2], [])
    pairs = eigsh(product, np.zeros(len(mine)), k, mass=mass, mass_solve=solve, rng=2, batch=batch)
    expected = scipy.linalg.eigh(a, b, eigvals_only=True)[::-1][:k]
    expected = expected[abs(expected) > 1e-10]
    np.testing.assert_allclose(pairs.values, expected, rtol=1e-9)
    assert len(counts) == pairs.products <= bound
    vectors = np.concatenate(MPI.COMM_WORLD.allgather(pairs.vectors), axis=1)
    np.testing.assert_allclose(vectors @ b @ vectors.T, np.eye(len(expected)), atol=1e-9)
    away = np.linalg.solve(b, a @ vectors.T) - vectors.T * pairs.values
    residuals = np.sqrt(np.einsum("ij,ij->j", away, b @ away)) / pairs.values
    assert np.max(residuals) <= 1e-6 and np.all(pairs.residuals <= 1e-6)
    np.testing.assert_allclose(pairs.residuals, residuals, rtol=1e-3, atol=1e-10)


def test_all_copies_of_an_eigenvalue_are_found_with_any_seed(rank, size):
    """More copies than directions of a block: some are in vectors that the operator wasn't applied to yet."""
    spectrum, k, _ = SPECTRA["repeated"]
    vectors = np.linalg.qr(np.random.default_rng(4).standard_normal((len(spectrum), len(spectrum))))[0]
    product, mine = on_pieces((vectors * spectrum) @ vectors.T, len(spectrum), rank, size, [])
    for seed in range(20):
        values = eigsh(product, np.zeros(len(mine)), k, rng=seed).values
        np.testing.assert_allclose(values, np.sort(spectrum)[::-1][:k], rtol=1e-9)


def test_low_rank_and_no_mass(rank, size):
    n = 30
    u = np.linalg.qr(np.random.default_rng(3).standard_normal((n, 3)))[0]
    product, mine = on_pieces((u * [5.0, 3.0, -1.0]) @ u.T, n, rank, size, [])
    pairs = eigsh(product, np.zeros((len(mine), 1))[:, 0], 2)
    np.testing.assert_allclose(pairs.values, [5.0, 3.0], rtol=1e-10)
    assert len(eigsh(lambda v: 0.0 * v, np.zeros(len(mine)), 2).values) == 0


def test_directions_from_a_domain_give_the_same_on_any_number_of_ranks(rank, size):
    weights, found = 0.8 ** np.arange(30.0).reshape(6, 5), []
    for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):
        domain = mpiad.Domain((6, 5), comm=comm)
        mine = weights[domain.owned]
        pairs = eigsh(lambda v: mine * v, 0.0 * mine, 3, tol=1e-3, rng=domain.normal, comm=comm)  # noqa: B023
        found.append((pairs.products, pairs.residuals, comm.bcast(domain.gather(pairs.vectors[2]))))
    assert found[0][0] == found[1][0]
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-3, atol=1e-12)
    np.testing.assert_allclose(np.abs(found[0][2]), np.abs(found[1][2]), atol=1e-9)


def test_pairs_that_miss_the_tolerance_are_an_error_on_all_ranks(rank, size):
    """Too few products, and products with errors: neither returns pairs as converged."""
    n, rng = 60, np.random.default_rng(5)
    product, mine = on_pieces(np.diag(np.linspace(2.0, 1.0, n)), n, rank, size, [])
    like = np.zeros(len(mine))
    with pytest.raises(
        mpiad.errors.ConvergenceError, match="5 of 5 pairs have .* after 12 products.* larger ncv"
    ) as caught:
        eigsh(product, like, 5, ncv=12)
    assert len(caught.value.history) == 3 and caught.value.history[-1] > 1e-6
    falling = np.diag(10.0 ** -np.arange(float(n)))
    disturbed, _ = on_pieces(falling + 1e-7 * rng.standard_normal((n, n)), n, rank, size, [])
    with pytest.raises(mpiad.errors.ConvergenceError, match="number [2-5], .*iterative solves, decrease their tolerance"):
        eigsh(disturbed, like, 5)
    assert eigsh(disturbed, like, 2, tol=1e-4).products < 30
    np.testing.assert_allclose(eigsh(disturbed, like, 2, tol=1e-4).values, [1.0, 0.1], rtol=1e-5)


def test_residuals_contain_the_errors_of_an_inexact_solve(rank, size):
    n, errors = 40, 1.0 + 5e-4 * np.random.default_rng(6).random(40)
    u = np.linalg.qr(np.random.default_rng(7).standard_normal((n, n)))[0]
    matrix = (u * 0.5 ** np.arange(n)) @ u.T
    product, mine = on_pieces(matrix, n, rank, size, [])
    pairs = eigsh(
        product, np.zeros(len(mine)), 4, mass=lambda v: v, mass_solve=lambda v: errors[mine] * v, tol=0.01
    )  # fmt: skip
    vectors = np.concatenate(MPI.COMM_WORLD.allgather(pairs.vectors), axis=1)
    residuals = np.linalg.norm(errors * (vectors @ matrix) - pairs.values[:, None] * vectors, axis=1) / pairs.values
    assert np.max(residuals) > 1e-5
    np.testing.assert_allclose(pairs.residuals, residuals, rtol=1e-3)


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
            batch=batch,
        )
    assert (type(caught.value) is Own) == (rank == size - 1)
    assert mpiad.mpi_allreduce(1.0) == size
    rows = np.array_split(np.arange(12), size)[rank]
    pairs = eigsh(lambda v: a[rows] @ joined(v), np.zeros(len(rows)), 3)
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
    with pytest.raises(ValueError, match="k must be at least 1 and at most ncv=1.., but got 0"):
        eigsh(plain, like, 0 if rank == size - 1 else 2)
    with pytest.raises(ValueError, match="tol must be a number between 0 and 1, but got 0"):
        eigsh(plain, like, 2, tol=0)
    with pytest.raises(ValueError, match="k must be at least 1 and at most ncv=2, but got 3"):
        eigsh(plain, like, 3, ncv=2)
    with pytest.raises(TypeError, match=r"rng must be a Generator, .*, but got array\(\[1"):
        eigsh(plain, like, 3, rng=np.ones(3))
    with pytest.raises(ValueError, match="rng must return an array of the shape"):
        eigsh(plain, like, 3, rng=lambda number: np.ones(len(mine) + (rank == size - 1)))
    with pytest.raises(ValueError, match="mass_solve its inverse"):
        eigsh(plain, like, 3, mass=plain, mass_solve=lambda v: 2.0 * v)
    for singular in (0.0, 1.0 * (mine < n // 2)):
        with pytest.raises(ValueError, match="mass must be symmetric and positive"):
            eigsh(plain, like, 3, mass=lambda v: singular * v, mass_solve=lambda v: singular * v)  # noqa: B023
    with pytest.raises(ValueError, match="k must be at most 12"):
        eigsh(plain, like, 13)
    with pytest.raises(ValueError, match="mass_solve must return an array of the shape .*another grid"):
        eigsh(plain, like, 3, mass=plain, mass_solve=lambda v: v[1:] if rank == size - 1 else v)
    with pytest.raises(TypeError, match="real numbers"):
        eigsh(plain, like.astype(complex), 3)
