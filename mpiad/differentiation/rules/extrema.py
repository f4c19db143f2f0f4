"""Largest and smallest elements, over axes and of two arrays; ties share equally, as in autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.differentiation.rules.broadcasting import fitting
from mpiad.differentiation.rules.expansion import kept_shape, spread
from mpiad.differentiation.rules.protocol import (
    BOX_TYPES,
    Argnums,
    JvpMaker,
    Primitive,
    Vjp,
    VjpMaker,
    anp,
    inherited_jvp,
    inherited_vjp,
)
from mpiad.differentiation.rules.scatter import Scatter

__all__ = ["JVPS", "VJPS"]

_KNOWN = frozenset({"axis", "keepdims"})
_SMALL = 2048  # below this size a mask is cheaper than a list of places
_FEW = 16  # one hit in so many elements: more are multiplied by a mask too


def _extremum_vjp(fun: Primitive) -> VjpMaker:
    def extremum_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
        """Give the cotangent of an extremum to the elements that equal it, in equal shares."""
        x = getval(args[0])
        if len(args) > 2 or kwargs.keys() - _KNOWN or type(x) is not np.ndarray:
            return inherited_vjp(fun, argnums, ans, args, kwargs)
        kept = kept_shape(x.shape, args[1] if len(args) == 2 else kwargs.get("axis"))
        extremum = np.reshape(getval(ans), kept)

        def vjp(g: Array) -> tuple[Any]:
            if type(g) in BOX_TYPES:
                return (spread(g, x.shape, kept, x.dtype) * _weights(x, extremum),)
            return (_scattered(g, x, extremum),)

        return vjp

    return extremum_vjp


def _weights(x: Array, extremum: Array) -> Array:
    """Return each element's share of its group's cotangent."""
    equal = x == extremum
    if extremum.size == 1:
        return equal / x.real.dtype.type(np.count_nonzero(equal))
    axes = tuple(i for i, (n, k) in enumerate(zip(x.shape, extremum.shape)) if n != k)
    return equal / np.sum(equal, axis=axes, keepdims=True, dtype=x.real.dtype)


def _scattered(g: Array, x: Array, extremum: Array) -> Array | Scatter:
    if x.size < _SMALL:
        return np.reshape(g, extremum.shape) * _weights(x, extremum)
    hits = np.flatnonzero(x == extremum)
    idx = np.unravel_index(hits, x.shape)
    kept = extremum.shape
    groups = np.ravel_multi_index([i if k > 1 else i * 0 for i, k in zip(idx, kept)], kept)
    counts = np.bincount(groups, minlength=extremum.size)
    if hits.size * _FEW > x.size or not counts.all():
        # A group with a NaN has no element that equals its extremum: its gradient is NaN, as in autograd.
        return np.reshape(g, kept) * _weights(x, extremum)
    return Scatter(x.shape, x.dtype, idx, (np.ravel(g) / counts)[groups], False)


def _extremum_jvp(fun: Primitive) -> JvpMaker:
    def extremum_jvp(argnums: Argnums, gs: Any, ans: Array, args: tuple, kwargs: dict) -> Array:
        """Average the tangents of the elements that equal the extremum."""
        x = getval(args[0])
        if len(args) > 2 or kwargs.keys() - _KNOWN or type(x) is not np.ndarray:
            return inherited_jvp(fun, argnums, gs, ans, args, kwargs)
        axis = args[1] if len(args) == 2 else kwargs.get("axis")
        weights = _weights(x, np.reshape(getval(ans), kept_shape(x.shape, axis)))
        return anp.sum(gs[0] * weights, axis=axis, keepdims=kwargs.get("keepdims", False))

    return extremum_jvp


def _choice_vjp(fun: Primitive) -> VjpMaker:
    def choice_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
        """Give the cotangent to the operand that was chosen, half to each where they are equal."""
        if kwargs or len(args) != 2:
            return inherited_vjp(fun, argnums, ans, args, kwargs)
        parts = [(fitting(args[i], ans), _share(i, args, ans)) for i in argnums]
        return lambda g: tuple(g * share if fit is None else fit(g * share) for fit, share in parts)

    return choice_vjp


def _share(argnum: int, args: tuple, ans: Array) -> Array:
    x, y, chosen = getval(args[argnum]), getval(args[1 - argnum]), getval(ans)
    share, tied = np.equal(x, chosen), np.equal(x, y)
    return share / (1.0 + tied) if np.count_nonzero(tied) else share


_EXTREMA = (anp.max, anp.min, anp.amax, anp.amin)
_CHOICES = (anp.maximum, anp.minimum, anp.fmax, anp.fmin)
VJPS = {
    **{fun: _extremum_vjp(fun) for fun in _EXTREMA},
    **{fun: _choice_vjp(fun) for fun in _CHOICES},
}
JVPS = {fun: _extremum_jvp(fun) for fun in _EXTREMA}
