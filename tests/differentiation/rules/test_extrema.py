import autograd.numpy as np
import numpy
import plain_tape
import pytest
from against_autograd import assert_close, check, random_like
from autograd.core import make_vjp as autograd_make_vjp

import mpiad

pytestmark = pytest.mark.serial

EXTREMA = [np.max, np.min, np.amax, np.amin]
CHOICES = [np.maximum, np.minimum, np.fmax, np.fmin]
AXES = [None, 0, 1, -1, (0, 1), (1, 2)]
TIED = numpy.array([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [0.0, -1.0, 3.0]])


@pytest.mark.few(48)
@pytest.mark.parametrize("dtype", [numpy.float64, numpy.float32])
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", AXES, ids=str)
@pytest.mark.parametrize("fun", EXTREMA)
def test_axes(fun, axis, keepdims, dtype):
    x = random_like(numpy.empty((3, 4, 2), dtype))
    check(lambda x: fun(x, axis=axis, keepdims=keepdims), x)


@pytest.mark.parametrize("axis", [None, 0, 1, (0, 1)], ids=str)
@pytest.mark.parametrize("fun", EXTREMA)
def test_ties(fun, axis):
    check(lambda x: fun(x, axis=axis), TIED)


@pytest.mark.parametrize("axes", [(-1, -2), (-2, -1), (0, -1)], ids=str)
def test_negative_axes_in_tuples(axes):
    x = random_like(numpy.empty((3, 4, 2)))
    positive = tuple(i % 3 for i in axes)
    # Autograd's tangent takes only non-negative axes in a tuple.
    check(lambda x: np.max(x, axis=axes), x, reference=lambda x: np.max(x, axis=positive), mixed=False)


@pytest.mark.few(12)
@pytest.mark.parametrize("axis", [None, 0, 1, (0, 1)], ids=str)
@pytest.mark.parametrize("fun", EXTREMA)
@pytest.mark.parametrize("ties", ["none", "some", "most"])
def test_large(fun, axis, ties):
    x = random_like(numpy.empty((100, 90)))
    if ties == "some":
        x[::7, ::5] = x.max()
        x[1::7, ::5] = x.min()
    elif ties == "most":
        x = numpy.sign(x)
    check(lambda x: fun(x, axis=axis), x)
    check(lambda x: fun(x, axis=axis), numpy.asfortranarray(x), order=1)


@pytest.mark.parametrize("shape", [(3, 3), (60, 60)])
@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_nan(axis, shape):
    x = random_like(numpy.empty(shape))
    x[1, 2] = numpy.nan
    x[0, :2] = 9.0
    ours, y = plain_tape.make_vjp(lambda x: np.max(x, axis=axis), x)
    theirs, _ = autograd_make_vjp(lambda x: np.max(x, axis=axis), x)
    g = random_like(y)
    assert_close(ours(g), theirs(g), x)


def test_where_and_initial():
    # Autograd's rules know neither; the same is a choice before the extremum.
    x, mask = random_like(numpy.empty((60, 50))), random_like(numpy.empty((60, 50)), 1) > 0
    for axis in (None, 0, 1):
        check(
            lambda x, axis=axis: np.max(x, axis=axis, where=mask, initial=-9.0),
            x,
            lambda x, axis=axis: np.max(np.where(mask, x, -9.0), axis=axis),
            mixed=False,
        )
    low = numpy.array([[1.0, 2.0], [-3.0, -4.0]])
    check(lambda x: np.max(x, axis=1, initial=0.0), low, lambda x: np.array([x[0, 1], 0.0]), mixed=False)
    check(lambda x: np.min(x, initial=-9.0), low, lambda x: 0.0 * x[0, 0] - 9.0, mixed=False)


def test_numpys_own_functions():
    # They pass out=None on, which autograd's rules of some versions don't take.
    check(lambda x: numpy.max(x, axis=0), TIED, lambda x: np.max(x, axis=0), mixed=False)
    check(lambda x: numpy.min(x, axis=0), TIED, lambda x: np.min(x, axis=0), mixed=False)


def test_methods_and_scalars():
    for fun in (lambda x: x.max(), lambda x: x.min(axis=0), lambda x: np.max(x, 0)):
        check(fun, TIED)
    check(lambda x: np.max(x) * 2.0, numpy.array(2.0))
    check(lambda x: np.max(x) * 2.0, numpy.float64(2.0))


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", [numpy.float64, numpy.float32])
@pytest.mark.parametrize("fun", CHOICES)
def test_choices(fun, dtype):
    for a, b in (((3, 4), (3, 4)), ((3, 4), (4,)), ((), (3,)), ((), ()), ((1, 3), (2, 1))):
        x, y = random_like(numpy.empty(a, dtype)), random_like(numpy.empty(b, dtype), 1)
        check(lambda z: fun(z[0], z[1]), (x, y))
        check(lambda x: fun(x, 0.1), x)
        check(lambda x: fun(0.1, x), x)


@pytest.mark.parametrize("fun", CHOICES)
def test_tied_choices(fun):
    check(lambda x: fun(x, 2.0), TIED)
    check(lambda x: fun(x, x), TIED)
    check(lambda z: fun(z[0], z[1]), (TIED, TIED.T))


@pytest.mark.parametrize("fun", CHOICES)
def test_the_adjoint_of_a_choice_is_in_single_precision(fun):
    x = random_like(numpy.empty((3, 4), numpy.float32))
    vjp, value = plain_tape.make_vjp(lambda x: fun(x, 0), x)
    assert vjp(value).dtype == numpy.float32


@pytest.mark.parametrize("bounds", [((0.4,), {}), ((None, 0.4), {}), ((), {"min": 0.4}), ((0.1,), {"max": 0.6})])
def test_the_method_clip_has_the_bounds_of_numpys(bounds):
    args, kwargs = bounds
    x = numpy.linspace(-0.95, 1.0, 12)

    def loss(x):
        return np.sum(x.clip(*args, **kwargs) ** 3)

    clipped = x.clip(*args, **kwargs)
    expected = numpy.where(clipped == x, 3 * x**2, 0.0)
    for derivative in (
        mpiad.grad(loss),
        mpiad.grad(mpiad.jit(loss, strict=True)),
        mpiad.jit(mpiad.grad(loss), strict=True),
    ):
        numpy.testing.assert_allclose(derivative(x), expected)
    numpy.testing.assert_allclose(mpiad.jvp(loss, x, x)[1], expected @ x)
    numpy.testing.assert_array_equal(mpiad.jit(lambda x: x.clip(*args, **kwargs), strict=True)(x), clipped)
