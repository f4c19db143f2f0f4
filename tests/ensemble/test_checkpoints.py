"""Gradients of solves that keep only some of their states."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest
from ode_systems import lorenz

import mpiad
from mpiad.ensemble import EnsembleProblem, EnsembleSerial, EnsembleVectorized, Event, ODEProblem, solve

pytestmark = pytest.mark.serial

COARSE = {"rtol": 1e-4, "atol": 1e-7}
RHO = np.linspace(0, 21, 40)[:, None]
U0 = np.random.default_rng(0).uniform(0.5, 1.5, (40, 3))


def loss(x, f=lorenz, **more):
    ensemble = EnsembleProblem(ODEProblem(f, U0[0], (x[2][0], x[2][1])), u0=x[0], p=x[1])
    sol = solve(ensemble, saveat=np.linspace(0.1, 0.9, 9), rtol=1e-4, atol=1e-7, **more)
    return anp.sum(anp.where(np.isnan(mpiad.stop_gradient(sol.u)), 0.0, anp.sin(sol.u))) + anp.sum(sol.u_end**2)


@pytest.mark.few(1)
@pytest.mark.parametrize(("every", "ends"), [
    pytest.param(every, ends, marks=() if usual else pytest.mark.thorough)
    for every, first in ((1, True), (2, False), (7, True), (1000, False))
    for ends, usual in (((0.0, 1.0), first), ((0.1, 0.9), not first))
])  # fmt: skip
def test_gradients_are_the_same(every, ends):
    x = U0, RHO, np.array(ends)
    expected, found = (mpiad.grad(lambda x, k=k: loss(x, checkpoints=k))(x) for k in (None, every))
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12 * np.abs(b).max())
    for way in ("tangent", "adjoint"):
        expected, found = (
            mpiad.grad(lambda p, k=k, w=way: loss((U0, p, (0.0, 1.0)), checkpoints=k, gradient=w))(RHO)
            for k in (None, every)
        )
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("rows", [slice(0, 1), slice(0, 2), slice(20, 25)])
def test_few_columns_and_backends(rows):
    def one(p, **more):
        return anp.sum(
            solve(EnsembleProblem(ODEProblem(lorenz, U0[0], (0.0, 1.0)), u0=U0[rows], p=p), **COARSE, **more).u_end ** 2
        )

    expected = mpiad.grad(one)(RHO[rows])
    for backend in (EnsembleSerial(), EnsembleVectorized()):
        found = mpiad.grad(lambda p, b=backend: one(p, checkpoints=5, ensemblealg=b, gradient="adjoint"))(RHO[rows])
        np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.usefixtures("solved_by")
def test_events_failures_and_second_derivatives():
    def total(p, every):
        ensemble = EnsembleProblem(ODEProblem(lambda u, p, t: [p[0] * u[0] ** 2], [1.0], (0.0, 1.0)), p=p)
        sol = solve(ensemble, checkpoints=every, events=Event(lambda u, p, t: u[0] - 3 * p[1]), **COARSE)
        return anp.sum(anp.where(sol.survivors, anp.sin(sol.u_end[:, 0]) + sol.t_reached, 0.0))

    p = np.array([[0.5, 2.0], [1.5, 1.0], [2.0, -1.0], [0.9, 0.7]])
    np.testing.assert_allclose(mpiad.grad(total)(p, 3), mpiad.grad(total)(p, None), rtol=1e-12)
    np.testing.assert_allclose(mpiad.hvp(total)(p, 3, p), mpiad.hvp(total)(p, None, p), rtol=1e-10)


def test_fewer_states_are_kept():
    from mpiad.ensemble.record import Steps

    full, few = (Steps(np.array([100, 50, 3]), 2, np.dtype(float), every) for every in (None, 10))
    assert full._u.size == 2 * 153
    assert few._u.size == 0 and few.kept._u.size == 2 * 16


def test_matrix_states():
    def one(w, **more):
        problem = ODEProblem(lambda u, p, t: anp.dot(p, anp.tanh(u)) - u, U0[:2], (0.0, 2.0), w)
        sol = solve(problem, saveat=0.7, **COARSE, **more)
        return anp.sum(sol.u**2)

    w = U0[:2, :2]
    np.testing.assert_allclose(mpiad.grad(one)(w, checkpoints=4), mpiad.grad(one)(w), rtol=1e-12)
