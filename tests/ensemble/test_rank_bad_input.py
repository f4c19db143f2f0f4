"""What can't be used is refused on all ranks, and what only looks so is solved: by columns and by kernels."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from mpiad.ensemble import RK45, EnsembleMPI, EnsembleProblem, Event, ODEProblem, fit, remake, solve, steady_state
from mpiad.ensemble.compiled import kernel_choice

pytestmark = pytest.mark.usefixtures("solved_by")

N = 5


def swing(u, p, t):
    return [u[1], -u[0]]


GOOD = ODEProblem(swing, [0.0, 1.0], (0.0, 1.0))
U0 = np.linspace([0.0, 1.0], [1.0, 2.0], N)


def larger_at_last(problem, i, repeat):
    return remake(problem, u0=np.zeros(3 if i == N else 2))


REFUSED = {
    "the shape of f": ({"f": lambda u, p, t: [u[0]]}, {}, ValueError, r"shape \(1, 3\).*\(2, 3\) was expected.*columns"),
    "f in place": ({"f": lambda u, p, t: u.__setitem__(0, 1.0)}, {}, TypeError, "writes into its arguments"),
    "saveat": ({}, {"saveat": [0.5, 1.5]}, ValueError, r"1.5 lies outside of \(0.0, 1.0\)"),
    "saveat as text": ({}, {"saveat": "all"}, TypeError, "saveat must be a number or an array of numbers, but got 'all'"),
    "axes of saveat": ({}, {"saveat": np.ones((N, 1, 1))}, ValueError, r"of shape \(5, n_saved\), but has \(5, 1, 1\)"),
    "rtol": ({}, {"rtol": -1.0}, ValueError, "rtol must be zero or more, and finite, but got -1.0"),
    "u0": ({"u0": ["a", "b"]}, {}, TypeError, "u0 must be numbers"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("gather", [True, False])
def test_is_refused_on_all_ranks(case, gather):
    changes, more, kind, text = REFUSED[case]
    arrays = {} if "u0" in changes else {"u0": U0}
    ensemble = EnsembleProblem(remake(GOOD, **changes), **arrays)
    with pytest.raises(kind, match=text):
        solve(ensemble, RK45(), EnsembleMPI(gather=gather), trajectories=N, **more)


def test_another_dimension_of_the_last_ranks_trajectory():
    # An f for any dimension: that of a rank's only trajectory isn't wrong by itself.
    decay = remake(GOOD, f=lambda u, p, t: -1.0 * u)
    with pytest.raises(ValueError, match=r"\(3,\)"):
        solve(EnsembleProblem(decay, larger_at_last), RK45(), EnsembleMPI(), trajectories=N)


@pytest.mark.parametrize("call", [solve, steady_state])
def test_generators_that_differ_between_ranks(call):
    # They would give each rank's share other random numbers than one rank alone draws.
    rank = MPI.COMM_WORLD.rank
    ensemble = EnsembleProblem(GOOD, lambda prob, i, repeat, rng: remake(prob, u0=rng.standard_normal(2)), rng=rank)
    if MPI.COMM_WORLD.size == 1:
        call(ensemble, RK45(), EnsembleMPI(), trajectories=N)
        return
    for rng in (rank, np.random.default_rng(rank)):
        with pytest.raises(ValueError, match=r"all ranks must give the same arguments.*rng="):
            call(remake(ensemble, rng=rng), RK45(), EnsembleMPI(), trajectories=N)


@pytest.mark.parametrize("count", [0, 1, N])
def test_fewer_trajectories_than_ranks(count):
    sol = solve(EnsembleProblem(GOOD, u0=U0[:count]), RK45(), EnsembleMPI(), rtol=1e-8)
    assert sol.u.shape == (count, 2, 2) and len(sol) == count
    a, b = U0[:count].T
    exact = np.stack([a * np.cos(1) + b * np.sin(1), b * np.cos(1) - a * np.sin(1)], axis=1)
    np.testing.assert_allclose(sol.u_end, exact, rtol=1e-6)


def test_integers_and_no_time():
    sol = solve(EnsembleProblem(GOOD, u0=np.array([[0, 1], [2, 3], [1, 1]])), RK45(), EnsembleMPI())
    assert sol.u_end.dtype == float and (sol.retcode == "Success").all()
    still = solve(EnsembleProblem(remake(GOOD, tspan=(2.0, 2.0)), u0=U0), RK45(), EnsembleMPI())
    np.testing.assert_array_equal(still.u_end, U0)
    assert not still.nf.any() and (still.retcode == "Success").all()


RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LAST = RANK == SIZE - 1
DIFFERENT = {
    "events": ({}, {"events": Event(lambda u, p, t: u[0] - 0.5) if LAST else ()}),
    "throw": ({}, {"throw": LAST}),
    "prob_func": ({"prob_func": lambda problem, i, repeat: problem} if LAST else {"u0": U0}, {}),
    "output_func": ({"output_func": lambda sol, i: (1.0, False)} if LAST else {}, {}),
    "seed": ({"rng": RANK}, {}),
}


@pytest.mark.columns("nothing is solved")
@pytest.mark.skipif(SIZE == 1, reason="one rank agrees with itself")
@pytest.mark.parametrize("case", DIFFERENT)
def test_arguments_that_differ_between_ranks(case):
    changes, more = DIFFERENT[case]
    with pytest.raises(ValueError, match="all ranks must give the same arguments"):
        solve(EnsembleProblem(GOOD, **changes), RK45(), EnsembleMPI(), trajectories=N, **more)


@pytest.mark.columns("nothing is solved")
@pytest.mark.parametrize("call", [solve, steady_state, fit])
def test_an_unknown_argument_of_one_rank(call):
    # The other ranks, which would wait for it, raise the same error.
    arguments = (lambda u, p, data: u[:, 0], np.ones((N, 1))) if call is fit else ()
    with pytest.raises(TypeError, match=rf"{call.__name__}\(\) got .* 'abstol'; the argument is called atol"):
        call(GOOD, *arguments, ensemblealg=EnsembleMPI(), **({"abstol": 1e-6} if LAST else {}))


def damped_by(value):
    return lambda u, p, t: [u[1], -u[0] - value * u[1]]


def from_rows(rows):
    return lambda problem, i, repeat: remake(problem, u0=rows[i - 1])


def crossing(level, **more):
    return {"events": Event(lambda u, p, t: u[0] - level, **{"terminal": False, **more})}


def kicking(size):
    return {"events": Event(times=[0.5], affect=lambda u, p, t: [u[0], u[1] + size])}


# Of each rank: the changes of the problem and of the ensemble, and arguments.
PROBLEMS = {
    "what f closes over": lambda x: ({"f": damped_by(x)}, {"u0": U0}, {}),
    "an array that f closes over": lambda x: ({"f": damped_by(np.full(3000, x)[0:1])}, {"u0": U0}, {}),
    "p of the problem": lambda x: ({"p": {"a": [x], "b": 1.0}}, {"u0": U0}, {}),
    "u0 of the problem": lambda x: ({"u0": [x, 1.0]}, {"u0": U0}, {}),
    "tspan": lambda x: ({"tspan": (0.0, 1.0 + x)}, {"u0": U0}, {}),
    "p": lambda x: ({}, {"p": np.linspace(0, x, N)[:, None]}, {}),
    "u0": lambda x: ({}, {"u0": U0 + x}, {}),
    "prob_func": lambda x: ({}, {"prob_func": from_rows(U0 + x)}, {}),
    "a condition": lambda x: ({}, {"u0": U0}, crossing(0.5 + x)),
    "an affect": lambda x: ({}, {"u0": U0}, kicking(x)),
    "direction": lambda x: ({}, {"u0": U0}, crossing(0.5, direction=1 if x > 0.25 else -1)),
    "terminal": lambda x: ({}, {"u0": U0}, crossing(0.5, terminal=x > 0.25)),
    "interior_points": lambda x: ({}, {"u0": U0}, crossing(0.5, interior_points=5 + (x > 0.25))),
}  # fmt: skip


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("case", PROBLEMS)
def test_problems_that_differ_between_ranks(case, gather):
    def solved(x, **more):
        changes, arrays, arguments = PROBLEMS[case](x)
        ensemble = EnsembleProblem(remake(GOOD, **changes), **arrays)
        return solve(ensemble, RK45(), **more, trajectories=N, **arguments)

    over_ranks = EnsembleMPI(gather=gather)
    alike = solved(0.25, ensemblealg=over_ranks)
    found = alike.u_end if gather else np.concatenate(MPI.COMM_WORLD.allgather(alike.u_end))
    np.testing.assert_array_equal(found, solved(0.25).u_end)
    if SIZE > 1:
        with pytest.raises(ValueError, match="all ranks must give the same arguments, but rank"):
            solved(0.25 * (1 + 1e-15 * LAST), ensemblealg=over_ranks)


@pytest.mark.columns("nothing is solved")
@pytest.mark.skipif(SIZE == 1, reason="one rank agrees with itself")
@pytest.mark.parametrize("field", ["direction", "terminal", "interior_points"])
def test_fields_of_events_that_differ_between_the_ranks_of_a_fit(field):
    value = bool(LAST) if field == "terminal" else int(LAST)
    with pytest.raises(ValueError, match="all ranks must give the same arguments"):
        fit(GOOD, lambda u, p, data: u[:, 0] - data, np.ones((N, 1)), ensemblealg=EnsembleMPI(), data=np.ones((N, 1)),
            saveat=[0.1], **crossing(0.5, **{field: value}))  # fmt: skip


@pytest.mark.columns("outputs are made of either's solutions")
@pytest.mark.parametrize("count", [1, N])
def test_outputs_that_cannot_be_sent(count):
    ensemble = EnsembleProblem(GOOD, u0=U0[:count], output_func=lambda sol, i: (lambda: sol, False))
    with pytest.raises(TypeError, match="can't be pickled.*gather=False"):
        solve(ensemble, RK45(), EnsembleMPI())
    kept = solve(ensemble, RK45(), EnsembleMPI(gather=False)).u
    assert all(output().retcode == "Success" for output in kept)


def test_complex_numbers():
    sol = solve(EnsembleProblem(GOOD, u0=U0 * 1j), RK45(), EnsembleMPI(), rtol=1e-8)
    real = solve(EnsembleProblem(GOOD, u0=U0), RK45(), EnsembleMPI(), rtol=1e-8)
    np.testing.assert_allclose(sol.u_end, 1j * real.u_end, rtol=1e-12)


def test_what_kernels_refuse_is_refused_on_all_ranks(solved_by):
    def branches(u, p, t):
        return [u[1], -u[0] if np.all(u[0] > -99) else u[0]]

    untraceable = EnsembleProblem(remake(GOOD, f=branches), u0=U0)
    if solved_by == "kernels":
        with pytest.raises(TypeError, match="test_rank_bad_input.py:"):
            solve(untraceable, RK45(), EnsembleMPI())
    else:
        assert (solve(untraceable, RK45(), EnsembleMPI()).retcode == "Success").all()


@pytest.mark.columns("kernels say why not, and raise")
def test_an_f_that_cannot_be_compiled_is_told_once_by_all_ranks(caplog, monkeypatch):
    for name in ("_LOADING", "_LOADING_COMPONENT", "_LOADING_OPERATION"):
        monkeypatch.setattr(kernel_choice, name, 0.0)

    def branches(u, p, t):
        return [u[1], -u[0] if np.all(u[0] > -99) else u[0]]

    for _ in range(2):
        solve(EnsembleProblem(remake(GOOD, f=branches), u0=U0), RK45(), EnsembleMPI(), compile="auto")
    assert ["arrays instead" in record.getMessage() for record in caplog.records] == [True] * (RANK == 0)


def test_tolerances_that_differ_behind_the_digits_that_are_shown():
    rank = MPI.COMM_WORLD.rank
    atol = np.array([1e-6, 1e-6 * (1 + 1e-12 * rank)])
    if MPI.COMM_WORLD.size == 1:
        assert solve(EnsembleProblem(GOOD, u0=U0), RK45(), EnsembleMPI(), atol=atol).survivors.all()
        return
    with pytest.raises(ValueError, match="all ranks must give the same arguments"):
        solve(EnsembleProblem(GOOD, u0=U0), RK45(), EnsembleMPI(), atol=atol)
