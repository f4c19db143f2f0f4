"""Values kept within bounds, and evenly spaced ones between two."""

from __future__ import annotations

from typing import Any

import autograd.numpy as anp

from mpiad._typing import Array
from mpiad.differentiation.rules.on_device.constant_arrays import arrays_like
from mpiad.differentiation.rules.protocol import Argnums, Vjp

__all__ = ["JVPS", "VJPS"]


def clip_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Pass the cotangent on where no bound was met, as autograd does: a bound's own derivative is refused."""
    inside = _inside(argnums, ans, args, kwargs)
    return lambda g: (g if inside is None else g * inside,)


def clip_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Pass the tangent on where no bound was met."""
    inside = _inside(argnums, ans, args, kwargs)
    return gs[0] if inside is None else gs[0] * inside


def _inside(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Any:
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


VJPS = {anp.clip: clip_vjp, anp.linspace: linspace_vjp}
JVPS = {anp.clip: clip_jvp}
