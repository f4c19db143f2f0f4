"""Evaluations of the root-driven methods beside SciPy's own in one process, to gradients of 1e-8."""

from __future__ import annotations

from functools import cache
from typing import Any

import autograd
import numpy as np
import pytest
import scipy.optimize
from known_problems import PROBLEMS
from mpi4py import MPI

from mpiad.optimize import minimize

OPTIONS = {"gtol": 1e-8, "ftol": 0.0, "maxfun": 20000, "maxiter": 20000}
# These take six and fourteen thousand evaluations, which are counted once.
LONG = ["rosenbrock-1000", "quadratic"]
SHORT = [name for name in PROBLEMS if name not in LONG]


@cache
def scipys(name: str) -> scipy.optimize.OptimizeResult:
    fun, start, _ = PROBLEMS[name]
    both = autograd.value_and_grad(fun)
    return scipy.optimize.minimize(both, start, jac=True, method="L-BFGS-B", options=OPTIONS)


def shares(way: str, rank: int, size: int) -> float:
    """Return the part of the objective that a rank evaluates."""
    if way == "one rank":
        return float(rank == size - 1)
    return 1.0 / size if way == "equal" else 2.0 * (rank + 1) / (size * (size + 1))


def weighed(fun: Any, part: float) -> Any:
    """Return a function's part with its gradient; nothing is evaluated for none."""
    both = autograd.value_and_grad(fun)

    def evaluate(x: np.ndarray) -> tuple[float, np.ndarray]:
        if not part:
            return 0.0, np.zeros_like(x)
        value, gradient = both(x)
        return part * value, part * gradient

    return evaluate


@pytest.mark.limit(300)
@pytest.mark.parametrize(
    "way", [pytest.param("one rank", marks=[pytest.mark.one_rank, pytest.mark.thorough]), "equal", "distributed"]
)
def test_evaluations_beside_scipy(way: str, rank: int, size: int) -> None:
    if way == "equal" and size & (size - 1):
        return  # a third of a number isn't exact: shares are as good as any others
    part = shares(way, rank, size)
    for name in SHORT[:: {"one rank": 1, "equal": 2, "distributed": 4}[way]]:
        fun, start, _ = PROBLEMS[name]
        result = minimize(weighed(fun, part), start if rank == 0 else None, jac=True, objective="sum", options=OPTIONS)
        expected = scipys(name)
        if way in ("one rank", "equal"):
            assert result.nfev == expected.nfev and np.array_equal(result.x, expected.x), name
        else:
            assert abs(result.nfev - expected.nfev) <= 0.1 * expected.nfev, (name, result.nfev, expected.nfev)
        assert np.max(np.abs(result.jac)) <= 1e-8, name
        # Powell's function is singular at its minimum: a gradient of 1e-8 leaves x that far away.
        np.testing.assert_allclose(result.x, expected.x, atol=3e-3 if name == "powell" else 1e-6, err_msg=name)


@pytest.mark.thorough
@pytest.mark.limit(300)
@pytest.mark.parametrize("name", LONG)
def test_long_solves_on_one_rank(name: str, rank: int, size: int) -> None:
    if size > 1:
        return  # what changes with ranks is shown by the shorter ones
    both = autograd.value_and_grad(PROBLEMS[name].fun)
    result = minimize(both, PROBLEMS[name].start, jac=True, options=OPTIONS)
    expected = scipys(name)
    assert result.nfev == expected.nfev and np.array_equal(result.x, expected.x)
    assert np.max(np.abs(result.jac)) <= 1e-8


@pytest.mark.few(3)
@pytest.mark.one_rank
@pytest.mark.parametrize("method", ["BFGS", "CG", "TNC", "SLSQP", "Newton-CG", "trust-ncg", "trust-krylov"])
def test_other_methods_beside_scipy(method: str, rank: int, size: int) -> None:
    with_products = method in ("Newton-CG", "trust-ncg", "trust-krylov")
    for name in ("beale", "rosenbrock-2") if with_products else ("beale", "wood"):
        fun, start, _ = PROBLEMS[name]
        gradient = autograd.grad(fun)

        def product(x: np.ndarray, v: np.ndarray, gradient: Any = gradient) -> np.ndarray:
            return autograd.make_jvp(gradient)(x)(v)[1]

        part = shares("one rank", rank, size)
        result = minimize(
            weighed(fun, part), start, method=method, jac=True, objective="sum",
            hessp=lambda x, v, part=part: part * product(x, v)
        )  # fmt: skip
        products = {"hessp": product} if with_products else {}
        expected = scipy.optimize.minimize(lambda x, fun=fun: float(fun(x)), start, jac=gradient, method=method, **products)
        assert result.nfev == expected.nfev and result.nit == expected.nit, name
        assert result.get("nhev") == expected.get("nhev"), name
        # BLAS rounds by where an array happens to lie.
        np.testing.assert_allclose(result.x, expected.x, rtol=1e-10, err_msg=name)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["logistic", pytest.param("rosenbrock-100", marks=pytest.mark.thorough)])
def test_minimisers_agree_with_one_rank(name: str, rank: int, size: int) -> None:
    fun, start, _ = PROBLEMS[name]
    part = shares("distributed", rank, size)
    alone = minimize(fun, start, comm=MPI.COMM_SELF, options=OPTIONS)
    got = minimize(lambda x: part * fun(x), start, objective="sum", options=OPTIONS)
    np.testing.assert_allclose(got.x, alone.x, atol=1e-7)
