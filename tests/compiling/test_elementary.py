"""The elementary functions of kernels, compared with extended precision, in vectors and alone."""

from __future__ import annotations

import numpy as np
import pytest
from one_kernel import one_kernel

from mpiad.compiling import machine_code, translation
from mpiad.compiling.arguments import Argument

pytestmark = [pytest.mark.serial, pytest.mark.filterwarnings("ignore:(overflow|divide|invalid):RuntimeWarning")]
LOOP = """
def run(x, y, out):
    for i in range(x.size):
        out[i] = {}
"""
LANES = """
def run(x, y, out):
    for k in range(0, x.size, 8):
        a = x[k : k + 8]
        b = y[k : k + 8]
        c = out[k : k + 8]
        for l in lanes(8):
            c[l] = {}
"""
# The functions with their names in kernels, and bounds of errors in units in the last place.
FUNCTIONS = {
    "exp": ("exp", 1), "tanh": ("tanh", 3), "expm1": ("expm1", 3), "sinh": ("sinh", 3), "cosh": ("cosh", 3),
    "log": ("log", 1), "log2": ("log2", 2), "log10": ("log10", 2), "log1p": ("log1p", 2), "arctanh": ("atanh", 3),
    "arcsinh": ("asinh", 3), "arccosh": ("acosh", 3),
}  # fmt: skip
IN_SINGLE = {"sin": ("sin", 1), "cos": ("cos", 1), "tan": ("tan", 1), **FUNCTIONS}
CASES = [(name, float, *x) for name, x in FUNCTIONS.items()] + [(name, "f4", *x) for name, x in IN_SINGLE.items()]
ROUNDED = 0.501  # error in single precision of functions that are computed in double precision
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 2.0, -2.0, 0.5, 3.0, -3.0, 2.5, 100.5, -1e9, 1e15, -1e30]


def computed(text, expression, x, y=None, fast="contract arcp"):
    y, out, kind = x if y is None else y, np.empty_like(x), f"{x.dtype}[::1]"
    places = {"x": "a[l]", "y": "b[l]"} if text == LANES else {"x": "x[i]", "y": "y[i]"}
    one_kernel(text.format(expression.format(**places)), "run", f"void({kind}, {kind}, {kind})", fast)(x, y, out)
    return out


def check(expression, exact, ulps, x, y=None):
    """Compare with an exact result, in vectors, alone, and in loops of other lengths, in which the bits are the same."""
    info = np.finfo(x.dtype)
    found, rounded = computed(LANES, expression, x, y), exact.astype(x.dtype)
    finite = np.isfinite(rounded)
    error = np.abs(found[finite] - exact[finite]) / np.spacing(np.abs(rounded[finite]))
    assert error.max() <= ulps
    # Where rounding to infinity or to the largest number are both within an ulp:
    limit = np.isinf(rounded) & np.isfinite(exact) & (np.abs(exact) < 1.001 * np.longdouble(info.max))
    np.testing.assert_array_equal(found[~finite & ~limit], rounded[~finite & ~limit])
    assert np.all(np.abs(found[limit]) >= info.max)
    known = ~np.isnan(rounded)
    np.testing.assert_array_equal(np.signbit(found[known]), np.signbit(rounded[known]))
    for length in (1, 3, 13, x.size - 1):
        parts = [None if z is None else z[-length:].copy() for z in (x, y)]
        for fast in ("contract arcp", ""):
            np.testing.assert_array_equal(computed(LOOP, expression, *parts, fast=fast), found[-length:])


def numbers(dtype, more=()):
    """Return numbers of all magnitudes, close to 0 and 1 and between, and special ones."""
    rng, info = np.random.default_rng(6), np.finfo(dtype)
    low, high, bits = np.log2(float(info.smallest_subnormal)), np.log2(float(info.max)), info.nmant + 1
    sign = rng.choice([-1.0, 1.0], (4, 10_000))
    parts = [2 ** rng.uniform(low, high, 10_000), 2 ** rng.uniform(-bits, 7, 10_000), rng.uniform(0, high, 10_000)]
    parts = [sign[0] * parts[0], sign[1] * parts[1], sign[2] * parts[2], 1 + sign[3] * 2 ** rng.uniform(-bits, -1, 10_000)]
    ends = np.log(2.0) * np.linspace(low - 2, low + bits + 2, 2000), np.log(float(info.max)) + np.linspace(-1, 1, 2000)
    special = [*SPECIAL, info.max, -info.max, info.tiny, info.smallest_subnormal, -3 * info.smallest_subnormal]
    x = np.concatenate([*parts, *ends, np.linspace(-3, 3, 10_000), *more, np.resize(special, 24)])
    return x[x.size % 8 :].astype(dtype)


@pytest.mark.parametrize(("name", "dtype", "text", "ulps"), CASES)
def test_functions_of_vectors(name, dtype, text, ulps):
    multiples = np.arange(-4000, 4000) * (np.pi / 2)
    x = numbers(dtype, [multiples, multiples * 2.0**20, multiples * 2.0**90])
    bound = ROUNDED if dtype == "f4" and text not in ("exp", "tanh") else ulps
    check(f"math.{text}({{x}})", getattr(np, name)(x.astype(np.longdouble)), bound, x)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_powers(dtype):
    rng, x = np.random.default_rng(7), numbers(dtype)
    largest = np.log(float(np.finfo(dtype).max))
    # Results of all magnitudes, exponents of all magnitudes, and all pairs of special numbers.
    y = rng.uniform(-1.1 * largest, 1.1 * largest, x.size) / np.log(np.abs(x.astype(float)))
    special = numbers(dtype)[-24:]
    first, second = map(np.ravel, np.meshgrid(special, special))
    x, y = np.concatenate([x, x, first]), np.concatenate([y, rng.permutation(x), second]).astype(dtype)
    exact = np.power(x.astype(np.longdouble), y.astype(np.longdouble))
    check("{x} ** {y}", exact, ROUNDED if dtype == np.float32 else 2, x, y)
    for base in (2.0, 0.3):
        text = f"np.float32({base})" if dtype == np.float32 else str(base)
        exact = np.longdouble(dtype(base)) ** y.astype(np.longdouble)
        check(f"{text} ** {{x}}", exact, ROUNDED if dtype == np.float32 else 2, y)


def test_logarithms_of_powers_are_exact():
    two, ten = np.arange(-1074.0, 1022.0), np.arange(0.0, 16.0)
    np.testing.assert_array_equal(computed(LOOP, "np.log2({x})", 2.0**two), two)
    np.testing.assert_array_equal(computed(LOOP, "np.log10({x})", 10.0**ten), ten)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", ["f8", "f4"])
def test_the_c_library_isn_t_called(dtype, fused, monkeypatch):
    if fused and not translation.has_fma_instruction():
        pytest.skip("this processor has no fused products")
    monkeypatch.setattr(translation, "has_fma_instruction", lambda: fused)
    names = {name for name, _ in (IN_SINGLE if dtype == "f4" else FUNCTIONS).values()}
    texts = {name: f"math.{name}(x[i])" for name in names} | {"pow": "x[i] ** y[i]"}
    calling = set()
    for name, text in texts.items():
        source = translation.translated(LOOP.format(text), "run", [Argument(np.dtype(dtype), 1)] * 3)
        file, _ = machine_code._compiled([(source, "run")], 2)
        symbols = {symbol.lstrip(b"_") for symbol in file.split(b"\0")}
        calling |= {name} & {symbol.removesuffix(b"f").decode(errors="replace") for symbol in symbols}
    # Without fused products, powers and trigonometric functions wouldn't be accurate.
    assert calling == (set() if fused else {"pow"} | {"sin", "cos", "tan"} & names)
