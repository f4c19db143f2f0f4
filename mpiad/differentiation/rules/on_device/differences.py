"""Numerical gradients: central differences, one-sided ones at the ends."""

from __future__ import annotations

from typing import Any

import autograd.numpy as anp

from mpiad._typing import Array
from mpiad.device.assembly import concatenate
from mpiad.differentiation.rules.protocol import Argnums, Vjp

__all__ = ["JVPS", "VJPS"]


def gradient_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Apply the transposed differences along each axis, and add up."""
    axis: Any = kwargs.get("axis")
    x, *spacings = args
    if spacings or kwargs.keys() - {"axis"}:
        raise NotImplementedError("on devices the derivative of gradient is available for spacing 1; divide the result")
    rank = len(x.shape)
    axes = tuple(range(rank)) if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
    alone = len(axes) == 1

    def vjp(g: Array) -> tuple[Array]:
        total = _transposed(g if alone else g[0], axes[0])
        for k in range(1, len(axes)):
            total = total + _transposed(g[k], axes[k])
        return (total,)

    return vjp


def _transposed(g: Array, axis: int) -> Array:
    """Return Σ_i w_i (e_{i+1} - e_{i-1}), where the ends have weight 1 and take themselves for the missing neighbour."""
    g = anp.moveaxis(g, axis, 0)
    w = concatenate([g[:1], g[1:-1] / 2, g[-1:]])
    return anp.moveaxis(concatenate([-w[:1], w[:-1]]) - concatenate([w[1:], -w[-1:]]), 0, axis)


VJPS = {anp.gradient: gradient_vjp}
JVPS: dict = {}
