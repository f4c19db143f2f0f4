"""Derivatives of ensembles of device arrays: those of the host, and no copy more than the solve itself takes."""

from __future__ import annotations

from functools import cache
from importlib import import_module

import autograd.numpy as anp
import numpy as np
import pytest
from device_double import on_device, on_host, transfers

import mpiad
from mpiad.device import to_device, to_host
from mpiad.ensemble import (
    RK4,
    RK45,
    EnsembleMPI,
    EnsembleProblem,
    EnsembleVectorized,
    Event,
    ODEProblem,
    Rodas5P,
    Rosenbrock23,
    remake,
    solve,
)
from mpiad.ensemble.device_rounds import Record

_N = 11


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
        reached = put(np.isfinite(sol.t[..., None]))  # every step: those of shorter trajectories are filled up with NaN
        return anp.sum(anp.where(reached, sol.u, 0.0) * weights) + anp.sum(sol.u_end**2)

    return loss


_CASES = [
    (predators, (0.0, 1.5), RK45(), {}),
    (predators, (1.0, -0.5), RK45(), {"saveat": [0.8, 0.6, 0.1]}),
    (coupled, (0.0, 1.5), RK45(), {"saveat": 0.05}),
    (predators, (0.0, 1.5), RK45(), {"save_everystep": True}),
    (predators, (1.0, -0.5), RK45(), {"saveat": 0.2, "checkpoints": 3}),
    (predators, (0.0, 1.5), Rosenbrock23(), {}),
    (predators, (1.0, -0.5), Rodas5P(), {"saveat": 0.2, "checkpoints": 3}),
    (predators, (0.0, 1.5), RK4(), {"dt": 0.11, "saveat": np.sort(np.random.default_rng(1).uniform(0, 1.5, (_N, 4)))}),
]


def _rounding(settings, usual=1e-8):
    # The times of steps are rounded to half the digits, as errors are, which are differences of nearly equal numbers.
    return 1e-5 if "save_everystep" in settings else usual


@pytest.mark.few(2)
@pytest.mark.serial
@pytest.mark.parametrize(("f", "tspan", "alg", "settings"), _CASES)
def test_derivatives_are_those_of_the_host(f, tspan, alg, settings):
    u0, p = _inputs()
    host, there = {"u0": u0, "p": p}, {"u0": on_device(u0), "p": on_device(p)}
    value, gradient = mpiad.value_and_grad(_loss(np.asarray, f, tspan, alg, settings))(host)
    found, of_device = mpiad.value_and_grad(_loss(on_device, f, tspan, alg, settings))(there)
    np.testing.assert_allclose(found, value, rtol=_rounding(settings, 1e-10))
    for name in ("u0", "p"):
        np.testing.assert_allclose(on_host(of_device[name]), gradient[name], rtol=_rounding(settings), atol=1e-9)
    along = {"u0": np.cos(u0), "p": np.sin(p)}
    tangent = mpiad.jvp(_loss(np.asarray, f, tspan, alg, settings), host, along)[1]
    moved = {name: on_device(v) for name, v in along.items()}
    of_device = mpiad.jvp(_loss(on_device, f, tspan, alg, settings), there, moved)[1]
    np.testing.assert_allclose(on_host(of_device), tangent, rtol=_rounding(settings))


@pytest.mark.serial
def test_what_all_trajectories_share_gets_the_sum():
    u0 = np.linspace(0.5, 2.0, _N).reshape(-1, 1)

    def loss(rate):
        problem = ODEProblem(lambda u, p, t: [-p * u[0]], [1.0], (0.0, 1.0), rate)
        return anp.sum(solve(EnsembleProblem(problem, u0=on_device(u0)), rtol=1e-9, atol=1e-11).u_end)

    found = on_host(mpiad.grad(loss)(on_device(0.7)))
    np.testing.assert_allclose(found, -np.sum(u0) * np.exp(-0.7), rtol=1e-7)


@pytest.mark.serial
@pytest.mark.parametrize("gradient", ["tangent", "adjoint"])
def test_start_of_the_problem_stays_on_the_host(gradient):
    p = _inputs()[1]

    def loss(p):
        problem = ODEProblem(predators, np.array([1.0, 0.7]), (0.0, 1.5))
        sol = solve(EnsembleProblem(problem, p=p), RK45(), EnsembleVectorized(), compile=False, gradient=gradient)
        return anp.sum(sol.u_end**2)

    def slope(p):
        return anp.sum(mpiad.grad(loss)(p) ** 2)

    for fun in (loss, slope):
        np.testing.assert_allclose(on_host(mpiad.grad(fun)(on_device(p))), mpiad.grad(fun)(p), rtol=1e-8)


@pytest.mark.serial
@pytest.mark.parametrize("gradient", ["tangent", "adjoint"])
@pytest.mark.parametrize("own", [True, False])
def test_gradient_by_states_on_the_host_comes_back_to_the_host(gradient, own):
    u0, p = _inputs()

    def loss(u0, p):
        problem = ODEProblem(predators, np.ones(2) if own else u0, (0.0, 1.5))
        ensemble = EnsembleProblem(problem, u0=u0 if own else None, p=p)
        sol = solve(ensemble, RK45(), EnsembleVectorized(), compile=False, gradient=gradient)
        return anp.sum(sol.u_end**2)

    start = u0 if own else u0[0]
    found = mpiad.grad(loss)(start, on_device(p))
    assert type(found) is np.ndarray
    np.testing.assert_allclose(found, mpiad.grad(loss)(start, p), rtol=1e-8)


@pytest.mark.serial
@pytest.mark.parametrize("saveat", [None, [0.5, 0.5]])
@pytest.mark.parametrize("gradient", ["tangent", "adjoint"])
def test_gradient_by_the_ends_of_a_span_of_length_zero(gradient, saveat):
    u0, p = _inputs()

    def last(put):
        def fun(start, ends):
            tspan = anp.stack([start + 0 * ends, ends], axis=1)
            members = lambda problem, i, repeat: remake(  # noqa: E731
                problem, u0=put(u0[i - 1]), p=put(p[i - 1]), tspan=(tspan[i - 1, 0], tspan[i - 1, 1])
            )
            problem = EnsembleProblem(ODEProblem(predators, np.ones(2), (0.0, 1.5), p[0]), members)
            sol = solve(problem, compile=False, trajectories=2, gradient=gradient, saveat=saveat)
            return anp.sum(sol.u_end**2) + anp.sum(sol.u[0] ** 3)

        return fun

    at = 0.5, np.array([0.5, 0.75])
    for found, expected in zip(mpiad.grad(last(on_device), (0, 1))(*at), mpiad.grad(last(np.asarray), (0, 1))(*at)):
        assert np.all(expected != 0)
        np.testing.assert_allclose(found, expected, rtol=1e-8)


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


def _survivors_sum(put, max_steps=300):
    """Return the sum of the final states of u' = u², some of which blow up, as a function of the initial ones."""

    def ends(x):
        problem = EnsembleProblem(ODEProblem(lambda u, p, t: [u[0] ** 2], [1.0], (0.0, 1.0)), u0=x)
        sol = solve(problem, max_steps=max_steps, compile=False)
        return anp.sum(anp.where(put(sol.survivors[:, None]), sol.u_end, 0.0))

    return ends


@pytest.mark.serial
def test_what_fails_drops_out_of_the_gradient():
    u0 = np.linspace(0.5, 2.0, _N).reshape(-1, 1)

    host = mpiad.grad(_survivors_sum(np.asarray))(u0)
    found = on_host(mpiad.grad(_survivors_sum(on_device))(on_device(u0)))
    assert (found[u0 > 1.05] == 0).all() and (found[u0 < 0.9] > 0).all()
    np.testing.assert_allclose(found, host, rtol=1e-8)


@pytest.mark.few(2)
@pytest.mark.serial
@pytest.mark.parametrize(
    ("f", "tspan", "alg", "settings"), [*_CASES[1:4], (predators, (0.0, 1.0), RK45(), {"max_steps": 4})]
)
def test_gradients_by_tangents_are_the_adjoints_of_the_host(f, tspan, alg, settings, monkeypatch):
    u0, p = _inputs()
    p[3] *= 20 if "max_steps" in settings else 1  # one fails
    known = mpiad.grad(_loss(np.asarray, f, tspan, alg, {**settings, "gradient": "adjoint"}))({"u0": u0, "p": p})
    monkeypatch.setattr(import_module("mpiad.ensemble.differentiable"), "pull_run", None)  # no adjoint in secret
    monkeypatch.setattr(import_module("mpiad.ensemble.directions"), "_GROUP", 3)  # of five numbers
    loss = _loss(on_device, f, tspan, alg, {**settings, "gradient": "tangent"})
    transfers.reset()
    loss({"u0": on_device(u0), "p": on_device(p)})
    forwards = transfers.d2h
    transfers.reset()
    found = mpiad.grad(loss)({"u0": on_device(u0), "p": on_device(p)})
    assert "max_steps" in settings or transfers.d2h == forwards + 1  # the value of the loss
    for name in known:
        np.testing.assert_allclose(on_host(found[name]), known[name], rtol=_rounding(settings), atol=1e-9)


@pytest.mark.serial
def test_gradients_by_tangents_of_what_all_share_and_of_tspan():
    u0 = np.linspace(0.5, 2.0, _N).reshape(-1, 1)

    def loss(rate, ends):
        problem = ODEProblem(lambda u, p, t: [-p * u[0] * t], [1.0], (ends[0], ends[1]), rate)
        return anp.sum(solve(EnsembleProblem(problem, u0=on_device(u0)), gradient="tangent", rtol=1e-9, atol=1e-11).u_end)

    def exact(rate, ends):
        return np.sum(u0) * anp.exp(-rate * (ends[1] ** 2 - ends[0] ** 2) / 2)

    ends = np.array([0.2, 1.3])
    by_rate, by_ends = mpiad.grad(exact, (0, 1))(0.7, ends)
    for rate in (0.7, on_device(0.7)):  # a number of the host's, too
        np.testing.assert_allclose(on_host(mpiad.grad(lambda rate: loss(rate, ends))(rate)), by_rate, rtol=1e-7)
    np.testing.assert_allclose(mpiad.grad(lambda ends: loss(0.7, ends))(ends), by_ends, rtol=1e-7)


@cache
def _gradients_with(every):
    """Return gradients and a tangent with as many checkpoints, or without."""
    u0, p = map(on_device, _inputs())
    loss = _loss(on_device, predators, (0.0, 3.0), RK45(), {"saveat": 0.1, "checkpoints": every})
    found = mpiad.grad(loss)({"u0": u0, "p": p})
    moved = mpiad.jvp(loss, {"u0": u0, "p": p}, {"u0": p[:, :2], "p": p})[1]
    return on_host(found["u0"]), on_host(found["p"]), on_host(moved)


@pytest.mark.thorough
@pytest.mark.serial
@pytest.mark.parametrize(
    "every", [1, pytest.param(2, marks=pytest.mark.thorough), 7, pytest.param(10_000, marks=pytest.mark.thorough)]
)
def test_checkpoints_change_no_bit(every):
    kept, close = [], Record.close

    def watched(record, failed):
        kept.extend((k % every == 0, done.u is not None) for block in record.blocks for k, done in enumerate(block.rounds))
        return close(record, failed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Record, "close", watched)
        found = _gradients_with(every)
    for one, other in zip(found, _gradients_with(None)):
        np.testing.assert_array_equal(one, other)
    assert len(kept) > 10 and all(due == there for due, there in kept)


_TIMED = [
    (predators, (0.0, 1.5), RK45(), {}),
    (predators, (1.0, -0.5), RK45(), {"saveat": [0.8, 0.6, 0.1]}),
    (coupled, (0.0, 1.0), RK45(), {"saveat": 0.2}),
    (predators, (0.0, 1.0), RK4(), {"dt": 0.15, "saveat": 0.25}),
    (predators, (0.0, 1.0), RK4(), {"dt": 0.125, "saveat": 0.25}),  # at the ends of steps
    (predators, (0.0, 1.0), RK45(), {"save_everystep": True}),
]


@pytest.mark.few(3)
@pytest.mark.serial
@pytest.mark.parametrize(("f", "tspan", "alg", "settings"), _TIMED)
def test_derivatives_by_tspan_are_those_of_the_host(f, tspan, alg, settings):
    u0, p = _inputs()

    def loss(put):
        return lambda x: _loss(put, f, (x["start"], x["end"]), alg, settings)({"u0": put(u0), "p": x["p"]})

    inputs = {"start": tspan[0], "end": tspan[1], "p": p}
    value, gradient = mpiad.value_and_grad(loss(np.asarray))(inputs)
    found, of_device = mpiad.value_and_grad(loss(on_device))({**inputs, "p": on_device(p)})
    np.testing.assert_allclose(found, value, rtol=_rounding(settings, 1e-10))
    for name in inputs:
        np.testing.assert_allclose(on_host(of_device[name]), gradient[name], rtol=_rounding(settings), atol=1e-9)
    assert abs(gradient["start"]) > 1e-3 and abs(gradient["end"]) > 1e-3
    along = {"start": 0.3, "end": -0.7, "p": np.sin(p)}
    tangent = mpiad.jvp(loss(np.asarray), inputs, along)[1]
    moved = mpiad.jvp(loss(on_device), {**inputs, "p": on_device(p)}, {**along, "p": on_device(along["p"])})[1]
    np.testing.assert_allclose(on_host(moved), tangent, rtol=_rounding(settings))


@pytest.mark.few(1)
@pytest.mark.serial
@pytest.mark.parametrize(("f", "tspan", "alg", "settings"), _TIMED)
def test_second_derivatives_are_those_of_the_host(f, tspan, alg, settings):
    u0, p = _inputs()
    host, along = {"u0": u0, "p": p}, {"u0": np.cos(u0), "p": np.sin(p)}
    there, moved = ({name: on_device(x) for name, x in inputs.items()} for inputs in (host, along))
    known = mpiad.hvp(_loss(np.asarray, f, tspan, alg, settings))(host, along)
    found = mpiad.hvp(_loss(on_device, f, tspan, alg, settings))(there, moved)
    for name in known:
        np.testing.assert_allclose(on_host(found[name]), known[name], rtol=_rounding(settings, 1e-7), atol=1e-8)

    def square(put):
        slope = mpiad.grad(_loss(put, f, tspan, alg, settings))
        return lambda x: anp.sum(slope(x)["p"] ** 2)

    known, found = mpiad.grad(square(np.asarray))(host), mpiad.grad(square(on_device))(there)
    for name in known:
        np.testing.assert_allclose(on_host(found[name]), known[name], rtol=_rounding(settings, 1e-7), atol=1e-7)


@pytest.mark.thorough
@pytest.mark.serial
def test_what_fails_drops_out_of_second_derivatives():
    u0 = np.linspace(0.5, 2.0, _N).reshape(-1, 1)

    # With fewer steps than it takes to find out that they blow up.
    host = mpiad.hvp(_survivors_sum(np.asarray, 40))(u0, np.ones_like(u0))
    found = on_host(mpiad.hvp(_survivors_sum(on_device, 40))(on_device(u0), on_device(np.ones_like(u0))))
    assert (found[u0 > 1.05] == 0).all() and (found[u0 < 0.9] > 0).all()
    np.testing.assert_allclose(found, host, rtol=1e-7)


RARE = Event(lambda u, p, t: u[1] - p[2] * 2.5, direction=-1)
OFTEN = Event(lambda u, p, t: u[0] - 1.1 - 0.1 * t, terminal=False)
LATE = Event(lambda u, p, t: u[1] - p[2] * 3 * t)
SOON = Event(lambda u, p, t: u[0] * u[1] - 0.7 * p[0], direction=-1)


def _watched(there, tspan, alg, settings):
    put, out = (lambda x: to_device(x, like=on_device(0.0)), to_host) if there else (lambda x: x, lambda x: x)

    def loss(x):
        ensemble = EnsembleProblem(ODEProblem(predators, [1.0, 1.0], tspan), u0=put(x["u0"]), p=put(x["p"]))
        sol = solve(ensemble, alg, EnsembleVectorized(), compile=False, **settings)
        assert {"MaxIters" if "max_steps" in settings else "Success", "Terminated"} <= set(sol.retcode)
        u, ended, alive = out(sol.u), mpiad.stop_gradient(sol.t_reached), sol.survivors
        reached = np.abs(np.broadcast_to(sol.t, u.shape[:2]) - tspan[0]) <= np.abs(ended - tspan[0])[:, None]
        happened = [(i + 1, *event) for i, found in sol.events.items() if alive[i] for event in found]
        assert {event for _, event, _ in happened} >= {0, 1}
        times = sum(i * (event + 1) * time**2 for i, event, time in happened)
        u_end = anp.where(alive[:, None], out(sol.u_end), 0.0)
        kept = anp.where((reached & alive[:, None])[..., None], u, 0.0)
        return anp.sum(kept**2) + anp.sum(u_end**3) + times + anp.sum(np.cos(np.arange(_N)) * sol.t_reached**2)

    return loss


_WATCHED = [
    ((0.0, 3.0), RK45(), {"events": (RARE, OFTEN), "saveat": 0.5}),
    ((1.0, 0.3), RK45(), {"events": (OFTEN, LATE, SOON), "save_everystep": True, "rtol": 1e-7}),
    ((0.0, 2.4), RK4(), {"events": (OFTEN, SOON, RARE), "dt": 0.3, "checkpoints": 3}),
    ((0.0, 3.0), RK45(), {"events": (RARE, OFTEN), "max_steps": 9, "gradient": "tangent"}),
]


@pytest.mark.thorough
@pytest.mark.serial
@pytest.mark.parametrize(("tspan", "alg", "settings"), _WATCHED)
def test_derivatives_through_events_are_those_of_the_host(tspan, alg, settings):
    u0, p = _inputs()
    inputs, along = {"u0": u0, "p": p}, {"u0": np.cos(u0), "p": np.sin(p)}
    host, there = (_watched(there, tspan, alg, settings) for there in (False, True))
    (value, gradient), (found, of_device) = mpiad.value_and_grad(host)(inputs), mpiad.value_and_grad(there)(inputs)
    np.testing.assert_allclose(found, value, rtol=_rounding(settings, 1e-10))
    tangent, of_there = mpiad.jvp(host, inputs, along)[1], mpiad.jvp(there, inputs, along)[1]
    np.testing.assert_allclose(of_there, tangent, rtol=_rounding(settings))
    second, of_second = mpiad.hvp(host)(inputs, along), mpiad.hvp(there)(inputs, along)
    for name in inputs:
        np.testing.assert_allclose(of_device[name], gradient[name], rtol=_rounding(settings), atol=1e-8)
        np.testing.assert_allclose(of_second[name], second[name], rtol=_rounding(settings, 1e-7), atol=1e-6)


@pytest.mark.serial
def test_derivatives_by_tspan_through_events_are_those_of_the_host():
    u0, p = _inputs()

    def loss(put, out):
        def of(x):
            ensemble = EnsembleProblem(ODEProblem(predators, [1.0, 1.0], (x["start"], x["end"])), u0=put(u0), p=put(p))
            sol = solve(ensemble, RK45(), EnsembleVectorized(), compile=False, events=(RARE, OFTEN), saveat=[2.9])
            assert {"Success", "Terminated"} <= set(sol.retcode)
            kept = anp.where(np.isnan(mpiad.stop_gradient(out(sol.u))), 0.0, out(sol.u))
            times = sum(i * time**2 for i, found in sol.events.items() for _, time in found)
            return anp.sum(kept**2) + anp.sum(out(sol.u_end) ** 3) + anp.sum(sol.t_reached**2) + times

        return of

    x = {"start": 0.0, "end": 3.0}
    known = mpiad.grad(loss(np.asarray, lambda x: x))(x)
    found = mpiad.grad(loss(on_device, to_host))(x)
    for name in x:
        np.testing.assert_allclose(found[name], known[name], rtol=1e-8)
        assert abs(known[name]) > 1e-3


@pytest.mark.parametrize("settings", [{"saveat": 0.3}, {"save_everystep": True}, {"events": (RARE, OFTEN)}])
@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("count", [_N, 2])
def test_ensembles_over_ranks(gather, count, settings):
    u0, p = (x[:count] for x in _inputs())
    p[:, 0] += 1  # both events come

    def loss(put):
        def squares(p):
            problem = EnsembleProblem(ODEProblem(predators, [1.0, 1.0], (0.0, 1.0)), u0=put(u0), p=p)
            sol = solve(problem, RK45(), EnsembleMPI(EnsembleVectorized(), gather=gather), compile=False, **settings)
            reached = put(np.isfinite(sol.t[..., None]))
            squares = anp.sum(anp.where(reached, sol.u, 0.0) ** 2) + anp.sum(sol.u_end)
            if "events" not in settings:
                return squares
            squares = squares if put is np.asarray else to_host(squares)
            return squares + anp.sum(sol.t_reached**2) + sum(time for found in sol.events.values() for _, time in found)

        return squares

    objective = "root" if gather else "sum"
    known = mpiad.value_and_grad(loss(np.asarray), objective=objective, shared=True)(p)
    found = mpiad.value_and_grad(loss(on_device), objective=objective, shared=True)(on_device(p))
    np.testing.assert_allclose(found[0], known[0], rtol=1e-10)
    np.testing.assert_allclose(on_host(found[1]), known[1], rtol=1e-8)
