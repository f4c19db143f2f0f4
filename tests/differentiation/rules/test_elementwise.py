import autograd.numpy as np
import autograd.scipy.special as special
import numpy
import plain_tape
import pytest
from against_autograd import check, random_like
from autograd.core import primitive_jvps

import mpiad

pytestmark = pytest.mark.serial

REAL, COMPLEX = [numpy.float64, numpy.float32], [numpy.complex128, numpy.complex64]
FUNCTIONS = [np.negative, np.exp, np.log, np.sin, np.cos, np.tanh, np.abs, np.absolute, abs]


@pytest.mark.parametrize("dtype", REAL + COMPLEX)
@pytest.mark.parametrize("fun", FUNCTIONS)
def test_functions(fun, dtype):
    for shape in ((3, 2), (1,), (), (0, 2)):
        x = random_like(numpy.empty(shape, dtype))
        if fun is np.log:
            x = x * x + numpy.asarray(1, dtype)[()]
        check(fun, x)


@pytest.mark.parametrize("fun", FUNCTIONS)
def test_python_numbers(fun):
    check(fun, 1.5)


@pytest.mark.parametrize("fun", FUNCTIONS)
def test_negative_strides(fun):
    check(fun, numpy.arange(1.0, 7.0).reshape(2, 3).T[::-1])


def test_tangents_of_functions_with_an_adjoint_only():
    assert special.expit not in primitive_jvps
    check(special.expit, numpy.linspace(-2.0, 2.0, 5), reference=lambda x: 1 / (1 + np.exp(-x)), mixed=False)


def test_absolute_value_at_zero():
    check(np.abs, numpy.array([0.0, -0.0, 1.0, -2.0]))


def test_arccosh_on_both_sides_of_the_imaginary_axis():
    """The derivative of the inverse function is 1 / sinh(w) at z = cosh(w)."""
    z = numpy.array([1.5 + 0.3j, -1.2 + 0.4j, 0.3 - 0.8j, -0.5 - 0.2j])
    slope, one = 1 / numpy.sinh(numpy.arccosh(z)), numpy.ones(4, complex)
    numpy.testing.assert_allclose(plain_tape.make_vjp(np.arccosh, z)[0](one), slope, rtol=1e-14)
    numpy.testing.assert_allclose(mpiad.jvp(np.arccosh, z, one)[1], slope, rtol=1e-14)
    numpy.testing.assert_allclose(mpiad.jvp(mpiad.jit(np.arccosh), z, one)[1], slope, rtol=1e-14)


def test_tanh_far_from_zero():
    check(np.tanh, numpy.array([-30.0, 12.0, 5.0, 1e-8]))


@pytest.mark.few(3)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [*REAL, numpy.complex128])
def test_higher_derivatives_of_tanh_where_it_saturates(dtype, compiled):
    x, v = numpy.array([1000.0, -1000.0, 100.0, -100.0, 1.0, -2.5, 0.0], dtype), numpy.linspace(0.5, 2.0, 7).astype(dtype)
    t = numpy.tanh(x)
    fun = lambda x: np.sum(np.real(np.tanh(x)))  # noqa: E731
    fun = mpiad.jit(fun) if compiled else fun
    gradient, entries = mpiad.grad(fun), mpiad.jit(np.tanh) if compiled else np.tanh
    slope = lambda x: mpiad.jvp(entries, x, v)[1]  # noqa: E731
    second, third = -2 * t * (1 - t * t), (1 - t * t) * (6 * t * t - 2)
    tolerance = {"rtol": 100 * numpy.finfo(dtype).eps, "atol": 1e-30}
    numpy.testing.assert_allclose(mpiad.hvp(fun)(x, v), second * v, **tolerance)
    numpy.testing.assert_allclose(mpiad.make_jvp(gradient)(x)(v)[1], second * v, **tolerance)
    numpy.testing.assert_allclose(mpiad.jvp(slope, x, v)[1], second * v * v, **tolerance)
    numpy.testing.assert_allclose(mpiad.grad(lambda x: np.sum(np.real(slope(x))))(x), second * v, **tolerance)
    numpy.testing.assert_allclose(mpiad.hvp(lambda x: np.sum(np.real(gradient(x))))(x, v), third * v, **tolerance)


@pytest.mark.parametrize("kind", [int, numpy.uint8, bool])
def test_casts_to_integers_and_booleans_have_derivative_zero(kind, devices):
    x, v, w = numpy.array([1.5, 2.5, 3.0]), numpy.array([0.5, 2.0, -1.0]), numpy.array([1.0, 3.0, -2.0])
    factors, fun = w * x.astype(kind), lambda x, w: np.sum(w * x.astype(kind) * x * x)
    for f in (fun, mpiad.jit(fun)):
        numpy.testing.assert_array_equal(mpiad.grad(f)(x, w), 2 * factors * x)
        numpy.testing.assert_array_equal(mpiad.make_jvp(f)(x, w)(v)[1], (2 * factors * x) @ v)
        numpy.testing.assert_array_equal(mpiad.hvp(f)(x, w, v), 2 * factors * v)
        numpy.testing.assert_array_equal(mpiad.jit(mpiad.grad(f))(x, w), 2 * factors * x)
    x, v, w = map(devices.put, (x, v, w))
    numpy.testing.assert_array_equal(devices.look(mpiad.hvp(fun)(x, w, v)), 2 * factors * devices.look(v))
    tangent = mpiad.jvp(lambda x: np.sum(x.astype(kind) * x), x, v)[1]
    numpy.testing.assert_array_equal(devices.look(tangent), devices.look(x).astype(kind) @ devices.look(v))


@pytest.mark.parametrize("fun", FUNCTIONS[:-1])
def test_keywords_are_left_to_autograd(fun):
    with pytest.raises(TypeError, match="dtype"):
        plain_tape.make_vjp(lambda x: fun(x, dtype=numpy.float64), numpy.ones(3, numpy.float32))


def test_large_arrays_work_in_place_on_their_own_memory():
    x = random_like(numpy.empty(5000))
    kept = x.copy()
    for fun in FUNCTIONS:
        check(fun, numpy.abs(x) + 1 if fun is np.log else x)
    numpy.testing.assert_array_equal(x, kept)


@pytest.mark.skipif(numpy.sign(1j) != 1j, reason="before NumPy 2 it is the sign of the real part")
@pytest.mark.parametrize("module", [np, numpy], ids=["autograd", "numpy"])
@pytest.mark.parametrize("dtype", [numpy.complex128, numpy.complex64])
def test_the_sign_of_complex_numbers(dtype, module):
    """The phase: turning z by an angle changes it by i sign(z), and stretching z doesn't."""
    z, w = numpy.array([1 + 2j, -0.5 - 0.1j, 0.3 - 2j, 2.0], dtype), numpy.array([1.0, 2.0, -3.0, 4.0], numpy.float32)
    loss = lambda z: np.sum(np.real(module.sign(z)) * w)  # noqa: E731
    phase, tolerance = z / abs(z), 1e-5 if dtype is numpy.complex64 else 1e-12
    of_turn = w * numpy.real(1j * phase)
    for form in (mpiad.grad(loss), mpiad.grad(mpiad.jit(loss, strict=True)), mpiad.jit(mpiad.grad(loss), strict=True)):
        for _ in range(2):
            gradient = form(z)
            assert gradient.dtype == dtype
            numpy.testing.assert_allclose(numpy.real(gradient * 1j * z), of_turn, rtol=tolerance, atol=tolerance)
            numpy.testing.assert_allclose(numpy.real(gradient * z), 0.0, atol=tolerance)
    turned = mpiad.jvp(loss, z, (1j * z).astype(dtype))[1]
    numpy.testing.assert_allclose(turned, numpy.sum(of_turn), rtol=tolerance)
    # The second derivative of cos(angle + t).
    loss_of_turn = lambda t: np.sum(np.real(module.sign(z * np.exp(1j * t))) * w)  # noqa: E731
    second = mpiad.hvp(loss_of_turn)(0.0, 1.0)
    numpy.testing.assert_allclose(second, -numpy.sum(w * numpy.real(phase)), rtol=tolerance)


def test_the_sign_at_zero_and_of_real_numbers():
    at_zero = mpiad.grad(lambda z: np.sum(np.real(np.sign(z))))(numpy.array([0j, 1j]))
    numpy.testing.assert_allclose(at_zero, [0.0, 1.0])  # Re(z / |z|) at 1j changes by the real part of dz
    x = numpy.array([1.0, -2.0, 0.0])
    for fun in (lambda x: np.sum(x * np.sign(x)), lambda x: np.sum(x * numpy.sign(x))):
        numpy.testing.assert_array_equal(mpiad.grad(fun)(x), [1.0, -1.0, 0.0])
        numpy.testing.assert_array_equal(mpiad.jit(mpiad.grad(fun), strict=True)(x), [1.0, -1.0, 0.0])
