"""Pieces on devices: the steps of pieces on the host, and nothing as long as a piece is ever copied."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest
from device_double import DeviceArray, on_device, on_host, transfers
from mpi4py import MPI

import mpiad
from mpiad.optimize import minimize

COMM = MPI.COMM_WORLD
_RANK, _SIZE = COMM.rank, COMM.size
_N = 400 + 100 * _RANK


def curved(x):
    gap = x["b"] - x["a"] ** 2
    return mpiad.mpi_allreduce(anp.sum(3.0 * gap**2 + (1 - x["a"]) ** 2))


def _start(put):
    return {"a": put(np.linspace(-1.2, 1.0, _N)), "b": put(np.full(_N, 0.5)), "k": 3}


def _solved(put, fun=curved, **settings):
    return minimize(fun, _start(put), method="L-BFGS-sharded", **settings)


def test_steps_are_those_of_the_host():
    host, found = _solved(np.asarray), _solved(on_device)
    assert found.success and abs(found.nit - host.nit) <= 2
    np.testing.assert_allclose(found.history.loss[:8], host.history.loss[:8], rtol=1e-9)
    np.testing.assert_allclose(on_host(found.x["a"]), np.ones(_N), atol=1e-3)
    assert type(found.jac["b"]) is DeviceArray and found.x["k"] == 3


def test_nothing_as_long_as_a_piece_is_copied():
    def own(x):
        return anp.sum(3.0 * (x["b"] - x["a"] ** 2) ** 2 + (1 - x["a"]) ** 2)

    start = _start(on_device)
    transfers.reset()
    found = minimize(own, start, method="L-BFGS-sharded", objective="sum", options={"m": 5})
    assert found.nit > 10
    # Of a trial the objective and three numbers; of an iteration the products; then the coefficients go back.
    assert transfers.d2h == 2 * found.nfev + found.nit + 1
    assert transfers.h2d == found.nit
    assert transfers.d2h_bytes <= 32 * found.nfev + 8 * (2 * 14 + 1) * (found.nit + 1)
    assert transfers.h2d_bytes <= 8 * 11 * found.nit


def test_pieces_of_some_ranks_may_be_on_the_host():
    put = on_device if _RANK % 2 else np.asarray
    host, found = _solved(np.asarray), _solved(put)
    np.testing.assert_allclose(found.history.loss[:8], host.history.loss[:8], rtol=1e-9)


def test_complex_and_single_precision_pieces():
    def bowl(x):
        own = anp.sum(anp.abs(x["z"] - (1 + 2j)) ** 2) + 2 * anp.sum((x["f"] - 3 - _RANK) ** 2)
        return mpiad.mpi_allreduce(own.astype(float))

    start = {"z": on_device(np.zeros(3, complex)), "f": on_device(np.zeros((2, 2), np.float32))}
    found = minimize(bowl, start, method="L-BFGS-sharded")
    np.testing.assert_allclose(on_host(found.x["z"]), np.full(3, 1 + 2j), rtol=1e-5)
    np.testing.assert_allclose(on_host(found.x["f"]), np.full((2, 2), 3.0 + _RANK), rtol=1e-5)
    assert found.x["f"].dtype == np.float32


def test_a_solve_goes_on_as_if_never_stopped(tmp_path):
    path = COMM.bcast(tmp_path) / "run.npz"
    whole = _solved(on_device, options={"maxiter": 12})
    _solved(on_device, options={"maxiter": 5}, checkpoint=path)
    again = _solved(on_device, options={"maxiter": 12}, checkpoint=path)
    np.testing.assert_array_equal(again.history.loss, whole.history.loss)
    np.testing.assert_array_equal(on_host(again.x["a"]), on_host(whole.x["a"]))


def test_what_isnt_finite_ends_the_solve():
    def broken(x):
        return mpiad.mpi_allreduce(anp.sum(anp.sqrt(x["a"]) + x["b"] ** 2))

    with np.errstate(invalid="ignore"):
        found = _solved(on_device, broken)
    assert not found.success and "finite" in found.message


def test_bounds_are_refused_on_all_ranks():
    bounds = [(0, 1)] * (2 * _N) if _RANK == _SIZE - 1 else None
    put = on_device if _RANK == 0 else np.asarray
    with pytest.raises(ValueError, match="takes no bounds where variables are on a device"):
        _solved(put, bounds=bounds)


@pytest.mark.serial
def test_a_piece_in_two_places_is_refused():
    start = {"a": on_device(np.ones(2)), "b": np.ones(2)}
    with pytest.raises(TypeError, match="all be on the host or on one device"):
        minimize(lambda x: anp.sum(x["b"] ** 2), start, method="L-BFGS-sharded")


def test_a_rank_may_have_nothing():
    start = on_device(np.full(3 if _RANK == 0 else 0, 2.0))

    def bowl(x):
        return mpiad.mpi_allreduce(anp.sum((x - 1.0) ** 2))

    found = minimize(bowl, start, method="L-BFGS-sharded")
    np.testing.assert_allclose(on_host(found.x), np.ones(len(start)), rtol=1e-5)
