import autograd.numpy as np
import numpy
import pytest
from against_autograd import check, random_like

pytestmark = pytest.mark.serial

X = random_like(numpy.empty((3, 4, 2)))


@pytest.mark.parametrize("shift", [0, 1, -1, 2, 3, -7, 100])
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_one_axis(shift, axis):
    check(lambda x: np.roll(x, shift, axis), X)
    check(lambda x: np.roll(x, shift=shift, axis=axis) * x, X)


def rolled(x, shifts, axes):
    for shift, axis in zip(shifts, axes):
        x = np.roll(x, shift, axis=axis)
    return x


@pytest.mark.parametrize("shift", [(1, -2), [2, 1]], ids=str)
def test_several_axes(shift):
    # Autograd can't negate a tuple of shifts.
    reference = lambda x: rolled(x, shift, (0, 1))  # noqa: E731
    check(lambda x: np.roll(x, shift, axis=(0, 1)), X, reference, mixed=False)


def test_one_shift_along_several_axes():
    check(lambda x: np.roll(x, 1, axis=(0, 2)), X)


@pytest.mark.parametrize("x", [numpy.empty((0, 3)), numpy.empty(0), numpy.ones(1), numpy.array(2.0)])
def test_small(x):
    check(lambda x: np.roll(x, 2), x)


def test_periodic_laplacian():
    def step(u):
        return np.roll(u, 1, 0) + np.roll(u, -1, 0) + np.roll(u, 1, 1) + np.roll(u, -1, 1) - 4 * u * u

    check(step, X[..., 0])
