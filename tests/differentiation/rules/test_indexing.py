import autograd.numpy as np
import numpy
import plain_tape
import pytest
from against_autograd import check, random_like
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

pytestmark = pytest.mark.serial

DTYPES = [numpy.float64, numpy.float32, numpy.complex128, numpy.complex64]
X = random_like(numpy.empty((4, 5, 3)))

BASIC = [
    0,
    -1,
    (1, 2, 0),
    (numpy.int64(1), slice(None)),
    slice(1, None),
    slice(None, -1),
    slice(None),
    slice(None, None, -1),
    slice(None, None, 2),
    slice(3, 0, -2),
    slice(2, 2),
    Ellipsis,
    None,
    (None, Ellipsis, None),
    (Ellipsis, 0),
    (slice(1, -1), slice(1, -1)),
    (slice(None), 0),
    (slice(None), slice(None), 1),
    (),
]
MASK = X[..., 0] > 0
ADVANCED = [
    [0, 2, 2, 1],
    [],
    numpy.array([0, 0, 3]),
    numpy.array(2),
    numpy.array([[0, 1], [1, 3]], dtype=numpy.int8),
    MASK,
    X > 0,
    MASK[:, 0],
    (slice(None), MASK[0]),
    (MASK[:, 0], 1),
    (MASK[:, 0], slice(1, 3), None),
    ([0, 0, 1], [4, 4, 2]),
    (numpy.array([1, 1]), Ellipsis, numpy.array([0, 0])),
    (numpy.array([[0], [1]]), numpy.array([2, 2, 4])),
    (0, [1, 1], slice(None)),
    numpy.ix_([0, 2], [1, 1, 4]),
    numpy.zeros((4, 5), bool),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("idx", BASIC, ids=str)
def test_basic(idx, dtype):
    check(lambda x: x[idx], random_like(numpy.empty((4, 5, 3), dtype)))


@pytest.mark.parametrize("idx", ADVANCED, ids=lambda idx: str(idx).replace("\n", "")[:40])
def test_advanced(idx):
    check(lambda x: x[idx], X)


@pytest.mark.parametrize("idx", [
    ((0, 1, 0), (2, 2, 1)), (slice(None), (0, 2)), (Ellipsis, (1, 0, 1)), ((3, -1), [0, 0]),
    ((0, 1), 1, slice(1, None)), ((0, 1),),
    ((True, False, True, True),), (None, (1, 1)),
])  # fmt: skip
def test_index_that_holds_a_tuple(idx):
    as_lists = tuple([list(part) if isinstance(part, tuple) else part for part in idx])
    check(lambda x: x[idx] ** 2, X, lambda x: x[as_lists] ** 2)


def test_list_of_booleans():
    # Autograd's adjoint takes it for a list of integers.
    idx = [True, False, True, True]
    check(lambda x: x[idx], X, reference=lambda x: x[numpy.array(idx)], mixed=False)


@pytest.mark.parametrize("x", [numpy.float64(2.0), numpy.array(2.0), numpy.array([2.0])], ids=repr)
@pytest.mark.parametrize("idx", [Ellipsis, None, (), (None, None)], ids=str)
def test_of_scalars(x, idx):
    check(lambda x: x[idx] * 3.0, x)


def test_of_views():
    x = numpy.asfortranarray(X)[::-1, ::2]
    check(lambda x: x[1:, :-1] * x[:-1, 1:], x)


def test_many_contributions():
    check(lambda x: x[1:] * x[:-1] + x[0] + x[:, :1][1:] * np.sin(x[2:3]), X)
    check(lambda x: x * 2 + np.concatenate([x[1:], x[:1]]) * x, X)
    check(lambda x: x[[0, 0, 1]] * x[1:] * x[1, 1, 1], X)


def test_stencil():
    def step(u):
        return u[1:-1, 1:-1] + 0.1 * (u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * u[1:-1, 1:-1])

    check(lambda u: step(step(u)), random_like(numpy.empty((7, 6))))


def test_third_order():
    x, v = random_like(numpy.empty(6)), random_like(numpy.empty(6), 1)

    def third(grad):
        def loss(x):
            return np.sum(x[1:] ** 2 * x[:-1] * x[[0, 0, 2, 3, 3]])

        def along(f):
            return lambda x: np.sum(grad(f)(x) * v)

        return grad(along(along(loss)))(x)

    import autograd

    numpy.testing.assert_allclose(third(plain_tape.grad), third(autograd.grad), rtol=1e-13)


def test_cotangent_of_a_mask_is_not_doubled_by_its_order():
    vjp, _ = plain_tape.make_vjp(lambda x: x[[2, 0, 2]], numpy.zeros(3))
    numpy.testing.assert_array_equal(vjp(numpy.array([1.0, 2.0, 4.0])), [2.0, 0.0, 5.0])


def test_few_and_many_of_a_large_array():
    x = random_like(numpy.empty((40, 30)))
    draw = numpy.random.default_rng(3)
    for size in (3, 200):
        rows, columns = draw.integers(0, 40, size), draw.integers(0, 30, size)
        check(lambda x, rows=rows: x[rows] * 2.0, x)
        check(lambda x, rows=rows, columns=columns: x[rows, columns], x)
        check(lambda x, columns=columns: x[1:, columns], numpy.asfortranarray(x))


SHAPES = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4)


@given(st.data(), SHAPES)
def test_any_basic_index(data, shape):
    idx = data.draw(hnp.basic_indices(shape, allow_newaxis=True))
    x = random_like(numpy.empty(shape))
    check(lambda x: x[idx] * 2.0, x)


@given(st.data(), hnp.array_shapes(min_dims=1, max_dims=3, max_side=4))
def test_any_integer_index(data, shape):
    idx = data.draw(hnp.integer_array_indices(shape))
    x = random_like(numpy.empty(shape))
    check(lambda x: x[idx] * 2.0, x)


@given(st.data(), SHAPES)
def test_any_mask(data, shape):
    mask = data.draw(hnp.arrays(bool, shape))
    x = random_like(numpy.empty(shape))
    check(lambda x: x[mask] * 2.0, x)
