import autograd.numpy as np
import numpy
import plain_tape
import pytest
from against_autograd import check, random_like

pytestmark = pytest.mark.serial

DTYPES = [numpy.float64, numpy.float32, numpy.complex128, numpy.complex64]
AXES = [None, 0, 1, -1, (0, 2), (-1, 0), (0, 1, 2), ()]


@pytest.mark.few(48)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", AXES, ids=str)
@pytest.mark.parametrize("fun", [np.sum, np.mean])
def test_axes(fun, axis, keepdims, dtype):
    x = random_like(numpy.empty((3, 4, 2), dtype))
    check(lambda x: fun(x, axis=axis, keepdims=keepdims), x, floor=1.0)


@pytest.mark.few(6)
@pytest.mark.parametrize("fun", [np.sum, np.mean])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (5,), (1, 3), (3, 1)], ids=str)
def test_shapes(fun, shape):
    for dtype in DTYPES:
        x = random_like(numpy.empty(shape, dtype))
        check(lambda x: fun(x) * 2.0, x)
        check(lambda x: fun(x * x), x)


def test_empty():
    check(np.sum, numpy.empty((0, 3)))
    check(lambda x: np.sum(x, axis=1), numpy.empty((0, 3)))
    check(lambda x: np.sum(x, axis=0), numpy.empty((0, 3)))


METHODS = [lambda x: x.sum(), lambda x: x.sum(0), lambda x: np.sum(x, 1), lambda x: x.mean(axis=0), np.mean]


def test_methods_and_positional_axis():
    x = random_like(numpy.empty((3, 4)))
    for fun in METHODS:
        check(fun, x)
        check(fun, numpy.asfortranarray(x))
        check(fun, x[::-1, ::2])


def test_python_number():
    check(lambda x: np.sum(x) * x, 2.0)


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("fun", [np.sum, np.mean])
def test_dtype_of_the_sum(fun, axis):
    # Autograd's rules of some versions don't take a dtype.
    x = random_like(numpy.empty((3, 4), numpy.float32))
    check(lambda x: fun(x, axis=axis, dtype=numpy.float64), x, lambda x: fun(x, axis=axis), mixed=False, floor=1.0)


def test_real_part_of_complex_sums():
    x = random_like(numpy.empty((3, 4), complex))
    check(lambda x: np.real(np.sum(x * x, axis=0)), x)
    check(lambda x: np.sum(np.real(x) * np.imag(x)), x)


@pytest.mark.parametrize("fun", [np.sum, np.mean])
def test_cotangent_is_read_only_and_never_added_into(fun):
    vjp, _ = plain_tape.make_vjp(lambda x: fun(x) + fun(x, axis=0)[0] + fun(x) + x[0, 0], numpy.ones((3, 2)))
    first = vjp(1.0)
    second = vjp(1.0)
    numpy.testing.assert_array_equal(first, second)
    view, _ = plain_tape.make_vjp(fun, numpy.ones((3, 2)))
    assert not view(numpy.float64(1.0)).flags.writeable


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_initial(axis):
    # Autograd adds it to the tangent too.
    x = random_like(numpy.empty((3, 4)))
    check(lambda x: np.sum(x, axis=axis, initial=2.0), x, lambda x: np.sum(x, axis=axis) + 2.0, mixed=False, floor=1.0)


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("keepdims", [False, True])
def test_where(axis, keepdims):
    # Autograd's adjoint doesn't know it.
    x = random_like(numpy.empty((3, 4)))
    shape = {"axis": axis, "keepdims": keepdims}
    for mask in (numpy.arange(12).reshape(3, 4) % 5 > 0, numpy.array([True, True, True, True]), True):
        chosen = mask * numpy.ones((3, 4))
        counts = numpy.sum(chosen, **shape)
        check_masked(np.sum, x, mask, lambda x, c=chosen: np.sum(x * c, **shape), shape)
        check_masked(np.mean, x, mask, lambda x, c=chosen, n=counts: np.sum(x * c, **shape) / n, shape)


def check_masked(fun, x, mask, reference, shape):
    check(lambda x: fun(x, where=mask, **shape), x, reference, mixed=False, floor=1.0)


def test_numpys_own_functions():
    x = random_like(numpy.empty((3, 4)))
    # They pass out=None on, which autograd's rules of some versions don't take.
    check(lambda x: numpy.sum(x, axis=0), x, lambda x: np.sum(x, axis=0), mixed=False, floor=1.0)
    check(lambda x: numpy.mean(x, axis=0), x, lambda x: np.mean(x, axis=0), mixed=False, floor=1.0)
