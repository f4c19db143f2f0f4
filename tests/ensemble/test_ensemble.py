"""Ensembles as a whole: prob_func and its generators, output_func, reduction, batches, progress."""

from __future__ import annotations

import numpy as np
import pytest
from ode_systems import decay

from mpiad.ensemble import (
    EnsembleProblem,
    EnsembleSerial,
    EnsembleThreads,
    EnsembleVectorized,
    ODEProblem,
    remake,
    solve,
)

pytestmark = pytest.mark.serial

BASE = ODEProblem(decay, [1.0], (0.0, 1.0), 1.0)


def numbered(prob, i, repeat):
    return remake(prob, p=0.1 * i)


def noisy(prob, i, repeat, rng):
    return remake(prob, u0=rng.standard_normal(1), p=rng.uniform(0.5, 2))


def test_numbers_count_from_one():
    seen = []

    def prob_func(prob, i, repeat):
        seen.append((i, repeat))
        return prob

    solve(EnsembleProblem(BASE, prob_func=prob_func), trajectories=5, batch_size=2)
    assert seen == [(i, 1) for i in range(1, 6)]


def test_times_of_batches():
    ends = [1.0, 1.0, 2.0, 2.0, 3.0]
    ensemble = EnsembleProblem(BASE, prob_func=lambda prob, i, repeat: remake(prob, tspan=(0.0, ends[i - 1])))
    for size in (None, 1, 2, 3, 4):
        sol = solve(ensemble, trajectories=5, batch_size=size)
        np.testing.assert_array_equal(sol.t, np.stack([np.zeros(5), ends], axis=1))
        np.testing.assert_array_equal(sol.t_reached, ends)


@pytest.mark.parametrize("times", [{"saveat": np.arange(10.0).reshape(5, 2) / 10}, {"save_everystep": True}])
def test_times_of_batches_whose_states_are_reduced(times):
    ensemble = EnsembleProblem(BASE, p=np.linspace(1.0, 40.0, 5))
    expected = solve(ensemble, **times)
    ends = expected.u_end[:, 0].tolist()
    for reduced in (
        {"output_func": lambda sol, i: (float(sol.u_end[0]), False)},
        {"reduction": lambda u, outputs, numbers: (u + [float(sol.u_end[0]) for sol in outputs], False)},
    ):
        sol = solve(remake(ensemble, **reduced), batch_size=2, **times)
        np.testing.assert_array_equal(sol.t, expected.t)
        assert sol.u == ends


def test_generators_depend_on_seed_and_number_alone():
    ensemble = EnsembleProblem(BASE, prob_func=noisy, rng=3)
    sol = solve(ensemble, trajectories=20)
    for backend in (EnsembleSerial(), EnsembleThreads(2), EnsembleVectorized()):
        again = solve(ensemble, ensemblealg=backend, trajectories=20, batch_size=7)
        assert again.u.tobytes() == sol.u.tobytes()
    np.testing.assert_array_equal(solve(ensemble, trajectories=6).u, sol.u[:6])
    assert len(np.unique(sol.u[:, 0])) == 20
    assert not np.array_equal(solve(remake(ensemble, rng=4), trajectories=20).u, sol.u)
    fresh = remake(ensemble, rng=None)
    assert not np.array_equal(solve(fresh, trajectories=3).u, solve(fresh, trajectories=3).u)


def test_outputs():
    ensemble = EnsembleProblem(BASE, prob_func=numbered, output_func=lambda sol, i: ((i, sol.u_end[0]), False))
    sol = solve(ensemble, trajectories=6, rtol=1e-8, batch_size=4)
    assert [i for i, _ in sol.u] == list(range(1, 7))
    np.testing.assert_allclose([u for _, u in sol.u], np.exp(-0.1 * np.arange(1, 7)), rtol=1e-6)
    assert sol.u_end.shape == (6, 1) and not sol.converged


def test_a_trajectory_is_solved_again_until_it_is_good(monkeypatch):
    tries = []

    def prob_func(prob, i, repeat, rng):
        tries.append((i, repeat, rng.random()))
        return remake(prob, u0=np.array([float(repeat)]))

    ensemble = EnsembleProblem(BASE, prob_func, lambda sol, i: (sol.u[0, 0], i == 2 and sol.u[0, 0] < 3), rng=1)
    sol = solve(ensemble, trajectories=3)
    assert sol.u == [1.0, 3.0, 1.0]
    assert [try_[:2] for try_ in tries] == [(1, 1), (2, 1), (3, 1), (2, 2), (2, 3)]
    assert len({draw for *_, draw in tries}) == 5
    monkeypatch.setattr("mpiad.ensemble.reduction._MOST_REPEATS", 20)
    with pytest.raises(ValueError, match="again 20 times"):
        solve(EnsembleProblem(BASE, output_func=lambda sol, i: (None, True)), trajectories=1)


def test_reduction_stops_early():
    seen = []

    def reduction(u, batch, I):  # noqa: N803
        seen.append((list(I), len(batch)))
        total = u + sum(batch)
        return total, total > 5.5

    ensemble = EnsembleProblem(
        BASE, numbered, output_func=lambda sol, i: (sol.u[0, 0], False), reduction=reduction, u_init=0.0
    )
    sol = solve(ensemble, trajectories=10, batch_size=3)
    assert sol.u == 6.0 and sol.converged and len(sol) == 6
    assert seen == [([1, 2, 3], 3), ([4, 5, 6], 3)]
    whole = solve(remake(ensemble, reduction=lambda u, batch, I: (u + len(batch), False)), trajectories=10, batch_size=3)
    assert whole.u == 10 and not whole.converged
    plain = solve(EnsembleProblem(BASE, reduction=lambda u, batch, I: (u + batch, False)), trajectories=4)
    assert [one.retcode for one in plain.u] == ["Success"] * 4


@pytest.mark.parametrize("name, text", [("output_func", r"\(output, rerun\)"), ("reduction", r"\(u, converged\)")])
def test_wrong_returns(name, text):
    with pytest.raises(TypeError, match=f"{name} must return {text}, but returned float 3.0"):
        solve(EnsembleProblem(BASE, **{name: lambda *a: 3.0}), trajectories=2)


def test_single_solutions():
    sol = solve(EnsembleProblem(BASE, prob_func=numbered), trajectories=4, saveat=0.5)
    assert len(list(sol)) == len(sol) == 4
    one = sol[-1]
    alone = solve(numbered(BASE, 4, 1), saveat=0.5)
    np.testing.assert_array_equal(one.u, alone.u)
    assert (one.retcode, one.naccept, one.nf, one.t_reached) == ("Success", alone.naccept, alone.nf, 1.0)
    with pytest.raises(IndexError):
        sol[4]


def test_progress(capsys):
    sol = solve(EnsembleProblem(BASE, prob_func=numbered), trajectories=50, progress=True, batch_size=20)
    assert len(sol) == 50 and "trajectories: 100%" in capsys.readouterr().err.splitlines()[-1]
    stops = EnsembleProblem(BASE, prob_func=numbered, reduction=lambda u, batch, I: (u + batch, True))
    solve(stops, trajectories=50, progress=True, batch_size=20)
    assert "| 20/50 [" in capsys.readouterr().err.splitlines()[-1]


def test_progress_of_threads(capsys):
    solve(EnsembleProblem(BASE, prob_func=numbered), ensemblealg=EnsembleThreads(3), trajectories=50, progress=True)
    assert "| 50/50 [" in capsys.readouterr().err.splitlines()[-1]


def test_progress_of_kernels(capsys):
    still = remake(BASE, tspan=(0.0, 0.0))
    for problem in (BASE, still):
        solve(EnsembleProblem(problem), trajectories=50, progress=True, compile=True)
        assert "| 50/50 [" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("name", ["prob_func", "output_func", "reduction"])
def test_what_is_no_function_is_refused(name):
    with pytest.raises(TypeError, match=f"{name} must be a function, but got int 3"):
        EnsembleProblem(BASE, **{name: 3})


def test_progress_counts_what_has_no_way_to_go(capsys):
    still = EnsembleProblem(BASE, lambda prob, i, repeat: remake(prob, tspan=(0.0, i - 1.0)))
    solve(still, trajectories=3, progress=True)
    assert "| 3/3 [" in capsys.readouterr().err.splitlines()[-1]
