"""Derivatives of functions that split arrays, subtract neighbors, transpose, shift or rearrange elements, or cast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
from autograd.core import JVPNode, VJPNode
from autograd.extend import defjvp, defvjp, notrace_primitive, primitive
from autograd.numpy.numpy_wrapper import _astype
from autograd.tracer import getval, isbox, register_notrace

from mpiad._typing import Array, Function, Shape
from mpiad.device.assembly import concatenate
from mpiad.device.boxes import cast
from mpiad.differentiation.rules.indexing import getitem_vjp
from mpiad.differentiation.rules.protocol import (
    BOX_TYPES,
    Argnums,
    Primitive,
    Vjp,
    anp,
    arrays_like,
    bound,
    composition,
    exact_integer,
    inherited_jvp,
    inherited_vjp,
    linear_jvp,
    one_unchanged,
    refusal,
)


def _split_vjp(fixed: int | None, argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Concatenate the cotangents of the parts; add those of elements in several parts, if the indices decrease."""
    named = dict(zip(("ary", "indices_or_sections", "axis"), args), **kwargs)
    x = named["ary"]
    rank = len(anp.shape(x))
    # hsplit splits a vector along its only axis.
    axis: int = named.get("axis", 0) % rank if fixed is None else min(fixed, rank - 1)

    def joined(g: Array) -> Array:
        return concatenate([g[i] for i in range(len(g))], axis)

    n = anp.shape(x)[axis]
    if sum(anp.shape(ans[i])[axis] for i in range(len(ans))) == n:
        return lambda g: (joined(g),)
    index = np.concatenate(np.array_split(np.arange(n), named["indices_or_sections"]))
    pull = getitem_vjp(argnums, ans, (x, (slice(None),) * axis + (index,)), {})
    return lambda g: pull(joined(g))


def diff_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Apply the transpose of a difference n times: pad the cotangent with zeros, and negate its differences."""
    named = bound(anp.diff, "a n axis", args, kwargs)
    if named.get("n", 1) == 0:
        return one_unchanged
    rank = len(ans.shape)
    axis = named.get("axis", -1) % rank
    times = min(named.get("n", 1), args[0].shape[axis])
    widths = [(1, 1) if i == axis else (0, 0) for i in range(rank)]

    def vjp(g: Array) -> tuple[Array]:
        for _ in range(times):
            g = -anp.diff(anp.pad(g, widths, "constant"), axis=axis)
        return (g,)

    return vjp


def diff_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Take the differences of the tangent."""
    bound(anp.diff, "a n axis", args, kwargs)
    return anp.diff(gs[0], *args[1:], **kwargs)


def gradient_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Apply the transposed differences along each axis, and add the results."""
    x, axis = args[0], kwargs["axis"]
    axes = range(len(x.shape)) if axis is None else np.atleast_1d(axis).tolist()

    def vjp(g: Array) -> tuple[Array]:
        parts = [g] if len(axes) == 1 else [g[k] for k in range(len(axes))]
        return (sum(map(_transposed_differences, parts, axes)),)

    return vjp


def _transposed_differences(g: Array, axis: int) -> Array:
    """Return Σ_i w_i (e_{i+1} - e_{i-1}), w = g/2; at the ends w = g, and the end replaces a missing neighbor."""
    g = anp.moveaxis(g, axis, 0)
    w = concatenate([g[:1], g[1:-1] / 2, g[-1:]])
    return anp.moveaxis(concatenate([-w[:1], w[:-1]]) - concatenate([w[1:], -w[-1:]]), 0, axis)


_primitive_gradient = anp.gradient


@composition(anp.gradient)
def gradient(f: Array, *varargs: Array, axis: int | tuple[int, ...] | None = None, edge_order: Literal[1, 2] = 1) -> Any:
    """Return `numpy.gradient`: differences of neighbors, divided by spacings or weighted by distances of coordinates."""
    if isbox(f) and not varargs and edge_order == 1:
        return _primitive_gradient(f, axis=axis)  # its own rule takes half of the time
    f = anp.array(f) if isinstance(f, (list, tuple)) else f
    f = f.astype(float) if f.dtype.kind in "iu" else f
    # NumPy's result for a small array of as many axes: it raises NumPy's errors, and has the type of several results.
    small = np.zeros([min(n, 3) for n in f.shape])
    several = np.gradient(small, *[1.0] * len(varargs), axis=axis, edge_order=edge_order)
    axes = np.arange(small.ndim)[slice(None) if axis is None else np.atleast_1d(axis)].tolist()
    given = varargs or (1.0,)
    spacings = given * len(axes) if len(given) == 1 and not anp.ndim(given[0]) else given
    slopes = [_slope(f, _spacing(x, f.shape[k]), k, edge_order) for k, x in zip(axes, spacings, strict=True)]
    slopes = [slope if slope.dtype == f.dtype else slope.astype(f.dtype) for slope in slopes]
    return slopes[0] if isinstance(several, np.ndarray) else type(several)(slopes)


def _spacing(x: Array, n: int) -> Array:
    """Return the spacing of n entries, or the distances of their coordinates unless these are constant and equidistant."""
    x = anp.array(x) if isinstance(x, (list, tuple)) else x
    if not anp.ndim(x):
        return x
    if x.shape != (n,):
        raise ValueError(f"gradient: expected one coordinate for each of the {n} entries, but got shape {x.shape}.")
    h = anp.diff(x.astype(float) if x.dtype.kind in "iu" else x)
    return h[0] if type(h) is np.ndarray and (h == h[0]).all() else h


def _slope(f: Array, h: Array, axis: int, edge_order: int) -> Array:
    """Return the gradient along an axis by NumPy's formulas; `h`: the spacing, or the distances of neighbors."""
    n, lead = f.shape[axis], (slice(None),) * axis

    def at(start: int, count: int = 1) -> Array:
        return f[(*lead, slice(start, start + count))]

    def weighted(start: int, a: Array, b: Array, c: Array, count: int = 1) -> Array:
        return a * at(start, count) + b * at(start + 1, count) + c * at(start + 2, count)

    if anp.ndim(h):
        h = anp.reshape(h, (-1, *[1] * (f.ndim - axis - 1)))
        u, v = h[:-1], h[1:]
        inner = weighted(0, -v / (u * (u + v)), (v - u) / (u * v), u / (v * (u + v)), n - 2)
        first, last = h[0], h[-1]
    else:
        inner, first, last = (at(2, n - 2) - at(0, n - 2)) / (2.0 * h), h, h
    if edge_order == 1:
        ends = (at(1) - at(0)) / first, (at(n - 1) - at(n - 2)) / last
    elif anp.ndim(h):
        (u, v), (x, y) = h[:2], h[-2:]
        start = weighted(0, -(2.0 * u + v) / (u * (u + v)), (u + v) / (u * v), -u / (v * (u + v)))
        ends = start, weighted(n - 3, y / (x * (x + y)), -(y + x) / (x * y), (2.0 * y + x) / (y * (x + y)))
    else:
        ends = weighted(0, -1.5 / h, 2.0 / h, -0.5 / h), weighted(n - 3, 0.5 / h, -2.0 / h, 1.5 / h)
    return concatenate([ends[0], inner, ends[1]], axis)


# NumPy 1 calls it trapz.
@composition(getattr(anp, "trapezoid", None) or anp.trapz)
def trapezoid(y: Array, x: Array = None, dx: Array = 1.0, axis: int = -1) -> Array:
    """Return `numpy.trapezoid`: the sum of the lengths of intervals times the means of the values at both ends."""
    y, x = (anp.array(part) if isinstance(part, (list, tuple)) else part for part in (y, x))
    number, lengths = axis % y.ndim, dx
    lead = (slice(None),) * number
    if x is not None:
        lengths = anp.diff(x, axis=axis) if x.ndim > 1 else anp.reshape(anp.diff(x), (-1, *[1] * (y.ndim - number - 1)))
    return anp.sum(lengths * (y[(*lead, slice(1, None))] + y[(*lead, slice(None, -1))]) / 2.0, axis=axis)


@primitive
def scattered(g: Array, indices: Array, shape: Shape) -> Array:
    """Return an array of zeros, except for g at `indices`, which are distinct indices into the flattened array."""
    total = arrays_like(g).full((math.prod(shape),), 0, g.dtype)
    total[indices] = g
    return np.reshape(total, shape)


# Taking elements and writing them into an array of zeros are transposes of each other.
defvjp(scattered, lambda ans, g, indices, shape: lambda h: anp.reshape(h, (-1,))[indices])
defjvp(scattered, lambda dg, ans, g, indices, shape: scattered(dg, indices, shape))


def _source_indices(fun: Primitive, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Return, for each element of a rearranged array, its index in the flattened argument."""
    x = getval(args[0])
    return fun(np.reshape(arrays_like(x).arange(np.size(x)), np.shape(x)), *args[1:], **kwargs)


def _sorted_indices(fun: Primitive, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Return, for each element of a sorted or partitioned array, its index in the flattened argument."""
    named = bound(fun, "a axis kind" if fun is anp.sort else "a kth axis", args, kwargs)
    x, result, axis = getval(args[0]), getval(ans), named.get("axis", -1)
    numbers = np.reshape(arrays_like(x).arange(np.size(x)), np.shape(x))
    if axis is None:
        x, numbers, axis = np.ravel(x), np.ravel(numbers), 0
    elif not np.shape(x):
        return numbers
    order = np.argsort(x, axis=axis)
    if fun is anp.partition:
        order = np.take_along_axis(order, np.argsort(np.argsort(result, axis=axis), axis=axis), axis)
    return np.take_along_axis(numbers, order, axis)


@primitive
def _lexsorted(axis: int, *keys: Array) -> Array:
    return np.lexsort(keys, axis)


@notrace_primitive
def lexsort(keys: Sequence[Array], axis: int = -1) -> Array:
    """Return `numpy.lexsort` of keys that may be traced, which NumPy would convert to an array of objects."""
    return _lexsorted(axis, *keys)


anp.lexsort = anp.numpy_wrapper.lexsort = lexsort
for _kind in (VJPNode, JVPNode):
    for _fun in (_lexsorted, anp.digitize):  # integers, like those of `argsort` and `searchsorted`
        register_notrace(_kind, _fun)


def _rearrangement_vjp(
    fun: Primitive, indices_of: Function, argnums: Argnums, ans: Array, args: tuple, kwargs: dict
) -> Vjp:
    """Move each element of the cotangent to the original index of the element."""
    if fun is anp.diag and len(anp.shape(args[0])) == 1:
        return inherited_vjp(fun, argnums, ans, args, kwargs)  # here diag makes a matrix from its diagonal
    indices, shape = indices_of(fun, ans, args, kwargs), anp.shape(args[0])
    return lambda g: (scattered(g, indices, shape),)


def _rearrangement_jvp(
    fun: Primitive, indices_of: Function, argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict
) -> Array:
    """Rearrange the tangent like the array."""
    return anp.reshape(gs[0], (-1,))[indices_of(fun, ans, args, kwargs)]


def transpose_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Apply the inverse transposition to the cotangent."""
    axes = args[1] if len(args) > 1 else kwargs.get("axes")
    if axes is None:
        return lambda g: (g.T,)
    if not isinstance(axes, (tuple, list)):
        return inherited_vjp(anp.transpose, argnums, ans, args, kwargs)
    # Autograd's rule doesn't support negative axes.
    axes = [axis % len(axes) for axis in axes]
    inverse = tuple(sorted(range(len(axes)), key=axes.__getitem__))
    return lambda g: ((anp if type(g) in BOX_TYPES else np).transpose(g, inverse),)


def roll_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Shift the cotangent in the opposite direction."""
    if argnums != (0,):
        return inherited_vjp(anp.roll, argnums, ans, args, kwargs)
    bound = dict(zip(("a", "shift", "axis"), args), **kwargs)
    shift, axis = bound["shift"], bound.get("axis")
    # Unsigned integers and the most negative ones have no opposite in their own dtype.
    opposite = [-exact_integer(s) for s in shift] if isinstance(shift, (tuple, list)) else -exact_integer(shift)
    return lambda g: ((anp if type(g) in BOX_TYPES else np).roll(g, opposite, axis=axis),)


def _cast_vjp(fun: Primitive, argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Cast the cotangent to the dtype of the argument; the derivative of a cast to integers or booleans is zero."""
    if not _is_inexact(ans):
        return lambda g: (None,)
    pull = inherited_vjp(fun, argnums, ans, args, kwargs)
    # NumPy warns of a cast that discards imaginary parts.
    is_real = getval(args[0]).dtype.kind != "c" and getval(ans).dtype.kind == "c"
    return (lambda g: pull(anp.real(g))) if is_real else pull


def _cast_jvp(fun: Primitive, argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Cast the tangent to the dtype of the result, or return zeros."""
    return linear_jvp(fun, argnums, gs, ans, args, kwargs) if _is_inexact(ans) else anp.zeros_like(gs[0])


def _is_inexact(x: Array) -> bool:
    return getval(x).dtype.kind in "fc"


def _explicit_order(fun: Primitive, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Replace order "A" or "K" of the value by "C" or "F": tangents and cotangents may have another memory layout."""
    place = 1 if fun is anp.ravel else 2
    order = args[place] if len(args) > place else kwargs.get("order")
    if order is None or order not in "AKak":
        return args, kwargs
    x: Any = getval(args[0])
    linear = len(np.shape(x)) < 2
    orders = [name for name in "CF" if linear or getattr(x.flags, f"{name.lower()}_contiguous")]
    if not orders and order in "Kk":
        raise refusal(fun, f"with order={order!r} of an array that isn't contiguous: use order='C' or 'F'")
    return args[:place], {**kwargs, "order": orders[0] if orders else "C"}


def _ordered_vjp(fun: Primitive, argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Restore the shape. CuPy accepts no `order` of None, which autograd's rules pass."""
    args, kwargs = _explicit_order(fun, args, kwargs)
    place = 1 if fun is anp.ravel else 2
    order = (args[place] if len(args) > place else kwargs.get("order")) or "C"
    shape = args[0].shape if hasattr(args[0], "shape") else np.shape(args[0])
    return lambda g: ((anp if type(g) in BOX_TYPES else np).reshape(g, shape, order=order),)


def _ordered_jvp(fun: Primitive, argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    return inherited_jvp(fun, argnums, gs, ans, *_explicit_order(fun, args, kwargs))


_REARRANGING = (anp.flip, anp.rot90, anp.rollaxis, anp.diag, anp.diagonal)
_SORTING = (anp.sort, anp.partition)
_CASTING = (_astype, cast)  # of host and device arrays
VJPS = {
    anp.split: partial(_split_vjp, None),
    anp.array_split: partial(_split_vjp, None),
    anp.vsplit: partial(_split_vjp, 0),
    anp.hsplit: partial(_split_vjp, 1),
    anp.dsplit: partial(_split_vjp, 2),
    anp.diff: diff_vjp,
    _primitive_gradient: gradient_vjp,
    anp.transpose: transpose_vjp,
    anp.roll: roll_vjp,
    anp.copy: lambda *_: one_unchanged,
    **{fun: partial(_cast_vjp, fun) for fun in _CASTING},
    **{fun: partial(_ordered_vjp, fun) for fun in (anp.reshape, anp.ravel)},
    **{fun: partial(_rearrangement_vjp, fun, _source_indices) for fun in _REARRANGING},
    **{fun: partial(_rearrangement_vjp, fun, _sorted_indices) for fun in _SORTING},
}
JVPS = {
    anp.diff: diff_jvp,
    anp.copy: partial(linear_jvp, anp.copy),
    **{fun: partial(_cast_jvp, fun) for fun in _CASTING},
    **{fun: partial(_ordered_jvp, fun) for fun in (anp.reshape, anp.ravel)},
    anp.flip: partial(_rearrangement_jvp, anp.flip, _source_indices),
    **{fun: partial(_rearrangement_jvp, fun, _sorted_indices) for fun in _SORTING},
}
