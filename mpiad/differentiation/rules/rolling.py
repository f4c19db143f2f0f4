"""Cyclic shifts."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.differentiation.rules.protocol import BOX_TYPES, Argnums, Vjp, anp, inherited_vjp

__all__ = ["JVPS", "VJPS"]


def roll_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Shift the cotangent back."""
    if argnums != (0,):
        return inherited_vjp(anp.roll, argnums, ans, args, kwargs)
    bound = dict(zip(("a", "shift", "axis"), args), **kwargs)
    shift, axis = bound["shift"], bound.get("axis")
    back = [-s for s in shift] if isinstance(shift, (tuple, list)) else -shift

    def vjp(g: Array) -> tuple[Array]:
        if type(g) in BOX_TYPES:
            return (anp.roll(g, back, axis=axis),)
        return (_rolled(g, back, axis),)

    return vjp


def _rolled(g: Array, shift: Any, axis: int | tuple[int, ...] | None) -> Array:
    """Roll along one axis by one concatenation; np.roll takes several times as long on small arrays."""
    if not isinstance(shift, int) or g.ndim == 0 or (axis is None and g.ndim > 1):
        return np.roll(g, shift, axis)
    axis = 0 if axis is None else axis
    if not isinstance(axis, int):
        return np.roll(g, shift, axis)
    n = g.shape[axis]
    lead = (slice(None),) * (axis % g.ndim)
    cut = -shift % n if n else 0
    return np.concatenate((g[(*lead, slice(cut, None))], g[(*lead, slice(cut))]), axis)


VJPS = {anp.roll: roll_vjp}
JVPS: dict = {}
