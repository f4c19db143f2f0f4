"""Maxima and minima over axes and of two arrays, clipping; tied elements share the cotangent equally, as in autograd."""

from __future__ import annotations

from functools import partial

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.differentiation.rules.broadcasting import broadcast_tangent, fitted
from mpiad.differentiation.rules.expansion import axis_of, has_supported_arguments, kept_shape
from mpiad.differentiation.rules.protocol import (
    Argnums,
    Primitive,
    Vjp,
    anp,
    bound,
    inherited_jvp,
    inherited_vjp,
    refusal,
)
from mpiad.transport.devices.device_arrays import is_device_array

_SUPPORTED = frozenset({"axis", "keepdims", "where", "initial"})


def _is_supported(args: tuple, kwargs: dict) -> bool:
    x = getval(args[0])
    return (type(x) is np.ndarray or is_device_array(x)) and has_supported_arguments(args, kwargs, _SUPPORTED)


def _weights(ans: Array, args: tuple, kwargs: dict) -> Array:
    """Return the derivative of an extremum with respect to each element: 1/n for n tied elements, 0 for other elements."""
    x, where = getval(args[0]), kwargs.get("where", True)
    extrema = np.reshape(getval(ans), kept_shape(x.shape, axis_of(args, kwargs)))
    hits = x == extrema
    if where is not True:
        hits = hits & where
    dtype = x.real.dtype
    if extrema.size == 1 and type(hits) is np.ndarray:
        counts = dtype.type(np.count_nonzero(hits))
    else:
        axes = tuple(i for i, (n, k) in enumerate(zip(x.shape, extrema.shape)) if n != k)
        counts = np.sum(hits, axis=axes, keepdims=True, dtype=dtype)
    # If no element equals the extremum, it is `initial` or NaN. Without `initial` the gradient is NaN, as in autograd.
    return hits / (np.maximum(counts, 1) if "initial" in kwargs else counts)


def _extremum_vjp(fun: Primitive, argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Pass the cotangent of an extremum to the elements that equal it, in equal shares."""
    if not _is_supported(args, kwargs):
        return inherited_vjp(fun, argnums, ans, args, kwargs)
    kept = kept_shape(anp.shape(args[0]), axis_of(args, kwargs))
    return lambda g: (anp.reshape(g, kept) * _weights(ans, args, kwargs),)


def _extremum_jvp(fun: Primitive, argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Average the tangents of the elements that equal the extremum."""
    if not _is_supported(args, kwargs):
        return inherited_jvp(fun, argnums, gs, ans, args, kwargs)
    terms = gs[0] * _weights(ans, args, kwargs)
    return anp.sum(terms, axis=axis_of(args, kwargs), keepdims=kwargs.get("keepdims", False))


def clip_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Pass on the cotangents of elements strictly within the bounds; derivatives for the bounds aren't supported."""
    inside = _inside(argnums, ans, args, kwargs)
    return lambda g: (fitted(g if inside is None else g * inside, args[0]),)


def clip_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Pass on the tangents of elements strictly within the bounds."""
    inside = _inside(argnums, ans, args, kwargs)
    return broadcast_tangent(gs[0] if inside is None else gs[0] * inside, ans)


def _inside(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Array:
    named = bound(anp.clip, "a a_min a_max out min max", args, kwargs)
    if argnums != (0,):
        raise refusal(anp.clip, "with respect to a bound: use maximum and minimum")
    inside = None
    for limit in [named.get(name) for name in ("a_min", "a_max", "min", "max")]:
        if limit is not None:
            differs = anp.not_equal(ans, limit)
            inside = differs if inside is None else anp.logical_and(inside, differs)
    return inside


def _larger_vjp(fun: Primitive, argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Pass the cotangent to the chosen operand, or half of it to each of two equal ones, in the cotangent's precision."""
    if kwargs or len(args) != 2:
        return inherited_vjp(fun, argnums, ans, args, kwargs)
    return lambda g: tuple([fitted(_of_chosen(fun, g, args[i], args[1 - i]), args[i]) for i in argnums])


def _larger_jvp(fun: Primitive, argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Return the tangent of the chosen operand, or the mean of those of two equal ones."""
    if kwargs or len(args) != 2:
        return inherited_jvp(fun, argnums, gs, ans, args, kwargs)
    return sum(_of_chosen(fun, g, args[i], args[1 - i]) for g, i in zip(gs, argnums))


def _of_chosen(fun: Primitive, g: Array, x: Array, other: Array) -> Array:
    # The operands are compared, not one of them with the result: in compiled programs each may be rounded in another way.
    chosen = x > other if fun in (anp.maximum, anp.fmax) else x < other
    if fun in (anp.fmax, anp.fmin):
        chosen = chosen | ((other != other) & (x == x))  # NaN is never chosen
    return anp.where(chosen, g, anp.where(x == other, 0.5 * g, 0.0))


_EXTREMA = (anp.max, anp.min, anp.amax, anp.amin)
VJPS = {**{fun: partial(_extremum_vjp, fun) for fun in _EXTREMA}, anp.clip: clip_vjp}
JVPS = {**{fun: partial(_extremum_jvp, fun) for fun in _EXTREMA}, anp.clip: clip_jvp}
_OF_TWO = (anp.maximum, anp.minimum, anp.fmax, anp.fmin)
VJPS.update({fun: partial(_larger_vjp, fun) for fun in _OF_TWO})
JVPS.update({fun: partial(_larger_jvp, fun) for fun in _OF_TWO})
