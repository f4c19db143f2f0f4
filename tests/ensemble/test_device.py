"""Ensembles of device arrays: the same numbers as on the host, and of each round one look at a few of them."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest
from device_double import on_device, on_host, transfers
from scipy.integrate import solve_ivp

import mpiad
from mpiad.ensemble import (
    RK4,
    RK45,
    EnsembleProblem,
    EnsembleSerial,
    EnsembleThreads,
    EnsembleVectorized,
    Event,
    ODEProblem,
    Tsit5,
    remake,
    solve,
)

pytestmark = pytest.mark.serial
_N = 23


def predators(u, p, t):
    return [p[0] * u[0] - p[1] * u[0] * u[1], -p[2] * u[1] + 0.5 * u[0] * u[1] * anp.cos(t)]


def _inputs(dtype=float):
    rng = np.random.default_rng(3)
    u0 = 1 + rng.random((_N, 2))
    p = np.column_stack([0.5 + rng.random(_N), 0.5 + rng.random(_N), 0.2 + rng.random(_N)])
    return u0.astype(dtype), p.astype(dtype)


CROWDED = Event(lambda u, p, t: u[0] * u[1] - 2.5)
FADING = Event(lambda u, p, t: u[1] - p[2] * anp.exp(0.1 * t), terminal=False)


def _solved(u0, p, f=predators, tspan=(0.0, 3.0), alg=RK45(), **settings):  # noqa: B008
    problem = EnsembleProblem(ODEProblem(f, [1.0, 1.0], tspan), u0=u0, p=p)
    return solve(problem, alg, EnsembleVectorized(), compile=settings.pop("compile", False), **settings)


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("tspan", "settings"),
    [
        ((0.0, 3.0), {}),
        ((2.0, -1.0), {"saveat": [1.5, 1.0, 0.1]}),
        ((0.0, 3.0), {"saveat": 0.01}),
        ((0.0, 3.0), {"saveat": np.sort(np.random.default_rng(0).uniform(0, 3, (_N, 5)), axis=1)}),
        ((0.0, 3.0), {"alg": RK4(), "dt": 0.07, "saveat": 0.5}),
        ((0.0, 3.0), {"alg": Tsit5(), "rtol": 1e-8, "atol": np.array([1e-9, 1e-8])}),
        ((0.0, 3.0), {"max_steps": 9}),
        ((0.0, 3.0), {"dtmax": 0.1, "dt": 0.3}),
        ((0.0, 3.0), {"events": (CROWDED, FADING), "saveat": 0.05}),
        ((2.0, -1.0), {"events": (FADING, CROWDED, CROWDED), "saveat": 0.1}),
    ],
)
def test_numbers_are_those_of_the_host(tspan, settings):
    u0, p = _inputs()
    host = _solved(u0, p, tspan=tspan, **settings)
    found = _solved(on_device(u0), on_device(p), tspan=tspan, **settings)
    np.testing.assert_array_equal(found.retcode, host.retcode)
    np.testing.assert_array_equal(found.t, host.t)
    for name in ("naccept", "nreject", "nf"):
        np.testing.assert_array_equal(getattr(found, name), getattr(host, name))
    np.testing.assert_allclose(found.t_reached, host.t_reached, rtol=1e-9)
    np.testing.assert_allclose(on_host(found.u_end), host.u_end, rtol=1e-9)
    np.testing.assert_allclose(on_host(found.u), host.u, rtol=1e-9)
    assert ("events" in settings) == bool(host.events)
    happened, known = (dict(sorted(sol.events.items())) for sol in (found, host))
    assert [(i, e) for i in happened for e, _ in happened[i]] == [(i, e) for i in known for e, _ in known[i]]
    times = ([time for i in events for _, time in events[i]] for events in (happened, known))
    np.testing.assert_allclose(*times, rtol=1e-9)


def test_numbers_are_those_of_scipy():
    u0, p = _inputs()
    found = _solved(on_device(u0), on_device(p), rtol=1e-9, atol=1e-10, saveat=[0.7, 2.9])
    for i in (0, 11):
        own = lambda t, u, p: predators(u, p, t)  # noqa: E731
        known = solve_ivp(own, (0, 3), u0[i], t_eval=[0.7, 2.9], args=(p[i],), rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(on_host(found.u)[i], known.y.T, rtol=1e-7)


def test_single_precision_stays():
    u0, p = _inputs(np.float32)
    host, found = _solved(u0, p, rtol=1e-5), _solved(on_device(u0), on_device(p), rtol=1e-5)
    assert found.u.dtype == found.u_end.dtype == np.float32
    np.testing.assert_allclose(on_host(found.u_end), host.u_end, rtol=1e-4)


@pytest.mark.parametrize(
    ("tspan", "settings"),
    [((0.0, 3.0), {}), ((2.0, -1.0), {}), ((0.0, 3.0), {"alg": RK4(), "dt": 0.2}), ((0.0, 3.0), {"max_steps": 9})],
)
def test_every_step_is_saved_as_on_the_host(tspan, settings):
    u0, p = _inputs()
    host = _solved(u0, p, tspan=tspan, save_everystep=True, **settings)
    transfers.reset()
    found = _solved(on_device(u0), on_device(p), tspan=tspan, save_everystep=True, **settings)
    rounds = int((found.naccept + found.nreject).max())
    # A look in each round; then the facts, the saved times, and where ended columns are dropped their number.
    assert rounds + 3 <= transfers.d2h <= rounds + 3 + _N.bit_length()
    np.testing.assert_array_equal(found.retcode, host.retcode)
    assert type(found.t) is np.ndarray and found.u.shape == host.u.shape
    # The size of a step is by its error, a difference of nearly equal numbers, of which rounding takes half the digits.
    np.testing.assert_allclose(found.t, host.t, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(on_host(found.u), host.u, rtol=1e-5)
    np.testing.assert_allclose(on_host(found.u_end), host.u_end, rtol=1e-9)
    np.testing.assert_array_equal(on_host(found[3].u), on_host(found.u)[3])


def test_events_cost_two_looks_more_in_the_rounds_that_bring_some():
    u0, p = map(on_device, _inputs())
    transfers.reset()
    quiet = _solved(u0, p, events=Event(lambda u, p, t: u[0] + 1.0))
    rounds = int((quiet.naccept + quiet.nreject).max())
    # Beside the rounds: a look at f and one at conditions, the facts, and the table of events; the numbers of columns left.
    assert transfers.d2h <= rounds + 4 + _N.bit_length()
    transfers.reset()
    eventful = _solved(u0, p, events=FADING)
    assert eventful.events and transfers.d2h <= 3 * rounds + 4 + _N.bit_length()
    assert transfers.d2h_bytes <= rounds * 6 * 8 + 8 * 9 + 8 * 4 * _N + 5 * 8 * 2 * _N + 8 * _N.bit_length()


@pytest.mark.parametrize("settings", [{}, {"saveat": 0.25}])
def test_a_round_costs_one_copy_of_two_numbers(settings):
    u0, p = map(on_device, _inputs())
    transfers.reset()
    sol = _solved(u0, p, **settings)
    rounds = int((sol.naccept + sol.nreject).max())
    # Beside the rounds: a look at f, and the facts of all trajectories at the end. Where ended columns are dropped, at most
    # as often as N can be halved, their number.
    drops = _N.bit_length()
    assert rounds + 2 < transfers.d2h <= rounds + 2 + drops
    assert transfers.d2h_bytes <= 16 * rounds + 18 * 8 + 4 * 8 * _N + 8 * drops
    assert transfers.h2d <= 4


@pytest.mark.thorough
def test_trajectories_of_different_lengths_leave_room_for_the_others():
    rates = on_device(np.geomspace(1.0, 300.0, _N).reshape(-1, 1))
    widths = []

    def f(u, p, t):
        widths.append(len(t))
        return [p[0] * (anp.cos(t) - u[0])]

    problem = EnsembleProblem(ODEProblem(f, [1.0], (0.0, 2.0)), p=rates)
    found = solve(problem, trajectories=_N, compile=False)
    assert max(widths) == _N and widths[-1] <= _N // 4
    host = solve(EnsembleProblem(problem.problem, p=on_host(rates)), trajectories=_N, compile=False)
    np.testing.assert_allclose(on_host(found.u_end), host.u_end, rtol=1e-9)
    np.testing.assert_array_equal(found.nreject, host.nreject)


def test_one_that_fails_harms_no_other():
    u0 = np.linspace(0.5, 2.0, _N).reshape(-1, 1)
    arguments = (lambda u, p, t: [u[0] ** 2], [1.0], (0.0, 1.0))
    found = solve(EnsembleProblem(ODEProblem(*arguments), u0=on_device(u0)), max_steps=2000)
    host = solve(EnsembleProblem(ODEProblem(*arguments), u0=u0), max_steps=2000, compile=False)
    np.testing.assert_array_equal(found.retcode, host.retcode)
    assert set(found.retcode) > {"Success"}
    alive = u0[:, 0] < 0.999
    np.testing.assert_allclose(on_host(found.u_end)[alive, 0], u0[alive, 0] / (1 - u0[alive, 0]), rtol=0.02)
    np.testing.assert_allclose(on_host(found.u_end)[alive], host.u_end[alive], rtol=1e-9)


def test_a_state_may_be_one_number_and_one_problem_may_be_alone():
    problem = ODEProblem(lambda u, p, t: p * u, on_device(2.0), (0.0, 1.0), on_device(-0.5))
    sol = solve(problem, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(on_host(sol.u_end), 2 * np.exp(-0.5), rtol=1e-7)


def test_problems_made_one_by_one():
    u0, p = map(on_device, _inputs())
    problem = ODEProblem(predators, u0[0], (0.0, 3.0), p[0])
    each = EnsembleProblem(problem, prob_func=lambda prob, i, repeat: remake(prob, u0=u0[i - 1], p=p[i - 1]))
    found = solve(each, trajectories=_N, compile=False)
    np.testing.assert_allclose(on_host(found.u_end), on_host(_solved(u0, p).u_end), rtol=1e-12)


def _shared(u, p, t):
    return [p[0] * u[0], p[1] * anp.sum(u)]


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"events": Event(lambda u, p, t: u)}, ValueError, "one number for each column"),
        ({"events": Event(lambda u, p, t: u[0] - anp.sum(u))}, ValueError, "a condition of the events returns"),
        ({"compile": True}, NotImplementedError, "compile=True generates machine code for the host"),
        ({"f": _shared}, ValueError, "must not depend on each other"),
        ({"f": lambda u, p, t: [u[0]]}, ValueError, "returned shape"),
        ({"p": np.ones((_N, 3))}, TypeError, "u0 is on device 0 .* but part 0 of p is on the host"),
    ],
)
def test_what_isnt_done_is_refused_by_name(change, kind, said):
    u0, p = map(on_device, _inputs())
    with pytest.raises(kind, match=said):
        _solved(u0, **{"p": p, **change})


@pytest.mark.parametrize("backend", [EnsembleSerial(), EnsembleThreads(2)])
def test_backends_of_the_host_are_refused(backend):
    u0, p = map(on_device, _inputs())
    with pytest.raises(NotImplementedError, match="runs on the host.*EnsembleVectorized"):
        solve(EnsembleProblem(ODEProblem(predators, [1.0, 1.0], (0.0, 3.0)), u0=u0, p=p), RK45(), backend)


def test_statistics_of_the_survivors():
    u0, p = _inputs()
    host, found = _solved(u0, p), _solved(on_device(u0), on_device(p))
    np.testing.assert_allclose(on_host(found.mean()), host.mean(), rtol=1e-9)
    np.testing.assert_allclose(on_host(found.std()), host.std(), rtol=1e-9)
    for q in (0.5, [0.0, 0.25, 1.0]):
        np.testing.assert_allclose(on_host(found.quantile(q)), host.quantile(q), rtol=1e-9)
    with pytest.raises(ValueError, match="between 0 and 1"):
        found.quantile(1.5)


def test_quantiles_leave_out_what_failed():
    u0 = np.linspace(0.5, 2.0, _N).reshape(-1, 1)

    def quantiles(u0):
        problem = EnsembleProblem(ODEProblem(lambda u, p, t: [u[0] ** 2], [1.0], (0.0, 1.0)), u0=u0)
        sol = solve(problem, max_steps=300, compile=False, saveat=[0.2, 1.0])
        assert not sol.survivors.all()
        return sol.quantile([0.3, 0.9])

    np.testing.assert_allclose(on_host(quantiles(on_device(u0))), quantiles(u0), rtol=1e-9)
    found = mpiad.grad(lambda u0: anp.sum(quantiles(u0) ** 2))
    np.testing.assert_allclose(on_host(found(on_device(u0))), found(u0), rtol=1e-8)
    assert 0 < np.count_nonzero(found(u0)) <= 8  # two trajectories for each quantile and time


@pytest.mark.thorough
def test_a_plot_copies_what_it_draws():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    u0, p = _inputs()
    sol = _solved(on_device(u0), on_device(p), saveat=0.5)
    axes = sol.plot(pyplot.figure().gca(), component=1, lines=3)
    np.testing.assert_array_equal(axes.lines[1].get_ydata(), on_host(sol.u)[1, :, 1])
    pyplot.close("all")
