"""Events that change the state, of ensembles that are divided among the ranks."""

from __future__ import annotations

from importlib import import_module

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI

import mpiad
from mpiad.ensemble import RK45, EnsembleMPI, EnsembleProblem, EnsembleVectorized, Event, ODEProblem, solve

pytestmark = pytest.mark.usefixtures("solved_by")

BOUNCE = Event(lambda u, p, t: u[0], affect=lambda u, p, t: [u[0], -p[1] * u[1]])
KICK = Event(times=lambda p: [p[2]], affect=lambda u, p, t: [u[0], u[1] + 1.0])


def falling(u, p, t):
    return [u[1], -p[0] + 0 * u[0]]


def bounced(p, backend, **more):
    ensemble = EnsembleProblem(ODEProblem(falling, np.array([1.0, 0.0]), (0.0, 2.0)), p=p)
    return solve(ensemble, RK45(), backend, events=[BOUNCE, KICK], saveat=0.5, **more)


@pytest.mark.few(2)
@pytest.mark.parametrize("count, gather, objective", [(1, True, "root"), (5, True, "mean"), (5, False, "sum")])
def test_all_are_those_of_one_process(count, gather, objective):
    # Some never come down, and one never has enough: ranks have events or none.
    p = np.array([[9.81, 0.7, 1.2], [0.1, 0.7, 9.0], [9.81, 0.75, 1.9], [0.2, 0.7, 0.3], [9.81, 0.8, 7.0]])[:count]
    alone, mpi = EnsembleVectorized(), EnsembleMPI(gather=gather)
    one, sol = bounced(p, alone), bounced(p, mpi)
    chosen = slice(None) if gather else sol.indices
    for name in ("u", "u_end", "t_reached", "retcode", "naccept", "nf"):
        assert np.asarray(getattr(sol, name)).tobytes() == np.asarray(getattr(one, name)[chosen]).tobytes()
    assert sol.events == (one.events if gather else {k: one.events[i] for k, i in enumerate(chosen) if i in one.events})

    def loss(theta, backend):
        sol = bounced(p * theta, backend)
        times = sum(time for i in sorted(sol.events) for _, time in sol.events[i])
        return anp.sum(sol.u**2) + anp.sum(sol.u_end) + anp.sum(sol.t_reached) + times

    theta = np.ones(3)
    expected = mpiad.value_and_grad(loss, shared=True)(theta, alone)
    found = mpiad.value_and_grad(loss, shared=True, objective=objective)(theta, mpi)
    assert np.isfinite(expected[0]) and np.isfinite(expected[1]).all()
    for got, wanted in zip(found, expected):
        np.testing.assert_allclose(got, wanted, rtol=1e-11)


@pytest.mark.parametrize("count", [1, 5])
def test_doses_at_common_times_are_those_of_one_process(count):
    # With one trajectory, other ranks have none.
    ensemble = EnsembleProblem(ODEProblem(falling, np.array([1.0, 0.0]), (0.0, 2.0)), p=np.full((count, 1), 9.81))
    doses = Event.doses([0.3, 1.7], 1.0, 1)

    def loss(p, backend):
        sol = solve(EnsembleProblem(ensemble.problem, p=p), RK45(), backend, events=doses, saveat=0.5)
        assert sol.events == {i: [(0, 0.3), (0, 1.7)] for i in range(count)}
        return anp.sum(sol.u**2)

    one, mpi = (mpiad.value_and_grad(loss, shared=True)(ensemble.p, way) for way in (EnsembleVectorized(), EnsembleMPI()))
    np.testing.assert_allclose(mpi[0], one[0], rtol=1e-14)
    np.testing.assert_allclose(mpi[1], one[1], rtol=1e-12)


def test_an_error_in_a_result_that_is_computed_late_is_one_error_on_all_ranks(monkeypatch):
    def failing(self, stop):
        raise ArithmeticError("late")

    if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
        monkeypatch.setattr(import_module("mpiad.ensemble.solve").GivenTimes, "passed", failing)
    ensemble = EnsembleProblem(ODEProblem(falling, np.array([1.0, 0.0]), (0.0, 2.0)), p=np.full((4, 1), 9.81))
    with pytest.raises(ArithmeticError, match="late"):
        solve(ensemble, RK45(), EnsembleMPI(), events=Event.doses([0.3], 1.0, 1), saveat=0.5)


def test_an_affect_of_a_wrong_shape_is_one_error_on_all_ranks():
    last = MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1
    p = np.full((4, 3), 1.0)
    ensemble = EnsembleProblem(ODEProblem(falling, np.array([1.0, 0.0]), (0.0, 2.0)), p=p)
    for affect in (lambda u, p, t: u[0], lambda u, p, t: [u[0]] if last else u):
        with pytest.raises(ValueError, match=r"affect returned .* \(2, [345]\): 2 components"):
            solve(ensemble, RK45(), EnsembleMPI(), events=Event(times=[1.0], affect=affect))
