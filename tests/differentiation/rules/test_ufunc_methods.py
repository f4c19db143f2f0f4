"""outer, reduce and accumulate of universal functions: NumPy's values, and differences of them."""

import autograd.numpy as np
import numpy
import pytest

import mpiad

pytestmark = pytest.mark.serial
X = numpy.random.default_rng(5).normal(size=(3, 4))
V = numpy.random.default_rng(6).normal(size=(3, 4))
CALLS = {
    "subtract.outer": lambda np, x: np.subtract.outer(x[0], x[1]),
    "add.outer": lambda np, x: np.add.outer(x, x[1]),
    "divide.outer": lambda np, x: np.divide.outer(x[0], x + 5.0),
    "multiply.outer": lambda np, x: np.multiply.outer(x[0, 0], x),
    "hypot.outer": lambda np, x: np.hypot.outer(x[0], x),
    "power.outer of a list": lambda np, x: np.power.outer(abs(x[0]), [1, 2, 3]),
    "equal.outer": lambda np, x: np.equal.outer(x[0], x[0]) * x[0],
    "add.reduce": lambda np, x: np.add.reduce(x),
    "add.reduce of all": lambda np, x: np.add.reduce(x * x, None),
    "add.reduce of a list": lambda np, x: np.add.reduce([x[0], x[1] * x[2]]),
    "multiply.reduce": lambda np, x: np.multiply.reduce(x, axis=-1, keepdims=True),
    "maximum.reduce": lambda np, x: np.maximum.reduce([x[0], x[1], x[2]]),
    "minimum.reduce": lambda np, x: np.minimum.reduce(x, 1),
    "logical_and.reduce": lambda np, x: np.logical_and.reduce([x > 0, x < 1]) * x,
    "logical_or.reduce": lambda np, x: np.logical_or.reduce(x > 1) * x,
    "add.accumulate": lambda np, x: np.add.accumulate(x),
    "multiply.accumulate": lambda np, x: np.multiply.accumulate(x, 1),
}


@pytest.mark.parametrize("name", CALLS)
def test_values_and_derivatives(name):
    call = CALLS[name]
    numpy.testing.assert_array_equal(call(np, X), call(numpy, X), strict=True)
    loss = lambda x: np.sum(np.sin(call(np, x)))  # noqa: E731
    plain = lambda x: numpy.sum(numpy.sin(call(numpy, x)))  # noqa: E731
    expected = (plain(X + 1e-5 * V) - plain(X - 1e-5 * V)) / 2e-5
    second = (plain(X + 1e-3 * V) - 2 * plain(X) + plain(X - 1e-3 * V)) / 1e-6
    for fun in (loss, mpiad.jit(loss, strict=True)):
        numpy.testing.assert_allclose(numpy.sum(mpiad.grad(fun)(X) * V), expected, rtol=1e-7)
        numpy.testing.assert_allclose(mpiad.jvp(fun, X, V)[1], expected, rtol=1e-7)
        numpy.testing.assert_allclose(numpy.sum(mpiad.hvp(fun)(X, V) * V), second, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["maximum.accumulate", "add.reduceat", "sin.reduce"])
def test_other_methods_say_what_to_call(name):
    fun, method = name.split(".")
    with pytest.raises(AttributeError, match=r"reduce of add, .* call mpiad\.segment_sum"):
        mpiad.grad(lambda x: np.sum(getattr(getattr(np, fun), method)(x, [0, 1])))(X)
