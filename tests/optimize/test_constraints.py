"""Constraints of the root-driven methods, beside SciPy in one process."""

from __future__ import annotations

from typing import Any

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
import scipy.optimize
from known_problems import PROBLEMS
from mpi4py import MPI
from scipy.optimize import LinearConstraint, NonlinearConstraint

import mpiad
from mpiad.errors import WorkerError
from mpiad.optimize import minimize

METHODS = ["SLSQP", "trust-constr"]
FUN = PROBLEMS["rosenbrock-2"].fun
START = np.array([0.3, -0.4])
LIMIT = {"maxiter": 25}


def disc(x: Any) -> Any:
    return 1.5 - x[0] ** 2 - x[1] ** 2


def wave(x: Any) -> Any:
    return anp.array([anp.sin(x[0]) + x[1], x[0] * x[1]])


def gradient_of(fun: Any) -> Any:
    return autograd.jacobian(fun)


def rosenbrock_hessian(x: np.ndarray, v: np.ndarray) -> np.ndarray:
    return autograd.make_jvp(autograd.grad(FUN))(x)(v)[1]


GIVEN: dict[str, Any] = {
    "dict": {"type": "ineq", "fun": disc},
    "dicts": [{"type": "ineq", "fun": disc}, {"type": "eq", "fun": lambda x, a: x[0] - a * x[1], "args": (2.0,)}],
    "linear": LinearConstraint([[1.0, 2.0]], -np.inf, 1.0),
    "nonlinear": NonlinearConstraint(wave, [-0.5, -np.inf], [0.8, 0.2]),
    "mixed": [LinearConstraint([[1.0, 2.0]], -np.inf, 1.0), NonlinearConstraint(disc, 0.0, np.inf)],
}


def with_jacobian(given: Any) -> Any:
    """Return the constraints with autograd's derivatives, as SciPy in one process gets them."""
    if isinstance(given, list):
        return [with_jacobian(each) for each in given]
    if isinstance(given, dict):
        return {**given, "jac": gradient_of(given["fun"])}
    if isinstance(given, NonlinearConstraint):
        return NonlinearConstraint(given.fun, given.lb, given.ub, jac=gradient_of(given.fun))
    return given


@pytest.mark.few(5)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["mixed", *(pytest.param(name, marks=pytest.mark.one_rank) for name in list(GIVEN)[:-1])])
def test_as_scipy(name: str, method: str, rank: int, size: int) -> None:
    got = minimize(
        lambda x: FUN(x) if rank == size - 1 else 0.0, START if rank == 0 else None, method=method, objective="sum",
        constraints=GIVEN[name] if rank == 0 else (), options=LIMIT, bounds=[(-1.0, 0.9), (None, None)],
    )  # fmt: skip
    hessp = {"hessp": rosenbrock_hessian} if method == "trust-constr" else {}
    expected = scipy.optimize.minimize(
        lambda x: float(FUN(x)), START, jac=autograd.grad(FUN), method=method, constraints=with_jacobian(GIVEN[name]),
        options=LIMIT, bounds=[(-1.0, 0.9), (None, None)], **hessp,
    )  # fmt: skip
    if expected.success or method == "SLSQP":
        assert np.array_equal(got.x, expected.x) and got.fun == expected.fun and got.success == expected.success
    assert got.nit == expected.nit and got.nfev == expected.nfev
    found = MPI.COMM_WORLD.allgather((got.x.tolist(), got.fun, got.message))
    assert all(other == found[0] for other in found)


@pytest.mark.parametrize("method", METHODS)
def test_nest_of_variables(method: str, rank: int, size: int) -> None:
    start = {"a": np.zeros((2, 1)), "b": 0.5}
    seen = []

    def product(v: Any) -> Any:
        seen.append(v)
        return v["a"][0, 0] * v["b"] - 1.0

    constraints = [
        {"type": "eq", "fun": product},
        NonlinearConstraint(lambda v: v["a"][1], 3.0, 4.0),
        LinearConstraint([[0.0, 0.0, 1.0]], -np.inf, 0.5),
    ]
    result = minimize(
        lambda v: anp.sum(v["a"] ** 2) + v["b"] ** 2, start, method=method, objective="mean", constraints=constraints,
        options={"maxiter": 300}, tol=1e-9,
    )  # fmt: skip
    np.testing.assert_allclose(result.x["a"], [[2.0], [3.0]], atol=1e-4)
    assert result.x["b"] == pytest.approx(0.5, abs=1e-4)
    assert bool(seen) == (rank == 0)  # on the root only


def test_each_point_once(rank: int) -> None:
    points: list[bytes] = []

    def limit(x: np.ndarray) -> Any:
        points.append(x.tobytes())
        return disc(x)

    jac = autograd.grad(disc)
    given = [{"type": "ineq", "fun": limit, "jac": jac}, GIVEN["linear"]]
    minimize(FUN, START, method="SLSQP", objective="mean", constraints=given)
    assert len(set(points)) == len(points) and bool(points) == (rank == 0)


@pytest.mark.parametrize("method", METHODS)
def test_derivatives_of_the_user_s_own(method: str) -> None:
    calls = []

    def jac(x: np.ndarray) -> np.ndarray:
        calls.append(x)
        return -2.0 * x

    def hess(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return -2.0 * weights[0] * np.eye(2)

    result = minimize(
        FUN, START, method=method, objective="mean", constraints=NonlinearConstraint(disc, 0.0, np.inf, jac=jac, hess=hess),
        tol=1e-9,
    )  # fmt: skip
    assert disc(result.x) == pytest.approx(0.0, abs=1e-4)
    assert bool(calls) == (MPI.COMM_WORLD.rank == 0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("limit", [3, 6])
def test_limit_returns_the_least_violation(method: str, limit: int) -> None:
    result = minimize(
        FUN, np.array([1.0, 1.0]), method=method, objective="mean", constraints={"type": "ineq", "fun": disc},
        options={"maxfun": limit},
    )  # fmt: skip
    assert not result.success and result.nfev == limit
    assert disc(result.x) > -0.5  # FUN is zero at the start, which violates by that


@pytest.mark.parametrize(
    ("method", "most"), [("SLSQP", 2), ("SLSQP", 3), ("SLSQP", 5), ("trust-constr", 7), ("trust-constr", 8)]
)
def test_the_point_of_an_unfinished_solve_violates_least(method: str, most: int, rank: int) -> None:
    """The method ends where a point met before violated the disc less, and lay no higher."""
    met: list[tuple[float, float]] = []

    def fun(x: Any) -> Any:
        value = anp.sum((x - 2.0) ** 2) + 0.1 * anp.sum(anp.sin(5.0 * x))
        met.append((max(0.0, float(mpiad.stop_gradient(anp.sum(x**2))) - 1.0), float(mpiad.stop_gradient(value))))
        return value

    inside = {"type": "ineq", "fun": lambda x: 1.0 - anp.sum(x**2)}
    result = minimize(
        fun, np.array([3.0, -2.0]), method=method, objective="mean", constraints=inside, options={"maxiter": most}
    )  # fmt: skip
    assert not result.success
    for name, fields in {
        "constr": [inside["fun"](result.x)],
        "constr_violation": max(0.0, -inside["fun"](result.x)),
    }.items():
        assert name not in result or np.allclose(result[name], fields)
    np.testing.assert_allclose(fun(result.x), result.fun, rtol=1e-13)
    assert met.pop() == pytest.approx(min(met), rel=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_constraint_that_communicates_is_refused(method: str, rank: int, size: int) -> None:
    def summed(x: Any) -> Any:
        return mpiad.mpi_allreduce(x[0]) + 0.0 * mpiad.mpi_rank()

    for constraint in ({"type": "ineq", "fun": summed}, NonlinearConstraint(summed, 0.0, 1.0)):
        with pytest.raises(ValueError, match="mpi_allreduce: constraints are evaluated on the root alone"):
            minimize(FUN, START, method=method, objective="mean", constraints=constraint)
    again = minimize(lambda x: mpiad.mpi_sum(FUN(x)), START, method=method, constraints=GIVEN["linear"])
    assert again.x @ [1.0, 2.0] <= 1.0 + 1e-6


def test_callback_that_communicates_is_refused() -> None:
    with pytest.raises(ValueError, match="mpi_allreduce: the callback runs on the root alone"):
        minimize(FUN, START, objective="mean", callback=lambda x: mpiad.mpi_allreduce(1.0))
    assert mpiad.mpi_allreduce(1) == mpiad.mpi_size()


@pytest.mark.parametrize("method", METHODS)
def test_values_in_memory_that_is_written_again(method: str) -> None:
    work, rows = np.empty(2), np.empty((2, 2))

    def values(x: np.ndarray) -> np.ndarray:
        work[:] = wave(x)
        return work

    def jac(x: np.ndarray) -> np.ndarray:
        rows[:] = [[np.cos(x[0]), 1.0], [x[1], x[0]]]
        return rows

    apart, again = (
        minimize(FUN, START, method=method, constraints=NonlinearConstraint(*functions), options=LIMIT)
        for functions in (
            (lambda x: values(x).copy(), [-0.5, -np.inf], [0.8, 0.2], lambda x: jac(x).copy()),
            (values, [-0.5, -np.inf], [0.8, 0.2], jac),
        )
    )
    assert np.array_equal(again.x, apart.x) and again.nfev == apart.nfev


def test_exception_in_a_constraint(rank: int) -> None:
    def fails(x: Any) -> Any:
        raise ZeroDivisionError("in the constraint")

    with pytest.raises(WorkerError, match="in the constraint") as caught:
        minimize(FUN, START, method="SLSQP", objective="mean", constraints={"type": "eq", "fun": fails})
    assert caught.value.rank == 0


@pytest.mark.parametrize(
    ("method", "constraints", "error", "words"),
    [
        ("L-BFGS", GIVEN["dict"], ValueError, "'L-BFGS-B' doesn't support constraints"),
        ("L-BFGS-sharded", GIVEN["dict"], ValueError, "supports linear equality constraints only"),
        ("SLSQP", {"type": "less", "fun": disc}, ValueError, "'eq' or 'ineq'"),
        ("SLSQP", [disc], TypeError, "must be a dict, LinearConstraint or NonlinearConstraint, but got function"),
    ],
)
def test_mistakes(method: str, constraints: Any, error: type, words: str, rank: int) -> None:
    with pytest.raises(error, match=words):
        minimize(FUN, START, method=method, objective="mean", constraints=constraints if rank == 0 else ())
