"""The ranks of `EnsembleMPI` choose between arrays and kernels together, also if their caches differ."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from mpiad.ensemble import EnsembleMPI, EnsembleProblem, ODEProblem, Tsit5, fit, remake, solve, steady_state
from mpiad.ensemble.compiled import kernel_choice

SWING = ODEProblem(lambda u, p, t: [u[1], -p[0] * u[0]], [1.0, 0.0], (0.0, 20.0), [2.0])
ENSEMBLE = EnsembleProblem(SWING, p=np.linspace(1.0, 2.0, 5)[:, None])


@pytest.fixture
def comm():
    return MPI.COMM_WORLD


@pytest.fixture
def cheap(monkeypatch):
    """Loading costs nothing, and compiling takes ages."""
    for name, value in {"_LOADING": 1e-9, "_LOADING_COMPONENT": 0.0, "_LOADING_OPERATION": 0.0, "_LINES": 1e6}.items():
        monkeypatch.setattr(kernel_choice, name, value)


def ways(comm, sol):
    """Return `execution` of all ranks, which is the same, and whether the solve used a kernel."""
    found = comm.allgather((sol.execution, bool(sol.problem._kernels)))
    assert len({text for text, _ in found}) == 1
    return found[0][0], any(kernel for _, kernel in found)


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("gather", [True, False])
def test_a_kernel_is_taken_if_all_ranks_have_it(comm, rank, size, gather, monkeypatch):
    last = size - 1
    monkeypatch.setattr(kernel_choice, "is_cached", lambda *known: rank != last)
    text, kernel = ways(comm, solve(ENSEMBLE, Tsit5(), EnsembleMPI(gather=gather), rtol=1e-6))
    assert text.startswith("arrays: estimated ") and "compiling" in text and not kernel
    kernel_choice._histories.clear()
    monkeypatch.setattr(kernel_choice, "is_cached", lambda *known: True)
    assert ways(comm, solve(ENSEMBLE, Tsit5(), EnsembleMPI(gather=gather), rtol=1e-6)) == ("kernel: in the cache", True)
    assert ways(comm, solve(ENSEMBLE, Tsit5(), EnsembleMPI(gather=gather), rtol=1e-6)) == ("kernel: in memory", True)


@pytest.mark.usefixtures("cheap")
def test_all_ranks_choose_the_same_for_one_problem(comm, rank, monkeypatch):
    monkeypatch.setattr(kernel_choice, "is_cached", lambda *known: rank > 0)
    sol = solve(SWING, Tsit5(), EnsembleMPI())
    assert "compiling" in sol.execution and len(set(comm.allgather(sol.execution))) == 1
    monkeypatch.setattr(kernel_choice, "_LINES", 0.0)
    kernel_choice._histories.clear()
    found = [solve(SWING, Tsit5(), EnsembleMPI()).execution for _ in range(2)]
    assert found == ["kernel: in the cache", "kernel: in memory"]


def test_the_choice_depends_on_the_whole_ensemble(comm, monkeypatch):
    """With other solves on some ranks, and the same number of solves until a kernel pays, on any number of ranks."""
    monkeypatch.setattr(kernel_choice, "_LINES", 1.1e-5)
    monkeypatch.setattr(kernel_choice, "is_cached", lambda *known: False)
    if comm.rank == 1:
        solve(SWING, Tsit5(), rtol=1e-6)
    found = [ways(comm, solve(ENSEMBLE, Tsit5(), EnsembleMPI(), rtol=1e-6)) for _ in range(12)]
    count = [kernel for _, kernel in found].index(True)
    assert all(kernel for _, kernel in found[count:])
    kernel_choice._histories.clear()
    again = [bool(solve(ENSEMBLE, Tsit5(), rtol=1e-6).problem._kernels) for _ in range(12)]
    assert again.index(True) == count


@pytest.mark.parametrize("gather", [True, False])
def test_all_ranks_restart_together(comm, gather):
    """The last trajectories take many steps, those of the other ranks a few."""
    spans = [(0.0, 20.0)] * 7 + [(0.0, 2000.0)]
    ensemble = EnsembleProblem(SWING, prob_func=lambda problem, i, repeat: remake(problem, tspan=spans[i - 1]))
    options = {"trajectories": len(spans), "rtol": 1e-6}
    sol = solve(ensemble, Tsit5(), EnsembleMPI(gather=gather), **options)
    text, kernel = ways(comm, sol)
    assert text == "kernel: restarted, since arrays took more steps than estimated" and kernel
    expected = solve(ensemble, Tsit5(), EnsembleMPI(gather=gather), compile=True, **options)
    np.testing.assert_array_equal(sol.u_end, expected.u_end)


def test_an_error_during_a_solve_that_may_restart():
    def f(u, p, t):
        if np.any((p[0] > 7.5) & (t > 50.0)):
            raise ArithmeticError("too late")
        return [u[1], -u[0]]

    def prob_func(problem, i, repeat):
        return remake(problem, p=[float(i)], tspan=(0.0, 2000.0 if i == 1 else 100.0))

    ensemble = EnsembleProblem(ODEProblem(f, [1.0, 0.0], (0.0, 1.0), [0.0]), prob_func=prob_func)
    with pytest.raises(ArithmeticError, match="too late"):
        solve(ensemble, Tsit5(), EnsembleMPI(), trajectories=8, rtol=1e-6)


@pytest.mark.usefixtures("cheap")
def test_an_error_on_one_rank_leaves_no_rank_waiting(comm, rank):
    def prob_func(problem, i, repeat):
        if i == 1:
            raise ArithmeticError("no first one")
        return problem

    with pytest.raises(ArithmeticError, match="no first one"):
        solve(EnsembleProblem(SWING, prob_func=prob_func), Tsit5(), EnsembleMPI(), trajectories=5)
    # Some ranks have no trajectories.
    sol = solve(EnsembleProblem(SWING, p=np.array([[2.0]])), Tsit5(), EnsembleMPI())
    assert len(set(comm.allgather(sol.execution))) == 1 and sol.survivors.all()


def test_fits_and_steady_states(monkeypatch):
    for name in ("_LOADING", "_LOADING_COMPONENT", "_LOADING_OPERATION", "_LINES"):
        monkeypatch.setattr(kernel_choice, name, 0.0)
    decay = ODEProblem(lambda u, p, t: [p[0] - u[0]], [0.0], (0.0, 2.0), [1.0])
    levels = np.linspace(1.0, 2.0, 5)[:, None]
    measured = levels * (1 - np.exp(-np.linspace(0.5, 2.0, 4)))
    options = {"data": measured, "saveat": np.linspace(0.5, 2.0, 4)}
    found = fit(decay, lambda u, p, data: u[:, 0] - data, np.ones((5, 1)), Tsit5(), EnsembleMPI(), **options)
    np.testing.assert_allclose(found.p, levels, rtol=1e-5)
    states = steady_state(EnsembleProblem(decay, p=levels), ensemblealg=EnsembleMPI())
    np.testing.assert_allclose(states.u, levels, rtol=1e-9)
