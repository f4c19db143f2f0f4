import autograd.numpy as np
import numpy
import pytest
from against_autograd import check, random_like

pytestmark = pytest.mark.serial

DTYPES = [numpy.float64, numpy.float32, numpy.complex128]


def arrays(*shapes, dtype=float):
    return tuple(random_like(numpy.empty(shape, dtype), i) for i, shape in enumerate(shapes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_concatenate(axis, dtype):
    shapes = [(2, 3), (4, 3), (0, 3)] if axis == 0 else [(2, 3), (2, 1), (2, 0)]
    check(lambda z: np.concatenate([z[0], z[1], z[2]], axis=axis), arrays(*shapes, dtype=dtype))


def test_concatenate_with_constants():
    (x,) = arrays((3,))
    check(lambda x: np.concatenate([numpy.ones(2), x, x * x, [1.0, 2.0]]), x)
    check(lambda x: np.concatenate((x[1:], x[:1])) * x, x)


def test_complex_beside_real():
    x, y = arrays((3,))[0], arrays((2,), dtype=complex)[0]
    # Autograd's cotangent of the real piece is complex.
    check(
        lambda z: np.concatenate([z[0], z[1]]),
        (x, y),
        reference=lambda z: np.concatenate([z[0] + 0j, z[1]]),
        mixed=False,
    )


@pytest.mark.parametrize("join", [np.vstack, np.hstack, np.column_stack, np.stack])
def test_stacks(join):
    check(lambda z: join([z[0], z[1], z[0] * z[1]]), arrays((3,), (3,)))
    check(lambda z: join([z[0], z[1]]), arrays((2, 3), (2, 3)))


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
def test_stack_axes(axis):
    check(lambda z: np.stack([z[0], 2 * z[1], z[0]], axis=axis), arrays((2, 3), (2, 3)))


def test_array_literals():
    x = arrays((4,))[0]
    check(lambda x: np.array([x[0], x[1] * x[2], 3.0, x[3]]), x)
    check(lambda x: np.array([[x[0], x[1]], [x[1], 2.0]]), x)
    check(lambda x: np.array([x, x * x]), x)
    check(lambda x: np.array(x) * x, x)
    check(lambda x: np.array(x, ndmin=3), x)
    # Autograd's cotangent of the real element is complex.
    check(lambda x: np.array([x[0], 1j * x[1]]), x, lambda x: np.array([x[0] + 0j, 1j * x[1]]), mixed=False)


def test_array_literal_of_scalars():
    check(lambda x: np.array([x, x * x, 1.0]), 2.0)
    check(lambda x: np.array([x, x * x, 1.0]), numpy.float32(2.0))
