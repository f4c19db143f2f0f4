"""Arguments that are unsigned or narrow integers of NumPy: rules compute -n, n - 1 and n - 2 from them."""

from functools import partial

import autograd.numpy as anp
import autograd.scipy.special as special
import numpy as np
import pytest

import mpiad

grad = partial(mpiad.grad, objective="sum")  # each rank's own derivative
X, W = np.array([0.3, 1.2, -0.7, 2.0, 0.9]), np.array([1.0, 2.0, -3.0, 4.0, 5.0])
SHIFTS = [np.uint8(1), np.uint64(2), np.int8(-128), np.array(1, np.uint32), (np.uint8(1), np.int8(-128))]
SHIFTS += [np.array([1, 2], np.uint8), [np.uint16(3), 1]]


@pytest.mark.parametrize("shift", SHIFTS, ids=repr)
def test_roll(shift):
    axis = (0, 0) if np.ndim(shift) else None

    def loss(x):
        return anp.sum(W * anp.roll(x, shift, axis=axis))

    expected = [W @ np.roll(unit, shift, axis=axis) for unit in np.eye(5)]
    np.testing.assert_array_equal(grad(loss)(X), expected)
    np.testing.assert_array_equal(mpiad.jit(grad(loss))(X), expected)


def test_a_shift_that_is_an_argument_of_a_compiled_function():
    gradient = grad(mpiad.jit(lambda x, shift: anp.sum(W * anp.roll(x, shift))))
    for shift in (2, np.uint8(3), np.array(3, np.uint8)):
        np.testing.assert_array_equal(gradient(X, shift), [W @ np.roll(unit, shift) for unit in np.eye(5)])


@pytest.mark.parametrize("kind", [np.uint8, np.uint64, np.int8])
def test_orders_of_norms(kind):
    np.testing.assert_array_equal(grad(lambda x: anp.linalg.norm(x, kind(1)))(X), np.sign(X))
    norm = np.sum(np.abs(X) ** 3) ** (1 / 3)
    gradient = grad(lambda x: anp.linalg.norm(x, kind(3)))(X)
    np.testing.assert_allclose(gradient, X * np.abs(X) / norm**2, rtol=1e-14)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_orders_of_functions_of_scipy(kind):
    x = np.abs(X)
    np.testing.assert_allclose(mpiad.jvp(lambda x: special.jn(kind(0), x), x, W)[1], -special.j1(x) * W, rtol=1e-14)
    gradient = grad(lambda x: anp.sum(special.yn(np.zeros(5, kind), x)))(x)
    np.testing.assert_allclose(gradient, -special.y1(x), rtol=1e-14)


def test_numbers_of_axes():
    a, b = np.arange(8.0).reshape(2, 2, 2), np.arange(4.0).reshape(2, 2)
    gradient = grad(lambda a: anp.sum(anp.tensordot(a, b, np.int8(2)) * W[:2]))(a)
    np.testing.assert_array_equal(gradient, W[:2, None, None] * b)
    softmax = np.exp(b) / np.exp(b).sum(1, keepdims=True)
    tangent = mpiad.jvp(lambda b: special.logsumexp(b, axis=np.uint8(1)), b, a[0] + 1.0)[1]
    np.testing.assert_allclose(tangent, (softmax * (a[0] + 1.0)).sum(1), rtol=1e-14)
