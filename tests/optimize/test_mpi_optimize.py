"""Objective and gradient apart: each is evaluated only when the root's method asks for it, and once for each point."""

from __future__ import annotations

from typing import Any

import autograd
import numpy as np
import pytest
import scipy.optimize
from known_problems import PROBLEMS

import mpiad
from mpiad.errors import WorkerError

WOOD = PROBLEMS["wood"]


@pytest.mark.parametrize("method", ["L-BFGS", "CG", "SLSQP", "TNC"])
def test_as_scipy_with_each_function_called_on_demand(method: str, rank: int, size: int) -> None:
    calls, options = {"f": 0, "g": 0}, {"maxfun": 400} if method == "TNC" else {"maxiter": 30}
    gradient = autograd.grad(WOOD.fun)

    def f(x: Any) -> Any:
        calls["f"] += 1
        return WOOD.fun(x) if rank == size - 1 else 0.0

    def g(x: Any) -> Any:
        calls["g"] += 1
        return gradient(x) if rank == size - 1 else np.zeros(4)

    got = mpiad.mpi_optimize(f, g, WOOD.start if rank == 0 else None, method, objective="sum", options=options)
    name = "L-BFGS-B" if method == "L-BFGS" else method
    expected = scipy.optimize.minimize(lambda x: float(WOOD.fun(x)), WOOD.start, jac=gradient, method=name, options=options)
    assert np.array_equal(got.x, expected.x) and got.nfev == expected.nfev and got.nit == expected.nit
    assert calls["f"] == got.evaluations["value"] + got.evaluations["both"]
    assert calls["g"] == got.evaluations["gradient"] + got.evaluations["both"]
    assert calls["f"] <= got.nfev and calls["g"] <= got.nfev


@pytest.mark.parametrize("wrong", [None, True, 3.0])
def test_gradient_must_be_a_function(wrong: Any, rank: int, size: int) -> None:
    with pytest.raises(TypeError, match="jac must be callable"):
        mpiad.mpi_optimize(WOOD.fun, wrong if rank == size - 1 else autograd.grad(WOOD.fun), WOOD.start)


def test_exception_in_the_gradient(rank: int, size: int) -> None:
    def g(x: Any) -> Any:
        if rank == size - 1:
            raise ZeroDivisionError("in g")
        return np.zeros(4)

    for _ in range(2):
        with pytest.raises(WorkerError, match="in g"):
            mpiad.mpi_optimize(WOOD.fun, g, WOOD.start, objective="mean")
