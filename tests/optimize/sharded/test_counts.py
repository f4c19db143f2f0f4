"""The sharded method beside SciPy's L-BFGS-B in one process: evaluations and minimisers."""

from __future__ import annotations

from functools import cache
from typing import Any

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
import scipy.optimize
from known_problems import PROBLEMS
from mpi4py import MPI

import mpiad

OPTIONS = {"gtol": 1e-8, "ftol": 0.0, "maxfun": 20000}
# These take fourteen and six thousand evaluations, which are counted on one and two ranks.
LONG = {"quadratic", "rosenbrock-1000"}


def cut(x: np.ndarray, rank: int, size: int) -> np.ndarray:
    """Return a rank's piece: uneven, and empty on some ranks where there are few variables."""
    ends = np.round(np.linspace(0.0, 1.0, size + 1) ** 1.3 * len(x)).astype(int)
    return x[ends[rank] : ends[rank + 1]]


def sharded(name: str, rank: int, size: int) -> Any:
    fun, start, _ = PROBLEMS[name]
    whole = fun if size == 1 else lambda x: fun(mpiad.mpi_allgather(x, axis=0))
    return mpiad.minimize(whole, cut(start, rank, size), method="L-BFGS-sharded", options=OPTIONS)


@cache
def scipys(name: str) -> scipy.optimize.OptimizeResult:
    fun, start, _ = PROBLEMS[name]
    return scipy.optimize.minimize(
        lambda x: float(fun(x)), start, jac=autograd.grad(fun), method="L-BFGS-B", options=OPTIONS
    )


@pytest.mark.thorough
@pytest.mark.limit(300)
@pytest.mark.one_rank  # that several take as many is `test_minimisers_agree_with_one_rank`
def test_evaluations_beside_scipy(rank: int, size: int, request: pytest.FixtureRequest) -> None:
    long = request.config.getoption("thorough") and size <= 2
    names = [name for name in PROBLEMS if long or name not in LONG]
    ratios = {}
    for name in names:
        got = sharded(name, rank, size)
        assert got.success and got.status == 0, (name, got.message)
        assert got.history.gradient_norm[-1] <= 1e-8
        pieces = MPI.COMM_WORLD.gather((got.x, got.jac, got.fun, got.nfev, got.nit))
        if rank == 0:
            expected = scipys(name)
            assert expected.success
            assert all(piece[2:] == pieces[0][2:] for piece in pieces)
            assert np.max(np.abs(np.concatenate([piece[1] for piece in pieces]))) == got.history.gradient_norm[-1]
            x = np.concatenate([piece[0] for piece in pieces])
            # Powell's function is singular at its minimum: a gradient of 1e-8 leaves x that far away.
            np.testing.assert_allclose(x, expected.x, atol=3e-3 if name == "powell" else 1e-5)
            lowest = PROBLEMS[name].lowest
            np.testing.assert_allclose(got.fun, expected.fun if lowest is None else lowest, atol=1e-12)
            ratios[name] = got.nfev / expected.nfev
    if rank == 0:
        assert max(ratios.values()) <= 1.25, ratios
        assert np.exp(np.mean(np.log(list(ratios.values())))) <= 1.05, ratios


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["logistic", pytest.param("rosenbrock-100", marks=pytest.mark.thorough)])
def test_minimisers_agree_with_one_rank(name: str, rank: int, size: int) -> None:
    fun, start, _ = PROBLEMS[name]
    alone = mpiad.minimize(fun, start, method="L-BFGS-sharded", comm=MPI.COMM_SELF, options=OPTIONS)
    found = sharded(name, rank, size)
    got, gradient = (np.concatenate(MPI.COMM_WORLD.allgather(found[key])) for key in ("x", "jac"))
    assert found.history.gradient_norm[-1] == np.max(np.abs(gradient))
    np.testing.assert_allclose(got, alone.x, atol=1e-6)


BARRIERS = [(c, s, n, w) for c in (1.0, 10.0, 100.0) for s in (0.05, 1.0, 3.0) for n in (1, 40) for w in (np.nan, np.inf)]


@pytest.mark.parametrize(("c", "start", "n", "outside"), BARRIERS)
def test_log_barriers(c: float, start: float, n: int, outside: float, rank: int, size: int) -> None:
    left, result = solved_barrier(c, cut(np.full(n, start), rank, size), outside)
    assert left > 0 or c * start <= 3.0
    assert result.nfev <= 35, (result.nfev, result.message)


# Decades of c x at the start, and from how far above and below the minimiser.
SPREAD = [(-3.0, 0.0), (-1.0, 1.0), (0.0, 1.0), (0.5, 1.0), (1.0, 1.3)]


@pytest.mark.one_rank
@pytest.mark.parametrize("n", [2, 10, 200])
@pytest.mark.parametrize(("low", "high"), SPREAD)
def test_log_barriers_from_starts_of_unlike_size(low: float, high: float, n: int, rank: int, size: int) -> None:
    outside = 0
    for seed in range(3):
        start = 10.0 ** np.random.default_rng(seed).uniform(low, high, n) / 7.0
        left, result = solved_barrier(7.0, cut(start, rank, size), np.inf)
        assert result.nfev <= 35, (seed, result.nfev, result.message)
        outside += left
    assert outside > 0 or high < 1.0


@pytest.mark.parametrize("far", [30.0, 100.0, 300.0])
@pytest.mark.parametrize("n", [1, 2, 10, 40])
def test_log_barriers_from_far_away(far: float, n: int, rank: int, size: int) -> None:
    left, result = solved_barrier(1.0, cut(np.full(n, far), rank, size), np.nan)
    assert left > 0 and result.nfev <= 35, (result.nfev, result.message)


@pytest.mark.thorough
def test_log_barriers_with_bounds(rank: int, size: int) -> None:
    c = cut(np.linspace(1.0, 100.0, 40), rank, size)
    # The domain ends within the bounds, the minimisers of a few variables lie beyond them.
    left, result = solved_barrier(c, np.full(c.shape, 3.0), np.inf, 1e-8, bounds=[(0.0, 0.3)] * len(c), end=0.01)
    assert left > 0
    np.testing.assert_allclose(result.x, np.minimum(0.01 + 1.0 / c, 0.3), rtol=1e-6)


def solved_barrier(
    c: Any, piece: np.ndarray, outside: float, gtol: float = 1e-5, bounds: Any = None, end: float = 0.0
) -> tuple[int, Any]:
    """Minimise f = Σ c (x - end) - log(x - end); return how many trials have left its domain, and the result."""
    left = 0

    def fun(x: Any) -> Any:
        nonlocal left
        inside = MPI.COMM_WORLD.allreduce(bool(np.all(x > end)), MPI.LAND)
        left += not inside
        if not inside:
            return outside, np.full(x.shape, outside)
        return np.sum(c * (x - end) - np.log(x - end)), c - 1.0 / (x - end)

    result = mpiad.minimize(
        fun, piece, jac=True, objective="sum", method="L-BFGS-sharded", bounds=bounds,
        options={"ftol": 0.0, "gtol": gtol},
    )  # fmt: skip
    assert result.success, (result.nfev, result.message)
    highest = np.inf if bounds is None else np.array([high for _, high in bounds])
    np.testing.assert_allclose(result.x, np.minimum(end + 1.0 / c, highest), rtol=1e-4)
    return left, result


def test_bounds_beside_scipy(rank: int, size: int) -> None:
    fun, rng = PROBLEMS["rosenbrock-10"].fun, np.random.default_rng(3)
    for n in (5, 24):
        low = rng.uniform(-1.5, 0.8, n)
        high, start = low + rng.uniform(0.05, 2.0, n), rng.uniform(-2.0, 2.0, n)
        seen = []

        def whole(x: Any, seen: list[np.ndarray] = seen) -> Any:
            seen.append(np.array(mpiad.stop_gradient(x)))
            return fun(mpiad.mpi_allgather(x, axis=0))

        mine = [cut(v, rank, size) for v in (low, high, start)]
        pairs = list(zip(mine[0], mine[1]))
        got = mpiad.minimize(whole, mine[2], method="L-BFGS-sharded", bounds=pairs, options={"gtol": 1e-7, "ftol": 0.0})
        assert got.success and all(np.all((mine[0] <= x) & (x <= mine[1])) for x in seen)
        expected = scipy.optimize.minimize(
            fun, start, jac=autograd.grad(fun), method="L-BFGS-B", bounds=list(zip(low, high)),
            options={"gtol": 1e-7, "ftol": 0.0},
        )  # fmt: skip
        x = np.concatenate(MPI.COMM_WORLD.allgather(got.x))
        np.testing.assert_allclose(x, expected.x, atol=1e-6)
        assert np.any((x == low) | (x == high))
        assert got.nfev <= 2 * expected.nfev


def test_bounds_on_one_rank_only(rank: int, size: int) -> None:
    bounds = scipy.optimize.Bounds([2.0, -np.inf], [np.inf, 0.5]) if rank == size - 1 else None
    result = mpiad.minimize(
        lambda x: anp.sum((x - 1.0) ** 2), np.array([3.0, 0.0]), objective="sum", method="L-BFGS-sharded", bounds=bounds
    )
    np.testing.assert_allclose(result.x, [2.0, 0.5] if rank == size - 1 else [1.0, 1.0], atol=1e-6)
