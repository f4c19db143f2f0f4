import random
from functools import partial

import autograd.numpy as np
import numpy
import plain_tape
import pytest
from against_autograd import check, random_like

import mpiad
from mpiad.differentiation.rules import einsum

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


@pytest.mark.parametrize("subscripts", ["ii->i", "ii->", "iij->ij", "iji,j->i"])
def test_diagonals(subscripts):
    x, y = random_like(numpy.empty((3,) * len(subscripts.partition("->")[0].partition(",")[0]))), X[0, :3]
    others = (y,) if "," in subscripts else ()
    vjp, value = plain_tape.make_vjp(lambda x: np.einsum(subscripts, x, *others), x)
    g = random_like(value)
    entries = numpy.eye(x.size).reshape(x.size, *x.shape)
    expected = [numpy.sum(g * numpy.einsum(subscripts, entry, *others)) for entry in entries]
    numpy.testing.assert_allclose(vjp(g), numpy.reshape(expected, x.shape), rtol=1e-14, atol=1e-14)


def test_lists_without_a_result():
    check(lambda x: np.einsum(x, [..., 3], x[0] ** 2, [3]), X, lambda x: np.einsum("...j,j", x, x[0] ** 2), mixed=False)


def drawn(seed):
    """Return subscripts and operands: some indices are summed in one operand, repeated by axes of length 1, or empty."""
    rng = random.Random(seed)
    letters = "abcd"[: rng.randint(2, 4)]
    lengths = {letter: rng.choice([0, 1, 2, 3, 3]) if rng.random() < 0.3 else rng.randint(2, 3) for letter in letters}
    parts, operands = [], []
    for k in range(rng.choice([2, 2, 2, 3])):
        own = rng.sample(letters, rng.randint(1, min(3, len(letters))))
        shape = [lengths[letter] if rng.random() < 0.9 else 1 for letter in own]
        dots = rng.random() < 0.2
        x = random_like(numpy.empty([2, *shape] if dots else shape), 10 * seed + k)
        parts.append("..." * dots + "".join(own))
        operands.append([x, x[::-1], numpy.asfortranarray(x)][rng.randrange(3)])
    used = [letter for letter in letters if any(letter in part for part in parts)]
    out = "..." * any("." in part for part in parts) + "".join(rng.sample(used, rng.randint(0, len(used))))
    return ",".join(parts) + f"->{out}", operands


def gradient_of_cubes(subscripts, operands):
    """Return the gradient of a third of the sum of cubes, entry by entry."""
    squares, found = numpy.einsum(subscripts, *operands) ** 2, []
    for k, x in enumerate(operands):
        entries = numpy.eye(x.size).reshape(x.size, *x.shape)
        sums = [numpy.sum(squares * numpy.einsum(subscripts, *operands[:k], e, *operands[k + 1 :])) for e in entries]
        found.append(numpy.reshape(sums, x.shape))
    return found


def runs(compiled, count, most):
    """Return the parameters of the test below."""
    return [pytest.param(seed, compiled, marks=[pytest.mark.thorough] * (seed >= count)) for seed in range(most)]


@pytest.mark.parametrize(("seed", "compiled"), runs(False, 12, 60) + runs(True, 4, 30))
def test_random_contractions(monkeypatch, seed, compiled):
    """Values, gradients, tangents and second derivatives, compared with NumPy's loops and a complex step."""
    monkeypatch.setattr(einsum, "_FEW", 0)  # so that small products are computed by BLAS, too
    subscripts, operands = drawn(seed)

    def function(xs):
        return np.einsum(subscripts, *xs)

    def loss(xs):
        return np.sum(np.einsum(subscripts, *xs) ** 3) / 3

    if compiled:
        function, loss = mpiad.jit(function, strict=True), mpiad.jit(loss, strict=True)
    value, expected = function(operands), numpy.einsum(subscripts, *operands)
    assert (value.shape, value.dtype, type(value)) == (expected.shape, expected.dtype, type(expected))
    numpy.testing.assert_allclose(value, expected, rtol=1e-13, atol=1e-13)
    gradient, vs = gradient_of_cubes(subscripts, operands), [random_like(x, 5 + k) for k, x in enumerate(operands)]
    shifted = [x + 1e-30j * v for x, v in zip(operands, vs)]
    close = partial(
        numpy.testing.assert_allclose, rtol=1e-12, atol=1e-12 * max(1, *[np.abs(g).max(initial=0) for g in gradient])
    )
    for found, g in zip(mpiad.grad(loss)(operands), gradient):
        close(found, g)
    close(mpiad.jvp(loss, operands, vs)[1], numpy.sum(numpy.einsum(subscripts, *shifted) ** 3).imag / 3e-30)

    def slope(xs):
        return sum(np.sum(g * v) for g, v in zip(mpiad.grad(loss)(xs), vs))

    for found, g in zip(mpiad.grad(slope)(operands), gradient_of_cubes(subscripts, shifted)):
        close(found, g.imag / 1e-30)


@pytest.mark.parametrize("dtype", [numpy.float32, numpy.complex64, complex])
def test_dtypes(dtype):
    x, y = (random_like(numpy.empty(shape, dtype), k) for k, shape in enumerate([(16, 8, 16), (8, 16, 16)]))
    found, expected = np.einsum("bhi,hbj->bji", x, y), numpy.einsum("bhi,hbj->bji", x, y)
    assert found.dtype == expected.dtype
    numpy.testing.assert_allclose(found, expected, rtol=0, atol=16 * numpy.finfo(dtype).eps * numpy.abs(expected).max())


@pytest.mark.parametrize(
    "subscripts", ["ij,jk->ix", "ij,jk->ikk", "ij,ij->i", "ij->i", "ij,jk,kl->il", "ij,jkl->il", "i-j,jk->i"]
)
def test_wrong_subscripts_raise_numpys_error(subscripts):
    x, y = numpy.ones((40, 50)), numpy.ones((50, 60))
    errors = []
    for call in (np.einsum, numpy.einsum, mpiad.jit(lambda x, y: np.einsum(subscripts, x, y))):
        with pytest.raises(ValueError) as found:
            call(subscripts, x, y) if len(errors) < 2 else call(x, y)
        errors.append(str(found.value))
    assert len(set(errors)) == 1


def test_products_of_matrices_are_made_by_blas(monkeypatch):
    """A stack, a transposed and a reversed operand; in a compiled program no operand is copied."""
    x, y = numpy.ones((8, 16, 4, 8)), numpy.ones((8, 16, 4, 8))
    program = mpiad.jit(lambda x, y: np.einsum("bqhk,bphk->bhqp", x, y), strict=True)
    program(x, y)
    assert program.program(x, y).loops.startswith("matmul")
    monkeypatch.setattr(numpy, "einsum", None)
    for subscripts in ("bqhk,bphk->bhqp", "bqhk,bphk->bqp", "bqhk,bqhp->kp"):
        np.einsum(subscripts, x, y[::-1])
