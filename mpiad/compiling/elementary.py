"""Exponential and hyperbolic tangent in the kernel language, for which LLVM generates vector instructions.

With x = n log 2 + r and |r| ≤ log(2) / 2 (Cody and Waite, 1980), exp(x) = 2^n (1 + s), where s is the power series of
exp(r) - 1. The error is below one unit in the last place. With y = 2|x|, tanh(x) = ± e / (e + 2) where e = exp(y) - 1 =
2^n s + (2^n - 1); the error is below three units.

The C library's functions aren't vector instructions, and would take most of the time of a neural network. A number gets the
same bits in a vector and alone, since all products that are added to something are fused explicitly.
"""

from __future__ import annotations

import ast
import math
from functools import cache

# The addition of `shift` rounds to an integer n, whose bits become the last ones of the significand.
_TEXT = """
def reduced_{kind}(x):
    w = fma(x, {inverse}, {shift})
    n = w - {shift}
    r = fma(n, {low}, fma(n, {high}, x))
    s = {first}
{terms}
    return n, w, fma(s, r * r, r)

def exp_{kind}(x):
    n, w, s = reduced_{kind}(min(max(x, {least}), {largest}))
    half = fma(n, {half}, {shift})
    value = ({one} + s) * {number_of}((bits_of(half) << {bits}) + bits_of({one}))
    return value * {number_of}(((bits_of(w) - bits_of(half)) << {bits}) + bits_of({one}))

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


@cache
def definitions(kind: str) -> dict[str, ast.FunctionDef]:
    """Return the functions for LLVM's type "double" or "float", by name."""
    single = kind == "float"
    bits, degree, literal = (23, 8, "np.float32({!r})") if single else (52, 13, "{!r}")
    numbers = {"inverse": 1 / math.log(2), "shift": 1.5 * 2**bits, "half": 0.5, "one": 1, "two": 2}
    numbers |= {"first": 1 / math.factorial(degree), **(_SINGLE if single else _DOUBLE)}
    names = {name: literal.format(float(value)) for name, value in numbers.items()} | {"kind": kind, "bits": str(bits)}
    terms = [f"    s = fma(s, r, {literal.format(1 / math.factorial(k))})" for k in range(degree - 1, 1, -1)]
    number_of = "single_of" if single else "number_of"
    text = _TEXT.format(terms="\n".join(terms), number_of=number_of, **names)
    return {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
