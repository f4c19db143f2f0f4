"""Arrays divided into pieces, and differences of neighbours, whose adjoints join pieces."""

from __future__ import annotations

from typing import Any

import autograd.numpy as anp

from mpiad._typing import Array
from mpiad.device.assembly import concatenate
from mpiad.differentiation.rules.protocol import Argnums, Vjp, VjpMaker

__all__ = ["JVPS", "VJPS"]


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


VJPS = {
    anp.split: _division_vjp(None),
    anp.array_split: _division_vjp(None),
    anp.vsplit: _division_vjp(0),
    anp.hsplit: _division_vjp(1),
    anp.dsplit: _division_vjp(2),
    anp.diff: diff_vjp,
}
JVPS: dict = {}
