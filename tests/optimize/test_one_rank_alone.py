"""What only one rank does, or gives, keeps no other waiting: each of these was a wait without end, or a silent success."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
import scipy.optimize
from mpi4py import MPI

import mpiad
from mpiad.errors import WorkerError
from mpiad.optimize import least_squares, minimize


def bowl(x: Any) -> Any:
    return anp.sum((x - 3.0) ** 2 * np.arange(1, 4))


@pytest.fixture(autouse=True)
def and_solve_again() -> Iterator[None]:
    """Solve after each test, which ranks that have disagreed can't."""
    yield
    again = minimize(lambda x: mpiad.mpi_allreduce(bowl(x)), np.zeros(3))
    np.testing.assert_allclose(again.x, 3.0, atol=1e-4)


def leaves(*args: Any) -> None:
    sys.exit(5)


def test_exit_of_the_root(size: int) -> None:
    start, root = np.zeros(3), size - 1
    bound = {"type": "ineq", "fun": leaves}
    for raised in (
        lambda: minimize(bowl, start, objective="mean", root=root, callback=leaves),
        lambda: minimize(bowl, start, objective="mean", root=root, method="SLSQP", constraints=bound),
        lambda: minimize(bowl, start, objective="sum", root=root, method="L-BFGS-sharded", callback=leaves),
        lambda: least_squares(lambda x: x - 1.0, start, root=root, callback=leaves),
    ):
        with pytest.raises(WorkerError, match="SystemExit: 5") as caught:
            raised()
        assert "sys.exit(5)" in caught.value.traceback and caught.value.exit_code == 5


def test_exception_of_the_callback_says_where(rank: int, size: int) -> None:
    def callback(x: Any) -> None:
        float("no number")

    with pytest.raises(ValueError, match="no number.*raised on the root") as caught:
        minimize(bowl, np.zeros(3), objective="mean", root=size - 1, callback=callback)
    cause = caught.value.__cause__
    if rank == size - 1:
        assert cause is not None and cause.__traceback__ is not None
        places = [frame.name for frame in traceback.extract_tb(cause.__traceback__)]
        assert places[-1] == "callback"


def test_products_of_the_user_s_own_on_one_rank(rank: int, size: int) -> None:
    def hessp(x: Any, v: Any) -> Any:
        return 2.0 * np.arange(1, 4) * v

    own = hessp if rank == size - 1 else None
    if size == 1:
        assert minimize(bowl, np.zeros(3), method="Newton-CG", hessp=own).success
        return
    with pytest.raises(ValueError, match="hessp=none and rank"):
        minimize(bowl, np.zeros(3), method="Newton-CG", objective="mean", hessp=own)


@pytest.mark.parametrize("method", ["L-BFGS", "L-BFGS-sharded"])
def test_callback_without_a_signature(method: str, rank: int, size: int) -> None:
    # Nothing can be asked of `min`; it is called with x.
    result = minimize(
        bowl, np.zeros(3), method=method, root=size - 1, objective="mean", callback=min if rank == size - 1 else None
    )
    np.testing.assert_allclose(result.x, 3.0, atol=1e-4)


@pytest.mark.parametrize("call", [2, 3, 4])
def test_number_of_residuals_that_changes(call: int, rank: int, size: int) -> None:
    calls = [0]

    def fun(x: Any) -> Any:
        calls[0] += 1
        return anp.sum(x) * np.ones(3 + (calls[0] == call and rank == size - 1)) - x[0]

    with pytest.raises(TypeError, match="same number of residuals each time, but got (3 and then 4|4 and then 3)"):
        least_squares(fun, np.ones(3))


def test_options_and_files_that_cannot_be(rank: int, size: int, tmp_path: Path) -> None:
    last = rank == size - 1
    with pytest.raises(ValueError, match="maxfun must be an integer"):
        minimize(bowl, np.zeros(3), method="L-BFGS-sharded", options={"maxfun": 10**400} if last else None)
    path = MPI.COMM_WORLD.bcast(tmp_path) / ("n" * (300 if last else 3))
    with pytest.raises((OSError, ValueError), match="too long"):
        minimize(bowl, np.zeros(3), method="L-BFGS-sharded", objective="sum", checkpoint=path)


def test_start_without_numbers() -> None:
    for method in ("L-BFGS", "BFGS", "trust-constr"):
        with pytest.raises(ValueError, match="at least one number"):
            minimize(lambda x: anp.sum(x) + 1.0, np.zeros(0), method=method)
    with pytest.raises(ValueError, match="at least one number"):
        least_squares(lambda x: np.ones(2), {"a": np.zeros((2, 0))})
    result = minimize(lambda x: anp.sum(x) + 1.0, np.zeros(0), method="L-BFGS-sharded", objective="mean")
    assert result.success and result.fun == 1.0


@pytest.mark.parametrize("method", ["L-BFGS", "L-BFGS-sharded"])
def test_gradient_with_an_imaginary_part(method: str, rank: int, size: int) -> None:
    turn = 1j if rank == size - 1 else 1.0
    with pytest.raises(TypeError, match="expected float64, like x0, but got complex128"):
        minimize(bowl, np.ones(3), method=method, objective="sum", jac=lambda x: turn * x)


def test_bounds_of_methods_that_take_none(rank: int) -> None:
    for method in ("BFGS", "CG", "Newton-CG", "trust-ncg", "trust-krylov"):
        with pytest.raises(ValueError, match="doesn't support bounds"):
            minimize(bowl, np.zeros(3), method=method, objective="mean", bounds=[(0, 1)] * 3 if rank == 0 else None)


@pytest.mark.parametrize("method", ["L-BFGS", "TNC", "SLSQP", "trust-constr"])
def test_bounds_in_the_form_of_the_variables(method: str, rank: int) -> None:
    bounds = scipy.optimize.Bounds(np.zeros((2, 2)), np.array([[1.0, 2.0], [4.0, 5.0]]))  # type: ignore[arg-type]
    result = minimize(
        lambda x: anp.sum((x - 3.0) ** 2), np.full((2, 2), 0.5), method=method, objective="mean",
        bounds=bounds if rank == 0 else None,
    )  # fmt: skip
    np.testing.assert_allclose(result.x, [[1.0, 2.0], [3.0, 3.0]], atol=1e-3)


def test_start_that_cannot_be_told_to_others(rank: int, size: int) -> None:
    class Local(dict):
        pass

    root = size - 1
    unpickled = "x0 is sent to all ranks, but .* can't be pickled"
    starts = ({"x": np.zeros(3), "f": lambda t: t}, r"x0\['f'\] is function"), ([Local(x=np.zeros(3))], unpickled)
    for start, text in starts:
        mine = start if rank == root else None
        with pytest.raises(TypeError, match=text):
            minimize(lambda x: 0.0, mine, root=root)
        with pytest.raises(TypeError, match=text):
            least_squares(lambda x: np.zeros(2), mine, root=root)
