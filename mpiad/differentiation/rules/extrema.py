"""Maxima and minima, over axes and of two arrays, and bounds; ties share the cotangent equally, as in autograd."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.differentiation.rules.broadcasting import fitted, widened
from mpiad.differentiation.rules.expansion import is_known, kept_shape, spread
from mpiad.differentiation.rules.protocol import (
    BOX_TYPES,
    Argnums,
    Primitive,
    Vjp,
    anp,
    bound,
    inherited_jvp,
    inherited_vjp,
    refusal,
)
from mpiad.differentiation.rules.scatter_add import Scatter
from mpiad.transport.device_arrays import is_device_array

_KNOWN = frozenset({"axis", "keepdims", "where", "initial"})


class _Extremum(NamedTuple):
    """An array, its extrema with the reduced axes kept, and which of its elements took part."""

    x: Array
    value: Array
    where: Any
    outside: bool  # the extremum may be `initial` instead of an element

    @classmethod
    def of(cls, ans: Array, args: tuple, kwargs: dict) -> _Extremum | None:
        """Return the description of a call, or None if its arguments or the type of the array aren't supported."""
        x = getval(args[0])
        if not (type(x) is np.ndarray or is_device_array(x)) or not is_known(args, kwargs, _KNOWN):
            return None
        axis = args[1] if len(args) == 2 else kwargs.get("axis")
        value = np.reshape(getval(ans), kept_shape(x.shape, axis))
        return cls(x, value, kwargs.get("where", True), "initial" in kwargs)

    def hits(self) -> Array:
        """Return a mask of the elements that equal their extremum."""
        equal = self.x == self.value
        return equal if self.where is True else equal & self.where

    def weights(self) -> Array:
        """Return each element's share of its group's cotangent."""
        hits = self.hits()
        dtype = self.x.real.dtype
        if self.value.size == 1 and type(hits) is np.ndarray:
            counts = dtype.type(np.count_nonzero(hits))
        else:
            axes = tuple(i for i, (n, k) in enumerate(zip(self.x.shape, self.value.shape)) if n != k)
            counts = np.sum(hits, axis=axes, keepdims=True, dtype=dtype)
        # Without `initial`, a group without a hit has a NaN: its gradient is NaN, as in autograd.
        return hits / (np.maximum(counts, 1) if self.outside else counts)


def _extremum_vjp(fun: Primitive, argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Pass the cotangent of an extremum to the elements that equal it, in equal shares."""
    extremum = _Extremum.of(ans, args, kwargs)
    if extremum is None:
        return inherited_vjp(fun, argnums, ans, args, kwargs)
    x, kept = extremum.x, extremum.value.shape

    def vjp(g: Array) -> tuple[Array | Scatter]:
        if type(g) in BOX_TYPES:
            return (spread(g, x.shape, kept, x.dtype) * extremum.weights(),)
        return (np.reshape(g, kept) * extremum.weights(),)

    return vjp


def _extremum_jvp(fun: Primitive, argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Average the tangents of the elements that equal the extremum."""
    extremum = _Extremum.of(ans, args, kwargs)
    if extremum is None:
        return inherited_jvp(fun, argnums, gs, ans, args, kwargs)
    axis = args[1] if len(args) == 2 else kwargs.get("axis")
    return anp.sum(gs[0] * extremum.weights(), axis=axis, keepdims=kwargs.get("keepdims", False))


def clip_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Pass the cotangent at elements within the bounds, as autograd does; derivatives of the bounds aren't supported."""
    inside = _inside(argnums, ans, args, kwargs)
    return lambda g: (fitted(g if inside is None else g * inside, args[0]),)


def clip_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Pass the tangent at elements within the bounds."""
    inside = _inside(argnums, ans, args, kwargs)
    return widened(gs[0] if inside is None else gs[0] * inside, ans)


def _inside(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Array:
    given = bound(anp.clip, "a a_min a_max out min max", args, kwargs)
    if argnums != (0,):
        raise refusal(anp.clip, "with respect to a bound: use maximum and minimum")
    inside = None
    for limit in [given.get(name) for name in ("a_min", "a_max", "min", "max")]:
        if limit is not None:
            apart = anp.not_equal(ans, limit)
            inside = apart if inside is None else anp.logical_and(inside, apart)
    return inside


_EXTREMA = (anp.max, anp.min, anp.amax, anp.amin)
VJPS = {
    **{fun: partial(_extremum_vjp, fun) for fun in _EXTREMA},
    anp.clip: clip_vjp,
}
JVPS = {**{fun: partial(_extremum_jvp, fun) for fun in _EXTREMA}, anp.clip: clip_jvp}
