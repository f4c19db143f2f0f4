"""NumPy's functions, as elementwise functions of symbols and reductions: one table for array programs and scalar programs.

A rule computes a call of a function: ``rule(t, *args, **kwargs)`` gets the arguments of the call, and a `Translator`, which
appends elementwise functions, reductions and constants to a program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from mpiad._typing import Array, Axis, Shape
from mpiad.compiling.program import OPERATIONS
from mpiad.compiling.symbols import Symbol, choose

Rule = Callable[..., Any]


class Unsupported(Exception):
    """Raised by a rule that doesn't support a call; the message describes the unsupported arguments."""


class Translator(Protocol):
    """A program to which rules append values; `shape` and `dtype` are those of NumPy's result of the call."""

    kind: type  # the class of the program's values, by which rules tell them from constants
    shape: Shape
    dtype: np.dtype

    def elementwise(self, name: str, function: Callable[..., Symbol], *args: Array) -> Array:
        """Append an elementwise function of values and numbers, which are broadcast; its dtype is that of the call."""

    def reduce(
        self, name: str, x: Array, axis: Axis = None, dtype: object = None, out: None = None, keepdims: bool = False
    ) -> Array:
        """Append a reduction by a ufunc, given by its name, from the first entry to the last; `keepdims` has no effect."""

    def full(self, value: Array) -> Array:
        """Append an array of the call's shape and dtype, whose entries are a number or a value, which is broadcast."""


# NumPy's elementwise functions.


def scalar_function(ufunc: np.ufunc) -> Callable[..., Symbol] | None:
    """Return the implementation of a ufunc of NumPy or SciPy for symbols; None if it isn't supported."""
    return _UFUNCS.get(ufunc) or _SPECIAL.get(ufunc.__name__)


def _direct(name: str) -> Callable[..., Symbol]:
    return lambda x, *others: x.call(name, *others)


# In NumPy, sums and products of two booleans are boolean, but the sum of a boolean array along an axis is a number.
def _add(x: Symbol, y: Symbol) -> Symbol:
    return x | y if x.is_boolean and y.is_boolean else x + y


def _multiply(x: Symbol, y: Symbol) -> Symbol:
    return x & y if x.is_boolean and y.is_boolean else x * y


def _floor_divide(x: Symbol, y: Symbol) -> Symbol:
    rest = x.fmod(y)
    whole = (x - rest) / y  # an integer, up to rounding
    below = (rest != 0.0) & ((rest < 0.0) ^ (y < 0.0))
    result = choose(y == 0.0, (x / y).trunc(), choose(below, whole - 1.0, whole).rint())
    return choose(result == 0.0, result.copysign(x / y), result)


# This formula doesn't overflow. Equal arguments are treated separately: the difference of equal infinities is NaN.
def _logaddexp(x: Symbol, y: Symbol) -> Symbol:
    return choose(x == y, 0.5 * x + 0.5 * y + math.log(2.0), x.maximum(y) + (-abs(x - y)).exp().log1p())


def _is_infinite(x: Symbol) -> Symbol:
    return abs(x).call("equal", math.inf)


def _is_finite(x: Symbol) -> Symbol:
    return abs(x) < math.inf


_UFUNCS: dict[np.ufunc, Callable[..., Any]] = {
    function: _direct(name) for name in OPERATIONS if isinstance(function := OPERATIONS[name].function, np.ufunc)
} | {
    np.add: _add,
    np.multiply: _multiply,
    np.positive: lambda x: x.as_number(),
    np.conjugate: lambda x: x.conjugate(),
    np.fabs: abs,
    np.square: lambda x: x * x,
    np.reciprocal: lambda x: 1.0 / x,
    np.float_power: lambda x, y: x**y,
    np.exp2: lambda x: 2.0**x,
    np.logaddexp: _logaddexp,
    **dict.fromkeys((np.deg2rad, np.radians), lambda x: x * (math.pi / 180)),
    **dict.fromkeys((np.rad2deg, np.degrees), lambda x: x * (180 / math.pi)),
    np.floor_divide: _floor_divide,
    np.heaviside: lambda x, y: choose(x != x, x, choose(x == 0.0, y, choose(x > 0.0, 1.0, 0.0))),
    np.isnan: lambda x: x != x,
    np.isinf: lambda x: _is_infinite(x.real) | _is_infinite(x.imag) if x.is_complex else _is_infinite(x),
    np.isfinite: lambda x: _is_finite(x.real) & _is_finite(x.imag) if x.is_complex else _is_finite(x),
    np.logical_xor: lambda x, y: x.truth() ^ y.truth(),
    np.bitwise_and: lambda x, y: x & y,
    np.bitwise_or: lambda x, y: x | y,
    np.bitwise_xor: lambda x, y: x ^ y,
    np.invert: lambda x: ~x,
}

# Ufuncs of SciPy, by name, to avoid importing SciPy.
_SPECIAL = {name: _direct(name) for name in ("erf", "erfc", "expit", "logit")}


# Functions that aren't ufuncs.

# The maximum number of entries of an interpolation table; each entry costs one comparison per evaluation.
_LONGEST_TABLE = 64


def rule_of(function: Callable) -> Rule | None:
    """Return the rule of a function of NumPy, a ufunc, or its method `reduce`; None if there is no rule."""
    if isinstance(function, np.ufunc):
        implementation = scalar_function(function)
        return None if implementation is None else _each(function.__name__, implementation)
    ufunc = getattr(function, "__self__", None)
    if isinstance(ufunc, np.ufunc) and ufunc in _REDUCED and function.__name__ == "reduce":
        return _reduced(ufunc.__name__, 0)
    return RULES.get(function)


def _each(name: str, function: Callable[..., Symbol]) -> Rule:
    return lambda t, *args: t.elementwise(name, function, *args)


def _reduced(name: str, along: int | None = None) -> Rule:
    return lambda t, x, axis=along, *args, **kwargs: t.reduce(name, x, axis, *args, **kwargs)


def _where(t: Translator, condition: Array, x: Array, y: Array) -> Array:
    return t.elementwise("where", choose, condition, x, y)


def _select(t: Translator, conditions: Sequence[Array], choices: Sequence[Array], default: Array = 0) -> Array:
    # Backwards: the first true condition is applied last, so it decides.
    for condition, choice in zip(reversed(conditions), reversed(choices)):
        default = _where(t, condition, choice, default)
    return default


# maximum and minimum would have derivative 1/2 at a bound, but autograd's clip has derivative 0. NaN bounds give NaN.
def _at_least(x: Symbol, y: Symbol) -> Symbol:
    return choose((x > y) | (x != x), x, y)


def _at_most(x: Symbol, y: Symbol) -> Symbol:
    return choose((x < y) | (x != x), x, y)


def _clip(t: Translator, x: Array, a_min: Array = None, a_max: Array = None, **bounds: Array) -> Array:
    lower, upper = bounds.pop("min", a_min), bounds.pop("max", a_max)
    if bounds:
        raise Unsupported(f"{', '.join(bounds)}=")
    x = x if lower is None else t.elementwise("at_least", _at_least, x, lower)
    return x if upper is None else t.elementwise("at_most", _at_most, x, upper)


def _mean(t: Translator, x: Array, axis: Axis = None, keepdims: bool = False) -> Array:
    total, count = t.reduce("add", x, axis), math.prod(x.shape) // max(math.prod(t.shape), 1)
    if not count:
        raise Unsupported("an array without entries")
    return t.elementwise("divide", _UFUNCS[np.divide], total, float(count))


def _square_of_modulus(z: Symbol) -> Symbol:
    return (z * z.conjugate()).real


def _norm(t: Translator, x: Array, ord: int | None = None, axis: Axis = None, keepdims: bool = False) -> Array:  # noqa: A002
    if ord not in (None, 2) or ord == 2 and not isinstance(axis, int) and len(x.shape) > 1:
        raise Unsupported(f"ord={ord!r}")
    squares = t.elementwise("square", _square_of_modulus, x)
    return t.elementwise("sqrt", _UFUNCS[np.sqrt], t.reduce("add", squares, axis))


def _argument(z: Symbol) -> Symbol:
    return z.imag.arctan2(z.real)


def _angle(t: Translator, z: Array, deg: bool = False) -> Array:
    angle = t.elementwise("angle", _argument, z)
    return t.elementwise("degrees", _UFUNCS[np.degrees], angle) if deg else angle


def _sinc(x: Symbol) -> Symbol:
    # As in NumPy, 0 is replaced by a tiny number, so that the result at 0 is 1.
    y = np.pi * choose(x == 0.0, 1e-20, x)
    return y.sin() / y


def _rounded(t: Translator, x: Array, decimals: int = 0) -> Array:
    if decimals:
        raise Unsupported(f"decimals={decimals}")
    return t.elementwise("rint", _UFUNCS[np.rint], x)


def _interpolated(
    t: Translator, x: Array, xp: Array, fp: Array, left: Array = None, right: Array = None, period: float | None = None
) -> Array:
    """Return `numpy.interp`, computed by one comparison per interval, for short tables of constants."""
    traced = any(isinstance(part, t.kind) for part in (xp, fp, left, right, period))
    if traced or period is not None or np.size(xp) > _LONGEST_TABLE:
        raise Unsupported(
            f"{'traced values in the table' if traced else f'a table of {np.size(xp)} entries'}"
            f"{' and a period' if period is not None else ''}; expected at most {_LONGEST_TABLE} constants and no period"
        )
    places, values = np.asarray(xp, float), np.asarray(fp, complex if np.iscomplexobj(fp) else float)
    low, high = (values[end] if given is None else given for end, given in ((0, left), (-1, right)))
    with np.errstate(all="ignore"):  # the slope of an interval of length 0 isn't used
        slopes = np.diff(values) / np.diff(places)

    def one(x: Symbol) -> Symbol:
        result = choose(x < places[0], low, values[0])
        # The last `choose` with a true condition decides, which is the one for the interval that contains x.
        for place, value, slope in zip(places, values, slopes):
            result = choose(x >= place, slope * (x - place) + value, result)
        result = choose(x == places[-1], values[-1], choose(x > places[-1], high, result))
        return choose(x != x, x, result)

    return t.elementwise("interp", one, x)


def _polynomial(t: Translator, coefficients: Array, x: Array) -> Array:
    result = t.elementwise("multiply", _multiply, x, 0.0)
    for coefficient in coefficients:
        result = t.elementwise("horner", lambda y, x, c: y * x + c, result, x, coefficient)
    return result


_REDUCED = frozenset({np.add, np.multiply, np.maximum, np.minimum, np.logical_and, np.logical_or})

RULES: dict[Callable, Rule] = {
    np.sum: _reduced("add"), np.prod: _reduced("multiply"), np.max: _reduced("maximum"), np.amax: _reduced("maximum"),
    np.min: _reduced("minimum"), np.amin: _reduced("minimum"), np.all: _reduced("logical_and"),
    np.any: _reduced("logical_or"), np.mean: _mean, np.linalg.norm: _norm,
    np.where: _where, np.select: _select, np.clip: _clip, np.sinc: _each("sinc", _sinc), np.interp: _interpolated,
    np.polyval: _polynomial, np.round: _rounded, np.angle: _angle, np.imag: _each("imag", lambda z: z.imag),
    np.real: _each("real", lambda z: z.real), np.zeros_like: lambda t, *_, **__: t.full(0.0),
    np.empty_like: lambda t, *_, **__: t.full(0.0), np.ones_like: lambda t, *_, **__: t.full(1.0),
    np.full: lambda t, shape, value, dtype: t.full(value),
}  # fmt: skip
