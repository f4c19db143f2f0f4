"""Solvers of `autograd.scipy.linalg` in all modes and with all arguments, against dense solves and differences."""

import autograd.numpy as np
import derivative_sweep
import numpy
import pytest
import scipy.stats
from autograd.scipy import linalg as solvers
from autograd.scipy import stats as autograd_stats
from autograd.scipy.stats import multivariate_normal

import mpiad

pytestmark = pytest.mark.serial
NAMES = {"solvers": solvers, "square": numpy.array([[2.0, 0.3, 0.1], [0.4, 1.5, 0.2], [0.7, -0.2, 1.8]])}
X = numpy.array([0.7, 1.2, -0.4])
TRIANGULAR = [
    f"solvers.solve_triangular(np.outer(x, a) + 3 * np.eye(3), {b}, {trans!r}, lower={lower}, unit_diagonal={unit})"
    for b, trans in (("x", 0), ("np.stack([x, a], 1)", "T"), ("np.stack([x, x * x], 1)", 2), ("z", "N"))
    for lower in (False, True)
    for unit in (False, True)
]
OTHERS = [
    "solvers.solve_triangular(square, x, 'C', True, check_finite=False)",
    "solvers.solve_banded((1, 1), [[0.1, 0.2, 0.3], [2.0, 2.1, 1.9], [0.3, -0.4, 0.5]], x, check_finite=False)",
    "solvers.solve_banded((1, 1), np.stack([0.1 * x, 3 + x, 0.2 * x]), z)",
    "solvers.sqrtm(np.outer(x, a) * 0.1 + 3 * np.eye(3))",
]


@pytest.mark.limit(300)
@pytest.mark.parametrize("kind", ["real", "complex"])
@pytest.mark.parametrize("call", TRIANGULAR + OTHERS)
def test_four_derivatives_and_compiled_ones(call, kind, monkeypatch):
    for name, value in NAMES.items():
        monkeypatch.setitem(derivative_sweep.NAMESPACE, name, value)
    case = derivative_sweep.Case("solver", call, (3,), kind)
    assert derivative_sweep.outcomes(case) == ("right",) * 4
    assert derivative_sweep.linearized_and_compiled(case) == ("right", "right")


def dense(lower, upper, bands):
    return sum(numpy.diag(bands[k, max(0, upper - k) :][: 6 - abs(k - upper)], upper - k) for k in range(lower + upper + 1))


@pytest.mark.parametrize("columns", [(), (1,), (3,)], ids=str)
@pytest.mark.parametrize(("lower", "upper"), [(1, 1), (0, 0), (2, 0), (0, 1), (2, 3)])
def test_bands_and_right_hand_sides(lower, upper, columns):
    """The derivatives of a nonlinear loss with respect to both, from dense solves with complex steps."""
    rng = numpy.random.default_rng([lower, upper, len(columns)])
    bands, b = rng.normal(size=(lower + upper + 1, 6)), rng.normal(size=(6, *columns))
    bands[upper] += 8.0
    v, w = rng.normal(size=bands.shape), rng.normal(size=b.shape)

    def along(t):
        return numpy.sum(numpy.linalg.solve(dense(lower, upper, bands + t * v), b + t * w) ** 3)

    def loss(bands, b):
        return np.sum(solvers.solve_banded((lower, upper), bands, b, check_finite=False) ** 3)

    expected = numpy.imag(along(1e-30j)) / 1e-30
    for fun in (loss, mpiad.jit(loss, strict=True)):
        value, (of_bands, of_b) = mpiad.value_and_grad(fun, (0, 1))(bands, b)
        numpy.testing.assert_allclose(value, numpy.real(along(0.0)), rtol=1e-12)
        numpy.testing.assert_allclose(numpy.sum(of_bands * v) + numpy.sum(of_b * w), expected, rtol=1e-11)
        numpy.testing.assert_allclose(mpiad.make_jvp(fun, (0, 1))(bands, b)((v, w))[1], expected, rtol=1e-11)
        # Entries from outside of the matrix aren't read.
        outside = numpy.ones(bands.shape, bool)
        for k in range(lower + upper + 1):
            outside[k, max(0, upper - k) : 6 - max(0, k - upper)] = False
        assert not numpy.any(of_bands[outside])
        # ∂²/∂s∂t of the loss: the difference of complex steps along (v, w).
        second = [numpy.imag(along(h + 1e-30j)) / 1e-30 for h in (1e-4, -1e-4)]
        product = mpiad.hvp(fun, (0, 1))(bands, b, (v, w))
        found = numpy.sum(product[0] * v) + numpy.sum(product[1] * w)
        numpy.testing.assert_allclose(found, (second[0] - second[1]) / 2e-4, rtol=1e-5)


def test_stacks_of_matrices_are_refused():
    stack = numpy.stack([NAMES["square"]] * 2)
    for loss in (
        lambda x: np.sum(solvers.solve_triangular(stack, np.stack([x, x])[:, :, None])),
        lambda x: np.sum(solvers.solve_triangular(stack * x, X)),
    ):
        with pytest.raises(NotImplementedError, match=r"solve_triangular can't be .* call np\.linalg\.solve"):
            mpiad.grad(loss)(X)


def covariance(kind, x):
    """A number, variances, or a matrix; of a matrix, SciPy reads the lower triangle only."""
    matrix = np.outer(x, x) + np.diag(x) + 3 * np.eye(3)
    return {
        "number": np.sum(x) + 2.0,
        "variances": 2.0 + x**2,
        "matrix": matrix,
        "triangle": np.tril(matrix),
        "other triangle": matrix + np.triu(np.outer(x, x**2), 1),
    }[kind]


@pytest.mark.parametrize("kind", ["number", "variances", "matrix", "triangle", "other triangle"])
@pytest.mark.parametrize("name", ["logpdf", "pdf", "entropy"])
def test_normal_distributions(name, kind):
    points = numpy.array([[0.3, 0.1, -0.2], [1.0, -0.4, 0.6]])

    def loss(x, distribution=multivariate_normal):
        cov = covariance(kind, x)
        if name == "entropy":
            return 10 * distribution.entropy(np.sin(x), cov)
        values = [getattr(distribution, name)(y, np.sin(x), cov) for y in (x, x * points)]
        return 10 * (values[0] + np.sum(values[1] * np.array([1.0, 2.0])))

    def slope(x):
        return (
            loss(x + 1e-5 * V, scipy.stats.multivariate_normal) - loss(x - 1e-5 * V, scipy.stats.multivariate_normal)
        ) / 2e-5

    for derivative in (
        mpiad.grad(loss),
        mpiad.grad(mpiad.jit(loss, strict=True)),
        mpiad.jit(mpiad.grad(loss), strict=True),
    ):
        numpy.testing.assert_allclose(derivative(X) @ V, slope(X), rtol=1e-7)
    numpy.testing.assert_allclose(mpiad.jvp(loss, X, V)[1], slope(X), rtol=1e-7)
    second = (slope(X + 1e-3 * V) - slope(X - 1e-3 * V)) / 2e-3
    numpy.testing.assert_allclose(mpiad.hvp(loss)(X, V) @ V, second, rtol=1e-3, atol=1e-4)


V = numpy.array([0.2, -0.5, 0.3])


@pytest.mark.parametrize("cov", [1.5, [1.5], [[1.5]]])
def test_normal_distributions_of_one_number(cov):
    """Compared with the density of a number."""
    cov, x = numpy.array(cov), numpy.array([0.3, -1.2, 0.8])
    value, (of_x, of_mean, of_cov) = mpiad.value_and_grad(
        lambda x, mean, cov: np.sum(multivariate_normal.logpdf(x, mean, cov) * np.arange(3.0)), (0, 1, 2)
    )(x, 0.4, cov)
    d = x - 0.4
    numpy.testing.assert_allclose(value, numpy.arange(3) @ (-(d**2) / 3.0 - 0.5 * numpy.log(3.0 * numpy.pi)))
    numpy.testing.assert_allclose(of_x, -d / 1.5 * numpy.arange(3))
    numpy.testing.assert_allclose(of_mean, d @ numpy.arange(3) / 1.5)
    assert of_cov.shape == cov.shape
    numpy.testing.assert_allclose(numpy.sum(of_cov), numpy.arange(3) @ (d**2 / 1.5**2 - 1 / 1.5) / 2)


@pytest.mark.serial
@pytest.mark.parametrize("density", ["pdf", "logpdf"])
def test_the_density_of_singular_covariances_is_refused_by_its_name(density):
    fun = getattr(multivariate_normal, density)
    with pytest.raises(NotImplementedError, match=f"^{density} can't .* covariance with allow_singular=True"):
        mpiad.grad(lambda cov: fun(V, V, cov, True))(numpy.eye(len(V)))


# Calls with a traced x: scale = exp(x) and so on, by keyword or by position.
COUNTS, POINTS = numpy.arange(3) + 1, numpy.array([0.6, 1.1, 2.3])
BY_KEYWORD = {
    "location and scale": lambda s, x: s.norm.logpdf(POINTS, loc=x, scale=np.exp(x)),
    "scale": lambda s, x: s.norm.pdf(POINTS, scale=np.exp(x)),
    "all": lambda s, x: s.norm.logcdf(x=x, loc=0.2 * x, scale=2.0),
    "both ways": lambda s, x: s.norm.sf(x, 0.3, scale=np.exp(x)),
    "constants": lambda s, x: s.norm.logsf(x, loc=0.3, scale=2.0),
    "t": lambda s, x: s.t.logpdf(POINTS, df=4.0 + x, loc=0.1 * x, scale=np.exp(x)),
    "t, by position": lambda s, x: s.t.cdf(POINTS, 4.0, x, np.exp(x)),
    "gamma": lambda s, x: s.gamma.logpdf(POINTS, a=3.0 + x, scale=np.exp(x)),
    "gamma, by position": lambda s, x: s.gamma.pdf(POINTS, 3.0 + x, 0.1 * x, np.exp(x)),
    "beta": lambda s, x: s.beta.logpdf(POINTS / 9, 2.0 + x, b=3.0, loc=-0.1),
    "beta, scaled": lambda s, x: s.beta.cdf(POINTS, 2.0, 3.0, scale=9.0 + x),
    "chi2": lambda s, x: s.chi2.pdf(np.exp(x), df=3, loc=-0.5),
    "poisson": lambda s, x: s.poisson.logpmf(COUNTS, mu=np.exp(x), loc=1),
    "normal vectors": lambda s, x: s.multivariate_normal.logpdf(POINTS, mean=x, cov=np.diag(np.exp(x))),
    "normal vectors without mean": lambda s, x: s.multivariate_normal.pdf(POINTS, cov=np.diag(np.exp(x))),
    "entropy": lambda s, x: s.multivariate_normal.entropy(cov=np.diag(np.exp(x))),
    "dirichlet": lambda s, x: s.dirichlet.logpdf(numpy.array([0.2, 0.3, 0.5]), alpha=np.exp(x)),
}


@pytest.mark.parametrize("name", BY_KEYWORD)
def test_arguments_of_distributions_by_keyword(name):
    call, w = BY_KEYWORD[name], numpy.array([1.0, -2.0, 3.0])
    loss = lambda x, s=autograd_stats: np.sum(call(s, x) * w)  # noqa: E731
    expected = [(loss(X + h, scipy.stats) - loss(X - h, scipy.stats)) / 2e-5 for h in 1e-5 * numpy.eye(3)]
    is_compiled = name != "dirichlet"  # SciPy's function looks at the values
    for derivative in (mpiad.grad(loss), mpiad.grad(mpiad.jit(loss)), mpiad.jit(mpiad.grad(loss), strict=is_compiled)):
        numpy.testing.assert_allclose(derivative(X), expected, rtol=1e-6, atol=1e-8)
    value, tangent = mpiad.jvp(loss, X, V)
    numpy.testing.assert_allclose([value, tangent], [loss(X, scipy.stats), expected @ V], rtol=1e-6, atol=1e-8)
    slope = lambda x: (loss(x + 1e-4 * V, scipy.stats) - loss(x - 1e-4 * V, scipy.stats)) / 2e-4  # noqa: E731
    second = (slope(X + 1e-3 * V) - slope(X - 1e-3 * V)) / 2e-3
    numpy.testing.assert_allclose(mpiad.hvp(loss)(X, V) @ V, second, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [0.0, -1.5])
def test_a_scale_that_is_not_positive_gives_nan(scale):
    for name in ("pdf", "logpdf", "cdf"):
        fun = getattr(autograd_stats.gamma, name)
        value, _ = mpiad.value_and_grad(lambda x, fun=fun: fun(0.7, 2.0, scale=x))(scale)
        with numpy.errstate(divide="ignore"):
            assert numpy.isnan(value) and numpy.isnan(getattr(scipy.stats.gamma, name)(0.7, 2.0, scale=scale))


def test_wrong_arguments_of_distributions_raise_scipys_errors():
    for call in (lambda x: autograd_stats.gamma.pdf(0.7, scale=x), lambda x: autograd_stats.norm.pdf(0.7, sigma=x)):
        with pytest.raises(TypeError):
            mpiad.grad(call)(1.5)
