"""Arrays divided into pieces, differences of neighbours, sorted vectors: the adjoints join, difference and reorder."""

from __future__ import annotations

from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.device.assembly import concatenate
from mpiad.differentiation.rules.protocol import Argnums, Primitive, Vjp, VjpMaker


def _division_vjp(fixed: int | None) -> VjpMaker:
    def division_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
        """Join the cotangents of the pieces."""
        x, *others = args
        axis: Any = others[1] if len(others) > 1 else kwargs.get("axis", 0)
        if fixed is not None:
            axis = min(fixed, len(anp.shape(x)) - 1)  # hsplit divides a vector along its only axis
        return lambda g: (concatenate([g[i] for i in range(len(g))], axis),)

    return division_vjp


def diff_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Take the differences of the cotangent between zeros, negated, as often."""
    given: Any = dict(zip(("a", "n", "axis"), args), **kwargs)
    if given.keys() - {"a", "n", "axis"}:
        raise NotImplementedError("on devices the derivative of diff is available for n and axis; concatenate the rest")
    times, rank = given.get("n", 1), len(ans.shape)
    place = given.get("axis", -1) % rank
    around = [(1, 1) if i == place else (0, 0) for i in range(rank)]

    def vjp(g: Array) -> tuple[Array]:
        for _ in range(times):
            g = -anp.diff(anp.pad(g, around, "constant"), axis=place)
        return (g,)

    return vjp


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
        total = _transposed_differences(g if alone else g[0], axes[0])
        for k in range(1, len(axes)):
            total = total + _transposed_differences(g[k], axes[k])
        return (total,)

    return vjp


def _transposed_differences(g: Array, axis: int) -> Array:
    """Return Σ_i w_i (e_{i+1} - e_{i-1}), where the ends have weight 1 and take themselves for the missing neighbour."""
    g = anp.moveaxis(g, axis, 0)
    w = concatenate([g[:1], g[1:-1] / 2, g[-1:]])
    return anp.moveaxis(concatenate([-w[:1], w[:-1]]) - concatenate([w[1:], -w[-1:]]), 0, axis)


def _order(fun: Primitive, args: tuple) -> Array:
    x = getval(args[0])
    if len(x.shape) != 1:
        raise NotImplementedError(f"the derivative of {fun.__name__} is available for vectors, but got shape {x.shape}")
    return np.argsort(x) if fun is anp.sort else np.argpartition(x, args[1])


def _ordering_vjp(fun: Primitive) -> Any:
    def ordering_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
        """Give each element of the cotangent to where its element came from."""
        back = np.argsort(_order(fun, args))  # the inverse of a permutation
        return lambda g: (g[back],)

    return ordering_vjp


def _ordering_jvp(fun: Primitive) -> Any:
    def ordering_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
        """Bring the tangent into the order of the elements."""
        return gs[0][_order(fun, args)]

    return ordering_jvp


VJPS = {
    anp.split: _division_vjp(None),
    anp.array_split: _division_vjp(None),
    anp.vsplit: _division_vjp(0),
    anp.hsplit: _division_vjp(1),
    anp.dsplit: _division_vjp(2),
    anp.diff: diff_vjp,
    anp.gradient: gradient_vjp,
    **{fun: _ordering_vjp(fun) for fun in (anp.sort, anp.partition)},
}
JVPS = {fun: _ordering_jvp(fun) for fun in (anp.sort, anp.partition)}
