"""Events: found where they are, ending their trajectory or not."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.integrate import solve_ivp

from mpiad.ensemble import EnsembleProblem, EnsembleSerial, Event, ODEProblem, remake, solve

pytestmark = [
    pytest.mark.serial,
    pytest.mark.usefixtures("solved_by"),
    pytest.mark.parametrize("solved_by", ["columns", "kernels", "device", "gpu"], indirect=True),
]

FALL = ODEProblem(lambda u, p, t: [u[1], -9.81 + 0 * u[1]], [1.0, 0.0], (0.0, 3.0))
GROUND = Event(lambda u, p, t: u[0], direction=-1)


def test_terminal(solved_by):
    heights = np.linspace(1, 60, 200)
    ensemble = EnsembleProblem(FALL, u0=np.stack([heights, np.zeros(200)], axis=1))
    sol = solve(ensemble, events=GROUND, saveat=0.25, rtol=1e-8, atol=1e-10)
    exact = np.sqrt(2 * heights / 9.81)
    lands = exact < 3
    assert lands.any() and not lands.all()
    assert (sol.retcode == np.where(lands, "Terminated", "Success")).all()
    np.testing.assert_allclose(sol.t_reached, np.minimum(exact, 3), rtol=1e-10)
    np.testing.assert_allclose(sol.u_end[lands], np.stack([0 * exact, -9.81 * exact], 1)[lands], atol=1e-8)
    assert (np.isfinite(sol.u[..., 0]) == (sol.t <= sol.t_reached[:, None])).all()
    assert all(sol.events[i] == [(0, sol.t_reached[i])] for i in np.flatnonzero(lands))
    if solved_by in ("device", "gpu"):
        return  # to rounding only
    one = solve(remake(ensemble, u0=ensemble.u0[[7]]), events=GROUND, saveat=0.25, rtol=1e-8, atol=1e-10,
                ensemblealg=EnsembleSerial())  # fmt: skip
    assert one.u_end.tobytes() == sol.u_end[7].tobytes() and one.t_reached == sol.t_reached[7]
    assert one.u.tobytes() == sol.u[7].tobytes()


def test_not_terminal_and_direction():
    wave = ODEProblem(lambda u, p, t: [u[1], -u[0]], [0.0, 1.0], (0.0, 10.0))
    any_way = Event(lambda u, p, t: u[0], terminal=False)
    up, down = (Event(lambda u, p, t: u[0] - 0.5, terminal=False, direction=sign) for sign in (1, -1))
    sol = solve(wave, events=(any_way, up, down), rtol=1e-10, atol=1e-10)
    expected = [(0, k * np.pi) for k in (1, 2, 3)] + [(1, np.pi / 6 + 2 * k * np.pi) for k in (0, 1)]
    expected += [(2, 5 * np.pi / 6 + 2 * k * np.pi) for k in (0, 1)]
    assert [n for n, _ in sorted(sol.events)] == [n for n, _ in expected]
    np.testing.assert_allclose([t for _, t in sorted(sol.events)], [t for _, t in expected], atol=1e-8)
    assert sol.retcode == "Success"


def test_what_comes_after_the_end_did_not_happen():
    wave = ODEProblem(lambda u, p, t: [u[1], -u[0]], [0.0, 1.0], (0.0, 10.0))
    events = (Event(lambda u, p, t: t - 1.0, terminal=False), Event(lambda u, p, t: t - 0.9), Event(lambda u, p, t: t - 0.8,
              terminal=False))  # fmt: skip
    sol = solve(wave, events=events, rtol=1e-2, atol=1e-2)
    assert [n for n, _ in sol.events] == [2, 1] and sol.retcode == "Terminated"
    np.testing.assert_allclose([t for _, t in sol.events], [0.8, 0.9], rtol=1e-14)


def test_at_the_very_end():
    ensemble = EnsembleProblem(FALL, u0=np.ones((5, 2)))
    sol = solve(remake(ensemble, problem=remake(FALL, tspan=(0.0, 0.25))), events=Event(lambda u, p, t: t - 0.25))
    assert (sol.retcode == "Terminated").all() and (sol.t_reached == 0.25).all()
    np.testing.assert_array_equal(sol.u[:, -1], sol.u_end)
    np.testing.assert_allclose(sol.u_end[:, 0], 1.25 - 9.81 / 32, rtol=1e-12)


def test_times_are_scipys_backwards_too():
    ground = lambda t, u: u[0] - 0.3  # noqa: E731
    ground.terminal = True
    f = lambda u, p, t: [u[1], -np.sin(u[0])]  # noqa: E731
    for tspan in ((0.0, 20.0), (0.0, -20.0)):
        expected = solve_ivp(lambda t, u: f(u, None, t), tspan, [1.0, 0.0], events=ground)
        sol = solve(ODEProblem(f, [1.0, 0.0], tspan), events=Event(lambda u, p, t: u[0] - 0.3))
        np.testing.assert_allclose(sol.t_reached, expected.t_events[0][0], rtol=1e-12)
        np.testing.assert_allclose(sol.u_end, expected.y_events[0][0], rtol=1e-10)


def test_condition_of_the_wrong_shape():
    with pytest.raises(ValueError, match="one number for each column"):
        solve(FALL, events=Event(lambda u, p, t: u))
    with pytest.raises(TypeError, match="must be a function"):
        Event(3.0)
