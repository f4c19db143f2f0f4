"""Many starting points over groups of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
import scipy.optimize
from mpi4py import MPI

import mpiad
from mpiad.errors import WorkerError
from mpiad.optimize import minimize_many

# Starts in valleys of their own.
STARTS = np.array([[3.2, -1.9], [0.2, 0.1], [-1.1, 0.9], [2.1, 2.2], [-0.9, -3.1], [1.0, 0.1], [-2.0, 0.9]])


@pytest.fixture(params=[nullcontext, mpiad.debug.checked], ids=["unwatched", "watched"])
def watch(request: pytest.FixtureRequest) -> Iterator[None]:
    """Without the watch, and as under MPIAD_DEBUG=1, where the library's own communicators aren't mpi4py's."""
    with request.param():
        yield


def hills(x: Any) -> Any:
    return anp.sum(x**2 + 3.0 * (1.0 - anp.cos(2.0 * np.pi * x)))


def scipys(start: np.ndarray) -> float:
    return scipy.optimize.minimize(lambda x: float(hills(x)), start, jac=autograd.grad(hills), method="L-BFGS-B").fun


def assert_same_everywhere(found: Any) -> None:
    values = [result.fun for result in found.results]
    others = MPI.COMM_WORLD.allgather((values, [result.x for result in found.results], found.best and found.best.fun))
    for theirs in others:
        np.testing.assert_array_equal(theirs[0], values)
        assert all(np.array_equal(a, result.x) for a, result in zip(theirs[1], found.results))
        assert theirs[2] == (found.best and found.best.fun)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_each_start_ends_in_its_valley(count: int, rank: int) -> None:
    found = minimize_many(hills, STARTS[:count] if rank == 0 else None)
    assert len(found.results) == count
    for start, result in zip(STARTS, found.results):
        assert result.success
        np.testing.assert_allclose(result.fun, scipys(start), atol=1e-7)
    best = min(range(count), key=lambda k: found.results[k].fun)
    assert found.best is found.results[best]
    assert_same_everywhere(found)


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("watch")
def test_groups_evaluate_together(rank: int, size: int) -> None:
    sizes = set()

    def shared(x: Any, weight: float, *, comm: Any) -> Any:
        sizes.add(comm.size)
        return mpiad.mpi_allreduce(weight * hills(x) / comm.size, comm=comm)

    found = minimize_many(shared, list(STARTS), group_size=2, args=(2.0,))
    # With three ranks, and with few starts, some ranks have nothing to do.
    assert sizes == ({2} if rank < size // 2 * 2 else set())
    for start, result in zip(STARTS, found.results):
        np.testing.assert_allclose(result.fun, 2.0 * scipys(start), atol=1e-6)
    assert_same_everywhere(found)


@pytest.mark.usefixtures("watch")
def test_a_start_that_fails_loses_no_other(rank: int) -> None:
    def fun(x: Any) -> Any:
        if x[0] > 3.0:
            raise ZeroDivisionError("no way")
        return anp.where(x[0] < -1.5, np.nan, hills(x))

    found = minimize_many(fun, STARTS)
    failed, lost = found.results[0], found.results[6]
    assert not failed.success and np.isnan(failed.fun) and failed.status == -1 and "no way" in failed.message
    assert isinstance(failed.error, WorkerError)
    assert not lost.success
    for k in (1, 2, 3, 4, 5):
        np.testing.assert_allclose(found.results[k].fun, scipys(STARTS[k]), atol=1e-7)
    assert found.best is found.results[1]
    assert_same_everywhere(found)


def test_all_starts_fail() -> None:
    def fun(x: Any) -> Any:
        raise KeyError("never")

    found = minimize_many(fun, STARTS[:3])
    assert found.best is None and [result.status for result in found.results] == [-1] * 3


def test_nests_and_the_sharded_method() -> None:
    starts = [{"a": np.zeros(2), "b": 3.0}, {"a": np.ones(2), "b": -1.0}]
    for method in ("L-BFGS", "L-BFGS-sharded"):
        found = minimize_many(lambda x: anp.sum((x["a"] - 1.0) ** 2) + x["b"] ** 2, starts, method=method)
        for result in found.results:
            np.testing.assert_allclose(result.x["a"], 1.0, atol=1e-5)


def test_each_start_has_a_checkpoint(tmp_path: Path) -> None:
    folder = MPI.COMM_WORLD.bcast(tmp_path)
    short = minimize_many(hills, STARTS[:3], checkpoint=folder / "run.npz", options={"maxiter": 2})
    assert sorted(file.name for file in folder.iterdir()) == [f"run.start{k}.npz" for k in range(3)]
    whole = minimize_many(hills, STARTS[:3], checkpoint=folder / "run.npz")
    for before, after, start in zip(short.results, whole.results, STARTS):
        np.testing.assert_array_equal(after.history.loss[: before.nit + 1], before.history.loss)
        np.testing.assert_allclose(after.fun, scipys(start), atol=1e-7)


def test_nothing_is_left_behind() -> None:
    for _ in range(3):
        minimize_many(hills, STARTS[:2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert minimize_many(hills, STARTS[:1]).best is not None


@pytest.mark.parametrize(
    ("keywords", "error", "words"),
    [
        ({"group_size": 0}, ValueError, "group_size must be .* but got 0"),
        ({"group_size": 1000}, ValueError, "ranks, but got 1000"),
        ({"root": 1}, TypeError, "'root' is no argument"),
        ({"method": "Nelder-Mead"}, ValueError, "'Nelder-Mead'"),
        ({"fun": 3.0}, TypeError, "fun must be callable"),
        ({"fun": lambda x: "text"}, TypeError, "one real number"),
    ],
)
def test_wrong_arguments_are_raised_on_all_ranks(keywords: dict, error: type, words: str, rank: int, size: int) -> None:
    own = keywords if rank == size - 1 else {}
    with pytest.raises(error, match=words):
        minimize_many(**{"fun": hills, "starts": STARTS, **own})


def test_no_start() -> None:
    with pytest.raises(ValueError, match="one starting point"):
        minimize_many(hills, [])


class Broken(dict):
    """Options that can't be read."""

    def items(self) -> Any:
        raise KeyError("torn")

    get = __getitem__ = __iter__ = keys = items  # type: ignore[assignment]


@pytest.mark.usefixtures("watch")
def test_what_one_group_alone_runs_into_is_raised_on_all_ranks(rank: int, size: int) -> None:
    last, begun = rank == size - 1, []
    settings = {"method": "L-BFGS-sharded", "options": Broken(m=3) if last else {"m": 3}}
    with pytest.raises(KeyError, match="torn"):
        minimize_many(lambda x: begun.append(1) or hills(x), list(STARTS[: max(4, size)]), **settings)
    assert bool(begun) == (not last)  # the other groups have come to the end of their starts
