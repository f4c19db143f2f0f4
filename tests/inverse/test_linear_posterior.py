"""The posterior of a linear map, beside the formulas of Gaussian conditioning with dense matrices of one process."""

import autograd.numpy as anp
import numpy as np
import pytest
from driven_wave import (
    CELLS,
    HARBOR,
    LENGTH,
    MEAN,
    SENSORS,
    SHAPE,
    STD,
    H,
    N,
    covariance,
    distributed,
    following,
    matrix,
    whole,
)

import mpiad
from mpiad.inverse import Bilaplacian, LinearPosterior, ShiftInvariantMap
from mpiad.timestepping import scan

NOISE = np.array([[0.04, 0.01, 0.0], [0.01, 0.05, 0.0], [0.0, 0.0, 0.02]])
CLOSE = 1e-10


class Dense:
    """A posterior by dense matrices for data of the first k times."""

    def __init__(self, correlation, noise):
        self.prior, self.noise = covariance(correlation), noise
        self.mean = np.full(N * CELLS, MEAN)
        self.data, self.offset = matrix(SENSORS)
        self.harbor, self.offset_of_harbor = matrix(HARBOR)

    def conditioned(self, d):
        k = len(d)
        A = self.data[: 3 * k]
        gain = self.prior @ A.T @ np.linalg.inv(A @ self.prior @ A.T + np.kron(np.eye(k), self.noise))
        mean = self.mean + gain @ (d.ravel() - self.offset[: 3 * k] - A @ self.mean)
        return mean, self.prior - gain @ A @ self.prior


@pytest.fixture(scope="module", params=[0.0, 0.6], ids=["independent", "autoregressive"])
def case(request):
    domain = mpiad.Domain(SHAPE)
    F = ShiftInvariantMap(*distributed(SENSORS, domain), interval=2)
    prior = Bilaplacian(domain, LENGTH, STD, mean=MEAN, spacing=H, rtol=1e-12)
    d = np.random.default_rng(3).standard_normal((N, 3))
    return domain, LinearPosterior(F, prior, NOISE, correlation=request.param), Dense(request.param, NOISE), d


@pytest.mark.few(2)
@pytest.mark.each_value
@pytest.mark.parametrize("times", [N, 3, 1, 0])
def test_mean(case, times):
    domain, posterior, dense, d = case
    mean, _ = dense.conditioned(d[:times])
    np.testing.assert_allclose(whole(domain, posterior.condition(d[:times]).mean).ravel(), mean, rtol=0, atol=CLOSE)


@pytest.mark.thorough
def test_a_mean_that_is_changed_in_place(case):
    """The caller owns it: later samples and means are about the same mean."""
    domain, posterior, dense, d = case
    found = posterior.condition(d[:3])
    before = found.sample(1)
    mean = found.mean
    mean += 100.0
    np.testing.assert_array_equal(found.sample(1), before)
    np.testing.assert_allclose(whole(domain, found.mean).ravel(), dense.conditioned(d[:3])[0], rtol=0, atol=CLOSE)


def test_data_that_arrive(case):
    """Continued, begun again, and changed."""
    domain, posterior, dense, d = case
    for times in (1, 2, 4, 2, 3, 5):
        found = posterior.condition(d[:times]).mean
        np.testing.assert_allclose(whole(domain, found).ravel(), dense.conditioned(d[:times])[0], rtol=0, atol=CLOSE)
    for other in (d * 2.0, np.concatenate([d[:2], -d[2:4]])):
        found = posterior.condition(other).mean
        np.testing.assert_allclose(whole(domain, found).ravel(), dense.conditioned(other)[0], rtol=0, atol=CLOSE)


def test_exact_variances(case):
    domain, posterior, dense, d = case
    _, covariance = dense.conditioned(d)
    for time in (0, 3):
        expected = np.diag(covariance).reshape(N, *SHAPE)[time]
        np.testing.assert_allclose(whole(domain, posterior.variance(of=time)), expected, rtol=0, atol=CLOSE)
    weights = np.array([1.0, -2.0, 0.5, 3.0, 1.0])
    combination = np.kron(weights, np.eye(CELLS))
    expected = np.diag(combination @ covariance @ combination.T).reshape(SHAPE)
    np.testing.assert_allclose(whole(domain, posterior.variance(of=weights)), expected, rtol=0, atol=1e-9)


@pytest.mark.few(1)
@pytest.mark.one_rank
def test_estimated_variances(case):
    domain, posterior, dense, d = case
    expected = np.diag(dense.conditioned(d)[1]).reshape(N, *SHAPE)
    estimate, error = (whole(domain, each) for each in posterior.variance(samples=150, rng=1))
    deviations = (estimate - expected) / error
    assert np.abs(deviations).max() < 5.0 and abs(deviations.mean()) < 1.0 and 0.7 < deviations.std() < 1.4


@pytest.mark.few(1)
@pytest.mark.one_rank
def test_samples(case):
    domain, posterior, dense, d = case
    mean, covariance = dense.conditioned(d[:3])
    conditioned = posterior.condition(d[:3])
    draws = np.array([whole(domain, conditioned.sample(seed)).ravel() for seed in range(300)])
    assert np.abs((draws.mean(axis=0) - mean) / np.sqrt(np.diag(covariance) / 300)).max() < 5.0
    direction = np.random.default_rng(8).standard_normal(N * CELLS)
    assert abs(np.var(draws @ direction) / (direction @ covariance @ direction) - 1.0) < 0.35
    np.testing.assert_array_equal(conditioned.sample(np.random.default_rng(5)), conditioned.sample(5))


def test_forecast(case):
    domain, posterior, dense, d = case
    forecast = posterior.forecast(ShiftInvariantMap(*distributed(HARBOR, domain), interval=2))
    for times in (5, 1, 2, 3, 0, 4):
        mean, covariance = dense.conditioned(d[:times])
        found = forecast(d[:times])
        expected = dense.harbor @ covariance @ dense.harbor.T
        np.testing.assert_allclose(found.mean.ravel(), dense.offset_of_harbor + dense.harbor @ mean, rtol=0, atol=CLOSE)
        np.testing.assert_allclose(found.std.ravel(), np.sqrt(np.diag(expected)), rtol=0, atol=CLOSE)
        np.testing.assert_allclose(forecast.covariance(times).reshape(10, 10), expected, rtol=0, atol=CLOSE)


def test_panels(case, monkeypatch):
    """Covariances, cells and fields in many parts give the same posterior."""
    domain, posterior, dense, d = case
    monkeypatch.setattr("mpiad.inverse.shift_invariant_map._PANEL_BYTES", 1)  # one sensor at a time
    for name, value in (("_FIELDS", 4), ("_CELLS", 5), ("_BLOCK", 4)):
        monkeypatch.setattr(f"mpiad.inverse.linear_posterior.{name}", value)
    parts = LinearPosterior(posterior.F, posterior.prior, NOISE, correlation=posterior.correlation)
    mean, covariance = dense.conditioned(d)
    np.testing.assert_allclose(whole(domain, parts.condition(d).mean).ravel(), mean, rtol=0, atol=CLOSE)
    expected = np.diag(covariance).reshape(N, *SHAPE)[2]
    np.testing.assert_allclose(whole(domain, parts.variance(of=2)), expected, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("noise", [0.3, np.array([0.2, 0.3, 0.4])], ids=["number", "vector"])
def test_standard_deviations_of_noise(case, noise):
    domain, posterior, _, d = case
    found = LinearPosterior(posterior.F, posterior.prior, noise, correlation=posterior.correlation).condition(d).mean
    dense = Dense(posterior.correlation, np.diag(np.broadcast_to(noise, 3) ** 2))
    np.testing.assert_allclose(whole(domain, found).ravel(), dense.conditioned(d)[0], rtol=0, atol=CLOSE)


def test_invalid_arguments(case, rank, size, monkeypatch):
    domain, posterior, _, d = case
    F, prior = posterior.F, posterior.prior
    last = rank == size - 1
    for noise in (-0.1, 0.0, np.array([1.0, 1.0, -1.0]), np.array([[1.0, 2.0, 0.0], [2.0, 1.0, 0.0], [0.0, 0.0, 1.0]])):
        with pytest.raises(ValueError, match="must be positive definite"):
            LinearPosterior(F, prior, noise if last else 1.0)
    for noise in (np.ones((2, 2)), np.triu(np.ones((3, 3)))):
        with pytest.raises(ValueError, match="noise must be a number, 3 numbers, or a symmetric matrix"):
            LinearPosterior(F, prior, noise)
    for correlation in (1.0, -1.5, "0.5"):
        with pytest.raises(ValueError, match="correlation must be a number between -1 and 1"):
            LinearPosterior(F, prior, 1.0, correlation=correlation)
    with pytest.raises(TypeError, match="prior must be a GaussianPrior, but got str"):
        LinearPosterior(F, "prior", 1.0)
    with pytest.raises(ValueError, match="the prior's fields have blocks"):
        LinearPosterior(F, Bilaplacian(mpiad.Domain((9, 6)), LENGTH), 1.0)
    if size > 1:
        with pytest.raises(ValueError, match="all ranks must give the same arguments"):
            LinearPosterior(F, prior, 1.0 + rank)
    for wrong, text in ((d[:, :2], r"shape \(k, 3\)"), (np.zeros((6, 3)), "the first k ≤ 5"), (d * np.nan, "finite")):
        with pytest.raises(ValueError, match=text):
            posterior.condition(wrong)
    with pytest.raises(ValueError, match="give of="):
        posterior.variance()
    with pytest.raises(ValueError, match="a time or 5 weights"):
        posterior.variance(of=np.ones(4))
    with pytest.raises(ValueError, match="Q must be a ShiftInvariantMap of sources of shape"):
        posterior.forecast(prior)
    monkeypatch.setattr("mpiad.inverse.linear_posterior._MOST_FUNCTIONALS", 20)
    with pytest.raises(ValueError, match="at most 20 cells, but the domain has 42"):
        posterior.variance(of=1)
    monkeypatch.setattr("os.sysconf", lambda name: 10)
    with pytest.raises(ValueError, match=r"covariance of 15 data takes 9e-07 GB, but the machine has 1e-07 GB"):
        LinearPosterior(F, prior, 1.0)


@pytest.mark.thorough
def test_gradient_vanishes_at_the_mean_of_many_sources():
    """30,720 sources, 600 data: the gradient of the negative log density, through the time loop and not through F."""
    domain, n, a, noise = mpiad.Domain((32, 32)), 30, 0.7, 0.05
    points = np.random.default_rng(2).uniform(1.0, 30.0, (20, 2))
    zero = np.zeros(domain.local_shape)

    @mpiad.jit
    def step(state, k, m):
        u, before = state
        return following(u, before, domain.exchange(u, "zero", corners=False), m), u

    def observe(state, k=0):
        return domain.interpolate(state[0], points)

    F = ShiftInvariantMap(step, observe, (zero, zero), zero, n)
    prior = Bilaplacian(domain, 4.0, std=0.3, mean=0.1, rtol=1e-12)
    posterior = LinearPosterior(F, prior, noise, correlation=a)
    d = F.offset + F(np.random.default_rng(mpiad.mpi_rank()).standard_normal(F.shape))
    mean = posterior.condition(d).mean

    def density(m):
        seen = scan(step, (zero, zero), n, inputs=m, observe=observe)[1]
        deviation = m - 0.1
        before = anp.concatenate([np.zeros((1, *zero.shape)), deviation[:-1]])
        innovations = 0.1 + deviation - a * before
        costs = sum(prior.cost(innovations[k]) for k in range(n))
        return 0.5 * anp.sum((seen - d) ** 2) / noise**2 + costs

    gradient = mpiad.grad(density, objective="root")
    at_mean, elsewhere = (domain.norm(gradient(m).sum(axis=0)) for m in (mean, 0.0 * mean + 0.1))
    assert at_mean < 1e-8 * elsewhere


@pytest.mark.thorough
@pytest.mark.one_rank
def test_noise_below_rounding(case):
    """Two sensors at one place without noise to speak of: the covariance of the data is singular."""
    domain, posterior, _, _ = case
    F = ShiftInvariantMap(*distributed(SENSORS[[0, 0]], domain), interval=2)
    with pytest.raises(ValueError, match=r"isn't positive definite to working precision, at sensor \d and time \d"):
        LinearPosterior(F, posterior.prior, 1e-12)
