import autograd.numpy as np
import numpy
import pytest
from against_autograd import check, random_like

import mpiad

pytestmark = pytest.mark.serial

X = random_like(numpy.empty((3, 1, 4)))
FUNCTIONS = {
    "reshape": lambda x: np.reshape(x, (4, 3)),
    "reshape method": lambda x: x.reshape(2, 6),
    "reshape -1": lambda x: x.reshape(-1),
    "reshape F": lambda x: np.reshape(x, (4, 3), order="F"),
    "reshape positional order": lambda x: np.reshape(x, (4, 3), "F"),
    "ravel": np.ravel,
    "flatten": lambda x: x.flatten(),
    "ravel F": lambda x: np.ravel(x, order="F"),
    "ravel positional order": lambda x: np.ravel(x, "F"),
    "squeeze": np.squeeze,
    "squeeze axis": lambda x: np.squeeze(x, axis=1),
    "expand_dims": lambda x: np.expand_dims(x, 0),
    "expand_dims keyword": lambda x: np.expand_dims(x, axis=-1),
    "T": lambda x: x.T,
    "transpose": lambda x: np.transpose(x, (1, 2, 0)),
    "transpose method": lambda x: x.transpose(),
    "transpose keyword": lambda x: np.transpose(x, axes=(2, 0, 1)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    for x in (X, numpy.asfortranarray(X), X[::-1]):
        check(FUNCTIONS[name], x)
    check(FUNCTIONS[name], random_like(numpy.empty((3, 1, 4), complex)))


LAYOUTS = {
    "C": numpy.arange(12.0).reshape(3, 4),
    "F": numpy.asfortranarray(numpy.arange(12.0).reshape(3, 4)),
    "strided": numpy.arange(24.0).reshape(3, 8)[:, ::2],
    "line": numpy.arange(24.0)[::-2],
}
ORDERED = {
    "ravel A": lambda x: np.ravel(x, "A"),
    "ravel K": lambda x: np.ravel(x, order="K"),
    "flatten A": lambda x: x.flatten("A"),
    "flatten K": lambda x: x.flatten(order="K"),
    "reshape A": lambda x: np.reshape(x, (2, 6), order="A"),
    "reshape method A": lambda x: x.reshape((2, 6), order="A"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ORDERED)
def test_orders_of_the_memory(name, layout):
    """All values of x differ, so that those of the result tell where its entries come from."""
    x, fun = LAYOUTS[layout], ORDERED[name]
    if layout == "strided" and "K" in name:
        for derivative in (mpiad.grad(lambda x: np.sum(fun(x))), lambda x: mpiad.jvp(fun, x, x)):
            with pytest.raises(NotImplementedError, match="use order='C' or 'F'"):
                derivative(x)
        return
    w = random_like(fun(x))
    loss = lambda x: np.sum(w * fun(x) ** 3)  # noqa: E731
    gradient, product = numpy.zeros(x.shape), numpy.zeros(x.shape)
    for value, weight in zip(fun(x).flat, w.flat):
        gradient[x == value], product[x == value] = 3 * value**2 * weight, 6 * value * weight
    for v in (random_like(x), numpy.asfortranarray(random_like(x))):
        numpy.testing.assert_allclose(mpiad.grad(loss)(x), gradient)
        numpy.testing.assert_allclose(mpiad.jvp(loss, x, v)[1], numpy.sum(gradient * v))
        numpy.testing.assert_allclose(mpiad.hvp(loss)(x, v), product * v)
        numpy.testing.assert_allclose(mpiad.jvp(mpiad.grad(loss), x, v)[1], product * v)


def test_order_of_device_arrays(devices):
    x = numpy.arange(12.0).reshape(3, 4)
    found = mpiad.grad(lambda x: np.sum(np.ravel(x, "A") ** 2))(devices.put(x))
    numpy.testing.assert_array_equal(devices.look(found), 2 * x)


def test_axes_that_count_from_the_last():
    # Autograd's own rule permutes wrongly, so the reference is written out.
    x, w = random_like(numpy.empty((3, 3, 3))), random_like(numpy.empty((3, 3, 3)))
    found = mpiad.grad(lambda x: np.sum(np.transpose(x, (-1, 0, 1)) * w))(x)
    numpy.testing.assert_array_equal(found, numpy.transpose(w, (1, 2, 0)))


def test_scalars():
    check(lambda x: np.reshape(x, (1, 1)), 2.0)
    check(lambda x: np.ravel(x), numpy.float32(2.0))
    check(lambda x: np.squeeze(x), numpy.ones((1, 1)))
    check(lambda x: x.T, numpy.float64(2.0))


@pytest.mark.few(7)
@pytest.mark.parametrize("sections", [[2, 1], [3, 1, 2], [-1, 1], [4, 0], [5, 2], (1, 3), 2])
@pytest.mark.parametrize("compiled", [False, True])
def test_split_at_indices_that_decrease(sections, compiled):
    x = numpy.random.default_rng(0).normal(size=(3, 4))
    parts = numpy.split(x, sections, axis=1)
    expected = numpy.zeros_like(x)
    for k, columns in enumerate(numpy.split(numpy.arange(4), sections)):
        expected[:, columns] += 2 * (k + 1) * x[:, columns]

    def loss(x):
        return sum((k + 1) * np.sum(part**2) for k, part in enumerate(np.split(x, sections, axis=1)))

    found = mpiad.grad(mpiad.jit(loss) if compiled else loss)(x)
    numpy.testing.assert_allclose(found, expected, 1e-14)
    tangents = mpiad.jvp(lambda x: np.split(x, sections, axis=1), x, 3 * x)[1]
    assert type(tangents) is list
    for part, tangent in zip(parts, tangents):
        numpy.testing.assert_allclose(tangent, 3 * part, 1e-14)
