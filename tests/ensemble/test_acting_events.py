"""Events that change the state: bouncing balls, doses and neurons that fire, against their closed forms."""

from __future__ import annotations

import dataclasses
from functools import partial

import autograd.numpy as anp
import numpy as np
import pytest

import mpiad
from mpiad.ensemble import (
    RK4,
    RK45,
    EnsembleProblem,
    EnsembleSerial,
    EnsembleThreads,
    Event,
    ODEProblem,
    Rodas5P,
    Rosenbrock23,
    Tsit5,
    Vern7,
    remake,
    solve,
    working_set,
)  # fmt: skip

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("solved_by")]

TIGHT = {"rtol": 1e-12, "atol": 1e-14}
SHARP = {"alg": Vern7(), **TIGHT}  # in a fifth of the steps


def check(found, expected, argnums, args, tangent=True, exact=1e-10):
    """Compare values and derivatives with those of a closed form: backwards, forwards, and of second order."""
    value, gradients = mpiad.value_and_grad(found, argnums)(*args)
    known, expectations = mpiad.value_and_grad(expected, argnums)(*args)
    np.testing.assert_allclose(value, known, rtol=exact)
    for gradient, expectation in zip(gradients, expectations):
        np.testing.assert_allclose(gradient, expectation, rtol=exact, atol=exact * np.abs(expectation).max())
    ways = [np.cos(np.arange(1.0, 1 + np.size(arg))).reshape(np.shape(arg)) for arg in args]
    along = lambda fun: lambda s: fun(*[arg + s * way for arg, way in zip(args, ways)])  # noqa: E731
    if tangent:
        np.testing.assert_allclose(
            mpiad.jvp(along(found), 0.0, 1.0)[1], mpiad.jvp(along(expected), 0.0, 1.0)[1], rtol=exact
        )
        both = [mpiad.hvp(along(fun))(0.0, 1.0) for fun in (found, expected)]
        np.testing.assert_allclose(both[0], both[1], rtol=100 * exact)


# ---- events at once

TWO = {
    kind: Event(lambda u, p, t, c=c: u[c], direction=-1, affect=lambda u, p, t, c=c: [*u[: c + 1], -u[c + 1], *u[c + 2 :]])
    for kind, c in (("first", 0), ("second", 2))
}


def two_balls(u, p, t):
    return [u[1], -9.81 + 0 * u[0], u[3], -9.81 + 0 * u[0]]


# Each order with one method: the order of events is that of their places in a list, whatever finds their times.
ORDERS = {"first, second": (RK45(),), "second, first": (Tsit5(),)}


@pytest.mark.parametrize(("order", "alg"), [
    pytest.param(order, alg, id=f"{order}-{type(alg).__name__}", marks=() if alg in algs else pytest.mark.thorough)
    for order, algs in ORDERS.items() for alg in (RK45(), Tsit5(), Vern7(), Rodas5P())
])  # fmt: skip
def test_no_ball_falls_through_the_floor(alg, order):
    apart = np.array([0.0, 1e-16, 1e-15, 3e-15, 1e-14, 1e-13, 1e-12, 1e-9])
    u0 = np.stack([np.ones(8), np.zeros(8), 1 + apart, np.zeros(8)], axis=1)
    ensemble = EnsembleProblem(ODEProblem(two_balls, u0[0], (0.0, 1.0)), u0=u0)
    sol = solve(ensemble, alg, events=[TWO[kind] for kind in order.split(", ")], rtol=1e-9, atol=1e-11)
    height, speed, _ = bouncing(1.0, 0.0, 9.81, 1.0, 0.0, 1.0)
    np.testing.assert_allclose(sol.u_end, np.tile([height, speed], (8, 2)), rtol=0, atol=1e-7)
    assert all(sorted(e for e, _ in found) == [0, 1] for found in sol.events.values())
    # Of those at one time the first that is given comes first.
    assert [e for e, _ in sol.events[0]] == [0, 1]


def test_a_wall_that_is_reached_as_another_event_acts_ends_all():
    rng, N = np.random.default_rng(1), 1000
    p = np.stack([rates := rng.uniform(0.5, 2, N), times := rng.uniform(0.2, 2, N), rates * times, times**2], axis=1)
    count = Event(lambda u, p, t: u[0] - p[2], direction=1, affect=lambda u, p, t: [u[0], u[1], u[2] + 1])
    wall = Event(lambda u, p, t: u[1] - p[3], direction=1)
    problem = ODEProblem(lambda u, p, t: [p[0] + 0 * u[0], 2 * t, 0 * u[0]], [0.0, 0.0, 0.0], (0.0, 3.0))
    sol = solve(EnsembleProblem(problem, p=p), Tsit5(), events=(count, wall))
    assert set(sol.retcode) == {"Terminated"}
    np.testing.assert_allclose(sol.t_reached, times, rtol=1e-12)


@pytest.mark.parametrize(("alg", "direction"), [
    pytest.param(alg, direction, id=f"{type(alg).__name__}-{direction}", marks=marks)
    for alg, usual in ((RK45(), 1), (Tsit5(), 0), (Rodas5P(), 1))
    for direction, marks in ((usual, ()), (1 - usual, pytest.mark.thorough))
])  # fmt: skip
def test_a_condition_that_vanishes_at_a_given_time_acts_once(alg, direction):
    rng, N = np.random.default_rng(0), 1000
    p = np.stack([rates := rng.uniform(0.5, 2, N), times := rng.uniform(0.2, 2, N), rates * times], axis=1)
    reach = Event(lambda u, p, t: u[0] - p[2], direction=direction, affect=lambda u, p, t: [u[0], u[1] + 1, u[2]])
    given = Event(times=lambda p: [p[1]], affect=lambda u, p, t: [u[0], u[1], u[2] + 1])
    problem = ODEProblem(lambda u, p, t: [p[0] + 0 * u[0], 0 * u[1], 0 * u[2]], [0.0, 0.0, 0.0], (0.0, 3.0))
    sol = solve(EnsembleProblem(problem, p=p), alg, events=(reach, given), rtol=1e-6, atol=1e-9)
    np.testing.assert_array_equal(sol.u_end[:, 1:], 1.0)


# ---- balls


def falling(u, p, t):
    return [u[1], -p[0] + 0 * u[0]]


BOUNCE = Event(lambda u, p, t: u[0] - p[2], affect=lambda u, p, t: [u[0], -p[1] * u[1]])
HEIGHTS = np.array([[2.0, 0.3], [1.4, 1.0], [3.0, -1.0]])
BALLS = np.array([[9.81, 0.8, 0.0], [3.7, 0.7, 0.1], [9.81, 0.9, 1.0]])  # gravity, restitution, the ground's height
W = np.array([[0.7, -1.3], [0.2, 0.4], [-0.5, 0.9]])


def bouncing(height, speed, gravity, restitution, ground, end):
    """Return height and speed at the end, and when the ball was on the ground."""
    time = (speed + anp.sqrt(speed**2 + 2 * gravity * (height - ground))) / gravity
    up, times = restitution * (gravity * time - speed), [time]
    while mpiad.stop_gradient(times[-1] + 2 * up / gravity) < end:
        times.append(times[-1] + 2 * up / gravity)
        up = restitution * up
    left = end - times[-1]
    return ground + up * left - gravity * left**2 / 2, up - gravity * left, times


def bounced(u0, p, **more):
    ensemble = EnsembleProblem(ODEProblem(falling, np.ones_like(mpiad.stop_gradient(u0)[0]), (0.0, 3.0)), u0=u0, p=p)
    return solve(ensemble, **{"events": BOUNCE, "rtol": 1e-9, "atol": 1e-11, **more})


@pytest.mark.parametrize(("dtype", "exact"), [(float, 1e-10), (np.float32, 1e-4)])
def test_balls(dtype, exact):
    sol = bounced(HEIGHTS.astype(dtype), BALLS.astype(dtype), rtol=1e-9 if dtype is float else 1e-6)
    assert set(sol.retcode) == {"Success"}
    # f is called twice before the first step, and again after each event.
    np.testing.assert_array_equal(sol.nf, 2 + 6 * (sol.naccept + sol.nreject) + [len(sol.events[i]) for i in range(3)])
    for i, (u0, p) in enumerate(zip(HEIGHTS, BALLS)):
        height, speed, times = bouncing(*u0, *p, 3.0)
        np.testing.assert_allclose(sol.u_end[i], [height, speed], rtol=exact)
        np.testing.assert_allclose([time for _, time in sol.events[i]], times, rtol=0.01 * exact)


def test_fixed_steps_stay_as_long_as_they_are():
    sol = bounced(HEIGHTS, BALLS, alg=RK4(), dt=0.3)
    assert (sol.naccept <= [10 + len(sol.events[i]) for i in range(3)]).all()


@pytest.mark.few(1)
def test_derivatives_of_balls():
    def found(u0, p):
        sol = bounced(u0, p)
        return anp.sum(W * sol.u_end) + sum(time**2 for i in range(3) for _, time in sol.events[i])

    def expected(u0, p):
        total = 0.0
        for i in range(3):
            height, speed, times = bouncing(*[u0[i, c] for c in range(2)], *[p[i, j] for j in range(3)], 3.0)
            total = total + W[i, 0] * height + W[i, 1] * speed + sum(time**2 for time in times)
        return total

    check(found, expected, (0, 1), (HEIGHTS, BALLS))


@pytest.mark.few(2)
@pytest.mark.parametrize("restitution", [0.0, 0.2, 0.7])
@pytest.mark.parametrize("ground", [0.0, 1.0])
def test_a_ball_that_comes_to_rest_has_a_code_of_its_own(ground, restitution, caplog):
    p = np.array([[9.81, 0.9, ground], [9.81, restitution, ground], [9.81, 0.95, ground]])
    u0 = np.array([[1.0 + ground, 0.0]] * 3)

    def total(p):
        sol = bounced(u0, p, rtol=1e-6, atol=1e-9, saveat=[1.0, 2.9])
        assert sol.retcode.tolist() == ["Success", "Zeno", "Success"]
        return sol, anp.sum(anp.where(np.isfinite(mpiad.stop_gradient(sol.u)), sol.u, 0.0)) + anp.sum(
            sol.u_end
        ) + sol.t_reached[1]

    sol = total(p)[0]
    rest = np.sqrt(2 / 9.81) * (1 + restitution) / (1 - restitution)
    assert abs(sol.t_reached[1] - rest) < 1e-4 and np.isfinite(sol.u_end).all()
    # It drops out of the gradient, and changes no digit of the others'.
    gradient = mpiad.grad(lambda p: total(p)[1])(p)
    assert not gradient[1].any() and np.isfinite(gradient).all()
    alone = mpiad.grad(lambda p: anp.sum(bounced(u0[:1], p, rtol=1e-6, atol=1e-9, saveat=[1.0, 2.9]).u) + 0.0)(p[:1])
    assert np.isfinite(alone).all()


# ---- balls on a plate that swings, driven by a force that does, too


def driven(u, p, t):
    return [u[1], -p[0] + p[1] * anp.sin(t)]


def thrown(u, p, t):
    return [u[0] + 0 * t, -p[3] * u[1] + 0.1 * p[2] * anp.cos(p[2] * t)]


def kicked(u, p, t):
    return [u[0], u[1] + 0.3 * t * u[0]]


PLATE = Event(lambda u, p, t: u[0] - 0.1 * anp.sin(p[2] * t), affect=thrown)
KICK = Event(times=lambda p: [p[4]], affect=kicked)
# Gravity, the force, the plate's frequency, restitution, and when a kick comes.
SWUNG = np.array([[9.81, 2.0, 3.0, 0.8, 0.5], [3.7, -1.0, 2.0, 0.7, 1.31], [5.0, 3.0, 4.0, 0.9, 1.9]])
SPANS = np.array([[0.1, 2.0], [-0.3, 2.2], [0.4, 1.9]])
ABOVE = np.array([[1.0, 0.3], [1.2, 1.0], [0.8, -0.4]])
SEEN = np.array([0.45, 0.7, 1.4, 1.7])


def flown(u, start, p, t):
    """Return where a ball is that was at u at the start."""
    dt, speed = t - start, u[1] + p[1] * anp.cos(start)
    height = u[0] + speed * dt - p[0] * dt**2 / 2 + p[1] * (anp.sin(start) - anp.sin(t))
    return height, speed - p[0] * dt - p[1] * anp.cos(t)


def on_plate(u, p, span, seen):
    """Return the state at the end, those that are seen, and when the ball was on the plate or kicked."""
    (start, end), plain = span, mpiad.stop_gradient(p)
    way, goals, times, saved = np.sign(mpiad.stop_gradient(end - start)), [p[4], end], [], []
    while True:
        ahead = mpiad.stop_gradient(start) + np.linspace(1e-4, 1, 2000) * mpiad.stop_gradient(goals[0] - start)
        gap = flown([mpiad.stop_gradient(c) for c in u], mpiad.stop_gradient(start), plain, ahead)[0] - 0.1 * np.sin(
            plain[2] * ahead
        )
        below = np.flatnonzero(gap < 0)
        time = ahead[below[0]] if below.size else goals.pop(0)
        for k in range(9 if below.size else 0):  # Newton's steps, the last of which bring the derivatives
            height, speed = flown(u, start, p, time)
            step = (height - 0.1 * anp.sin(p[2] * time)) / mpiad.stop_gradient(speed - 0.1 * p[2] * anp.cos(p[2] * time))
            time = time - (step if k > 5 else mpiad.stop_gradient(step))
        saved += [
            flown(u, start, p, t)
            for t in seen
            if way * mpiad.stop_gradient(start) <= way * t < way * mpiad.stop_gradient(time)
        ]
        u = flown(u, start, p, time)
        if not goals:
            return u, saved, times
        times.append(time)
        u, start = (thrown if below.size else kicked)(u, p, time), time


@pytest.mark.few(1)
@pytest.mark.parametrize(("way", "alg"), [(1.0, Vern7()), (-1.0, RK45())], ids=["forwards", "backwards"])
def test_balls_on_a_plate(way, alg):
    sign = np.array([1.0, 1.0, 1.0, 1.0, way])

    def found(u0, p, spans):
        ensemble = EnsembleProblem(
            ODEProblem(driven, np.ones(2), (0.0, 1.0)),
            lambda prob, i, repeat: remake(prob, u0=u0[i - 1], p=p[i - 1], tspan=(spans[i - 1, 0], spans[i - 1, 1])),
        )
        sol = solve(ensemble, alg, trajectories=3, events=[KICK, PLATE], saveat=way * SEEN, **TIGHT)
        assert set(sol.retcode) == {"Success"} and sol.nreject.max() < 20  # each goes on with f as it is there
        when = sum(anp.sin((1 + k) * time) for i in range(3) for k, (_, time) in enumerate(sol.events[i]))
        return anp.sum(anp.sin(sol.u) * [1.0, 0.3]) + anp.sum(sol.u_end**2 * [1.0, 0.7]) + when

    def expected(u0, p, spans):
        total = 0.0
        for i in range(3):
            (height, speed), saved, times = on_plate(u0[i], p[i], spans[i], way * SEEN)
            assert len(saved) == 4 and len(times) > 1
            total = total + height**2 + 0.7 * speed**2 + sum(anp.sin(h) + 0.3 * anp.sin(v) for h, v in saved)
            total = total + sum(anp.sin((1 + k) * time) for k, time in enumerate(times))
        return total

    check(found, expected, (0, 1, 2), (ABOVE, SWUNG * sign, way * SPANS), tangent=False, exact=1e-8)


# ---- doses


def eliminated(u, p, t):
    return [-p[0] * u[0]]


def dosed(u0, p, alg, **more):
    """Return the concentration, with doses of p[1], and at 0, 3 p[2] and 4 of half of that for each unit that is there."""
    doses = [
        Event(times=lambda p: [p[2], p[2] + 2], affect=lambda u, p, t: [u[0] + p[1]]),
        Event(times=lambda p: [6.0, p[2] - 1], affect=lambda u, p, t: [u[0] + p[1]]),
        Event(times=lambda p: [4.0, 3.0 * p[2], 0.0, 7.5], affect=lambda u, p, t: [u[0] + 0.5 * p[1] * u[0]]),
    ]
    shared, own = (p, None) if np.ndim(p) == 1 else (None, p)
    problem = EnsembleProblem(ODEProblem(eliminated, np.ones(1), (0.0, 6.0), shared), u0=u0, p=own)
    return solve(problem, alg, events=doses, **{**TIGHT, "saveat": SAVED, **more})


SAVED = [0.0, 0.5, 1.0, 2.5, 3.0, 4.0, 5.0, 6.0]


def concentrations(u0, p, seen=SAVED):
    """Return the same by the closed form, at some times: what has come so far is left over by exp(-k t), doses included."""
    k, dose, first = p
    c, now, found = u0, 0.0, []
    kinds = [(first, 0), (first + 2, 0), (6.0, 0), (first - 1, 0), (4.0, 1), (3.0 * first, 1), (0.0, 1)]
    coming = sorted(kinds, key=lambda pair: (float(mpiad.stop_gradient(pair[0])), pair[1]))
    for t in seen:
        while coming and mpiad.stop_gradient(coming[0][0]) <= t:
            time, kind = coming.pop(0)
            if mpiad.stop_gradient(time) >= 0:
                c = c * anp.exp(-k * (time - now))
                c, now = (c + 0.5 * dose * c if kind else c + dose), time
        found.append(c if mpiad.stop_gradient(now) == t else c * anp.exp(-k * (t - now)))  # after a dose, whenever that is
    return found


DOSED, RATES = np.array([[0.5], [1.0], [0.0]]), np.array([[0.3, 0.3, 1.0], [0.1, 2.0, 0.7], [0.6, 1.0, 1.3]])


@pytest.mark.few(1)
@pytest.mark.parametrize("alg", [Vern7(), pytest.param(Rodas5P(), marks=pytest.mark.columns("one kernel is enough"))])
def test_doses(alg, solved_by):
    sol = dosed(DOSED, RATES, alg)
    expected = [concentrations(u0[0], p) for u0, p in zip(DOSED, RATES)]
    # A saved time that coincides holds the state after the doses, at the ends of tspan too.
    np.testing.assert_allclose(sol.u[..., 0], expected, rtol=1e-10)
    np.testing.assert_array_equal(sol.u_end, sol.u[:, -1])
    assert [e for e, _ in sol.events[0]] == [1, 2, 0, 0, 2, 2, 1] and sol.events[0][3] == (0, 3.0)
    weights = np.cos(np.arange(24.0)).reshape(3, 8)

    def found(u0, p):
        sol = dosed(u0, p, alg)
        return anp.sum(sol.u[..., 0] * weights) + anp.sum(sol.u_end**2) + sol.events[1][1][1]

    def exact(u0, p):
        total = p[1, 2]
        for i in range(3):
            states = concentrations(u0[i, 0], [p[i, j] for j in range(3)])
            total = total + sum(w * state for w, state in zip(weights[i], states)) + states[-1] ** 2
        return total

    # Those of the first patient come two by two, at the start and later; the others' are at times of their own.
    # Tangents are those of a replay, in columns in any case; beside kernels `test_derivatives_of_balls` has them.
    check(found, exact, (0, 1), (DOSED, RATES), tangent=isinstance(alg, Vern7) and solved_by == "columns")
    expected = mpiad.grad(
        lambda p: sum(concentrations(DOSED[i, 0], [p[i, j] for j in range(3)], [6.0])[0] ** 2 for i in range(3))
    )(RATES)
    again = mpiad.grad(lambda p: anp.sum(dosed(DOSED, p, alg, checkpoints=5).u_end ** 2))(RATES)
    np.testing.assert_allclose(again, expected, rtol=1e-10, atol=1e-10 * np.abs(expected).max())


def test_doses_that_all_trajectories_share():
    weights = np.cos(np.arange(8.0))

    def exact(p):
        every = anp.array([concentrations(u0[0], p) for u0 in DOSED])
        return anp.sum(every**2 * weights)

    found = mpiad.grad(lambda p: anp.sum(dosed(DOSED, p, Vern7()).u[..., 0] ** 2 * weights))(RATES[0])
    np.testing.assert_allclose(found, mpiad.grad(exact)(RATES[0]), rtol=1e-7)


def test_one_given_time_that_none_or_all_come_to():
    late = Event(times=lambda p: [p[1]], affect=lambda u, p, t: [u[0] + 1.0])
    problem = ODEProblem(lambda u, p, t: [p[0] * u[0]], np.ones(1), (0.0, 1.0))

    def end(p):
        return anp.sum(solve(EnsembleProblem(problem, p=p), events=late, rtol=1e-9, atol=1e-12).u_end)

    def exact(p):
        return anp.sum(anp.exp(p[:, 0]) + (p[:, 1] < 1.0) * anp.exp(p[:, 0] * (1.0 - p[:, 1])))

    for p in (np.array([[1.0, 9.0], [0.5, 8.0]]), np.array([[1.0, 0.25], [0.5, 0.5]])):
        np.testing.assert_allclose(mpiad.grad(end)(p), mpiad.grad(exact)(p), rtol=1e-7)


@pytest.mark.parametrize("more", [{}, {"checkpoints": 1}], ids=["kept", "checkpoints"])
def test_when_an_event_was_that_only_tells_where_none_acted(more):
    p = np.array([[0.9], [0.8]])
    doubled = Event(lambda u, p, t: u[0] - 2.0, terminal=False)
    high = Event(lambda u, p, t: u[0] - 20.0, affect=lambda u, p, t: [0 * u[0]])
    problem = ODEProblem(lambda u, p, t: [p[0] * u[0]], np.ones(1), (0.0, 1.0))

    def when(p):
        sol = solve(EnsembleProblem(problem, p=p), events=[doubled, high], rtol=1e-9, atol=1e-12, **more)
        return sum(time for i in range(2) for _, time in sol.events[i])

    np.testing.assert_allclose(mpiad.grad(when)(p), -np.log(2.0) / p**2, rtol=1e-7)


# ---- neurons


def charging(u, p, t):
    return [-u[0] + p[0] + p[1] * anp.sin(3.0 * t)]


def potential(v, start, p, t):
    """Return the potential at t of one that was v at the start: a driven linear equation."""
    forced = lambda t: p[0] + p[1] * (anp.sin(3.0 * t) - 3.0 * anp.cos(3.0 * t)) / 10  # noqa: E731
    return forced(t) + (v - forced(start)) * anp.exp(start - t)


def spikes(v, p, end):
    """Return when a neuron fires, and its potential at the end: roots by bisection, their derivatives by Newton's steps."""
    times, start, grid = [], 0.0, np.linspace(0, 1, 4001)
    while True:
        ahead = mpiad.stop_gradient(start) + grid * (end - mpiad.stop_gradient(start))
        above = np.flatnonzero(potential(*map(mpiad.stop_gradient, (v, start, p)), ahead) >= mpiad.stop_gradient(p[2]))
        if not above.size:
            return times, potential(v, start, p, end)
        low, high = ahead[above[0] - 1], ahead[above[0]]
        for _ in range(60):
            middle = 0.5 * (low + high)
            below = potential(*map(mpiad.stop_gradient, (v, start, p)), middle) < mpiad.stop_gradient(p[2])
            low, high = (middle, high) if below else (low, middle)
        time = high
        for _ in range(2):
            value = potential(v, start, p, time)
            slope = (
                -mpiad.stop_gradient(value)
                + mpiad.stop_gradient(p[0])
                + mpiad.stop_gradient(p[1]) * np.sin(3.0 * mpiad.stop_gradient(time))
            )
            time = time - (value - p[2]) / slope
        times.append(time)
        v, start = p[3], time


FIRE = Event(lambda u, p, t: anp.exp(u[0]) - anp.exp(p[2]), direction=1, affect=lambda u, p, t: [p[3] + 0 * u[0]])
# The current, its amplitude, the threshold, and what the potential is reset to.
NEURONS, RESTING = (
    np.array([[2.0, 0.5, 1.0, 0.0], [1.5, 0.2, 1.0, -0.5], [0.5, 0.1, 1.0, 0.0]]),
    np.array([[0.0], [0.3], [0.0]]),
)


@pytest.mark.thorough
def test_neurons():
    def fired(v, p):
        ensemble = EnsembleProblem(ODEProblem(charging, np.ones(1), (0.0, 4.0)), u0=v, p=p)
        sol = solve(ensemble, Vern7(), events=FIRE, **TIGHT)
        assert [len(sol.events.get(i, [])) for i in range(3)] == [5, 3, 0]
        return sol

    def found(v, p):
        sol = fired(v, p)
        return anp.sum(anp.sin(sol.u_end)) + sum(time**2 for i in sol.events for _, time in sol.events[i])

    def exact(v, p):
        total = 0.0
        for i in range(3):
            times, end = spikes(v[i, 0], p[i], 4.0)
            total = total + anp.sin(end) + sum(time**2 for time in times)
        return total

    value, gradients = mpiad.value_and_grad(found, (0, 1))(RESTING, NEURONS)
    expected, expectations = mpiad.value_and_grad(exact, (0, 1))(RESTING, NEURONS)
    np.testing.assert_allclose(value, expected, rtol=1e-10)
    for gradient, expectation in zip(gradients, expectations):
        np.testing.assert_allclose(gradient, expectation, rtol=1e-9, atol=1e-10 * np.abs(expectation).max())


# ---- company, codes, options


def test_company_changes_no_digit(solved_by):
    count = 40
    u0, p = np.resize(HEIGHTS, (count, 2)), np.resize(BALLS, (count, 3)) * (1 + 1e-3 * np.arange(count)[:, None])
    many = bounced(u0, p, saveat=0.5)
    for chosen in (slice(7, 8), slice(3, 5), slice(3, 17)):
        few = bounced(u0[chosen], p[chosen], saveat=0.5)
        for name in ("u", "u_end", "t_reached", "naccept", "nreject", "nf"):
            assert getattr(few, name).tobytes() == getattr(many, name)[chosen].tobytes()
    for backend in (EnsembleSerial(), EnsembleThreads(2)):
        assert bounced(u0, p, saveat=0.5, ensemblealg=backend).u.tobytes() == many.u.tobytes()


@pytest.mark.few(1)
@pytest.mark.parametrize(("end", "dtype"), [(6.0, float), (-1.0, np.float32)])
def test_doses_have_the_same_digits_where_a_gradient_is_wanted(end, dtype):
    # With checkpoints steps are recorded on the way back, of some trajectories after the other.
    count = 70
    p = np.array([0.8, 0.3, 1.0]) * (1 + 0.1 * np.arange(count)[:, None] * [1, 1, 0.2])
    p = p.astype(dtype)
    # A dose that isn't finite; and a solution that becomes so, after one that has no derivative.
    p[7, 1], p[9, 0], p[9, 1] = np.inf, -1e4, 0.0
    doses = [
        Event(times=lambda p: [p[2], 2.0 * p[2]], affect=lambda u, p, t: [u[0] + p[1]]),
        Event(
            times=[end, 0.0, 3.0, 3.0, 1.0, -0.5],
            affect=lambda u, p, t: [0.5 * u[0] + (t + 1 if dtype is float else 2.0) * anp.sqrt(p[1])],
        ),
    ]
    problem = ODEProblem(eliminated, np.ones(1, dtype), (0.0, end))
    options = {"events": doses, "saveat": [end * part for part in (0.0, 0.1, 0.5, 0.77, 1.0)], "max_steps": 60}
    assert len(set(same_digits(problem, p, options).retcode.tolist())) == 3


@pytest.mark.thorough
def test_balls_in_a_box_have_the_same_digits_where_a_gradient_is_wanted():
    # Conditions that act from one side and from both, that only tell, and that end; and a kick at a given time.
    count = 40
    p = np.array([9.81, 0.8, 0.0, 1.0]) * (1 + np.outer(np.sin(np.arange(count)), [0.2, 0.1, 0.0, 0.5]))
    p[3, 3], p[5, 1], p[11, 0] = np.inf, 0.02, 60.0  # a kick that isn't finite, a ball that rests, one that bounces often
    events = [
        BOUNCE,
        Event(lambda u, p, t: u[0] - 0.5, terminal=False),
        Event(lambda u, p, t: u[0] - 1.4, direction=1, affect=lambda u, p, t: [u[0] - 0.01 * t, -0.9 * u[1]]),
        Event(times=lambda p: [0.7, 0.1 * p[0]], affect=lambda u, p, t: [u[0], u[1] + p[3]]),
        Event(lambda u, p, t: u[1] + 4.6, direction=-1),
    ]
    problem = ODEProblem(falling, np.array([1.0, 0.5]), (0.0, 3.0))
    sol = same_digits(problem, p, {"events": events, "saveat": 0.25, "max_steps": 150, "rtol": 1e-6})
    assert {"Success", "Terminated", "Unstable", "Zeno"} <= set(sol.retcode.tolist())


def same_digits(problem, p, options):
    """Compare a solve with one that is recorded for a gradient, and return it."""

    def sum_of(sol):
        times = sum(time**2 for i in sol.events for _, time in sol.events[i])
        return anp.sum(anp.sin(sol.u_end)) + anp.sum(sol.t_reached) + times

    kept = []

    def total(p):
        # By other backends columns wait for others than they do alone.
        kept.append(solve(EnsembleProblem(problem, p=p), ensemblealg=EnsembleThreads(1), checkpoints=4, **options))
        return sum_of(kept[0])

    gradient = mpiad.grad(total)(p)
    plain, pieces = solve(EnsembleProblem(problem, p=p), **options), kept[0]
    # What fails drops out, and the others' gradient is what it is without them, by columns too.
    live = (plain.retcode == "Success") | (plain.retcode == "Terminated")
    alone = mpiad.grad(lambda p: sum_of(solve(EnsembleProblem(problem, p=p), **options, compile=False)))(p[live])
    np.testing.assert_allclose(gradient[live], alone, rtol=1e-10 if p.dtype == float else 1e-4)
    assert not gradient[~live].any()
    for name in ("u", "u_end", "t_reached", "naccept", "nreject", "nf", "retcode"):
        assert (
            mpiad.stop_gradient(getattr(plain, name)).tobytes() == mpiad.stop_gradient(getattr(pieces, name)).tobytes()
        ), name
    assert plain.events == {i: [(e, float(mpiad.stop_gradient(t))) for e, t in found] for i, found in pieces.events.items()}
    return plain


@pytest.mark.thorough
@pytest.mark.columns("it is about columns that wait for each other")
@pytest.mark.parametrize("end", [4.0, -0.5])
def test_neurons_have_the_same_digits_where_those_that_fired_re_enter_the_columns(monkeypatch, end):
    monkeypatch.setattr(working_set, "_BLOCK", 64)  # so that some wait for others
    monkeypatch.setattr(working_set, "_LEAST_COLUMNS", 64)
    p = NEURONS[0] + np.sin(np.arange(150.0))[:, None] * [1.0, 0.4, 0.1, 0.2]
    events = [
        FIRE,
        Event(lambda u, p, t: u[0] - 0.5, terminal=False),
        Event(times=lambda p: [p[0], 1.5 * p[0]], affect=lambda u, p, t: [u[0] - 0.3 * p[1]]),
        Event(times=[end], affect=lambda u, p, t: [2.0 * u[0]]),
        Event(lambda u, p, t: u[0] + 0.18, direction=1),
        Event(times=[1.0], affect=lambda u, p, t: [u[0] / (p[1] < 0.8)]),
    ]
    problem = ODEProblem(charging, np.zeros(1), (0.0, end))
    sol = same_digits(problem, p, {"events": events, "saveat": [end * part for part in (0.0, 0.1, 0.5, 0.77, 1.0)]})
    assert end < 0 or set(sol.retcode.tolist()) == {"Success", "Terminated", "Unstable"}


@pytest.mark.columns("affects are called by columns in any case")
def test_the_only_event_is_of_the_second_of_two():
    # Its affect is called with it twice, as many columns as there are trajectories.
    decay = ODEProblem(lambda u, p, t: [-u[0]], [1.0], (0.0, 1.0))
    dose = Event(times=lambda p: [p[0]], affect=lambda u, p, t: [u[0] + p[1]])
    p = np.array([[2.0, 5.0], [0.5, 3.0]])  # the first would be after the end
    sol = solve(EnsembleProblem(decay, p=p, u0=np.array([[1.0], [2.0]])), events=dose, **TIGHT)
    np.testing.assert_allclose(sol.u_end[:, 0], [np.exp(-1), 2 * np.exp(-1) + 3 * np.exp(-0.5)], rtol=1e-10)


@pytest.mark.few(1)
def test_what_ends_a_trajectory():
    decay = ODEProblem(lambda u, p, t: [-u[0]], np.array([1.0]), (0.0, 3.0))
    more = Event(times=[1.0, 2.0], affect=lambda u, p, t: [u[0] + 1.0])
    last = Event(times=[1.0], affect=lambda u, p, t: [2 * u[0]], terminal=True)
    sol = solve(decay, events=[more, last], saveat=[0.0, 1.0, 2.0], **SHARP)
    assert (sol.retcode, sol.t_reached, [e for e, _ in sol.events]) == ("Terminated", 1.0, [0, 1])
    np.testing.assert_allclose(sol.u[:2, 0], [1.0, 2 * (1 + np.exp(-1.0))], rtol=1e-11)
    np.testing.assert_allclose(solve(decay, events=[last, more], **SHARP).u_end, 1 + 2 * np.exp(-1.0), rtol=1e-11)
    at_once = [dataclasses.replace(event, times=[0.0]) for event in (last, more)]
    assert (solve(decay, events=at_once).u_end, solve(decay, events=at_once).retcode) == ([3.0], "Terminated")
    assert np.isnan(sol.u[2, 0]) and sol.u_end[0] == sol.u[1, 0]
    # One that does nothing but end it, after a dose.
    ending = [Event(lambda u, p, t: u[0] - 0.5), Event(times=lambda p: [p[0]], affect=lambda u, p, t: [u[0] + 1])]
    problem = ODEProblem(decay.f, decay.u0, decay.tspan, np.array([0.5]))
    sol = solve(problem, events=ending, **SHARP)
    np.testing.assert_allclose(sol.t_reached, 0.5 + np.log(2 * (1 + np.exp(-0.5))), rtol=1e-10)
    assert sol.retcode == "Terminated" and abs(sol.u_end[0] - 0.5) < 1e-15
    later = mpiad.grad(lambda p: solve(remake(problem, p=p), events=ending, **SHARP).t_reached)(problem.p)
    np.testing.assert_allclose(later, 1 / (1 + np.exp(-0.5)), rtol=1e-9)
    # With a dose at a constant time, t = 1/2 + log(2 (u0 exp(-1/2) + 1)).
    ending[1] = Event(times=[0.5], affect=ending[1].affect)
    reached = lambda u0, **way: solve(remake(problem, u0=u0), events=ending, **SHARP, **way).t_reached  # noqa: E731
    u0, exact = problem.u0, 1 / (1 + np.exp(0.5))
    for way in ("adjoint", "tangent"):
        np.testing.assert_allclose(mpiad.grad(partial(reached, gradient=way))(u0), exact, rtol=1e-9)
    np.testing.assert_allclose(mpiad.jvp(reached, u0, u0)[1], exact, rtol=1e-9)
    np.testing.assert_allclose(mpiad.hvp(reached)(u0, u0), -(exact**2), rtol=1e-7)
    # An affect that isn't finite, beside one that is. What a solve is remembered by tells one that ends trajectories.
    each = EnsembleProblem(ODEProblem(decay.f, decay.u0, decay.tspan), p=np.array([[0.0], [0.5]]))
    scaled = lambda u, p, t: [u[0] / p[0]]  # noqa: E731
    for ends, time, more in (
        (False, 1.0, {"times": [1.0]}), (True, 1.0, {"times": [1.0]}),
        (True, np.log(2), {"condition": lambda u, p, t: u[0] - 0.5}),
    ):  # fmt: skip
        sol = solve(each, events=Event(affect=scaled, terminal=ends, **more), **SHARP)
        assert sol.retcode.tolist() == ["Unstable", "Terminated" if ends else "Success"]
        np.testing.assert_allclose(sol.t_reached, [time, time if ends else 3.0])
        np.testing.assert_allclose(sol.u_end[:, 0], [np.exp(-time), 2 * np.exp(-time if ends else -3.0)], rtol=1e-11)
        assert len(sol.events[1]) == 1 and (ends or 0 not in sol.events)
    # One that comes again and again.
    falls = ODEProblem(lambda u, p, t: [-1.0 + 0 * u[0]], np.array([1.0]), (0.0, 3.0), np.array([1e-9]))
    up = Event(lambda u, p, t: u[0], affect=lambda u, p, t: [u[0] + p[0]])
    again = solve(falls, events=up)
    assert again.retcode == "Zeno" and again.naccept < 30 and abs(again.t_reached - 1.0) < 1e-6
    often = solve(remake(falls, p=np.array([1e-3])), events=up, max_steps=50)
    assert often.retcode == "MaxIters" and 50 <= often.naccept + often.nreject < 60
    # A singularity long after an event: what a step can be at the least is told by the end, not by the event's time.
    grows = ODEProblem(lambda u, p, t: [u[0] ** 2], np.array([0.2]), (0.0, 10.0))
    sol = solve(grows, events=Event(times=[1e-9], affect=lambda u, p, t: [1.0 * u[0]]))
    assert (sol.retcode, sol.naccept < 100) == ("DtLessThanMin", True)


GIVEN = Event(times=lambda p: [p[1]], affect=lambda u, p, t: [2.0 * u[0] + t])
ENDING = {
    "condition": (Event(lambda u, p, t: t - p[1] + 0 * u[0]), lambda u: u),
    "condition with an affect": (
        Event(lambda u, p, t: t - p[1] + 0 * u[0], affect=lambda u, p, t: [3.0 * u[0]], terminal=True), lambda u: 3 * u
    ),
    "given time": (Event(times=lambda p: [p[1]], affect=lambda u, p, t: [3.0 * u[0]], terminal=True), lambda u: 3 * u),
}  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("ending", ENDING)
def test_a_terminal_event_at_a_given_time_comes_before_the_end(ending):
    rates, (stop, before) = np.random.default_rng(1).uniform(0.2, 0.9, (400, 2)), ENDING[ending]
    decay = EnsembleProblem(ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], (-0.13, 1.7)), p=rates)
    sol = solve(decay, events=(stop, GIVEN), saveat=rates[:, 1:], **SHARP)
    assert set(sol.retcode) == {"Terminated"} and all([e for e, _ in own] == [0, 1] for own in sol.events.values())
    np.testing.assert_array_equal(sol.t_reached, rates[:, 1])
    np.testing.assert_array_equal(sol.u[:, 0], sol.u_end)

    def end(p):
        return 2 * before(anp.exp(-p[:, 0] * (p[:, 1] + 0.13))) + p[:, 1]

    np.testing.assert_allclose(sol.u_end[:, 0], end(rates), rtol=1e-10)
    found = lambda p: solve(remake(decay, p=p), events=(stop, GIVEN), **SHARP).u_end[:, 0]  # noqa: E731
    total = lambda fun: lambda p: anp.sum(fun(p) * np.arange(1.0, 9.0))  # noqa: E731
    check(total(found), total(end), (0,), (rates[:8],), exact=1e-9)


def test_a_condition_with_a_constant_rate_does_not_return_to_its_root():
    # So soon after the start, a return to the root at once would count as endless.
    count = Event(lambda u, p, t: u[0], affect=lambda u, p, t: [u[0], u[1] + 1.0])
    line = ODEProblem(lambda u, p, t: [1.0 + 0 * u[0], 0 * u[0]], np.array([-0.25, 0.0]), (0.0, 1e5))
    sol = solve(line, events=count)
    assert sol.retcode == "Success" and len(sol.events) == 1
    np.testing.assert_allclose(sol.u_end, [1e5 - 0.25, 1.0], rtol=1e-12)


def test_a_condition_that_vanishes_at_a_given_time_acts_once_and_first():
    # At the step's end, whose time rounding must not overstep.
    p = np.random.default_rng(1).uniform(0.2, 0.9, (1600, 1))
    at_condition = Event(lambda u, p, t: t - p[0] + 0 * u[0], affect=lambda u, p, t: [u[0] + 1.0])
    doubled = Event(times=lambda p: [p[0]], affect=lambda u, p, t: [2.0 * u[0]])
    still = ODEProblem(lambda u, p, t: [0 * u[0] + 0.1 * anp.sin(3 * t)], np.array([1.0]), (-0.13, 1.7))
    sol = solve(EnsembleProblem(still, p=p), events=[at_condition, doubled])
    assert all([e for e, _ in mine] == [0, 1] for mine in sol.events.values()) and len(sol.events) == len(p)


@pytest.mark.parametrize("way", [1.0, -1.0], ids=["forwards", "backwards"])
def test_a_condition_of_time_alone(way):
    # An affect leaves it at its root, and from there it goes on to the other side.
    counting = Event(lambda u, p, t: anp.sin(5.0 * t) + 0 * u[0], affect=lambda u, p, t: [u[0] + 1.0])
    still = ODEProblem(lambda u, p, t: [0 * u[0]], np.array([0.0]), (-0.1 * way, 2.0 * way))
    sol = solve(still, events=counting, dtmax=0.3, **TIGHT)
    np.testing.assert_allclose([time for _, time in sol.events], way * np.pi / 5 * np.arange(4), atol=1e-12)
    assert sol.u_end[0] == 4.0


def test_what_is_at_its_root_and_what_comes_again_at_once():
    # After the event the condition is below its root by what rounding might leave there, however flat it is.
    flat = Event(lambda u, p, t: (u[0] - 1.0) ** 3 - 1e-30 * u[1], affect=lambda u, p, t: [u[0], u[1] + 1.0])
    rising = ODEProblem(lambda u, p, t: [1.0 + 0 * u[0], 0 * u[0]], np.zeros(2), (0.0, 2.0))
    assert len(solve(rising, events=flat).events) == 1
    # A ball that hops for an instant once isn't at rest.
    hop = Event(lambda u, p, t: u[0], affect=lambda u, p, t: [u[0], 2.0 * u[2] - 7e-8 * u[1] * (1 - u[2]), u[2] + 1.0])
    balls = ODEProblem(lambda u, p, t: [u[1], -9.81 + 0 * u[0], 0 * u[0]], np.array([1.0, 0.0, 0.0]), (0.0, 0.8))
    sol, down = solve(balls, events=hop, **TIGHT), np.sqrt(2 / 9.81)
    assert sol.retcode == "Success"
    np.testing.assert_allclose([time for _, time in sol.events], [down, down * (1 + 1.4e-7)], atol=2e-9)
    up = 0.8 - down * (1 + 1.4e-7)
    np.testing.assert_allclose(sol.u_end, [2 * up - 9.81 / 2 * up**2, 2 - 9.81 * up, 2.0], rtol=1e-6)


@pytest.mark.few(1)
def test_no_step_before_the_end():
    # A tspan without length, one with, and a trajectory that is ended where it begins; all events come at times that move.
    def found(p):
        ensemble = EnsembleProblem(
            ODEProblem(eliminated, np.array([0.7]), (0.0, 1.0)),
            lambda prob, i, repeat: remake(prob, p=p[i - 1], tspan=(0.0, float(i > 1))),
        )
        dose = Event(times=lambda p: [p[2]], affect=lambda u, p, t: [u[0] * p[1] + p[1] ** 2])
        last = Event(times=lambda p: [p[3]], affect=lambda u, p, t: [3.0 * u[0]], terminal=True)
        sol = solve(ensemble, trajectories=3, events=[dose, last], saveat=[[0.0], [0.5], [0.0]], **TIGHT)
        assert sol.retcode.tolist() == ["Success", "Success", "Terminated"]
        return anp.concatenate([sol.u[:, 0, 0], sol.u_end[:, 0], sol.t_reached])

    def exact(p):
        rate, by, time, last = [p[:, j] for j in range(4)]
        after = 0.7 * anp.exp(-rate * time) * by + by**2
        at = lambda ends: after * anp.exp(-rate * (ends - time))  # noqa: E731
        ended, ones = 3.0 * at(last), np.array([0.0, 1.0, 0.0])
        saved = anp.stack([after[0], at(0.5)[1], ended[2]])
        return anp.concatenate([saved, np.array([1, 1, 0]) * at(ones) + ended * [0, 0, 1], ones + last * [0, 0, 1]])

    p = np.array([[1.2, 0.6, 0.0, 9.0], [0.9, 1.4, 0.0, 9.0], [0.3, 0.5, 0.0, 0.0]])
    np.testing.assert_allclose(found(p), exact(p), rtol=1e-10)
    weights = np.cos(np.arange(9.0))
    found, exact = (mpiad.grad(lambda p, fun=fun: anp.sum(anp.sin(weights + fun(p))))(p) for fun in (found, exact))
    np.testing.assert_allclose(found, exact, rtol=1e-9, atol=1e-12)


@pytest.mark.columns("what it is about doesn't depend on the way to run")
def test_backwards_with_steps_that_are_fixed_or_of_other_methods():
    # Backwards a dose is taken away where the solve meets it.
    grows = ODEProblem(lambda u, p, t: [-u[0]], np.array([1.0]), (3.0, 0.0))
    dose = Event(times=[2.0, 1.0], affect=lambda u, p, t: [u[0] - 0.5])
    expected = ((np.e - 0.5) * np.e - 0.5) * np.e
    for alg, more, exact in ((RK45(), TIGHT, 1e-10), (RK4(), {"dt": 0.01}, 1e-7), (Rosenbrock23(), {"rtol": 1e-6}, 1e-3)):
        sol = solve(grows, alg, events=dose, saveat=[3.0, 2.0, 0.5], **more)
        np.testing.assert_allclose(sol.u_end[0], expected, rtol=exact)
        np.testing.assert_allclose(sol.u[1, 0], np.e - 0.5, rtol=exact)
        assert [time for _, time in sol.events] == [2.0, 1.0]


@pytest.mark.columns("affects of complex states are called by columns in any case")
def test_an_affect_that_is_not_holomorphic():
    def found(p):
        turning = ODEProblem(lambda u, p, t: [1j * p[0] * u[0]], np.array([0.6 + 0.8j]), (0.0, 2.0))
        mirrored = Event(times=lambda p: [p[1]], affect=lambda u, p, t: [p[0] * anp.conj(u[0]) * t])
        return anp.real(solve(EnsembleProblem(turning, p=p), Vern7(), events=mirrored, **TIGHT).u_end[0, 0] * (2 - 1j))

    def exact(p):
        speed, time = p[0]
        phase = speed * (2.0 - 2 * time)
        real, imag = 0.6 * anp.cos(phase) + 0.8 * anp.sin(phase), 0.6 * anp.sin(phase) - 0.8 * anp.cos(phase)
        return speed * time * (2 * real + imag)

    p = np.array([[1.3, 0.7]])
    np.testing.assert_allclose(mpiad.grad(found)(p), mpiad.grad(exact)(p), rtol=1e-10)
    np.testing.assert_allclose(mpiad.jvp(found, p, p)[1], mpiad.jvp(exact, p, p)[1], rtol=1e-10)


@pytest.mark.columns("numbers as states are columns of one component")
def test_states_that_are_numbers():
    problem = ODEProblem(lambda u, p, t: -p * u, 1.0, (0.0, 2.0), 0.7)
    doubled = Event(times=[1.0], affect=lambda u, p, t: 2 * u)
    gradient = mpiad.grad(lambda k: solve(ODEProblem(problem.f, 1.0, (0.0, 2.0), k), events=doubled, **TIGHT).u_end)(0.7)
    np.testing.assert_allclose(gradient, -4 * np.exp(-1.4), rtol=1e-10)


# ---- all steps


@pytest.mark.few(1)
@pytest.mark.parametrize("alg", [Tsit5(), Rodas5P()])
def test_every_step_and_dense_output(alg):
    """A dose at given times, and a sawtooth that falls at a root: closed forms, with the states after the events."""
    problem = ODEProblem(lambda u, p, t: [-p[0] * u[0], 1 + 0 * u[1]], [1.0, 0.25], (0.0, 2.0))
    rates = np.array([[0.5], [1.0], [2.0]])
    events = (
        Event(times=[0.0, 0.7, 1.5], affect=lambda u, p, t: [u[0] + 1, u[1]]),
        Event(lambda u, p, t: u[1] - 1, affect=lambda u, p, t: [u[0], 0 * u[1]], direction=1),
    )

    def exact(t):
        amount = np.exp(-rates * t) + sum((t >= at) * np.exp(-rates * (t - at)) for at in (0.0, 0.7, 1.5))
        return np.stack([amount, np.broadcast_to((t + 0.25) % 1, amount.shape)], axis=2)

    sol = solve(
        EnsembleProblem(problem, p=rates),
        alg,
        events=events,
        rtol=1e-10,
        atol=1e-12,
        dense_output=True,
        save_everystep=True,
    )
    times = np.concatenate([np.random.default_rng(0).uniform(0, 2, 40), [0.0, 0.7, 1.5, 2.0]])
    times = times[np.abs((times + 0.25) % 1 - 0.5) < 0.499]  # the root is found up to rounding
    np.testing.assert_allclose(sol(times), exact(times), rtol=1e-7, atol=1e-9)
    np.testing.assert_array_equal(sol[1](times), sol(times)[1])
    for i, count in enumerate(sol.naccept):
        t = sol.t[i, : count + 1]
        at_root = np.abs(t - 0.75) < 1e-9
        at_root |= np.abs(t - 1.75) < 1e-9
        assert (np.diff(t) > 0).all() and at_root.sum() == 2
        np.testing.assert_allclose(sol.u[i, : count + 1][~at_root], exact(t[~at_root])[i], rtol=1e-7, atol=1e-9)
        assert (sol.u[i, : count + 1][at_root, 1] == 0).all() and np.isnan(sol.u[i, count + 1 :]).all()
