"""Diagonals of matrices, and their sum."""

from __future__ import annotations

from typing import Any

import autograd.numpy as anp

from mpiad._typing import Array
from mpiad.differentiation.rules.on_device.constant_arrays import identity
from mpiad.differentiation.rules.protocol import Argnums, Vjp

__all__ = ["JVPS", "VJPS"]


def trace_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Repeat the cotangent along the diagonal."""
    given = dict(zip(("a", "offset", "axis1", "axis2"), args), **kwargs)
    shape = given["a"].shape
    if len(shape) != 2 or given.keys() - {"a", "offset"}:
        raise NotImplementedError("on devices the derivative of trace is available for matrices; use diagonal and sum")
    ones = identity(given["a"], *shape, k=given.get("offset", 0))
    return lambda g: (ones * g,)


def diagonal_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Put the cotangent on the diagonal."""
    given: Any = dict(zip(("a", "offset", "axis1", "axis2"), args), **kwargs)
    axes, k = (given.get("axis1", 0), given.get("axis2", 1)), given.get("offset", 0)
    rows, columns = (given["a"].shape[axis] for axis in axes)
    mask = identity(given["a"], rows, columns, k)
    # Moved to the rows that it lies on, the diagonal is a column beside the mask.
    before = max(-k, 0)
    after = rows - before - ans.shape[-1]

    def vjp(g: Array) -> tuple[Array]:
        widths = [(0, 0)] * (len(ans.shape) - 1) + [(before, after)]
        return (anp.moveaxis(anp.pad(g, widths, "constant")[..., None] * mask, (-2, -1), axes),)

    return vjp


VJPS = {anp.trace: trace_vjp, anp.diagonal: diagonal_vjp}
JVPS: dict = {}
