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
