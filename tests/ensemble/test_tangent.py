"""Forward mode and second derivatives of solves."""

from __future__ import annotations

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from ode_systems import lorenz
from unrolled_steps import unrolled

import mpiad
from mpiad.ensemble import EnsembleProblem, ODEProblem, solve

pytestmark = pytest.mark.serial
both = pytest.mark.usefixtures("solved_by")

TIGHT = {"rtol": 1e-6, "atol": 1e-9}
SAVED = [0.0, 0.13, 0.13, 0.3, 0.31, 0.42, 0.5]


def draws(*shape, seed=0):
    return np.random.default_rng(seed).uniform(0.5, 1.5, shape)


def forced(u, p, t):
    return [u[1], -p[0] * anp.sin(u[0]) - p[1] * u[1] * anp.exp(-t) + 0.3 * anp.cos(3 * t)]


def forced_states(x):
    """Return all results of an ensemble as a function of initial states, parameters and tspan."""
    ensemble = EnsembleProblem(ODEProblem(forced, np.ones(2), (x["span"][0], x["span"][1]), x["p"]), u0=x["u0"])
    sol = solve(ensemble, saveat=[0.1, 0.45, 0.9], **TIGHT)
    return anp.concatenate([anp.ravel(sol.u), anp.ravel(sol.u_end)])


def decay(u, p, t):
    return [-p[0] * u[0]]


VARIABLES = {"u0": draws(4, 2), "p": draws(2, seed=1), "span": np.array([0.1, 0.9])}
ALONG = {"u0": draws(4, 2, seed=2) - 1, "p": draws(2, seed=3) - 1, "span": np.array([0.3, -0.2])}


def without_span(x):
    return {"u0": x["u0"], "p": x["p"], "span": VARIABLES["span"]}


def test_tangents_of_many_trajectories_are_those_of_the_closed_form():
    def saved(p):
        return solve(
            EnsembleProblem(ODEProblem(decay, [1.0], (0.0, 1.0)), p=p), saveat=[0.5, 1.0], compile=False, **TIGHT
        ).u

    p, v = np.linspace(0.5, 1.5, 1100)[:, None], np.cos(np.arange(1100.0))[:, None]
    exact = -np.array([0.5, 1.0]) * np.exp(-p * [0.5, 1.0]) * v
    np.testing.assert_allclose(mpiad.jvp(saved, p, v)[1][..., 0], exact, rtol=1e-4, atol=1e-7)


@both
@pytest.mark.parametrize("chosen", [lambda x: x, without_span], ids=["with tspan", "without"])
def test_tangent_and_adjoint_are_transposes(chosen):
    def fun(x):
        return forced_states(chosen(x))

    weights = draws(32, seed=4) - 1
    value, tangent = mpiad.jvp(fun, VARIABLES, ALONG)
    vjp, same = mpiad.make_vjp(fun)(VARIABLES)
    back = vjp(weights)
    np.testing.assert_array_equal(value, same)
    there, here = np.sum(weights * tangent), sum(np.sum(back[name] * ALONG[name]) for name in back)
    assert abs(there - here) <= 1e-12 * np.sum(np.abs(weights * tangent))


@both
@pytest.mark.parametrize("chosen", [lambda x: x, without_span], ids=["with tspan", "without"])
def test_products_with_the_hessian(chosen):
    def loss(x):
        return anp.sum(forced_states(chosen(x)) ** 3)

    def slope(x):
        g = mpiad.grad(loss)(x)
        return sum(anp.sum(g[name] * ALONG[name]) for name in ("u0", "p", "span"))

    found, reverse = mpiad.hvp(loss)(VARIABLES, ALONG), mpiad.grad(slope)(VARIABLES)
    for name in found:
        np.testing.assert_allclose(found[name], reverse[name], rtol=1e-11, atol=1e-11)


def test_second_derivatives_by_hand():
    u0, rho = np.array([1.0, 0.5, 0.2]), np.array([15.0])
    times = solve(ODEProblem(lorenz, u0, (0.0, 0.5), rho), save_everystep=True, **TIGHT).t

    def by_hand(rho):
        saved, end = unrolled(lorenz, u0, rho, times, SAVED)
        return sum(anp.sum(u**2) for u in saved) + anp.sum(end)

    def loss(rho):
        sol = solve(ODEProblem(lorenz, u0, (0.0, 0.5), rho), saveat=SAVED, **TIGHT)
        return anp.sum(sol.u**2) + anp.sum(sol.u_end)

    expected = autograd.grad(lambda rho: autograd.grad(by_hand)(rho)[0])(rho)
    second = [
        mpiad.grad(lambda rho: mpiad.grad(loss)(rho)[0])(rho),
        mpiad.hvp(loss)(rho, np.ones(1)),
        autograd.grad(lambda rho: autograd.grad(loss)(rho)[0])(rho),
        mpiad.grad(lambda rho: mpiad.jvp(loss, rho, np.ones(1))[1])(rho),
    ]
    for found in second:
        np.testing.assert_allclose(found, expected, rtol=1e-11)


def test_third_derivative():
    def loss(p):
        return solve(ODEProblem(lambda u, p, t: [-p[0] * u[0] ** 2], [1.0], (0.0, 1.0), p), rtol=1e-10, atol=1e-12).u_end[0]

    def derivative(fun):
        return lambda p: mpiad.grad(fun)(p)[0]

    # u(1) = 1 / (1 + p); the steps of a solver that tight are nearly those of the function itself.
    p = np.array([0.7])
    assert abs(derivative(derivative(derivative(loss)))(p) + 6 / 1.7**4) < 1e-7
