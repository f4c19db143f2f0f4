"""Trial points at which nothing is finite: the library's own arithmetic says nothing of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI

import mpiad
from mpiad.optimize import least_squares

LIBRARY = str(Path(mpiad.__file__).parent)
FAR = 3.0  # where this world ends


def warned(call: Callable[[], Any]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        call()
    return [warning for warning in said if issubclass(warning.category, RuntimeWarning)]


def ours(said: list[warnings.WarningMessage]) -> list[str]:
    return [str(warning) for warning in said if warning.filename.startswith(LIBRARY)]


def cliff(outside: list[bool]) -> Callable[[np.ndarray], tuple[float, np.ndarray]]:
    """Return a bowl with its gradient, whose values are infinities of both signs beyond its edge."""

    def fun(x: np.ndarray) -> tuple[float, np.ndarray]:
        away = bool((np.abs(x) > FAR).any())
        outside.append(away)
        if away:
            return np.inf, np.where(np.arange(len(x)) % 2, np.inf, -np.inf)
        return float(np.sum(np.sqrt(FAR + 0.01 - x))), -0.5 / np.sqrt(FAR + 0.01 - x)

    return fun


@pytest.mark.parametrize("bounds", [None, [(-50.0, 50.0)] * 4])
@pytest.mark.parametrize("method", ["L-BFGS", "L-BFGS-sharded"])
def test_minimize_is_silent(method: str, bounds: Any) -> None:
    outside: list[bool] = []
    start = np.array([2.0, 2.1, 1.9, 2.2])
    call = {"method": method, "bounds": bounds, "options": {"maxiter": 10}}
    said = warned(lambda: mpiad.minimize(cliff(outside), start, jac=True, objective="mean", **call))
    assert any(outside) and not ours(said)


@pytest.mark.one_rank
@pytest.mark.parametrize("loss", ["linear", "soft_l1", "huber", "cauchy", "arctan"])
@pytest.mark.parametrize("solver", ["exact", "lsmr"])
def test_least_squares_is_silent(solver: str, loss: str) -> None:
    for infinite in (np.array([np.inf, -np.inf]), np.array([1e200, np.inf])):
        outside: list[bool] = []

        def fun(x: np.ndarray, *, beyond: np.ndarray = infinite, seen: list[bool] = outside) -> np.ndarray:
            away = bool((x <= 0.0).any())
            seen.append(away)
            return beyond if away else np.log(x) + 6.0

        start = {"jac": lambda x: np.diag(1.0 / x), "loss": loss, "tr_solver": solver, "max_nfev": 20}
        said = warned(lambda run=fun, keywords=start: least_squares(run, np.full(2, 0.9), **keywords))
        assert any(outside) and not ours(said)


def test_a_loss_of_the_users_own_and_the_function_may_warn() -> None:
    def loss(z: np.ndarray) -> list[np.ndarray]:
        return [z, np.maximum(np.log(z - z), 1.0), np.zeros_like(z)]

    assert warned(lambda: least_squares(lambda x: x - 1.0, np.zeros(2), loss=loss, jac=lambda x: np.eye(2), max_nfev=2))


METHODS = ["L-BFGS", "BFGS", "CG", "TNC", "SLSQP", "Newton-CG", "trust-ncg", "trust-krylov", "trust-constr"]


# What a method makes of such a point is the root's matter; that all ranks know of it is the same for all methods.
HOW = [pytest.param(method, np.nan, marks=pytest.mark.one_rank) for method in METHODS]
HOW += [("L-BFGS", np.inf), ("L-BFGS", "solver of one rank"), ("Newton-CG", "solver of one rank"), ("TNC", "solver")]
HOW += [(method, "coefficient") for method in ("L-BFGS", "L-BFGS-sharded")]
OTHERS = [method for method in METHODS if method not in ("L-BFGS", "Newton-CG")]
HOW += [pytest.param(method, "solver of one rank", marks=pytest.mark.thorough) for method in OTHERS]


@pytest.mark.parametrize("method, how", HOW)
def test_steps_are_made_shorter(method: str, how: Any, rank: int, size: int) -> None:
    """Beyond the edge the objective isn't finite, or a solver in it doesn't converge on all ranks or one."""
    outside, domain = [], mpiad.Domain(4 * size)

    def fun(x: Any) -> Any:
        away = bool((np.abs(mpiad.stop_gradient(x)) > FAR).any())
        outside.append(away)
        value = anp.sum(anp.sqrt(1.0 + 9.0 * (x - 2.9) ** 2) + 0.1 * (x - 2.9) ** 2)
        if away and how == "coefficient":
            kappa = np.full(domain.local_shape, np.inf if rank == size - 1 else 1.0)
            mpiad.linalg.solve_elliptic(domain, kappa, np.ones(domain.local_shape))
        if away and not isinstance(how, str):
            return value * (how if rank == size - 1 else 1.0)
        if away and (how == "solver" or rank == size - 1):
            comm = None if how == "solver" else MPI.COMM_SELF
            mpiad.linalg.solve(lambda u: u * np.arange(1.0, 4.0), np.ones(3), maxiter=1, comm=comm)
        return value

    result = mpiad.minimize(fun, np.array([-2.5, 0.0]), method=method, objective="mean", tol=1e-6)
    assert any(outside) and np.isfinite(result.fun)
    np.testing.assert_allclose(result.x, [2.9, 2.9], atol=1e-3)


def test_a_solver_that_fails_at_the_start_ends_the_solve(rank: int, size: int) -> None:
    def fun(x: Any) -> Any:
        raise mpiad.errors.ConvergenceError("it never does")

    for method in ("L-BFGS", "L-BFGS-sharded"):
        with pytest.raises(mpiad.errors.WorkerError, match="it never does"):
            mpiad.minimize(fun, np.ones(2), method=method)
