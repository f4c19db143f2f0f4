"""Derivatives of an f with rules of the user: kernels and arrays use them alike, or compilation is refused by name."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest
from autograd.extend import defjvp, defvjp, notrace_primitive, primitive

import mpiad
from mpiad.ensemble import RK45, EnsembleProblem, ODEProblem, Rosenbrock23, solve

pytestmark = pytest.mark.serial

plain = notrace_primitive(lambda x: 1.0 * x)


@primitive
def amplified(x):
    """Return x, with three times its derivative."""
    return 1.0 * x


defvjp(amplified, lambda ans, x: lambda g: 3.0 * g)
defjvp(amplified, lambda g, ans, x: 3.0 * g)
round_straight_through = primitive(np.rint)
defvjp(round_straight_through, lambda ans, x: lambda g: g)
defjvp(round_straight_through, lambda g, ans, x: g)


def mean_end(x, f, alg, n=2, **options):
    """Return the mean of u(1) over n equal trajectories, for u(0) = x[0] and the parameter x[1]."""
    problem = ODEProblem(f, np.ones(1), (0.0, 1.0), np.ones(1))
    ensemble = EnsembleProblem(problem, u0=x[:1] * np.ones((n, 1)), p=x[1:] * np.ones((n, 1)))
    return anp.mean(solve(ensemble, alg, rtol=1e-6, atol=1e-9, **options).u_end)


def derivatives(f, alg, n=2, **options):
    """Return the gradient at u(0) = 2 and p = 1, and the derivative along the parameter."""
    x = np.array([2.0, 1.0])
    gradient = mpiad.grad(lambda x: mean_end(x, f, alg, n, **options))(x)
    return [*gradient, mpiad.make_jvp(lambda x: mean_end(x, f, alg, n, **options))(x)(np.array([0.0, 1.0]))[1]]


@pytest.mark.parametrize(
    ("rule", "alg"),
    [
        (mpiad.stop_gradient, RK45()),
        (plain, Rosenbrock23()),
        pytest.param(mpiad.stop_gradient, Rosenbrock23(), marks=pytest.mark.thorough),
        pytest.param(plain, RK45(), marks=pytest.mark.thorough),
    ],
    ids=["stop_gradient-RK45", "notrace_primitive-Rosenbrock23", "stop_gradient-Rosenbrock23", "notrace_primitive-RK45"],
)
@pytest.mark.parametrize("gradient", ["tangent", "adjoint"])
def test_a_stopped_state_is_a_constant(rule, alg, gradient):
    f = lambda u, p, t: [-p[0] * rule(u[0])]  # noqa: E731
    arrays, kernel = (derivatives(f, alg, compile=compiled, gradient=gradient) for compiled in (False, True))
    # u = 2 exp(-p t), and its tangents: s' = 0 for the initial state, s' = -u for the parameter.
    slope = -2.0 * (1.0 - np.exp(-1.0))
    np.testing.assert_allclose(arrays, [1.0, slope, slope], rtol=1e-3)
    np.testing.assert_allclose(kernel, arrays, rtol=1e-11)


@pytest.mark.parametrize("compiled", [False, True])
def test_filled_and_converted_arrays(compiled):
    f = lambda u, p, t: -anp.full_like(u, p[0]) * anp.asarray(u) + anp.full(np.shape(u), 0.0 * p[0])  # noqa: E731
    slope = -2.0 * np.exp(-1.0)  # of u = 2 exp(-p t)
    np.testing.assert_allclose(derivatives(f, RK45(), compile=compiled), [np.exp(-1.0), slope, slope], rtol=1e-3)


@pytest.mark.parametrize("alg", [RK45(), Rosenbrock23()], ids=["RK45", "Rosenbrock23"])
def test_a_primitive_has_the_rules_of_the_user(alg):
    f = lambda u, p, t: [-p[0] * amplified(u[0])]  # noqa: E731
    # s' = -3 s for the initial state, s' = -u - 3 s for the parameter.
    slope = np.exp(-3.0) - np.exp(-1.0)
    np.testing.assert_allclose(derivatives(f, alg, compile=False), [np.exp(-3.0), slope, slope], rtol=1e-3)
    with pytest.raises(TypeError, match="primitive amplified, whose derivative rules can't be compiled"):
        mean_end(np.ones(2), f, alg, compile=True)


@pytest.mark.parametrize("rule, expected", [(mpiad.stop_gradient, 1.0), (amplified, np.exp(-3.0))])
def test_large_ensembles_use_the_same_rules(rule, expected):
    made = derivatives(lambda u, p, t: [-p[0] * rule(u[0])], RK45(), 1000)
    np.testing.assert_allclose(made[0], expected, rtol=1e-3)


def test_functions_that_differ_by_a_rule_have_their_own_kernels():
    def rounded(rule):
        return lambda u, p, t: [-p[0] * rule(u[0])]

    assert derivatives(rounded(anp.rint), RK45(), compile=True)[0] == pytest.approx(1.0)
    with pytest.raises(TypeError, match="primitive rint"):
        derivatives(rounded(round_straight_through), RK45(), compile=True)
