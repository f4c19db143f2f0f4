"""Variables on devices: the same steps as on the host, and counted copies."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest
import scipy
from device_double import DeviceArray, on_device, on_host, transfers
from mpi4py import MPI

import mpiad
from mpiad.errors import ReplicationError
from mpiad.optimize import least_squares, minimize, mpi_optimize

COMM = MPI.COMM_WORLD
_RANK, _SIZE = COMM.rank, COMM.size
_ROOT = _SIZE - 1


def valley(x):
    gap = x["b"] - x["a"] ** 2
    return mpiad.mpi_sum(anp.sum((1 + _RANK) * gap**2 + (1 - x["a"]) ** 2), _ROOT)


def _start(put):
    return {"a": put(np.linspace(-1.0, 0.5, 4)), "b": put(np.full(4, 0.3)), "name": "valley"}


OTHERS = [pytest.param(name, marks=pytest.mark.one_rank) for name in ("BFGS", "CG", "TNC", "SLSQP", "trust-ncg")]


@pytest.mark.parametrize("method", ["L-BFGS", "Newton-CG", *OTHERS])
def test_steps_are_those_of_the_host(method):
    host = minimize(valley, _start(np.asarray), method=method, root=_ROOT)
    found = minimize(valley, _start(on_device), method=method, root=_ROOT)
    assert found.evaluations == host.evaluations and found.nit == host.nit
    np.testing.assert_allclose(found.fun, host.fun, rtol=1e-9, atol=1e-12)
    for name in "ab":
        assert type(found.x[name]) is DeviceArray
        np.testing.assert_allclose(on_host(found.x[name]), host.x[name], rtol=1e-6)
    assert found.x["name"] == "valley"


def test_dtypes_and_complex_numbers():
    def bowl(x):
        return mpiad.mpi_sum(anp.sum(anp.abs(x["z"] - (1 + 2j)) ** 2) + 2 * anp.sum((x["f"] - 3) ** 2))

    def start(put):
        return {"z": put(np.zeros(3, complex)), "f": put(np.zeros((2, 2), np.float32)), "s": 1.0}

    found, host = minimize(bowl, start(on_device)), minimize(bowl, start(np.asarray))
    assert found.x["f"].dtype == np.float32 and found.x["z"].dtype == complex and found.x["s"] == 1.0
    np.testing.assert_allclose(on_host(found.x["z"]), host.x["z"], rtol=1e-9)
    np.testing.assert_allclose(on_host(found.x["f"]), np.full((2, 2), 3.0), rtol=1e-5)


def test_an_evaluation_copies_variables_and_gradient_once():
    def own(x):
        return anp.sum((1 + _RANK) * (x["b"] - x["a"] ** 2) ** 2 + (1 - x["a"]) ** 2)

    start = _start(on_device)
    transfers.reset()
    found = minimize(own, start, objective="sum", root=_ROOT)
    n = found.evaluations["both"]
    # There the variables, and at the end the result and its gradient; back the value and the gradient, once the start, and
    # once more to compare what the ranks gave.
    starts = (_RANK == _ROOT) + (_SIZE > 1)
    assert transfers.h2d == n + 2 and transfers.h2d_bytes == 64 * (n + 2)
    assert transfers.d2h == 2 * n + starts and transfers.d2h_bytes == 72 * n + 64 * starts


@pytest.mark.mpi(min_size=2)
def test_starts_on_devices_are_compared_with_the_root_s():
    values, root = np.array([1.0, np.nan, -0.0]), _RANK == _ROOT

    def solve(x0):
        minimize(lambda x, beside: 0.0, x0, root=_ROOT, args=(on_device(np.zeros(1)),))

    for put in (np.asarray, on_device):
        solve(on_device(values) if root else put(values + 0.0))
        with pytest.raises(ReplicationError, match="x0 is 'real array .*checksum") as caught:
            solve(on_device(values) if root else put(values + (_RANK == 0)))
        assert caught.value.ranks == [0] and caught.value.path == "x0"
    with pytest.raises(ReplicationError, match=r"x0 \(shape \(3,\), dtype float64\) first at \[2\] is 1\.0"):
        solve(values if root else on_device(values + [0.0, 0.0, _RANK == 0]))


def test_other_ranks_may_give_arrays_by_their_arguments():
    data = on_device(np.arange(3.0) + _RANK)

    def distance(x, data):
        return mpiad.mpi_sum(anp.sum((x - data) ** 2), _ROOT)

    found = minimize(distance, on_device(np.zeros(3)) if _RANK == _ROOT else None, args=(data,), root=_ROOT)
    np.testing.assert_allclose(on_host(found.x), np.arange(3.0) + (_SIZE - 1) / 2, rtol=1e-6)


def test_a_gradient_of_the_users_own_and_bounds():
    target = on_device(np.array([1.0, -2.0, 3.0]))

    def both(x):
        return float(on_host(anp.sum((x - target) ** 2))), 2 * (x - target)

    found = minimize(both, on_device(np.zeros(3)), jac=True, bounds=[(0, 2)] * 3, root=_ROOT)
    np.testing.assert_allclose(on_host(found.x), [1.0, 0.0, 2.0], atol=1e-6)
    apart = mpi_optimize(lambda x: both(x)[0], lambda x: both(x)[1], on_device(np.zeros(3)), "L-BFGS", root=_ROOT)
    np.testing.assert_allclose(on_host(apart.x), on_host(target), atol=1e-6)


def test_constraints_see_the_device():
    ring = scipy.optimize.NonlinearConstraint(lambda x: anp.sum(x**2), 1.0, 1.0)
    found = minimize(lambda x: anp.sum(x), on_device(np.array([-1.0, 0.1])), method="SLSQP", constraints=ring)
    np.testing.assert_allclose(on_host(found.x), [-(0.5**0.5)] * 2, rtol=1e-5)


@pytest.mark.parametrize("solver", ["exact", "lsmr"])
def test_residuals_on_a_device(solver):
    times = np.linspace(0.0, 2.0, 5 + _RANK)

    def residuals(put):
        return lambda x: x[0] * anp.exp(-x[1] * put(times)) - put(2.0 * np.exp(-0.7 * times))

    host = least_squares(residuals(np.asarray), np.array([1.0, 0.1]), tr_solver=solver, root=_ROOT)
    found = least_squares(residuals(on_device), on_device(np.array([1.0, 0.1])), tr_solver=solver, root=_ROOT)
    assert found.nfev == host.nfev and type(found.x) is DeviceArray
    np.testing.assert_allclose(on_host(found.x), [2.0, 0.7], rtol=1e-6)


def test_a_solve_goes_on_from_its_checkpoint(tmp_path):
    path = COMM.bcast(tmp_path) / "run.npz"
    first = minimize(valley, _start(on_device), root=_ROOT, checkpoint=path, options={"maxiter": 3})
    assert not first.success
    again = minimize(valley, _start(on_device), root=_ROOT, checkpoint=path)
    assert again.success and again.nit > 3 and type(again.x["a"]) is DeviceArray
