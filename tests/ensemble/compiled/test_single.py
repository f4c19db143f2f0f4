"""Kernels in single precision: states are float32 throughout, times double, as in the vectorised path."""

from __future__ import annotations

import autograd.numpy as np
import numpy as onp
import pytest
from ode_systems import lorenz

import mpiad
from mpiad.ensemble import RK4, EnsembleProblem, Event, ODEProblem, Rodas5P, Vern7, fit, remake, solve

pytestmark = [pytest.mark.serial, pytest.mark.limit(240)]

N = 19
U0 = onp.random.default_rng(3).uniform(0.5, 1.5, (N, 3)).astype(onp.float32)
RHO = onp.linspace(1, 20, N, dtype=onp.float32)[:, None]
LOOSE = {"rtol": 1e-4, "atol": 1e-6}
TIMES = [0.0, 0.3, 0.35, 1.0]


def both(u0=U0, rho=RHO, *alg, **more):
    ensemble = EnsembleProblem(ODEProblem(lorenz, u0[0], (0.0, 1.0)), u0=u0, p=rho)
    return [solve(ensemble, *alg, saveat=TIMES, compile=choice, **more) for choice in (False, True)]


def test_each_operation_is_rounded_as_numpys_is():
    # With fixed steps and an f of products and sums nothing may differ: a number in double precision anywhere would.
    columns, kernels = both(U0, RHO, RK4(), dt=0.013)
    assert kernels.u.dtype == onp.float32 and kernels.u_end.dtype == onp.float32
    onp.testing.assert_array_equal(columns.u_end, kernels.u_end)
    # The interpolant's weights are polynomials, in another order of their sums.
    onp.testing.assert_allclose(columns.u, kernels.u, rtol=3e-6)


def test_steps_and_codes():
    columns, kernels = both(**LOOSE)
    for name in ("naccept", "nreject", "retcode", "t"):
        onp.testing.assert_array_equal(getattr(columns, name), getattr(kernels, name))
    onp.testing.assert_allclose(columns.u, kernels.u, rtol=1e-5, atol=1e-5)
    # Closer to the double solution than the tolerance, but not it.
    exact = both(U0.astype(float), RHO.astype(float), **LOOSE)[1]
    assert exact.u.dtype == float
    error = onp.abs(kernels.u - exact.u).max()
    assert 1e-7 < error < 1e-3


@pytest.mark.parametrize("way", ["tangent", "adjoint"])
def test_gradients(way):
    def loss(u0, rho, choice):
        ensemble = EnsembleProblem(ODEProblem(lorenz, u0[0], (0.0, 1.0)), u0=u0, p=rho)
        sol = solve(ensemble, saveat=TIMES, compile=choice, gradient=way, **LOOSE)
        return np.sum(np.sin(sol.u)) + np.sum(sol.u_end**2)

    columns, kernels = (mpiad.grad(loss, (0, 1))(U0, RHO, choice) for choice in (False, True))
    for a, b in zip(columns, kernels):
        assert b.dtype == onp.float32
        onp.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * onp.abs(a).max())


def test_forward_mode_starts_from_the_same_steps():
    def states(rho, choice):
        ensemble = EnsembleProblem(ODEProblem(lorenz, U0[0], (0.0, 1.0)), u0=U0, p=rho)
        return solve(ensemble, saveat=TIMES, compile=choice, **LOOSE).u

    along = onp.ones_like(RHO)
    columns, kernels = (mpiad.jvp(lambda rho, c=choice: states(rho, c), RHO, along) for choice in (False, True))
    for a, b in zip(columns, kernels):
        onp.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * onp.abs(a).max())


# Parameters in lower precision than the states: f gets them in the precision of the states. Otherwise the square of p would
# be rounded by arrays, but not by kernels.
LOW = onp.array([[0.7], [0.3], [1.3]])
DOSED = {"rtol": 1e-11, "atol": 1e-12}


def squared(u, p, t):
    return [-(p[0] * p[0]) * u[0]]


def dosed(p, end, compiled, alg, u0=1.0):
    dose = Event(times=[0.25 * end], affect=lambda u, p, t: [u[0] + p[0] * p[0]])
    problem = ODEProblem(squared, [u0], (0.0, end), onp.ones(1))
    if p.ndim == 1:
        return solve(remake(problem, p=p), alg, events=dose, compile=compiled, **DOSED).u_end
    return solve(EnsembleProblem(problem, p=p), alg, events=dose, compile=compiled, **DOSED).u_end[:, 0]


def exactly(p, end):
    return np.exp(-(p**2) * end) + p**2 * np.exp(-0.75 * p**2 * end)


@pytest.mark.parametrize("alg", [Vern7(), Rodas5P()])
@pytest.mark.parametrize("end", [1.0, -1.0])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtypes", [("e", "d", "e"), ("f", "d", "f")])
def test_parameters_in_lower_precision(dtypes, compiled, end, alg):
    # The solve doesn't depend on those before it, either.
    for dtype in dtypes:
        p = LOW.astype(dtype)
        exact = exactly(p[:, 0].astype(float), end)
        onp.testing.assert_allclose(dosed(p, end, compiled, alg), exact, rtol=1e-9)
        onp.testing.assert_allclose(dosed(p[0], end, compiled, alg), exact[:1], rtol=1e-9)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("end", [1.0, -1.0])
@pytest.mark.parametrize("shared", [False, True])
def test_derivatives_of_parameters_in_lower_precision(shared, end, compiled):
    p = (LOW[0] if shared else LOW).astype(onp.float32)
    total = lambda p: np.sum(dosed(p, end, compiled, Vern7()))  # noqa: E731
    q = p.astype(float)
    exact = mpiad.grad(lambda q: np.sum(exactly(q, end)))(q)
    found = mpiad.grad(total)(p)
    assert found.dtype == onp.float32 and found.shape == p.shape
    onp.testing.assert_allclose(found, exact, rtol=1e-6)
    onp.testing.assert_allclose(mpiad.jvp(total, p, onp.ones_like(p))[1], exact.sum(), rtol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_complex_parameters_in_lower_precision(compiled):
    p = LOW.astype(onp.complex64)
    exact = exactly(p[:, 0].astype(complex), 1.0)
    onp.testing.assert_allclose(dosed(p, 1.0, compiled, Vern7(), 1.0 + 0j), exact, rtol=1e-9)


@pytest.mark.parametrize("compiled", [False, True])
def test_generators_that_return_parameters_in_lower_precision(compiled):
    t, rate = onp.array([0.5, 1.0]), onp.float16(0.7)
    decay = ODEProblem(squared, [1.0], (0.0, 1.0), onp.ones(1))
    found = fit(
        decay, lambda u, x, data: u[:, 0] - data, onp.ones((1, 1)), data=2.0 * onp.exp(-(float(rate) ** 2) * t)[None],
        saveat=t, prob_generator=lambda one, x: remake(one, u0=x, p=onp.array([rate])), compile=compiled, **DOSED,
    )  # fmt: skip
    onp.testing.assert_allclose(found.p, 2.0, rtol=1e-9)
