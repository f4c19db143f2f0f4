"""Priors against dense matrices of one process, closed forms, and themselves on one rank."""

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from elliptic_matrix import elliptic_matrix
from mpi4py import MPI

import mpiad
from mpiad.inverse import H1, Bilaplacian, TotalVariation, laplace_approximation

GRIDS = {
    "1-D": {"shape": (16,), "spacing": 0.1},
    "2-D": {"shape": (6, 5), "spacing": (0.2, 0.1)},
    "ring": {"shape": (6, 3), "spacing": 0.1, "periodic": (True, False)},
    "3-D": {"shape": (5, 3, 3), "spacing": (0.1, 0.2, 0.1)},
}


@pytest.fixture(params=list(GRIDS))
def grid(request):
    return GRIDS[request.param]


# All columns of a prior's matrices; with ranks only those of one grid, beside one rank's samples on all of them.
each_matrix = pytest.mark.parametrize(
    "grid", [name if name == "ring" else pytest.param(name, marks=pytest.mark.one_rank) for name in GRIDS], indirect=True
)


def domain_of(grid, comm=None):
    return mpiad.Domain(grid["shape"], periodic=grid.get("periodic", False), comm=comm)


def laplacian(grid, ratios=1.0):
    """Return -Δ with no flux through sides, dense."""
    steps = np.broadcast_to(grid["spacing"], len(grid["shape"])) / ratios
    periodic = grid.get("periodic", False)
    return elliptic_matrix(np.ones(grid["shape"]), 0.0, steps, fixed=False, periodic=periodic).toarray()


def dense(domain, apply):
    """Return the matrix of a map of blocks, on the root's side of things: columns are gathered everywhere."""
    n = int(np.prod(domain.shape))
    units = np.eye(n).reshape(n, *domain.shape)
    columns = [whole(domain, apply(np.ascontiguousarray(unit[domain.owned]))).ravel() for unit in units]
    return np.stack(columns, axis=1)


def whole(domain, block):
    return MPI.COMM_WORLD.bcast(domain.gather(block))


@each_matrix
def test_bilaplacian_is_its_matrix(grid):
    domain, ndim = domain_of(grid), len(grid["shape"])
    n = int(np.prod(grid["shape"]))
    place = np.arange(n).reshape(grid["shape"])
    std, mean = (0.5 + 0.01 * place)[domain.owned], np.sin(place)[domain.owned]
    ratios = np.array([1.0, 0.7, 1.3])[:ndim]
    prior = Bilaplacian(domain, 0.4, std, ratios, mean, spacing=grid["spacing"], rtol=1e-12)
    smoothness = 2.0 - ndim / 2.0
    a = np.eye(n) + 0.4**2 / (8.0 * smoothness) * laplacian(grid, ratios)
    covariance = np.linalg.inv(a @ a)
    scale = (0.5 + 0.01 * place.ravel()) / np.sqrt(np.diag(covariance))
    covariance = scale[:, None] * covariance * scale
    found = dense(domain, prior.solve)
    np.testing.assert_allclose(found, covariance, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(np.diag(found), (0.5 + 0.01 * place.ravel()) ** 2, rtol=1e-8)  # at sides and corners too
    np.testing.assert_allclose(whole(domain, prior.variance).ravel(), np.diag(covariance), rtol=1e-10)
    root = dense(domain, prior.sqrt)
    np.testing.assert_allclose(root @ root.T, covariance, rtol=1e-7, atol=1e-9)
    m = np.cos(place)
    away = (m - np.sin(place)).ravel()
    precision = np.linalg.inv(covariance)
    cost, gradient = mpiad.value_and_grad(prior.cost)(np.ascontiguousarray(m[domain.owned]))
    np.testing.assert_allclose(cost, 0.5 * away @ precision @ away, rtol=1e-7)
    np.testing.assert_allclose(whole(domain, gradient).ravel(), precision @ away, rtol=1e-6)
    v = np.ascontiguousarray(np.cos(2.0 * place)[domain.owned])
    np.testing.assert_allclose(whole(domain, prior.apply(v)).ravel(), precision @ np.cos(2.0 * place.ravel()), rtol=1e-6)


def test_correlation_is_matern():
    """In one dimension (1 + κr) exp(-κr), with κ = √12 by the correlation length."""
    domain, h, length = mpiad.Domain((400,)), 0.01, 0.5
    prior = Bilaplacian(domain, length, 2.0, spacing=h)
    middle = np.zeros(400)
    middle[200] = 1.0
    found = whole(domain, prior.solve(middle[domain.owned].copy()))
    r = np.sqrt(12.0) / length * h * np.abs(np.arange(400) - 200)
    np.testing.assert_allclose(found[100:301], 4.0 * ((1.0 + r) * np.exp(-r))[100:301], atol=4e-3)


@each_matrix
def test_h1_is_its_matrix(grid):
    domain, n = domain_of(grid), int(np.prod(grid["shape"]))
    prior = H1(domain, 0.3, 2.0, 1.0, spacing=grid["spacing"], rtol=1e-12)
    volume = np.prod(np.broadcast_to(grid["spacing"], len(grid["shape"])))
    precision = volume * (2.0 * np.eye(n) + 0.3 * laplacian(grid))
    covariance = np.linalg.inv(precision)
    np.testing.assert_allclose(dense(domain, prior.apply), precision, atol=1e-9)
    np.testing.assert_allclose(dense(domain, prior.solve), covariance, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(whole(domain, prior.variance).ravel(), np.diag(covariance), rtol=1e-10)
    fields = [np.zeros((len(grid["shape"]) + 1, *domain.local_shape)) for _ in range(len(grid["shape"]) + 1)]

    def one_of(k):
        def root(block):
            fields[k][...] = 0.0
            fields[k][k] = block
            return prior.sqrt(fields[k])

        return root

    parts = [dense(domain, one_of(k)) for k in range(len(fields))]
    np.testing.assert_allclose(sum(part @ part.T for part in parts), covariance, rtol=1e-7, atol=1e-9)


def test_total_variation_is_its_sum(grid, rank_rng):
    domain, ndim = domain_of(grid), len(grid["shape"])
    steps, periodic = (np.broadcast_to(grid.get(key, False), ndim) for key in ("spacing", "periodic"))
    m = rank_rng(0).standard_normal(grid["shape"])

    def cost(m):
        square = 0.05**2
        for axis, (step, wraps) in enumerate(zip(steps, periodic)):
            following = anp.roll(m, -1, axis)
            if not wraps:
                last = np.zeros(m.shape)
                last[(slice(None),) * axis + (-1,)] = 1.0
                following = anp.where(last, m, following)
            square = square + ((following - m) / step) ** 2
        return 3.0 * np.prod(steps) * anp.sum(anp.sqrt(square) - 0.05)

    prior = TotalVariation(domain, 3.0, 0.05, spacing=grid["spacing"])
    found, gradient = mpiad.value_and_grad(prior.cost)(np.ascontiguousarray(m[domain.owned]))
    np.testing.assert_allclose(found, cost(m), rtol=1e-12)
    np.testing.assert_allclose(whole(domain, gradient), autograd.grad(cost)(m), atol=1e-12)
    image = rank_rng(1).integers(0, 256, grid["shape"]).astype(np.uint8)
    for field in (image, image > 99):
        found = prior.cost(np.ascontiguousarray(field[domain.owned]))
        np.testing.assert_allclose(found, cost(field.astype(float)), rtol=1e-12)


def test_samples_do_not_depend_on_ranks(grid):
    domain, alone = domain_of(grid), domain_of(grid, MPI.COMM_SELF)
    assert np.array_equal(whole(domain, domain.normal(7)), alone.normal(7))
    assert not np.any(domain.normal(7) == domain.normal(8))
    several = domain.normal(7, (2, 3))
    assert np.array_equal(whole(domain, several), alone.normal(7, (2, 3))) and np.unique(several).size == several.size
    for prior in (Bilaplacian, H1):
        one, other = (prior(d, 0.4, spacing=grid["spacing"]).sample(5) for d in (domain, alone))
        np.testing.assert_allclose(whole(domain, one), other, atol=1e-8)


def test_normal_numbers_are_normal():
    domain = mpiad.Domain((300, 301))
    x = np.sort(whole(domain, domain.normal(3)).ravel())
    quantiles = np.array([0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999])
    expected = [-3.0902323, -2.3263479, -1.2815516, 0.0, 1.2815516, 2.3263479, 3.0902323]
    np.testing.assert_allclose(np.quantile(x, quantiles), expected, atol=0.12)
    np.testing.assert_allclose([x.mean(), x.var(), np.mean(x**4)], [0.0, 1.0, 3.0], atol=0.1)
    field = whole(domain, domain.normal(3))
    assert abs(np.mean(field[:, 1:] * field[:, :-1])) < 0.015 and abs(np.mean(field[1:] * field[:-1])) < 0.015


def test_gram_is_one_product(rank_rng):
    domain = mpiad.Domain((9, 7))
    u, v = rank_rng(1).standard_normal((3, 9, 7)), rank_rng(2).standard_normal((2, 9, 7))
    here = [np.ascontiguousarray(each[(slice(None), *domain.owned)]) for each in (u, v)]
    np.testing.assert_allclose(domain.gram(*here), np.einsum("kij,lij->kl", u, v), rtol=1e-12)
    gradient = mpiad.grad(lambda w: anp.sum(domain.gram(w, here[1]) ** 2))(here[0])
    expected = 2.0 * np.einsum("kl,lij->kij", np.einsum("kij,lij->kl", u, v), v)[(slice(None), *domain.owned)]
    np.testing.assert_allclose(gradient, expected, rtol=1e-11)
    with pytest.raises(ValueError, match="shape"):
        domain.gram(here[0][0], here[1])


def test_wrong_arguments_are_refused_on_all_ranks(rank, size):
    domain, last = mpiad.Domain((8, 8)), rank == size - 1
    with pytest.raises(ValueError, match="correlation_length must be a positive number"):
        Bilaplacian(domain, 0.0 if last else 1.0)
    with pytest.raises(ValueError, match="std must be positive"):
        Bilaplacian(domain, 1.0, -np.ones(domain.local_shape) if last else 1.0)
    with pytest.raises(ValueError, match="anisotropy must be a number, or one number for each of 2"):
        Bilaplacian(domain, 1.0, anisotropy=(1.0, 2.0, 3.0))
    with pytest.raises(ValueError, match="mean must be a number or a block"):
        H1(domain, mean=np.zeros(3))
    with pytest.raises(TypeError, match="must be an mpiad.Domain"):
        TotalVariation(None)
    with pytest.raises(ValueError, match="rng must be"):
        domain.normal(-1)
    if size > 1:
        with pytest.raises(ValueError, match="all ranks must give the same"):
            Bilaplacian(domain, 1.0 + rank)


@pytest.mark.parametrize("kind", [Bilaplacian, H1])
def test_seeds_that_differ_between_ranks_are_refused(kind, rank, size):
    """The blocks would be those of unrelated fields."""
    domain = mpiad.Domain((8, 8))
    prior = kind(domain, 2.0)
    if size > 1:
        with pytest.raises(ValueError, match=f"{kind.__name__}.sample: all ranks must give the same.*rng=0 .*rng=1 "):
            prior.sample(rng=rank)
        with mpiad.debug.checked(), pytest.raises(ValueError, match="Domain.normal: all ranks must give the same"):
            domain.normal(rng=rank)
    with mpiad.debug.checked():
        field = domain.normal(np.int64(3) if rank else 3)
    np.testing.assert_array_equal(field, domain.normal(3))
    np.testing.assert_array_equal(prior.sample(np.int64(3) if rank else 3), prior.sample(3))


@pytest.mark.parametrize("kind", [Bilaplacian, H1])
def test_a_block_of_another_grid_is_refused_on_all_ranks(kind):
    """On two ranks one of them has a block of the same shape, and would wait for the other."""
    prior, domain = kind(mpiad.Domain((8, 6)), 2.0), mpiad.Domain((9, 6))
    given = np.ones(domain.local_shape)
    for call in (prior.solve, prior.precondition, lambda g: laplace_approximation(lambda v: v, g, prior, 2)):
        with pytest.raises(ValueError, match=r"block of a field on a grid of \(8, 6\) cells.*but got a block of shape"):
            call(given)
    with pytest.raises(mpiad.errors.WorkerError, match=r"grid of \(8, 6\) cells"):
        options = {"product": "gauss-newton", "regularizer": H1(domain), "inner_product": prior}
        domain.minimize(lambda m: m - 1.0, given, method="Newton-CG-sharded", options=options)


@pytest.mark.parametrize("shape", [(8, 5), (80, 60)], ids=["factored", "multigrid"])
def test_numbers_that_are_not_finite_raise_on_all_ranks(rank, shape):
    domain = mpiad.Domain(shape)
    block = np.ones(domain.local_shape)
    block[0, 0] = np.nan if rank == 0 else 1.0
    for prior in (Bilaplacian(domain, 3.0), H1(domain, 1.0, 1.0)):
        with pytest.raises(mpiad.errors.NotFiniteError, match="not finite: 1 entries on rank 0"):
            prior.solve(block)
