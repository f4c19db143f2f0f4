"""Long vectors go through memory that ranks share: nothing else differs."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
import scipy.optimize
from mpi4py import MPI

import mpiad
from mpiad.errors import WorkerError
from mpiad.optimize import root_driven
from mpiad.optimize.root_exchange import ByMessages, ThroughMemory, exchange_of

WORLD = MPI.COMM_WORLD
N = 5003  # a stride of its own, and no multiple of 2, 3 or 4 ranks
SCALE = np.linspace(1.0, 30.0, N)


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ByMessages]]:
    made: list[ByMessages] = []
    monkeypatch.setattr(root_driven, "exchange_of", lambda *given: made.append(exchange_of(*given)) or made[-1])
    yield made


def centre(rank: int) -> np.ndarray:
    return np.sin(np.arange(N) * (1.0 + rank))


def minimum(size: int) -> np.ndarray:
    """Return where the sum of all (1 + r) |x - c_r|² is least."""
    weights = 1.0 + np.arange(size)
    return sum(w * centre(r) for r, w in enumerate(weights)) / weights.sum()


def own(x: Any, rank: int) -> Any:
    return (1.0 + rank) * anp.sum((x - centre(rank)[: len(x)]) ** 2)


@pytest.mark.also_on(2)  # whose root adds the other's part by itself
def test_sums_and_places_over_many_rounds(rank: int, size: int, rng: np.random.Generator) -> None:
    """Ranks that come at any time get every round's own vectors; sums are made in the order of ranks."""
    root = size - 1
    exchange = exchange_of(WORLD, root, N)
    assert isinstance(exchange, ThroughMemory) == (size > 1)
    for k in range(20):
        given = [np.arange(N) * (k + 1.0), np.cos(np.arange(N) + k)]
        if rank == root:
            exchange.lay_out(*given)
        WORLD.bcast(k, root)
        if rank == root:
            exchange.send(*given)
        else:
            x, v = np.empty(N), np.empty(N)
            time.sleep(rng.uniform(0.0, 2e-3))
            exchange.receive(x, v)
            assert np.array_equal(x, given[0]) and np.array_equal(v, given[1])
        parts = [np.exp(np.sin(np.arange(N) * (r + 1.0) + k) * 20.0) for r in range(size)]
        exchange.hand_in(parts[rank])
        WORLD.allreduce(1)
        total = exchange.total(parts[rank])
        expected = parts[0]
        for part in parts[1:]:
            expected = expected + part
        assert total is None if rank != root else total is not None and np.array_equal(total, expected)


@pytest.mark.parametrize("method, given", [("L-BFGS", True), ("L-BFGS", False), ("Newton-CG", False), ("Newton-CG", True)])
def test_minimum_of_what_all_ranks_hold(
    method: str, given: bool, rank: int, size: int, exchanges: list[ByMessages]
) -> None:
    keywords: dict[str, Any] = {"hessp": lambda x, v: 2.0 * (1.0 + rank) * v} if method == "Newton-CG" else {}
    if given:
        keywords["jac"] = lambda x: 2.0 * (1.0 + rank) * (x - centre(rank))
    else:
        keywords = {}
    options = {"gtol": 1e-8, "ftol": 0.0} if method == "L-BFGS" else {"xtol": 1e-10}
    found = mpiad.minimize(
        lambda x: own(x, rank), np.zeros(N), method=method, objective="sum", root=size - 1, options=options, **keywords
    )
    assert all(isinstance(exchange, ThroughMemory) == (size > 1) for exchange in exchanges) and exchanges
    np.testing.assert_allclose(found.x, minimum(size), rtol=0.0, atol=1e-9)
    assert WORLD.allreduce(found.x.tobytes() == WORLD.bcast(found.x.tobytes()), MPI.MIN)


@pytest.mark.parametrize("spoil", [False, True])
def test_path_of_one_function_is_scipys(spoil: bool, rank: int) -> None:
    """Where one rank has all of the function, its steps are SciPy's, bit for bit; x may be kept, or overwritten."""
    kept: list[tuple[np.ndarray, np.ndarray]] = []

    def plain(x: np.ndarray) -> tuple[float, np.ndarray]:
        return float(np.sum(SCALE * (x - centre(0)) ** 4)), 4.0 * SCALE * (x - centre(0)) ** 3

    def careless(x: np.ndarray) -> tuple[float, np.ndarray] | None:
        found = plain(x)
        kept.append((x, x.copy()))
        if spoil:
            kept.clear()
            x[:] = np.nan
        return found if rank == 0 else None

    options = {"gtol": 1e-7, "ftol": 0.0, "maxiter": 60}
    found = mpiad.minimize(careless, np.zeros(N), jac=True, options=options)
    expected = scipy.optimize.minimize(plain, np.zeros(N), jac=True, method="L-BFGS-B", options=options)
    assert np.array_equal(found.x, expected.x) and (found.nfev, found.nit) == (expected.nfev, expected.nit)
    assert spoil or len(kept) == found.nfev
    assert all(np.array_equal(x, as_it_was) for x, as_it_was in kept)


@pytest.mark.parametrize("first_fails", [True, False])
def test_solves_after_one_that_failed(first_fails: bool, rank: int, size: int) -> None:
    failing, calls = 0 if first_fails else size - 1, []

    def fun(x: Any) -> Any:
        calls.append(1)
        if rank == failing and len(calls) == 3:
            raise ZeroDivisionError("no way")
        return anp.sum(SCALE * (x - centre(rank)) ** 2)

    with pytest.raises(WorkerError, match="no way") as caught:
        mpiad.minimize(fun, np.zeros(N), objective="sum")
    assert caught.value.rank == failing
    for length in (N, 7):  # long ones and short ones in turn
        found = mpiad.minimize(
            lambda x: own(x, rank), np.zeros(length), objective="sum", options={"gtol": 1e-9, "ftol": 0.0}
        )
        np.testing.assert_allclose(found.x, minimum(size)[:length], rtol=0.0, atol=1e-9)


@pytest.mark.parametrize("because", ["one can not map it", "calls are watched"])
def test_messages_where_memory_is_not_shared(
    because: str, rank: int, size: int, exchanges: list[ByMessages], monkeypatch: pytest.MonkeyPatch
) -> None:
    def solved() -> scipy.optimize.OptimizeResult:
        return mpiad.minimize(lambda x: own(x, rank), np.zeros(N), objective="sum", options={"gtol": 1e-8, "ftol": 0.0})

    def refuse(*given: Any) -> None:
        raise OSError("refused")

    if because == "calls are watched":
        with mpiad.debug.checked():
            found = solved()
    else:
        if rank == size - 1:
            monkeypatch.setattr(mmap, "mmap", refuse)
        found = solved()
    assert [type(exchange) for exchange in exchanges] == [ByMessages]
    np.testing.assert_allclose(found.x, minimum(size), rtol=0.0, atol=1e-9)


def test_products_of_least_squares(rank: int, size: int, exchanges: list[ByMessages]) -> None:
    found = mpiad.optimize.least_squares(
        lambda x: np.sqrt(1.0 + rank) * (x - centre(rank)), np.zeros(N), tr_solver="lsmr", gtol=1e-10
    )
    assert isinstance(exchanges[0], ThroughMemory) == (size > 1)
    np.testing.assert_allclose(found.x, minimum(size), rtol=0.0, atol=1e-8)
