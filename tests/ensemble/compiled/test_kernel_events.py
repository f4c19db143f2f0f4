"""Events in kernels: what the vectorised path finds, at the same times."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import autograd.numpy as np
import numpy as onp
import pytest
from ode_systems import lotka_volterra

import mpiad
from mpiad.ensemble import (
    RK4,
    RK45,
    EnsembleProblem,
    EnsembleThreads,
    Event,
    ODEProblem,
    PIController,
    Tsit5,
    differentiable,
    remake,
    solve,
)
from mpiad.ensemble.compiled import kernel_derivatives, kernel_solver, traced_problem, work_shares

pytestmark = [pytest.mark.serial, pytest.mark.limit(240)]

N = 2000
RNG = onp.random.default_rng(5)
U0 = RNG.uniform(0.3, 2.0, (N, 2))
P = RNG.uniform(0.5, 1.5, (N, 4))
SPANS = onp.stack([onp.zeros(N), RNG.uniform(2.0, 6.0, N)], axis=1)
SPANS[::3] = -SPANS[::3]  # some go backwards
SPANS[7] = 0.0
TIMES = SPANS[:, 1:] * onp.array([0.1, 0.5, 0.9, 1.0])
# Prey passes its equilibrium on the way, twice a round; some trajectories end where there are too many predators.
PASSING = Event(lambda u, p, t: u[0] * p[2] - p[3], terminal=False)
RISING = Event(lambda u, p, t: u[1] - 1.1 + 0.01 * np.sin(t), terminal=False, direction=1)
ENDING = Event(lambda u, p, t: u[1] - 2.5, direction=1)
THINNED = Event(lambda u, p, t: u[0] - 0.2, direction=-1)
EVENTS = (PASSING, RISING, ENDING, THINNED)
TIGHT = {"rtol": 1e-7, "atol": 1e-9, "events": EVENTS}


def waves(rows=slice(None), u0=U0, p=P):
    u0, p, spans = u0[rows], p[rows], SPANS[rows]
    base = ODEProblem(lotka_volterra, u0[0], (0.0, 1.0), p[0])
    return EnsembleProblem(
        base, lambda prob, i, repeat: remake(prob, u0=u0[i - 1], p=p[i - 1], tspan=(spans[i - 1, 0], spans[i - 1, 1]))
    )


def both(problem, *args, **more):
    return [solve(problem, *args, compile=choice, **more) for choice in (False, True)]


def check_events(a, b, rtol=1e-12):
    for name in ("retcode", "naccept", "nreject", "nf"):
        onp.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    assert {i: [event for event, _ in found] for i, found in a.events.items()} == {
        i: [event for event, _ in found] for i, found in b.events.items()
    }
    times = [[time for i in sorted(sol.events) for _, time in sol.events[i]] for sol in (a, b)]
    onp.testing.assert_allclose(*times, rtol=rtol)
    onp.testing.assert_allclose(a.t_reached, b.t_reached, rtol=rtol)
    onp.testing.assert_allclose(a.u, b.u, rtol=100 * rtol, atol=100 * rtol)
    onp.testing.assert_allclose(a.u_end, b.u_end, rtol=100 * rtol, atol=100 * rtol)


@pytest.mark.thorough
def test_thousands_of_which_some_have_events():
    columns, kernels = both(waves(), trajectories=N, saveat=TIMES, **TIGHT)
    ended = columns.retcode == "Terminated"
    assert 0.05 * N < ended.sum() < 0.8 * N and 0 < len(columns.events) < N
    assert {event for found in columns.events.values() for event, _ in found} == {0, 1, 2, 3}
    assert onp.isnan(columns.u[ended]).any()
    check_events(columns, kernels)
    assert "condition2" in kernels.problem.kernel_source()


def test_company_threads_batches_little_room_and_many_calls(monkeypatch):
    whole = solve(waves(), trajectories=N, saveat=TIMES, compile=True, **TIGHT)
    monkeypatch.setattr(kernel_solver, "_EVENT_ROWS", 0)
    again = solve(waves(), RK45(), EnsembleThreads(3), trajectories=N, saveat=TIMES, compile=True, batch_size=700, **TIGHT)
    assert again.u.tobytes() == whole.u.tobytes() and again.t_reached.tobytes() == whole.t_reached.tobytes()
    assert again.events == whole.events
    # A call for each turn.
    for name, value in {"_turns_of": WeakKeyDictionary(), "_FIRST": 1, "_SECONDS": 0.0}.items():
        monkeypatch.setattr(work_shares, name, value)
    rows = slice(300, 330)
    few = solve(waves(rows), trajectories=30, saveat=TIMES[rows], compile=True, **TIGHT)
    assert few.u.tobytes() == whole.u[rows].tobytes()
    assert [few.events.get(i) for i in range(30)] == [whole.events.get(i + 300) for i in range(30)]


def test_another_method():
    rows, alg = slice(0, 60), Tsit5(PIController(beta=0.3))
    check_events(*both(waves(rows), alg, trajectories=60, rtol=1e-6, events=EVENTS))


def test_events_that_act_take_the_same_steps():
    # Predators are driven away wherever prey passes a level, which it has still passed then; there is a harvest, too. Both
    # controllers forget the error before.
    rows = slice(0, 60)
    driven = [
        Event(lambda u, p, t: u[0] - 1.2 - 0.1 * np.sin(t), affect=lambda u, p, t: [u[0], 0.8 * u[1]]),
        Event(lambda u, p, t: u[0] - 0.8, direction=1, affect=lambda u, p, t: [u[0], u[1] + 0.3]),
    ]
    harvest = Event(times=lambda p: [p[0], -p[1]], affect=lambda u, p, t: [0.9 * u[0], u[1] + 0.1 * np.sin(t)])
    more = {"trajectories": 60, "rtol": 1e-6, "events": (*EVENTS, *driven, harvest)}
    columns, kernels = both(waves(rows), Tsit5(PIController(beta=0.3)), **more)
    check_events(columns, kernels, rtol=1e-10)
    assert max(len([e for e, _ in found if e == 4]) for found in columns.events.values()) > 1


def test_every_step_and_between_steps():
    rows = slice(0, 50)
    columns, kernels = both(waves(rows), trajectories=50, save_everystep=True, dense_output=True, **TIGHT)
    check_events(columns, kernels)
    for a, b in zip(columns, kernels):
        onp.testing.assert_allclose(a.t, b.t, rtol=1e-10)
        times = onp.linspace(0, 0.999 * float(a.t_reached), 5)
        onp.testing.assert_allclose(a(times), b(times), rtol=1e-10)


def loss(u0, p, **more):
    rows = slice(0, len(u0))
    sol = solve(waves(rows, u0, p), trajectories=len(u0), saveat=TIMES[rows], **TIGHT, **more)
    weights = np.cos(np.arange(sol.u.size)).reshape(sol.u.shape)
    saved = np.where(onp.isnan(mpiad.stop_gradient(sol.u)), 0.0, sol.u)
    on_the_way = sum(np.sin(time) * (1 + event) for found in sol.events.values() for event, time in found)
    return np.sum(weights * saved**2) + np.sum(sol.u_end**3) + np.sum(sol.t_reached**2) + on_the_way


@pytest.mark.few(1)
@pytest.mark.parametrize("more", [{}, {"checkpoints": 3}, {"gradient": "tangent"}], ids=str)
def test_gradients_through_the_times_of_events(more, monkeypatch):
    count = 12 if "gradient" in more else 80
    assert {"Terminated", "Success"} == set(solve(waves(slice(0, count)), trajectories=count, **TIGHT).retcode)
    expected = mpiad.grad(loss, (0, 1))(U0[:count], P[:count], compile=False, **more)
    for module in (differentiable, kernel_derivatives):
        monkeypatch.setattr(module, "pull_run", None)  # no arrays in secret
    found = mpiad.grad(loss, (0, 1))(U0[:count], P[:count], compile=True, **more)
    for a, b in zip(expected, found):
        onp.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * onp.abs(a).max())


def test_single_precision():
    u0, p = U0[:30].astype(onp.float32), P[:30].astype(onp.float32)
    problem = EnsembleProblem(ODEProblem(lotka_volterra, u0[0], (0.0, 4.0)), u0=u0, p=p)
    events = (PASSING, ENDING)
    # With fixed steps all operations but those of the interpolant are equal, bit for bit.
    columns, kernels = both(problem, RK4(), dt=0.05, events=events)
    assert "Terminated" in columns.retcode and kernels.u.dtype == onp.float32
    check_events(columns, kernels, rtol=3e-6)

    def total(u0, compile):
        sol = solve(remake(problem, u0=u0), RK4(), dt=0.05, events=events, compile=compile)
        on_the_way = sum(time for found in sol.events.values() for _, time in found)
        return np.sum(sol.u_end**2) + np.sum(sol.t_reached) + on_the_way

    a, b = (mpiad.grad(total)(u0, choice) for choice in (False, True))
    assert b.dtype == onp.float32
    onp.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * onp.abs(a).max())


@pytest.mark.few(1)
@pytest.mark.parametrize("more", [{"save_everystep": True}, {"saveat": [0.5, 1.0, 3.0], "rtol": 1e-3}], ids=["all", "few"])
def test_gradients_where_every_step_is_saved_or_the_ends_move(more):
    def total(u0, end, compile):
        problem = EnsembleProblem(
            ODEProblem(lotka_volterra, u0[0], (0.0, 1.0), P[0]),
            lambda prob, i, repeat: remake(prob, u0=u0[i - 1], tspan=(0.1 * end, end)),
        )
        sol = solve(problem, trajectories=len(u0), compile=compile, **{**TIGHT, **more})
        saved = np.where(onp.isnan(mpiad.stop_gradient(sol.u)), 0.0, sol.u)
        return np.sum(sol.u_end**2) + np.sum(sol.t_reached) + np.sum(saved[:, 1:3])

    for argnums in ((0,), (0, 1)):
        found = (mpiad.grad(total, argnums)(U0[:20], 4.0, choice) for choice in (False, True))
        for a, b in zip(*found):
            onp.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9 * onp.abs(a).max())


@pytest.mark.usefixtures("free")
def test_time_in_single_precision_goes_the_vectorised_way(caplog):
    problem = EnsembleProblem(ODEProblem(lotka_volterra, onp.ones(2, onp.float32), (0.0, 1.0)), p=P.astype(onp.float32))
    with pytest.raises(ValueError, match="compile=True"):
        solve(problem, events=Event(lambda u, p, t: t - 0.25)).problem.kernel_source()
    (record,) = caplog.records
    assert "test_kernel_events.py" in record.getMessage() and "time" in record.getMessage()
    with pytest.raises(TypeError, match=r"condition.*test_kernel_events.py:\d+.*time"):
        solve(problem, events=Event(lambda u, p, t: t - 0.25), compile=True)


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize("kind", ["a condition of the events", "an affect"])
def test_what_branches_is_told_once(kind, caplog):
    def branches(u, p, t):
        return u - 1.0 if onp.all(u > 0) else u

    event = Event(branches) if kind != "an affect" else Event(times=[0.5], affect=branches, terminal=True)
    problem = EnsembleProblem(ODEProblem(lambda u, p, t: -p * u, 2.0, (0.0, 1.0)), p=onp.linspace(0.5, 2, 1000))
    for _ in range(2):
        sol = solve(problem, events=event)
        assert (sol.retcode == "Terminated").any()
    (record,) = caplog.records
    assert kind in record.getMessage() and "test_kernel_events.py" in record.getMessage()
    with pytest.raises(TypeError, match=rf"{kind} can't be compiled: .*test_kernel_events.py:\d+"):
        solve(problem, compile=True, events=event)


@pytest.mark.usefixtures("free")
def test_conditions_that_do_something_else_with_numbers(caplog):
    problem = EnsembleProblem(ODEProblem(lambda u, p, t: [-u[0]], [1.0], (0.0, 1.0)), u0=onp.ones((1000, 1)))

    def kinds(u, p, t):
        return u[0] - (0.5 if type(u) is onp.ndarray else 0.4)

    sol = solve(problem, events=Event(kinds))
    onp.testing.assert_allclose(sol.t_reached, onp.log(2), rtol=1e-3)
    assert "types of its arguments" in caplog.text


@pytest.mark.usefixtures("free")
def test_conditions_that_change_from_solve_to_solve(caplog, monkeypatch):
    monkeypatch.setattr(traced_problem, "_MOST_PROGRAMS", 1)
    problem = EnsembleProblem(ODEProblem(lambda u, p, t: [-u[0]], [1.0], (0.0, 1.0)), u0=onp.ones((1000, 1)))
    for n in (2, 3):
        sol = solve(problem, rtol=1e-6, events=Event(lambda u, p, t: u[0] ** n - 0.5))  # noqa: B023
        onp.testing.assert_allclose(sol.t_reached, onp.log(2) / n, rtol=1e-5)
    assert "a condition of the events has performed different operations" in caplog.text


def test_from_a_root_ties_and_failures():
    # At u = 1 both events are at once; the first trajectory starts there, and the fast ones have a pole.
    f = lambda u, p, t: [p[0] * u[0] ** 2]  # noqa: E731
    problem = EnsembleProblem(
        ODEProblem(f, [1.0], (0.0, 1.0)), u0=onp.array([[1.0], [0.5], [0.5], [0.9], [1.0]]),
        p=onp.array([[0.5], [0.2], [1.5], [2.0], [3.0]]),
    )  # fmt: skip
    events = (Event(lambda u, p, t: u[0] - 1.0, terminal=False), Event(lambda u, p, t: 2.0 * (u[0] - 1.0), terminal=False))
    columns, kernels = both(problem, events=events, max_steps=300)
    assert {"Success", "DtLessThanMin"} <= set(columns.retcode) or "MaxIters" in columns.retcode
    assert columns.events and columns.events.keys() == kernels.events.keys()
    onp.testing.assert_array_equal(columns.retcode, kernels.retcode)
    for i, found in columns.events.items():
        assert [event for event, _ in found] == [0, 1] == [event for event, _ in kernels.events[i]]
        onp.testing.assert_allclose([t for _, t in found], [t for _, t in kernels.events[i]], rtol=1e-12)
