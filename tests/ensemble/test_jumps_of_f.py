"""A right-hand side that jumps at the time of an event: values and derivatives in closed form."""

from __future__ import annotations

import itertools
import logging

import autograd.numpy as anp
import numpy as np
import pytest

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
TIGHT = {"rtol": 1e-7, "atol": 1e-9}
P = np.array([[0.7, 0.9], [0.4, 1.3], [1.1, 0.5]])  # the time of the jump, and the rate

pytestmark = [pytest.mark.serial, pytest.mark.limit(240), pytest.mark.usefixtures("solved_by")]
on_gpus_too = pytest.mark.parametrize("solved_by", ["columns", "kernels", "device", "gpu"], indirect=True)


def earlier(u, p, t):
    return [-p[1] * u[0] + anp.where(t < p[0], 1.0, 3.0)]


def not_later(u, p, t):
    return [-p[1] * u[0] + anp.where(t <= p[0], 1.0, 3.0)]


def closed_form(p, start=0.0, end=1.3, before=1.0, after=3.0):
    jump, rate = p[:, 0], p[:, 1]
    first, second = anp.exp(-rate * (jump - start)), anp.exp(-rate * (end - jump))
    return second * (0.5 * first + before * (1 - first) / rate) + after * (1 - second) / rate


SWITCH = Event(times=lambda p: [p[0]], affect=lambda u, p, t: [u[0]])
CLOCK = Event(lambda u, p, t: t - p[0], affect=lambda u, p, t: [u[0]])
SWITCHED = Event(lambda u, p, t: t - p[0])
both_sides = pytest.mark.parametrize("f", [earlier, not_later], ids=lambda f: f.__name__)


def ends(f, alg, events=SWITCH, tspan=(0.0, 1.3), **more):
    more = TIGHT | ({"dt": 0.025} if isinstance(alg, RK4) else {}) | more
    return lambda p: solve(EnsembleProblem(ODEProblem(f, [0.5], tspan), p=p), alg, events=events, **more).u_end[:, 0]


def check(found, expected, p=P, rtol=2e-6):
    along = np.cos(np.arange(p.size)).reshape(p.shape)
    loss = lambda fun: lambda p: anp.sum(anp.sin(fun(p)))  # noqa: E731
    np.testing.assert_allclose(found(p), expected(p), rtol=rtol)
    slopes = mpiad.grad(loss(expected))(p)
    np.testing.assert_allclose(mpiad.grad(loss(found))(p), slopes, rtol=rtol, atol=rtol)
    np.testing.assert_allclose(mpiad.jvp(loss(found), p, along)[1], np.sum(slopes * along), rtol=rtol, atol=rtol)


@pytest.mark.few(2)
@both_sides
@pytest.mark.parametrize("events", [SWITCH, CLOCK], ids=["time", "condition"])
@pytest.mark.parametrize("alg", METHODS, ids=lambda alg: type(alg).__name__)
def test_at_a_given_time_and_at_roots_of_conditions_of_time(alg, events, f):
    less = {"rtol": 1e-6, "atol": 1e-8} if isinstance(alg, (BS3, Rosenbrock23)) else {}
    check(ends(f, alg, events, **less), closed_form, rtol=2e-4 if less else 2e-6)


@pytest.mark.few(2)
@on_gpus_too
@both_sides
@pytest.mark.parametrize("alg", [RK45(), Tsit5(), Rodas5P(), RK4()], ids=lambda alg: type(alg).__name__)
def test_terminal_events_at_roots_of_conditions_of_time(alg, solved_by, f):
    check(ends(f, alg, SWITCHED), lambda p: closed_form(p, end=p[:, 0]))


@on_gpus_too
@pytest.mark.parametrize("alg", [RK45(), Tsit5(), Rodas5P(), RK4()], ids=lambda alg: type(alg).__name__)
def test_terminal_events_at_roots_of_conditions_of_u_and_of_time(alg, solved_by):
    """The event of u comes before the other one, or after it."""
    falling = Event(lambda u, p, t: u[0] - 0.6)
    sol = solve(
        EnsembleProblem(ODEProblem(earlier, [0.5], (0.0, 1.3)), p=P),
        alg,
        events=(falling, SWITCHED),
        **TIGHT | {"dt": 0.02},
    )
    assert (sol.retcode == "Terminated").all()
    times = -np.log((0.6 - 1 / P[:, 1]) / (0.5 - 1 / P[:, 1])) / P[:, 1]
    np.testing.assert_allclose(sol.t_reached, np.minimum(times, P[:, 0]), rtol=1e-6)


@pytest.mark.few(1)
def test_with_checkpoints_backwards_and_to_second_order():
    check(ends(not_later, RK45(), checkpoints=3), closed_form)
    # Backwards in time the jump is passed from the other side.
    for events in (SWITCH, Event(lambda u, p, t: p[0] - t, affect=lambda u, p, t: [u[0]])):
        for f in (earlier, not_later):
            check(ends(f, RK45(), events, tspan=(1.3, 0.0)), lambda p: closed_form(p, 1.3, 0.0, 3.0, 1.0))
    loss, along = lambda fun: lambda p: anp.sum(anp.sin(fun(p))), np.cos(np.arange(6.0)).reshape(3, 2)  # noqa: E731
    found, expected = (mpiad.hvp(loss(fun))(P, along) for fun in (ends(not_later, RK45()), closed_form))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_at_saved_times():
    saved = lambda p: solve(  # noqa: E731
        EnsembleProblem(ODEProblem(not_later, [0.5], (0.0, 1.3)), p=p), events=SWITCH, saveat=[0.4, 0.7, 1.1, 1.3], **TIGHT
    ).u[:, -1, 0]
    check(saved, closed_form)


def test_single_precision():
    p = P.astype(np.float32)
    for problem_f in (earlier, not_later):
        found = lambda p, f=problem_f: solve(  # noqa: E731
            EnsembleProblem(ODEProblem(f, np.array([0.5], np.float32), (0.0, 1.3)), p=p),
            events=SWITCH,
            rtol=1e-4,
            atol=1e-5,
        ).u_end[:, 0]
        slopes = mpiad.grad(lambda p: anp.sum(closed_form(p)))(P)
        np.testing.assert_allclose(mpiad.grad(lambda p, f=found: anp.sum(f(p)))(p), slopes, rtol=2e-3, atol=2e-3)


# Right-hand sides of t and p[0], and whether their derivatives lack the effect of a jump.
IN_TIME = {
    "jump": (lambda u, p, t: anp.where(t < p[0], 1.0, 3.0), True),
    "difference": (lambda u, p, t: anp.where(t - p[0] >= 0, u[0], 0.0), True),
    "window": (lambda u, p, t: anp.where(abs(t - 0.8) < 0.3 * p[0], 1.0, 0.0), True),
    "two": (lambda u, p, t: anp.where((t > 0.2) & (t < p[0]), 1.0, 0.0), True),
    "steep": (lambda u, p, t: anp.where(t < p[0], 0.0, 1e6 * (t - p[0])), False),
    "continuous": (lambda u, p, t: anp.where(t < p[0], 0.0, t - p[0]), False),
    "by u": (lambda u, p, t: anp.where(t < p[0], 0.0, (t - p[0]) * u[0]), False),
    "later": (lambda u, p, t: anp.where(t < 9.0 + p[0], 1.0, 3.0), False),
    "constant": (lambda u, p, t: anp.where(t < mpiad.stop_gradient(p[0]), 1.0, 3.0), False),
    "number": (lambda u, p, t: anp.where(t < 0.7, 1.0, 3.0), False),
}


lines = itertools.count()


def new_f(jump):
    """A right-hand side with its own line: a warning is logged once per line."""
    return eval("\n" * next(lines) + "lambda u, p, t: [-p[1] * u[0] + jump(u, p, t)]", {"jump": jump})  # noqa: S307


def warnings_of(caplog, run):
    caplog.clear()
    with caplog.at_level(logging.WARNING, "mpiad"):
        run()
    return [text for text in caplog.messages if "Event(times=lambda p: [p[0]]" in text]


# f isn't traced in a solve by device arrays.
@pytest.mark.parametrize("name", IN_TIME)
@pytest.mark.parametrize("solved_by", ["columns", "kernels", "gpu"], indirect=True)
def test_warning_about_a_jump_without_an_event(name, solved_by, caplog):
    jump, is_lost = IN_TIME[name]
    f = new_f(jump)
    end = lambda p: anp.sum(ends(f, RK45(), (), rtol=1e-3, atol=1e-5)(p))  # noqa: E731
    assert not warnings_of(caplog, lambda: end(P))
    if solved_by != "gpu":  # whose kernels compute values with tangents
        assert not warnings_of(caplog, lambda: mpiad.jvp(lambda p: end(mpiad.stop_gradient(p)) * p[0, 0], P, P))
    assert len(warnings_of(caplog, lambda: mpiad.grad(end)(P))) == is_lost
    assert not warnings_of(caplog, lambda: mpiad.grad(end)(1.01 * P))


@pytest.mark.few(1)
@pytest.mark.parametrize("solved_by", ["columns", "kernels"], indirect=True)
def test_no_warning_if_an_event_occurs_at_the_jump(solved_by, caplog):
    acting = Event(lambda u, p, t: t - p[0], affect=lambda u, p, t: [u[0]])
    for events in (SWITCH, SWITCHED, acting, Event(times=lambda p: [0.1, p[0]], affect=lambda u, p, t: [2 * u[0]])):
        f = new_f(IN_TIME["jump"][0])
        assert not warnings_of(caplog, lambda e=events, f=f: mpiad.grad(lambda p: anp.sum(ends(f, RK45(), e)(p)))(P))
    for events in (Event(lambda u, p, t: t - p[0], terminal=False), Event(times=[0.3], affect=lambda u, p, t: [2 * u[0]])):
        f = new_f(IN_TIME["jump"][0])
        run = lambda e=events, f=f: mpiad.jvp(lambda p: anp.sum(ends(f, RK45(), e)(p)), P, P)  # noqa: E731
        assert len(warnings_of(caplog, run)) == 1


@pytest.mark.parametrize("solved_by", ["columns", "kernels"], indirect=True)
def test_fixed_steps_keep_their_size(solved_by):
    # The step from 0.25 that ends at 0.3 is taken again up to the root at 0.28.
    events = (
        Event(times=[0.3], affect=lambda u, p, t: [u[0]]),
        Event(lambda u, p, t: t - 0.28, affect=lambda u, p, t: [u[0]]),
    )
    sol = solve(ODEProblem(lambda u, p, t: [-u[0]], [1.0], (0.0, 1.0)), RK4(), dt=0.0625, events=events)
    # 4 steps to 0.25, to 0.28, to 0.3, and 12 from there (11.2 rounded up).
    assert (sol.naccept, sol.nreject) == (18, 1)
    np.testing.assert_allclose(sol.u_end, [np.exp(-1.0)], rtol=1e-6)
