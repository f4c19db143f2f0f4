"""Products: `dot` and `matmul` of vectors and matrices; outer, Kronecker and cross products.

For device arrays the rules also support `dot`, `inner` and `tensordot` of factors with any numbers of axes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.differentiation.rules.broadcasting import fitted
from mpiad.differentiation.rules.protocol import (
    BOX_TYPES,
    DEVICE_VJPS,
    Argnums,
    Primitive,
    Vjp,
    anp,
    bound,
    inherited_vjp,
    refusal,
    two_unchanged,
)
from mpiad.transport.devices.device_arrays import is_device_array

Axes = tuple[tuple[int, ...], tuple[int, ...]]
AxesRule = Callable[[tuple, dict, int, int], Axes]
"""A function of args, kwargs and the two factors' numbers of axes; it returns the summed axes of each factor."""


def _product_vjp(fun: Primitive, argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Multiply the cotangent by the other factor, transposed."""
    if kwargs or len(args) != 2:
        return inherited_vjp(fun, argnums, ans, args, kwargs)
    x, y = args
    a, b = getval(x), getval(y)
    # If the dtypes differ, the cotangents must be cast; autograd's rule does this.
    same_kind = type(a) is type(b) and (type(a) is np.ndarray or is_device_array(a)) and a.dtype == b.dtype
    axes = (a.ndim, b.ndim) if same_kind else None
    if axes not in _FIRST:
        return inherited_vjp(fun, argnums, ans, args, kwargs)
    if len(argnums) == 2:
        if x is y and axes == (1, 1):
            return lambda g: two_unchanged(g * x)
        first, second = _FIRST[axes], _SECOND[axes]
        return lambda g: (first(g, y), second(g, x))
    rule, other = (_FIRST[axes], y) if argnums[0] == 0 else (_SECOND[axes], x)
    return lambda g: (rule(g, other),)


def _dot(x: Array, y: Array) -> Array:
    return anp.dot(x, y) if type(x) in BOX_TYPES or type(y) in BOX_TYPES else np.dot(x, y)


# Functions of the product's cotangent and the other factor, which return the cotangent of the first or second factor.
# The keys are the factors' numbers of axes.
_FIRST: Any = {
    (1, 1): lambda g, y: g * y,
    (2, 1): lambda g, y: g[:, None] * y,
    (1, 2): lambda g, y: _dot(y, g),
    (2, 2): lambda g, y: _dot(g, y.T),
}
_SECOND: Any = {
    (1, 1): lambda g, x: g * x,
    (2, 1): lambda g, x: _dot(x.T, g),
    (1, 2): lambda g, x: x[:, None] * g,
    (2, 2): lambda g, x: _dot(x.T, g),
}


def outer_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Multiply the cotangent by the other factor, flattened."""
    x, y = bound(anp.outer, "a b", args, kwargs).values()
    parts = (lambda g: anp.dot(g, anp.ravel(y)), lambda g: anp.dot(anp.ravel(x), g))
    return lambda g: tuple([fitted(anp.reshape(parts[i](g), anp.shape(args[i])), args[i]) for i in argnums])


def kron_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Contract the blocks of the cotangent with the other factor."""
    n = len(ans.shape)
    x, y = [anp.reshape(z, (1,) * (n - len(anp.shape(z))) + anp.shape(z)) for z in args]
    split = [m for pair in zip(x.shape, y.shape) for m in pair]
    order = (*range(0, 2 * n, 2), *range(1, 2 * n, 2))  # the axes of x, then those of y

    def part(i: int, g: Array) -> Array:
        blocks = anp.transpose(anp.reshape(g, split), order)
        product = anp.tensordot(blocks, y, n) if i == 0 else anp.tensordot(x, blocks, n)
        return fitted(anp.reshape(product, anp.shape(args[i])), args[i])

    return lambda g: tuple([part(i, g) for i in argnums])


def cross_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Return y × g for x and g × x for y, since g·(x × y) = x·(y × g) = y·(g × x)."""
    named = bound(anp.cross, "a b axisa axisb axisc axis", args, kwargs)
    axes = [named.get(name, -1) if named.get("axis") is None else named["axis"] for name in ("axisa", "axisb", "axisc")]
    if any(anp.shape(named[name])[axis] != 3 for name, axis in zip("ab", axes)):
        raise refusal(anp.cross, "for vectors of two elements: write the formula of the product")
    x, y = (anp.moveaxis(named[name], axis, -1) for name, axis in zip("ab", axes))

    def part(i: int, g: Array) -> Array:
        g = anp.moveaxis(g, axes[2], -1)
        return anp.moveaxis(fitted(anp.cross(y, g), x) if i == 0 else fitted(anp.cross(g, x), y), -1, axes[i])

    return lambda g: tuple([part(i, g) for i in argnums])


def _contraction_vjp(axes_of: AxesRule, argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Contract the cotangent with the other factor, over all axes of the result that come from the other factor."""
    x, y = args[0], args[1]
    ndim_x, ndim_y = len(anp.shape(x)), len(anp.shape(y))
    if ndim_x == 0 or ndim_y == 0:

        def part(i: int, g: Array) -> Array:
            return g * args[1 - i]
    else:
        axes_x, axes_y = axes_of(args, kwargs, ndim_x, ndim_y)
        free_x = tuple([i for i in range(ndim_x) if i not in axes_x])
        free_y = tuple([j for j in range(ndim_y) if j not in axes_y])

        def part(i: int, g: Array) -> Array:
            # The free axes of factor i come from `g`. Its summed axes come from the other factor, in that factor's order.
            if i == 0:
                out = anp.tensordot(g, y, (tuple(range(len(free_x), len(free_x) + len(free_y))), free_y))
                return _permuted(out, [*free_x, *[axes_x[axes_y.index(j)] for j in sorted(axes_y)]])
            out = anp.tensordot(x, g, (free_x, tuple(range(len(free_x)))))
            return _permuted(out, [*[axes_y[axes_x.index(k)] for k in sorted(axes_x)], *free_y])

    return lambda g: tuple([fitted(part(i, g), args[i]) for i in argnums])


def _permuted(out: Array, axes: list[int]) -> Array:
    """Transpose an array whose axis k is axis `axes[k]` of a factor."""
    inverse = tuple(sorted(range(len(axes)), key=axes.__getitem__))
    return out if inverse == tuple(range(len(axes))) else anp.transpose(out, inverse)


def _tensordot_axes(args: tuple, kwargs: dict, ndim_x: int, ndim_y: int) -> Axes:
    axes: Any = args[2] if len(args) > 2 else kwargs.get("axes", 2)
    if isinstance(axes, int):
        return tuple(range(ndim_x - axes, ndim_x)), tuple(range(axes))
    first, second = ([axis] if isinstance(axis, int) else axis for axis in axes)
    return tuple([int(i) % ndim_x for i in first]), tuple([int(j) % ndim_y for j in second])


VJPS = {fun: partial(_product_vjp, fun) for fun in (anp.dot, anp.matmul)}
VJPS.update({anp.outer: outer_vjp, anp.kron: kron_vjp, anp.cross: cross_vjp})
JVPS: dict = {}
_AXES: dict[Primitive, AxesRule] = {
    anp.dot: lambda args, kwargs, n, m: ((n - 1,), (max(m - 2, 0),)),
    anp.inner: lambda args, kwargs, n, m: ((n - 1,), (m - 1,)),
    anp.tensordot: _tensordot_axes,
}
DEVICE_VJPS.update({fun: partial(_contraction_vjp, axes_of) for fun, axes_of in _AXES.items()})
