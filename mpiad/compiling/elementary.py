"""Elementary functions in the kernel language, for which LLVM generates vector instructions.

With x = n log 2 + r and |r| ≤ log(2) / 2 (Cody and Waite, 1980), exp(x) = 2^n (1 + s), where s is the power series of
exp(r) - 1. The error is below one unit in the last place. With y = 2|x|, tanh(x) = ± e / (e + 2) where e = exp(y) - 1 =
2^n s + (2^n - 1); the error is below three units, as are the errors of expm1, sinh and cosh.

With x = 2^n (1 + f) and √½ ≤ 1 + f < √2, log(x) = n log 2 + log(1 + f), where log(1 + f) = 2 artanh(s) = 2s + s R(s²) with
s = f / (2 + f). This is f - f²/2 + s (f²/2 + R), which is more accurate since f is exact (Tang, 1990; Muller, Elementary
Functions). The error of log is below one unit in the last place, the errors of log2, log10 and log1p are below two, and the
errors of the inverse hyperbolic functions are below three. The logarithm in a power is the sum of two doubles, and the
error of the power is below two units.

In single precision, functions other than exp and tanh are rounded from double precision, so they are almost always the
numbers closest to the exact values.

The C library's functions aren't vector instructions, and would take most of the time of a neural network. A number gets the
same bits in a vector and alone, since all products that are added to something are fused explicitly.
"""

from __future__ import annotations

import ast
import math
from functools import cache, reduce

# The addition of `shift` rounds to an integer n, whose bits become the last ones of the significand.
_TEXT = """
def reduced_{kind}(x):
    w = fma(x, {inverse}, {shift})
    n = w - {shift}
    r = fma(n, {low}, fma(n, {high}, x))
    s = {first}
{terms}
    return n, w, fma(s, r * r, r)

def scaled_{kind}(n, w, s):
    half = fma(n, {half}, {shift})
    value = ({one} + s) * {number_of}((bits_of(half) << {bits}) + bits_of({one}))
    return value * {number_of}(((bits_of(w) - bits_of(half)) << {bits}) + bits_of({one}))

def exp_{kind}(x):
    n, w, s = reduced_{kind}(min(max(x, {least}), {largest}))
    return scaled_{kind}(n, w, s)

def tanh_{kind}(x):
    n, w, s = reduced_{kind}(min({two} * abs(x), {flat}))
    scale = {number_of}((bits_of(w) << {bits}) + bits_of({one}))
    e = fma(scale, s, scale - {one})
    return math.copysign(e / (e + {two}), x)
"""
# log 2 is the sum of `-high`, whose product with n is exact, and `-low`. The exponential is 0 below `least` and infinite
# above `largest`. If 2|x| is at least `flat`, the tangent is rounded to 1 or -1.
_DOUBLE = {"high": -0.693147180369123816490, "low": -1.90821492927058770002e-10, "least": -746, "largest": 710, "flat": 44}
_SINGLE = {"high": -0.693145751953125, "low": -1.42860677e-06, "least": -104, "largest": 89, "flat": 20}

# Functions of doubles, which also compute those of single precision. `quarters` returns exp(x) / 4 and (exp(x) - 1) / 4,
# which don't overflow. The rounding errors of n log 2 + f and of 1 + x = y + c are added later.
_OF_DOUBLES = """
def quarters_double(x):
    n, w, s = reduced_double(x)
    scale = number_of((bits_of(w) << 52) + bits_of(0.25))
    return fma(scale, s, scale), fma(scale, s, scale - 0.25)

def expm1_double(x):
    e, q = quarters_double(min(max(x, -50.0), 710.0))
    return where(abs(x) < {tiny}, x, 4.0 * q)

def sinh_double(x):
    e, q = quarters_double(min(abs(x), 710.6))
    return where(abs(x) < {tiny}, x, math.copysign(2.0 * (q + q / fma(4.0, q, 1.0)), x))

def cosh_double(x):
    e, q = quarters_double(min(abs(x), 710.6))
    return 2.0 * (e + 0.0625 / e)

def parts_double(x):
    y = where(x < {normal}, {two54} * x, x)
    k = (bits_of(y) - bits_of({root})) >> 52
    n = number_of(bits_of({shift}) + k) - where(x < {normal}, {shift} + 54.0, {shift})
    return n, number_of(bits_of(y) - (k << 52)) - 1.0

def rest_double(f):
    s = f / (2.0 + f)
    z = s * s
    return fma(-0.5 * f, f, s * fma(0.5 * f, f, z * {series}))

def natural_double(n, f):
    v = fma(n, {high}, f)
    return v + (f - fma(-n, {high}, v) + fma(n, {low}, rest_double(f)))

def limits_double(x, value):
    return where(x > 0.0, where(x < math.inf, value, x), where(x == 0.0, -math.inf, math.nan))

def log_double(x):
    n, f = parts_double(x)
    return limits_double(x, natural_double(n, f))

def based_double(x, inverse, inverse_low, high, low):
    n, f = parts_double(x)
    u = rest_double(f)
    h = f + u
    g = h * inverse
    v = fma(n, high, g)
    g_low = fma(h, inverse, -g) + fma(u - (h - f), inverse, h * inverse_low)
    return limits_double(x, v + (g - fma(-n, high, v) + fma(n, low, g_low)))

def log2_double(x):
    return based_double(x, {inverse2}, {inverse2_low}, 1.0, 0.0)

def log10_double(x):
    return based_double(x, {inverse10}, {inverse10_low}, {high10}, {low10})

def log2_float(x):
    return np.float32(log_double(np.float64(x)) * {inverse2})

def log10_float(x):
    return np.float32(log_double(np.float64(x)) * {inverse10})

def log1p_double(x):
    y = 1.0 + x
    c = min(x, 1.0) - (y - max(x, 1.0))
    k = (bits_of(y) - bits_of({root})) >> 52
    f = fma(0.5 * c, number_of(bits_of(2.0) - (k << 52)), number_of(bits_of(y) - (k << 52)) - 1.0)
    value = natural_double(number_of(bits_of({shift}) + k) - {shift}, f)
    return where(abs(x) < {tiny}, x, limits_double(y, value))

def atanh_double(x):
    y = abs(x)
    return math.copysign(0.5 * log1p_double(2.0 * y / (1.0 - y)), x)

def asinh_double(x):
    y = abs(x)
    value = log1p_double(where(y < {two60}, y + y * y / (1.0 + math.sqrt(fma(y, y, 1.0))), y))
    return math.copysign(value + where(y < {two60}, 0.0, {log2}), x)

def acosh_double(x):
    y = x - 1.0
    value = log1p_double(where(x < {two60}, y + math.sqrt(y * (x + 1.0)), x))
    return where(x < 1.0, math.nan, value + where(x < {two60}, 0.0, {log2}))
"""

# Functions that are accurate only if the processor has fused products. In single precision, x is reduced by (π / 2) w; in
# `pow_double`, names that end with `_low` are the second parts of sums of two doubles.
_FUSED = """
def quadrant_double(x):
    a = abs(x)
    factor = {factor}
    w = fma(x, factor, {shift})
    t = fma(x, {factor_low}, fma(x, factor, -(w - {shift})))
    z = t * t
    return bits_of(w), t * {sine}, {cosine}

def turned_double(k, s, c):
    value = where((k & 1) == 0, s, c)
    return where((k & 2) == 0, value, -value)

def sin_float(x):
    k, s, c = quadrant_double(np.float64(x))
    return np.float32(turned_double(k, s, c))

def cos_float(x):
    k, s, c = quadrant_double(np.float64(x))
    return np.float32(turned_double(k + 1, s, c))

def tan_float(x):
    k, s, c = quadrant_double(np.float64(x))
    return np.float32(where((k & 1) == 0, s, -c) / where((k & 1) == 0, c, s))

def pow_double(x, y):
    a = abs(x)
    n, f = parts_double(a)
    d = 2.0 + f
    i = 1.0 / d
    s = f * i
    s_low = fma(s, (d - 2.0) - f, fma(-s, d, f)) * i
    z = s * s
    z_low = fma(2.0 * s, s_low, fma(s, s, -z))
    g = z * {two_thirds}
    b = fma(z * z, {longer}, fma(z, {two_thirds}, -g) + fma(z_low, {two_thirds}, z * {two_thirds_low}))
    t = g + b
    h = s * t
    h_low = fma(s, t, -h) + fma(s, b - (t - g), s_low * t)
    v = fma(n, {high}, 2.0 * s)
    u = v + h
    u_low = (fma(2.0, s, -fma(-n, {high}, v)) + (h - (u - v))) + fma(2.0, s_low, fma(n, {low}, h_low))
    log = u + u_low
    return powered_double(x, y, limits_double(a, log), u_low - (log - u))

def powered_double(x, y, log, low):
    q = where(abs(x) == 1.0, 0.0, y)
    e = q * log
    e_low = where(abs(e) < 800.0, fma(q, log, -e) + q * low, 0.0)
    m, w, r = reduced_double(min(max(e, -746.0), 710.0))
    value = scaled_double(m, w, fma(e_low, 1.0 + r, r))
    whole = np.rint(y) == y
    value = where(whole & (np.rint(0.5 * y) != 0.5 * y), math.copysign(value, x), value)
    value = where((x < 0.0) & (x > -math.inf) & (not whole), math.nan, value)
    return where(y == 0.0, 1.0, value)

def pow_float(x, y):
    return np.float32(powered_double(np.float64(x), np.float64(y), log_double(np.float64(abs(x))), 0.0))
"""
# The series 2/3 + 2z/5 + 2z²/7 + ... and 2/5 + 2z/7 + ... of R, telescoped by Chebyshev polynomials for 0 ≤ z < 0.029438
# (Lanczos, 1938) in rational arithmetic; the relative errors of log(1 + f) are 2^-57.6 and 2^-66.4.
_SERIES = 0.666666666666667, 0.39999999999899, 0.2857142862618, 0.2222221110497, 0.18182891089, 0.15331662, 0.146171278
_LONGER = (
    0.4,
    0.2857142857142937,
    0.222222222216539,
    0.18181818335799,
    0.1538459492364,
    0.13334806604,
    0.117061898,
    0.117236236,
)
_CONSTANTS = {
    "high": -_DOUBLE["high"],
    "low": -_DOUBLE["low"],
    "log2": math.log(2),
    "shift": 1.5 * 2**52,
    "root": 0.5**0.5,
    "normal": 2.0**-1022,
    "tiny": 2.0**-54,
    "two54": 2.0**54,
    "two60": 2.0**60,
    # 1 / log 2, 1 / log 10, 2 / 3 and log 2 / log 10, each with its rounding error.
    "inverse2": 1.4426950408889634,
    "inverse2_low": 2.0355273740931033e-17,
    "inverse10": 0.4342944819032518,
    "inverse10_low": 1.098319650216765e-17,
    "two_thirds": 2 / 3,
    "two_thirds_low": 2.0**-54 / 1.5,
    "high10": 0.30102999566361177,
    "low10": 3.694239077158931e-13,
}
# 2 / π in units of 2^-256. If the last bit of x is at least 2^k, the bits of 2 / π from 2^(2 - k) on have no effect, since
# their products with x are whole turns (Payne and Hanek, 1983).
_TWO_OVER_PI = 0xA2F9836E4E441529FC2757D1F534DDC0DB6295993C439041FE5163ABDEBBC561


@cache
def definitions(fused: bool) -> dict[str, ast.FunctionDef]:
    """Return the functions by name, with LLVM's type "double" or "float" as suffix; `fused`: with those of `_FUSED`."""
    terms = [(-1) ** (k // 2) * (math.pi / 2) ** k / math.factorial(k) for k in range(14)]
    series = {"series": _SERIES, "longer": _LONGER, "sine": terms[1::2], "cosine": terms[::2]}
    texts = {name: repr(value) for name, value in _CONSTANTS.items()}
    for name, (*lower, highest) in series.items():  # Horner's rule
        texts[name] = reduce(lambda text, c: f"fma({text}, z, {c!r})", reversed(lower), repr(highest))
    for exponent in (110, 88, 66, 44, 22):  # 2^exponent ≤ a < 2^(exponent + 22)
        part = _TWO_OVER_PI % 2 ** (256 + 25 - max(exponent, 25))
        rest = part % 2 ** (part.bit_length() - 53)  # not negative, so that t is -0 for x = -0
        for name, value in (("factor", (part - rest) / 2**256), ("factor_low", rest / 2**256)):
            larger = texts.get(name)
            texts[name] = f"where(a < {2.0 ** (exponent + 22)!r}, {value!r}, {larger})" if larger else repr(value)
    text = _text("double") + _text("float") + (_OF_DOUBLES + _FUSED * fused).format(**texts)
    return {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}


def is_elementary(operation: str) -> bool:
    """Return whether the text of an operation on doubles, such as "math.log({0})", is a call of one of the functions."""
    return f"{operation.partition('(')[0].partition('.')[2]}_double" in definitions(True)


def _text(kind: str) -> str:
    single = kind == "float"
    bits, degree, literal = (23, 8, "np.float32({!r})") if single else (52, 13, "{!r}")
    numbers = {"inverse": 1 / math.log(2), "shift": 1.5 * 2**bits, "half": 0.5, "one": 1, "two": 2}
    numbers |= {"first": 1 / math.factorial(degree), **(_SINGLE if single else _DOUBLE)}
    names = {name: literal.format(float(value)) for name, value in numbers.items()} | {"kind": kind, "bits": str(bits)}
    terms = [f"    s = fma(s, r, {literal.format(1 / math.factorial(k))})" for k in range(degree - 1, 1, -1)]
    number_of = "single_of" if single else "number_of"
    return _TEXT.format(terms="\n".join(terms), number_of=number_of, **names)
