"""The variables that the user's function gets: it may keep and overwrite them."""

from __future__ import annotations

from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest

import mpiad

CENTRE = np.linspace(-1.0, 2.0, 7)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("spoil", [False, True])
def test_variables_may_be_kept_and_changed(rank: int, apart: bool, spoil: bool) -> None:
    """A function that keeps every x, or overwrites it, ends where one that does neither ends."""
    kept: list[tuple[np.ndarray, np.ndarray]] = []
    weight = 1.0 + rank

    def plain(x: np.ndarray) -> tuple[float, np.ndarray]:
        return weight * float(np.sum((x - CENTRE) ** 4)), 4.0 * weight * (x - CENTRE) ** 3

    def careless(x: np.ndarray) -> tuple[float, np.ndarray]:
        found = plain(x)
        if spoil:
            x[:] = np.nan
        else:
            kept.append((x, x.copy()))
        return found

    options = {"gtol": 1e-9, "ftol": 0.0}
    expected = mpiad.minimize(plain, np.zeros(7), jac=True, objective="sum", options=options)
    if apart:
        value, gradient = (lambda x: careless(x)[0]), (lambda x: careless(x)[1])
        found = mpiad.mpi_optimize(value, gradient, np.zeros(7), objective="sum", options=options)
    else:
        found = mpiad.minimize(careless, np.zeros(7), jac=True, objective="sum", options=options)
    assert np.array_equal(found.x, expected.x) and found.nfev == expected.nfev
    assert np.all(np.isfinite(found.x))
    assert all(np.array_equal(x, as_it_was) for x, as_it_was in kept)


def test_traced_variables_may_be_kept() -> None:
    kept: list[tuple[np.ndarray, np.ndarray]] = []

    def fun(x: Any) -> Any:
        kept.append((x._value, x._value.copy()))
        return anp.sum((x - CENTRE) ** 4)

    found = mpiad.minimize(fun, np.zeros(7), objective="mean")
    assert len(kept) == found.nfev and all(np.array_equal(x, as_it_was) for x, as_it_was in kept)


def test_traced_values_are_refused() -> None:
    def outer(scale: Any) -> Any:
        return mpiad.minimize(lambda x: (scale * np.sum(x**2), 2.0 * x), np.ones(2), jac=True).fun

    with pytest.raises(TypeError, match=r"returned a traced value.*mpiad\.stop"):
        mpiad.grad(outer)(2.0)
