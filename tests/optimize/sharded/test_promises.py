"""What the sharded method promises beside its minimum: limits, callbacks, failures, wrong arguments."""

from __future__ import annotations

from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI

import mpiad
from mpiad.errors import WorkerError

METHOD = "L-BFGS-sharded"


def valley(x: Any) -> Any:
    whole = mpiad.mpi_allgather(x, axis=0)
    return anp.sum(100.0 * (whole[1:] - whole[:-1] ** 2) ** 2 + (1.0 - whole[:-1]) ** 2)


def solve(fun: Any = valley, x0: Any = None, **keywords: Any) -> Any:
    return mpiad.minimize(fun, np.array([-1.2, 1.0]) if x0 is None else x0, method=METHOD, **keywords)


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 23])
def test_limit_of_evaluations_is_hard(limit: int) -> None:
    values = []

    def fun(x: Any) -> Any:
        values.append(float(mpiad.stop_gradient(value := valley(x))))
        return value

    result = solve(fun, options={"maxfun": limit})
    assert len(values) == result.nfev == max(limit, 1) and not result.success and result.status == 1
    assert result.fun == min(MPI.COMM_WORLD.bcast(values))
    assert "maxfun" in result.message
    np.testing.assert_array_equal(valley(result.x), result.fun)


def test_limit_of_iterations() -> None:
    result = solve(options={"maxiter": 3})
    assert result.nit == 3 and result.status == 1 and not result.success and "maxiter" in result.message
    assert len(result.history.loss) == 4 and result.history.evaluations[-1] == result.nfev
    assert np.all(np.diff(result.history.loss) < 0.0)


@pytest.mark.parametrize("bounded", [False, True])
def test_history_has_the_length_of_each_step(bounded: bool, rank: int) -> None:
    iterates = [np.array([-1.2, 1.0])]
    bounds = [(-2.0, 0.5), (-2.0, 2.0)] if bounded and rank == 0 else None
    result = solve(callback=iterates.append, bounds=bounds, options={"maxiter": 12})
    whole = np.concatenate(MPI.COMM_WORLD.allgather(np.array(iterates)), axis=1)
    expected = np.linalg.norm(np.diff(whole, axis=0), axis=1)
    np.testing.assert_allclose(result.history.step, [0.0, *expected], rtol=1e-8)


@pytest.mark.parametrize("whole", [False, True])
def test_callback_of_one_rank_stops_everywhere(whole: bool, rank: int, size: int) -> None:
    seen = []

    def stop(x: Any) -> None:
        seen.append(x)
        if len(seen) == 3:
            raise StopIteration

    def told(intermediate_result: Any) -> None:
        stop(intermediate_result.x)

    result = solve(callback=(told if whole else stop) if rank == size - 1 else None)
    assert result.status == 99 and result.nit == 3 and not result.success
    assert len(seen) == (3 if rank == size - 1 else 0)
    if seen:
        np.testing.assert_array_equal(seen[-1], result.x)


def test_nests_of_any_form(rank: int, size: int) -> None:
    if rank == 0:
        start: Any = {"a": np.zeros((2, 3)), "b": (1.0 + 0.0j, np.zeros(0))}
    else:
        start = [np.zeros(rank - 1), np.zeros(2, np.float32)]
    target = 1.5 + rank

    def fun(x: Any) -> Any:
        if rank == 0:
            return anp.sum((x["a"] - target) ** 2) + anp.abs(x["b"][0] - (2.0 - 1.0j)) ** 2
        return anp.sum((x[0] - target) ** 2) + anp.sum((x[1] - target) ** 2)

    result = solve(fun, start, objective="sum", tol=1e-9)
    if rank == 0:
        assert result.x["a"].shape == (2, 3) and result.x["b"][1].shape == (0,)
        np.testing.assert_allclose(result.x["b"][0], 2.0 - 1.0j, atol=1e-7)
        np.testing.assert_allclose(result.x["a"], target, atol=1e-7)
    else:
        assert result.x[1].dtype == np.float32
        np.testing.assert_allclose(np.concatenate(result.x), target, atol=1e-6)


@pytest.mark.serial
def test_large_variables_belong_to_the_function() -> None:
    kept, copies = [], []

    def fun(x: Any, keep: bool) -> Any:
        if keep:
            kept.append(x[3:])
            copies.append(x[3:].copy())
        value, gradient = np.sum((x - 1.0) ** 4), 4.0 * (x - 1.0) ** 3
        if not keep:
            x[:] = np.nan
        return value, gradient

    options = {"maxiter": 6, "gtol": 0.0, "ftol": 0.0}
    ends = [solve(fun, np.linspace(2.0, 3.0, 200_000), jac=True, args=(keep,), options=options) for keep in (True, False)]
    np.testing.assert_array_equal(ends[0].x, ends[1].x)
    for mine, copy in zip(kept, copies):
        np.testing.assert_array_equal(mine, copy)


def test_gradient_of_the_user_s_own(rank: int, size: int) -> None:
    scale, x0 = 1.0 + rank, np.full(2, 1.0)
    apart = solve(lambda x: np.sum(scale * x**4), x0, objective="sum", jac=lambda x: 4.0 * scale * x**3)
    both = solve(lambda x: (np.sum(scale * x**4), 4.0 * scale * x**3), x0, objective="sum", jac=True)
    found = solve(lambda x: anp.sum(scale * x**4), x0, objective="sum")
    np.testing.assert_allclose(apart.x, both.x)
    np.testing.assert_allclose(found.x, both.x, atol=1e-12)
    assert apart.nfev == both.nfev == found.nfev


@pytest.mark.parametrize("evaluation", [1, 4])
def test_exception_of_one_rank_is_raised_on_all(evaluation: int, rank: int, size: int) -> None:
    count = [0]

    def fun(x: Any) -> Any:
        count[0] += 1
        if count[0] == evaluation and rank == size - 1:
            raise ZeroDivisionError("no way")
        return anp.sum((x - 1.0) ** 4)

    for _ in range(2):  # the communicator is usable afterwards
        count[0] = 0
        with pytest.raises(WorkerError, match="ZeroDivisionError: no way") as caught:
            solve(fun, objective="sum")
        assert caught.value.rank == size - 1
    assert solve(lambda x: anp.sum((x - 1.0) ** 2), objective="sum").success


def test_exception_in_a_callback_is_raised_on_all(rank: int, size: int) -> None:
    def fails(x: Any) -> None:
        raise KeyError("mine")

    with pytest.raises(WorkerError, match="KeyError: 'mine'"):
        solve(callback=fails if rank == size - 1 else None)


def test_start_that_is_not_finite() -> None:
    result = solve(lambda x: anp.sum(anp.log(x)), np.array([-1.0]), objective="sum")
    assert not result.success and result.status == 3 and result.nfev == 1 and "x0" in result.message


def test_rising_everywhere_is_no_success() -> None:
    result = solve(lambda x: (np.sum(x), -np.ones(2)), np.zeros(2), objective="sum", jac=True)
    assert not result.success and result.status == 2 and result.fun == 0.0


@pytest.mark.parametrize(
    ("keywords", "error", "words"),
    [
        ({"bounds": [(1.0, 0.0), (0.0, 1.0)]}, ValueError, "lower bound 1.0 and upper bound 0.0"),
        ({"bounds": [(0.0, 1.0)] * 3}, ValueError, "2 variables"),
        ({"options": {"maxcor": 0}}, ValueError, "maxcor"),
        ({"options": {"gtol": "small"}}, ValueError, "'small'"),
        ({"options": {"memory": 5}}, ValueError, "'memory'"),
        ({"callback": 3}, TypeError, "callback"),
        ({"x0": "text"}, TypeError, "x0 must hold"),
        ({"fun": lambda x: "text"}, TypeError, "one real number"),
    ],
)
def test_wrong_argument_of_one_rank_is_raised_on_all(keywords: dict, error: type, words: str, rank: int, size: int) -> None:
    own = keywords if rank == size - 1 else {}
    with pytest.raises(error, match=words):
        solve(**{"fun": lambda x: anp.sum(x**2), **own}, objective="mean")


def test_options_that_differ_are_refused(rank: int, size: int) -> None:
    if size > 1:
        with pytest.raises(ValueError, match="maxcor"):
            solve(options={"m": 3 + rank})
