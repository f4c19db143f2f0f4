"""Kernels in single precision: states are float32 throughout, times double, as in the vectorised path."""

from __future__ import annotations

import autograd.numpy as np
import numpy as onp
import pytest
from ode_systems import lorenz

import mpiad
from mpiad.ensemble import RK4, EnsembleProblem, ODEProblem, solve

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
