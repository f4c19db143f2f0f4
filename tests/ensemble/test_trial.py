"""f and conditions that would couple the trajectories are refused, and f sees one form whatever is solved together."""

from __future__ import annotations

import math

import autograd
import numpy as np
import pytest

from mpiad.ensemble import EnsembleMPI, EnsembleProblem, Event, ODEProblem, remake, solve

TWO = ODEProblem(lambda u, p, t: -u, [1.0, 2.0], (0.0, 1.0))
MANY = EnsembleProblem(TWO, u0=np.array([[1.0, 2.0], [0.5, 1.0], [0.1, 0.2]]), p=np.array([1.0, 2.0, 3.0]))


@pytest.mark.serial
@pytest.mark.parametrize(
    "f",
    [
        lambda u, p, t: -u * np.sum(u**2),
        lambda u, p, t: -u * np.linalg.norm(u),
        lambda u, p, t: -u / np.max(u),
        lambda u, p, t: [u[1], -u[0] * np.dot(u[0], u[0])],
        lambda u, p, t: -u[::-1] + 1e-6 * np.sum(u),
    ],
)
def test_sums_over_all_columns_are_refused(f):
    for problem in (remake(TWO, f=f), remake(MANY, problem=remake(TWO, f=f))):
        with pytest.raises(ValueError, match="must not depend on each other.*axis=0"):
            solve(problem)


@pytest.mark.serial
def test_sums_over_parameters_of_all_columns_are_refused():
    with pytest.raises(ValueError, match="must not depend on each other"):
        solve(remake(MANY, problem=remake(TWO, f=lambda u, p, t: -u * np.sum(p))))


@pytest.mark.serial
def test_conditions_are_tried_too():
    for condition in (lambda u, p, t: u[0] - np.max(u[0]) / 2, lambda u, p, t: u[0] - np.sum(u[1])):
        with pytest.raises(ValueError, match="condition of the events.*must not depend"):
            solve(MANY, events=Event(condition))
    with pytest.raises(ValueError, match=r"shape \(\).*along axis 0"):
        solve(TWO, events=Event(lambda u, p, t: np.linalg.norm(u) - 1.0))


OF_TABLES = {
    "smallest": lambda u, p, t: -np.min(p["k"]) * u,
    "largest": lambda u, p, t: -np.max(p["k"]) * u,
    "integers": lambda u, p, t: -0.1 * np.max(p["n"]) * u,
    "booleans": lambda u, p, t: np.where(np.any(p["on"]), -u, u),
    "late": lambda u, p, t: -p["k"][0] * u + np.where(t > 0.5, np.max(p["k"]), 0.0),
}
GIVEN = {
    "doses": Event.doses([0.5], lambda p: [np.max(p["k"])], 0),
    "first of two doses": Event.doses([0.25, 0.5], lambda p: [np.max(p["k"]), 1.0], 0),
    "late affect": Event(times=[0.75], affect=lambda u, p, t: u + np.where(t > 0.5, np.max(p["k"]), 0.0)),
}
K = np.array([[0.1, 0.9], [0.4, 1.0], [0.6, 0.5]])


def of_tables(f, order=slice(None)):
    given = {
        "k": K[order],
        "n": np.array([[9, 2], [1, 4], [0, 1]])[order],
        "on": np.array([[1, 0], [0, 0], [0, 0]], bool)[order],
    }
    single = {name: rows[0] for name, rows in given.items()}
    return EnsembleProblem(ODEProblem(f, [1.0], (0.0, 1.0), single), p=given)


@pytest.mark.serial
@pytest.mark.parametrize("compile", ["auto", False, True])
@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)], ids=["in order", "reversed"])
@pytest.mark.parametrize("name", [*OF_TABLES, *GIVEN])
def test_extremes_and_what_couples_later_are_refused(name, order, compile):
    problem = of_tables(OF_TABLES.get(name, lambda u, p, t: -p["k"][0] * u), order)
    with pytest.raises(ValueError, match="must not depend on each other"):
        solve(problem, events=GIVEN.get(name, ()), compile=compile)


@pytest.mark.serial
@pytest.mark.parametrize("compile", [False, True])
def test_extremes_along_the_components_pass(compile):
    def f(u, p, t):
        on = np.any(p["on"], axis=0)
        return np.where(on, -1.0, -0.1) * np.max(p["n"], axis=0) * u + np.where(t > 0.5, np.min(p["k"], axis=0), 0.0)

    dose = Event.doses([0.25, 0.75], lambda p: [np.max(p["k"], axis=0), np.min(p["k"], axis=0)], 0)
    found = solve(of_tables(f), rtol=1e-10, atol=1e-10, dtmax=0.05, events=dose, compile=compile).u_end[:, 0]
    rate, least, most = np.array([9.0, 0.4, 0.1]), K.min(axis=1), K.max(axis=1)
    expected = np.exp(-rate) + most * np.exp(-0.75 * rate) + least * np.exp(-0.25 * rate)
    np.testing.assert_allclose(found, expected + least * (1 - np.exp(-0.5 * rate)) / rate, rtol=1e-6)


@pytest.mark.serial
def test_infinite_states_are_no_coupling():
    assert solve(remake(TWO, u0=[np.inf, 1.0])).retcode == "Unstable"
    assert solve(remake(TWO, u0=[np.nan, 1.0])).retcode == "Unstable"


@pytest.mark.serial
@pytest.mark.parametrize(
    "problem, arguments, kind, text",
    [
        (remake(TWO, f=lambda u, p, t: u if u[0] > 0 else -u), {}, ValueError, r"np\.where"),
        (remake(TWO, f=lambda u, p, t: [math.sin(u[0]), u[1]]), {}, TypeError, r"np\.sin"),
        (remake(TWO, u0=[]), {}, ValueError, r"shape \(0,\)"),
        (remake(TWO, tspan=("a", 1.0)), {}, ValueError, "two real numbers.*'a'"),
        (remake(TWO, tspan=(0.0, 1j)), {}, ValueError, "two real numbers"),
        (remake(MANY, u0=[[1.0, 2.0]] * 3), {}, ValueError, r"np\.array"),
        (TWO, {"events": lambda u, p, t: u[0]}, TypeError, r"Event\(condition\)"),
        (TWO, {"events": 3}, TypeError, "but got 3"),
    ],
)
def test_mistakes_say_what_to_write(problem, arguments, kind, text):
    with pytest.raises(kind, match=text):
        solve(problem, **arguments)


@pytest.mark.serial
def test_conditions_can_not_close_over_what_is_traced():
    def when(p):
        return solve(remake(TWO, p=p), events=Event(lambda u, q, t: u[0] - p)).t_reached

    with pytest.raises(NotImplementedError, match="condition closes over a traced value.*Pass it as p"):
        autograd.grad(when)(0.5)


@pytest.mark.serial
def test_what_is_written_for_columns_passes():
    # A product whose terms cancel leaves nothing but rounding, another one for another number of columns.
    n = 200
    laplacian = 1e8 * (np.diag(-2 * np.ones(n)) + np.diag(np.ones(n - 1), 1) + np.diag(np.ones(n - 1), -1))
    laplacian[0] = laplacian[-1] = 0
    mixed = np.linalg.qr(np.random.default_rng(0).standard_normal((n, n)))[0]
    heat = ODEProblem(lambda u, p, t: mixed.T @ (laplacian @ (mixed @ u)), mixed.T @ np.linspace(0, 1, n), (0.0, 1e-12))
    assert solve(heat).retcode == "Success"
    # Where the states beside it may not lie, nothing can be said.
    edge = ODEProblem(lambda u, p, t: _inside(u) * -1.0, [1.0, 0.0], (0.0, 1.0))
    assert solve(edge).retcode == "Success"


def _inside(u):
    if u.min() < 0 or u.max() > 1:
        raise ValueError("outside of the table")
    return u


def _by_table(prob, i, repeat):
    table = [np.array([1.0, 2.0]), np.array([3.0, 4.0])]
    return remake(prob, p={"own": np.array([1.0, 2.0]) * i, "two": _TABLE[(i - 1) // 2], "all": _ALL, "new": table[0]})


_TABLE = [np.array([1.0, 2.0]), np.array([3.0, 4.0])]
_ALL = np.array([[1.0, 0.5], [0.0, 1.0]])


def test_parameters_have_one_form_whatever_is_solved_together():
    def f(u, p, t):
        return -p["own"] * u - p["all"] @ u - p["two"] * u - p["new"] * u

    def single(u, p, t):  # what comes from a table can't be told from what all share where there is one
        return -p["own"] * u - p["all"] @ u - p["two"][:, None] * u - p["new"] * u

    ensemble = EnsembleProblem(remake(TWO, f=f), _by_table)
    whole = solve(ensemble, trajectories=4, rtol=1e-8)
    for batch_size in (1, 2, 3):
        parts = solve(ensemble, trajectories=4, rtol=1e-8, batch_size=batch_size)
        np.testing.assert_allclose(parts.u_end, whole.u_end, rtol=1e-14)
    np.testing.assert_allclose(
        solve(ensemble, ensemblealg=EnsembleMPI(), trajectories=4, rtol=1e-8).u_end, whole.u_end, rtol=1e-14
    )
    one = solve(EnsembleProblem(remake(TWO, f=single), _by_table), trajectories=1, rtol=1e-8)
    np.testing.assert_allclose(one.u_end, whole.u_end[:1], rtol=1e-14)


@pytest.mark.serial
@pytest.mark.usefixtures("solved_by")
def test_conditions_see_states_as_f_does():
    fall = ODEProblem(lambda u, p, t: -p * u, 1.0, (0.0, 5.0), 2.0)
    half = Event(lambda u, p, t: u - 0.5)
    sol = solve(fall, events=half, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(sol.t_reached, np.log(2) / 2, rtol=1e-8)

    def when(p):
        return solve(remake(fall, p=p), events=half, rtol=1e-10, atol=1e-10).t_reached

    np.testing.assert_allclose(autograd.grad(when)(2.0), -np.log(2) / 4, rtol=1e-7)
    np.testing.assert_allclose(autograd.grad(autograd.grad(when))(2.0), np.log(2) / 4, rtol=1e-6)
    with pytest.raises(NotImplementedError, match=r"u0 has shape \(2, 3\)"):
        solve(ODEProblem(lambda u, p, t: -u, np.ones((2, 3)), (0.0, 1.0)), events=Event(lambda u, p, t: u[0]))


@pytest.mark.serial
def test_integers_among_given_times_are_compared_too():
    problem = of_tables(lambda u, p, t: -p["k"][0] * u)
    with pytest.raises(ValueError, match=r"times\(p\) of the events returns \[9\].*must not depend"):
        solve(problem, events=Event(times=lambda p: [np.max(p["n"])], affect=lambda u, p, t: u))
