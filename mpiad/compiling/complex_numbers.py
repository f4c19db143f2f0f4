"""Complex numbers while f is traced: each is a pair of real values, and operations of f are applied to those.

A program has real values only, and its derivatives, of holomorphic functions or not, are with respect to real and imaginary
parts.
For finite numbers values are NumPy's to rounding. Products with a zero that is part of f, as those by 1j, are left out,
although NumPy computes NaN for infinities.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpiad.compiling.symbols import Symbol

# Up to here NumPy multiplies.
_LARGEST_EXPONENT = 100
# Beyond this, tanh is 1 to rounding, and squares might overflow.
_FLAT = 22.0


def complex_value(operation: str, arguments: list[Symbol]) -> Symbol:
    """Return the value of an operation of the catalogue at least one of whose arguments is complex.

    A Refusal if it isn't defined for complex numbers, or can't be compiled.
    """
    rule = _RULES.get(operation)
    if rule is None:
        arguments[0].builder.refuse(f"it takes {operation} of complex numbers, which can't be compiled")
    return rule(*arguments)


# ---- arithmetic


def _is_zero(x: Symbol) -> bool:
    return x.builder.value(x.number) == 0


def _times(x: Symbol, y: Symbol) -> Symbol:
    """Return the product of real values: 0 if one of them is known to be."""
    return x if _is_zero(x) else y if _is_zero(y) else x * y


def _add(x: Symbol, y: Symbol) -> Symbol:
    return (x.real + y.real).plus_i(x.imag + y.imag)


def _subtract(x: Symbol, y: Symbol) -> Symbol:
    return (x.real - y.real).plus_i(x.imag - y.imag)


def _multiply(x: Symbol, y: Symbol) -> Symbol:
    real = _times(x.real, y.real) - _times(x.imag, y.imag)
    return real.plus_i(_times(x.real, y.imag) + _times(x.imag, y.real))


def _divide(x: Symbol, y: Symbol) -> Symbol:
    a, b, c, d = x.real, x.imag, y.real, y.imag
    if _is_zero(d):
        return (a / c).plus_i(b / c)
    # Smith's, as NumPy has it: the squares of c and d might overflow, or vanish.
    steep = abs(c).call("less", abs(d))
    larger, smaller = steep.chosen(d, c), steep.chosen(c, d)
    ratio = smaller / larger
    scale = 1.0 / (larger + smaller * ratio)
    real = steep.chosen(_times(a, ratio) + b, a + _times(b, ratio))
    imag = steep.chosen(_times(b, ratio) - a, b - _times(a, ratio))
    return _times(real, scale).plus_i(_times(imag, scale))


def _power(x: Symbol, y: Symbol) -> Symbol:
    value = x.builder.value
    exponent = value(y.real.number) if _is_zero(y.imag) else None
    if exponent is not None and exponent % 1 == 0 and abs(exponent) <= _LARGEST_EXPONENT:
        made = whole_power(x, int(abs(exponent)), _multiply)
        made = _one(x) if made is None else made
        return made if exponent >= 0 else _divide(_one(x), made)
    # 0 to the power of a number that isn't whole is 0, and the logarithm is infinite there.
    nothing = _equal(x, 0.0 * _one(x))
    safe = nothing.chosen(1.0, x.real).plus_i(x.imag)
    made = _exp(_multiply(y, _log(safe)))
    return nothing.chosen(0.0, made.real).plus_i(nothing.chosen(0.0, made.imag))


def whole_power(x: Symbol, n: int, times: Callable[[Symbol, Symbol], Symbol]) -> Symbol | None:
    """Return x to the power of n by products, None for 0; by squaring: n = 6 is x² · (x²)²."""
    made = None
    while n:
        if n % 2:
            made = x if made is None else times(made, x)
        n //= 2
        if n:
            x = times(x, x)
    return made


def _equal(x: Symbol, y: Symbol) -> Symbol:
    return x.real.call("equal", y.real).call("logical_and", x.imag.call("equal", y.imag))


def _one(x: Symbol) -> Symbol:
    one, zero = (type(x)(x.builder, x.builder.constant(part)) for part in (1.0, 0.0))
    return one.plus_i(zero)


# ---- functions


def _modulus(z: Symbol) -> Symbol:
    return z.real.call("modulus", z.imag)


def _exp(z: Symbol) -> Symbol:
    size = z.real.exp()
    return (size * z.imag.cos()).plus_i(size * z.imag.sin())


def _log(z: Symbol) -> Symbol:
    return _modulus(z).log().plus_i(z.imag.arctan2(z.real))


def _logarithm(base: float) -> Callable[[Symbol], Symbol]:
    return lambda z: _divide(_log(z), _one(z) * math.log(base))


def _sqrt(z: Symbol) -> Symbol:
    a, b = z.real, z.imag
    right = a >= 0.0
    # The larger part, and the smaller one without cancellation. Absolute values would have no derivative if a or b is 0.
    larger = ((right.chosen(a, -a) + _modulus(z)) * 0.5).sqrt()
    smaller = b / (2.0 * (larger == 0.0).chosen(1.0, larger))
    sign = _one(z).real.call("copysign", b)
    return right.chosen(larger, smaller * sign).plus_i(right.chosen(smaller, larger * sign))


def _by_parts(first: str, second: str, third: str, fourth: str, sign: float = 1.0) -> Callable[[Symbol], Symbol]:
    """Return the rule of a function of a + ib whose parts are first(a) second(b) and ±third(a) fourth(b)."""

    def rule(z: Symbol) -> Symbol:
        a, b = z.real, z.imag
        return (a.call(first) * b.call(second)).plus_i(sign * (a.call(third) * b.call(fourth)))

    return rule


def _tanh(z: Symbol) -> Symbol:
    a, b = z.real, z.imag
    a = (a > _FLAT).chosen(_FLAT, (a < -_FLAT).chosen(-_FLAT, a))
    s, c, cos = a.sinh(), a.cosh(), b.cos()
    square = s * s + cos * cos
    return (s * c / square).plus_i(b.sin() * cos / square)


def _tan(z: Symbol) -> Symbol:
    # -i tanh(iz)
    made = _tanh((-z.imag).plus_i(z.real))
    return made.imag.plus_i(-made.real)


_RULES: dict[str, Callable[..., Symbol]] = {
    "add": _add,
    "subtract": _subtract,
    "multiply": _multiply,
    "divide": _divide,
    "negative": lambda z: (-z.real).plus_i(-z.imag),
    "power": _power,
    "absolute": _modulus,
    "equal": _equal,
    "not_equal": lambda x, y: ~_equal(x, y),
    "exp": _exp,
    "log": _log,
    "log2": _logarithm(2.0),
    "log10": _logarithm(10.0),
    "sqrt": _sqrt,
    "sin": _by_parts("sin", "cosh", "cos", "sinh"),
    "cos": _by_parts("cos", "cosh", "sin", "sinh", -1.0),
    "tan": _tan,
    "sinh": _by_parts("sinh", "cos", "cosh", "sin"),
    "cosh": _by_parts("cosh", "cos", "sinh", "sin"),
    "tanh": _tanh,
}
