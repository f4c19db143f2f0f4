import autograd.numpy as np
import numpy
import plain_tape
import pytest
from against_autograd import check, random_like

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
