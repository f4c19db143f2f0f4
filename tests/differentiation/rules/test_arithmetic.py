import operator

import autograd.numpy as np
import numpy
import plain_tape
import pytest
from against_autograd import check, random_like
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import mpiad

pytestmark = pytest.mark.serial

BINARY = [operator.add, operator.sub, operator.mul, operator.truediv]
UFUNCS = [np.add, np.subtract, np.multiply, np.divide, np.true_divide]
DTYPES = [numpy.float64, numpy.float32, numpy.complex128, numpy.complex64]
SHAPES = [
    ((3, 4), (3, 4)),
    ((3, 4), (4,)),
    ((1, 4), (3, 1)),
    ((), (3, 4)),
    ((1,), (3,)),
    ((1, 1), (1,)),
    ((2, 1, 3), (4, 1)),
    ((0, 3), (1, 3)),
    ((0,), (1,)),
    ((), ()),
    ((1,), (1,)),
]


def operand(shape, dtype=float, seed=0):
    x = random_like(numpy.empty(shape, dtype), seed)
    return x + numpy.asarray(3, dtype)[()]


def check_binary(op, x, y):
    check(lambda z: op(z[0], z[1]), (x, y))
    check(lambda x: op(x, y), x, constants=(y,))
    check(lambda y: op(x, y), y, constants=(x,))


@pytest.mark.few(22)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("op", BINARY)
def test_both_operands(op, shapes):
    for a, b in (shapes, shapes[::-1]):
        check_binary(op, operand(a), operand(b, seed=1))


@pytest.mark.few(18)
@pytest.mark.parametrize("b", DTYPES)
@pytest.mark.parametrize("a", DTYPES)
@pytest.mark.parametrize("op", BINARY)
def test_mixed_dtypes(op, a, b):
    check_binary(op, operand((3, 2), a), operand((2,), b, seed=1))


@pytest.mark.few(12)
@pytest.mark.parametrize("op", BINARY)
@pytest.mark.parametrize("number", [2, 2.5, 2.5j, True, numpy.float32(1.5), numpy.int64(3)], ids=repr)
def test_constants(op, number):
    for dtype in DTYPES:
        x = operand((3,), dtype)
        check(lambda x: op(x, number), x)
        check(lambda x: op(number, x), x)
        check(lambda x: op(number, x), x[0])


@pytest.mark.parametrize("op", BINARY)
@pytest.mark.parametrize("other", [numpy.array([1, 2, 4]), [1.0, 2.0, 4.0], numpy.int8([1, 2, 3])], ids=repr)
def test_integers_and_lists_as_other_operand(op, other):
    check(lambda x: op(x, other), operand((3,)))
    check(lambda x: op(other, x), operand((3,)))


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_arctan2(shapes):
    check_binary(np.arctan2, *[operand(shape, seed=seed) for seed, shape in enumerate(shapes)])


@pytest.mark.parametrize("kind", [numpy.int8, numpy.uint8, numpy.int16, numpy.int32], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("precision", [numpy.float64, numpy.float32], ids=lambda kind: kind.__name__)
def test_arctan2_of_integers(kind, precision):
    """Their squares overflow."""
    largest = numpy.iinfo(kind).max
    numbers, x = numpy.array([largest, largest // 2 + 1, 3], kind), numpy.array([1.5, -2.5, 0.75], precision)
    exact, z = numbers.astype(float), x.astype(float)
    for fun, expected in (
        (lambda x: np.arctan2(x, numbers), exact / (exact**2 + z**2)),
        (lambda x: np.arctan2(numbers, x), -exact / (exact**2 + z**2)),
        (lambda x: np.arctan2(x, numbers[0]), exact[0] / (exact[0] ** 2 + z**2)),
    ):
        vjp, ans = plain_tape.make_vjp(fun, x)
        eps = 4 * max(numpy.finfo(ans.dtype).eps, numpy.finfo(precision).eps)
        numpy.testing.assert_allclose(vjp(numpy.ones_like(ans)), expected, eps)
        numpy.testing.assert_allclose(plain_tape.jvp(fun, x, numpy.ones_like(x))[1], expected, eps)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("constants", [numpy.array([True, False]), numpy.float16([300, 3])], ids=repr)
def test_arctan2_of_booleans_and_half_precision(constants, compiled):
    """Booleans can't be negated, and the squares in half precision are infinite."""
    x, v, c = numpy.float32([1.5, -250.0]), numpy.float32([0.5, -2.0]), constants.astype(float)
    first, second = c / (x**2 + c**2), -2 * x * c / (x**2 + c**2) ** 2
    for sign, fun in ((1, lambda x: np.sum(np.arctan2(x, constants))), (-1, lambda x: np.sum(np.arctan2(constants, x)))):
        f = mpiad.jit(fun) if compiled else fun
        numpy.testing.assert_allclose(mpiad.grad(f)(x), sign * first, 1e-6)
        numpy.testing.assert_allclose(mpiad.make_jvp(f)(x)(v)[1], sign * first @ v, 1e-6)
        numpy.testing.assert_allclose(mpiad.hvp(f)(x, v), sign * second * v, 1e-6)


@pytest.mark.parametrize("precision", [numpy.float32, numpy.float64])
def test_arctan2_of_huge_and_tiny_numbers(precision):
    """The squares would overflow, or vanish."""
    largest = numpy.finfo(precision).maxexp // 2
    y, x = (numpy.array(s, precision) for s in ([3.0, -1.0, 0.5, 2.0], [1.0, 2.0, -0.25, 3.0]))
    for exponent in (largest + 20, -largest - 15, 3):
        scale = precision(2.0) ** exponent
        # The derivatives at the multiples are the derivatives at y and x, divided by the factor.
        expected = [slope / (y**2 + x**2) / scale for slope in (x, -y)]
        for fun in (np.arctan2, mpiad.jit(np.arctan2)):
            for _ in range(2):
                found = mpiad.grad(lambda v, u, fun=fun: np.sum(fun(v, u)), (0, 1), objective="sum")(y * scale, x * scale)
                numpy.testing.assert_allclose(found, expected, rtol=8 * numpy.finfo(precision).eps)
            _, tangent = mpiad.make_jvp(lambda v, fun=fun, x=x * scale: fun(v, x))(y * scale)(numpy.ones_like(y))
            numpy.testing.assert_allclose(tangent, expected[0], rtol=8 * numpy.finfo(precision).eps)


@pytest.mark.parametrize("op", BINARY)
@pytest.mark.parametrize("x", [2.5, 2.5 + 1j, numpy.float64(2.5), numpy.array(2.5)], ids=repr)
def test_scalars(op, x):
    check(lambda x: op(x, x * x), x)
    check(lambda x: op(x, numpy.arange(1.0, 4.0)), x)


@pytest.mark.parametrize("op", BINARY)
def test_same_operand_twice(op):
    check(lambda x: op(x, x) * x, operand((4,)))


@pytest.mark.parametrize("fun", UFUNCS)
def test_other_keywords_are_left_to_autograd(fun):
    with pytest.raises(TypeError, match="dtype"):
        plain_tape.make_vjp(lambda x: fun(x, 2.0, dtype=numpy.float64), operand((4,), numpy.float32))


def test_a_cotangent_shared_by_two_terms_is_not_changed():
    g = numpy.ones(3)
    vjp, _ = plain_tape.make_vjp(lambda z: (z[0] + z[1]) + z[0], (numpy.zeros(3), numpy.zeros(3)))
    first, second = vjp(g)
    numpy.testing.assert_array_equal(first, 2 * numpy.ones(3))
    numpy.testing.assert_array_equal(second, numpy.ones(3))
    numpy.testing.assert_array_equal(g, numpy.ones(3))


def test_single_precision_stays_single():
    x, y = operand((3,), numpy.float32), operand((3,))
    vjp, _ = plain_tape.make_vjp(lambda x: x * y, x)
    assert vjp(y).dtype == numpy.float32


@given(
    hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=3, max_side=3),
    st.sampled_from(BINARY),
    st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
)
def test_any_broadcast(shapes, op, dtypes):
    a, b = (operand(s, d, i) for i, (s, d) in enumerate(zip(shapes.input_shapes, dtypes)))
    check(lambda z: op(z[0], z[1]), (a, b))
