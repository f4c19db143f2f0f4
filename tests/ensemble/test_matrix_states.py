"""States that are matrices, with one step for all of their numbers: many initial values within one equation."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest
from scipy.linalg import expm, expm_frechet

import mpiad
from mpiad.ensemble import EnsembleProblem, Event, ODEProblem, Vern7, solve

pytestmark = [
    pytest.mark.serial,
    pytest.mark.usefixtures("solved_by"),
    pytest.mark.parametrize("solved_by", ["columns", "device"], indirect=True),
]

A = np.array([[0.1, 1.0, -0.2], [-1.3, 0.2, 0.4], [0.3, -0.5, -0.1]])
U0 = np.random.default_rng(2).normal(size=(3, 5))
TIGHT = {"rtol": 1e-9, "atol": 1e-10}


def linear(u, p, t):
    return p @ u


def linear_by_rows(u, p, t):
    return [p[i, 0] * u[0] + p[i, 1] * u[1] + p[i, 2] * u[2] for i in range(3)]


def loss(sol):
    return anp.sum(anp.sin(sol.u_end)) + anp.sum(sol.u[..., 1, :, :] ** 2)


def exact_gradient(u0, p, half=0.6, end=1.5):
    """Return the derivative of the loss for u = exp(p t) u0, and its value."""
    middle, last = expm(half * p) @ u0, expm(end * p) @ u0
    by_u0 = expm(end * p).T @ np.cos(last) + expm(half * p).T @ (2 * middle)
    by_p = np.empty_like(p)
    for index in np.ndindex(p.shape):
        along = np.zeros_like(p)
        along[index] = 1
        moved = (expm_frechet(t * p, t * along, compute_expm=False) @ u0 for t in (half, end))
        by_p[index] = np.sum(2 * middle * next(moved)) + np.sum(np.cos(last) * next(moved))
    return np.sum(np.sin(last)) + np.sum(middle**2), by_u0, by_p


@pytest.mark.few(1)
@pytest.mark.parametrize(("f", "gradient"), [(linear, "tangent"), (linear_by_rows, "adjoint")])
def test_one_equation_of_many_columns(f, gradient):
    def total(u0, p):
        return loss(solve(ODEProblem(f, u0, (0.0, 1.5), p), Vern7(), saveat=[0.0, 0.6, 1.5], gradient=gradient, **TIGHT))

    value, (by_u0, by_p) = mpiad.value_and_grad(total, (0, 1))(U0, A)
    expected, of_u0, of_p = exact_gradient(U0, A)
    np.testing.assert_allclose(value, expected, rtol=1e-8)
    np.testing.assert_allclose(by_u0, of_u0, rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(by_p, of_p, rtol=1e-7, atol=1e-8)
    v = np.cos(np.arange(15.0)).reshape(3, 5)
    np.testing.assert_allclose(mpiad.jvp(lambda u0: total(u0, A), U0, v)[1], np.sum(of_u0 * v), rtol=1e-7)


def test_an_ensemble_of_matrices():
    u0, p = np.stack([U0, 0.5 * U0, 1 - U0]), np.stack([A, 0.7 * A, -A])

    def total(u0, p):
        ensemble = EnsembleProblem(ODEProblem(linear_by_rows, U0, (0.0, 1.5), A), u0=u0, p=p)
        return loss(solve(ensemble, Vern7(), saveat=[0.0, 0.6, 1.5], checkpoints=4, **TIGHT))

    value, (by_u0, by_p) = mpiad.value_and_grad(total, (0, 1))(u0, p)
    each = [exact_gradient(*one) for one in zip(u0, p)]
    np.testing.assert_allclose(value, sum(one[0] for one in each), rtol=1e-8)
    np.testing.assert_allclose(by_u0, [one[1] for one in each], rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(by_p, [one[2] for one in each], rtol=1e-7, atol=1e-8)


def test_what_isnt_right():
    with pytest.raises(ValueError, match=r"returned shape \(5,\) for u of shape \(3, 5\)"):
        solve(ODEProblem(lambda u, p, t: u[0], U0, (0.0, 1.0)))
    with pytest.raises(NotImplementedError, match="events are supported for states of shape"):
        solve(ODEProblem(lambda u, p, t: u, U0, (0.0, 1.0)), events=Event(lambda u, p, t: u[0, 0]))
