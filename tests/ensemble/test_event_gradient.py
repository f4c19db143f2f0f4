"""Derivatives through terminal events, whose times move."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest

import mpiad
from mpiad.ensemble import RK4, EnsembleProblem, Event, ODEProblem, remake, solve

pytestmark = [
    pytest.mark.serial,
    pytest.mark.usefixtures("solved_by"),
    pytest.mark.parametrize("solved_by", ["columns", "kernels", "device", "gpu"], indirect=True),
]


def falling(u, p, t):
    return [u[1], -p[0] + 0 * u[0]]


GROUND = Event(lambda u, p, t: u[0] - p[1] * t, direction=-1)
TIGHT = {"rtol": 1e-9, "atol": 1e-11, "events": GROUND}


def landing(height, speed, gravity, slope):
    """Return when a stone meets ground that rises, and its speed there."""
    v = speed - slope
    time = (v + anp.sqrt(v**2 + 2 * gravity * height)) / gravity
    return time, speed - gravity * time


def landed(u0, p, **more):
    ensemble = EnsembleProblem(ODEProblem(falling, np.ones(2), (0.0, 20.0)), u0=u0, p=p)
    return solve(ensemble, **{**TIGHT, **more})


U0 = np.array([[1.0, 2.0], [3.0, 0.5], [0.7, 4.0]])
P = np.array([[9.81, 0.1], [1.62, 0.0], [3.7, 0.3]])
W = np.array([0.3, -0.7, 1.1])


def loss(u0, p):
    sol = landed(u0, p)
    return anp.sum(W * sol.t_reached**2) + anp.sum(anp.sin(sol.u_end[:, 1]) * W) + anp.sum(sol.u_end[:, 0])


def exact_loss(u0, p):
    time, speed = landing(u0[:, 0], u0[:, 1], p[:, 0], p[:, 1])
    return anp.sum(W * time**2) + anp.sum(anp.sin(speed) * W) + anp.sum(p[:, 1] * time)


def test_falling_stones():
    # The motion is a parabola, which the method and its interpolant follow exactly.
    assert set(landed(U0, P).retcode) == {"Terminated"}
    for found, expected in zip(mpiad.grad(loss, (0, 1))(U0, P), mpiad.grad(exact_loss, (0, 1))(U0, P)):
        np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_forward_mode_and_second_derivatives():
    v = np.array([[0.2, -0.1], [0.5, 0.3], [-0.4, 0.8]])
    _, tangent = mpiad.jvp(lambda u0: loss(u0, P), U0, v)
    assert abs(tangent - np.sum(mpiad.grad(loss)(U0, P) * v)) < 1e-10
    np.testing.assert_allclose(mpiad.hvp(loss)(U0, P, v), mpiad.hvp(exact_loss)(U0, P, v), rtol=1e-8)


@pytest.mark.few(2)
@pytest.mark.parametrize("argnums", [(0,), (1, 2)], ids=str)
def test_tangents_where_times_move(argnums, monkeypatch):
    from mpiad.ensemble import differentiable

    def total(u0, p, ends, way, events):
        def member(prob, i, repeat):
            return remake(prob, u0=u0[i - 1], p=p[i - 1], tspan=(ends[0] * i, 2.0 + ends[1]))

        ensemble = EnsembleProblem(ODEProblem(falling, np.ones(2), (0.0, 20.0)), prob_func=member)
        sol = solve(ensemble, trajectories=3, gradient=way, saveat=[0.9, 1.8], **{**TIGHT, "events": events})
        saved = anp.where(np.isnan(mpiad.stop_gradient(sol.u)), 0.0, sol.u)
        return anp.sum(W * sol.t_reached**2) + anp.sum(W[:, None] * anp.sin(sol.u_end)) + anp.sum(saved**2)

    args = U0, P, np.array([0.01, 0.03])
    for events in (GROUND, ()):
        expected = mpiad.grad(lambda *given: total(*given, "adjoint", events), argnums)(*args)  # noqa: B023
        with monkeypatch.context() as patched:
            patched.setattr(differentiable, "pull_run", None)  # no adjoint in secret
            found = mpiad.grad(lambda *given: total(*given, "tangent", events), argnums)(*args)  # noqa: B023
        for a, b in zip(found, expected):
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12 * np.abs(b).max())


@pytest.mark.few(2)
def test_one_that_ends_early_changes_no_digit_of_the_others(solved_by):
    high, p = np.array([[50.0, 1.0], [2.0, 1.0]]), np.array([[9.81], [9.81]])  # the first doesn't land in time

    def total(p):
        n = len(p)
        ensemble = EnsembleProblem(ODEProblem(falling, high[0], (0.0, 3.0)), u0=high[:n], p=p)
        sol = solve(ensemble, rtol=1e-6, events=Event(lambda u, p, t: u[0], direction=-1))
        assert list(sol.retcode) == ["Success", "Terminated"][:n]
        return anp.sum(anp.sin(sol.u_end))

    both, alone = mpiad.grad(total)(p)[:1], mpiad.grad(total)(p[:1])
    assert both.tobytes() == alone.tobytes() or solved_by in ("device", "gpu")
    np.testing.assert_allclose(both, alone, rtol=1e-13)


def test_saved_states_before_the_event_and_trajectories_without_one():
    def partly(u0):
        sol = landed(u0, P, saveat=[0.0, 0.1, 15.0])
        saved = sol.u[:, 1:2]
        return anp.sum(saved**2) + anp.sum(anp.where(np.isnan(mpiad.stop_gradient(sol.u)), 0.0, sol.u))

    def exact(u0):
        at = u0[:, 0] + 0.1 * u0[:, 1] - 0.005 * P[:, 0], u0[:, 1] - 0.1 * P[:, 0]
        return sum(anp.sum(x**2) + anp.sum(x) for x in at) + anp.sum(u0)

    np.testing.assert_allclose(mpiad.grad(partly)(U0), mpiad.grad(exact)(U0), rtol=1e-10)
    up = np.array([[1.0, 200.0], [3.0, 0.5]])
    time = mpiad.grad(lambda u0: landed(u0, P[:2]).t_reached[0])(up)
    np.testing.assert_array_equal(time, 0)
    end = mpiad.grad(lambda u0: landed(u0, P[:2]).u_end[0, 0])(up)
    np.testing.assert_allclose(end, [[1, 20], [0, 0]], atol=1e-12)


LEVELS = (
    Event(lambda u, p, t: u[0] - 0.4 - p[1] * t, terminal=False),
    Event(lambda u, p, t: u[0] - 0.45 - p[1] * t, terminal=False, direction=-1),
    GROUND,
)


def times_of(sol, weights=(0.7, -1.1, 0.4, 1.3)):
    return sum(w * time**2 for i in range(len(sol)) for w, (_, time) in zip(weights, sol.events[i]))


def exact_times(u0, p):
    height, speed, slope = u0[:, 0], u0[:, 1], p[:, 1]
    first, second, last = (landing(height - level, speed, p[:, 0], slope)[0] for level in (0.45, 0.4, 0.0))
    return anp.sum(0.7 * first**2 - 1.1 * second**2 + 0.4 * last**2)


@pytest.mark.few(2)
@pytest.mark.parametrize("more", [{}, {"gradient": "tangent"}, {"checkpoints": 2}, {"batch_size": 2}])
def test_times_of_events_on_the_way(more):
    more = {**more, "events": LEVELS}
    # Both levels are passed within one step.
    counts = {tuple(event for event, _ in found) for found in landed(U0, P, **more).events.values()}
    assert counts == {(1, 0, 2)}
    for found, expected in zip(
        mpiad.grad(lambda u0, p: times_of(landed(u0, p, **more)), (0, 1))(U0, P), mpiad.grad(exact_times, (0, 1))(U0, P)
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.few(1)
def test_forward_mode_and_second_derivatives_of_times_on_the_way():
    v = np.array([[0.2, -0.1], [0.5, 0.3], [-0.4, 0.8]])
    by = lambda u0: times_of(landed(u0, P, events=LEVELS))  # noqa: E731
    exact = lambda u0: exact_times(u0, P)  # noqa: E731
    np.testing.assert_allclose(mpiad.jvp(by, U0, v)[1], mpiad.jvp(exact, U0, v)[1], rtol=1e-9)
    np.testing.assert_allclose(mpiad.hvp(by)(U0, v), mpiad.hvp(exact)(U0, v), rtol=1e-7)


@pytest.mark.few(2)
@pytest.mark.usefixtures("solved_by")
def test_two_terminal_events_at_once_have_one_time():
    rising = ODEProblem(lambda u, p, t: [p[0]], [0.0], (0.0, 5.0))
    both = Event(lambda u, p, t: u[0] - 1.0), Event(lambda u, p, t: 2.0 * u[0] - 2.0)
    speeds, weights = np.array([[0.5], [0.8]]), (0.7, -1.1)
    found = mpiad.grad(lambda p: times_of(solve(EnsembleProblem(rising, p=p), events=both), weights))(speeds)
    # Each time is 1/p.
    np.testing.assert_allclose(found, -2.0 * sum(weights) / speeds**3, rtol=1e-12)


def test_times_on_the_way_move_with_the_start():
    def at(start):
        sol = solve(ODEProblem(falling, U0[0], (start, 9.0), P[0]), **{**TIGHT, "events": LEVELS[:2]})
        assert [event for event, _ in sol.events] == [1, 0] and sol.retcode == "Success"
        return sol.events[0][1] + 2 * sol.events[1][1]

    def exact(start):
        first, second = (landing(U0[0, 0] - level - P[0, 1] * start, *U0[0, 1:], *P[0])[0] for level in (0.45, 0.4))
        return 3 * start + first + 2 * second

    np.testing.assert_allclose(mpiad.grad(at)(0.4), mpiad.grad(exact)(0.4), rtol=1e-9)


def test_start_of_tspan():
    def at(ends):
        sol = solve(ODEProblem(falling, U0[0], (ends[0], ends[1]), P[0]), **TIGHT)
        return sol.t_reached + sol.u_end[1]

    # Starting later by δ, under ground that moves as time does.
    def exact(start):
        time, speed = landing(U0[0, 0] - P[0, 1] * start, U0[0, 1], P[0, 0], P[0, 1])
        return start + time + speed

    found = mpiad.grad(at)(np.array([0.4, 9.0]))
    np.testing.assert_allclose(found, [mpiad.grad(exact)(0.4), 0.0], rtol=1e-10)


@pytest.mark.few(1)
def test_shared_parameters_and_fixed_steps():
    def shared(p):
        problem = ODEProblem(falling, np.ones(2), (0.0, 20.0), p)
        sol = solve(EnsembleProblem(problem, u0=U0), RK4(), dt=0.01, events=GROUND)
        return anp.sum(W * sol.t_reached)

    exact = mpiad.grad(lambda p: anp.sum(W * landing(U0[:, 0], U0[:, 1], p[0], p[1])[0]))(P[0])
    np.testing.assert_allclose(mpiad.grad(shared)(P[0]), exact, rtol=1e-10)
