"""`Event.doses`: tables of doses, compared with sums of exponentials and their derivatives."""

from __future__ import annotations

import autograd.numpy as np
import numpy as onp
import pytest

import mpiad
from mpiad.ensemble import EnsembleMPI, EnsembleProblem, Event, ODEProblem, Rodas5P, solve
from mpiad.ensemble.compiled import trace

BODY = ODEProblem(lambda u, p, t: [-p["rate"] * u[0], p["rate"] * u[0]], [0.0, 0.0], (0.0, 12.0))
ROWS = {
    "rate": onp.array([0.1, 0.2, 0.4]),
    "times": onp.array([[0.0, 8.0, 3.0], [6.0, onp.inf, onp.inf], [2.0, 7.0, 5.0]]),
    "amounts": onp.array([[100.0, 50.0, 20.0], [80.0, 0.0, 0.0], [10.0, 20.0, 30.0]]),
}
TABLE = Event.doses(lambda p: p["times"], lambda p: p["amounts"], component=0)
TIGHT = {"rtol": 1e-10, "atol": 1e-12}


def exact(p, t=12.0):
    """Return the amounts in the body at time t."""
    since = np.where(p["times"] <= t, t - p["times"], np.inf)
    return np.sum(p["amounts"] * np.exp(-p["rate"][:, None] * since), axis=1)


def ended(p, mpi=False, **options):
    way = {"ensemblealg": EnsembleMPI()} if mpi else {}
    return solve(EnsembleProblem(BODY, p=p), events=TABLE, **TIGHT, **way, **options)


@pytest.mark.parametrize("mpi", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_row_per_trajectory(compiled, mpi):
    sol = ended(ROWS, mpi, compile=compiled, saveat=[4.0, 12.0])
    for k, t in enumerate((4.0, 12.0)):
        onp.testing.assert_allclose(sol.u[:, k, 0], exact(ROWS, t), rtol=1e-9)
    onp.testing.assert_allclose(sol.u_end.sum(axis=1), ROWS["amounts"].sum(axis=1), rtol=1e-9)
    assert [len(sol.events[i]) for i in range(3)] == [3, 1, 3]
    weights = onp.array([1.0, 2.0, 3.0])
    finite = ROWS | {"times": onp.where(ROWS["times"] < onp.inf, ROWS["times"], 11.0)}
    bars = [
        mpiad.grad(lambda p, f=f: np.sum(weights * f(p)), shared=True)(finite)
        for f in (lambda p: ended(p, mpi, compile=compiled).u_end[:, 0], exact)
    ]
    for name in ROWS:
        onp.testing.assert_allclose(bars[0][name], bars[1][name], rtol=1e-8, atol=1e-8, err_msg=name)


def test_simultaneous_doses_have_the_derivative_of_their_common_time():
    same = {"rate": ROWS["rate"][:1], "times": onp.array([[5.0, 5.0, 2.0]]), "amounts": onp.array([[30.0, 10.0, 20.0]])}
    moved = lambda x: same | {"times": same["times"] + x * onp.array([1.0, 1.0, 0.0])}  # noqa: E731
    bars = [mpiad.grad(lambda x, f=f: np.sum(f(moved(x))))(0.0) for f in (lambda p: ended(p).u_end[:, 0], exact)]
    assert bars[0] == pytest.approx(bars[1], rel=1e-8)


@pytest.mark.parametrize("amounts", [2.0, [2.0, 2.0, 2.0], [1.0, 4.0, 2.0]], ids=str)
def test_a_table_for_all(amounts):
    """Two doses at the same time, and one of another kind; all by a stiff method, too."""
    for alg in ({}, {"alg": Rodas5P()}):
        for compiled in (False, True):
            doses = Event.doses([6.0, 3.0, 6.0], amounts, 1)
            rate = ODEProblem(lambda u, p, t: [0 * u[0], -0.5 * u[1]], [1.0, 1.0], (0.0, 8.0))
            sol = solve(rate, events=doses, compile=compiled, **TIGHT, **alg)
            first, other, last = onp.broadcast_to(amounts, 3)
            expected = onp.exp(-4) + other * onp.exp(-2.5) + (first + last) * onp.exp(-1)
            onp.testing.assert_allclose(sol.u_end, [1.0, expected], rtol=1e-9)


def test_states_that_are_numbers_and_negative_directions():
    doses = Event.doses([1.0, 2.0], [3.0, 5.0], 0)
    assert solve(ODEProblem(lambda u, p, t: 0 * u, 1.0, (0.0, 3.0)), events=doses).u_end == pytest.approx(9.0)
    backward = solve(ODEProblem(lambda u, p, t: [0 * u[0]], [1.0], (1.5, 0.0)), events=doses)
    assert backward.u_end == pytest.approx([4.0])


BAD = {
    "negative": (([-1.0], [1.0], 0), ValueError, "times must be zero or later, but got -1.0"),
    "nan time": (([onp.nan], [1.0], 0), ValueError, "times must be zero or later, but got nan"),
    "infinite": (([1.0], [onp.inf], 0), ValueError, "amounts must be finite, but got inf"),
    "lengths": (([1.0, 2.0], [1.0], 0), ValueError, "one amount per time, but got 2 times and 1 amounts"),
    "text": ((["a"], [1.0], 0), TypeError, r"times must be numbers of shape \(K,\)"),
    "rows": (([[1.0], [2.0]], 1.0, 0), TypeError, r"times must be numbers of shape \(K,\)"),
    "component": (([1.0], 1.0, -1), ValueError, "component must be an integer, zero or more|component"),
}


@pytest.mark.parametrize(("arguments", "kind", "text"), BAD.values(), ids=BAD)
def test_bad_tables(arguments, kind, text):
    with pytest.raises(kind, match=text):
        Event.doses(*arguments)


def test_bad_tables_in_solves():
    with pytest.raises(ValueError, match="component must be less than 2, but got 2"):
        solve(EnsembleProblem(BODY, p=ROWS), events=Event.doses([1.0], 1.0, 2), ensemblealg=EnsembleMPI())
    short = Event.doses(lambda p: p["times"], lambda p: p["amounts"][:2], 0)
    with pytest.raises(ValueError, match="one amount per time, but got 3 times and 2 amounts"):
        solve(EnsembleProblem(BODY, p=ROWS), events=short, ensemblealg=EnsembleMPI())
    with pytest.raises(NotImplementedError, match="times are traced. Pass them in p"):
        mpiad.grad(lambda t: solve(BODY, events=Event.doses([t], 1.0, 0)).u_end[0])(1.0)


@pytest.mark.parametrize("amounts", [1.0, [3.0, 5.0], lambda p: [p["rate"], 2.0]])
def test_tables_made_again_are_traced_once(amounts, monkeypatch):
    traces, traced = [], trace._traced
    monkeypatch.setattr(trace, "_traced", lambda *args: traces.append(1) or traced(*args))

    def solved(first):
        doses = [Event.doses([first, 2.0], amounts, 0), Event.doses(lambda p: [first, 2.0], amounts, 0)]
        return solve(EnsembleProblem(BODY, p=ROWS), events=doses, compile=True)

    solved(1.0)
    count = len(traces)
    assert count
    solved(1.0)
    assert len(traces) == count
    assert not np.array_equal(solved(1.5).u_end, solved(1.0).u_end)
