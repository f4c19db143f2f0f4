"""Functions of one array, element by element: autograd's formulas with less work around them."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.differentiation.rules.protocol import (
    BOX_TYPES,
    Argnums,
    Primitive,
    Vjp,
    VjpMaker,
    anp,
    inherited_jvp,
    inherited_vjp,
    one_negated,
)


def negative_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Negate the cotangent."""
    if kwargs or len(args) != 1:
        return inherited_vjp(anp.negative, argnums, ans, args, kwargs)
    return one_negated


def negative_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Negate the tangent."""
    if kwargs or len(args) != 1:
        return inherited_jvp(anp.negative, argnums, gs, ans, args, kwargs)
    return -gs[0]


def exp_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Multiply the cotangent by the exponential."""
    if kwargs or len(args) != 1:
        return inherited_vjp(anp.exp, argnums, ans, args, kwargs)
    return lambda g: (g * ans,)


def log_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Divide the cotangent by the argument."""
    if kwargs or len(args) != 1:
        return inherited_vjp(anp.log, argnums, ans, args, kwargs)
    x = args[0]
    return lambda g: (g / x,)


def sin_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Multiply the cotangent by the cosine."""
    if kwargs or len(args) != 1:
        return inherited_vjp(anp.sin, argnums, ans, args, kwargs)
    x = args[0]
    cos = _space(x).cos
    return lambda g: (g * cos(x),)


def cos_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Multiply the cotangent by the negated sine."""
    if kwargs or len(args) != 1:
        return inherited_vjp(anp.cos, argnums, ans, args, kwargs)
    x = args[0]
    sin = _space(x).sin
    return lambda g: (-(g * sin(x)),)


def tanh_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Divide the cotangent by the squared hyperbolic cosine; 1 - tanh(x)**2 would cancel for large x."""
    if kwargs or len(args) != 1:
        return inherited_vjp(anp.tanh, argnums, ans, args, kwargs)
    x = args[0]
    cosh = _space(x).cosh

    def vjp(g: Array) -> tuple[Array]:
        c = cosh(x)
        if _same(g, c):  # then in the memory of c
            return (np.divide(g, np.multiply(c, c, c), c),)
        return (g / (c * c),)

    return vjp


def _absolute_vjp(fun: Primitive) -> VjpMaker:
    def absolute_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
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

    return absolute_vjp


def _same(g: Array, fresh: Array) -> bool:
    """Return whether a result can overwrite an intermediate value."""
    return type(g) is type(fresh) is np.ndarray and g.shape == fresh.shape and g.dtype == fresh.dtype


def _space(x: Array) -> Any:
    return anp if type(x) in BOX_TYPES else np


VJPS = {
    anp.negative: negative_vjp,
    anp.exp: exp_vjp,
    anp.log: log_vjp,
    anp.sin: sin_vjp,
    anp.cos: cos_vjp,
    anp.tanh: tanh_vjp,
    anp.abs: _absolute_vjp(anp.abs),
    anp.absolute: _absolute_vjp(anp.absolute),
}
JVPS = {anp.negative: negative_jvp}
