import autograd.numpy as np
import numpy
import plain_tape
import pytest
from against_autograd import check, random_like
from hypothesis import given
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
