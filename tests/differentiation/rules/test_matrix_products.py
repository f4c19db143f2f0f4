import operator

import autograd.numpy as np
import numpy
import pytest
from against_autograd import check, random_like

import mpiad

pytestmark = pytest.mark.serial

SHAPES = [
    ((3,), (3,)),
    ((2, 3), (3,)),
    ((3,), (3, 2)),
    ((2, 3), (3, 4)),
    ((1, 1), (1, 1)),
    ((0, 3), (3, 2)),
    ((2, 0), (0,)),
    ((4, 2, 3), (3, 2)),
    ((2, 3), (4, 3, 2)),
    ((2, 1, 2, 3), (3, 2)),
    ((3,), (2, 3, 4)),
    ((2, 4, 3), (3,)),
    ((0, 4, 3), (3, 2)),
]


@pytest.mark.few(20)
@pytest.mark.parametrize("dtype", [numpy.float64, numpy.float32, numpy.complex128])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("fun", [np.dot, np.matmul, operator.matmul])
def test_shapes(fun, shapes, dtype):
    x, y = (random_like(numpy.empty(shape, dtype), i) for i, shape in enumerate(shapes))
    check(lambda z: fun(z[0], z[1]), (x, y))
    check(lambda x: fun(x, y), x)
    check(lambda y: fun(x, y), y)


@pytest.mark.parametrize("fun", [np.matmul, mpiad.jit(np.matmul, strict=True)])
def test_stacks_that_broadcast(fun):
    """Each derivative is that of the sum of products, written out."""
    x, y = random_like(numpy.empty((2, 1, 3, 4))), random_like(numpy.empty((5, 4, 2)))
    value = fun(x, y)
    found = mpiad.grad(lambda z: np.sum(fun(z[0], z[1]) ** 2))((x, y))
    numpy.testing.assert_allclose(found[0], 2 * numpy.einsum("abik,bjk->aij", value, y)[:, None], rtol=1e-13)
    numpy.testing.assert_allclose(found[1], 2 * numpy.einsum("abik,aij->bjk", value, x[:, 0]), rtol=1e-13)


CONTRACTIONS = {
    "inner": lambda x, y: np.inner(x, np.transpose(y)),
    "two axes": lambda x, y: np.tensordot(x, y, ((2, 0), (0, 2))),
    "no axis": lambda x, y: np.tensordot(x, y[0], 0),
    "negative axes": lambda x, y: np.tensordot(x, y[..., 0], axes=([-1], [-2])),
    "dot": lambda x, y: np.dot(x, np.swapaxes(y, 0, 1)),
}


@pytest.mark.parametrize("name", CONTRACTIONS)
def test_contractions_of_arrays_with_three_axes(name):
    x, y = random_like(numpy.empty((2, 4, 3))), random_like(numpy.empty((3, 4, 2)), 1)
    check(lambda z: CONTRACTIONS[name](z[0], z[1]), (x, y))


def test_same_vector_twice():
    check(lambda x: np.dot(x, x) * x, random_like(numpy.empty(4)))


@pytest.mark.parametrize("fun", [operator.mul, np.dot, operator.matmul, operator.add, operator.sub, operator.truediv])
def test_one_array_in_the_place_of_two_variables(fun):
    """Each has a derivative of its own: weights that start from the same zeros, a state that starts at rest."""
    x = numpy.array([1.0, 2.0])
    found = mpiad.grad(lambda p: np.sum(fun(p["a"], p["b"])) * np.sum(p["a"]), objective="sum")({"a": x, "b": x})
    apart = mpiad.grad(lambda p: np.sum(fun(p["a"], p["b"])) * np.sum(p["a"]), objective="sum")({"a": x, "b": x.copy()})
    for key in apart:
        numpy.testing.assert_allclose(found[key], apart[key], rtol=1e-14, atol=1e-14)
    if fun is operator.mul:
        numpy.testing.assert_allclose(found["b"], x * 3, rtol=1e-14)


@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_scalars_and_mixed_dtypes_take_autograds_rule():
    x = random_like(numpy.empty((2, 3)))
    check(lambda x: np.dot(x, 2.0), x)
    check(lambda x: np.dot(x, random_like(numpy.empty(3, numpy.float32))), x)
    check(lambda x: np.dot(x, random_like(numpy.empty(3, complex))), x)
