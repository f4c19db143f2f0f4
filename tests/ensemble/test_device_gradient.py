"""Derivatives of ensembles of device arrays: those of the host, and no copy more than the solve itself takes."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest
from device_double import on_device, on_host, transfers

import mpiad
from mpiad.ensemble import RK4, RK45, EnsembleMPI, EnsembleProblem, EnsembleVectorized, ODEProblem, solve

_N = 17


def predators(u, p, t):
    return [p[0] * u[0] - p[1] * u[0] * u[1], -p[2] * u[1] + 0.5 * u[0] * u[1] * anp.cos(t)]


def coupled(u, p, t):
    return p[0] * u - 0.1 * u[::-1] * u * p[1]


def _inputs():
    rng = np.random.default_rng(5)
    return 1 + rng.random((_N, 2)), 0.3 + rng.random((_N, 3))


def _loss(put, f, tspan, alg, settings):
    def loss(x):
        problem = EnsembleProblem(ODEProblem(f, [1.0, 1.0], tspan), u0=x["u0"], p=x["p"])
        sol = solve(problem, alg, EnsembleVectorized(), compile=False, **settings)
        weights = put(np.cos(np.arange(sol.u.size)).reshape(sol.u.shape))
        return anp.sum(sol.u * weights) + anp.sum(sol.u_end**2)

    return loss


_CASES = [
    (predators, (0.0, 3.0), RK45(), {}),
    (predators, (2.0, -1.0), RK45(), {"saveat": [1.5, 1.0, 0.1]}),
    (coupled, (0.0, 3.0), RK45(), {"saveat": 0.05}),
    (predators, (0.0, 3.0), RK4(), {"dt": 0.11, "saveat": np.sort(np.random.default_rng(1).uniform(0, 3, (_N, 4)))}),
]


@pytest.mark.serial
@pytest.mark.parametrize(("f", "tspan", "alg", "settings"), _CASES)
def test_derivatives_are_those_of_the_host(f, tspan, alg, settings):
    u0, p = _inputs()
    host, there = {"u0": u0, "p": p}, {"u0": on_device(u0), "p": on_device(p)}
    value, gradient = mpiad.value_and_grad(_loss(np.asarray, f, tspan, alg, settings))(host)
    found, of_device = mpiad.value_and_grad(_loss(on_device, f, tspan, alg, settings))(there)
    np.testing.assert_allclose(found, value, rtol=1e-10)
    for name in ("u0", "p"):
        np.testing.assert_allclose(on_host(of_device[name]), gradient[name], rtol=1e-8, atol=1e-9)
    along = {"u0": np.cos(u0), "p": np.sin(p)}
    tangent = mpiad.jvp(_loss(np.asarray, f, tspan, alg, settings), host, along)[1]
    moved = {name: on_device(v) for name, v in along.items()}
    of_device = mpiad.jvp(_loss(on_device, f, tspan, alg, settings), there, moved)[1]
    np.testing.assert_allclose(on_host(of_device), tangent, rtol=1e-8)


@pytest.mark.serial
def test_what_all_trajectories_share_gets_the_sum():
    u0 = np.linspace(0.5, 2.0, _N).reshape(-1, 1)

    def loss(rate):
        problem = ODEProblem(lambda u, p, t: [-p * u[0]], [1.0], (0.0, 1.0), rate)
        return anp.sum(solve(EnsembleProblem(problem, u0=on_device(u0)), rtol=1e-9, atol=1e-11).u_end)

    found = on_host(mpiad.grad(loss)(on_device(0.7)))
    np.testing.assert_allclose(found, -np.sum(u0) * np.exp(-0.7), rtol=1e-7)


@pytest.mark.serial
def test_a_gradient_costs_no_further_copies():
    u0, p = map(on_device, _inputs())
    loss = _loss(on_device, predators, (0.0, 3.0), RK45(), {"saveat": 0.25})
    transfers.reset()
    loss({"u0": u0, "p": p})
    forwards = transfers.d2h
    transfers.reset()
    mpiad.value_and_grad(loss)({"u0": u0, "p": p})
    # The value of the loss, which is shared among the ranks.
    assert transfers.d2h == forwards + 1 and transfers.d2h_bytes < 4000
    assert transfers.h2d <= 4


@pytest.mark.serial
def test_what_fails_drops_out_of_the_gradient():
    u0 = np.linspace(0.5, 2.0, _N).reshape(-1, 1)

    def loss(put):
        def ends(x):
            problem = EnsembleProblem(ODEProblem(lambda u, p, t: [u[0] ** 2], [1.0], (0.0, 1.0)), u0=x)
            sol = solve(problem, max_steps=300, compile=False)
            return anp.sum(anp.where(put(sol.survivors[:, None]), sol.u_end, 0.0))

        return ends

    host = mpiad.grad(loss(np.asarray))(u0)
    found = on_host(mpiad.grad(loss(on_device))(on_device(u0)))
    assert (found[u0 > 1.05] == 0).all() and (found[u0 < 0.9] > 0).all()
    np.testing.assert_allclose(found, host, rtol=1e-8)


@pytest.mark.serial
@pytest.mark.parametrize(
    ("change", "said"),
    [({"gradient": "tangent"}, "gradient='tangent' isn't computed on devices"), ({"adjoint": "continuous"}, "continuous")],
)
def test_other_gradients_are_refused(change, said):
    u0, p = map(on_device, _inputs())
    with pytest.raises(NotImplementedError, match=said):
        mpiad.grad(_loss(on_device, predators, (0.0, 1.0), RK45(), change))({"u0": u0, "p": p})


@pytest.mark.serial
def test_second_derivatives_and_moving_ends_are_refused():
    u0, p = map(on_device, _inputs())
    loss = _loss(on_device, predators, (0.0, 1.0), RK45(), {})
    with pytest.raises(NotImplementedError, match="second derivatives of a solve aren't computed on devices"):
        mpiad.hvp(loss)({"u0": u0, "p": p}, {"u0": u0, "p": p})

    def until(end):
        return anp.sum(solve(EnsembleProblem(ODEProblem(predators, [1.0, 1.0], (0.0, end)), u0=u0, p=p)).u_end)

    with pytest.raises(NotImplementedError, match="by tspan aren't computed on devices"):
        mpiad.grad(until)(1.0)


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("count", [_N, 2])
def test_ensembles_over_ranks(gather, count):
    u0, p = (x[:count] for x in _inputs())

    def loss(put):
        def squares(p):
            problem = EnsembleProblem(ODEProblem(predators, [1.0, 1.0], (0.0, 1.0)), u0=put(u0), p=p)
            sol = solve(problem, RK45(), EnsembleMPI(EnsembleVectorized(), gather=gather), compile=False, saveat=0.3)
            return anp.sum(sol.u**2) + anp.sum(sol.u_end)

        return squares

    objective = "root" if gather else "sum"
    known = mpiad.value_and_grad(loss(np.asarray), objective=objective, shared=True)(p)
    found = mpiad.value_and_grad(loss(on_device), objective=objective, shared=True)(on_device(p))
    np.testing.assert_allclose(found[0], known[0], rtol=1e-10)
    np.testing.assert_allclose(on_host(found[1]), known[1], rtol=1e-8)
