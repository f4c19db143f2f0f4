"""Gradients of solves, beside those of the same steps unrolled by hand."""

from __future__ import annotations

import math

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from ode_systems import lorenz
from unrolled_steps import CLASSIC, DORMAND_PRINCE, unrolled

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
    Tsit5,
    remake,
    solve,
    steady_state,
)

pytestmark = pytest.mark.serial
both = pytest.mark.usefixtures("solved_by")

COARSE = {"rtol": 1e-4, "atol": 1e-7}
EXACT = 1e-12
SAVED = [0.0, 0.13, 0.13, 0.5, 0.51, 0.77, 1.0]


def forced(u, p, t):
    return [u[1], -p[0] * anp.sin(u[0]) - p[1] * u[1] * anp.exp(-t) + 0.3 * anp.cos(3 * t)]


def rotating(u, p, t):
    return [1j * p[0] * u[0] * anp.abs(u[1]), -p[1] * u[1] + 0.1 * u[0] ** 2]


def draws(*shape, seed=0):
    return np.random.default_rng(seed).uniform(0.5, 1.5, shape)


def steps_of(f, u0, p, span, alg=None, **more):
    """Return the times between which a trajectory steps."""
    return solve(ODEProblem(f, u0, span, p), alg or RK45(), save_everystep=True, compile=False, **more).t


def close(a, b, bound=EXACT):
    scale = max(np.abs(b).max(), 1e-30)
    assert np.abs(np.asarray(a) - np.asarray(b)).max() <= bound * scale, (a, b)


def by_hand(f, u0, p, times, saveat, weights, w_end, table):
    """Return value and gradients of the weighted sum of saved and final states of one trajectory."""

    def loss(u0, p, ends):
        saved, end = unrolled(f, u0, p, times, saveat, table, ends[0], ends[1])
        terms = [anp.sum(anp.real(w * u) + 0.1 * anp.abs(u) ** 2) for w, u in zip(weights, saved)]
        return sum(terms) + anp.sum(anp.real(w_end * end))

    ends = np.array([times[0], times[-1]])
    return loss(u0, p, ends), *(autograd.grad(loss, k)(u0, p, ends) for k in range(3))


def one_solve(f, u0, p, ends, saveat, weights, w_end, alg, more):
    sol = solve(ODEProblem(f, u0, (ends[0], ends[1]), p), alg, saveat=saveat, **more)
    return anp.sum(anp.real(weights * sol.u) + 0.1 * anp.abs(sol.u) ** 2) + anp.sum(anp.real(w_end * sol.u_end))


CASES = {
    "non-autonomous": (forced, draws(2), draws(2, seed=1), (0.0, 1.0), RK45(), DORMAND_PRINCE, COARSE),
    "backward": (forced, draws(2), draws(2, seed=1), (1.0, 0.0), RK45(), DORMAND_PRINCE, COARSE),
    "complex": (rotating, draws(2) + 1j * draws(2, seed=3), draws(2, seed=1), (0.0, 1.0), RK45(), DORMAND_PRINCE, COARSE),
    "fixed": (forced, draws(2), draws(2, seed=1), (0.0, 1.0), RK4(), CLASSIC, {"dt": 0.07}),
    "tsitouras": (
        forced, draws(2), draws(2, seed=1), (0.0, 1.0), Tsit5(),
        (Tsit5.tableau.a, Tsit5.tableau.c, Tsit5.tableau.dense), COARSE,
    ),
}  # fmt: skip
ALONE = {
    "tsitouras": pytest.mark.columns("its kernels differ from the first in numbers only"),
}
every_case = pytest.mark.parametrize("case", [pytest.param(case, marks=ALONE.get(case, ())) for case in CASES])


@both
@every_case
def test_one_trajectory_by_u0_p_and_tspan(case):
    f, u0, p, span, alg, table, more = CASES[case]
    saveat = SAVED if span[0] < span[1] else SAVED[::-1]
    weights, w_end = draws(len(saveat), 2, seed=5) * (1 + 1j * np.iscomplexobj(u0)), draws(2, seed=6)
    times = steps_of(f, u0, p, span, alg, **more)
    value, *expected = by_hand(f, u0, p, times, saveat, weights, w_end, table)
    loss = lambda u0, p, ends: one_solve(f, u0, p, ends, saveat, weights, w_end, alg, more)  # noqa: E731
    found = mpiad.value_and_grad(loss, (0, 1, 2))(u0, p, np.array(span))
    close(found[0], value)
    for a, b in zip(found[1], expected):
        close(a, b)


@pytest.mark.few(1)
@both
@pytest.mark.parametrize("gradient", ["adjoint", "tangent"])
@pytest.mark.parametrize("alg", [RK4(), Rodas5P()])
def test_states_saved_at_the_ends_of_steps_by_the_times_at_which_steps_start(alg, gradient):
    dose = Event(times=lambda p: [p[1]], affect=lambda u, p, t: [u[0] + 1.0])
    problem = ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], (0.0, 1.0), [0.8])
    steps = {"dt": 0.125, "dtmax": 0.125, "rtol": 1e9, "atol": 1e9}
    times, weights = np.array([0.5, 0.75, 1.0]), np.array([1.0, -2.0, 3.0, 1.5, -0.5])

    def saved(x):  # the start and end of tspan, with which the last saved time moves, the rate and the time of a dose
        first = solve(remake(problem, p=x[2:3], tspan=(x[0], x[1])), alg, saveat=times, gradient=gradient, **steps).u
        dosed = solve(remake(problem, p=x[2:]), alg, events=dose, saveat=times[:2], gradient=gradient, **steps).u
        return anp.sum(anp.concatenate([first, dosed])[:, 0] ** 2 * weights)

    def exact(x):
        first = anp.exp(-x[2] * (anp.concatenate([times[:2], x[1:2]]) - x[0]))
        dosed = anp.exp(-x[2] * times[:2]) + anp.exp(-x[2] * (times[:2] - x[3]))
        return anp.sum(anp.concatenate([first, dosed]) ** 2 * weights)

    x, v = np.array([0.0, 1.0, 0.8, 0.25]), np.array([0.3, 0.2, -0.5, 0.4])
    close(mpiad.grad(saved)(x), autograd.grad(exact)(x), 1e-4)
    close(mpiad.jvp(saved, x, v)[1], autograd.grad(exact)(x) @ v, 1e-4)
    close(mpiad.hvp(saved)(x, v), autograd.hessian(exact)(x) @ v, 1e-3)


@both
@pytest.mark.parametrize("gradient", ["adjoint", "tangent"])
def test_spans_of_length_zero_by_their_ends(gradient):
    def last(x):  # start, ends of two trajectories, and u0: the first trajectory takes no step
        tspan = anp.stack([anp.stack([x[0], x[1]]), anp.stack([x[0], x[2]])])

        def members(problem, i, repeat):
            return remake(problem, u0=x[3:], tspan=(tspan[i - 1, 0], tspan[i - 1, 1]))

        problem = EnsembleProblem(ODEProblem(lambda u, p, t: [p[0] * t * u[0]], [1.0], (0.0, 1.0), [0.8]), members)
        sol = solve(problem, trajectories=2, gradient=gradient, rtol=1e-10, atol=1e-12)
        return sol.u_end[0, 0] ** 2 * sol.u_end[1, 0] + sol.u[0, -1, 0]

    def exact(x):
        first, second = (x[3] * anp.exp(0.4 * (end**2 - x[0] ** 2)) for end in (x[1], x[2]))
        return first**2 * second + first

    x, v = np.array([1.0, 1.0, 1.5, 1.2]), np.array([0.3, 0.2, -0.5, 0.4])
    close(mpiad.grad(last)(x), autograd.grad(exact)(x), 1e-8)
    close(mpiad.jvp(last, x, v)[1], autograd.grad(exact)(x) @ v, 1e-8)
    close(mpiad.hvp(last)(x, v), autograd.hessian(exact)(x) @ v, 1e-7)


@both
def test_padded_saved_states_of_a_span_of_length_zero():
    def squares(x):  # the first trajectory has one saved time, the second has three
        def members(problem, i, repeat):
            return remake(problem, u0=x[:1], p=x[1:], tspan=(0.0, i - 1.0))

        problem = EnsembleProblem(ODEProblem(lambda u, p, t: [p[0] * t * u[0]], [1.0], (0.0, 1.0), [0.8]), members)
        u = solve(problem, trajectories=2, saveat=0.5, rtol=1e-10, atol=1e-12).u
        return anp.sum(anp.where(np.isfinite(mpiad.stop_gradient(u)), u**2, 0.0))

    def exact(x):
        return x[0] ** 2 * (2 + anp.exp(0.25 * x[1]) + anp.exp(x[1]))

    x = np.array([1.2, 0.8])
    close(mpiad.grad(squares)(x), autograd.grad(exact)(x), 1e-8)


@both
@pytest.mark.parametrize("gradient", ["adjoint", "tangent"])
def test_a_span_of_length_zero_beside_a_trajectory_that_an_event_changes(gradient):
    halved = Event(times=[1.3], affect=lambda u, p, t: [0.5 * u[0]])

    def last(x):
        def members(problem, i, repeat):
            return remake(problem, u0=x[2:], tspan=(x[0], x[1] if i == 1 else 1.5))

        problem = EnsembleProblem(ODEProblem(lambda u, p, t: [p[0] * t * u[0]], [1.0], (0.0, 1.0), [0.8]), members)
        sol = solve(problem, trajectories=2, gradient=gradient, events=halved)
        return 0.25 * sol.u_end[0, 0] + 0.75 * sol.u[0, -1, 0]

    x = np.array([1.0, 1.0, 1.2])
    close(mpiad.grad(last)(x), [-0.96, 0.96, 1.0], 1e-12)
    close(mpiad.jvp(last, x, np.array([0.3, 0.2, 0.4]))[1], 0.304, 1e-12)


@both
@every_case
def test_plain_autograd_agrees(case):
    f, u0, p, span, alg, _, more = CASES[case]
    saveat = SAVED if span[0] < span[1] else SAVED[::-1]
    weights, w_end = draws(len(saveat), 2, seed=5), draws(2, seed=6)
    loss = lambda u0, p, ends: one_solve(f, u0, p, ends, saveat, weights, w_end, alg, more)  # noqa: E731
    args = u0, p, np.array(span)
    for theirs, ours in zip(autograd.grad(lambda args: loss(*args))(args), mpiad.grad(loss, (0, 1, 2))(*args)):
        close(theirs, ours)


def ensemble_loss(f, u0, p, saveat, weights, more):
    sol = solve(EnsembleProblem(ODEProblem(f, np.ones(u0.shape[1]), (0.0, 1.0)), u0=u0, p=p), saveat=saveat, **more)
    return anp.sum(weights * sol.u) + anp.sum(sol.u_end**2)


def test_each_trajectory_of_an_ensemble():
    u0, p = draws(4, 3), 20 * draws(4, 1, seed=1)
    p[0], weights = 1.0, draws(4, len(SAVED), 3, seed=5)
    found = mpiad.grad(lambda u0, p: ensemble_loss(lorenz, u0, p, SAVED, weights, COARSE), (0, 1))(u0, p)
    ensemble = EnsembleProblem(ODEProblem(lorenz, u0[0], (0.0, 1.0)), u0=u0, p=p)
    assert len(set(solve(ensemble, compile=False, **COARSE).naccept)) > 1
    for i in (0, 3):
        times = steps_of(lorenz, u0[i], p[i], (0.0, 1.0), **COARSE)

        def loss(u0, p, i=i, times=times):
            saved, end = unrolled(lorenz, u0, p, times, SAVED)
            return sum(anp.sum(w * u) for w, u in zip(weights[i], saved)) + anp.sum(end**2)

        for of_all, expected in zip(found, autograd.grad(loss, (0, 1))(u0[i], p[i])):
            close(of_all[i], expected)


def shared_loss(theta, backend=None):
    def member(problem, i, repeat):
        return mpiad.ensemble.remake(problem, u0=[0.5 + i / 10 * theta[0], 0.2], p=[theta[1], 0.3], tspan=(0.0, theta[2]))

    ensemble = EnsembleProblem(ODEProblem(forced, [0.5, 0.2], (0.0, 1.0), [1.0, 0.3]), member)
    sol = solve(ensemble, RK45(), *([] if backend is None else [backend]), trajectories=5, saveat=[0.0, 0.4], **COARSE)
    return anp.sum(anp.abs(1 - sol.u)) + anp.sum(sol.u_end[:, 0])


def test_what_prob_func_closes_over():
    theta = np.array([0.3, 1.1, 1.2])
    expected = np.zeros(3)
    for i in range(1, 6):
        times = steps_of(forced, [0.5 + i / 10 * 0.3, 0.2], [1.1, 0.3], (0.0, 1.2), **COARSE)

        def loss(theta, i=i, times=times):
            u0 = anp.array([0.5 + i / 10 * theta[0], 0.2])
            saved, end = unrolled(forced, u0, [theta[1], 0.3], times, [0.0, 0.4], end=theta[2])
            return sum(anp.sum(anp.abs(1 - u)) for u in saved) + end[0]

        expected += autograd.grad(loss)(theta)
    close(mpiad.grad(shared_loss)(theta), expected)


@pytest.mark.parametrize("backend", [EnsembleSerial(), EnsembleThreads(2)])
def test_backends_agree(backend):
    theta = np.array([0.3, 1.1, 1.2])
    close(mpiad.grad(shared_loss)(theta, backend), mpiad.grad(shared_loss)(theta))


def test_shared_parameters_in_a_matrix_product():
    w, u0 = draws(2, 2, seed=7), draws(6, 2)

    def loss(w):
        problem = ODEProblem(lambda u, p, t: anp.tanh(anp.dot(p["w"], u)) - u, np.ones(2), (0.0, 2.0), {"w": w})
        return anp.sum(solve(EnsembleProblem(problem, u0=u0), saveat=0.5, **COARSE).u ** 2)

    def one(w, u0, times):
        saved, _ = unrolled(lambda u, p, t: anp.tanh(anp.dot(p, u)) - u, u0, w, times, np.linspace(0, 2, 5))
        return sum(anp.sum(u**2) for u in saved)

    expected = np.zeros((2, 2))
    for row in u0:
        times = steps_of(lambda u, p, t: np.tanh(np.dot(p, u)) - u, row, w, (0.0, 2.0), **COARSE)
        expected += autograd.grad(one)(w, row, times)
    close(mpiad.grad(loss)(w), expected)


def test_states_within_one_ode():
    w, u0 = draws(2, 2, seed=7), np.array([[0.0, 1, 2], [0, 0, 0]])

    def f(u, p, t):
        return anp.dot(p, anp.tanh(u)) - u

    def loss(w, u0):
        return anp.sum(solve(ODEProblem(f, u0, (0.0, 2.0), w), saveat=0.7, **COARSE).u ** 2)

    def one(w, u0):
        saved, _ = unrolled(f, u0, w, times, [0.0, 0.7, 1.4, 2.0])
        return sum(anp.sum(u**2) for u in saved)

    times = steps_of(f, u0, w, (0.0, 2.0), **COARSE)
    for k in range(2):
        close(mpiad.grad(loss, k)(w, u0), autograd.grad(one, k)(w, u0))


@pytest.mark.parametrize("gradient", ["adjoint", "tangent"])
def test_f_that_a_program_replays_or_that_is_called_again(gradient):
    """A branch on values can't be traced, so steps call this f again; both have the same derivatives."""

    def checked(u, p, t):
        assert np.all(autograd.tracer.getval(u[0]) < 1e6)
        return forced(u, p, t)

    def loss(x, f):
        ensemble = EnsembleProblem(ODEProblem(f, x["u0"], (0.0, 1.0)), p=x["p"])
        return anp.sum(solve(ensemble, saveat=SAVED, gradient=gradient, compile=False).u ** 2)

    found, expected = (mpiad.grad(loss)({"u0": draws(2), "p": draws(3, 2, seed=1)}, f) for f in (checked, forced))
    for name in ("u0", "p"):
        close(found[name], expected[name])


@pytest.mark.parametrize("compiled", [False, "auto"])
def test_values_by_getval_are_constants(compiled):
    from autograd.tracer import getval

    def loss(p, value):
        ensemble = EnsembleProblem(ODEProblem(lambda u, p, t: [-p * value(u[0]) * u[0]], np.ones(1), (0.0, 1.0)), p=p)
        return anp.sum(solve(ensemble, saveat=SAVED, compile=compiled).u ** 2)

    p = np.array([0.5, 1.0])
    close(mpiad.grad(loss)(p, getval), mpiad.grad(loss)(p, mpiad.stop_gradient))


def test_single_precision():
    u0, p = draws(3, 2).astype(np.float32), draws(3, 2, seed=1).astype(np.float32)
    weights = draws(3, 3, 2, seed=5)
    found = mpiad.grad(lambda u0, p: ensemble_loss(forced, u0, p, 0.5, weights, {}), (0, 1))(u0, p)
    exact = mpiad.grad(lambda u0, p: ensemble_loss(forced, u0, p, 0.5, weights, {}), (0, 1))(
        u0.astype(float), p.astype(float)
    )
    for a, b in zip(found, exact):
        assert a.dtype == np.float32
        close(a, b, 1e-4)


@pytest.mark.few(1)
@both
def test_every_step_saved():
    u0, p = draws(3, 3), 10 * draws(3, 1, seed=1)

    def every_step(u0):
        return solve(EnsembleProblem(ODEProblem(lorenz, u0[0], (0.0, 1.0)), u0=u0, p=p), save_everystep=True, **COARSE)

    def loss(u0):
        sol = every_step(u0)
        return anp.sum(anp.where(np.isnan(mpiad.stop_gradient(sol.u)), 0.0, sol.u) ** 2)

    found, t = mpiad.grad(loss)(u0), every_step(u0).t
    assert np.isnan(t).any()
    for i in range(3):
        times = t[i, ~np.isnan(t[i])]

        def one(u0, times=times, i=i):
            return sum(anp.sum(u**2) for u in unrolled(lorenz, u0, p[i], times, times)[0])

        close(found[i], autograd.grad(one)(u0[i]))


@pytest.mark.serial
@pytest.mark.parametrize("compiled", [False, True], ids=["columns", "kernels"])
@pytest.mark.parametrize("gradient", [None, "adjoint", "tangent"])
def test_variables_that_change_after_a_solve(compiled, gradient):
    """f and events read the values of a loop's variables at the time of the solve, also when derivatives are computed."""

    def total(p):
        found = 0.0
        for k, dose in enumerate((1.0, 2.0)):
            rate = lambda: dose  # noqa: B023, E731
            decay = ODEProblem(lambda u, p, t: [-rate() * p[0] * u[0]], [1.0], (0.0, 1.0), p)  # noqa: B023
            given = Event(times=lambda p: [0.25 * dose], affect=lambda u, p, t: [u[0] + dose * p[0]])  # noqa: B023
            events = given if k else ()
            how = {"rtol": 1e-10, "atol": 1e-12, "compile": compiled, "gradient": gradient}
            found = found + solve(decay, events=events, **how).u_end[0]
        return found

    p = 0.75
    # exp(-p) + exp(-2p) + 2p exp(-2p (1 - 0.5))
    expected = -math.exp(-p) - 2 * math.exp(-2 * p) + 2 * math.exp(-p) - 2 * p * math.exp(-p)
    np.testing.assert_allclose(mpiad.grad(total)(np.array([p])), [expected], 1e-7)


@pytest.mark.serial
def test_steady_states_and_variables_that_change():
    def total(p):
        found = 0.0
        for a in (1.0, 2.0):
            rest = ODEProblem(lambda u, p, t: [a * p[0] - u[0]], [1.0], (0.0, 1.0), p)  # noqa: B023
            found = found + steady_state(rest).u[0]
        return found

    np.testing.assert_allclose(mpiad.grad(total)(np.array([1.5])), [3.0], 1e-9)
