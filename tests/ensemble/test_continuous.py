"""The continuous adjoint: near the derivative of the exact solution, as the tolerance allows."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest
from ode_systems import lorenz

import mpiad
from mpiad.ensemble import RK4, EnsembleProblem, Event, ODEProblem, Tsit5, remake, solve
from mpiad.errors import IntegrationError

pytestmark = [
    pytest.mark.serial,
    pytest.mark.usefixtures("solved_by"),
    pytest.mark.parametrize("solved_by", ["columns", "device"], indirect=True),
]

RHO = np.linspace(0.5, 21, 6)[:, None]
U0 = np.random.default_rng(0).uniform(0.5, 1.5, (6, 3))


def grow(u, p, t):
    return [p[0] * anp.cos(t) * u[0], -p[1] * u[1] + 0 * t]


def exact(u0, p, ends, t):
    return u0[:, :1] * anp.exp(p[0] * (anp.sin(t) - anp.sin(ends[0]))), u0[:, 1:] * anp.exp(-p[1] * (t - ends[0]))


TIMES = np.array([0.2, 0.5, 0.61, 1.1])


@pytest.mark.parametrize("more", [{}, {"alg": Tsit5()}, {"checkpoints": 3}], ids=["RK45", "Tsit5", "checkpoints"])
@pytest.mark.parametrize("backward", [False, True])
def test_by_the_exact_solution(more, backward):
    order = slice(None, None, -1 if backward else 1)
    ends = np.array([0.2, 1.3])[order]

    def found(u0, p, ends):
        ensemble = EnsembleProblem(ODEProblem(grow, np.ones(2), (ends[0], ends[1]), p), u0=u0)
        times = TIMES[order] if not backward else np.array([1.3, 1.1, 0.61, 0.5])
        sol = solve(ensemble, saveat=times, rtol=1e-9, atol=1e-11, adjoint="continuous", **more)
        return anp.sum(sol.u**2) + anp.sum(sol.u_end**3)

    def expected(u0, p, ends):
        times = TIMES if not backward else np.array([1.1, 0.61, 0.5])
        at = sum(anp.sum(x**2) for x in exact(u0, p, ends, times[(0 if backward else 1) :]))
        return at + anp.sum(u0**2) + sum(anp.sum(x**3) for x in exact(u0, p, ends, ends[1]))

    args = U0[:, :2], np.array([0.7, 1.3]), ends
    for a, b in zip(mpiad.grad(found, (0, 1, 2))(*args), mpiad.grad(expected, (0, 1, 2))(*args)):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_near_the_discrete_one_and_nearer_for_less_tolerance():
    def total(u0, p, rtol, adjoint):
        ensemble = EnsembleProblem(ODEProblem(lorenz, np.ones(3), (0.0, 0.6)), u0=u0, p=p)
        sol = solve(ensemble, saveat=0.25, rtol=rtol, atol=1e-3 * rtol, adjoint=adjoint, gradient="adjoint")
        return anp.sum(sol.u**2) + anp.sum(sol.u_end)

    errors = []
    for rtol in (1e-5, 1e-8):
        one, other = (mpiad.grad(total, (0, 1))(U0, RHO, rtol, way) for way in ("continuous", "discrete"))
        errors.append(max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(one, other)))
        assert all((a != b).any() for a, b in zip(one, other))
    assert errors[0] < 1e-3 and errors[1] < 1e-6


def test_fixed_steps_every_step_and_one_trajectory():
    def total(p, adjoint):
        sol = solve(ODEProblem(lorenz, U0[0], (0.0, 0.2), p), RK4(), dt=2e-3, save_everystep=True, adjoint=adjoint)
        return anp.sum(sol.u[::10] ** 2)

    one, other = (mpiad.grad(total)(np.array([5.0]), way) for way in ("continuous", "discrete"))
    np.testing.assert_allclose(one, other, rtol=1e-6)


def test_the_time_that_was_reached_is_the_end_of_tspan():
    half = Event(lambda u, p, t: u[0] - 0.5, terminal=False)

    def total(end):
        decay = ODEProblem(lambda u, p, t: -p * u, np.ones(1), (0.0, end), 1.0)
        sol = solve(EnsembleProblem(decay, u0=U0[:, :1]), adjoint="continuous", events=half, rtol=1e-9, atol=1e-11)
        assert sol.events and (sol.retcode == "Success").all()
        return anp.sum(sol.t_reached**2) + anp.sum(sol.u_end)

    np.testing.assert_allclose(mpiad.grad(total)(2.0), 6 * 4.0 - np.sum(U0[:, 0]) * np.exp(-2.0), rtol=1e-7)


def test_what_it_refuses():
    decay = ODEProblem(lambda u, p, t: -p * u, np.ones(1), (0.0, 2.0), 1.0)

    def ended(u0):
        half = Event(lambda u, p, t: u[0] - 0.5)
        return anp.sum(solve(EnsembleProblem(decay, u0=u0), adjoint="continuous", events=half).u_end)

    with pytest.raises(NotImplementedError, match="terminal events"):
        mpiad.grad(ended)(np.ones((2, 1)))
    with pytest.raises(ValueError, match="adjoint must be"):
        solve(decay, adjoint="backward")
    with pytest.raises(ValueError, match="has no adjoint"):
        solve(decay, adjoint="continuous", gradient="tangent")
    # The state stays zero, but λ doesn't.
    resting = ODEProblem(lambda u, p, t: [-p[0] * u[0]], np.zeros(1), (0.0, 2.0), [50.0])
    with pytest.raises(IntegrationError, match="adjoint equation of trajectory 1 failed"):
        mpiad.grad(lambda p: solve(remake(resting, p=p), adjoint="continuous", max_steps=15).u_end[0])(np.array([50.0]))
