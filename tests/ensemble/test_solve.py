"""Solutions beside closed forms, saved times, shapes, dtypes, statistics."""

from __future__ import annotations

import logging
import math
import re

import autograd.numpy as anp
import numpy as np
import pytest
from ode_systems import decay, lorenz, lotka_volterra
from scipy.integrate import solve_ivp

import mpiad
from mpiad.ensemble import (
    RK4,
    RK45,
    EnsembleProblem,
    EnsembleSerial,
    Event,
    ODEProblem,
    PIController,
    Tsit5,
    remake,
    solve,
)
from mpiad.errors import IntegrationError

pytestmark = pytest.mark.serial
both = pytest.mark.usefixtures("solved_by")

OSCILLATOR = ODEProblem(lambda u, p, t: [u[1], -u[0]], [0.0, 1.0], (0.0, 7.0))


@both
def test_the_published_problem():
    base = ODEProblem(lambda u, p, t: 1.01 * u * p, [3.0], (0.0, 1.0), [1.0])
    ensemble = EnsembleProblem(base, prob_func=lambda prob, i, repeat: remake(prob, u0=0.5 + i / 100 * prob.u0))
    sol = solve(ensemble, RK45(), EnsembleSerial(), trajectories=30, saveat=0.1, rtol=1e-8, atol=1e-10)
    assert sol.u.shape == (30, 11, 1) and sol.t.shape == (11,)
    exact = (0.5 + 3 * np.arange(1, 31) / 100)[:, None] * np.exp(1.01 * np.linspace(0, 1, 11))
    np.testing.assert_allclose(sol.u[..., 0], exact, rtol=1e-8)


@both
@pytest.mark.parametrize("alg, order", [(RK45(), 5), (Tsit5(), 5), (RK45(PIController()), 5), (RK4(), 4)])
def test_closed_form(alg, order):
    dt = 0.004 if order == 4 else None
    times = np.linspace(0, 7, 23)
    sol = solve(OSCILLATOR, alg, saveat=times, rtol=1e-10, atol=1e-12, dt=dt)
    np.testing.assert_allclose(sol.u, np.stack([np.sin(times), np.cos(times)], axis=1), atol=3e-9)
    assert sol.retcode == "Success" and sol.t_reached == 7


@both
@pytest.mark.parametrize("alg, order", [(RK4(), 4)])
def test_order_of_fixed_steps(alg, order):
    errors = [abs(solve(OSCILLATOR, alg, dt=dt, saveat=[3.0]).u_end[0] - np.sin(7)) for dt in (0.1, 0.05, 0.025)]
    assert np.allclose(np.log2(np.divide(errors[:-1], errors[1:])), order, atol=0.1)


@both
def test_fixed_steps_are_counted():
    sol = solve(remake(OSCILLATOR, tspan=(0.0, 1.0)), RK4(), dt=0.1, saveat=[0.5])
    assert (sol.naccept, sol.nreject, sol.nf) == (10, 0, 41)


def test_no_less_accurate_than_scipy():
    p = np.array([1.5, 1.0, 3.0, 1.0])
    exact = solve_ivp(lambda t, u: lotka_volterra(u, p, t), (0, 6), [10, 5], method="DOP853", rtol=1e-13, atol=1e-13)
    for rtol in (1e-4, 1e-7):
        ours = solve(ODEProblem(lotka_volterra, [10.0, 5.0], (0, 6), p), rtol=rtol, atol=rtol / 100)
        theirs = solve_ivp(lambda t, u: lotka_volterra(u, p, t), (0, 6), [10, 5], rtol=rtol, atol=rtol / 100)
        error = abs(ours.u_end - exact.y[:, -1]).max()
        assert error <= 1.0001 * abs(theirs.y[:, -1] - exact.y[:, -1]).max()


@both
def test_saved_times():
    end = remake(OSCILLATOR, tspan=(0.0, 1.0))
    np.testing.assert_array_equal(solve(end).t, [0, 1])
    np.testing.assert_allclose(solve(end, saveat=0.3).t, [0, 0.3, 0.6, 0.9, 1], atol=1e-15)
    np.testing.assert_array_equal(solve(end, saveat=[0.5]).t, [0.5])
    assert solve(end, saveat=[]).u.shape == (0, 2)
    for tspan in ((0.0, 1e-8), (1e-8, 0.0)):  # the interval is much longer than tspan
        np.testing.assert_array_equal(solve(remake(OSCILLATOR, tspan=tspan), saveat=10.0).t, tspan)
    np.testing.assert_array_equal(solve(remake(OSCILLATOR, tspan=(2.0, 2.0)), saveat=10.0).t, [2.0])
    back = solve(remake(OSCILLATOR, tspan=(1.0, 0.0), u0=[np.sin(1), np.cos(1)]), saveat=0.25, rtol=1e-8)
    np.testing.assert_array_equal(back.t, [1, 0.75, 0.5, 0.25, 0])
    np.testing.assert_allclose(back.u[:, 0], np.sin(back.t), atol=1e-6)
    twice = solve(end, saveat=[0.0, 0.0, 0.4, 0.4, 1.0, 1.0])
    np.testing.assert_array_equal(twice.u[::2], twice.u[1::2])
    np.testing.assert_array_equal(twice.u[[0, 4]], [[0, 1], twice.u_end])


@both
def test_a_component_that_is_zero_without_an_absolute_tolerance():
    sol = solve(ODEProblem(lambda u, p, t: [-u[0], u[0]], [1.0, 0.0], (0.0, 1.0)), rtol=1e-8, atol=0.0)
    assert sol.retcode == "Success"
    np.testing.assert_allclose(sol.u_end, [np.exp(-1), 1 - np.exp(-1)], rtol=1e-6)


@both
def test_saved_times_of_each_trajectory():
    times = np.sort(np.random.default_rng(0).uniform(0, 7, (30, 5)), axis=1)
    sol = solve(EnsembleProblem(OSCILLATOR, u0=np.tile([0.0, 1.0], (30, 1))), saveat=times, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(sol.u[..., 0], np.sin(times), atol=1e-7)
    batched = solve(
        EnsembleProblem(OSCILLATOR, u0=np.tile([0.0, 1.0], (30, 1))), saveat=times, rtol=1e-9, atol=1e-9, batch_size=7
    )
    np.testing.assert_array_equal(batched.u, sol.u)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.complex128])
def test_dtypes_are_kept(dtype):
    u0 = np.array([1.0, 2.0], dtype)
    rate = 0.5 if u0.dtype.kind == "f" else 0.5 - 2j
    sol = solve(ODEProblem(lambda u, p, t: -rate * u, u0, (0.0, 2.0)), rtol=1e-5, atol=1e-7, saveat=0.5)
    assert sol.u.dtype == sol.u_end.dtype == dtype
    np.testing.assert_allclose(sol.u, u0 * np.exp(-rate * sol.t)[:, None], rtol=1e-4)


def test_complex_steps_equal_scipys():
    u0 = np.array([1.0 + 0.5j, -2j])
    f = lambda u, p, t: [1j * u[0] + u[1], -u[1] * np.abs(u[0])]  # noqa: E731
    expected = solve_ivp(lambda t, u: f(u, None, t), (0, 5), u0, rtol=1e-6)
    sol = solve(ODEProblem(f, u0, (0.0, 5.0)), rtol=1e-6, save_everystep=True)
    np.testing.assert_allclose(sol.t, expected.t, rtol=1e-9)
    np.testing.assert_allclose(sol.u, expected.y.T, rtol=1e-7)


def test_shapes_of_states():
    number = solve(ODEProblem(decay, 2, (0.0, 1.0), 0.5), rtol=1e-8)
    assert number.u.shape == (2,) and number.u_end.shape == () and number.u_end.dtype == float
    np.testing.assert_allclose(number.u_end, 2 * np.exp(-0.5), rtol=1e-7)
    # Columns with one step size: f sees exactly this shape, and time as a number.
    seen = set()

    def f(u, p, t):
        seen.add((u.shape, np.ndim(t)))
        return p @ u

    matrix = np.array([[0.0, 1.0], [-1.0, 0.0]])
    sol = solve(ODEProblem(f, np.array([[0.0, 1, 2], [1, 0, 0]]), (0.0, 1.0), matrix), rtol=1e-8, saveat=0.5)
    assert sol.u.shape == (3, 2, 3) and seen == {((2, 3), 0)}
    np.testing.assert_allclose(sol.u_end[:, 0], [np.sin(1), np.cos(1)], rtol=1e-6)
    single = solve_ivp(lambda t, u: (matrix @ u.reshape(2, 3)).ravel(), (0, 1), [0, 1, 2, 1, 0, 0], rtol=1e-8)
    assert sol.naccept == len(single.t) - 1
    base = remake(OSCILLATOR, f=f, u0=np.zeros((2, 3)), p=matrix)
    members = solve(EnsembleProblem(base, u0=np.arange(24.0).reshape(4, 2, 3)))
    assert members.u.shape == (4, 2, 2, 3)


@both
def test_parameters_of_any_nest():
    def f(u, p, t):
        return [p["a"] * u[0], p["rates"][0] + 0 * u[0]]

    base = ODEProblem(f, [1.0, 0.0], (0.0, 1.0), {"a": 0.5, "rates": [2.0]})
    ensemble = EnsembleProblem(base, lambda prob, i, _: remake(prob, p={"a": 0.1 * i, "rates": [2.0 * i]}))
    sol = solve(ensemble, trajectories=5, rtol=1e-9, atol=1e-9, saveat=[0.5])
    np.testing.assert_allclose(sol.u_end, np.stack([np.exp(0.1 * np.arange(1, 6)), 2.0 * np.arange(1, 6)], 1), rtol=1e-8)


@both
def test_no_trajectories_and_no_time():
    none = solve(EnsembleProblem(OSCILLATOR, u0=np.empty((0, 2))), saveat=[1.0, 2.0])
    assert none.u.shape == (0, 2, 2) and none.u_end.shape == (0, 2) and len(none) == 0 and "0 traj" in none.summary()
    still = solve(remake(OSCILLATOR, tspan=(2.0, 2.0)), saveat=[2.0, 2.0])
    np.testing.assert_array_equal(still.u, [[0, 1], [0, 1]])
    assert (still.naccept, still.nf, still.retcode) == (0, 0, "Success")


@both
def test_statistics_are_over_the_survivors(caplog):
    u0 = np.array([[0.5], [1.0], [-1.0], [-2.0]])
    ensemble = EnsembleProblem(ODEProblem(lambda u, p, t: u * u, u0[0], (0.0, 1.5)), u0=u0)
    with caplog.at_level(logging.WARNING, logger="mpiad"):
        sol = solve(ensemble, saveat=[0.0, 0.5, 1.5], rtol=1e-9, atol=1e-9)
    assert list(sol.retcode) == ["Success", "DtLessThanMin", "Success", "Success"]
    assert len(caplog.records) == 1 and "1 of 4 trajectories failed (1 DtLessThanMin); the first is number 2" in caplog.text
    exact = u0[[0, 2, 3]] / (1 - 1.5 * u0[[0, 2, 3]])
    np.testing.assert_allclose(sol.mean()[::2], [u0[[0, 2, 3]].mean(0), exact.mean(0)], rtol=1e-6)
    np.testing.assert_allclose(sol.std()[2], exact.std(0), rtol=1e-6)
    np.testing.assert_allclose(sol.quantile([0.5])[0, 2], np.median(exact), rtol=1e-6)
    assert "3 Success" in sol.summary() and "over 3" in sol.summary()
    with pytest.raises(IntegrationError, match="1 of 4"):
        solve(ensemble, throw=True)


@both
@pytest.mark.parametrize(
    ("broken", "entry"),
    [
        ({"u0": [1.0, math.nan]}, "u0[1] is nan"),
        ({"u0": [math.inf, 1.0]}, "u0[0] is inf"),
        ({"p": {"rates": np.array([1.0, math.nan]), "shift": 0.0}}, "p['rates'][1] is nan"),
        ({"p": {"rates": np.ones(2), "shift": -math.inf}}, "p['shift'] is -inf"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_an_entry_that_is_not_finite_is_named(broken, entry, caplog):
    def f(u, p, t):
        return [-p["rates"][0] * u[0] + p["shift"], u[0] - p["rates"][1] * u[1]]

    good = ODEProblem(f, [1.0, 1.0], (0.0, 1.0), {"rates": np.ones(2), "shift": 0.0})
    with pytest.raises(IntegrationError, match=re.escape(f"For trajectory 1, {entry}.")):
        solve(remake(good, **broken), throw=True)
    ensemble = EnsembleProblem(good, prob_func=lambda prob, i, repeat: remake(prob, **broken) if i in (3, 5) else prob)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="mpiad"):
        sol = solve(ensemble, trajectories=6, batch_size=2)
    assert sol.retcode.tolist() == ["Success", "Success", "Unstable", "Success", "Unstable", "Success"]
    assert len(caplog.records) == 1 and caplog.text.rstrip().endswith(f"after 0 steps. For trajectory 3, {entry}.")
    np.testing.assert_array_equal(sol.u_end[[0, 1, 3, 5]], solve(good).u_end[None].repeat(4, 0))
    p = {"rates": np.where(np.arange(3)[:, None] == 2, broken.get("p", good.p)["rates"], 1.0), "shift": np.zeros(3)}
    if "rates" in entry:
        with pytest.raises(IntegrationError, match=re.escape(f"For trajectory 3, {entry}.")):
            solve(EnsembleProblem(good, p=p), throw=True)


@both
def test_entries_that_f_does_not_read_may_be_anything():
    sol = solve(ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], (0.0, 1.0), [1.0, math.nan]), throw=True)
    assert sol.retcode == "Success"


@both
def test_no_quantiles():
    sol = solve(EnsembleProblem(OSCILLATOR, u0=np.eye(3, 2)), saveat=[1.0, 2.0])
    assert sol.quantile([]).shape == np.quantile(sol.u, [], axis=0).shape


def test_plot():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sol = solve(EnsembleProblem(ODEProblem(lorenz, [1.0, 0, 0], (0, 1)), p=np.linspace(1, 20, 12)[:, None]), saveat=0.1)
    _, ax = plt.subplots()
    assert sol.plot(ax, component=2, lines=4) is ax and len(ax.lines) == 5
    np.testing.assert_allclose(ax.lines[-1].get_ydata(), sol.mean()[:, 2])
    plt.close("all")


@both
def test_relative_tolerances_of_components():
    """The steps are those of SciPy's RK45, which takes them, too."""
    rtol, atol = [1e-3, 1e-9], 1e-9
    expected = solve_ivp(lambda t, u: [u[1], -u[0]], (0.0, 7.0), [0.0, 1.0], rtol=rtol, atol=atol)
    sol = solve(OSCILLATOR, rtol=rtol, atol=atol)
    assert sol.naccept == len(expected.t) - 1
    np.testing.assert_allclose(sol.u_end, expected.y[:, -1], rtol=1e-10)
    assert solve(OSCILLATOR, rtol=1e-3, atol=atol).naccept < sol.naccept
    equal, one = solve(OSCILLATOR, rtol=[1e-5, 1e-5]), solve(OSCILLATOR, rtol=1e-5)
    np.testing.assert_array_equal(equal.u, one.u)


@both
def test_a_relative_tolerance_of_zero():
    sol = solve(OSCILLATOR, rtol=0.0, atol=1e-6)
    np.testing.assert_array_equal(sol.u, solve(OSCILLATOR, rtol=1e-14, atol=1e-6).u)
    np.testing.assert_allclose(sol.u_end, [np.sin(7), np.cos(7)], atol=1e-4)


@both
def test_intervals_in_spans_that_differ():
    """The rows are those of single solves, padded with NaN."""
    ends = [1.2, 2.0, -0.7, 0.0]
    ensemble = EnsembleProblem(OSCILLATOR, prob_func=lambda prob, i, repeat: remake(prob, tspan=(0.0, ends[i - 1])))
    for batch_size in (None, 2):
        sol = solve(ensemble, trajectories=4, saveat=0.5, rtol=1e-8, batch_size=batch_size)
        assert sol.t.shape == (4, 5) and sol.u.shape == (4, 5, 2)
        for end, t, u in zip(ends, sol.t, sol.u):
            alone = solve(remake(OSCILLATOR, tspan=(0.0, end)), saveat=0.5, rtol=1e-8)
            count = len(alone.t)
            np.testing.assert_array_equal(t[:count], alone.t)
            np.testing.assert_allclose(u[:count], alone.u, rtol=1e-13, atol=1e-15)
            assert np.isnan(t[count:]).all() and np.isnan(u[count:]).all()


def switched(u, p, t):
    return [math.sin(u[1]) if u[0] > 0 else u[1], -p[0] * u[0] * math.cos(t)]


def switched_columns(u, p, t):
    return [np.where(u[0] > 0, np.sin(u[1]), u[1]), -p[0] * u[0] * np.cos(t)]


@pytest.mark.parametrize("alg", [RK45(), Tsit5()])
def test_an_f_of_plain_numbers(alg):
    p = np.linspace(1.0, 2.0, 4)[:, None]
    sol, expected = (
        solve(EnsembleProblem(ODEProblem(f, [1.0, 0.2], (0.0, 3.0)), p=p), alg, EnsembleSerial(), saveat=0.5, rtol=1e-8)
        for f in (switched, switched_columns)
    )
    np.testing.assert_allclose(sol.u, expected.u, rtol=1e-11)
    one = solve(ODEProblem(switched, [1.0, 0.2], (0.0, 3.0), p[3]), alg, EnsembleSerial(), saveat=0.5, rtol=1e-8)
    np.testing.assert_array_equal(one.u, sol.u[3])
    assert one.execution == sol.execution == "arrays: EnsembleSerial"
    # Conditions, affects and times are called with columns.
    falling = ODEProblem(lambda u, p, t: [-p[0] if u[0] > 0.5 else -p[1]], [1.0], (0.0, 1.0), [1.0, 0.6])
    more = Event(times=lambda p: [0.1 * p[0]], affect=lambda u, p, t: [u[0] + p[1]])
    stop = Event(lambda u, p, t: u[0] - 0.7 * p[0])
    for events, u_end, reached in ((more, 0.6, 1.0), (stop, 0.7, 0.3), ((stop, more), 0.7, 0.9)):
        sol = solve(falling, alg, EnsembleSerial(), events=events, dtmax=0.15)
        np.testing.assert_allclose([sol.u_end[0], sol.t_reached], [u_end, reached], rtol=1e-12)
    with pytest.raises(ValueError, match="f uses an array as a condition"):
        solve(ODEProblem(switched, [1.0, 0.2], (0.0, 3.0), p[3]))
    with pytest.raises(ValueError, match="f returned shape"):
        solve(ODEProblem(lambda u, p, t: [u[0], u[0]], [1.0], (0.0, 3.0)), alg, EnsembleSerial())


def test_the_gradient_of_an_f_that_branches():
    def loss(p, f):
        sol = solve(EnsembleProblem(ODEProblem(f, [1.0, 0.2], (0.0, 3.0)), p=p), Tsit5(), EnsembleSerial(), rtol=1e-4)
        return anp.sum(sol.u_end**2)

    p = np.linspace(1.0, 2.0, 3)[:, None]
    one = mpiad.grad(loss)(p, lambda u, p, t: [u[1] if u[0] > 0 else 2 * u[1], -p[0] * u[0]])
    other = mpiad.grad(loss)(p, lambda u, p, t: [anp.where(u[0] > 0, u[1], 2 * u[1]), -p[0] * u[0]])
    np.testing.assert_allclose(one, other, rtol=1e-11)
