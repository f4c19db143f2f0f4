"""The operations of programs, each as a NumPy function and as text in the kernel language.

The kernel language is a subset of Python (see `translation`). Its function `where` computes both alternatives, since
branches may prevent vectorization. The derivatives of the operations are in `derivatives`, under the same names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import numpy as np


class Operation(NamedTuple):
    """An operation.

    - `function`: the NumPy function with the same value.
    - `text`: in the kernel language, with {0}, {1}, {2} for the arguments, and {zero}, {one} for these constants; empty if
      the operation is expressed by others (see `source.lowered`).
    - `boolean`: whether the value is boolean.
    - `commutes`: whether the arguments may be exchanged.
    - `simple`: whether it is a cheap vector instruction, not a call of a library.
    """

    arity: int
    function: Callable[..., Any]
    text: str
    boolean: bool = False
    commutes: bool = False
    simple: bool = True


def _called(function: Callable[..., Any], name: str, arity: int = 1) -> Operation:
    return Operation(arity, function, f"{name}({', '.join(f'{{{i}}}' for i in range(arity))})", simple=False)


def _compared(sign: str, function: Callable[..., Any], commutes: bool = False) -> Operation:
    return Operation(2, function, f"{{0}} {sign} {{1}}", boolean=True, commutes=commutes)


def _chosen(condition: str, function: Callable[..., Any]) -> Operation:
    return Operation(2, function, f"where({condition}, {{0}}, {{1}})")


def _composed(function: Callable[..., Any], arity: int = 1) -> Operation:
    return Operation(arity, function, "", simple=False)


_ROUNDING = ("floor", "ceil", "trunc", "rint")
_ELEMENTARY = ("exp", "expm1", "log", "log1p", "log10", "sin", "cos", "tan", "sinh", "cosh", "tanh")
_INVERSE = ("sin", "cos", "tan", "sinh", "cosh", "tanh")  # arcsin in NumPy, and asin in `math`

OPERATIONS: dict[str, Operation] = {
    "add": Operation(2, np.add, "{0} + {1}", commutes=True),
    "subtract": Operation(2, np.subtract, "{0} - {1}"),
    "multiply": Operation(2, np.multiply, "{0} * {1}", commutes=True),
    "divide": Operation(2, np.divide, "{0} / {1}"),
    "negative": Operation(1, np.negative, "-{0}"),
    "absolute": Operation(1, np.absolute, "abs({0})"),
    "sqrt": Operation(1, np.sqrt, "math.sqrt({0})"),
    # As in NumPy, and unlike Python and C, maximum and minimum are NaN if either argument is.
    "maximum": _chosen("({0} > {1}) | ({0} != {0})", np.maximum),
    "minimum": _chosen("({0} < {1}) | ({0} != {0})", np.minimum),
    "fmax": _chosen("({0} > {1}) | ({1} != {1})", np.fmax),
    "fmin": _chosen("({0} < {1}) | ({1} != {1})", np.fmin),
    "sign": Operation(1, np.sign, "where({0} > {zero}, {one}, where({0} < {zero}, -{one}, {0}))"),
    **{name: Operation(1, getattr(np, name), f"np.{name}({{0}})") for name in _ROUNDING},
    "copysign": Operation(2, np.copysign, "math.copysign({0}, {1})"),
    "less": _compared("<", np.less),
    "less_equal": _compared("<=", np.less_equal),
    "greater": _compared(">", np.greater),
    "greater_equal": _compared(">=", np.greater_equal),
    "equal": _compared("==", np.equal, commutes=True),
    "not_equal": _compared("!=", np.not_equal, commutes=True),
    "logical_and": Operation(2, np.logical_and, "{0} & {1}", boolean=True, commutes=True),
    "logical_or": Operation(2, np.logical_or, "{0} | {1}", boolean=True, commutes=True),
    "logical_not": Operation(1, np.logical_not, "not {0}", boolean=True),
    "where": Operation(3, np.where, "where({0}, {1}, {2})"),
    # Powers with a small constant exponent become multiplications and roots; the others are calls, which prevent the
    # vectorization of a loop over lanes.
    "power": _called(np.power, "math.pow", 2),
    **{name: _called(getattr(np, name), f"math.{name}") for name in _ELEMENTARY},
    **{f"arc{name}": _called(getattr(np, f"arc{name}"), f"math.a{name}") for name in _INVERSE},
    "log2": _called(np.log2, "np.log2"),
    "cbrt": _called(np.cbrt, "np.cbrt"),
    "arctan2": _called(np.arctan2, "math.atan2", 2),
    "erf": _called(np.vectorize(math.erf, otypes=[float]), "math.erf"),
    "erfc": _called(np.vectorize(math.erfc, otypes=[float]), "math.erfc"),
    "hypot": _called(np.hypot, "math.hypot", 2),
    "fmod": _called(np.fmod, "np.fmod", 2),
    "remainder": _composed(np.remainder, 2),
    # The modulus of a complex number: like hypot, except for its derivative at 0.
    "modulus": _composed(lambda x, y: np.hypot(x, y), 2),
    "expit": _composed(lambda x: 1.0 / (1.0 + np.exp(-x))),
    "logit": _composed(lambda x: np.log(x / (1.0 - x))),
    # These take three arguments or more.
    "largest": _composed(lambda *x: reduce(np.maximum, x), 3),
    "smallest": _composed(lambda *x: reduce(np.minimum, x), 3),
}
