"""Exponential and hyperbolic tangent in the kernel language, for which LLVM generates vector instructions.

With x = n log 2 + r and |r| ≤ log(2) / 2 (Cody and Waite, 1980), exp(x) = 2^n (1 + s), where s is a polynomial near
exp(r) - 1. The error is below one unit in the last place. With y = 2|x|, tanh(x) = ± e / (e + 2) where e = exp(y) - 1 =
2^n s + (2^n - 1); the error is below three units.

The C library's functions aren't vector instructions, and would take most of the time of a neural network. A number gets the
same bits in a vector and alone, since all products that are added to something are fused explicitly.
"""

from __future__ import annotations

import ast
from functools import cache

# Before the sum is rounded to an integer, `shift` has moved its bits to the end of the significand.
_TEXT = """
def reduced_{kind}(x):
    w = fma(x, {inverse}, {shift})
    n = w - {shift}
    r = fma(n, {low}, fma(n, {high}, x))
    s = {first}
{powers}
    return n, w, fma(s, r * r, r)

def exp_{kind}(x):
    n, w, s = reduced_{kind}(min(max(x, {least}), {largest}))
    half = fma(n, {half}, {shift})
    one = {one} + s
    one = one * {number_of}((bits_of(half) << {bits}) + bits_of({one}))
    return one * {number_of}(((bits_of(w) - bits_of(half)) << {bits}) + bits_of({one}))

def tanh_{kind}(x):
    n, w, s = reduced_{kind}(min({two} * abs(x), {flat}))
    scale = {number_of}((bits_of(w) << {bits}) + bits_of({one}))
    e = fma(scale, s, scale - {one})
    return math.copysign(e / (e + {two}), x)
"""
# log 2 is the sum of `-high`, whose product with n is exact, and `-low`. Beyond `least` and `largest` the exponential is 0
# or infinite, and beyond `flat` the tangent is 1. The coefficients interpolate (exp(r) - 1 - r) / r² at Chebyshev points.
_DOUBLE = {
    "inverse": 1.4426950408889634, "shift": 6755399441055744.0, "high": -0.693147180369123816490,
    "low": -1.90821492927058770002e-10, "least": -746.0, "largest": 710.0, "flat": 44.0,
}  # fmt: skip
_SINGLE = {
    "inverse": 1.44269504, "shift": 12582912.0, "high": -0.693145751953125, "low": -1.42860677e-06,
    "least": -104.0, "largest": 89.0, "flat": 20.0,
}  # fmt: skip
_COEFFICIENTS = {
    "double": (
        2.0914686968086876e-09, 2.5105217004720745e-08, 2.75572736431103e-07, 2.7557255400206422e-06,
        2.4801587325547743e-05, 0.00019841269874820627, 0.0013888888888883748, 0.008333333333326136, 0.04166666666666667,
        0.1666666666666667, 0.5,
    ),
    "float": (0.00019890991, 0.0013933650, 0.0083333105, 0.041666467, 0.16666667, 0.5),
}  # fmt: skip


@cache
def definitions(kind: str) -> dict[str, ast.FunctionDef]:
    """Return the functions for LLVM's type "double" or "float", by name."""
    single = kind == "float"
    numbers = (_SINGLE if single else _DOUBLE) | {"half": 0.5, "one": 1.0, "two": 2.0}
    texts = {name: f"np.float32({value!r})" if single else repr(value) for name, value in numbers.items()}
    first, *others = [f"np.float32({value!r})" if single else repr(value) for value in _COEFFICIENTS[kind]]
    powers = "\n".join(f"    s = fma(s, r, {value})" for value in others)
    bits, number_of = (23, "single_of") if single else (52, "number_of")
    text = _TEXT.format(kind=kind, first=first, powers=powers, bits=bits, number_of=number_of, **texts)
    return {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
