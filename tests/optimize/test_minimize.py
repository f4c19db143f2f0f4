"""`minimize` against SciPy in one process, and what it promises about ranks."""

from __future__ import annotations

import pickle
import re
from typing import Any

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
import scipy.optimize
from mpi4py import MPI

import mpiad
from mpiad.optimize import MinimizeResult, minimize

METHODS = ["L-BFGS", "BFGS", "CG", "TNC", "SLSQP", "Newton-CG", "trust-ncg", "trust-krylov", "trust-constr"]
WITH_PRODUCTS = {"Newton-CG", "trust-ncg", "trust-krylov", "trust-constr"}


def rosenbrock(x: Any) -> Any:
    return anp.sum(100.0 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)


def serial(method: str, x0: np.ndarray, **keywords: Any) -> scipy.optimize.OptimizeResult:
    """Return SciPy's own result on Rosenbrock's function, with autograd's derivatives."""
    gradient = autograd.grad(rosenbrock)
    if method in WITH_PRODUCTS:
        keywords["hessp"] = lambda x, v: autograd.make_jvp(gradient)(x)(v)[1]
    name = "L-BFGS-B" if method == "L-BFGS" else method
    return scipy.optimize.minimize(lambda x: float(rosenbrock(x)), x0, jac=gradient, method=name, **keywords)


def limit(method: str) -> dict[str, int]:
    return {"maxfun": 400} if method == "TNC" else {"maxiter": 40}


@pytest.mark.few(6)
@pytest.mark.parametrize("method", METHODS)
def test_one_rank_evaluates_as_in_scipy(method: str, rank: int, size: int) -> None:
    x0 = np.linspace(-1.0, 1.5, 6)
    calls = []

    def fun(x: Any) -> Any:
        calls.append(1)
        return rosenbrock(x) if rank == size - 1 else 0.0

    iterates = []
    got = minimize(
        fun, x0 if rank == 0 else None, method=method, objective="sum", options=limit(method),
        callback=lambda x: iterates.append(x),
    )  # fmt: skip
    expected_iterates = []
    expected = serial(method, x0, options=limit(method), callback=lambda x, *_: expected_iterates.append(np.copy(x)))
    assert np.array_equal(got.x, expected.x)
    assert got.fun == expected.fun and got.nit == expected.nit and got.nfev == expected.nfev
    assert got.get("njev") == expected.get("njev") and got.get("nhev") == expected.get("nhev")
    assert got.message == expected.message and got.success == expected.success
    if rank == 0:
        assert np.array_equal(iterates, expected_iterates)
    else:
        assert not iterates
    # Each point's value once, and its derivatives in the same pass; all Hessian products at an iterate take one more.
    again = len(calls) - got.evaluations["value"] - got.evaluations["both"]
    assert 0 < again <= got.nit + 1 if method in WITH_PRODUCTS else again == 0
    assert got.evaluations["value"] + got.evaluations["both"] == expected.nfev


@pytest.mark.parametrize("method", ["L-BFGS", "BFGS", "trust-ncg"])
def test_equal_shares_are_bit_equal(method: str, size: int) -> None:
    if size & (size - 1):
        return  # a third of a number isn't exact
    x0 = np.linspace(-1.0, 1.5, 4)
    got = minimize(lambda x: rosenbrock(x) / size, x0, method=method, objective="sum")
    expected = serial(method, x0)
    assert np.array_equal(got.x, expected.x) and got.nfev == expected.nfev and got.fun == expected.fun


def test_least_squares_of_all_ranks(rank_rng: Any, rank: int, size: int) -> None:
    parts = [(rank_rng(r).normal(size=(4 + r, 3)), rank_rng(r).normal(size=4 + r)) for r in range(size)]
    a, b = parts[rank]
    whole = np.linalg.lstsq(np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]), rcond=None)[0]
    for objective, fun in (
        ("sum", lambda x: anp.sum((a @ x - b) ** 2)),
        ("mean", lambda x: anp.sum((a @ x - b) ** 2)),
        ("root", lambda x: mpiad.mpi_sum(anp.sum((a @ x - b) ** 2))),
        ("root", lambda x: mpiad.mpi_allreduce(anp.sum((a @ mpiad.mpi_bcast(x) - b) ** 2))),
    ):
        result = minimize(fun, np.zeros(3), objective=objective, options={"gtol": 1e-10, "ftol": 0.0})
        np.testing.assert_allclose(result.x, whole, atol=1e-8)
        np.testing.assert_allclose(result.jac, 0.0, atol=1e-6)


def test_result_is_the_same_on_all_ranks(rank: int, size: int) -> None:
    root = size - 1
    start = {"x": np.array([-1.0, 1.5]), "y": 0.5} if rank == root else None

    def fun(v: Any) -> Any:
        return rosenbrock(anp.append(v["x"], v["y"])) * (1 + rank)

    result = minimize(fun, start, root=root, objective="mean")
    found = MPI.COMM_WORLD.allgather({name: pickle.dumps(result[name]) for name in result})
    assert all(other == found[0] for other in found)
    assert set(result.x) == {"x", "y"} and result.x["x"].shape == (2,) and np.ndim(result.x["y"]) == 0
    np.testing.assert_allclose(result.x["x"], 1.0, atol=1e-4)


def test_root_s_variables_count(rank: int, size: int) -> None:
    seen = []

    def fun(x: Any) -> Any:
        seen.append(np.array(mpiad.stop_gradient(x)))
        return anp.sum((x - 3.0) ** 2)

    minimize(fun, np.full(3, 1.0 + rank) if rank == size - 1 else None, root=size - 1, objective="mean")
    assert np.array_equal(seen[0], np.full(3, float(size)))
    assert all(np.array_equal(other, seen) for other in MPI.COMM_WORLD.allgather(seen))


@pytest.mark.each_value
@pytest.mark.parametrize("method", ["L-BFGS", "TNC", "SLSQP", "trust-constr"])
@pytest.mark.parametrize("as_object", [False, True])
def test_bounds(method: str, as_object: bool, rank: int) -> None:
    pairs = [(-2.0, 0.5), (0.2, 0.9), (None, 0.1)]
    bounds = scipy.optimize.Bounds([-2.0, 0.2, -np.inf], [0.5, 0.9, 0.1]) if as_object else pairs
    x0 = np.array([0.0, 0.3, 0.0])
    got = minimize(
        lambda x: rosenbrock(x) if rank == 0 else None, x0, method=method, bounds=bounds if rank == 0 else None,
        options={"maxiter": 40} if method == "trust-constr" else None,
    )  # fmt: skip
    expected = serial(method, x0, bounds=bounds, options={"maxiter": 40} if method == "trust-constr" else None)
    assert np.array_equal(got.x, expected.x)
    assert got.x[0] <= 0.5 and got.x[2] <= 0.1


@pytest.mark.parametrize("pair", [(-0.5, 0.25), [None, 0.25], (-0.5, None), np.array([-0.5, 0.25])], ids=repr)
def test_one_pair_of_bounds_for_all_variables(pair: Any, rank: int) -> None:
    got, expected = (
        minimize(lambda x: rosenbrock(x) if rank == 0 else None, np.array([0.0, 0.2, 0.0]), bounds=bounds)
        for bounds in (pair, [tuple(pair)] * 3)
    )
    assert np.array_equal(got.x, expected.x) and np.any(got.x == 0.25) == (pair[1] is not None)


def test_tolerance_and_options_are_passed_on(rank: int) -> None:
    x0 = np.linspace(-1.0, 1.5, 6)
    for keywords in ({"tol": 1e-2}, {"options": {"maxiter": 3}}, {"options": {"maxcor": 2, "gtol": 1e-3}}):
        given = keywords if rank == 0 else {}
        got, expected = minimize(lambda x: rosenbrock(x), x0, **given), serial("L-BFGS", x0, **keywords)
        assert np.array_equal(got.x, expected.x) and got.nit == expected.nit
    limited = minimize(rosenbrock, x0, options={"maxiter": 3})
    assert limited.nit == 3 and not limited.success


def test_history() -> None:
    x0 = np.linspace(-1.0, 1.5, 6)
    for method in ("L-BFGS", "SLSQP"):
        iterates = [x0]
        result = minimize(
            rosenbrock, x0, method=method, options={"maxiter": 5}, callback=lambda x, to=iterates: to.append(x)
        )
        loss, norm, step, evaluations, seconds = result.history
        assert len(loss) == len(norm) == len(step) == len(evaluations) == len(seconds) == result.nit + 1
        assert loss[0] == rosenbrock(x0) and evaluations[0] == 1
        assert norm[0] == np.abs(autograd.grad(rosenbrock)(x0)).max()
        if len(iterates) > 1:  # on the root
            np.testing.assert_allclose(step[1:], np.linalg.norm(np.diff(iterates, axis=0), axis=1), rtol=1e-12)
        assert step[0] == 0.0 and (step[1:] > 0.0).all()
        assert (np.diff(seconds) >= 0).all() and (np.diff(evaluations) >= 0).all()
    result = minimize(rosenbrock, x0)
    assert result.history.loss[-1] == result.fun and result.history.evaluations[-1] == result.nfev
    assert result.history.gradient_norm[-1] == np.abs(result.jac).max()


def test_callback_with_intermediate_result(rank: int) -> None:
    rows = []
    x0 = np.linspace(-1.0, 1.5, 6)

    def callback(intermediate_result: scipy.optimize.OptimizeResult) -> None:
        rows.append((intermediate_result.nit, intermediate_result.fun, intermediate_result.x))

    result = minimize(rosenbrock, x0, callback=callback if rank == 0 else None)
    if rank == 0:
        assert [nit for nit, _, _ in rows] == list(range(1, result.nit + 1))
        assert [fun for _, fun, _ in rows] == result.history.loss[1:].tolist()
        assert all(rosenbrock(x) == fun for _, fun, x in rows)


@pytest.mark.parametrize("method", ["L-BFGS", "CG", "TNC", "SLSQP", "trust-krylov", "trust-constr"])
def test_stop_iteration_stops_everywhere(method: str) -> None:
    calls = []

    def callback(x: np.ndarray) -> None:
        calls.append(x)
        if len(calls) == 3:
            raise StopIteration

    result = minimize(rosenbrock, np.linspace(-1.0, 1.5, 6), method=method, callback=callback)
    assert result.nit == 3 and not result.success and result.status == (3 if method == "trust-constr" else 99)
    assert result.fun == rosenbrock(result.x)
    assert len(calls) in (0, 3)  # on the root only


def test_nest_of_variables(rank: int) -> None:
    target = 0.5 - 2.0j
    x0 = {
        "w": np.zeros((2, 3), np.float32), "pair": [np.ones(2), (1.0,)], "z": np.array([1.0 + 1.0j]),
        "power": 2, "name": "fixed",
    }  # fmt: skip

    def fun(v: Any) -> Any:
        assert v["name"] == "fixed" and v["power"] == 2
        assert v["w"].dtype == np.float32 and v["w"].shape == (2, 3)
        misfits = [anp.sum((v["w"] - 2.0) ** v["power"]), anp.sum((v["pair"][0] - 3.0) ** 2), (v["pair"][1][0] - 4.0) ** 2]
        return sum(misfits) + anp.sum(anp.abs(v["z"] - target) ** 2)

    result = minimize(fun, x0 if rank == 0 else None, objective="mean", options={"gtol": 1e-6})
    assert result.x["w"].dtype == np.float32 and result.x["power"] == 2 and result.x["name"] == "fixed"
    np.testing.assert_allclose(result.x["w"], 2.0, atol=1e-5)
    np.testing.assert_allclose(result.x["pair"][0], 3.0, atol=1e-5)
    np.testing.assert_allclose(result.x["pair"][1][0], 4.0, atol=1e-5)
    np.testing.assert_allclose(result.x["z"], target, atol=1e-5)
    assert result.nit <= 4  # a wrong gradient by the imaginary part would take many more


def test_forms_of_x0() -> None:
    assert np.array_equal(minimize(lambda x: anp.sum((x - 1.0) ** 2), [0, 0]).x.shape, (2,))
    number = minimize(lambda x: (x - 1.5) ** 2, 0)
    assert np.ndim(number.x) == 0 and number.x == pytest.approx(1.5)
    grid = minimize(lambda x: anp.sum((x - 1.0) ** 2), np.zeros((2, 2), int))
    assert grid.x.shape == (2, 2) and grid.x.dtype == float and grid.jac.shape == (2, 2)


@pytest.mark.parametrize("objective", ["root", "sum", "mean"])
def test_gradients_of_the_user_s_own(objective: str, rank: int, size: int) -> None:
    x0 = np.linspace(-1.0, 1.5, 3)
    weight = {"root": float(rank == 0), "sum": 1.0 / size, "mean": 1.0}[objective]
    counts = {"fun": 0, "jac": 0, "hessp": 0}

    def fun(x: np.ndarray) -> float:
        counts["fun"] += 1
        return weight * scipy.optimize.rosen(x)

    def jac(x: np.ndarray) -> Any:
        counts["jac"] += 1
        return weight * scipy.optimize.rosen_der(x) if objective != "root" or rank == 0 else None

    def hessp(x: np.ndarray, v: np.ndarray) -> Any:
        counts["hessp"] += 1
        return weight * scipy.optimize.rosen_hess_prod(x, v)

    derivatives = {"jac": scipy.optimize.rosen_der, "hessp": scipy.optimize.rosen_hess_prod}
    reference = scipy.optimize.minimize(scipy.optimize.rosen, x0, method="Newton-CG", **derivatives)
    apart = minimize(fun, x0, method="Newton-CG", jac=jac, hessp=hessp, objective=objective)
    np.testing.assert_allclose(apart.x, reference.x, atol=1e-6)
    assert counts == {"fun": apart.nfev, "jac": apart.njev, "hessp": apart.nhev}
    together = minimize(lambda x: (fun(x), jac(x)), x0, jac=True, objective=objective)
    np.testing.assert_allclose(together.x, serial("L-BFGS", x0).x, atol=1e-5)
    assert together.evaluations == {"value": 0, "gradient": 0, "both": together.nfev, "product": 0}


def test_arguments_of_each_rank(rank: int, size: int) -> None:
    result = minimize(lambda x, centre: (x - centre) ** 2, 0.0, args=(float(rank),), objective="mean")
    assert result.x == pytest.approx((size - 1) / 2)


def test_groups_solve_apart(rank: int, size: int) -> None:
    comm = MPI.COMM_WORLD.Split(rank % 2, -rank)
    results = [minimize(lambda x: (x - 1.0 - rank % 2) ** 2, 0.0, comm=comm, objective="mean") for _ in range(2)]
    assert results[0].x == pytest.approx(1.0 + rank % 2) and results[0].x == results[1].x
    comm.Free()


def test_solve_inside_a_trace_is_constant(rank: int) -> None:
    def outer(a: Any) -> Any:
        inner = minimize(lambda x: mpiad.mpi_sum((x - 2.0) ** 2), 0.0)
        return mpiad.mpi_sum(a * mpiad.stop_gradient(inner.x))

    value, gradient = mpiad.value_and_grad(outer)(3.0)
    assert gradient == pytest.approx(2.0)


def _rosenbrock(x: Any) -> Any:
    return anp.sum(100.0 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)


@pytest.mark.few(5)
@pytest.mark.each_value
@pytest.mark.parametrize("options", [{}, {"maxiter": 7}, {"maxfun": 9}])
@pytest.mark.parametrize("method", METHODS)
def test_jac_is_the_gradient_at_x(method: str, options: dict, rank: int, size: int) -> None:
    start = np.array([-1.2, 1.0, 0.5])
    result = minimize(lambda x: mpiad.mpi_allreduce(_rosenbrock(x)) / size, start, method=method, options=options)
    np.testing.assert_allclose(result.jac, scipy.optimize.rosen_der(result.x), rtol=1e-9, atol=1e-9)


@pytest.mark.each_value
@pytest.mark.serial
@pytest.mark.parametrize("start", [[0.0, 0.0], [1.0, 0.0], [0.0, 0.5], [1.0, 1.0], [0.5, 0.4]])
@pytest.mark.parametrize("center", [[0.3, 0.6], [-1.0, 0.5], [2.0, 2.0], [0.0, 0.0]])
@pytest.mark.parametrize("feasible", [False, True])
def test_trust_constr_has_no_false_success_at_bounds(start: list, center: list, feasible: bool) -> None:
    """With `keep_feasible` it returned a start in a corner as the solution."""
    bounds = scipy.optimize.Bounds([0.0, 0.0], [1.0, 1.0], keep_feasible=feasible)
    result = minimize(
        lambda x: anp.sum((x - np.array(center)) ** 2 * np.array([1.0, 3.0])), np.array(start), method="trust-constr",
        bounds=bounds,
    )  # fmt: skip
    solved = bool(np.allclose(result.x, np.clip(center, 0.0, 1.0), atol=2e-3))
    assert solved or not result.success
    assert result.success or feasible
    if start == center == [0.0, 0.0] or (start, center) == ([1.0, 1.0], [2.0, 2.0]):
        assert solved and result.success  # the corner is the solution
    elif feasible and 0.0 in start and start == [0.0, 0.0]:
        assert "isn't a minimum" in result.message and result.status == 3


@pytest.mark.parametrize("objective", ["value", "gradient"])
@pytest.mark.parametrize("method", METHODS)
def test_a_start_that_is_not_finite_ends_all_methods(method: str, objective: str) -> None:
    calls = []

    def fun(x: Any) -> Any:
        calls.append(1)
        return anp.sum(x) * np.nan if objective == "value" else anp.sum(anp.sqrt(0.0 * x))

    with np.errstate(all="ignore"):
        result = minimize(fun, np.zeros(2), method=method)
    assert not result.success and result.status and "finite" in result.message and "at x0: on rank 0" in result.message
    assert len(calls) < 10 and result.nit <= 1


def test_a_result_is_readable_and_pickles(rank: int) -> None:
    result = minimize(lambda x: rosenbrock(x) if rank == 0 else None, np.array([0.0, 0.2, 0.0]))
    lines = str(result).splitlines()
    assert type(result) is MinimizeResult and max(map(len, lines)) < 150
    (history,) = [line for line in lines if "history" in line]
    count = len(result.history.loss)
    assert re.search(rf"<{count} points: loss \S+ to \S+, gradient_norm \S+ to \S+, \d+ evaluations, \S+ s>", history)
    again = pickle.loads(pickle.dumps({key: result[key] for key in ("x", "fun", "history")} | {"type": type(result)}))
    assert np.array_equal(again["x"], result.x) and again["type"] is MinimizeResult
