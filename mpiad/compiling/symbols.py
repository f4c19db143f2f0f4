"""Scalars, real or complex, that record the operations applied to them.

Object arrays of symbols support NumPy's operations (a sum, a matrix product, ``np.sin``), which are recorded element by
element. Symbols have no values, so the trace fails if a function needs the value of a symbol.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.program import OPERATIONS, Builder

# Complex arithmetic. A complex symbol is a pair of real values.
#
# Programs have only real values, and their derivatives are with respect to real and imaginary parts, whether or not the
# function is holomorphic. For finite numbers the results agree with NumPy's to rounding. Products with a constant zero,
# such as the real part of 1j, are omitted, so infinities may give other results than in NumPy, where such products are NaN.

# NumPy computes powers with integer exponents smaller than this by multiplication.
_LARGEST_EXPONENT = 100
# For larger arguments tanh is 1 up to rounding, and squares might overflow.
_FLAT = 22.0


# ---- arithmetic


def _is_zero(x: Symbol) -> bool:
    return x.builder.value(x.number) == 0


def _times(x: Symbol, y: Symbol) -> Symbol:
    """Return the product of real values; 0 if a factor is a constant zero, even if the other is infinite or NaN."""
    return x if _is_zero(x) else y if _is_zero(y) else x * y


def _multiply(x: Symbol, y: Symbol) -> Symbol:
    real = _times(x.real, y.real) - _times(x.imag, y.imag)
    return real.plus_i(_times(x.real, y.imag) + _times(x.imag, y.real))


def _divide(x: Symbol, y: Symbol) -> Symbol:
    a, b, c, d = x.real, x.imag, y.real, y.imag
    if _is_zero(d):
        return (a / c).plus_i(b / c)
    # Smith's algorithm, as in NumPy, since the squares of c and d might overflow or underflow.
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
        result = integer_power(x, int(abs(exponent)), _multiply)
        result = x.symbol_of(1 + 0j) if result is None else result
        return result if exponent >= 0 else 1.0 / result
    # The logarithm of 0 is infinite. As in NumPy, powers of 0 are 0 if Re y > 0, 1 if y = 0, and otherwise NaN.
    is_zero = x.call("equal", 0.0)
    safe = is_zero.chosen(1.0, x.real).plus_i(x.imag)
    result = _exp(_multiply(y, _log(safe)))
    zero, undefined = y.real > 0.0, y.call("equal", 0.0).chosen(0.0, math.nan)
    at_zero = zero.chosen(0.0, undefined + 1.0), zero.chosen(0.0, undefined)
    return is_zero.chosen(at_zero[0], result.real).plus_i(is_zero.chosen(at_zero[1], result.imag))


def integer_power(x: Symbol, n: int, times: Callable[[Symbol, Symbol], Symbol]) -> Symbol | None:
    """Return x to the power of n by repeated squaring (for n = 6, x² · (x²)²); None for n = 0."""
    result = None
    while n:
        if n % 2:
            result = x if result is None else times(result, x)
        n //= 2
        if n:
            x = times(x, x)
    return result


def _equal(x: Symbol, y: Symbol) -> Symbol:
    return x.real.call("equal", y.real).call("logical_and", x.imag.call("equal", y.imag))


# ---- functions


def _modulus(z: Symbol) -> Symbol:
    return z.real.call("modulus", z.imag)


def _exp(z: Symbol) -> Symbol:
    size = z.real.exp()
    return (size * z.imag.cos()).plus_i(size * z.imag.sin())


def _log(z: Symbol) -> Symbol:
    return _modulus(z).log().plus_i(z.imag.arctan2(z.real))


def _logarithm(base: float) -> Callable[[Symbol], Symbol]:
    return lambda z: _log(z) / math.log(base)


def _sqrt(z: Symbol) -> Symbol:
    a, b = z.real, z.imag
    right = a >= 0.0
    # The smaller part is computed from the larger part, without cancellation. Absolute values of a and b aren't used,
    # since the absolute value has no derivative at 0.
    larger = ((right.chosen(a, -a) + _modulus(z)) * 0.5).sqrt()
    smaller = b / (2.0 * (larger == 0.0).chosen(1.0, larger))
    sign = z.symbol_of(1.0).call("copysign", b)
    return right.chosen(larger, smaller * sign).plus_i(right.chosen(smaller, larger * sign))


def _by_parts(first: str, second: str, third: str, fourth: str, sign: float = 1.0) -> Callable[[Symbol], Symbol]:
    """Return the rule of a complex function: first(a) second(b) + i sign · third(a) fourth(b) at a + ib."""

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
    result = _tanh((-z.imag).plus_i(z.real))
    return result.imag.plus_i(-result.real)


_RULES: dict[str, Callable[..., Symbol]] = {
    "add": lambda x, y: (x.real + y.real).plus_i(x.imag + y.imag),
    "subtract": lambda x, y: (x.real - y.real).plus_i(x.imag - y.imag),
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
    "stop_gradient": lambda z: z.real.call("stop_gradient").plus_i(z.imag.call("stop_gradient")),
}

_NEEDS_TRUTH = (
    "it compares, rounds or branches on an array that np.array or autograd's np.stack made of traced values, or takes its "
    "sign, maximum or minimum: do this with the components, or join them by np.concatenate"
)
_NEEDS_NUMBER = "it needs the number of a traced value, which is unknown (float, int, math.sin instead of np.sin, an index)"


def _operator(operation: str, swapped: bool = False) -> Callable[[Symbol, Any], Any]:
    def method(self: Symbol, other: object) -> Any:
        # If the other operand is an array, Python then calls the array's operator, which calls this method for each entry.
        if not isinstance(other, (Symbol, int, float, complex, np.number, np.bool_)):
            return NotImplemented
        if swapped:
            return self.symbol_of(other).call(operation, self)
        return self.call(operation, other)

    return method


def _unary(operation: str) -> Callable[[Symbol], Symbol]:
    return lambda self: self.call(operation)


class Symbol:
    """A scalar of a program under construction; `number` is its value number."""

    __slots__ = ("builder", "number")

    def __init__(self, builder: Builder, number: int):
        self.builder, self.number = builder, number

    @property
    def is_boolean(self) -> bool:
        """Whether the value is boolean."""
        return self.builder.is_boolean(self.number)

    @property
    def is_complex(self) -> bool:
        """Whether the symbol is a pair of a real and an imaginary part."""
        return self.builder.parts(self.number) is not None

    @property
    def real(self) -> Symbol:
        """The real part."""
        parts = self.builder.parts(self.number)
        return self.as_number() if parts is None else Symbol(self.builder, parts[0])

    @property
    def imag(self) -> Symbol:
        """The imaginary part."""
        parts = self.builder.parts(self.number)
        return Symbol(self.builder, self.builder.constant(0.0) if parts is None else parts[1])

    def plus_i(self, imag: Symbol) -> Symbol:
        """Return the complex number with this real part and the given imaginary part."""
        return Symbol(self.builder, self.builder.pair(self.number, imag.number))

    def as_number(self) -> Symbol:
        """Return a boolean as 0 or 1, and a number unchanged."""
        return self.chosen(1.0, 0.0) if self.is_boolean else self

    def of_kind(self, kind: str) -> Symbol:
        """Return the value as an entry of an array whose dtype is of this kind; a real entry drops the imaginary part."""
        return self.truth() if kind == "b" else self.real.plus_i(self.imag) if kind == "c" else self.real

    def truth(self) -> Symbol:
        """Return whether the value isn't 0."""
        return self if self.is_boolean else self.call("not_equal", 0.0)

    def call(self, operation: str, *others: Any) -> Symbol:
        """Return the value of an operation with this symbol as its first argument."""
        builder, arguments = self.builder, [self, *map(self.symbol_of, others)]
        if operation.startswith("logical"):
            arguments = [x.truth() for x in arguments]
        else:
            arguments = [x.as_number() if builder.is_boolean(x.number) else x for x in arguments]
        if any(builder.parts(x.number) for x in arguments):
            if operation not in _RULES:
                builder.refuse(f"it takes {operation} of complex numbers, which can't be compiled")
            return _RULES[operation](*arguments)
        return Symbol(builder, builder.call(operation, *[x.number for x in arguments]))

    def symbol_of(self, other: object) -> Symbol:
        """Return a number as a symbol of the same program, and a symbol unchanged."""
        return other if isinstance(other, Symbol) else Symbol(self.builder, number_of(self.builder, other))

    def __getattr__(self, name: str) -> Callable[..., Symbol]:
        # For an object array, np.sin calls the method `sin` of each entry.
        if name.startswith("_") or name not in OPERATIONS:
            raise AttributeError(name)
        return lambda *others: self.call(name, *others)

    def conjugate(self) -> Symbol:
        """Return its complex conjugate."""
        return self.real.plus_i(-self.imag) if self.is_complex else self

    def chosen(self, x: Array, y: Array) -> Symbol:
        """Return x if this symbol is true, else y."""
        first, second = self.symbol_of(x), self.symbol_of(y)
        if first.is_complex or second.is_complex:
            return self.chosen(first.real, second.real).plus_i(self.chosen(first.imag, second.imag))
        if not (first.is_boolean and second.is_boolean):
            first, second = first.as_number(), second.as_number()
        return Symbol(self.builder, self.builder.call("where", self.truth().number, first.number, second.number))

    def __pos__(self) -> Symbol:
        return self

    def __bool__(self) -> NoReturn:
        self.builder.refuse(_NEEDS_TRUTH)

    def __float__(self) -> NoReturn:
        self.builder.refuse(_NEEDS_NUMBER)

    __int__ = __index__ = __complex__ = __float__
    __neg__, __abs__, __invert__ = map(_unary, ("negative", "absolute", "logical_not"))
    __add__, __radd__ = _operator("add"), _operator("add", swapped=True)
    __sub__, __rsub__ = _operator("subtract"), _operator("subtract", swapped=True)
    __mul__, __rmul__ = _operator("multiply"), _operator("multiply", swapped=True)
    __truediv__, __rtruediv__ = _operator("divide"), _operator("divide", swapped=True)
    __pow__, __rpow__ = _operator("power"), _operator("power", swapped=True)
    __and__ = __rand__ = _operator("logical_and")
    __or__ = __ror__ = _operator("logical_or")
    __xor__ = __rxor__ = _operator("not_equal")
    __lt__, __le__ = _operator("less"), _operator("less_equal")
    __gt__, __ge__ = _operator("greater"), _operator("greater_equal")
    __eq__, __ne__ = _operator("equal"), _operator("not_equal")  # type: ignore[assignment]
    # Since `==` is recorded as an operation, symbols can't be keys of dictionaries.
    __hash__ = None  # type: ignore[assignment]


def number_of(builder: Builder, value: object) -> int:
    """Return the value number of a constant or a symbol; raise a Refusal for anything else."""
    if isinstance(value, np.ndarray) and value.shape == ():  # autograd turns an entry of an object array into this
        value = value.item()
    if isinstance(value, Symbol):
        return value.number
    # Booleans are checked first, since Python's booleans are integers.
    if isinstance(value, (bool, np.bool_)):
        return builder.constant(bool(value))
    if isinstance(value, (int, float, np.integer, np.floating)):
        return builder.constant(float(value))
    if isinstance(value, (complex, np.complexfloating)):
        return builder.pair(*(builder.constant(float(part)) for part in (value.real, value.imag)))
    builder.refuse(f"it computes with {type(value).__name__} {value!r:.60}, which isn't a number")


def choose(condition: Any, x: Array, y: Array) -> Symbol:
    """Return x if the condition is true, else y."""
    return condition.chosen(x, y)
