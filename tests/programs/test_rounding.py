"""The bits of compiled arithmetic: those of NumPy, for any partition, at edges and inside, in the first call and later."""

import math

import autograd.numpy as anp
import numpy as np
import pytest

import mpiad

FIELDS, STEPS = 3, 12
SHAPES = ((9, 7), (160, 240))  # on four ranks, loops over the larger grid begin before the halos have arrived


def plain(x, c):
    return x / c


def by_reciprocal(x, c):
    """Return the quotient by a scalar as `jit` computes it by default."""
    return x * (x.dtype.type(1) / x.dtype.type(c))


def discriminant(a, b):
    return (a + b) ** 2 - 4 * a * b


FORMS = (
    lambda a, b, c, s, shifted, divide: a * b - c * a,
    lambda a, b, c, s, shifted, divide: anp.sqrt(anp.where(discriminant(a, b) >= 0, discriminant(a, b), c * c)),
    lambda a, b, c, s, shifted, divide: divide(a * b + c, s),
    lambda a, b, c, s, shifted, divide: divide(a - b, 1.7) * c + a,
    lambda a, b, c, s, shifted, divide: a / (b * b + c * c + 0.5),
    lambda a, b, c, s, shifted, divide: anp.where(a * b < c * s, divide(a, s) - b, 0.1 * a + c),
    lambda a, b, c, s, shifted, divide: shifted(a)[0] + shifted(b)[1] * s - 2.0 * c,
    lambda a, b, c, s, shifted, divide: divide(0.5 * (shifted(a)[0] - shifted(a)[1]) * (b + c), 3.0 * s),
    lambda a, b, c, s, shifted, divide: anp.sqrt(anp.abs(a * c - b * s)) * 0.7,
)


def program(steps, fields, scalars, shifted, divide):
    """Run a random program; ``shifted(x)`` returns neighbors of all entries, ``divide(x, c)`` the quotient by a scalar."""
    fields = list(fields)
    for form, out, i, j, k, s in steps:
        fields[out] = FORMS[form](fields[i], fields[j], fields[k], scalars[s], shifted, divide)
    return fields


@pytest.mark.few(2)
@pytest.mark.also_on(1, 2, 3, 4)
@pytest.mark.parametrize("real", [np.float64, np.float32])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("exact", [False, True])
def test_bits_are_those_of_numpy_on_any_number_of_ranks(exact, seed, real):
    shape, rng = SHAPES[seed % 3 == 0], np.random.default_rng(seed)
    random = [rng.uniform(-2, 2, shape).astype(real) for _ in range(FIELDS)]
    uniform = [np.full_like(x, rng.uniform(0.5, 2)) for x in random]
    steps = rng.integers([len(FORMS), *[FIELDS] * 5], size=(STEPS, 6)).tolist()
    scalars, domain = rng.uniform(0.1, 9, FIELDS).tolist(), mpiad.Domain(shape, periodic=True)

    def neighbors(x):
        padded = domain.exchange(x)
        return padded[2:, 1:-1], padded[1:-1, :-2]

    compiled = mpiad.jit(lambda f, s: program(steps, f, s, neighbors, plain), strict=True, exact=exact)
    with np.errstate(all="ignore"):
        rolled = lambda x: (np.roll(x, -1, 0), np.roll(x, 1, 1))  # noqa: E731
        for whole in (random, uniform, random):
            expected = program(steps, whole, scalars, rolled, plain if exact else by_reciprocal)
            for x, y in zip(compiled([x[domain.owned] for x in whole], scalars), expected):
                assert x.dtype == real
                np.testing.assert_array_equal(x, y[domain.owned])


@pytest.mark.one_rank
@pytest.mark.parametrize("real", [np.float64, np.float32])
def test_equal_products_cancel(real):
    a = np.random.default_rng(0).uniform(0.5, 2, 1003).astype(real)
    f = mpiad.jit(lambda a, b: (anp.sqrt(discriminant(a, b)), a * b - b * a), strict=True)
    for _ in range(3):
        np.testing.assert_array_equal(f(a, a.copy()), np.zeros((2, 1003)))


@pytest.mark.one_rank
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("real", [np.float64, np.float32])
def test_reciprocals_that_overflow_or_are_subnormal_are_not_used(real, traced):
    x = np.concatenate([np.random.default_rng(0).uniform(0.5, 2, 20), [0.0, np.inf, np.nan]]).astype(real)
    info = np.finfo(real)
    numbers = info.smallest_subnormal, 3 * info.smallest_subnormal, info.tiny / 3, info.max, -info.max / 1.5, 0.0, math.inf
    of_two = mpiad.jit(lambda y, c: y / c, strict=True)
    with np.errstate(all="ignore"):
        for c in numbers:
            f = of_two if traced else mpiad.jit(lambda y, c, k=c: y / k, strict=True)
            for y in (x, x * real(c), x, x * real(c)):
                np.testing.assert_allclose(f(y, float(c)), y / real(c), 2 * info.eps, 2 * info.smallest_subnormal)


@pytest.mark.one_rank
def test_a_number_that_becomes_an_input_gives_the_same_bits():
    x, found = np.random.default_rng(0).uniform(0.5, 2, 1003), []

    def quotient(c):
        return mpiad.jit(lambda x: x / c + (x - 1) / (3 * c), strict=True)

    for c in (0.7, 0.9, 0.7, 1.1, 0.7):
        found.append(quotient(c)(x))
    for again in found[2::2]:
        np.testing.assert_array_equal(again, found[0])


@pytest.mark.one_rank
@pytest.mark.parametrize(
    "f",
    [
        lambda x, c: (x * 0.1 + x).astype(float) * 1.7 + x,
        lambda x, c: (x.astype(float) * 1.1).astype(np.float32) * np.float32(1.7) + x,
        lambda x, c: x * (c * c * c + 0.7) / ((c - 0.1) * 0.7 - 0.3),
        lambda x, c: anp.floor(7 * x) + anp.rint(9 * x) - anp.maximum(x, 1.1) * anp.sign(x - c) + anp.clip(x, 0.8, 1.6),
        lambda x, c: x % c + x // c - anp.abs(x - 1) ** 0.5 + x**2 - x**-1 + anp.minimum(x, 1.3) * anp.trunc(3 * x),
        lambda x, c: x * (anp.ones_like(x) * 0.1 * 0.3 + 0.7) / ((anp.zeros_like(x) + 0.1) * 0.7 - 0.3),
    ],
)
def test_precisions_in_one_program(f):
    x = np.random.default_rng(0).uniform(0.5, 2, 1003).astype(np.float32)
    compiled, expected = mpiad.jit(f, strict=True, exact=True), f(x, 0.37)
    for _ in range(2):
        found = compiled(x, 0.37)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


@pytest.mark.one_rank
def test_derivatives_of_exact_functions_are_exact():
    x = np.random.default_rng(0).uniform(0.5, 2, 1003)
    compiled = mpiad.jit(lambda x: anp.sum(x / 3.0), exact=True, strict=True)
    gradient = mpiad.grad(lambda y: compiled(y), objective="sum")
    for _ in range(2):
        np.testing.assert_array_equal(gradient(x), np.full(1003, 1.0) / 3.0)
    _, tangent = mpiad.jvp(mpiad.jit(lambda x: x / 3.0, exact=True, strict=True), x, x)
    np.testing.assert_array_equal(tangent, x / 3.0)


@pytest.mark.serial
@pytest.mark.parametrize("real", [np.float64, np.float32])
@pytest.mark.parametrize(
    "f",
    [
        anp.sign,
        *(lambda x, c=c: x % c for c in (3.0, -3.0, 0.0)),
        *(lambda x, c=c: x // c for c in (3.0, -3.0, 0.0, math.inf)),
        lambda x: x[::-1] % x,
        lambda x: x[::-1] // x,
    ],
    ids=range(10),
)
def test_signs_of_zeros(f, real):
    x = np.array([-0.0, 0.0, 6.0, -6.0, 5.0, -5.0, 0.0, -0.0, 3.0, -3.0, math.nan, math.inf, -math.inf, 1e-30], real)
    exact = mpiad.jit(f, strict=True, exact=True)
    with np.errstate(all="ignore"):
        for _ in range(2):
            expected, found = f(x), exact(x)
            np.testing.assert_array_equal(found, expected)
            is_number = ~np.isnan(expected)
            np.testing.assert_array_equal(np.signbit(found)[is_number], np.signbit(expected)[is_number])
