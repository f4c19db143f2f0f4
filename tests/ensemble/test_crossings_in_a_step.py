"""Conditions that change their signs several times within one step, compared with closed forms and SciPy."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest
from scipy.integrate import solve_ivp

import mpiad
from mpiad.ensemble import (
    BS3,
    RK4,
    RK45,
    EnsembleProblem,
    Event,
    ODEProblem,
    Rodas5P,
    Rosenbrock23,
    Tsit5,
    Vern7,
    solve,
)

METHODS = [RK45(), Tsit5(), BS3(), Vern7(), Rosenbrock23(), Rodas5P(), RK4()]

pytestmark = [
    pytest.mark.serial,
    pytest.mark.limit(240),
    pytest.mark.usefixtures("solved_by"),
]
everywhere = pytest.mark.parametrize("solved_by", ["columns", "kernels", "device", "gpu"], indirect=True)
on_host = pytest.mark.parametrize("solved_by", ["columns", "kernels"], indirect=True)
each_method = pytest.mark.parametrize("alg", METHODS, ids=lambda alg: type(alg).__name__)
CLOCK = ODEProblem(lambda u, p, t: [1.0 + 0.0 * u[0]], [0.0], (0.0, 4.4))
THROW = ODEProblem(lambda u, p, t: [u[1], -p[0] + 0.0 * u[0]], [0.0, 24.0], (0.0, 10.0), [9.81])
LEVEL = 28.0


def fixed(alg, size):
    return {"dt": size} if isinstance(alg, RK4) else {}


@pytest.mark.few(3)
@each_method
@everywhere
def test_roots_of_sines_and_of_a_cubic(alg, solved_by):
    for place in (lambda u, t: t, lambda u, t: u[0]):
        waves = tuple(
            Event(lambda u, p, t, n=n, place=place: anp.sin(n * np.pi * place(u, t)), terminal=False) for n in (1, 2)
        )
        sol = solve(CLOCK, alg, events=waves, **fixed(alg, 1.5))
        for n in (1, 2):
            times = [time for e, time in sol.events if e == n - 1]
            np.testing.assert_allclose(times, np.arange(1, int(4.4 * n) + 1) / n, atol=1e-12)
    cubic = Event(lambda u, p, t: (u[0] + 6.0) * (u[0] + 2.0) * (u[0] - 2.0))
    start = ODEProblem(CLOCK.f, [-10.0], (-10.0, 10.0))
    sol = solve(start, alg, events=cubic, **fixed(alg, 2.9))
    assert sol.retcode == "Terminated"
    np.testing.assert_allclose([sol.t_reached, sol.u_end[0]], [-6.0, -6.0], atol=1e-11)


def passes(speed, gravity=9.81, level=LEVEL):
    """The times at which a ball thrown upwards passes a level."""
    root = np.sqrt(speed**2 - 2 * gravity * level)
    return (speed - root) / gravity, (speed + root) / gravity


@pytest.mark.few(3)
@each_method
@everywhere
def test_projectiles(alg, solved_by):
    speeds = np.linspace(23.44, 40.0, 200)
    thrown = EnsembleProblem(THROW, u0=np.stack([0 * speeds, speeds], axis=1))
    up, down = passes(speeds)
    for direction, expected in ((0, up), (1, up), (-1, down)):
        sol = solve(thrown, alg, events=Event(lambda u, p, t: u[0] - LEVEL, direction=direction), **fixed(alg, 2.5))
        assert (sol.retcode == "Terminated").all()
        np.testing.assert_allclose(sol.t_reached, expected, rtol=1e-9)


@pytest.mark.few(2)
@everywhere
def test_random_ensembles(solved_by):
    rng = np.random.default_rng(3)
    count = 1000
    speed, gravity = rng.uniform(5.0, 50.0, count), rng.uniform(1.0, 20.0, count)
    # The times of both roots, which lie within one step, are up to 0.9 of the flight apart.
    level = (1 - rng.uniform(0.01, 0.9, count) ** 2) * speed**2 / (2 * gravity)
    problem = ODEProblem(lambda u, p, t: [u[1], -p[0] + 0.0 * u[0]], [0.0, 1.0], (0.0, 1.0), [1.0, 1.0])
    spans = 2.2 * speed / gravity

    def member(prob, i, repeat):
        u0, p = np.array([0.0, speed[i - 1]]), np.array([gravity[i - 1], level[i - 1]])
        return ODEProblem(prob.f, u0, (0.0, spans[i - 1]), p)

    ensemble = EnsembleProblem(problem, member)
    sol = solve(ensemble, trajectories=count, events=Event(lambda u, p, t: u[0] - p[1], terminal=False))
    times = np.array([[time for _, time in sol.events[i]] for i in range(count)])
    np.testing.assert_allclose(times.T, passes(speed, gravity, level), rtol=1e-7)
    for i in range(10):
        given = gravity[i], level[i]
        reference = solve_ivp(
            lambda t, u, g=given[0]: [u[1], -g], (0.0, spans[i]), [0.0, speed[i]],
            events=lambda t, u, level=given[1]: u[0] - level, max_step=spans[i] / 200,
        )  # fmt: skip
        np.testing.assert_allclose(times[i], reference.t_events[0], rtol=1e-9)


@everywhere
def test_roots_before_the_end_of_a_step_are_recorded_and_later_ones_are_not(solved_by):
    wave = Event(lambda u, p, t: anp.sin(2 * np.pi * (u[0] - 0.1)), terminal=False)
    end = Event(lambda u, p, t: (u[0] - 2.7) * (u[0] - 3.5))
    sol = solve(CLOCK, events=(wave, end))
    expected = [(0, 0.1 + n / 2) for n in range(6)] + [(1, 2.7)]
    assert sol.retcode == "Terminated" and [e for e, _ in sol.events] == [e for e, _ in expected]
    np.testing.assert_allclose([time for _, time in sol.events], [time for _, time in expected], rtol=1e-12)
    # Without interior points, only the ends of steps count.
    coarse = Event(end.condition, interior_points=0)
    assert solve(CLOCK, events=coarse, dt=4.4, rtol=0.1).retcode == "Success"
    with pytest.raises(ValueError, match="interior_points must be an integer, zero or more"):
        Event(end.condition, interior_points=-1)


@pytest.mark.few(2)
@everywhere
def test_gradients_of_both_times(solved_by):
    pass_by = Event(lambda u, p, t: u[0] - LEVEL, terminal=False)
    speeds = np.array([24.0, 27.0, 33.0])

    def times(speeds):
        u0 = anp.stack([0 * speeds, speeds], axis=1)
        sol = solve(EnsembleProblem(THROW, u0=u0), events=pass_by)
        return anp.stack([time for i in range(3) for _, time in sol.events[i]])

    weights = np.array([0.7, -1.1, 0.4, 1.3, -0.2, 2.0])
    loss = lambda speeds: anp.sum(weights * times(speeds))  # noqa: E731
    root = np.sqrt(speeds**2 - 2 * 9.81 * LEVEL)
    slopes = np.stack([(1 - speeds / root) / 9.81, (1 + speeds / root) / 9.81], axis=1)
    expected = (weights.reshape(3, 2) * slopes).sum(axis=1)
    np.testing.assert_allclose(mpiad.grad(loss)(speeds), expected, rtol=1e-8)
    along = np.array([1.0, -2.0, 0.5])
    np.testing.assert_allclose(mpiad.jvp(loss, speeds, along)[1], expected @ along, rtol=1e-8)


@pytest.mark.few(1)
@pytest.mark.parametrize("alg", [RK45(), Rodas5P(), RK4()], ids=lambda alg: type(alg).__name__)
@on_host
def test_events_that_act_within_a_step(alg, solved_by):
    # Above the level a ball is slowed down to half its speed, and falls from there; on the way down it passes again.
    half = Event(lambda u, p, t: u[0] - LEVEL, direction=1, affect=lambda u, p, t: [u[0], 0.5 * u[1]])
    speeds = np.array([24.0, 27.0, 33.0])

    def end(speeds, **more):
        u0 = anp.stack([0 * speeds, speeds], axis=1)
        return solve(EnsembleProblem(THROW, u0=u0), alg, events=half, **fixed(alg, 2.5), **more).u_end[:, 0]

    def exact(speeds):
        v = anp.sqrt(speeds**2 - 2 * 9.81 * LEVEL)
        rest = 10.0 - (speeds - v) / 9.81
        return LEVEL + 0.5 * v * rest - 0.5 * 9.81 * rest**2

    np.testing.assert_allclose(end(speeds), exact(speeds), rtol=1e-9)
    along, loss = np.array([1.0, -2.0, 0.5]), lambda fun: lambda speeds: anp.sum(anp.sin(0.01 * fun(speeds)))
    expected = mpiad.grad(loss(exact))(speeds)
    np.testing.assert_allclose(mpiad.grad(loss(end))(speeds), expected, rtol=1e-8)
    np.testing.assert_allclose(mpiad.jvp(loss(end), speeds, along)[1], expected @ along, rtol=1e-8)
