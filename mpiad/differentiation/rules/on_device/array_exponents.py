"""Powers with exponents on the device.

A number of NumPy's in front of ``**`` becomes an array of NumPy's, which no device takes; as an argument of `power` it
stays a number.
"""

from __future__ import annotations

import autograd.numpy as anp

from mpiad._typing import Array
from mpiad.differentiation.rules.broadcasting import fitting
from mpiad.differentiation.rules.protocol import Argnums, Vjp

__all__ = ["JVPS", "VJPS"]


def power_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Multiply by the slope in the base, `y x**(y-1)`, and in the exponent, `log(x) x**y`."""
    parts = [(_slope(i, ans, *args), fitting(args[i], ans)) for i in argnums]
    return lambda g: tuple([g * slope if fit is None else fit(g * slope) for slope, fit in parts])


def power_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Multiply the tangents by the slopes, and add up."""
    parts = [_slope(i, ans, *args) * g for i, g in zip(argnums, gs)]
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _slope(argnum: int, ans: Array, x: Array, y: Array) -> Array:
    if argnum == 0:
        # As autograd's: no power of -1 where the exponent is zero.
        exponent = anp.where(y, y - 1, 1.0) if anp.shape(y) else y - 1
        return anp.power(x, exponent) * y
    return ans * anp.log(anp.where(x, x, 1.0))


VJPS = {anp.power: power_vjp}
JVPS = {anp.power: power_jvp}
