"""The record of steps: everything that was accepted, in the order of a reverse sweep."""

from __future__ import annotations

import numpy as np
import pytest
from ode_systems import forced_pendulum, lorenz

from mpiad.ensemble import RK45, EnsembleProblem, EnsembleThreads, ODEProblem, solve
from mpiad.ensemble.members import members
from mpiad.ensemble.settings import Settings
from mpiad.ensemble.working_set import integrate

pytestmark = pytest.mark.serial


def recorded(ensemble, count, saveat=None, backend=None, **changes):
    batch = members(ensemble, range(1, count + 1), 1, 0, count)
    settings = Settings(RK45(), 1e-6, 1e-9, None, np.inf, 10_000, (), saveat, True)._replace(**changes)
    outcome = integrate(batch, settings) if backend is None else backend.run(batch, settings)
    return batch, outcome


def trajectory(steps, i):
    """Return times, signed sizes and states before the steps of a trajectory, first to last."""
    numbers = np.arange(steps.counts[i])
    ids = np.full(len(numbers), i)
    return *steps.times(ids, numbers), steps.states(ids, numbers)


def test_each_trajectory_is_there_step_by_step():
    p = np.linspace(0.5, 21, 40)[:, None]
    ensemble = EnsembleProblem(ODEProblem(lorenz, [1.0, 0, 0], (0.0, 1.0)), p=p)
    _, outcome = recorded(ensemble, 40)
    ((first, steps),) = outcome.steps
    sol = solve(ensemble, rtol=1e-6, atol=1e-9, save_everystep=True)
    for i in range(40):
        t, h, u = trajectory(steps, i)
        n = outcome.naccept[i]
        assert len(t) == n == sol.naccept[i] and t[0] == 0
        np.testing.assert_array_equal(t, sol.t[i, :n])
        np.testing.assert_array_equal(u.T, sol.u[i, :n])
        np.testing.assert_allclose(np.append(t, 1.0)[1:], t + h, rtol=1e-15)
    assert first == 0


def test_sweeps_are_aligned_by_the_end():
    p = np.linspace([1, 0.1], [30, 0.5], 9)
    _, outcome = recorded(EnsembleProblem(ODEProblem(forced_pendulum, [0.5, 1.0], (1.0, -2.0)), p=p), 9)
    ((_, steps),) = outcome.steps
    assert len(steps) == outcome.naccept.max() and steps.widths.sum() == outcome.naccept.sum()
    for s in range(len(steps)):
        (times, sizes, states), ids = steps.sweep(s), steps.order[: steps.widths[s]]
        assert states.flags.c_contiguous and states.shape[1] == len(times) == len(sizes) == len(ids)
        assert set(ids) == set(np.flatnonzero(outcome.naccept > s))
        for j, i in enumerate(ids):
            t, h, u = (array[..., outcome.naccept[i] - 1 - s] for array in trajectory(steps, i))
            assert times[j] == t and sizes[j] == h < 0
            np.testing.assert_array_equal(states[:, j], u)


def test_in_which_step_a_saved_time_lies():
    p = np.linspace([1, 0.1], [30, 0.5], 9)
    times = np.array([0.0, 0.1, 0.4, 2.5, 3.0])
    _, outcome = recorded(EnsembleProblem(ODEProblem(forced_pendulum, [0.5, 1.0], (0.0, 3.0)), p=p), 9, times)
    ((_, steps),) = outcome.steps
    for i in range(9):
        t, h, _ = trajectory(steps, i)
        np.testing.assert_array_equal(outcome.save_step[i], np.append(-1, np.searchsorted(t, times[1:]) - 1))
        assert outcome.save_step[i, -1] == outcome.naccept[i] - 1


def test_shares_keep_their_own():
    p = np.linspace(0.5, 21, 10)[:, None]
    ensemble = EnsembleProblem(ODEProblem(lorenz, [1.0, 0, 0], (0.0, 1.0)), p=p)
    _, whole = recorded(ensemble, 10)
    _, shares = recorded(ensemble, 10, backend=EnsembleThreads(3))
    assert [first for first, _ in shares.steps] == [0, 3, 6]
    for first, steps in shares.steps:
        for i in range(len(steps.counts)):
            for a, b in zip(trajectory(steps, i), trajectory(whole.steps[0][1], first + i)):
                np.testing.assert_array_equal(a, b)
