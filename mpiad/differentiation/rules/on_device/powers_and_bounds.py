"""Powers with exponents on the device, values kept within bounds, and evenly spaced ones between two.

A number of NumPy's in front of ``**`` becomes an array of NumPy's, which no device takes; as an argument of `power` it
stays a number.
"""

from __future__ import annotations

import autograd.numpy as anp

from mpiad._typing import Array
from mpiad.differentiation.rules.broadcasting import fitting
from mpiad.differentiation.rules.on_device.constant_arrays import arrays_like
from mpiad.differentiation.rules.protocol import Argnums, Vjp


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


def clip_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Pass the cotangent on where no bound was met, as autograd does: a bound's own derivative is refused."""
    inside = _inside(argnums, ans, args, kwargs)
    return lambda g: (g if inside is None else g * inside,)


def clip_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Pass the tangent on where no bound was met."""
    inside = _inside(argnums, ans, args, kwargs)
    return gs[0] if inside is None else gs[0] * inside


def _inside(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Array:
    if argnums != (0,):
        raise NotImplementedError("the derivative of clip by its bounds isn't available; use maximum and minimum")
    given = dict(zip(("a", "a_min", "a_max"), args), **kwargs)
    bounds = [given.get(name) for name in ("a_min", "a_max", "min", "max")]
    inside = None
    for bound in bounds:
        if bound is not None:
            apart = anp.not_equal(ans, bound)
            inside = apart if inside is None else anp.logical_and(inside, apart)
    return inside


def linspace_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Weigh the cotangent by how near each value is to the end."""
    if len(args) > 3 or kwargs.keys() - {"num"} or len(ans.shape) != 1:
        raise NotImplementedError("on devices the derivative of linspace is available for start, stop and num only")
    n = ans.shape[0]
    towards_stop = arrays_like(ans).arange(n).astype(ans.dtype) / max(n - 1, 1)
    weights = {0: 1.0 - towards_stop, 1: towards_stop}
    return lambda g: tuple([anp.sum(g * weights[i]) for i in argnums])


VJPS = {anp.power: power_vjp, anp.clip: clip_vjp, anp.linspace: linspace_vjp}
JVPS = {anp.power: power_jvp, anp.clip: clip_jvp}
