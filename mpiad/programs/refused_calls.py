"""Calls of NumPy's functions that no step of a program stands for, known before they are made."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpiad.programs.steps import Traced

_SHAPED_BY_VALUES = frozenset({
    np.argwhere, np.bincount, np.compress, np.delete, np.extract, np.flatnonzero, np.intersect1d, np.nonzero, np.setdiff1d,
    np.trim_zeros, np.union1d, np.unique,
})  # fmt: skip
_WRITING = frozenset("at copyto fill_diagonal place put put_along_axis putmask".split())


def reason_against(fun: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Return why a call can't be noted; nothing where it can."""
    further = *args[1:], *kwargs.values()
    repeats = fun is np.repeat and any(isinstance(x, Traced) for x in further)
    if fun in _SHAPED_BY_VALUES or fun is np.where and len(args) == 1 or repeats:
        return "whose result has a shape that depends on traced values"
    if _writes(fun, args, kwargs):
        return "which writes into an array that it is given: take its result, or set entries by x[i] = ..."
    if fun in (np.ravel, np.reshape) and any(isinstance(x, str) and x in "AK" for x in further):
        return "in the order in which entries lie in memory, which programs choose: write order='C' or 'F'"
    return ""


def _writes(fun: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    if getattr(fun, "__name__", "") in _WRITING or kwargs.get("out") is not None or kwargs.get("copy") is False:
        return True
    place = _place_of_out(fun)
    return place is not None and len(args) > place and args[place] is not None


@functools.cache
def _place_of_out(fun: Callable) -> int | None:
    try:
        parameters = inspect.signature(fun).parameters
    except (TypeError, ValueError):  # written in C
        return None
    known = parameters.get("out")
    return list(parameters).index("out") if known is not None and known.kind is known.POSITIONAL_OR_KEYWORD else None
