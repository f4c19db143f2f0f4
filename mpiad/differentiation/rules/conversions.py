"""Functions that convert their argument to an array, such as `asarray`.

NumPy returns an argument that is an array of the dtype and order itself, so for a traced array the result is this traced
array: a change in place acts on both names. Otherwise the result is a copy, by functions with rules.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from autograd.tracer import getval
from numpy.typing import DTypeLike

from mpiad._typing import Array
from mpiad.differentiation.rules.protocol import anp, composition


def _converted(a: Array, dtype: DTypeLike | None, flags: str | None = None) -> Array:
    """Return an array with NumPy's `flags`: "C" or "F" (contiguous in this order), "O" (owns its memory)."""
    value = getval(a)
    # A traced array of `jit` has a `value`.
    x = a if isinstance(getattr(value, "value", value), np.ndarray) else anp.array(a)
    if dtype is not None and np.dtype(dtype) != x.dtype:
        x = x.astype(dtype)
    value, names = getval(x), {"C": "c_contiguous", "F": "f_contiguous", "O": "owndata"}
    needed = [flag for flag in (flags or "").upper() if flag in names]
    if needed and not isinstance(value, np.ndarray):
        return x[...]  # in `jit`: whether it is a copy depends on the memory in a run, so that changes in place are refused
    if all(getattr(value.flags, names[flag]) for flag in needed):
        return x
    return anp.copy(x, next((flag for flag in needed if flag != "O"), "K"))


def _asarray(
    a: Array,
    dtype: DTypeLike | None = None,
    order: str | None = None,
    *,
    copy: bool | None = None,
    device: object = None,
    like: object = None,
) -> Array:
    x = _converted(a, dtype, order)
    if copy is False and x is not a:
        raise ValueError("Unable to avoid copy while creating an array as requested.")
    return anp.copy(x) if copy and x is a else x


def _with_an_axis(x: Array) -> Array:
    return x if anp.ndim(x) else anp.reshape(x, (1,))


@composition(anp.ascontiguousarray)
def ascontiguousarray(a: Array, dtype: DTypeLike | None = None, *, like: object = None) -> Array:
    """Return `numpy.ascontiguousarray`, which has one axis at least."""
    return _with_an_axis(_converted(a, dtype, "C"))


@composition(anp.asfortranarray)
def asfortranarray(a: Array, dtype: DTypeLike | None = None, *, like: object = None) -> Array:
    """Return `numpy.asfortranarray`, which has one axis at least."""
    return _with_an_axis(_converted(a, dtype, "F"))


@composition(anp.require)
def require(
    a: Array, dtype: DTypeLike | None = None, requirements: Iterable[str] | None = None, *, like: object = None
) -> Array:
    """Return `numpy.require`."""
    flags = list(requirements or ())
    np.require(np.empty(0), None, flags)  # type: ignore[call-overload]  # raises NumPy's errors
    return _converted(a, dtype, "".join(flag[0] for flag in flags))


composition(anp.asarray)(_asarray)
composition(anp.asanyarray)(_asarray)
