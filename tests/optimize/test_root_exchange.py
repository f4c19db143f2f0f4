"""Long vectors of variables and gradients between the root and all ranks."""

from __future__ import annotations

from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
import scipy.optimize
from mpi4py import MPI

import mpiad
from mpiad.errors import WorkerError

WORLD = MPI.COMM_WORLD
N = 5003  # a stride of its own, and no multiple of 2, 3 or 4 ranks
SCALE = np.linspace(1.0, 30.0, N)


def centre(rank: int) -> np.ndarray:
    return np.sin(np.arange(N) * (1.0 + rank))


def minimum(size: int) -> np.ndarray:
    """Return where the sum of all (1 + r) |x - c_r|² is least."""
    weights = 1.0 + np.arange(size)
    return sum(w * centre(r) for r, w in enumerate(weights)) / weights.sum()


def own(x: Any, rank: int) -> Any:
    return (1.0 + rank) * anp.sum((x - centre(rank)[: len(x)]) ** 2)


@pytest.mark.parametrize("method, given", [("L-BFGS", True), ("L-BFGS", False), ("Newton-CG", False), ("Newton-CG", True)])
def test_minimum_of_what_all_ranks_hold(method: str, given: bool, rank: int, size: int) -> None:
    keywords: dict[str, Any] = {"hessp": lambda x, v: 2.0 * (1.0 + rank) * v} if method == "Newton-CG" else {}
    if given:
        keywords["jac"] = lambda x: 2.0 * (1.0 + rank) * (x - centre(rank))
    else:
        keywords = {}
    options = {"gtol": 1e-8, "ftol": 0.0} if method == "L-BFGS" else {"xtol": 1e-10}
    found = mpiad.minimize(
        lambda x: own(x, rank), np.zeros(N), method=method, objective="sum", root=size - 1, options=options, **keywords
    )
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


def test_products_of_least_squares(rank: int, size: int) -> None:
    found = mpiad.optimize.least_squares(
        lambda x: np.sqrt(1.0 + rank) * (x - centre(rank)), np.zeros(N), tr_solver="lsmr", gtol=1e-10
    )
    np.testing.assert_allclose(found.x, minimum(size), rtol=0.0, atol=1e-8)
