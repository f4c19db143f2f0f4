"""What an operation is by algebra, without changing a value.

All are exact, NaN and infinity included, but for the sign of a zero: x + 0 is x also where x is -0. So 0 · x stays, and
so does x - x. The square of a modulus loses its root and is right to rounding: |z|² is what f has most often of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpiad.compiling.builder import Builder


def identity(builder: Builder, operation: str, arguments: tuple[int, ...]) -> int | None:
    """Return the number of a simpler value that equals an operation's, None where there is none."""
    rule = _RULES.get(operation)
    return None if rule is None else rule(builder, *arguments)


def _inner(builder: Builder, x: int, operation: str) -> int | None:
    """Return the argument of x where x is that operation of one argument."""
    instruction = builder.instructions[x]
    return instruction.arguments[0] if instruction.operation == operation else None


def _add(b: Builder, x: int, y: int) -> int | None:
    if b.value(x) == 0:
        return y
    if b.value(y) == 0:
        return x
    for left, right in ((x, y), (y, x)):
        minus = _inner(b, right, "negative")
        if minus is not None:
            return b.call("subtract", left, minus)
    return None


def _subtract(b: Builder, x: int, y: int) -> int | None:
    if b.value(y) == 0:
        return x
    if b.value(x) == 0:
        return b.call("negative", y)
    minus = _inner(b, y, "negative")
    return None if minus is None else b.call("add", x, minus)


def _square_of_modulus(b: Builder, x: int) -> int | None:
    operation, parts, _ = b.instructions[x]
    return b.call("add", *(b.call("multiply", part, part) for part in parts)) if operation == "modulus" else None


def _multiply(b: Builder, x: int, y: int) -> int | None:
    square = _square_of_modulus(b, x) if x == y else None
    if square is not None:
        return square
    if b.value(y) is not None:
        x, y = y, x
    if b.value(x) == 1:
        return y
    if b.value(x) == -1:
        return b.call("negative", y)
    first, second = _inner(b, x, "negative"), _inner(b, y, "negative")
    if second is not None and b.value(x) is not None:
        return b.call("multiply", b.call("negative", x), second)
    return None if first is None or second is None else b.call("multiply", first, second)


def _divide(b: Builder, x: int, y: int) -> int | None:
    by = b.value(y)
    if by == 1:
        return x
    # The reciprocal of a power of two is exact.
    if by and math.isfinite(by) and abs(math.frexp(by)[0]) == 0.5 and abs(math.log2(abs(by))) < 100:
        return b.call("multiply", x, b.constant(1 / by))
    return None


def _absolute(b: Builder, x: int) -> int | None:
    minus = _inner(b, x, "negative")
    if minus is not None:
        return b.call("absolute", minus)
    return x if _inner(b, x, "absolute") is not None else None


def _logical(decisive: bool) -> Callable[..., int | None]:
    def rule(b: Builder, x: int, y: int) -> int | None:
        for one, other in ((x, y), (y, x)):
            if b.value(one) is not None:
                return one if bool(b.value(one)) is decisive else other
        return x if x == y else None

    return rule


def _where(b: Builder, condition: int, x: int, y: int) -> int | None:
    known = b.value(condition)
    if known is not None:
        return x if known else y
    if x == y:
        return x
    if b.is_boolean(x) and b.value(x) is True and b.value(y) is False:
        return condition
    opposite = _inner(b, condition, "logical_not")
    return None if opposite is None else b.call("where", opposite, y, x)


# Of the larger or smaller of two.
def _same(b: Builder, x: int, y: int) -> int | None:
    return x if x == y else None


# 0^0 is 1 and so is NaN^0.
def _power(b: Builder, x: int, y: int) -> int | None:
    exponent = b.value(y)
    if exponent == 0:
        return b.constant(1.0)
    if exponent == 2:
        return _square_of_modulus(b, x)
    return x if exponent == 1 else None


_RULES: dict[str, Callable[..., int | None]] = {
    "add": _add,
    "subtract": _subtract,
    "multiply": _multiply,
    "divide": _divide,
    "negative": lambda b, x: _inner(b, x, "negative"),
    "absolute": _absolute,
    "logical_not": lambda b, x: _inner(b, x, "logical_not"),
    "logical_and": _logical(False),
    "logical_or": _logical(True),
    "where": _where,
    "maximum": _same,
    "minimum": _same,
    "fmax": _same,
    "fmin": _same,
    "power": _power,
}
