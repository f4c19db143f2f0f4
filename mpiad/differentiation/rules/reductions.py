"""Sums and means over all or some axes, of all elements or of those that aren't NaN."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array, Axis
from mpiad.differentiation.rules.expansion import axis_of, expanded, filled, has_supported_arguments, kept_shape
from mpiad.differentiation.rules.protocol import Argnums, Primitive, Vjp, anp, bound, inherited_vjp, primitive_mean

_SUPPORTED = frozenset({"axis", "keepdims", "dtype", "where"})
_SUPPORTED_BY_SUM = _SUPPORTED | {"initial"}


def sum_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Pass the cotangent of a sum to every term."""
    x = args[0]
    if type(x) is np.ndarray and len(args) == 1 and not kwargs:
        shape, dtype = x.shape, x.dtype
        return lambda g: (filled(g, shape, dtype),)
    if not has_supported_arguments(args, kwargs, _SUPPORTED_BY_SUM):
        return inherited_vjp(anp.sum, argnums, ans, args, kwargs)
    return _repeated(getval(x), axis_of(args, kwargs), kwargs.get("where", True))


def sum_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Sum the tangents, without the initial value of the sum."""
    kwargs = {name: value for name, value in kwargs.items() if name != "initial"}
    return anp.sum(gs[0], *args[1:], **kwargs)


def mean_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Pass the cotangent of a mean, divided by the number of terms, to every term."""
    if not has_supported_arguments(args, kwargs, _SUPPORTED):
        return inherited_vjp(primitive_mean, argnums, ans, args, kwargs)
    x, axis, where = getval(args[0]), axis_of(args, kwargs), kwargs.get("where", True)
    repeated = _repeated(x, axis, where)
    if where is True:
        terms = np.size(x) / max(np.size(getval(ans)), 1)
    else:
        terms = np.sum(np.broadcast_to(where, np.shape(x)), axis=axis, keepdims=kwargs.get("keepdims", False))
    return lambda g: repeated(g / terms)


def _repeated(x: Array, axis: Axis, where: object) -> Vjp:
    shape, dtype = (x.shape, x.dtype) if hasattr(x, "dtype") else (np.shape(x), np.result_type(x))
    kept = kept_shape(shape, axis)
    if where is True:
        return lambda g: (expanded(g, shape, kept, dtype),)
    # Terms excluded by `where` have cotangent zero.
    return lambda g: (anp.where(where, expanded(g, shape, kept, dtype), 0.0),)


def mean_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Take the mean of the tangents."""
    return primitive_mean(gs[0], *args[1:], **kwargs)


def _without_nans(fun: Primitive, rule: Callable, *call: Any) -> Any:
    """Apply a rule for the sum or mean of the elements that aren't NaN."""
    *head, args, kwargs = call
    named = bound(fun, "a axis dtype out keepdims initial where", args, kwargs)
    x = named.pop("a")
    return rule(*head, (x,), {**named, "where": ~np.isnan(getval(x)) & named.get("where", True)})


VJPS = {
    anp.sum: sum_vjp,
    primitive_mean: mean_vjp,
    anp.nansum: partial(_without_nans, anp.nansum, sum_vjp),
    anp.nanmean: partial(_without_nans, anp.nanmean, mean_vjp),
}
JVPS = {
    anp.sum: sum_jvp,
    anp.nansum: partial(_without_nans, anp.nansum, sum_jvp),
    anp.nanmean: partial(_without_nans, anp.nanmean, mean_jvp),
}
