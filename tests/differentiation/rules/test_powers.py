import autograd.numpy as np
import numpy
import pytest
from against_autograd import check, random_like

import mpiad

pytestmark = pytest.mark.serial

DTYPES = [numpy.float64, numpy.float32, numpy.complex128, numpy.complex64]
EXPONENTS = [2, 3, 4, 5, 1, 0, -1, -2, 0.5, 2.0, 3.0, 1.5, -0.5]
EXPONENTS += [numpy.float64(2), numpy.int64(3), numpy.float32(0.5)]


def positive(shape, dtype=float):
    return numpy.abs(random_like(numpy.empty(shape))).astype(dtype)[()] + numpy.asarray(0.5, dtype)[()]


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", EXPONENTS, ids=repr)
def test_constant_exponent(n, dtype):
    for shape in ((3, 2), (1,), (), (0, 2)):
        x = positive(shape, dtype)
        check(lambda x: x**n, x)
        check(lambda x: np.power(x, n), x)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 1, -1, -2, 3.0])
def test_negative_base(n):
    check(lambda x: x**n, random_like(numpy.empty(5)))


@pytest.mark.parametrize("n", [2, 3, 4, 1, 1.5, 0])
def test_zero_base(n):
    check(lambda x: x**n, numpy.array([0.0, 1.0, 0.0]), order=2 if isinstance(n, int) and n != 0 else 1)


@pytest.mark.parametrize("n", [2, 3, -1, 0.5, 1 + 2j])
def test_complex_base(n):
    check(lambda x: x**n, random_like(numpy.empty(4, complex)))


def test_other_exponents_take_autograds_rule():
    x, y = positive((3, 2)), random_like(numpy.empty((2,)))
    check(lambda x: x**y, x)
    check(lambda y: x**y, y)
    check(lambda z: z[0] ** z[1], (x, y))
    check(lambda y: 2.0**y, y)
    check(lambda x: x**True, x)
    check(lambda x: x ** numpy.array(2.0), x)


def test_traced_scalar_exponent():
    check(lambda y: positive((3,)) ** y, numpy.float64(2.0))


@pytest.mark.few(7)
@pytest.mark.parametrize("dtype", [numpy.float64, numpy.complex128])
@pytest.mark.parametrize("n", [0, 1, 2, 0.0, 1.0, numpy.array(0.0), numpy.array([0, 1, 2, 0])], ids=repr)
def test_zero_base_with_an_exponent_that_jit_takes_as_input(n, dtype):
    x, v = numpy.array([0.0, 0.0, 0.0, 2.0], dtype), numpy.ones(4, dtype)
    first = n * numpy.where(numpy.equal(n, 0), 1, x) ** (n - 1.0)
    second = n * (n - 1) * numpy.where(numpy.less(n, 2), 1, x) ** (n - 2.0)
    power = lambda x, n: np.sum(np.real(x**n))  # noqa: E731
    for fun in (power, mpiad.jit(power)):
        numpy.testing.assert_allclose(mpiad.grad(fun)(x, n), first)
        numpy.testing.assert_allclose(mpiad.hvp(lambda x, fun=fun: fun(x, n))(x, v), second)


@pytest.mark.parametrize("compiled", [False, True])
def test_second_derivatives_by_base_and_exponent_at_exponent_zero(compiled):
    z, v = numpy.array([[2.0, 0.5], [0.0, 0.0]]), numpy.array([[0.1, 0.2], [0.3, 0.4]])
    x, (a, b) = z[0], v
    power = lambda z: np.sum(z[0] ** z[1])  # noqa: E731
    product = mpiad.hvp(mpiad.jit(power) if compiled else power)(z, v)
    numpy.testing.assert_allclose(product, [b / x, a / x + b * numpy.log(x) ** 2], rtol=1e-14)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("y", [numpy.uint32([0, 1, 3]), numpy.uint8([0, 2, 1]), numpy.int8([-128, 0, 2])], ids=repr)
def test_exponents_of_few_bits(y, compiled):
    """In their own dtype, y - 1 overflows."""
    x, v, n = numpy.array([1.1, 3.0, 0.5]), numpy.array([0.5, 1.0, -2.0]), y.astype(float)
    power = lambda x: np.sum(x**y)  # noqa: E731
    fun = mpiad.jit(power) if compiled else power
    first, second = n * x ** (n - 1), n * (n - 1) * x ** (n - 2)
    numpy.testing.assert_allclose(mpiad.grad(fun)(x), first, rtol=1e-13)
    numpy.testing.assert_allclose(mpiad.make_jvp(fun)(x)(v)[1], first @ v, rtol=1e-13)
    numpy.testing.assert_allclose(mpiad.hvp(fun)(x, v), second * v, rtol=1e-13)


def test_constant_base_in_half_precision():
    base, x, v = numpy.float16([3, 300]), numpy.float32([1.5, 0.5]), numpy.float32([0.5, -2.0])
    log, power = numpy.log(base.astype(float)), base.astype(float) ** x
    fun = lambda x: np.sum(base**x)  # noqa: E731
    for f in (fun, mpiad.jit(fun)):
        numpy.testing.assert_allclose(mpiad.grad(f)(x), log * power, rtol=1e-6)
        numpy.testing.assert_allclose(mpiad.make_jvp(f)(x)(v)[1], (log * power) @ v, rtol=2e-6)
        numpy.testing.assert_allclose(mpiad.hvp(f)(x, v), log**2 * power * v, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_square_and_square_root(dtype):
    for shape in ((3, 2), (1,), (), (0, 2)):
        check(np.square, positive(shape, dtype))
        check(np.sqrt, positive(shape, dtype))


def test_single_precision_base_with_double_exponent():
    check(lambda x: x ** numpy.float64(2.0), positive((3,), numpy.float32))
