import autograd
import autograd.numpy as np
import numpy
import plain_tape
import pytest
from autograd.core import VSpace
from autograd.extend import SparseObject, vspace

from mpiad.differentiation.backward import accumulate
from mpiad.differentiation.rules.scatter_add import Scatter

pytestmark = pytest.mark.serial


def summed(*cotangents):
    total, owned = None, False
    for g in cotangents:
        total, owned = accumulate(total, owned, g)
    return total


def piece(idx, values, shape=(4,), dtype=float, repeats=False):
    return Scatter(shape, numpy.dtype(dtype), idx, values, repeats)


def test_first_is_kept_second_makes_a_new_array_third_is_added_in_place():
    a, b, c = numpy.ones(3), 2 * numpy.ones(3), 4 * numpy.ones(3)
    first, owned = accumulate(None, False, a)
    assert first is a and not owned
    second, owned = accumulate(first, owned, b)
    assert second is not a and second is not b and owned
    third, owned = accumulate(second, owned, c)
    assert third is second and owned
    numpy.testing.assert_array_equal(third, 7 * numpy.ones(3))
    for given, value in ((a, 1), (b, 2), (c, 4)):
        numpy.testing.assert_array_equal(given, value * numpy.ones(3))


def test_read_only_views_are_summed_into_new_arrays():
    view = numpy.broadcast_to(numpy.float64(2.0), (3, 2))
    total = summed(view, view, view)
    assert total.flags.writeable
    numpy.testing.assert_array_equal(total, numpy.full((3, 2), 6.0))


def test_nothing_is_added_by_none():
    a = numpy.ones(2)
    assert accumulate(None, False, None) == (None, False)
    assert accumulate(a, False, None) == (a, False)


@pytest.mark.parametrize("order", [1, -1])
def test_precision_is_not_lost(order):
    single, double = numpy.ones(2, numpy.float32), numpy.full(2, 1e-12)
    total = summed(*[single, double, double, single][::order])
    assert total.dtype == numpy.float64
    numpy.testing.assert_array_equal(total, 2 + 2e-12)
    total = summed(*[single, single, double][::order])
    assert total.dtype == numpy.float64
    total = summed(*[numpy.ones(2), numpy.ones(2), 1j * numpy.ones(2)][::order])
    numpy.testing.assert_array_equal(total, 2 + 1j)


def test_owned_single_precision_takes_a_double_piece_without_loss():
    single = numpy.ones(4, numpy.float32)
    total = summed(single, single, piece(1, 1e-12))
    assert total.dtype == numpy.float64 and total[1] == 2 + 1e-12


@pytest.mark.parametrize("scalar", [1.5, numpy.float64(1.5), numpy.float32(1.5), numpy.array(1.5), 1.5j])
def test_scalars(scalar):
    assert summed(scalar, scalar, scalar) == 3 * scalar
    assert summed(scalar, numpy.float64(1.0), scalar) == 2 * scalar + 1


def test_pieces_alone():
    numpy.testing.assert_array_equal(summed(piece(slice(1, 3), numpy.array([1.0, 2.0]))), [0, 1, 2, 0])
    numpy.testing.assert_array_equal(summed(piece(0, 1.0), piece(0, 2.0), piece(-1, 4.0)), [3, 0, 0, 4])
    numpy.testing.assert_array_equal(summed(piece([1, 1, 2], numpy.ones(3), repeats=True)), [0, 2, 1, 0])


def test_piece_after_an_array_leaves_the_array_alone():
    a = numpy.ones(4)
    total = summed(a, piece(0, 1.0), piece([1, 1], numpy.ones(2), repeats=True))
    numpy.testing.assert_array_equal(total, [2, 3, 1, 1])
    numpy.testing.assert_array_equal(a, numpy.ones(4))
    view = numpy.broadcast_to(numpy.float64(2.0), (4,))
    numpy.testing.assert_array_equal(summed(view, piece(0, 1.0)), [3, 2, 2, 2])


def test_pieces_of_scalars():
    assert summed(piece((), numpy.float64(2.0), ()), numpy.float64(1.0), piece((), 4.0, ())) == 7.0
    assert summed(numpy.float64(1.0), piece(None, numpy.array([2.0]), ())) == 3.0


def test_mask():
    mask = numpy.array([True, False, True, False])
    total = summed(numpy.ones(4), piece(mask, numpy.array([1.0, 2.0])))
    numpy.testing.assert_array_equal(total, [2, 1, 3, 1])


def test_autograds_sparse_objects():
    space: VSpace = vspace(numpy.zeros(3))

    def put(total):
        total[1] += 2.0
        return total

    a = numpy.ones(3)
    numpy.testing.assert_array_equal(summed(SparseObject(space, put)), [0, 2, 0])
    numpy.testing.assert_array_equal(summed(a, SparseObject(space, put), SparseObject(space, put)), [1, 5, 1])
    numpy.testing.assert_array_equal(a, numpy.ones(3))


@pytest.mark.parametrize("make", [tuple, list])
def test_sequences(make):
    a, b = make([numpy.ones(2), 1.0]), make([numpy.ones(2), 2.0])
    total = summed(a, b, b)
    assert type(total) is make
    numpy.testing.assert_array_equal(total[0], 3 * numpy.ones(2))
    assert total[1] == 5.0
    numpy.testing.assert_array_equal(a[0], numpy.ones(2))


def test_dictionaries():
    a, b = {"w": numpy.ones(2), "b": 1.0}, {"w": numpy.ones(2), "b": 2.0}
    total = summed(a, b, b)
    numpy.testing.assert_array_equal(total["w"], 3 * numpy.ones(2))
    numpy.testing.assert_array_equal(a["w"], numpy.ones(2))
    assert total["b"] == 5.0


def both(fun):
    """Return the second derivative, where some cotangents are traced, by our tape and by autograd's."""
    x, v = numpy.arange(1.0, 5.0), numpy.array([1.0, -1.0, 2.0, 0.5])

    def second(grad):
        return grad(lambda x: np.sum(grad(fun)(x) * v))(x)

    return second(plain_tape.grad), second(autograd.grad)


@pytest.mark.parametrize(
    "fun",
    [
        # plain first, traced later, pieces of both kinds, in every order
        lambda x: np.sum(x) + np.sum(x[1:] * x[:-1]) + x[0] + np.sum(x * x),
        lambda x: np.sum(x * x) + x[0] + x[1] + np.sum(x),
        lambda x: x[0] + x[1] * x[2] + np.sum(x[1:]) + np.sum(x),
        lambda x: np.sum(x[[0, 0, 1]] * x[1:]) + np.sum(x[:2]) + x[0] ** 3,
    ],
)
def test_traced_and_plain_together(fun):
    ours, theirs = both(fun)
    numpy.testing.assert_allclose(ours, theirs, rtol=1e-14)


def test_containers_of_traced_values():
    def fun(z):
        return np.sum(z["a"] * z["b"][0]) + np.sum(z["a"] ** 2 * z["b"][1]) + z["b"][1]

    z = {"a": numpy.arange(1.0, 4.0), "b": (numpy.ones(3), 2.0)}
    ours, theirs = plain_tape.grad(fun)(z), autograd.grad(fun)(z)
    numpy.testing.assert_array_equal(ours["a"], theirs["a"])
    numpy.testing.assert_array_equal(ours["b"][0], theirs["b"][0])
    assert ours["b"][1] == theirs["b"][1]

    def along(grad):
        return grad(lambda z: np.sum(grad(fun)(z)["a"] ** 2))(z)

    numpy.testing.assert_allclose(along(plain_tape.grad)["a"], along(autograd.grad)["a"], rtol=1e-14)
