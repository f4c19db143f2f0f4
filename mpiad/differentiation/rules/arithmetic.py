"""Sums, differences, products, quotients and arctan2, with broadcasting."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array, Function
from mpiad.differentiation.rules.broadcasting import broadcast_tangent, fitting
from mpiad.differentiation.rules.protocol import (
    Argnums,
    JvpMaker,
    Primitive,
    Vjp,
    anp,
    bound,
    in_dtype_of,
    inherited_jvp,
    inherited_vjp,
    one_negated,
    one_unchanged,
    two_unchanged,
)


def _sum_vjp(fun: Primitive, negated: bool, argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Pass the cotangent to both terms of a sum, or with `negated` to the terms of a difference, negated for the second."""
    # For calls with `where` or `out`, this rule and those below use autograd's rule.
    if kwargs or len(args) != 2:
        return inherited_vjp(fun, argnums, ans, args, kwargs)
    if len(argnums) == 2:
        fit_x, fit_y = fitting(args[0], ans), fitting(args[1], ans)
        if fit_x is None and fit_y is None:
            return (lambda g: (g, -g)) if negated else two_unchanged
        if negated:
            return lambda g: (_fitted(fit_x, g), -_fitted(fit_y, g))
        return lambda g: (_fitted(fit_x, g), _fitted(fit_y, g))
    fit = fitting(args[argnums[0]], ans)
    if negated and argnums[0] == 1:
        return one_negated if fit is None else lambda g: (-fit(g),)
    return one_unchanged if fit is None else lambda g: (fit(g),)


def multiply_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Multiply the cotangent of a product by the other factor."""
    if kwargs or len(args) != 2:
        return inherited_vjp(anp.multiply, argnums, ans, args, kwargs)
    x, y = args
    if len(argnums) == 2:
        fit_x, fit_y = fitting(x, ans), fitting(y, ans)
        if fit_x is None and fit_y is None:
            return (lambda g: two_unchanged(g * x)) if x is y else lambda g: (g * y, g * x)
        return lambda g: (_fitted(fit_x, g * y), _fitted(fit_y, g * x))
    factor, other = (x, y) if argnums[0] == 0 else (y, x)
    fit = fitting(factor, ans)
    if fit is None:
        return lambda g: (g * other,)
    return lambda g: (fit(g * other),)


def divide_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Return g / y for the numerator, and -(g / y)(x / y) for the denominator y."""
    if kwargs or len(args) != 2:
        return inherited_vjp(anp.divide, argnums, ans, args, kwargs)
    x, y = args
    if argnums == (0,):
        fit = fitting(x, ans)
        return (lambda g: (g / y,)) if fit is None else lambda g: (fit(g / y),)
    fit_y = fitting(y, ans)
    if len(argnums) == 1:
        return lambda g: (_fitted(fit_y, _times_minus(g / y, ans)),)
    fit_x = fitting(x, ans)

    def vjp(g: Array) -> tuple[Array, Array]:
        ratio = g / y
        return _fitted(fit_x, ratio), _fitted(fit_y, -(ratio * ans))

    return vjp


def _slope_vjp(fun: Primitive, argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Multiply the cotangent of a function of two arrays by its derivatives; see `_SLOPES`."""
    if kwargs or len(args) != 2:
        bound(fun, "x1 x2", args, kwargs)
    parts = [(fitting(args[i], ans), _SLOPES[fun](i, *args, ans)) for i in argnums]
    return lambda g: tuple([None if slope is None else _fitted(fit, g * slope) for fit, slope in parts])


def _slope_jvp(fun: Primitive, argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Add the products of tangents and derivatives."""
    if kwargs or len(args) != 2:
        bound(fun, "x1 x2", args, kwargs)
    slopes = [(g, _SLOPES[fun](i, *args, ans)) for g, i in zip(gs, argnums)]
    terms = [g * slope for g, slope in slopes if slope is not None]
    return sum(terms[1:], terms[0]) if terms else anp.zeros_like(ans)


def _arctan2_slope(argnum: int, y: Array, x: Array, ans: Array) -> Array:
    y, x = in_dtype_of(ans, y), in_dtype_of(ans, x)
    # The derivative doesn't depend on the scale, without which the squares could overflow or vanish.
    scale = np.maximum(abs(getval(x)), abs(getval(y)))
    scale = in_dtype_of(ans, np.where((scale > 0) & (scale < np.inf), scale, 1.0))
    y, x = y / scale, x / scale
    return (-y if argnum else x) / (x**2 + y**2) / scale


def _copysign_slope(argnum: int, x: Array, y: Array, ans: Array) -> Array | None:
    return None if argnum else anp.sign(x) * anp.sign(ans)  # 0 at x = 0, like the derivative of abs


def _heaviside_slope(argnum: int, x: Array, value_at_zero: Array, ans: Array) -> Array | None:
    return anp.equal(x, 0) if argnum else None


# The derivative of a function of two arrays with respect to an argument, given by its position; None for 0.
_SLOPES: dict[Primitive, Callable[..., Array | None]] = {
    anp.arctan2: _arctan2_slope,
    anp.copysign: _copysign_slope,
    anp.heaviside: _heaviside_slope,
}


def _divmod_vjp(argnums: Argnums, ans: Any, args: tuple, kwargs: dict) -> Vjp:
    """Apply the adjoint of `mod` to the cotangent of the remainder; the quotient is constant."""
    pull = inherited_vjp(anp.mod, argnums, ans[1], args, kwargs)
    return lambda g: pull(g[1])


def _divmod_jvp(argnums: Argnums, gs: list, ans: Any, args: tuple, kwargs: dict) -> tuple[Array, Array]:
    return anp.zeros_like(ans[0]), inherited_jvp(anp.mod, argnums, gs, ans[1], args, kwargs)


def _fitted(fit: Function | None, g: Array) -> Array:
    return g if fit is None else fit(g)


def _times_minus(t: Array, factor: Array) -> Array:
    """Return the negated product, in the memory of `t` if possible."""
    if type(t) is type(factor) is np.ndarray and t.dtype == factor.dtype and t.shape == factor.shape:
        return np.negative(np.multiply(t, factor, t), t)
    return -(t * factor)


# The tangent of z(x, y) for three cases: only x has a tangent, only y has one, or both have one.
_TANGENTS: dict[Primitive, tuple[Callable[..., Array], ...]] = {
    anp.add: (
        lambda g, x, y, z: broadcast_tangent(g, z),
        lambda g, x, y, z: broadcast_tangent(g, z),
        lambda g, h, x, y, z: g + h,
    ),
    anp.subtract: (
        lambda g, x, y, z: broadcast_tangent(g, z),
        lambda g, x, y, z: broadcast_tangent(-g, z),
        lambda g, h, x, y, z: g - h,
    ),
    anp.multiply: (lambda g, x, y, z: g * y, lambda g, x, y, z: x * g, lambda g, h, x, y, z: g * y + x * h),
    # Quotient rule: (g - z h) / y.
    anp.divide: (
        lambda g, x, y, z: g / y,
        lambda g, x, y, z: _times_minus(g / y, z),
        lambda g, h, x, y, z: (g - z * h) / y,
    ),
}


def _jvp(fun: Primitive, argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    if kwargs or len(args) != 2:
        return inherited_jvp(fun, argnums, gs, ans, args, kwargs)
    return _TANGENTS[fun][2 if len(argnums) == 2 else argnums[0]](*gs, *args, ans)


VJPS = {
    anp.add: partial(_sum_vjp, anp.add, False),
    anp.subtract: partial(_sum_vjp, anp.subtract, True),
    anp.multiply: multiply_vjp,
    anp.divide: divide_vjp,
    anp.true_divide: divide_vjp,
    anp.divmod: _divmod_vjp,
    **{fun: partial(_slope_vjp, fun) for fun in _SLOPES},
}
JVPS: dict[Primitive, JvpMaker] = {fun: partial(_jvp, fun) for fun in _TANGENTS}
JVPS.update({fun: partial(_slope_jvp, fun) for fun in _SLOPES})
JVPS[anp.true_divide], JVPS[anp.divmod] = JVPS[anp.divide], _divmod_jvp
