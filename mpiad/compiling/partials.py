"""The partial derivatives of each operation, written with symbols.

Where an operation has a kink or a tie they are what autograd takes: 0 for the absolute value at 0, a half for each of two
equal arguments of a maximum, a third for each of three. So gradients agree with those of the vectorised path.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import TypeAlias

from mpiad.compiling.symbols import Symbol, choose

# A factor, or a linear function where a product would make NaN of 0 times infinity; None is zero.
Partial: TypeAlias = "Symbol | float | Callable[[Symbol], Symbol] | None"
Rule: TypeAlias = "Callable[..., list[Partial]]"


def partials_of(operation: str, arguments: list[Symbol], value: Symbol) -> list[Partial]:
    """Return the derivatives of an operation's value by each argument."""
    rule = PARTIALS.get(operation)
    return [None] * len(arguments) if rule is None else rule(*arguments, value)


def _power(x: Symbol, y: Symbol, r: Symbol) -> list[Partial]:
    # At x = 0 the logarithm's infinity times zero would be NaN.
    safe = choose(x == 0.0, 1.0, x)
    return [y * x ** choose(y == 0.0, 1.0, y - 1.0), safe.log() * r]


def _divide(x: Symbol, y: Symbol, r: Symbol) -> list[Partial]:
    if y.builder.value(y.number) is not None:
        return [1.0 / y, None]
    # The quotient g / y is computed once for both.
    return [lambda g: g / y, lambda g: -(r * (g / y))]


def _largest(*arguments: Symbol) -> list[Partial]:
    """Of several: shared equally between all that the largest or smallest, the last argument here, equals."""
    *given, r = arguments
    ties = [choose(x == r, 1.0, 0.0) for x in given]
    count = reduce(Symbol.__add__, ties)

    def share(argument: Symbol) -> Callable[[Symbol], Symbol]:
        return lambda g: choose(argument == r, g, 0.0) / count

    return [share(x) for x in given]


def _larger(x: Symbol, y: Symbol, r: Symbol) -> list[Partial]:
    """Of a maximum or minimum r: all to the argument that it equals, shared by halves in a tie."""
    tie = x == y

    def share(argument: Symbol) -> Callable[[Symbol], Symbol]:
        return lambda g: choose(tie, 0.5 * g, choose(argument == r, g, 0.0))

    return [share(x), share(y)]


def _modulus(x: Symbol, y: Symbol, r: Symbol) -> list[Partial]:
    safe = choose(r == 0.0, 1.0, r)
    return [x / safe, y / safe]


def _arctan2(y: Symbol, x: Symbol, _: Symbol) -> list[Partial]:
    square = x * x + y * y
    return [x / square, -y / square]


# By 0: comparisons, what is made of conditions, sign, and what rounds.
PARTIALS: dict[str, Rule] = {
    "add": lambda x, y, r: [1.0, 1.0],
    "subtract": lambda x, y, r: [1.0, -1.0],
    "multiply": lambda x, y, r: [y, x],
    "divide": _divide,
    "negative": lambda x, r: [-1.0],
    "absolute": lambda x, r: [x.sign()],
    "sqrt": lambda x, r: [0.5 / abs(r)],  # the root of -0 is -0
    "cbrt": lambda x, r: [1.0 / (3.0 * r * r)],
    "power": _power,
    "maximum": _larger,
    "minimum": _larger,
    "fmax": _larger,
    "fmin": _larger,
    "largest": _largest,
    "smallest": _largest,
    "copysign": lambda x, y, r: [x.sign() * r.sign(), None],
    "where": lambda c, x, y, r: [None, lambda g: choose(c, g, 0.0), lambda g: choose(c, 0.0, g)],
    "exp": lambda x, r: [r],
    "expm1": lambda x, r: [r + 1.0],
    "log": lambda x, r: [1.0 / x],
    "log1p": lambda x, r: [1.0 / (x + 1.0)],
    "log2": lambda x, r: [1.0 / math.log(2.0) / x],
    "log10": lambda x, r: [1.0 / math.log(10.0) / x],
    "sin": lambda x, r: [x.cos()],
    "cos": lambda x, r: [-x.sin()],
    "tan": lambda x, r: [1.0 + r * r],
    "arcsin": lambda x, r: [1.0 / (1.0 - x * x).sqrt()],
    "arccos": lambda x, r: [-1.0 / (1.0 - x * x).sqrt()],
    "arctan": lambda x, r: [1.0 / (1.0 + x * x)],
    "arctan2": _arctan2,
    "sinh": lambda x, r: [x.cosh()],
    "cosh": lambda x, r: [x.sinh()],
    "tanh": lambda x, r: [1.0 - r * r],
    "arcsinh": lambda x, r: [1.0 / (x * x + 1.0).sqrt()],
    "arccosh": lambda x, r: [1.0 / (x * x - 1.0).sqrt()],
    "arctanh": lambda x, r: [1.0 / (1.0 - x * x)],
    "erf": lambda x, r: [2.0 / math.sqrt(math.pi) * (-(x * x)).exp()],
    "erfc": lambda x, r: [-2.0 / math.sqrt(math.pi) * (-(x * x)).exp()],
    "expit": lambda x, r: [r * (1.0 - r)],
    "logit": lambda x, r: [1.0 / (x * (1.0 - x))],
    "hypot": lambda x, y, r: [x / r, y / r],
    "modulus": _modulus,
    "fmod": lambda x, y, r: [1.0, -(x / y).trunc()],
    "remainder": lambda x, y, r: [1.0, -(x / y).floor()],
}
