"""`asarray` and the like: identities that share memory as in NumPy, or copies, in all modes and in `jit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from jitted import check_jit

import mpiad

pytestmark = pytest.mark.serial
X = np.random.default_rng(0).standard_normal((3, 4))
CONVERSIONS: dict[str, Callable[[Any, Any], Any]] = {
    "asarray": lambda np, x: np.asarray(x),
    "asarray of dtype": lambda np, x: np.asarray(x, np.result_type(x)),
    "asarray in order": lambda np, x: np.asarray(x, order="F"),
    "asanyarray": lambda np, x: np.asanyarray(x),
    "ascontiguousarray": lambda np, x: np.ascontiguousarray(x),
    "asfortranarray": lambda np, x: np.asfortranarray(x),
    "require": lambda np, x: np.require(x, None, ["C_CONTIGUOUS", "A", "W"]),
    "require owned": lambda np, x: np.require(x, None, "O"),
}


def modes(fun: Callable, x: np.ndarray) -> dict[str, Any]:
    """Return a value and its gradient in each mode."""
    unit = [np.eye(1, x.size, k).reshape(x.shape) for k in range(x.size)]
    forward = [mpiad.jvp(fun, x, v) for v in unit]
    nested = mpiad.value_and_grad(lambda x: mpiad.value_and_grad(fun)(x)[0])
    return {
        "reverse": mpiad.value_and_grad(fun)(x),
        "forward": (forward[0][0], np.reshape([change for _, change in forward], x.shape)),
        "nested": nested(x),
        "of jit": mpiad.value_and_grad(mpiad.jit(fun))(x),
        "jit of": mpiad.jit(mpiad.value_and_grad(fun))(x),
    }


@pytest.mark.parametrize("name", CONVERSIONS)
@pytest.mark.parametrize("layout", ["C", "F", "part"])
def test_changes_in_place_are_numpys(name: str, layout: str) -> None:
    """Whether the result shares memory with its argument depends on the memory layout of the latter."""
    convert = CONVERSIONS[name]
    x = {"C": X.copy(), "F": np.asfortranarray(X), "part": np.repeat(X, 2, axis=1)[:, ::2]}[layout]

    def fun(np: Any, x: Any) -> Any:
        first = x[:, ::2] * 2.0  # its layout is that of x
        y = convert(np, first)
        y *= x[:, ::2]
        return np.sum(np.sin(y) * first)

    for_steps = fun(np, x.astype(complex))
    value = fun(np, x.copy(order="K"))
    np.testing.assert_allclose(for_steps, value, rtol=1e-14)
    gradient = np.zeros_like(x)
    for index in np.ndindex(*x.shape):
        moved = x.astype(complex)
        moved[index] += 1e-30j
        gradient[index] = fun(np, moved).imag / 1e-30
    for mode, (found, slope) in modes(lambda x: fun(anp, x), x).items():
        np.testing.assert_allclose(found, value, rtol=1e-14, err_msg=mode)
        np.testing.assert_allclose(slope, gradient, rtol=1e-12, err_msg=mode)


def test_an_array_is_returned_itself() -> None:
    def fun(x: Any) -> Any:
        assert anp.asarray(x) is x and anp.asarray(x, float) is x and anp.ascontiguousarray(x) is x
        assert anp.asfortranarray(x.T) is not x.T and anp.asarray(x, "f4").dtype == np.float32
        assert type(anp.asarray(x, int)) is np.ndarray  # a constant
        assert anp.asarray(x, copy=True) is not x
        with pytest.raises(ValueError, match="Unable to avoid copy"):
            anp.asarray(x, "f4", copy=False)
        return anp.sum(x)

    mpiad.grad(fun)(X)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: anp.asarray(x) * x, lambda x: anp.asarray(x, dtype=complex) ** 2, lambda x: anp.asanyarray([x, 2 * x]),
        lambda x: anp.ascontiguousarray(x.T) ** 2, lambda x: anp.ascontiguousarray(x[0, 0]) ** 2,
        lambda x: anp.asfortranarray(anp.sum(x)) ** 2, lambda x: anp.require(x, None, "CO") ** 2,
        lambda x: anp.asarray(anp.sum(x)) * x, lambda x: anp.asarray(x, "f4") * x,
    ],
)  # fmt: skip
def test_compiled(fun: Callable) -> None:
    check_jit(fun, X)
