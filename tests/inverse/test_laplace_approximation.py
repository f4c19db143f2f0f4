"""The posterior of a linear problem with Gaussian noise, which is known: dense matrices of one process."""

import warnings

import numpy as np
import pytest
from elliptic_matrix import elliptic_matrix
from mpi4py import MPI

import mpiad
from mpiad.inverse import Bilaplacian, laplace_approximation
from mpiad.timestepping import scan

SHAPE, H, CELLS = (6, 5), 0.1, 30


def whole(domain, block):
    return MPI.COMM_WORLD.bcast(domain.gather(block))


@pytest.fixture(scope="module")
def linear():
    """Return a domain, a prior, its covariance, and an operator of 12 observations, dense."""
    domain = mpiad.Domain(SHAPE)
    prior = Bilaplacian(domain, 0.5, 1.3, mean=0.2, spacing=H, rtol=1e-12)
    smooth = np.eye(CELLS) + 0.5**2 / 8.0 * elliptic_matrix(np.ones(SHAPE), 0.0, (H, H), fixed=False).toarray()
    covariance = np.linalg.inv(smooth @ smooth)
    covariance *= 1.3**2 / np.sqrt(np.outer(np.diag(covariance), np.diag(covariance)))
    operator = 4.0 * np.random.default_rng(3).standard_normal((12, CELLS)) / np.sqrt(CELLS)
    return domain, prior, covariance, operator


def test_conjugate_case(linear, size):
    domain, prior, covariance, operator = linear
    rows = np.ascontiguousarray(operator.reshape(12, *SHAPE)[(slice(None), *domain.owned)])
    data = np.random.default_rng(4).standard_normal(12)

    def residuals(m):
        return (domain.gram(rows, m[None])[:, 0] - data) * (mpiad.mpi_rank() == 0)

    result = domain.minimize(
        residuals, np.zeros(domain.local_shape), method="Newton-CG-sharded",
        options={"product": "gauss-newton", "regularizer": prior, "inner_product": prior, "grtol": 1e-9, "gtol": 0.0},
    )  # fmt: skip
    kept = mpiad.linearize(residuals)(result.x)
    posterior = laplace_approximation(
        lambda vs: kept.vjp(kept.jvp(vs, batch=True), batch=True), result.x, prior, 20, batch=True
    )
    found, result.x = result.x, result.x.copy()
    found -= 100.0  # the posterior has a copy of its mean
    np.testing.assert_array_equal(posterior.mean, result.x)
    dense = np.linalg.inv(operator.T @ operator + np.linalg.inv(covariance))
    mean = 0.2 + dense @ operator.T @ (data - operator @ np.full(CELLS, 0.2))
    np.testing.assert_allclose(whole(domain, result.x).ravel(), mean, atol=1e-6)
    np.testing.assert_allclose(whole(domain, posterior.variance).ravel(), np.diag(dense), rtol=1e-6)
    g = np.sin(np.arange(float(CELLS))).reshape(SHAPE)
    applied = whole(domain, posterior.apply(np.ascontiguousarray(g[domain.owned]))).ravel()
    np.testing.assert_allclose(applied, dense @ g.ravel(), atol=1e-6)
    away = mean - 0.2
    divergence = 0.5 * (
        np.trace(np.linalg.solve(covariance, dense)) + away @ np.linalg.solve(covariance, away) - CELLS
        + np.linalg.slogdet(covariance)[1] - np.linalg.slogdet(dense)[1]
    )  # fmt: skip
    np.testing.assert_allclose(posterior.information_gain(), divergence, rtol=1e-6)
    draws = 80 if size == 1 else 12
    samples = np.stack([whole(domain, posterior.sample(seed)).ravel() for seed in range(draws)])
    error = np.cov(samples.T) - dense
    bound = np.sqrt((np.outer(np.diag(dense), np.diag(dense)) + dense**2) / (draws - 1))  # Monte Carlo's standard error
    assert np.sqrt(np.mean((error / bound) ** 2)) < 1.3 and np.max(np.abs(error / bound)) < 6.0
    predicted, spread = posterior.predict(lambda m: domain.gram(rows, m[None])[:, 0], draws // 2)
    exact = np.sqrt(np.diag(operator @ dense @ operator.T))
    np.testing.assert_allclose(spread, exact, rtol=2.5 / np.sqrt(draws / 2))
    np.testing.assert_allclose(predicted, operator @ mean, atol=5.0 * np.max(exact) / np.sqrt(draws / 2))


def test_a_loop_in_time_needs_no_adjoint_of_the_users(linear):
    """Heat that is seen halfway and at the end: what it says of its start, beside powers of the step's matrix."""
    domain, prior, covariance, _ = linear
    seen = np.random.default_rng(5).standard_normal((3, CELLS))
    rows = np.ascontiguousarray(seen.reshape(3, *SHAPE)[(slice(None), *domain.owned)])

    def step(u, k):
        padded = domain.exchange(u, "edge")
        around = padded[2:, 1:-1] + padded[:-2, 1:-1] + padded[1:-1, 2:] + padded[1:-1, :-2]
        return u + 0.2 * (around - 4.0 * u)

    def residuals(m):
        _, records = scan(step, m, 6, observe=lambda u, k: domain.gram(rows, u[None])[:, 0], checkpoints=2)
        return 20.0 * records[2::3] * (mpiad.mpi_rank() == 0)

    kept = mpiad.linearize(residuals)(prior.mean)
    posterior = laplace_approximation(lambda v: kept.vjp(kept.jvp(v)), prior.mean, prior, 7)
    matrix = np.eye(CELLS) - 0.2 * elliptic_matrix(np.ones(SHAPE), 0.0, (1.0, 1.0), fixed=False).toarray()
    operator = 20.0 * np.concatenate([seen @ np.linalg.matrix_power(matrix, n) for n in (3, 6)])
    dense = np.linalg.inv(operator.T @ operator + np.linalg.inv(covariance))
    np.testing.assert_allclose(whole(domain, posterior.variance).ravel(), np.diag(dense), rtol=1e-6)


@pytest.mark.one_rank
def test_too_few_pairs_are_warned_of(linear):
    domain, prior, _, operator = linear
    rows = np.ascontiguousarray(operator.reshape(12, *SHAPE)[(slice(None), *domain.owned)])

    def product(v):
        return np.tensordot(domain.gram(rows, v[None])[:, 0], rows, 1)

    with pytest.warns(RuntimeWarning, match="increase k"):
        laplace_approximation(product, prior.mean, prior, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        full = laplace_approximation(product, prior.mean, prior, 20)
    assert len(full.values) == 12 and full.products <= 20 and np.all(full.residuals <= 1e-6)
    with pytest.warns(RuntimeWarning, match="4 of 4 pairs have relative residuals above tol=0.01 after 5 products"):
        rough = laplace_approximation(product, prior.mean, prior, 4, tol=1e-2, ncv=5)
    assert rough.products == 5 and np.all(rough.residuals > 1e-2)


@pytest.mark.parametrize("least, warned", [
    (-4.0, True),
    *(pytest.param(*one, marks=pytest.mark.one_rank) for one in ((-0.02, True), (-1e-9, False), (0.0, False))),
])  # fmt: skip
def test_negative_curvature_is_warned_of(linear, least, warned):
    """A Hessian of known eigenvalues in the prior's inner product, of which the k kept are all positive."""
    domain, prior, covariance, _ = linear
    wanted = np.array([50.0, 20.0, 10.0, 5.0, 0.5, 0.1, least, least])
    root = np.linalg.inv(np.linalg.cholesky(covariance))  # RᵀR is the inverse covariance
    vectors = np.linalg.qr(np.random.default_rng(6).standard_normal((CELLS, 8)))[0]
    rows = np.ascontiguousarray((vectors.T @ root).reshape(8, *SHAPE)[(slice(None), *domain.owned)])

    def product(v, sign=1.0):
        return np.tensordot(sign * wanted * domain.gram(rows, v[None])[:, 0], rows, 1)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        posterior = laplace_approximation(product, prior.mean, prior, 5)
    np.testing.assert_allclose(posterior.values, wanted[:5], rtol=1e-6)
    assert [("JᵀJ" in str(w.message) and f"from {least:.3g} to 50" in str(w.message)) for w in caught] == [True] * warned
    with pytest.warns(RuntimeWarning, match="from -50 .*wrong sign"):
        reverse = laplace_approximation(lambda v: product(v, -1.0), prior.mean, prior, 5)
    assert np.max(reverse.values, initial=0.0) == pytest.approx(-least, abs=1e-6)
