"""The transpose of what the user gave as a function: found by a trace of it, once for each solve.

An operator is linear in u, so one trace of it serves all products with its transpose. A preconditioner has its transpose
as an attribute `T` or a method `transpose()`, or it is given apart, or derived like the operator's; where there is none of
that it is taken for symmetric, which costs iterations where it isn't, and nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from mpiad._typing import Function, LocalArray
from mpiad.differentiation import make_vjp
from mpiad.primitives.cotangents import spec_like

__all__ = ["DERIVED", "taking", "transposed_function", "transposed_preconditioner"]

DERIVED = "derived"


def transposed_function(fun: Function, like: LocalArray) -> Callable[[Any], Any]:
    """Return the transpose of a linear function of arrays of one shape and dtype, which is traced here."""
    # At zero: the function is linear, so its derivative is the same everywhere.
    return make_vjp(fun)(spec_like(like).zeros())[0]


def transposed_preconditioner(preconditioner: Function, given: Any, rest: tuple, like: LocalArray) -> Function:
    """Return the transpose of a preconditioner, as a function of the residual alone, which has the form of `like`.

    `given` is the user's `preconditioner_transpose`: a function, "derived" or None; `rest` are the params.
    """
    if given is None:
        given = getattr(preconditioner, "T", None)
    if given is None and callable(getattr(preconditioner, "transpose", None)):
        given = preconditioner.transpose()
    if isinstance(given, str):
        return transposed_function(taking(preconditioner, rest), like)
    return taking(preconditioner if given is None else given, rest)


def taking(fun: Function, params: tuple) -> Function:
    """Return a function of one array, of one that takes the params too, where it requires so many arguments."""
    rest = params if _takes(fun, len(params)) else ()
    return lambda r: fun(r, *rest)


def _takes(fun: Function, extra: int) -> bool:
    try:
        kinds = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return False  # some built-in functions don't say
    if any(p.kind is p.VAR_POSITIONAL for p in kinds):
        return True
    required = [p for p in kinds if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty]
    # Required ones alone: an argument with a default isn't meant for the params.
    return len(required) == 1 + extra
