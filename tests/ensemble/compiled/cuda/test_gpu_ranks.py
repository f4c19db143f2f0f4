"""`EnsembleMPI(EnsembleGPU())`: each rank's share on the device that is its own, on the stand-in for one."""

from __future__ import annotations

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from device_double import DeviceArray, on_device, on_host
from device_on_cpu import COMPILER, double, launcher

import mpiad
from mpiad.ensemble import (
    RK45,
    BatchSum,
    EnsembleGPU,
    EnsembleMPI,
    EnsembleProblem,
    EnsembleVectorized,
    Event,
    ODEProblem,
    solve,
)

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no compiler of C++")
N = 23


@pytest.fixture(autouse=True)
def device(monkeypatch):
    found = []
    monkeypatch.setattr("mpiad.ensemble.backends.own_device", lambda: 7)
    monkeypatch.setattr("mpiad.ensemble.backends.selected_arrays", lambda number: found.append(number) or double)
    monkeypatch.setattr(launcher, "launches", [])
    return found


def lorenz(u, p, t):
    return [10.0 * (u[1] - u[0]), u[0] * (p[0] - u[2]) - u[1], u[0] * u[1] - 8 / 3 * u[2]]


def given():
    u0 = np.random.default_rng(0).random((N, 3)) + 0.5
    return u0, np.linspace(20.0, 40.0, N)[:, None], np.random.default_rng(1).normal(size=(N, 2, 3))


def solved(u0, p, backend, **options):
    return solve(EnsembleProblem(ODEProblem(lorenz, np.zeros(3), (0.0, 1.0)), u0=u0, p=p), RK45(), backend, **options)


@pytest.mark.parametrize("place", [np.asarray, on_device])
def test_all_ranks_get_all_trajectories(place, device):
    u0, p, _ = given()
    expected = solved(u0, p, mpiad.ensemble.EnsembleVectorized(), compile=False)
    backend = EnsembleMPI(EnsembleGPU())
    for _ in range(2):  # the second time by the steps that each took
        sol = solved(place(u0), place(p), backend)
        assert isinstance(sol.u, DeviceArray) == (place is on_device)
        np.testing.assert_allclose(on_host(sol.u), expected.u, rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(sol.naccept, expected.naccept)
        np.testing.assert_array_equal(sol.retcode, expected.retcode)
    # The device that is this rank's own, where the arrays don't say.
    assert set(device) == ({7} if place is np.asarray else set())
    assert sum(launch[3][2] for launch in launcher.launches) < 2 * N or mpiad.mpi_size() == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("place", [np.asarray, on_device])
@pytest.mark.parametrize("gather", [True, False])
def test_gradients_are_those_of_one_process(place, gather):
    u0, p, weights = given()

    def loss(u0, p, backend, weights):
        sol = solved(u0, p, backend, gradient="adjoint")
        mine = weights if gather or backend is alone else weights[int(sol.indices[0]) : int(sol.indices[-1]) + 1]
        return anp.sum(mine * sol.u**2)

    alone = EnsembleGPU()
    expected = mpiad.grad(lambda *x: loss(*x, alone, weights), (0, 1), shared=True)(u0, p)
    backend = EnsembleMPI(EnsembleGPU(), gather=gather)
    objective = "root" if gather else "sum"
    found = mpiad.grad(lambda *x: loss(*x, backend, place(weights)), (0, 1), shared=True, objective=objective)(
        place(u0), place(p)
    )
    for a, b in zip(found, expected):
        assert isinstance(a, DeviceArray) == (place is on_device)
        np.testing.assert_allclose(on_host(a), b, rtol=1e-12, atol=1e-12 * np.abs(b).max())


@pytest.mark.few(1)
@pytest.mark.parametrize("place", [np.asarray, on_device])
@pytest.mark.parametrize("gather", [True, False])
def test_events_are_those_of_one_process(place, gather):
    u0, p, _ = given()
    events = Event(lambda u, p, t: u[2] - p[0]), Event(lambda u, p, t: u[0] - u[1], terminal=False)

    def loss(u0, p, backend):
        sol = solved(u0, p, backend, events=events)
        times = [(event + 1) * time**2 for found in sol.events.values() for event, time in found]
        return anp.sum(sol.t_reached**3) + sum(times)

    value, expected = mpiad.value_and_grad(lambda *x: loss(*x, EnsembleVectorized()), (0, 1), shared=True)(u0, p)
    backend = EnsembleMPI(EnsembleGPU(), gather=gather)
    found = mpiad.value_and_grad(
        lambda *x: loss(*x, backend), (0, 1), shared=True, objective="root" if gather else "sum"
    )(place(u0), place(p))  # fmt: skip
    np.testing.assert_allclose(found[0], value, rtol=1e-12)
    for a, b in zip(found[1], expected):
        np.testing.assert_allclose(on_host(a), b, rtol=1e-9, atol=1e-10 * np.abs(b).max())
    assert "Terminated" in solved(u0, p, backend, events=events).retcode


def test_more_ranks_than_trajectories():
    u0, p, _ = given()
    sol = solved(on_device(u0[:2]), on_device(p[:2]), EnsembleMPI(EnsembleGPU()))
    expected = solved(u0[:2], p[:2], mpiad.ensemble.EnsembleVectorized(), compile=False)
    np.testing.assert_allclose(on_host(sol.u_end), expected.u_end, rtol=1e-12)


def test_without_a_gpu_all_ranks_raise(monkeypatch):
    def none(number):
        raise RuntimeError("CuPy finds no GPU")

    monkeypatch.setattr("mpiad.ensemble.backends.selected_arrays", none if mpiad.mpi_rank() == 0 else lambda number: double)
    u0, p, _ = given()
    with pytest.raises(RuntimeError, match="finds no GPU"):
        solved(u0, p, EnsembleMPI(EnsembleGPU()))


@pytest.mark.parametrize("place", [np.asarray, on_device])
def test_sums_over_batches_of_all_ranks(place):
    u0, p, _ = given()

    def kept(u0, p):
        return anp.sum(solved(u0, p, EnsembleVectorized(), compile=False).u_end ** 2)

    def summed(u0, p):
        total = BatchSum(lambda sol, I: anp.sum(sol.u_end**2))
        problem = EnsembleProblem(ODEProblem(lorenz, np.zeros(3), (0.0, 1.0)), u0=u0, p=p, reduction=total)
        return solve(problem, RK45(), EnsembleMPI(EnsembleGPU()), batch_size=3).u

    J, expected = autograd.value_and_grad(lambda x: kept(*x))((u0, p))
    found_J, found = mpiad.value_and_grad(summed, (0, 1), shared=True)(place(u0), place(p))
    np.testing.assert_allclose(on_host(found_J), J, rtol=1e-10)
    for a, b in zip(found, expected):
        np.testing.assert_allclose(on_host(a), b, rtol=1e-9, atol=1e-9 * np.abs(b).max())
