"""Gradients of ensembles that are divided among the ranks."""

from __future__ import annotations

from functools import cache

import autograd.numpy as anp
import numpy as np
import pytest
from ode_systems import lorenz

import mpiad
from mpiad.ensemble import (
    RK45,
    EnsembleMPI,
    EnsembleProblem,
    EnsembleVectorized,
    Event,
    ODEProblem,
    Rodas5P,
    remake,
    solve,
)

COARSE = {"rtol": 1e-4, "atol": 1e-7, "saveat": 0.25}


def loss(theta, backend, count, end=1.0):
    problem = ODEProblem(lorenz, np.array([1.0, 0.0, 0.0]), (0.0, end))
    ensemble = EnsembleProblem(problem, p=anp.reshape(theta[0] * np.arange(1, count + 1.0), (-1, 1)))
    first = anp.sum(solve(ensemble, RK45(), backend, **COARSE).u ** 2)

    def member(prob, i, repeat):
        return remake(prob, u0=[1.0, theta[1] * i, 0.0], p=[10.0])

    ends = solve(EnsembleProblem(problem, member), RK45(), backend, trajectories=count, rtol=1e-4, atol=1e-7).u_end
    return first + anp.sum(ends)


@pytest.mark.usefixtures("solved_by")
@pytest.mark.parametrize(
    "count, gather, objective",
    [(1, True, "root"), (2, False, "sum"), (7, True, "root"), (7, True, "mean"), (7, False, "sum")],
)
def test_gradients_are_those_of_one_process(count, gather, objective):
    theta, mpi = np.array([2.0, 0.1]), EnsembleMPI(gather=gather)
    alone = mpiad.value_and_grad(loss, shared=True)(theta, EnsembleVectorized(), count)
    for _ in range(2):  # the second time with shares balanced by the first
        value, found = mpiad.value_and_grad(loss, shared=True, objective=objective)(theta, mpi, count)
        np.testing.assert_allclose(value, alone[0], rtol=1e-12)
        np.testing.assert_allclose(found, alone[1], rtol=1e-11)


POINT, ALONG = np.array([2.0, 0.1]), np.array([0.3, -1.0])


def until_half(theta, backend, count):
    return loss(theta, backend, count, 0.5)


@cache
def product_of_one_process():
    return mpiad.hvp(until_half, shared=True)(POINT, EnsembleVectorized(), 3, ALONG)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("gather, objective", [(True, "root"), (False, "sum")])
def test_second_derivatives(gather, objective):
    found = mpiad.hvp(until_half, shared=True, objective=objective)(POINT, EnsembleMPI(gather=gather), 3, ALONG)
    np.testing.assert_allclose(found, product_of_one_process(), rtol=1e-10)


REFLECTED = Event(lambda u, p, t: u[0] - 1.5, affect=lambda u, p, t: [u[0], -0.5 * u[1], u[2]])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "alg, options",
    [(RK45(), {}), (Rodas5P(), {}), (RK45(), {"events": REFLECTED}), (RK45(), {"saveat": None, "save_everystep": True})],
    ids=["explicit", "implicit", "events", "every step"],
)
def test_tangents_are_those_of_one_process(alg, options):
    p, v = np.linspace(5.0, 15.0, 7)[:, None], np.cos(np.arange(14.0)).reshape(2, 7, 1)
    products = []
    for backend in (EnsembleMPI(), EnsembleVectorized()):

        def ends(p, backend=backend):
            ensemble = EnsembleProblem(ODEProblem(lorenz, np.array([1.0, 0.0, 0.0]), (0.0, 1.0)), p=p)
            return solve(ensemble, alg, backend, compile=True, **{**COARSE, **options}).u_end

        products.append((mpiad.jvp(ends, p, v[0])[1], mpiad.linearize(ends)(p).jvp(v, batch=True)))
    for found, expected in zip(*products):
        np.testing.assert_array_equal(found, expected)
