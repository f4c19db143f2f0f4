import re

import autograd
import autograd.numpy as np
import numpy
import plain_tape
import pytest
from against_autograd import assert_close, check, random_like
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp

pytestmark = pytest.mark.serial

DTYPES = [numpy.float64, numpy.float32, numpy.complex128, numpy.complex64]


def spread(x, shape):
    return x + numpy.zeros(shape)


def check_where(c, x, y):
    # Autograd's adjoint doesn't undo broadcasting, so the reference broadcasts before it chooses.
    shape = numpy.broadcast_shapes(numpy.shape(c), numpy.shape(x), numpy.shape(y))

    def reference(x, y):
        return np.where(c, spread(x, shape), spread(y, shape))

    same = shape == numpy.shape(x) == numpy.shape(y)
    check(lambda z: np.where(c, z[0], z[1]), (x, y), lambda z: reference(z[0], z[1]), mixed=same)
    check(lambda x: np.where(c, x, y), x, lambda x: reference(x, y), mixed=same)
    check(lambda y: np.where(c, x, y), y, lambda y: reference(x, y), mixed=same)


@pytest.mark.parametrize("dtype", [numpy.float64, numpy.complex128])
@pytest.mark.parametrize("shape", [(3, 4), (5,), (1,), (), (0, 2), (60, 50)], ids=str)
def test_same_shapes(shape, dtype):
    x, y = random_like(numpy.empty(shape, dtype)), random_like(numpy.empty(shape, dtype), 1)
    check_where(numpy.real(x) > 0, x, y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_arrays(dtype):
    x, y = random_like(numpy.empty((60, 50), dtype)), random_like(numpy.empty((60, 50), dtype), 1)
    c = numpy.real(x) > 0
    check(lambda z: np.where(c, z[0], z[1]), (x, y))
    check(lambda x: np.where(c[:, :1], x, 2.0), x)
    check(lambda x: np.where(c, x * x, -x), x.T.copy().T)


@pytest.mark.parametrize("size", [10, 3000])
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_infinities_that_are_left_out_leave_no_trace(size):
    x = numpy.linspace(0.0, 1.0, size)
    gradient = plain_tape.grad(lambda x: np.sum(np.sqrt(np.where(x > 0.0, x, 0.0))))(x)
    numpy.testing.assert_allclose(gradient[1:], 0.5 / numpy.sqrt(x[1:]))
    assert gradient[0] == 0.0


def test_condition_traced_or_of_numbers():
    x = random_like(numpy.empty(4))
    check(lambda x: np.where(x > 0, x * x, -x), x)
    check(lambda x: np.where(numpy.array([1, 0, 2, 0]), x, 3.0), x)
    check(lambda x: np.where(x, 2.0 * x, x * x), x)
    check(lambda x: np.where([True, False, True, False], x, [1.0, 2.0, 3.0, 4.0]), x)


@given(hnp.mutually_broadcastable_shapes(num_shapes=3, max_dims=3, max_side=3))
def test_any_broadcast(shapes):
    c, x, y = (random_like(numpy.empty(s), i) for i, s in enumerate(shapes.input_shapes))
    check_where(c > 0, x, y)


def chosen(conditions, choices, default=0.0):
    """Return `select` as a composition of `where`, of parts in the shape of the result."""
    shape = numpy.broadcast_shapes(*[numpy.shape(part) for part in (*conditions, *choices, default)])
    result = spread(default, shape)
    for condition, choice in list(zip(conditions, choices))[::-1]:
        result = np.where(condition, spread(choice, shape), result)
    return result


def check_select(conditions, choices, default):
    """Compare with respect to all choices and the default together, and to each one."""
    parts = *choices, default
    with numpy.errstate(all="ignore"):
        assert_close(np.select(conditions, choices, default), numpy.select(conditions, choices, default))
    together = len({numpy.shape(part) for part in (*conditions, *parts)}) == 1
    check(
        lambda z: np.select(conditions, list(z[:-1]), z[-1]),
        parts,
        lambda z: chosen(conditions, z[:-1], z[-1]),
        mixed=together,
    )
    for k in range(len(parts)):

        def with_part(x, select=np.select, k=k):
            given = [*parts[:k], x, *parts[k + 1 :]]
            return select(conditions, given[:-1], given[-1])

        check(with_part, parts[k], lambda x: with_part(x, chosen), mixed=together)  # noqa: B023


@pytest.mark.parametrize("dtype", [numpy.float64, numpy.float32, numpy.complex128])
@pytest.mark.parametrize("shape", [(3, 4), (1,), (), (0, 2), (60, 50)], ids=str)
def test_select(shape, dtype):
    x, y, z = (random_like(numpy.empty(shape, dtype), k) for k in range(3))
    check_select([numpy.real(x) > 0.5, numpy.real(x) > 0], [x, y], z)  # the first true condition decides


@given(hnp.mutually_broadcastable_shapes(num_shapes=5, max_dims=3, max_side=3))
@settings(max_examples=15)
def test_select_of_any_broadcast(shapes):
    c, d, x, y, z = (random_like(numpy.empty(s), i) for i, s in enumerate(shapes.input_shapes))
    check_select([c > 0, d > 0], [x, y], z)


def test_select_of_numbers_and_lists():
    x = random_like(numpy.empty(4))
    check(lambda x: np.select([x > 0, x < -1], [x * x, 2.0], x), x, lambda x: chosen([x > 0, x < -1], [x * x, 2.0], x))
    check(lambda x: np.select([x > 0], [x * x], 1j), x, lambda x: chosen([x > 0], [x * x], 1j))
    check(lambda x: np.select([[True, False, True, False]], [x**3]), x, lambda x: x**3 * [1, 0, 1, 0])
    check(
        lambda x: np.select([x > 0], [[x[0], 2.0, x[1] ** 2, x[3]]]),
        x,
        lambda x: np.where(x > 0, np.array([x[0], 2.0, x[1] ** 2, x[3]]), 0),
    )
    check(
        lambda x: np.select((c for c in [x > 0]), (part for part in [x**2]), default=-x),
        x,
        lambda x: np.where(x > 0, x**2, -x),
    )
    check(lambda x: np.select(x > 0, np.stack([x, x**2, x, x]), x), x, lambda x: chosen(list(x > 0), [x, x**2, x, x], x))
    for gradient in (autograd.grad, plain_tape.grad):
        numpy.testing.assert_array_equal(
            gradient(lambda x: np.sum(np.select([x > 0], [x**2], 3 * x)))(x), np.where(x > 0, 2 * x, 3.0)
        )


@pytest.mark.parametrize("value", [1.0, numpy.nan, numpy.inf])
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_elements_that_select_leaves_out_leave_no_trace(value):
    x = numpy.linspace(0.0, 1.0, 3000)

    def fun(x):
        positive = np.where(x > 0, x, 0.0)
        return np.select([x <= 0, x < 2], [0.0, np.sqrt(np.select([x > 0], [positive]))], value + x**2)

    gradient = plain_tape.grad(lambda x: np.sum(fun(x)))(x)
    numpy.testing.assert_allclose(gradient[1:], 0.5 / numpy.sqrt(x[1:]))
    assert gradient[0] == 0.0
    numpy.testing.assert_allclose(plain_tape.jvp(fun, x, x)[1][1:], 0.5 * numpy.sqrt(x[1:]))


A = numpy.arange(6.0).reshape(2, 3) - 2.5
SELECTIONS = [
    ([A > 0], [A]),
    ([A > 0, A > -1], [numpy.float32(A), 1]),
    ([A > 0], [1]),
    ([A > 0], [True], False),
    ([A > 0], [numpy.int8(3)], numpy.uint8(7)),
    ([True, False], [1.5, 2]),
    ([A[0] > 0], [A], A[:, :1]),
    ([A > 0], [numpy.float32(2.0)], 1.0),
    ([[[True], [False]]], [[1, 2, 3]]),
    ([A > 0], [A * 1j], 1),
]
REFUSED = [
    ([A > 0], [A, A]), ([], []), ([A], [A]), ([A > 0, A < 0], [A, A[:, :2]]),
]  # fmt: skip


@pytest.mark.parametrize("args", SELECTIONS, ids=range(len(SELECTIONS)))
def test_select_of_plain_arrays_is_that_of_numpy(args):
    made, expected = np.select(*args), numpy.select(*args)
    assert type(made) is type(expected) and made.dtype == expected.dtype
    numpy.testing.assert_array_equal(made, expected, strict=True)


@pytest.mark.parametrize("args", REFUSED, ids=range(len(REFUSED)))
def test_select_raises_the_errors_of_numpy(args):
    with pytest.raises((ValueError, TypeError)) as expected:
        numpy.select(*args)
    conditions, choices = args
    for call in (
        lambda x: np.select(conditions, choices, x),
        lambda x: np.select(conditions, [x, *choices[1:]] if choices else []),
    ):
        with pytest.raises(type(expected.value), match=re.escape(str(expected.value))):
            plain_tape.make_vjp(call, A)
