"""What the root-driven methods never do: evaluate more than allowed or twice, or claim more than was seen."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
import scipy.optimize
from known_problems import PROBLEMS

import mpiad
from mpiad.optimize import minimize
from mpiad.optimize.evaluated_points import Ending, EndMethod, Point
from mpiad.optimize.scipy_methods import corrected

METHODS = ["L-BFGS", "BFGS", "CG", "TNC", "SLSQP", "Newton-CG", "trust-ncg", "trust-krylov", "trust-constr"]
VALLEY = PROBLEMS["rosenbrock-10"]


def noted(fun: Callable[[Any], Any], points: list[bytes], values: list[float]) -> Callable[[Any], Any]:
    """Return a function that notes where it is called, and what it returns."""

    def noting(x: Any) -> Any:
        value = fun(x)
        plain = value
        while hasattr(plain, "_value"):
            plain, x = plain._value, getattr(x, "_value", x)
        points.append(np.asarray(x).tobytes())
        values.append(float(plain))
        return value

    return noting


@pytest.mark.parametrize("limit", [0, 13, *(pytest.param(n, marks=pytest.mark.one_rank) for n in (1, 2))])
@pytest.mark.parametrize("method", METHODS)
def test_maxfun_is_a_hard_cap(method: str, limit: int) -> None:
    points: list[bytes] = []
    values: list[float] = []
    fun = noted(VALLEY.fun, points, values)
    result = minimize(fun, VALLEY.start, method=method, objective="mean", options={"maxfun": limit}, hessp=_no_curvature)
    assert len(values) == result.nfev == max(limit, 1)
    assert not result.success and result.status != 0
    # The mean of three equal numbers may differ from them in the last digit.
    assert result.fun == pytest.approx(min(values), rel=1e-14)
    assert np.array_equal(result.x, np.frombuffer(points[values.index(min(values))]))
    assert f"maxfun={limit}" in result.message or method in ("L-BFGS", "TNC")
    assert len(result.history.loss) == result.nit + 1


def few(method: str) -> dict[str, int]:
    """Return options that end a solve soon, also one that goes on without evaluating the objective."""
    return {"maxfun": 30} if method == "TNC" else {"maxfun": 30, "maxiter": 30}


def _no_curvature(x: Any, v: Any) -> Any:
    return 200.0 * v


@pytest.mark.parametrize("method", METHODS)
def test_no_point_is_evaluated_twice(method: str) -> None:
    for name in ("rosenbrock-2", "wood"):
        fun, start, _ = PROBLEMS[name]
        points: list[bytes] = []
        result = minimize(
            noted(fun, points, []), start, method=method, objective="mean", hessp=_no_curvature, options=few(method)
        )
        # One pass gives the value, and the gradient where it is asked for: no point comes again for it.
        assert len(set(points)) == len(points) == result.evaluations["value"] + result.evaluations["both"]
        assert result.fun < result.history.loss[0]


@pytest.mark.parametrize("method", METHODS)
def test_derivatives_apart_are_evaluated_once_too(method: str) -> None:
    fun, start, _ = PROBLEMS["wood"]
    values: list[bytes] = []
    gradients: list[bytes] = []

    def jac(x: np.ndarray) -> np.ndarray:
        gradients.append(x.tobytes())
        a, b, c, d = x
        return np.array([
            -400.0 * a * (b - a**2) - 2.0 * (1.0 - a), 200.0 * (b - a**2) + 20.0 * (b + d - 2.0) + 0.2 * (b - d),
            -360.0 * c * (d - c**2) - 2.0 * (1.0 - c), 180.0 * (d - c**2) + 20.0 * (b + d - 2.0) - 0.2 * (b - d),
        ])  # fmt: skip

    minimize(
        noted(fun, values, []), start, method=method, objective="mean", jac=jac, hessp=_no_curvature, options=few(method)
    )
    assert len(set(values)) == len(values) and len(set(gradients)) == len(gradients)


@pytest.mark.parametrize("method", METHODS)
def test_maxiter_returns_the_best(method: str) -> None:
    # The mean of three equal numbers may differ from them in the last digit.
    values: list[float] = []
    fun = noted(VALLEY.fun, [], values)
    options = {"maxfun": 9} if method == "TNC" else {"maxiter": 4}
    result = minimize(fun, VALLEY.start, method=method, objective="mean", options=options, hessp=_no_curvature)
    assert not result.success and result.fun == pytest.approx(min(values), rel=1e-14)


BARRIERS = [(c, s, w) for c, s in ((1.0, 3.0), (100.0, 0.05)) for w in (np.nan, np.inf, -np.inf)]
# Alike on all ranks: what is made of these values is the root's matter.
BARRIERS[:-1] = [pytest.param(*case, marks=pytest.mark.one_rank) for case in BARRIERS[:-1]]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("c", "start", "outside"), BARRIERS)
def test_success_is_finite_and_the_best(method: str, c: float, start: float, outside: float) -> None:
    values, n = [], 8

    def fun(x: np.ndarray) -> tuple[float, np.ndarray]:
        inside = bool(np.all(x > 0.0))
        value = np.sum(c * x - np.log(x)) if inside else outside
        values.append(float(value))
        return value, c - 1.0 / x if inside else np.full(n, outside)

    with np.errstate(all="ignore"):
        result = minimize(
            fun, np.full(n, start), method=method, jac=True, objective="mean", options=few(method),
            hessp=lambda x, v: v / np.maximum(x, 1e-3) ** 2,
        )  # fmt: skip
    lowest = min(value for value in values if np.isfinite(value))
    assert np.isfinite(result.fun) and result.fun - lowest <= 1e-15 * abs(lowest)
    if result.success:
        assert np.isfinite(result.jac if method != "trust-constr" else result.grad).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [np.nan, *(pytest.param(v, marks=pytest.mark.one_rank) for v in (np.inf, -np.inf))])
def test_start_that_is_not_finite(method: str, value: float, rank: int, size: int) -> None:
    def fun(x: Any) -> Any:
        return anp.sum(x) * (value if rank == size - 1 else 1.0)

    with np.errstate(all="ignore"):
        result = minimize(fun, np.ones(3), method=method, objective="sum", options=few(method), hessp=_no_curvature)
    assert not result.success and result.status != 0 and "finite" in result.message
    start = np.full(3, np.nan)
    with np.errstate(all="ignore"):
        result = minimize(lambda x: anp.sum(x**2), start, method=method, options=few(method), hessp=_no_curvature)
    assert not result.success and "finite" in result.message


@pytest.mark.parametrize("method", [*METHODS, "L-BFGS-sharded", "Newton-CG-sharded"])
def test_data_that_are_not_finite_are_reported_by_rank_and_count(method: str, rank: int, size: int) -> None:
    data = np.ones(4)
    if rank == size - 1:
        data[1:3] = np.nan, np.inf

    def fun(x: Any, data: np.ndarray) -> Any:
        return anp.sum((x - data) ** 2)

    with np.errstate(all="ignore"):
        few = {"maxiter": 20} if method == "trust-constr" else {}  # it goes on, without an evaluation
        result = minimize(fun, np.zeros(4), args=(data,), method=method, objective="sum", options=few)
    expected = f"NaN or infinite at x0: on rank {size - 1} 1 of 1 values of fun, 2 of 4 entries of the gradient, "
    assert not result.success and result.message.endswith(f"{expected}2 of 4 values of args[0].")


class Seen:
    """Stands for the root's points."""

    maxfun = None

    def __init__(self, value: float, gradient: float | None):
        self.best = Point(np.array([1.0, 2.0]))
        self.best.value = value
        self.best.gradient = None if gradient is None else np.array([gradient, 0.0])

    def at(self, x: np.ndarray) -> Point:
        return self.best if x[0] == 1.0 else Point(x, 3.0, np.full(2, 1e-8))

    def gradient(self, x: np.ndarray) -> None:
        raise EndMethod(Ending(1, "No further evaluations."))


@pytest.mark.serial
@pytest.mark.parametrize(
    ("best", "gradient", "moved", "success"),
    [
        (1.0, 1e-9, True, True),  # as flat there as where the method has ended
        (1.0, 1e-3, True, False),
        (1.0, None, True, False),
        (3.0, 0.0, False, True),
        (3.0 * (1.0 - 1e-16), 1e-3, False, True),
    ],
)
def test_a_lower_point_that_was_seen_replaces_the_end(
    best: float, gradient: float | None, moved: bool, success: bool
) -> None:
    # `fun` of another point, as after a failed line search.
    ended = scipy.optimize.OptimizeResult(
        x=np.zeros(2), fun=2.5, jac=np.full(2, 1e-8), success=True, status=0, message="Fine."
    )
    result = corrected(ended, Seen(best, gradient), constrained=False, no_step=2)  # type: ignore[arg-type]
    assert result.success == success and (result.status == 0) == success
    assert np.array_equal(result.x, [1.0, 2.0] if moved else [0.0, 0.0])
    assert result.fun == (best if moved else 3.0) and ("best point" in result.message) == moved
    assert np.isnan(result.jac).all() == (moved and gradient is None)


def jumps(x: Any) -> Any:
    return anp.sum(anp.cosh(x - 1.0)) + 1e-3 * anp.sum(anp.floor(50 * anp.sin(7 * x)))


@pytest.mark.parametrize("bounds", [None, (-0.5, 0.9)])
@pytest.mark.parametrize("method", METHODS)
def test_value_and_gradient_are_those_of_the_best_point(method: str, bounds: Any, rank: int) -> None:
    if bounds is not None and method not in ("L-BFGS", "TNC", "SLSQP", "trust-constr"):
        pytest.skip("no bounds")
    seen = []

    def fun(x: Any) -> Any:
        here = mpiad.stop_gradient(x)
        if bounds is None or np.all((here >= bounds[0]) & (here <= bounds[1])):
            seen.append(jumps(here))
        return jumps(x)

    for seed in range(8):
        seen.clear()
        start = np.random.default_rng(seed).normal(size=4)
        options = {"maxfun": 60} if method == "TNC" else {"maxiter": 40}
        found = minimize(fun, start, method=method, bounds=bounds, options=options)
        assert found.fun == jumps(found.x) and np.array_equal(found.jac, np.sinh(found.x - 1.0))
        assert found.fun <= min(seen) * (1.0 + 1e-15)
        # Before SciPy 1.16, SLSQP's x may lie outside by a rounding error.
        assert bounds is None or np.all(np.clip(found.x, *bounds) == pytest.approx(found.x, rel=1e-15))
        if method in ("L-BFGS", "BFGS", "Newton-CG") and not found.success:
            assert "may have jumps or noise" in found.message and "check_grads" in found.message


def test_waiting_ranks_leave_their_cores(rank: int) -> None:
    used = []

    def callback(x: Any) -> None:
        time.sleep(0.8)
        raise StopIteration

    before = time.thread_time()
    minimize(lambda x: anp.sum((x - 2.0) ** 2), np.zeros(3), objective="mean", callback=callback)
    used.append(time.thread_time() - before)
    assert used[0] < 0.2, (os.getpid(), used)  # a rank that polls takes 0.8 s
