"""Pieces on devices: the steps of pieces on the host, and nothing as long as a piece is ever copied."""

from __future__ import annotations

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
import scipy
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


def test_lists_of_residuals():
    w, d = 1.0 + np.arange(6.0) / 7 + _RANK, np.cos(np.arange(6.0) + _RANK)
    there = on_device(w), on_device(d)
    found = minimize(
        lambda x: [there[0] * x - there[1], 0.5 * x], on_device(np.zeros(6)), method="Newton-CG-sharded",
        options={"product": "gauss-newton", "gtol": 1e-12, "grtol": 0.0},
    )  # fmt: skip
    np.testing.assert_allclose(on_host(found.x), w * d / (w**2 + 0.25), rtol=1e-9)


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


@pytest.mark.parametrize("highest", [None, 0.3])
def test_barriers_are_solved_like_those_on_the_host(highest, monkeypatch):
    monkeypatch.setattr("mpiad.optimize.sharded.vectors._MAX_COLUMNS", 1000)
    weights, start = np.linspace(3.0, 4.0, 9000 + _RANK), np.linspace(0.9, 1.0, 9000 + _RANK)
    bounds = None if highest is None else [(-1.0, highest)] * len(start)

    def solved(put):
        c = put(weights)

        def barrier(x):
            return mpiad.mpi_allreduce(anp.sum(c * x - anp.log(anp.where(x > 0.0, x, np.nan))))

        with np.errstate(invalid="ignore"):
            return minimize(
                barrier, put(start), method="L-BFGS-sharded", bounds=bounds, options={"gtol": 1e-8, "ftol": 0.0}
            )

    host = solved(np.asarray)
    transfers.reset()
    found, copied = solved(on_device), transfers.d2h_bytes
    assert found.success and found.nfev == host.nfev <= 35
    np.testing.assert_allclose(found.history.loss, host.history.loss, rtol=1e-7)
    np.testing.assert_allclose(on_host(found.x), np.minimum(1.0 / weights, highest or np.inf), rtol=1e-6)
    assert copied < 8 * len(start)  # less than one vector of the piece in the whole solve


def test_what_isnt_finite_ends_the_solve():
    def broken(x):
        return mpiad.mpi_allreduce(anp.sum(anp.sqrt(x["a"]) + x["b"] ** 2))

    with np.errstate(invalid="ignore"):
        found = _solved(on_device, broken)
    assert not found.success and "finite" in found.message


def _bounds():
    # Some hold at the minimum, some on the way only, some never; and the start lies outside of one.
    low = np.where(np.arange(2 * _N) % 3 == 0, -np.inf, -0.9)
    high = np.where(np.arange(2 * _N) % 4 == 0, np.inf, 0.7 + 0.01 * _RANK)
    return scipy.optimize.Bounds(low, high)


def _inside(x, bounds):
    flat = np.concatenate([on_host(x["a"]), on_host(x["b"])])
    return bool(np.all(flat >= bounds.lb) and np.all(flat <= bounds.ub))


def test_bounded_steps_are_those_of_the_host():
    host, found = _solved(np.asarray, bounds=_bounds()), _solved(on_device, bounds=_bounds())
    assert found.success and abs(found.nit - host.nit) <= 2 and host.nit > 8
    np.testing.assert_allclose(found.history.loss[:8], host.history.loss[:8], rtol=1e-9)
    np.testing.assert_allclose(found.history.gradient_norm[:8], host.history.gradient_norm[:8], rtol=1e-6)
    np.testing.assert_allclose(on_host(found.x["a"]), host.x["a"], atol=2e-3)
    assert _inside(found.x, _bounds()) and type(found.x["a"]) is DeviceArray
    assert np.sum(on_host(found.x["a"]) == _bounds().ub[:_N]) == np.sum(host.x["a"] == _bounds().ub[:_N]) > 100


def test_what_a_bound_holds_goes_straight_to_it():
    """Variables that are coupled: a direction of the memory alone would lead those that are held away again."""
    rng = np.random.default_rng(3)
    root = rng.normal(size=(30, 30))
    pull = rng.normal(size=30)
    bounds = [(-0.05, 0.1)] * 15 + [(None, 0.02)] * 15

    def solved(put):
        matrix, way = put(root @ root.T / 30 + 0.1 * np.eye(30)), put(pull)

        def bowl(x):
            return mpiad.mpi_allreduce((1 + _RANK) * (0.5 * anp.dot(x, anp.dot(matrix, x)) - anp.dot(way, x)))

        return minimize(bowl, put(np.zeros(30)), method="L-BFGS-sharded", bounds=bounds, options={"gtol": 1e-9})

    host, found = solved(np.asarray), solved(on_device)
    np.testing.assert_allclose(found.history.loss[:10], host.history.loss[:10], rtol=1e-8)
    np.testing.assert_allclose(on_host(found.x), host.x, atol=1e-7)


def test_bounds_add_no_copies_but_themselves():
    def own(x):
        return anp.sum(3.0 * (x["b"] - x["a"] ** 2) ** 2 + (1 - x["a"]) ** 2)

    start = _start(on_device)
    transfers.reset()
    found = minimize(own, start, method="L-BFGS-sharded", objective="sum", options={"m": 5}, bounds=_bounds())
    assert found.nit > 5
    # Of a trial the objective and seven numbers; of an iteration the products; then the coefficients go back.
    assert transfers.d2h == 2 * found.nfev + found.nit + 1
    assert transfers.h2d == found.nit + 2
    assert transfers.d2h_bytes <= 64 * found.nfev + 8 * (14**2 + 1) * (found.nit + 1)
    assert transfers.h2d_bytes <= 8 * 11 * found.nit + 2 * 8 * 2 * _N


@pytest.mark.thorough
def test_bounded_pieces_of_some_ranks_may_be_on_the_host():
    put, bounds = (np.asarray, None) if _RANK % 2 else (on_device, _bounds())
    host, found = _solved(np.asarray, bounds=bounds), _solved(put, bounds=bounds)
    np.testing.assert_allclose(found.history.loss[:8], host.history.loss[:8], rtol=1e-9)


def test_a_bounded_solve_goes_on_as_if_never_stopped(tmp_path):
    path, kept = COMM.bcast(tmp_path) / "run.npz", {"bounds": _bounds()}
    whole = _solved(on_device, options={"maxiter": 9}, **kept)
    _solved(on_device, options={"maxiter": 4}, checkpoint=path, **kept)
    again = _solved(on_device, options={"maxiter": 9}, checkpoint=path, **kept)
    np.testing.assert_array_equal(again.history.loss, whole.history.loss)
    np.testing.assert_array_equal(on_host(again.x["b"]), on_host(whole.x["b"]))


@pytest.mark.thorough
def test_products_of_free_variables_are_taken_in_stretches(monkeypatch):
    whole = _solved(on_device, bounds=_bounds())
    monkeypatch.setattr("mpiad.optimize.sharded.vectors._MAX_COLUMNS", 64)
    np.testing.assert_allclose(_solved(on_device, bounds=_bounds()).history.loss[:8], whole.history.loss[:8], rtol=1e-9)


def test_bounds_on_a_device_are_refused_on_all_ranks():
    with pytest.raises(TypeError, match="bounds must be on the host.*to_host"):
        _solved(on_device, bounds=on_device(np.zeros((2 * _N, 2))) if _RANK == _SIZE - 1 else None)


def test_a_bounded_gradient_that_isnt_finite_ends_the_solve():
    def broken(x):
        return mpiad.mpi_allreduce(anp.sum(anp.sqrt(x["a"]) + x["b"] ** 2))

    with np.errstate(invalid="ignore"):
        found = _solved(on_device, broken, bounds=[(-2.0, 2.0)] * (2 * _N))
    assert not found.success and "finite" in found.message


@pytest.mark.parametrize("put", [np.asarray, on_device], ids=["host", "device"])
@pytest.mark.parametrize("bounds", [None, (-9.0, 9.0)], ids=["free", "bounded"])
def test_a_search_without_its_conditions_leaves_the_lowest_point_that_it_met(bounds, put):
    """One trial for each search: a low one whose slope is too steep is kept, and the gradient is that of this point."""
    start = np.array_split(np.linspace(-1.2, 1.0, 7), _SIZE)[_RANK]

    def wavy(x):
        return anp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2 + 0.1 * anp.sin(30 * x[:-1]))

    found = minimize(
        lambda x: wavy(mpiad.mpi_allgather(x, axis=0)), put(start), method="L-BFGS-sharded",
        options={"maxls": 1, "m": 5}, bounds=None if bounds is None else [bounds] * len(start),
    )  # fmt: skip
    x, gradient = (np.concatenate(COMM.allgather(on_host(part))) for part in (found.x, found.jac))
    assert found.status == 2 and found.nit == 8
    np.testing.assert_allclose(found.fun, wavy(x), rtol=1e-13)
    np.testing.assert_allclose(gradient, autograd.grad(wavy)(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "returned, text",
    [
        (lambda x: {"a": x["a"]}, "expected a pytree of 3 leaves"),
        (lambda x: {**x, "a": np.zeros(_N)}, r"on the device of x0\['a'\], but got ndarray"),
        (lambda x: {**x, "b": x["b"][1:]}, r"on the device of x0\['b'\], but got (DeviceArray|ndarray) of shape"),
        (lambda x: {**x, "b": 1j * x["b"]}, r"expected float64, like x0\['b'\], but got complex128"),
    ],
)
def test_gradients_that_dont_have_the_form_of_the_variables_are_refused(returned, text):
    def jac(x):
        return (returned if _RANK == _SIZE - 1 else dict)(x)

    with pytest.raises((TypeError, mpiad.errors.WorkerError), match=text):
        _solved(on_device, jac=jac)


@pytest.mark.serial
def test_a_piece_in_two_places_is_refused():
    start = {"a": on_device(np.ones(2)), "b": np.ones(2)}
    with pytest.raises(TypeError, match="must be on the host or on one device"):
        minimize(lambda x: anp.sum(x["b"] ** 2), start, method="L-BFGS-sharded")


def test_a_rank_may_have_nothing():
    start = on_device(np.full(3 if _RANK == 0 else 0, 2.0))

    def bowl(x):
        return mpiad.mpi_allreduce(anp.sum((x - 1.0) ** 2))

    for bounds, end in ((None, 1.0), ([(1.5, 3.0)] * len(start), 1.5)):
        found = minimize(bowl, start, method="L-BFGS-sharded", bounds=bounds)
        np.testing.assert_allclose(on_host(found.x), np.full(len(start), end), rtol=1e-5)
