"""Each family of posteriors is a distribution: it integrates to one, inverts, and its draws have its density."""

import numpy as np
import pytest
import scipy.stats
from autograd import jacobian

from mpiad.pytrees import flatten
from mpiad.vi import (
    AffineCoupling,
    Flow,
    FullRankGaussian,
    LULinear,
    MeanFieldGaussian,
    Planar,
    SplineAutoregressive,
    SplineCoupling,
)
from mpiad.vi.flow import evaluated, parameters_per_spline, spline

pytestmark = pytest.mark.serial

FAMILIES = {
    "mean field": lambda d: MeanFieldGaussian(d, 0.3, 1.5),
    "full rank": lambda d: FullRankGaussian(d, -0.2, 0.7),
    "planar": lambda d: Flow(d, [Planar(), Planar(), Planar()]),
    "coupling": lambda d: Flow(d, [AffineCoupling(hidden=8), LULinear(), AffineCoupling(True, 8)]),
    "spline coupling": lambda d: Flow(d, [SplineCoupling(5, hidden=8), LULinear(), SplineCoupling(5, swap=True, hidden=8)]),
    "autoregressive": lambda d: Flow(d, [SplineAutoregressive(5, hidden=8), LULinear(), SplineAutoregressive(5, hidden=8)]),
}


def shaken(posterior, size=0.25):
    """Return variational parameters away from the start, where most are zero."""
    rng = np.random.default_rng(1)
    leaves, build = flatten(posterior.initial(rng))
    return build([x + size * rng.normal(size=np.shape(x)) if np.asarray(x).dtype.kind == "f" else x for x in leaves])


@pytest.mark.each_value
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dim", [1, 2])
def test_densities_integrate_to_one(family, dim):
    posterior = FAMILIES[family](dim)
    params = shaken(posterior)
    # The densities of splines have kinks, for which sums need more points.
    axis = np.linspace(-14, 14, 14001 if dim == 1 else 561 if "spline" in family else 281)
    points = np.stack(np.meshgrid(*[axis] * dim), axis=-1).reshape(-1, dim)
    total = np.exp(posterior.log_prob(params, points)).sum() * (axis[1] - axis[0]) ** dim
    assert total == pytest.approx(1.0, abs=2e-3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dim", [1, 2, 3, 5])
def test_draws_have_the_density_that_is_said(family, dim):
    posterior = FAMILIES[family](dim)
    params = shaken(posterior)
    noise = 1.5 * np.random.default_rng(2).normal(size=(200, dim))
    theta, log_q = posterior.draw(params, noise)
    np.testing.assert_allclose(posterior.log_prob(params, theta), log_q, atol=1e-8)
    if isinstance(posterior, Flow):
        np.testing.assert_allclose(posterior.inverse(params, theta)[0], noise, atol=1e-8)
    # By the change of variables, with the Jacobian of the draw itself.
    for k in range(3):
        slope = jacobian(lambda z: posterior.draw(params, z[None])[0][0])(noise[k])
        expected = scipy.stats.norm.logpdf(noise[k]).sum() - np.log(abs(np.linalg.det(slope)))
        assert log_q[k] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_densities_of_points_have_their_derivative(family):
    """What the path estimator takes: by central differences."""
    posterior = FAMILIES[family](3)
    params = shaken(posterior)
    theta = np.random.default_rng(3).normal(size=(1, 3))
    slope = jacobian(lambda x: posterior.log_prob(params, x)[0])(theta)[0]
    for k in range(3):
        step = np.zeros((1, 3))
        step[0, k] = 1e-6
        change = posterior.log_prob(params, theta + step)[0] - posterior.log_prob(params, theta - step)[0]
        assert slope[k] == pytest.approx(change / 2e-6, rel=2e-6, abs=2e-6)


def test_gaussians_are_scipys():
    posterior = FullRankGaussian(3)
    params = shaken(posterior)
    mean, covariance = posterior.moments(params)
    points = np.random.default_rng(4).normal(size=(5, 3))
    expected = scipy.stats.multivariate_normal(mean, covariance).logpdf(points)
    np.testing.assert_allclose(posterior.log_prob(params, points), expected, rtol=1e-12)
    draws = posterior.draw(params, np.random.default_rng(5).standard_normal((200_000, 3)))[0]
    np.testing.assert_allclose(np.cov(draws.T), covariance, atol=0.02)


def test_what_is_below_the_diagonal_counts_in_units_of_its_row():
    below = np.array([[9.0, 9.0, 9.0], [0.5, 9.0, 9.0], [-1.0, 2.0, 9.0]])  # only what is below counts
    params = {"mean": np.zeros(3), "log_sd": np.log([2.0, 3.0, 5.0]), "below": below}
    np.testing.assert_allclose(FullRankGaussian(3).factor(params), [[2, 0, 0], [1.5, 3, 0], [-5, 10, 5]], rtol=1e-14)


def test_splines_start_as_the_identity_and_are_it_outside():
    x = np.linspace(-6, 6, 101)
    numbers = np.zeros((101, parameters_per_spline(6)))
    y, change = spline(x, numbers, 6, 4.0)
    np.testing.assert_allclose(y, x, atol=1e-12)
    np.testing.assert_allclose(change, 0, atol=1e-12)
    numbers = np.random.default_rng(6).normal(size=numbers.shape)
    outside = abs(x) >= 4
    np.testing.assert_array_equal(spline(x, numbers, 6, 4.0)[0][outside], x[outside])
    np.testing.assert_array_equal(spline(x, numbers, 6, 4.0, inverse=True)[0][outside], x[outside])


def test_planar_layers_are_those_of_the_paper():
    """x = z + û tanh(wᵀz + b) with wᵀû = log(1 + exp(wᵀu)) - 1 (Rezende and Mohamed, 2015, appendix A.1)."""
    rng = np.random.default_rng(8)
    w, b, u, z = rng.normal(size=3), 0.3, rng.normal(size=3), rng.normal(size=(5, 3))
    bent = u + (np.log1p(np.exp(w @ u)) - 1 - w @ u) * w / (w @ w)
    x, change = Planar().forward({"u": u, "w": w, "b": np.array(b)}, z)
    np.testing.assert_allclose(x, z + np.tanh(z @ w + b)[:, None] * bent, rtol=1e-12)
    np.testing.assert_allclose(change, np.log(1 + bent @ w / np.cosh(z @ w + b) ** 2), rtol=1e-12)


def test_networks_have_two_hidden_layers_and_a_linear_end():
    rng = np.random.default_rng(9)
    (a, b), (c, d), (e, f) = [(rng.normal(size=(n, m)), rng.normal(size=m)) for n, m in ((2, 4), (4, 4), (4, 3))]
    x = 5 * rng.normal(size=(6, 2))
    expected = np.tanh(np.tanh(x @ a + b) @ c + d) @ e + f
    np.testing.assert_allclose(evaluated([(a, b), (c, d), (e, f)], x), expected, rtol=1e-13)


def test_couplings_scale_by_a_bounded_factor():
    """However large the network's values are: a fit must not run away in one layer."""
    layer = AffineCoupling(hidden=4)
    network = [(w + 50.0, b + 50.0) for w, b in layer.initial(2, np.random.default_rng(10))]
    z = np.array([[1.0, 0.5], [-1.0, 0.5]])
    assert np.all(abs(layer.forward(network, z)[1]) <= 2)
    assert np.all(np.isfinite(layer.inverse(network, z)[0]))


def test_autoregressive_layers_look_back_only():
    layer = SplineAutoregressive(4, hidden=6)
    rng = np.random.default_rng(7)
    network = [(rng.normal(size=w.shape), rng.normal(size=b.shape)) for w, b in layer.initial(4, rng)]
    slope = jacobian(lambda z: layer.forward(network, z[None])[0][0])(rng.normal(size=4))
    assert np.array_equal(np.triu(slope, 1), np.zeros((4, 4)))
    assert np.all(np.diag(slope) > 0)
    assert np.all(slope[np.tril_indices(4, -1)] != 0)


@pytest.mark.parametrize(
    "make, kind, text",
    [
        (lambda: MeanFieldGaussian(0), ValueError, "dim must be an integer above zero, but got 0"),
        (lambda: FullRankGaussian(2, sd=[1.0, -1.0]), ValueError, "sd must be above zero"),
        (lambda: Flow(2, ["planar"]), TypeError, "'planar'"),
        (lambda: Flow(2, [], sd=0.0), ValueError, "sd must be above zero and finite, but got 0.0"),
    ],
)
def test_what_cannot_be_used_is_refused(make, kind, text):
    with pytest.raises(kind, match=text):
        make()
