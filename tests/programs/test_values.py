"""Compiled functions have the values and derivatives of those that they are made of."""

import math
import re

import autograd.numpy as anp
import autograd.scipy.linalg
import autograd.scipy.signal
import autograd.scipy.special as special
import autograd.scipy.stats as stats
import numpy as np
import pytest
import scipy.linalg
import scipy.special
from jitted import assert_same, check_jit, further
from mpi4py import MPI

import mpiad

RNG = np.random.default_rng(5)
X, Y = RNG.standard_normal((2, 7))
A, B = RNG.standard_normal((4, 5)), RNG.standard_normal((5, 3))
C = RNG.standard_normal((3, 4, 5))


def elementwise(x, y):
    z = anp.sin(x) * y + anp.exp(-(x**2)) / anp.sqrt(1 + y * y) - anp.tanh(x) ** 3
    return z + anp.log1p(x * x) + anp.arctan2(x, 1.5) + anp.abs(x) ** 1.5 + anp.sign(y) * anp.floor(x), 2.0**y


def choices(x, y):
    inner = anp.where(x > 0, anp.sqrt(anp.where(x > 0, x, 1.0)), 0.0)
    return (
        anp.where(x > y, x**2, -y) * anp.clip(x, -0.5, 0.5) + inner,
        anp.maximum(x, y) - anp.minimum(x, 0.0) * (y > 0),
        anp.clip(x, None, 0.5) * anp.clip(y, -0.25, None),
    )


def broadcast(a, x):
    b = x[:4]
    return a * b[:, None] + b[None, :1] * anp.mean(a, axis=0), anp.expand_dims(a[0], 1) + x[2]


def strides(x, a):
    return x[::-1] * 2 + x[::-2][0], a[::-1, ::-2] + a[:, ::-2][::-1], x[::3] * x[1:6:2], x[-2] * x[5]


def put_together(x, y, a):
    joined = anp.concatenate([x, y[1:3], x[::-1], np.array([2.0])]) ** 2
    stacked = anp.stack([x, y, x * y], axis=1) * anp.stack([y, y, x], axis=-1)
    made = anp.array([[x[0], y[1] ** 2], [1.0, x[2]]])
    return (
        joined,
        stacked,
        made,
        anp.concatenate([a[:, 1:], a[:, :1]], axis=1) * a,
        anp.pad(a, ((1, 2), (0, 1)), "constant"),
    )


def rolled(x, a):
    both = anp.roll(a, (1, 2), axis=(0, 1)) * anp.roll(a, -1, axis=1)
    return anp.roll(x, 2) * x + anp.roll(x, -3), both + anp.roll(a, 3) * a, anp.diff(x) ** 2


def shapes(a, c):
    turned = anp.transpose(c, (2, 0, 1)) * 2
    flat = anp.reshape(a[:, 1:] * 2, (2, 8))[:, ::2]
    return turned, flat, anp.ravel(a.T) * anp.ravel(a, "F"), anp.swapaxes(c, 0, 2)[1:, ::-1], anp.squeeze(a[:1] ** 2)


def reductions(c):
    sums = anp.sum(c), anp.sum(c, axis=0), anp.sum(c, axis=1), anp.sum(c, axis=(0, 2)), anp.sum(c, axis=-1, keepdims=True)
    ends = anp.max(c), anp.max(c, axis=1), anp.min(c, axis=(0, 2)), anp.prod(c, axis=2)
    return (*sums, *ends, anp.mean(c), anp.mean(c, axis=1), anp.var(c, axis=0), anp.std(c), anp.linalg.norm(c))


def sums_in_another_shape(a):
    """A result, and what is computed of it: its memory is filled by a copy."""
    column = anp.reshape(anp.sum(a, axis=0), (5, 1))
    return column, column * 1.5


def contractions(a, b, x, y):
    return anp.einsum("ij,jk->ik", a, b), a @ b + anp.dot(x, y), a @ b[:, 0], x @ y, anp.outer(x, y), anp.tensordot(a, b, 1)


def products_of_views(a, b, c):
    """Transposed operands, slices, stacks, steps, reversed and diagonal ones, of arguments and of computed arrays."""
    d = anp.sin(b)
    stacks = (
        anp.swapaxes(c, 1, 2) @ c,
        c @ d,
        c[:, ::-1] @ b,
        anp.transpose(c, (1, 2, 0)) @ d[:3, :2],
        c[0] @ anp.sort(b.T).T,
    )
    shaped = (
        anp.reshape(anp.transpose(c, (1, 0, 2)), (12, 5)) @ d,
        anp.reshape(a, (5, 4)) @ a,
        a[1:, 1:4].T @ d[:3],
        a[::2] @ b,
    )
    return (
        *stacks,
        *shaped,
        a.T @ anp.cos(a),
        d.T @ d,
        d[:, 1:] @ b[:2],
        d[::-1] @ d[:3],
        b[1][None] @ b.T,
        b[:, :1] @ b[:1],
    )


def calls_of_numpy(x, a):
    ordered = anp.sort(x)
    return ordered[1:] - ordered[:-1], anp.cumsum(x * x) * x, a[np.array([0, 2, 2])] * a[:3], anp.trace(a), anp.tile(x, 2)


def spectrum(x):
    return anp.abs(anp.fft.fft(x * 2)) ** 2, anp.real(anp.exp(1j * x) * x)


def integers(x, a):
    """Constants, as doubles where these are exact."""
    return x * np.arange(7) + np.arange(7)[2], x * np.full(7, 2**60 + 1), anp.full((4, 5), 3) * a, a @ np.arange(5)


CASES = [
    (elementwise, (X, Y)), (choices, (X, Y)), (broadcast, (A, X)), (strides, (X, A)), (put_together, (X, Y, A)),
    (rolled, (X, A)), (shapes, (A, C)), (reductions, (C,)), (contractions, (A, B, X, Y)), (calls_of_numpy, (X, A)),
    (products_of_views, (A, B, C)),
    (spectrum, (X,)), (integers, (X, A)), (sums_in_another_shape, (A,)),
]  # fmt: skip
OUTSIDE = [elementwise, broadcast, rolled, calls_of_numpy, sums_in_another_shape]  # of each kind of step one


@pytest.mark.serial
@pytest.mark.parametrize(("fun", "args"), CASES, ids=lambda case: getattr(case, "__name__", ""))
def test_same_values_and_gradients(fun, args, request):
    check_jit(fun, *args, outside=fun in OUTSIDE or request.config.getoption("thorough"))


@pytest.mark.serial
def test_functions_without_derivatives():
    """In ways in which autograd doesn't differentiate them."""

    def fun(x, a, c):
        turned = [np.flip(c), np.flip(c, axis=(0, -1)), np.flipud(c), np.fliplr(a), c.transpose(1, 0, 2)]
        turned += [c.transpose((2, 0, -2)), np.moveaxis(c, [0, 1], [-1, 0]), np.reshape(a, (2, 10), "F"), a.flatten("F")]
        folded = [np.sum(x, initial=True), np.max(x, initial=9.0), np.sum(a, where=np.arange(5) > 2)]
        folded += [np.add.reduce(a, initial=3.0), np.linalg.norm(x, 1), np.linalg.norm(a, "fro")]
        made = [x.imag + x.real, x.astype(float, copy=False) * np.full_like(x, 2.5), sum([row**2 for row in a])]
        made += [np.concatenate([a, a * 2], axis=None), np.repeat(x, repeats=2), np.pad(a, 1, constant_values=(1, 2))]
        return [part * 2 for part in turned + folded + made]

    check_jit(fun, X, A, C, derivatives=False)


@pytest.mark.serial
def test_functions_of_the_common_table():
    """Which kernels of ensembles compile, too."""

    def fun(x, a):
        chosen = np.select([x > 0.5, x < 0], [x * 2, x**2], default=3.0), np.select([a > 0], [a > 1], False) | (a < 0)
        curves = np.interp(x, [-1.0, 0.0, 1.0], [1.0, 2.0, 0.0], left=-5.0), np.polyval([1.0, 2.0, x[0]], a)
        rounded = (
            np.round(a * 3),
            np.round(a, 1),
            np.sinc(x) + np.sinc(x * 0),
            np.angle(x),
            np.angle(x, deg=True),
            np.imag(x),
        )
        clipped = np.clip(a, min=0.0), np.clip(a, None, x[:5]), np.clip(a, a_min=-0.1, a_max=0.1)
        norms = np.linalg.norm(a, axis=1, keepdims=True), np.linalg.norm(x, 2), np.mean(a, axis=0, keepdims=True)
        turned = np.rot90(a), np.rollaxis(a, 1), np.multiply.outer(x, x[:2]), np.hypot.outer(x[:3], a)
        return [part * 2 for part in (*curves, *rounded, *clipped, *norms, *turned, chosen[0])] + [chosen[1]]

    check_jit(fun, X, A, derivatives=False)


@pytest.mark.serial
@pytest.mark.parametrize("mode", ["edge", "reflect", "symmetric", "wrap"])
def test_padding_by_own_elements(mode):
    def fun(x, a, c):
        padded = np.pad(x, (2, 9), mode), np.pad(a, ((1, 2), (0, 7)), mode), np.pad(a[:1], 3, mode), np.pad(c, 1, mode=mode)
        return [part * 2 for part in (*padded, np.pad(a > 0, 1, mode) + a[0, 0], np.pad(a * (1 + 1j), 2, mode))]

    check_jit(fun, X, A, C, derivatives=False)
    check_jit(
        lambda x, a: (anp.pad(x, (2, 9), mode) ** 2, anp.pad(a, ((1, 2), (0, 7)), mode) * a[0, 0]), X, A, outside=True
    )


@pytest.mark.serial
def test_compositions_of_functions():
    """Functions of plain NumPy, too, are joins, products and differences, which loops compute."""

    def plain(x, a):
        joined = np.dstack([a, a * a]), np.block([[a, a * 2], [x, x[:3]]]), np.block([x, 3.0]), np.dstack((x, x))
        slopes = *np.gradient(a), np.gradient(a, 0.5, axis=1, edge_order=2), np.gradient(x, np.cumsum(1 + x[::-1] ** 2))
        return [*[part * 2 for part in (*joined, *slopes)], np.linalg.multi_dot([a, a.T, a])]

    def differentiated(x, a):
        joined = anp.dstack([a, a * a]), anp.block([[a, a * 2], [x, x[:3]]]), anp.block([x, 3.0]), anp.dstack((x, x))
        slopes = *anp.gradient(a), anp.gradient(a, x[0], axis=1, edge_order=2), anp.gradient(x, np.arange(7.0) ** 2)
        chosen = anp.choose(np.arange(7) % 3, [x, x**2, 1.0]), anp.choose(x > 0, [x, x**3])
        return [*joined, *slopes, *chosen, anp.linalg.multi_dot([a, a.T, a])]

    check_jit(plain, X, A, derivatives=False)
    check_jit(differentiated, X, A, outside=True)


@pytest.mark.serial
def test_joins_of_lists_are_a_few_operations():
    u = np.random.default_rng(1).standard_normal((24, 24))
    for join in (lambda u: anp.dstack([u, 2 * u]), lambda u: anp.block([[u], [2 * u]])):
        whole = mpiad.jit(mpiad.grad(lambda u: anp.sum(join(u) ** 2)), strict=True)  # noqa: B023
        for _ in range(2):
            np.testing.assert_allclose(whole(u), 10 * u, rtol=1e-14)
        assert len(str(whole.program(u)).splitlines()) < 40


def friction(r):
    return anp.select([r < 3e3, r < 1e5, r >= 1e5], [64 / r, 0.3164 / r**0.25, 0.221 / r**0.237])


@pytest.mark.serial
def test_select_is_a_few_operations():
    r = np.geomspace(1e2, 1e7, 3000)
    low, middle = r < 3e3, r < 1e5
    value = np.where(low, 64 / r, np.where(middle, 0.3164 / r**0.25, 0.221 / r**0.237))
    slope = np.where(low, -64 / r**2, np.where(middle, -0.25 * 0.3164 / r**1.25, -0.237 * 0.221 / r**1.237))
    curvature = np.where(
        low, 128 / r**3, np.where(middle, 0.25 * 1.25 * 0.3164 / r**2.25, 0.237 * 1.237 * 0.221 / r**2.237)
    )
    jitted, total = mpiad.jit(friction, strict=True), lambda r: anp.sum(jitted(r))
    whole = mpiad.jit(mpiad.grad(lambda r: anp.sum(friction(r))), strict=True)
    for _ in range(2):
        for fun in (friction, jitted):
            np.testing.assert_allclose(fun(r), value, rtol=1e-13)
            np.testing.assert_allclose(mpiad.grad(lambda r: anp.sum(fun(r)))(r), slope, rtol=1e-12)  # noqa: B023
            np.testing.assert_allclose(mpiad.jvp(fun, r, r), (value, slope * r), rtol=1e-12)
            np.testing.assert_allclose(mpiad.hvp(lambda r: anp.sum(fun(r)))(r, r), curvature * r, rtol=1e-12)  # noqa: B023
        np.testing.assert_allclose(mpiad.value_and_grad(total)(r)[1], slope, rtol=1e-12)
        np.testing.assert_allclose(whole(r), slope, rtol=1e-12)
    assert all(len(str(fun.program(r)).splitlines()) < 100 for fun in (jitted, whole))


@pytest.mark.serial
def test_select_of_any_parts():
    """Broadcasting, defaults, numbers of Python, other precisions, lists; the first true condition decides."""

    def fun(x, a, n):
        chosen = [anp.select([x > 0.5, x > 0], [x**2, n * x], x), anp.select([a > 0], [x[:5] ** 2], a[:, :1])]
        chosen += [
            anp.select([np.arange(7) > 2, x > 0], [n, 2], n**2),
            anp.select([x > 0], [x], 1j),
            anp.select([a > 0], [n]),
        ]
        chosen += [anp.select([x[0] > 0, x[0] > -9], [x, 2.0]), anp.select([np.arange(7) > 2], [np.ones(7)], x)]
        chosen += [anp.select([x[:2] > 0], [[x[2], x[3] * x[4]]]), anp.select(a[:2] > 0, a[2:], 2 * a[0])]
        return [*chosen, anp.select([x > 0], [np.float32(2.0)]) * x]

    check_jit(fun, X, A, 1.5)
    x = X.astype(np.float32)
    for part in (
        lambda x: anp.select([x > 0], [x], 1.0), lambda x: anp.select([x > 0], [x], np.arange(7)),
        lambda x: anp.select([x > 0, x < 1], [x, 1], 0), lambda x: anp.select([x > 0], [x > 1]),
        lambda x: anp.select([x > 0], [3], 4), lambda x: anp.select([x > 0], [np.int8(3)], np.uint8(7)),
    ):  # fmt: skip
        jitted = mpiad.jit(part, strict=True)
        for x in (X.astype(np.float32), -X.astype(np.float32)):
            assert_same(jitted(x), part(x))


@pytest.mark.serial
def test_views_are_changed_in_place():
    def fun(x):
        y = x + 0.0
        v = y[1:]
        v %= 0.3
        v //= 0.1
        mask = v > 1
        mask &= v < 3
        mask |= v == 0
        return v, mask

    check_jit(fun, X, derivatives=False)


@pytest.mark.serial
def test_an_array_that_is_changed_through_a_view_and_returned(caplog):
    def fun(x):
        y = x + 0.0
        v = y[1:]
        v *= 0.3
        return y

    jitted = mpiad.jit(fun)
    for x in (X, Y, X):
        assert_same(jitted(x), fun(x))
    assert "changed in place through another name" in caplog.text
    with pytest.raises(TypeError, match="changed in place through another name"):
        mpiad.jit(fun, strict=True)(X)


@pytest.mark.serial
@pytest.mark.parametrize("x", [np.array(1.3), 0.7, np.float64(-0.4), np.zeros(0), np.zeros((0, 4))], ids=str)
def test_numbers_and_empty_blocks(x):
    def fun(x):
        return anp.sin(x) * 2 + 1, anp.sum(x * x), anp.sum(x * 3, axis=-1), anp.sum(x, axis=0, keepdims=True)

    check_jit(fun, x)


@pytest.mark.serial
def test_parts_without_entries():
    check_jit(
        lambda e, x: (anp.concatenate([e, x, e]), x[3:3] * 2, anp.sum(x[2:2] ** 2) + anp.sum(x), anp.roll(e, 1)), X[:0], X
    )


NUMBERS = [
    lambda x: anp.where(x >= 0.1, x, 2.0 * x), lambda x: anp.where(x > 0.0, 0.1, 0.3), lambda x: (x > 0.0) * 0.1,
]  # fmt: skip


@pytest.mark.serial
@pytest.mark.parametrize("fun", NUMBERS, ids=["comparison", "choice", "product"])
def test_numbers_beside_conditions_are_doubles(fun):
    """0.1 and its value in single precision differ by 1.5e-9."""
    x, compiled = np.array([-0.3, 0.1, 0.7]), mpiad.jit(fun)
    for _ in range(2):  # the second call runs the compiled program
        np.testing.assert_array_equal(compiled(x), fun(x))


@pytest.mark.serial
def test_single_precision_stays_single():
    """Also among doubles and booleans, and where two sums in different precisions stand side by side."""
    x = X.astype(np.float32)

    def fun(x, y):
        half = anp.where(x > 0.125, x, 1.0) + x**2
        return half, half * y, (x * y).astype(np.float32) * np.float32(2), anp.sum(half), anp.sum(x) * anp.sum(y)

    jitted = mpiad.jit(fun, strict=True)
    for given in ((x, Y), (further(x), Y)):
        assert_same(jitted(*given), fun(*given), 4e-7)
        total = lambda x, y: anp.sum(anp.sin(fun(x, y)[1])) + fun(x, y)[4]  # noqa: E731
        assert_same(mpiad.value_and_grad(mpiad.jit(total))(*given), mpiad.value_and_grad(total)(*given), 2e-6)


@pytest.mark.serial
def test_powers_of_complex_numbers():
    square = mpiad.jit(lambda z, n: z**2 * n)
    for z in (2 + 3j, -1j, 0.5 + 0j):
        for _ in range(2):
            assert square(z, 3) == z**2 * 3


@pytest.mark.parametrize("argument", [True, False], ids=["argument", "closure"])
@pytest.mark.parametrize(
    ("array", "fun"),
    [
        (np.matrix([[1.0, 2.0], [3.0, 4.0]]), lambda a, x: a * x),
        (np.matrix([[1.0, 2.0], [3.0, 4.0]]), lambda a, x: a**2 + x),
        (np.matrix([[1.0, 2.0], [3.0, 4.0]]), lambda a, x: a[0] * x),
        (np.ma.masked_array([[1.0], [2.0]], mask=[[0], [1]]), lambda a, x: anp.sum(a * x)),
        (np.ma.masked_array([[1.0], [2.0]], mask=[[0], [1]]), lambda a, x: anp.sum(a) + x),
    ],
)
def test_arrays_with_arithmetic_of_their_own(array, fun, argument):
    """They are computed with as in NumPy, so the function isn't compiled."""
    x = np.array([[1.0], [10.0]])
    jitted, args = (mpiad.jit(fun), (array, x)) if argument else (mpiad.jit(lambda x: fun(array, x)), (x,))
    for _ in range(2):
        np.testing.assert_array_equal(jitted(*args), fun(array, x))
    if argument:  # a plain array of the same shape
        plain = np.asarray(array)
        np.testing.assert_array_equal(jitted(plain, x), fun(plain, x))


def in_order(x):
    y = x.T.copy()
    y.ravel()[0] = 55.0
    return y * 1.0


def reshaped(x):
    y = x.copy()
    y.reshape(-1)[1] += 10.0
    return y * 1.0


@pytest.mark.parametrize("fun", [in_order, reshaped])
@pytest.mark.parametrize("order", ["C", "F"])
def test_copies_are_in_the_order_of_numpys_method(fun, order):
    """An array in this order is changed through its flat view; the interpreted function then is the result."""
    x = np.asarray(np.arange(6.0).reshape(2, 3), order=order)
    np.testing.assert_array_equal(mpiad.jit(fun)(x), fun(x))
    total = mpiad.jit(lambda x: anp.sum(fun(x) ** 2))
    for _ in range(2):
        assert total(x) == np.sum(fun(x) ** 2)


FLAG = True


@pytest.mark.parametrize("x", [np.array([1, 2, 127], np.int8), np.array([1.5, -2.0], np.float32)], ids=["int8", "float32"])
@pytest.mark.parametrize(
    "fun",
    [lambda x, k: x + FLAG * k, lambda x, k: x * (k + True), lambda x, k: (True - k) * x, lambda x, k: x + (k > 1) * k],
    ids=range(4),
)
def test_booleans_of_python_beside_numbers(fun, x):
    """Their results are numbers of Python, which take the precision of the arrays."""
    jitted = mpiad.jit(fun, strict=True)
    for k in (3, 2):
        expected = fun(x, k)
        for _ in range(2):
            np.testing.assert_array_equal(jitted(x, k), expected)
            assert jitted(x, k).dtype == expected.dtype


def test_powers_of_single_booleans():
    for fun in (lambda x: (x[0] > 0) ** 2, lambda x: (x > 0) ** 2):
        found, expected = mpiad.jit(fun, strict=True)(X), fun(X)
        assert found.dtype == expected.dtype and np.array_equal(found, expected)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 2.0, np.int64(2), np.float32(2)])
def test_powers_of_booleans_have_numpys_dtypes(exponent):
    x, powers = np.array([1.5, -1.0, 2.0], np.float32), lambda x: (x > 0) ** exponent
    for fun in (powers, lambda x: powers(x) * np.int8(100) + powers(x) * np.int8(100), lambda x: powers(x) * x):
        expected, found = fun(x), mpiad.jit(fun)(x)
        assert expected.dtype == found.dtype
        np.testing.assert_array_equal(found, expected)


@pytest.mark.serial
def test_single_precision_is_rounded_before_doubles_read_it():
    """Bit for bit: no sum of a product, which may be one operation, is among them."""
    x, y = X.astype(np.float32), further(X)

    def fun(x, y):
        rounded = y.astype(np.float32)
        mask = x * x * x < y * 0.1
        return y - rounded, rounded * y, x * x * x, x * x * x * y, anp.where(mask, x * x, y * x), mask, anp.max(y - rounded)

    def by_hand(x, y):
        rounded, cube = y.astype(np.float32), x * x * x
        mask = cube < y * 0.1
        picked = np.where(mask, (x * x).astype(float), y * x)
        return y - rounded, rounded * y, cube, cube.astype(float) * y, picked, mask, np.max(y - rounded)

    jitted = mpiad.jit(fun, strict=True)
    for given in ((x, y), (further(x), Y)):
        for found, expected in zip(jitted(*given), by_hand(*given)):
            np.testing.assert_array_equal(found, expected)
    assert np.max(np.abs(y - y.astype(np.float32))) > 1e-9


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "fun",
    [
        lambda x, y: anp.sum(anp.max(x / (1 + x * x), axis=0)),
        lambda x, y: anp.sum(anp.max(anp.exp(x) / anp.sum(anp.exp(x), axis=0), axis=1)),
        lambda x, y: anp.sum(anp.min(anp.arctan2(x, 2 + x**2), axis=0) * anp.max((x / y)[1:], axis=1, keepdims=True)),
        lambda x, y: anp.sum((y @ anp.maximum(x / (1 + x * x), y)) ** 2),
        lambda x, y: anp.sum(anp.cumsum(anp.minimum(x / (1 + x * x), 0.1), axis=0) ** 2),
        lambda x, y: anp.sum(anp.where(x / y >= anp.max(x / y, axis=0), x, 0.1 * x) ** 2),
        lambda x, y: mpiad.mpi_allreduce(anp.max(anp.abs(x) / (1 + x * x)), op=MPI.MAX),
    ],
)
def test_extrema_of_expressions_that_are_computed_again(fun):
    """Their entries are found by comparisons, though loops may round an expression in different ways."""
    compiled = mpiad.jit(fun)
    for seed in range(8):
        x, y, v = np.random.default_rng(seed).standard_normal((3, 6, 6))
        plain = mpiad.grad(fun)(x, y)
        for way in (mpiad.grad(compiled), mpiad.jit(mpiad.grad(fun))):
            np.testing.assert_allclose(way(x, y), plain, 1e-9, 1e-12)
        tangent = mpiad.make_jvp(lambda x, y=y: compiled(x, y))(x)(v)[1]
        np.testing.assert_allclose(tangent, mpiad.make_jvp(lambda x, y=y: fun(x, y))(x)(v)[1], 1e-9, 1e-12)


@pytest.mark.serial
def test_not_a_number_is_found_by_extremes():
    x = np.array([[1.0, np.nan, -np.inf], [-2.0, np.inf, 0.0]])

    def fun(x):
        return (
            anp.max(x),
            anp.min(x, axis=1),
            anp.max(x, axis=0),
            anp.maximum(x, 0),
            anp.where(x > 0, x, -x),
            anp.clip(x, -1, 1),
            anp.clip(abs(x) * 2.0, x, 2 * abs(x)),
        )

    jitted = mpiad.jit(fun, strict=True)
    for given in (np.ones((2, 3)), x, -x):
        assert_same(jitted(given), fun(given))


@pytest.mark.serial
@pytest.mark.parametrize("n", [100_000, 99_989])
def test_sums_of_many_numbers(n, rng):
    x = rng.standard_normal(n) * 10.0 ** rng.integers(-8, 8, n)
    jitted = mpiad.jit(
        lambda x: (anp.sum(x), anp.dot(x, x), anp.sum(anp.reshape(x[: n // 2 * 2], (2, -1)), axis=0)), strict=True
    )
    jitted(np.ones(n))
    total, square, columns = jitted(x)
    assert abs(total - math.fsum(x)) <= 1e-14 * math.fsum(abs(x))
    assert abs(square - math.fsum(x * x)) <= 1e-14 * math.fsum(x * x)
    np.testing.assert_array_equal(columns, x[: n // 2] + x[n // 2 : n // 2 * 2])
    assert jitted(x)[0] == total  # in one order


@pytest.mark.serial
def test_forms_of_results():
    """Nests, keyword arguments, integers, booleans, constants and the same result twice."""

    def fun(p, *, scale=2.0, names=("a", "b")):
        u = p["u"] * scale
        return {names[0]: u, names[1]: [u, (u > 0, anp.argmax(u), anp.sum(u > 0)), None, "text", 3, np.ones(2), p["n"]]}

    jitted = mpiad.jit(fun, strict=True)
    for scale in (0.5, 3.0):
        p = {"u": X * scale, "n": np.arange(3)}
        for given in ({}, {"scale": scale}, {"names": ("c", "d"), "scale": scale}, {"scale": scale, "names": ("c", "d")}):
            assert_same(jitted(p, **given), fun(p, **given))


@pytest.mark.serial
@pytest.mark.parametrize("dtype", [np.int64, np.int16, np.uint8])
def test_integers_among_the_results_in_derivatives(dtype):
    """Arguments, computed ones and a boolean, some of them twice; `linearize` also returns their zero tangents."""
    k, v, kept = np.array([2, 0, 1, 1], dtype), np.array([1.0, -0.5, 0.25]), []

    def fun(x, k):
        order = anp.argsort(x).astype(dtype)
        return anp.sum(x**2), k, order, k, order, anp.argmax(x), anp.argmax(x) + 2**60, anp.any(x > 2.5)

    def squares(x):
        total, *others = jitted(x, k)
        kept.append(others)
        return total

    jitted = mpiad.jit(fun, strict=True)
    for x in (np.array([0.5, -1.0, 2.0]), np.array([0.5, 3.0, 1.0])):
        order = np.argsort(x).astype(dtype)
        integers = [k, order, k, order, np.argmax(x), np.argmax(x) + 2**60, np.any(x > 2.5)]
        zeros = [np.zeros_like(part)[()] for part in integers]
        assert_same((mpiad.grad(squares)(x), kept[-1]), (2 * x, integers))
        for _ in range(2):
            linear = mpiad.linearize(jitted)(x, k)
            assert_same(linear.value, (x @ x, *integers))
            assert_same(linear.jvp(v), (2 * x @ v, *zeros))
            assert_same(linear.vjp((1.5, *integers)), 3 * x)
            vjp, value = mpiad.make_vjp(jitted)(x, k)
            assert_same((vjp((1.5, *integers)), value), (3 * x, (x @ x, *integers)))
        for f in (fun, jitted):
            assert_same(mpiad.jvp(lambda x: f(x, k), x, v), ((x @ x, *integers), (2 * x @ v, *zeros)))  # noqa: B023


@pytest.mark.serial
def test_half_precision_among_the_results_in_derivatives():
    """NumPy computes roots of booleans in half precision, and loops don't."""
    jitted = mpiad.jit(lambda x: (anp.sum(x**2), anp.sqrt(anp.all(x > -9.0)), anp.sqrt(x > 0.0)), strict=True)
    for x in (X, X - 10.0):
        assert_same(mpiad.grad(lambda x: jitted(x)[0])(x), 2 * x)
        for _ in range(2):
            linear = mpiad.linearize(jitted)(x)
            assert_same(linear.value, (np.sum(x**2), np.float16(np.all(x > -9.0)), (x > 0.0).astype(np.float16)))
            assert_same(linear.jvp(Y)[0], 2 * x @ Y)


@pytest.mark.serial
def test_higher_derivatives_and_both_modes():
    def fun(x):
        return anp.sum(anp.sin(x[1:] * x[:-1]) + anp.exp(-(x[1:] ** 2)))

    jitted, v = mpiad.jit(fun), Y
    product = mpiad.hvp(fun)
    twice = mpiad.jit(mpiad.grad(lambda x, v: anp.sum(mpiad.grad(fun)(x) * v)), strict=True)
    for x in (X, further(X), X):
        expected = product(x, v)
        assert_same(twice(x, v), expected, 1e-11)
        assert_same(mpiad.hvp(jitted)(x, v), expected, 1e-11)
        assert_same(mpiad.grad(lambda x: anp.sum(mpiad.grad(jitted)(x) * v))(x), expected, 1e-11)  # noqa: B023
        assert_same(mpiad.jvp(jitted, x, v), mpiad.jvp(fun, x, v), 1e-11)
        pull, value = mpiad.make_vjp(jitted)(x)
        assert_same((value, pull(2.0)), (fun(x), 2 * mpiad.grad(fun)(x)), 1e-11)
        assert_same(mpiad.jit(mpiad.hvp(fun))(x, v), expected, 1e-11)


@pytest.mark.serial
@pytest.mark.parametrize("n", [7, 10_000], ids=["small", "large"])
@pytest.mark.unguarded
def test_second_derivatives_of_a_compiled_function_are_compiled(n, monkeypatch):
    """In any order and with messages, several at one point: f itself isn't run any more. ∂²J/∂x² = 4 exp(2 x)."""
    x, v = np.linspace(-1, 1, n), np.cos(np.arange(n))
    jitted = mpiad.jit(lambda x: mpiad.mpi_exchange(mpiad.mpi_allreduce(anp.sum(anp.exp(2 * x))), 0, 0), strict=True)
    product = mpiad.hvp(jitted)
    along = lambda x: mpiad.jvp(mpiad.value_and_grad(jitted), x, v)  # noqa: E731
    turned = mpiad.grad(lambda x: mpiad.jvp(jitted, x, v)[1])
    twice = mpiad.grad(lambda x: anp.sum(mpiad.grad(jitted)(x) * v))
    for k in range(3):
        e = np.exp(2 * x)
        assert_same(product(x, v), 4 * e * v)
        assert_same(along(x), ((np.sum(e), 2 * e), (2 * np.sum(e * v), 4 * e * v)), 1e-11)
        assert_same(turned(x), 4 * e * v)
        assert_same(twice(x), 4 * e * v)
        kept, linear = mpiad.make_hvp(jitted)(x), mpiad.linearize(jitted)(x)
        assert_same((kept.value, kept.gradient, linear.value), (np.sum(e), 2 * e, np.sum(e)), 1e-11)
        for w in (v, x):
            assert_same(kept.product(w), 4 * e * w)
            assert_same(linear.jvp(w), np.sum(2 * e * w), 1e-11)
            assert_same(linear.vjp(w[0]), 2 * e * w[0])
        assert_same(kept.product(np.stack([v, x]), batch=True), np.stack([4 * e * v, 4 * e * x]))
        if not k:
            monkeypatch.setattr(jitted, "fun", None)
        x = x[::-1] * 0.5


@pytest.mark.serial
@pytest.mark.unguarded
def test_a_reverse_pass_that_has_begun_is_differentiated_by_its_cotangent():
    """Also of what broadcasts, which isn't traced by shapes."""
    jitted, run = mpiad.jit(lambda x: x**2, strict=True), mpiad.jit(lambda x: mpiad.mpi_bcast(x) ** 2, strict=True)
    mpiad.make_vjp(run)(X)[0](Y)
    for _ in range(2):
        pull = mpiad.make_vjp(jitted)(X)[0]
        assert_same(mpiad.jvp(pull, Y, X), (2 * X * Y, 2 * X * X))
        assert_same(mpiad.grad(lambda w: anp.sum(pull(w) ** 2))(Y), 8 * X * X * Y)  # noqa: B023
        assert_same(mpiad.jvp(mpiad.make_vjp(run)(X)[0], Y, X), (2 * X * Y, 2 * X * X))
    pulled = lambda x: mpiad.make_vjp(jitted)(x)[0](Y)  # noqa: E731
    assert_same(mpiad.jvp(pulled, X, Y), (2 * X * Y, 2 * Y * Y))


@pytest.mark.serial
def test_pulled_back_more_than_once():
    """A program that has run forwards serves each of its cotangents, also after it was run with other arguments."""
    jitted = mpiad.jit(lambda x: anp.cumsum(anp.sin(x) * x) * x, strict=True)
    for _ in range(3):
        pull, _ = mpiad.make_vjp(jitted)(X)
        jitted(Y)
        mpiad.make_vjp(jitted)(Y)[0](np.ones(7))
        plain = mpiad.make_vjp(lambda x: anp.cumsum(anp.sin(x) * x) * x)(X)[0]
        for g in (np.ones(7), Y, np.ones(7)):
            assert_same(pull(g), plain(g), 1e-11)


@pytest.mark.parametrize("like", [None, X], ids=["by a run", "by shapes"])
def test_several_cotangents_at_once(like, rank, size):
    """The adjoint of a call that communicates gets that of each; what rank 1 interprets sends one message for all."""
    fun = lambda x: mpiad.mpi_allreduce((mpiad.mpi_bcast(x) if like is None else x) ** 2)  # noqa: E731
    here = fun if rank == 1 and like is not None else mpiad.jit(fun, strict=True)
    for x in (X, Y):
        found = mpiad.make_vjp(here)(x)[0](np.stack([X, Y]), batch=True)
        ranks = size if like is not None else size**2 * (rank == 0)
        assert_same(found, 2 * ranks * np.stack([X * x, Y * x]))


def test_reductions_by_the_methods_of_ufuncs():
    x = np.linspace(-1, 2, 24).reshape(2, 3, 4)
    functions = lambda x: (np.add.reduce(x), np.maximum.reduce(x, axis=2), np.add.reduce(x, axis=None))  # noqa: E731
    reduced = mpiad.jit(functions, strict=True)
    for _ in range(2):
        rows, largest, total = reduced(x)
        np.testing.assert_allclose(rows, x[0] + x[1], rtol=1e-15)
        np.testing.assert_array_equal(largest, x[:, :, -1])
        np.testing.assert_allclose(total, 12.0, rtol=1e-14)


def test_transposed_operands_are_read_as_they_are():
    """Neither of arguments nor of results of calls."""
    x, w = RNG.standard_normal((128, 96)), RNG.standard_normal((96, 128))

    def loss(w, x):
        return anp.sum(anp.einsum("nm,nk->mk", anp.tanh(x @ w), x) ** 2) + anp.sum(anp.tanh(w[:4]))

    gradient = mpiad.jit(mpiad.grad(loss, objective="sum"), strict=True)
    np.testing.assert_allclose(gradient(w, x), mpiad.grad(loss, objective="sum")(w, x), rtol=1e-12, atol=1e-10)
    loops = gradient.program(w, x).loops
    assert loops.count("copy") == 0 and "tanh ->" not in loops and loops.count("matmul") + loops.count("dot ") == 4


def test_products_that_no_rule_reshapes():
    """`inner` of an array of matrices and a matrix isn't their product; operands of `einsum` may be constants."""

    def fun(c):
        sums = anp.einsum("ijk,->k", c, 2.0), anp.einsum("jk,ijk->ij", A, c)
        return anp.inner(c, c[0, :1]), anp.inner(c * 2.0, c[0, 0] * A[:, None]), *sums

    jitted = mpiad.jit(fun, strict=True)
    for _ in range(2):
        assert_same(jitted(C), fun(C))


# Functions of an array and a number, with the derivative by the array.
OF_NUMBERS = {
    "where": (lambda x, k: anp.where(k < 2, x * x, 3 * x), lambda x, k: 2 * x if k < 2 else 0 * x + 3),
    "power": (lambda x, k: x**k, lambda x, k: k * x ** (k - 1)),
    "base": (lambda x, k: k**x, lambda x, k: np.log(k) * k**x),
    "arctan2": (lambda x, k: anp.arctan2(k, x), lambda x, k: -k / (x * x + k * k)),
    "clip": (lambda x, k: anp.clip(x, -k, k), lambda x, k: 1.0 * (x < k)),
    "and": (
        lambda x, k: anp.where(anp.logical_and(k > 1, x > 1), x * x, x),
        lambda x, k: np.where((k > 1) & (x > 1), 2 * x, 1),
    ),
}


@pytest.mark.each_value
@pytest.mark.one_rank
@pytest.mark.parametrize("k", [1, 3, 1.5, 3.0, True])
@pytest.mark.parametrize("name", OF_NUMBERS)
def test_derivatives_of_functions_of_numbers(name, k):
    fun, derivative = OF_NUMBERS[name]
    fast, x, v = mpiad.jit(fun, strict=True), np.array([0.4, 1.2, 2.3]), np.array([1.0, -2.0, 0.5])
    cubes = mpiad.grad(lambda x: anp.sum(fast(x, k) ** 3), objective="sum")(x)
    np.testing.assert_allclose(cubes, 3 * fun(x, k) ** 2 * derivative(x, k), rtol=1e-14)
    np.testing.assert_allclose(mpiad.jvp(lambda x: fast(x, k), x, v)[1], derivative(x, k) * v, rtol=1e-14)


def below(x, n):
    n -= 1
    return x * (1 / n)


@pytest.mark.few(8)
@pytest.mark.one_rank
@pytest.mark.parametrize("entries", [3, 20_000])  # a function of a large array is compiled before it runs
@pytest.mark.parametrize(
    ("fun", "numbers"),
    [
        (lambda x, k: x * (1 / k), (0, 2, 0, 0.0, 3.0, 0.0, 4.0, np.float64(2.0), 2)),
        (lambda x, k: x * (2.5 / (k - 3)), (1, 3, 3.0, 2.5)),
        (below, (1, 3, 1.0, 4.0)),
        (lambda x, k: x * (7 % k) + 5 // k, (2, 0, 3, 0.0, 2.5)),
        (lambda x, k: x * (k * k) - k * k * k, (3, 2**31, 2**40, -(2**31), 5)),
        (lambda x, k: x * anp.real((-k) ** 0.5), (-4.0, 4.0, -9.0)),
        (lambda x, k: x * k**3.0, (2.0, 1e200, 3.0)),
        (lambda x, k: x * (k * 1e200), (2.0, 1e200, 3.0)),
    ],
)
def test_numbers_are_those_of_python(fun, numbers, entries, size):
    """Whatever the first call was, compiled or not: exceptions, integers of any length, and complex roots."""
    x = np.linspace(0.5, 2, entries)
    for first in numbers:
        fast = mpiad.jit(fun)
        for k in (first, *numbers):
            try:
                expected = fun(x, k)
            except ArithmeticError as error:
                with pytest.raises(type(error), match=re.escape(str(error))):
                    fast(x, k)
            else:
                np.testing.assert_allclose(fast(x, k), expected, rtol=1e-14)
    gradient = mpiad.value_and_grad(mpiad.jit(lambda x, k: anp.sum(x * (1 / k)), strict=True), objective="sum")
    for k in (2.0, 0.0, 4.0):
        if k:
            assert_same(gradient(x, k), (size * np.sum(x) / k, np.full(entries, 1 / k)))
        else:
            with pytest.raises(ZeroDivisionError):
                gradient(x, k)


@pytest.mark.serial
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128])
def test_loops_read_numbers_that_are_computed_from_integers(dtype):
    """As in the later ones of several steps: NumPy computes the number, but no array."""

    def fun(u, k):
        return u * (k + 1) + anp.sin(u) / (2 * k - 5) + (k // 2) * u**2

    u, v = np.array([0.3, -1.2, 2.0]).astype(dtype), np.array([1.0, 0.5, -2.0]).astype(dtype)
    jitted = mpiad.jit(fun, strict=True)
    for k in (0, 3, -2):
        value = jitted(u, k)
        np.testing.assert_allclose(value, fun(u, k), rtol=20 * np.finfo(dtype).eps)
        assert value.dtype == fun(u, k).dtype
        slope = (k + 1) + np.cos(u) / (2 * k - 5) + 2 * (k // 2) * u
        tangent = mpiad.jvp(lambda u, k=k: jitted(u, k), u, v)[1]
        np.testing.assert_allclose(tangent, slope * v, rtol=0, atol=50 * np.finfo(dtype).eps * np.max(np.abs(slope * v)))
    arrays = [line for line in jitted.program(u, 3).loops.splitlines() if "loop" in line]
    assert len(arrays) == 1


P = np.random.default_rng(8).uniform(0.5, 2.0, (3, 4))  # positive
WITH_INFINITY = np.where(np.arange(12).reshape(3, 4) % 5 == 2, -np.inf, P)
WEIGHTS = np.where(P > 1.8, 0.0, P)
COVARIANCE = np.eye(4) + 0.3


def sum_of_exponentials(x, b=1.0, shift=0.0, **kwargs):
    return anp.log(anp.sum(b * anp.exp(x - shift), **kwargs)) + shift


def normal(x, mean, covariance):
    r = x - mean
    quadratic = anp.sum(r * anp.linalg.solve(covariance, r))
    return -(quadratic + anp.linalg.slogdet(covariance)[1] + 4 * np.log(2 * np.pi)) / 2


def dirichlet(x, alpha):
    return anp.sum((alpha - 1) * anp.log(x) - special.gammaln(alpha)) + special.gammaln(anp.sum(alpha))


# Functions of SciPy that aren't ufuncs, beside their formulas.
OF_SCIPY = {
    "logsumexp": (special.logsumexp, sum_of_exponentials, P),
    "of axes": (lambda x: special.logsumexp(x, axis=(0, -1)), sum_of_exponentials, P),
    "weighted": (
        lambda x: special.logsumexp(x, axis=1, b=WEIGHTS, keepdims=True) * x,
        lambda x: sum_of_exponentials(x, WEIGHTS, axis=1, keepdims=True) * x, P,
    ),
    "of infinities": (
        lambda x: special.logsumexp(x, axis=0), lambda x: sum_of_exponentials(x, axis=0), WITH_INFINITY,
    ),
    "of large numbers": (
        lambda x: special.logsumexp(900 * x, -1), lambda x: sum_of_exponentials(900 * x, shift=900.0, axis=-1),
        np.linspace(0.999, 1.001, 12).reshape(3, 4),
    ),
    "digamma": (lambda x: special.digamma(x + 1), lambda x: special.digamma(x) + 1 / x, P),
    "polygamma": (lambda x: special.polygamma(1, x + 1), lambda x: special.polygamma(1, x) - 1 / x**2, P),
    "norm": (
        lambda x: stats.norm.logpdf(x, x[0], x[1]),
        lambda x: -(((x - x[0]) / x[1]) ** 2 + np.log(2 * np.pi)) / 2 - anp.log(x[1]), P,
    ),
    "multivariate_normal": (
        lambda x: stats.multivariate_normal.logpdf(x[0], x[1], COVARIANCE * x[2, 0]),
        lambda x: normal(x[0], x[1], COVARIANCE * x[2, 0]), P,
    ),
    "dirichlet": (
        lambda x: stats.dirichlet.logpdf(x[0] / anp.sum(x[0]), x[1]), lambda x: dirichlet(x[0] / anp.sum(x[0]), x[1]), P,
    ),
    "convolve": (
        lambda x: autograd.scipy.signal.convolve(x[0], x[1], mode="valid"),
        lambda x: anp.sum(x[0] * x[1][::-1], keepdims=True), P,
    ),
    "solve_triangular": (
        lambda x: autograd.scipy.linalg.solve_triangular(anp.tril(anp.outer(x[0], x[0])), x[1], lower=True)[1],
        lambda x: (x[1, 1] - x[0, 1] * x[1, 0] / x[0, 0]) / x[0, 1] ** 2, P,
    ),
}  # fmt: skip


@pytest.mark.few(6)
@pytest.mark.serial
@pytest.mark.parametrize(("fun", "formula", "x"), OF_SCIPY.values(), ids=OF_SCIPY)
def test_functions_of_scipy_that_are_not_ufuncs(fun, formula, x):
    def loss(fun, x):
        return anp.sum(anp.sin(mpiad.mpi_allreduce(fun(x))))

    def compiled(x):
        return loss(fun, x)

    def expected(x):
        return loss(formula, x)

    v = np.cos(np.arange(12.0)).reshape(3, 4)
    jitted = mpiad.jit(compiled, strict=True)
    for z in (x, 0.999 * x):  # the second call runs the program
        np.testing.assert_allclose(mpiad.jit(fun, strict=True)(z), formula(z), rtol=1e-9)
        np.testing.assert_allclose(jitted(z), expected(z), rtol=1e-8)
        pairs = [(mpiad.grad(jitted)(z), mpiad.grad(expected)(z)), (mpiad.hvp(jitted)(z, v), mpiad.hvp(expected)(z, v))]
        pairs += [(mpiad.jit(mpiad.grad(compiled), strict=True)(z), pairs[0][1])]
        pairs += [(mpiad.jit(mpiad.hvp(compiled), strict=True)(z, v), pairs[1][1])]
        pairs += [(mpiad.jvp(jitted, z, v)[1], mpiad.jvp(expected, z, v)[1])]
        for found, wanted in pairs:
            np.testing.assert_allclose(found, wanted, rtol=1e-7, atol=1e-9 * np.abs(wanted).max())


@pytest.mark.serial
@pytest.mark.parametrize(
    ("fun", "reference"),
    [
        (autograd.scipy.linalg.sqrtm, scipy.linalg.sqrtm),
        (lambda a: 2 * anp.linalg.eigvals(a), lambda a: 2 * np.linalg.eigvals(a)),
    ],
    ids=["sqrtm", "eigvals"],
)
def test_results_that_are_real_or_complex_by_their_values(fun, reference):
    jitted = mpiad.jit(fun, strict=True)
    for a in (COVARIANCE, -COVARIANCE[::-1], np.array([[0.0, 1.0], [-1.0, 0.0]]), COVARIANCE):
        found, wanted = jitted(a), reference(a)
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(found, wanted, atol=1e-14)
