"""Step counts and times are those of SciPy's RK45, trajectory by trajectory."""

from __future__ import annotations

import numpy as np
import pytest
from ode_systems import forced_pendulum, lorenz, lotka_volterra
from scipy.integrate import solve_ivp

from mpiad.ensemble import BS3, RK45, EnsembleProblem, ODEProblem, solve

pytestmark = pytest.mark.serial
both = pytest.mark.usefixtures("solved_by")

CASES = {
    "lorenz": (lorenz, [1.0, 0.0, 0.0], np.linspace(0.5, 21, 12)[:, None], (0.0, 1.0)),
    "lotka-volterra": (
        lotka_volterra, [10.0, 5.0], np.array([1.5, 1.0, 3.0, 1.0]) * np.linspace(0.8, 1.2, 7)[:, None], (0.0, 6.0)
    ),
    "pendulum": (forced_pendulum, [0.5, 1.0], np.linspace([1, 0.1], [9, 0.5], 9), (0.0, 10.0)),
    "pendulum, backwards": (forced_pendulum, [0.5, 1.0], np.linspace([1, 0.1], [9, 0.2], 5), (2.0, -1.5)),
}  # fmt: skip


@both
@pytest.mark.parametrize("rtol, atol", [(1e-3, 1e-6), (1e-6, 1e-9), pytest.param(1e-10, 1e-12, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("case", CASES)
def test_steps_equal_scipys(case, rtol, atol):
    compare_steps(*CASES[case], RK45(), "RK45", rtol=rtol, atol=atol)


@pytest.mark.parametrize("rtol, atol", [(1e-3, 1e-6), pytest.param(1e-6, 1e-9, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("case", CASES)
def test_steps_of_order_3_equal_scipys(case, rtol, atol):
    compare_steps(*CASES[case], BS3(), "RK23", rtol=rtol, atol=atol)


def compare_steps(f, u0, p, tspan, alg, name, **tolerances):
    ensemble = EnsembleProblem(ODEProblem(f, u0, tspan, p[0]), p=p)
    sol = solve(ensemble, alg, save_everystep=True, **tolerances)
    for i, row in enumerate(p):
        expected = solve_ivp(lambda t, u, row=row: f(u, row, t), tspan, u0, method=name, **tolerances)
        assert sol.naccept[i] == len(expected.t) - 1
        assert sol.nf[i] == expected.nfev
        np.testing.assert_allclose(sol.t[i, : len(expected.t)], expected.t, rtol=0, atol=1e-6)
        assert np.isnan(sol.t[i, len(expected.t) :]).all()
        # Rounding grows along the trajectory, and the steps follow it.
        np.testing.assert_allclose(sol.u[i, : len(expected.t)], expected.y.T, rtol=1e-5, atol=1e-6)


def linear(u, p, t):
    return [p[0] + p[1] * u[0]]


@both
def test_first_steps_of_extreme_scales():
    # Where f vanishes, where the state does, and where the span is shorter than the first step.
    cases = [([0.0, 0.0], [1.0], (0, 5)), ([1.0, 1.0], [0.0], (0, 5)), ([0.0, -1.0], [1.0], (0, 1e-7)),
             ([0.0, -1e6], [1.0], (0, 1e-5))]  # fmt: skip
    for p, u0, tspan in cases:
        expected = solve_ivp(lambda t, u, p=p: linear(u, p, t), tspan, u0, method="RK45")
        sol = solve(ODEProblem(linear, u0, tspan, p), save_everystep=True)
        # The error of a tiny first step is rounding, and SciPy's depends on where its arrays lie in memory.
        np.testing.assert_allclose(sol.t, expected.t, rtol=1e-6)
        np.testing.assert_allclose(sol.u, expected.y.T, rtol=1e-6)


@both
def test_dense_output_equals_scipys():
    f, u0, p, tspan = CASES["pendulum"]
    times = np.linspace(*tspan, 77)
    sol = solve(EnsembleProblem(ODEProblem(f, u0, tspan), p=p), saveat=times)
    for i, row in enumerate(p):
        expected = solve_ivp(lambda t, u, row=row: f(u, row, t), tspan, u0, method="RK45", t_eval=times)
        np.testing.assert_allclose(sol.u[i], expected.y.T, rtol=1e-9, atol=1e-10)


@both
@pytest.mark.parametrize("t0", [0.0, 1e3, 1e6, -1e4])
@pytest.mark.parametrize("rtol", [1e-3, 1e-6])
def test_failures_are_scipys(t0, rtol):
    # u' = u² has no solution beyond t0 + 1; the steps end where time can't resolve them.
    tspan = (t0, t0 + 2)
    expected = solve_ivp(lambda t, u: u * u, tspan, [1.0], rtol=rtol, atol=rtol * 1e-3)
    sol = solve(ODEProblem(lambda u, p, t: u * u, [1.0], tspan), rtol=rtol, atol=rtol * 1e-3, saveat=[t0 + 0.5])
    assert expected.status == -1 and sol.retcode == "DtLessThanMin"
    # The last steps are of the size of time's own rounding, and u is the reciprocal of what is left of it.
    assert abs(sol.naccept - (len(expected.t) - 1)) <= 2 and abs(sol.nf - expected.nfev) <= 12
    spacing = np.spacing(abs(t0) + 1)
    assert abs(sol.t_reached - expected.t[-1]) <= 16 * spacing
    assert abs(1 / sol.u_end[0] - 1 / expected.y[0, -1]) <= 16 * spacing


def test_time_stays_in_tspan():
    seen = []

    def f(u, p, t):
        seen.extend(t)
        return -u * t

    rng = np.random.default_rng(0)
    for start, end in rng.standard_normal((200, 2)):
        seen.clear()
        assert solve(ODEProblem(f, [1.0], (start, end)), compile=False).t_reached == end
        assert min(start, end) == min(seen) and max(start, end) == max(seen)
