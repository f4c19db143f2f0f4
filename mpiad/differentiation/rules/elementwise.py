"""Functions of one array, element by element: autograd's formulas with less work around them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.differentiation.rules.protocol import (
    BOX_TYPES,
    Argnums,
    Primitive,
    Vjp,
    anp,
    inherited_jvp,
    inherited_vjp,
    one_negated,
    unary_vjp,
)


def negative_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Negate the tangent."""
    if kwargs or len(args) != 1:
        return inherited_jvp(anp.negative, argnums, gs, ans, args, kwargs)
    return -gs[0]


def _sin(x: Array, ans: Array) -> Vjp:
    cos = _space(x).cos
    return lambda g: (g * cos(x),)


def _cos(x: Array, ans: Array) -> Vjp:
    sin = _space(x).sin
    return lambda g: (-(g * sin(x)),)


def _tanh(x: Array, ans: Array) -> Vjp:
    """Divide the cotangent by the squared hyperbolic cosine; 1 - tanh(x)**2 would cancel for large x."""
    cosh = _space(x).cosh

    def vjp(g: Array) -> tuple[Array]:
        c = cosh(x)
        if _same(g, c):  # then in the memory of c
            return (np.divide(g, np.multiply(c, c, c), c),)
        return (g / (c * c),)

    return vjp


def _absolute_vjp(fun: Primitive, argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Multiply the cotangent by the sign of a real argument."""
    x = args[0]
    if kwargs or len(args) != 1 or anp.iscomplexobj(x):
        return inherited_vjp(fun, argnums, ans, args, kwargs)
    sign = _space(x).sign

    def vjp(g: Array) -> tuple[Array]:
        # At zero the sign is zero, as autograd has it.
        s = sign(x)
        return (np.multiply(g, s, s) if _same(g, s) else g * s,)

    return vjp


def _same(g: Array, fresh: Array) -> bool:
    """Return whether a result can overwrite an intermediate value."""
    return type(g) is type(fresh) is np.ndarray and g.shape == fresh.shape and g.dtype == fresh.dtype


def _space(x: Array) -> Any:
    return anp if type(x) in BOX_TYPES else np


VJPS = {
    anp.negative: partial(unary_vjp, anp.negative, lambda x, ans: one_negated),
    anp.exp: partial(unary_vjp, anp.exp, lambda x, ans: lambda g: (g * ans,)),
    anp.log: partial(unary_vjp, anp.log, lambda x, ans: lambda g: (g / x,)),
    anp.sin: partial(unary_vjp, anp.sin, _sin),
    anp.cos: partial(unary_vjp, anp.cos, _cos),
    anp.tanh: partial(unary_vjp, anp.tanh, _tanh),
    anp.abs: partial(_absolute_vjp, anp.abs),
    anp.absolute: partial(_absolute_vjp, anp.absolute),
}
JVPS = {anp.negative: negative_jvp}
