import autograd.numpy as np
import numpy
import pytest
from against_autograd import check, random_like

import mpiad

pytestmark = pytest.mark.serial

X = random_like(numpy.empty((3, 4)))
FUNCTIONS = {
    "product": lambda x: np.einsum("ij,kj->ik", x, x**2),
    "implicit": lambda x: np.einsum("ij, jk", x, x.T),
    "sum": lambda x: np.einsum("ij->i", x),
    "alone": lambda x: np.einsum("ij,k->k", x, x[0]),
    "to a number": lambda x: np.einsum("i,ij,j->", x[:, 0], x, x[0]),
    "dots": lambda x: np.einsum("...i,i", x, x[0]),
    "dots that broadcast": lambda x: np.einsum("...j,...j->...", x[:, None] * x, x[0]),
    "optimize": lambda x: np.einsum("ij,kj,kl->il", x, x, x, optimize=True),
    "lists": lambda x: np.einsum(x, [0, 1], x, [2, 1], [0, 2]),
    "constant": lambda x: np.einsum("ij,jk->ik", x, numpy.arange(8.0).reshape(4, 2)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    check(FUNCTIONS[name], X)
    check(FUNCTIONS[name], random_like(numpy.empty((3, 4), complex)))


def test_an_axis_that_one_operand_repeats():
    v = random_like(X)

    def loss(x):
        return np.sum(np.sin(np.einsum("ij,kj->ik", x[:, :1], x)))

    def slope(x):
        return np.sum(mpiad.grad(loss)(x) * v)

    gradient = mpiad.grad(loss)
    differences = (gradient(X + 1e-5 * v) - gradient(X - 1e-5 * v)) / 2e-5
    numpy.testing.assert_allclose(mpiad.hvp(loss)(X, v), differences, rtol=1e-7, atol=1e-8)
    numpy.testing.assert_allclose(mpiad.grad(slope)(X), differences, rtol=1e-7, atol=1e-8)


def test_a_diagonal_is_refused():
    with pytest.raises(NotImplementedError, match="einsum can.t be differentiated .* take its diagonal first"):
        mpiad.grad(lambda x: np.einsum("ii->", x))(X[:, :3])
