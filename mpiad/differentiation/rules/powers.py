"""Powers, square and square root, without a call to `pow` for constant exponents for which products suffice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.differentiation.rules.broadcasting import fitting
from mpiad.differentiation.rules.protocol import Argnums, Vjp, anp, bound, inherited_jvp, one_unchanged, unary_vjp
from mpiad.transport.device_arrays import is_device_array

Slope = Callable[[Array], Array]


def power_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Multiply the cotangent of `x**y` by `y x**(y-1)` for the base, by `log(x) x**y` for the exponent."""
    if kwargs:
        bound(anp.power, "x1 x2", args, kwargs)
    slope = None if argnums != (0,) else _slope(args[0], args[1], ans)
    if slope is None:
        parts = [(_general_slope(i, ans, *args), fitting(args[i], ans)) for i in argnums]
        return lambda g: tuple([g * each if fit is None else fit(g * each) for each, fit in parts])
    fit = fitting(args[0], ans)
    if slope is _unit_slope:
        return one_unchanged if fit is None else lambda g: (fit(g),)
    return (lambda g: (slope(g),)) if fit is None else lambda g: (fit(slope(g)),)


def power_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Multiply the tangents by the slopes, and add up."""
    if kwargs:
        bound(anp.power, "x1 x2", args, kwargs)
    slope = None if argnums != (0,) else _slope(args[0], args[1], ans)
    return sum(_general_slope(i, ans, *args) * g for i, g in zip(argnums, gs)) if slope is None else slope(gs[0])


def _general_slope(argnum: int, ans: Array, x: Array, y: Array) -> Array:
    # Powers stay calls of `power`: a number in front of `**` would become an array of NumPy's, which no device takes.
    if argnum == 0:
        # No power of -1 if the exponent is zero.
        exponent = anp.where(y, y - 1, 1.0) if anp.shape(y) or not is_device_array(getval(x)) else y - 1
        return anp.power(x, exponent) * y
    return ans * anp.log(anp.where(x, x, 1.0 + 0j if anp.iscomplexobj(ans) else 1.0))


def sqrt_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Divide the tangent by twice the root."""
    if kwargs or len(args) != 1:
        return inherited_jvp(anp.sqrt, argnums, gs, ans, args, kwargs)
    return _halved_quotient(gs[0], ans)


def _slope(x: Array, y: Array, ans: Array) -> Slope | None:
    """Return the map g -> g y x**(y-1), or None if `y` isn't one constant real number other than 0."""
    # Autograd's rule defines the derivative of x**0 for infinite or NaN x; so the exponent zero is left to it.
    if type(y) is not int and type(y) is not float:
        if not isinstance(y, (np.integer, np.floating)):
            return None
        y = y.item()
    if y == 2:
        return lambda g: _twice_product(g, x)
    if y == 0:
        # Autograd's rule looks for zeros among the exponents, with an array of NumPy's.
        return (lambda g: g * 0.0 * x) if is_device_array(getval(x)) else None
    if y == 1:
        return _unit_slope
    if y == 3 or y == 4:
        return lambda g: _times_power(g, x, int(y))
    if y == -1:
        return lambda g: -(g * ans * ans)  # -1/x² by the result, without a division
    if y == 0.5:
        return lambda g: _halved_quotient(g, ans)
    return lambda g: g * y * x ** (y - 1)


def _unit_slope(g: Array) -> Array:
    return g


def _twice_product(g: Array, x: Array) -> Array:
    # The cotangent of a sum is a broadcast number: one pass over memory less.
    if type(g) is type(x) is np.ndarray and g.size > 1 and not any(g.strides):
        return x * (2 * g.item(0))
    t = g * x
    # In its memory; NumPy takes three times as long to add one element in place as to a new array.
    if type(t) is np.ndarray and t.size > 1:
        t += t
        return t
    return t + t


def _times_power(g: Array, x: Array, n: int) -> Array:
    t = g * x
    if type(t) is not np.ndarray or t.size == 1:
        return t * n * x if n == 3 else t * n * x * x
    for _ in range(n - 2):
        t *= x
    t *= n
    return t


def _halved_quotient(g: Array, ans: Array) -> Array:
    t = ans + ans
    if type(g) is type(t) is np.ndarray and g.dtype == t.dtype and t.size > 1:
        return np.divide(g, t, t)
    return g / t


VJPS = {
    anp.power: power_vjp,
    anp.square: partial(unary_vjp, anp.square, lambda x, ans: lambda g: (_twice_product(g, x),)),
    anp.sqrt: partial(unary_vjp, anp.sqrt, lambda x, ans: lambda g: (_halved_quotient(g, ans),)),
}
JVPS = {anp.power: power_jvp, anp.sqrt: sqrt_jvp}
