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
    - `text`: the operation in the kernel language, with {0}, {1}, {2} for the arguments, and {zero}, {one} for the
      constants 0 and 1; empty if the operation is replaced by other operations (see `source.lowered`).
    - `boolean`: whether the value is boolean.
    - `commutes`: whether the arguments may be exchanged.
    - `simple`: whether the operation is a cheap vector instruction, not a call of a library.
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


OPERATIONS: dict[str, Operation] = {
    "add": Operation(2, np.add, "{0} + {1}", commutes=True),
    "subtract": Operation(2, np.subtract, "{0} - {1}"),
    "multiply": Operation(2, np.multiply, "{0} * {1}", commutes=True),
    "divide": Operation(2, np.divide, "{0} / {1}"),
    "negative": Operation(1, np.negative, "-{0}"),
    "absolute": Operation(1, np.absolute, "abs({0})"),
    "sqrt": Operation(1, np.sqrt, "math.sqrt({0})"),
    # As in NumPy, and unlike Python and C, maximum and minimum are NaN if either argument is NaN.
    "maximum": _chosen("({0} > {1}) | ({0} != {0})", np.maximum),
    "minimum": _chosen("({0} < {1}) | ({0} != {0})", np.minimum),
    "fmax": _chosen("({0} > {1}) | ({1} != {1})", np.fmax),
    "fmin": _chosen("({0} < {1}) | ({1} != {1})", np.fmin),
    "sign": Operation(1, np.sign, "where({0} > {zero}, {one}, where({0} < {zero}, -{one}, {0}))"),
    "floor": Operation(1, np.floor, "np.floor({0})"),
    "ceil": Operation(1, np.ceil, "np.ceil({0})"),
    "trunc": Operation(1, np.trunc, "np.trunc({0})"),
    "rint": Operation(1, np.rint, "np.rint({0})"),
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
    # Powers with a small constant exponent become multiplications and roots; other powers are calls, which prevent the
    # vectorization of a loop over lanes.
    "power": _called(np.power, "math.pow", 2),
    "exp": _called(np.exp, "math.exp"),
    "expm1": _called(np.expm1, "math.expm1"),
    "log": _called(np.log, "math.log"),
    "log1p": _called(np.log1p, "math.log1p"),
    "log2": _called(np.log2, "np.log2"),
    "log10": _called(np.log10, "math.log10"),
    "cbrt": _called(np.cbrt, "np.cbrt"),
    "sin": _called(np.sin, "math.sin"),
    "cos": _called(np.cos, "math.cos"),
    "tan": _called(np.tan, "math.tan"),
    "arcsin": _called(np.arcsin, "math.asin"),
    "arccos": _called(np.arccos, "math.acos"),
    "arctan": _called(np.arctan, "math.atan"),
    "arctan2": _called(np.arctan2, "math.atan2", 2),
    "sinh": _called(np.sinh, "math.sinh"),
    "cosh": _called(np.cosh, "math.cosh"),
    "tanh": _called(np.tanh, "math.tanh"),
    "arcsinh": _called(np.arcsinh, "math.asinh"),
    "arccosh": _called(np.arccosh, "math.acosh"),
    "arctanh": _called(np.arctanh, "math.atanh"),
    "erf": _called(np.vectorize(math.erf, otypes=[float]), "math.erf"),
    "erfc": _called(np.vectorize(math.erfc, otypes=[float]), "math.erfc"),
    "hypot": _called(np.hypot, "math.hypot", 2),
    "fmod": _called(np.fmod, "np.fmod", 2),
    "remainder": _composed(np.remainder, 2),
    # The modulus of a complex number: hypot with another derivative at 0.
    "modulus": _composed(lambda x, y: np.hypot(x, y), 2),
    "expit": _composed(lambda x: 1.0 / (1.0 + np.exp(-x))),
    "logit": _composed(lambda x: np.log(x / (1.0 - x))),
    # Maximum and minimum of three or more arguments.
    "largest": _composed(lambda *x: reduce(np.maximum, x), 3),
    "smallest": _composed(lambda *x: reduce(np.minimum, x), 3),
}
