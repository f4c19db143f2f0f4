import autograd.numpy as np
import numpy
import pytest
from against_autograd import check, random_like

pytestmark = pytest.mark.serial

X = random_like(numpy.empty((3, 4)))
WIDTHS = [1, (1,), (1, 2), ((1, 2),), ((1, 0), (0, 2)), ((0, 0), (0, 0)), numpy.array([[2, 1], [1, 0]])]


@pytest.mark.parametrize("width", WIDTHS, ids=str)
def test_constant(width):
    pairs = [tuple(pair) for pair in numpy.broadcast_to(width, (2, 2)).tolist()]
    check(lambda x: np.pad(x, width, "constant"), X, lambda x: np.pad(x, pairs, "constant"), mixed=False)
    check(lambda x: np.pad(x, pairs, "constant", constant_values=2.0), X)


def test_mode_is_constant_where_none_is_given():
    # Autograd's rule needs the mode.
    check(lambda x: np.pad(x, 1), X, lambda x: np.pad(x, 1, "constant"), mixed=False)


@pytest.mark.parametrize("shape", [(3,), (1, 3), (2, 2, 3), (0, 2)], ids=str)
def test_shapes(shape):
    check(lambda x: np.pad(x, ((1, 2),) * len(shape), mode="constant"), random_like(numpy.empty(shape)))


def taken(x, width, mode):
    pairs = numpy.broadcast_to(width, (x.ndim, 2))
    sources = [numpy.pad(numpy.arange(n), pair, mode) for n, pair in zip(x.shape, pairs)]
    return x[numpy.ix_(*sources)]


@pytest.mark.parametrize("width", [*WIDTHS, 5], ids=str)
@pytest.mark.parametrize("mode", ["edge", "reflect", "symmetric", "wrap"])
def test_padding_by_own_elements(mode, width):
    # Autograd has no rule for these modes; the same padding is an index.
    check(lambda x: np.pad(x, width, mode), X, lambda x: taken(x, width, mode), mixed=False)


def test_other_modes_are_refused_by_name():
    import plain_tape

    with pytest.raises(NotImplementedError, match="pad can't be differentiated with mode='mean'"):
        plain_tape.make_vjp(lambda x: np.pad(x, 1, "mean"), X)
