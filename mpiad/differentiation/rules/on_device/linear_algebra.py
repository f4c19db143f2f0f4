"""Products that sum over axes, for any numbers of axes; traces; singular values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import autograd.numpy as anp
from autograd.numpy import linalg

from mpiad._typing import Array
from mpiad.differentiation.rules.constant_arrays import identity
from mpiad.differentiation.rules.protocol import Argnums, Vjp, VjpMaker

Axes = tuple[tuple[int, ...], tuple[int, ...]]


def _contraction_vjp(axes_of: Callable[[tuple, dict, int, int], Axes]) -> VjpMaker:
    def contraction_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
        """Contract the cotangent with the other factor, over the axes which that one gave to the result."""
        x, y = args[0], args[1]
        rank_x, rank_y = len(anp.shape(x)), len(anp.shape(y))
        if rank_x == 0 or rank_y == 0:
            return lambda g: tuple([_of_scaling(g, (x, y)[1 - i], (x, y)[i]) for i in argnums])
        axes_x, axes_y = axes_of(args, kwargs, rank_x, rank_y)
        parts = {0: lambda g: _first(g, y, axes_x, axes_y, rank_x), 1: lambda g: _second(g, x, axes_x, axes_y, rank_y)}
        return lambda g: tuple([_matched(parts[i](g), args[i]) for i in argnums])

    return contraction_vjp


def _of_scaling(g: Array, other: Array, factor: Array) -> Array:
    product = g * other
    return _matched(product if anp.shape(factor) else anp.sum(product), factor)


def _first(g: Array, y: Array, axes_x: Sequence[int], axes_y: Sequence[int], rank: int) -> Array:
    """Return the cotangent of the first factor: its free axes come from `g`, the others from `y`, in the order of `y`'s."""
    free_x = [i for i in range(rank) if i not in axes_x]
    free_y = [j for j in range(len(anp.shape(y))) if j not in axes_y]
    out = anp.tensordot(g, y, (tuple(range(len(free_x), len(free_x) + len(free_y))), tuple(free_y)))
    return _in_order(out, [*free_x, *[axes_x[axes_y.index(j)] for j in sorted(axes_y)]])


def _second(g: Array, x: Array, axes_x: Sequence[int], axes_y: Sequence[int], rank: int) -> Array:
    free_x = [i for i in range(len(anp.shape(x))) if i not in axes_x]
    free_y = [j for j in range(rank) if j not in axes_y]
    out = anp.tensordot(x, g, (tuple(free_x), tuple(range(len(free_x)))))
    return _in_order(out, [*[axes_y[axes_x.index(i)] for i in sorted(axes_x)], *free_y])


def _in_order(out: Array, axes: list[int]) -> Array:
    """Transpose an array whose axes are those of a factor in another order."""
    back = tuple(sorted(range(len(axes)), key=axes.__getitem__))
    return out if back == tuple(range(len(axes))) else anp.transpose(out, back)


def _matched(part: Array, factor: Array) -> Array:
    return anp.real(part) if anp.iscomplexobj(part) and not anp.iscomplexobj(factor) else part


def _of_dot(args: tuple, kwargs: dict, rank_x: int, rank_y: int) -> Axes:
    return (rank_x - 1,), (max(rank_y - 2, 0),)


def _of_inner(args: tuple, kwargs: dict, rank_x: int, rank_y: int) -> Axes:
    return (rank_x - 1,), (rank_y - 1,)


def _of_tensordot(args: tuple, kwargs: dict, rank_x: int, rank_y: int) -> Axes:
    axes: Any = args[2] if len(args) > 2 else kwargs.get("axes", 2)
    if isinstance(axes, int):
        return tuple(range(rank_x - axes, rank_x)), tuple(range(axes))
    first, second = ([axis] if isinstance(axis, int) else axis for axis in axes)
    return tuple([int(i) % rank_x for i in first]), tuple([int(j) % rank_y for j in second])


def trace_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Repeat the cotangent along the diagonal."""
    given = dict(zip(("a", "offset", "axis1", "axis2"), args), **kwargs)
    shape = given["a"].shape
    if len(shape) != 2 or given.keys() - {"a", "offset"}:
        raise NotImplementedError("on devices the derivative of trace is available for matrices; use diagonal and sum")
    ones = identity(given["a"], *shape, k=given.get("offset", 0))
    return lambda g: (ones * g,)


def svd_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Put the cotangent of the singular values between their vectors; those of the vectors aren't available."""
    given = dict(zip(("a", "full_matrices", "compute_uv"), args), **kwargs)
    if given.get("compute_uv", True):
        raise NotImplementedError("on devices the derivative of svd is available for compute_uv=False; use eigh of xᵀx")
    left, _, right = linalg.svd(args[0], full_matrices=False)
    return lambda g: (anp.matmul(anp.conj(left) * g[..., None, :], anp.conj(right)),)


VJPS = {
    anp.dot: _contraction_vjp(_of_dot),
    anp.inner: _contraction_vjp(_of_inner),
    anp.tensordot: _contraction_vjp(_of_tensordot),
    anp.trace: trace_vjp,
    linalg.svd: svd_vjp,
}
JVPS: dict = {}
