"""Powers, with fewer operations than autograd's rule for constant real exponents."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpiad._typing import Array
from mpiad.differentiation.rules.broadcasting import fitting
from mpiad.differentiation.rules.protocol import Argnums, Vjp, anp, bound, in_dtype_of


def power_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Multiply the cotangent of `x**y` by `y x**(y-1)` for the base, and by `log(x) x**y` for the exponent."""
    slope = _slope(argnums, args, kwargs)
    if slope is None:
        parts = [(_general_slope(i, ans, *args), fitting(args[i], ans)) for i in argnums]
        return lambda g: tuple([g * each if fit is None else fit(g * each) for each, fit in parts])
    fit = fitting(args[0], ans)
    return (lambda g: (slope(g),)) if fit is None else lambda g: (fit(slope(g)),)


def power_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Multiply the tangents by the partial derivatives, and add the products."""
    slope = _slope(argnums, args, kwargs)
    return sum(_general_slope(i, ans, *args) * g for i, g in zip(argnums, gs)) if slope is None else slope(gs[0])


def _general_slope(argnum: int, ans: Array, x: Array, y: Array) -> Array:
    # The operator `**` would convert a number on its left to a NumPy array, even if the exponent is on a device. At x = 0
    # the power is infinite for y = 0 and the logarithm for every y, and their products with zero would be NaN.
    x, y = in_dtype_of(ans, x), in_dtype_of(ans, y)
    if argnum == 0:
        return anp.power(anp.where((x == 0) & (y == 0), 1, x), y - 1) * y
    return ans * anp.log(anp.where(x, x, 1.0 + 0j if anp.iscomplexobj(ans) else 1.0))


def _slope(argnums: Argnums, args: tuple, kwargs: dict) -> Callable[[Array], Array] | None:
    """Return the map g -> g y x**(y-1) if `y` is one constant real number; None if the general rule must be used."""
    if kwargs:
        bound(anp.power, "x1 x2", args, kwargs)
    if argnums != (0,):
        return None
    x, y = args
    if type(y) is not int and type(y) is not float:
        if not isinstance(y, (np.integer, np.floating)):
            return None
        y = y.item()
    if y == 2:
        return lambda g: 2 * g * x
    if y == 1:
        return lambda g: g
    return None if y == 0 else lambda g: g * y * x ** (y - 1)


VJPS = {anp.power: power_vjp}
JVPS = {anp.power: power_jvp}
