"""Products of vectors and matrices: `dot` and `matmul` of factors with one or two axes each; outer and cross products."""

from __future__ import annotations

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.differentiation.rules.broadcasting import fitted
from mpiad.differentiation.rules.protocol import (
    BOX_TYPES,
    Argnums,
    Primitive,
    Vjp,
    VjpMaker,
    anp,
    bound,
    inherited_vjp,
    refusal,
    two_unchanged,
)
from mpiad.transport.device_arrays import is_device_array


def _product_vjp(fun: Primitive) -> VjpMaker:
    def product_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
        """Multiply the cotangent by the other factor, transposed."""
        # Where a factor was cast, its cotangent must be cast back, which autograd's rule does.
        if kwargs or len(args) != 2 or not _same_kind(args[0], args[1]):
            return inherited_vjp(fun, argnums, ans, args, kwargs)
        x, y = args
        axes = (x.ndim, y.ndim)
        if axes not in _FIRST:
            return inherited_vjp(fun, argnums, ans, args, kwargs)
        if len(argnums) == 2:
            # x · x: both cotangents are g x, computed once; they share memory, so neither may be changed.
            if x is y and axes == (1, 1):
                return lambda g: two_unchanged(g * x)
            first, second = _FIRST[axes], _SECOND[axes]
            return lambda g: (first(g, y), second(g, x))
        if argnums[0] == 0:
            rule, other = _FIRST[axes], y
        else:
            rule, other = _SECOND[axes], x
        return lambda g: (rule(g, other),)

    return product_vjp


def _same_kind(x: Array, y: Array) -> bool:
    x, y = getval(x), getval(y)
    return type(x) is type(y) and (type(x) is np.ndarray or is_device_array(x)) and x.dtype == y.dtype


def _times(g: Array, other: Array) -> Array:
    return g * other


def _row_times_transpose(g: Array, y: Array) -> Array:
    return _dot(g, y.T)


def _transpose_times(g: Array, x: Array) -> Array:
    return _dot(x.T, g)


def _outer(g: Array, y: Array) -> Array:
    return g[:, None] * y


def _reversed_outer(g: Array, x: Array) -> Array:
    return x[:, None] * g


def _dot(x: Array, y: Array) -> Array:
    return anp.dot(x, y) if type(x) in BOX_TYPES or type(y) in BOX_TYPES else np.dot(x, y)


# By the factors' numbers of axes: from the cotangent and the other factor to the cotangent of the first ...
_FIRST = {(1, 1): _times, (2, 1): _outer, (1, 2): lambda g, y: _dot(y, g), (2, 2): _row_times_transpose}
# ... and of the second.
_SECOND = {(1, 1): _times, (2, 1): _transpose_times, (1, 2): _reversed_outer, (2, 2): _transpose_times}


def outer_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Multiply the cotangent by the other factor, flattened as the product takes it."""
    x, y = bound(anp.outer, "a b", args, kwargs).values()
    parts = (lambda g: anp.dot(g, anp.ravel(y)), lambda g: anp.dot(anp.ravel(x), g))
    return lambda g: tuple([fitted(anp.reshape(parts[i](g), anp.shape(args[i])), args[i]) for i in argnums])


def kron_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Multiply each block of the cotangent by the other factor, and add up over what the factor doesn't have."""
    n = len(ans.shape)
    x, y = [anp.reshape(z, (1,) * (n - len(anp.shape(z))) + anp.shape(z)) for z in args]
    split = [m for pair in zip(x.shape, y.shape) for m in pair]
    order = (*range(0, 2 * n, 2), *range(1, 2 * n, 2))  # the axes of x, then those of y

    def part(i: int, g: Array) -> Array:
        blocks = anp.transpose(anp.reshape(g, split), order)
        found = anp.tensordot(blocks, y, n) if i == 0 else anp.tensordot(x, blocks, n)
        return fitted(anp.reshape(found, anp.shape(args[i])), args[i])

    return lambda g: tuple([part(i, g) for i in argnums])


def cross_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Multiply the cotangent by the other factor in the other order: g·(x × y) = x·(y × g) = y·(g × x)."""
    given = bound(anp.cross, "a b axisa axisb axisc axis", args, kwargs)
    axes = [given.get(name, -1) if given.get("axis") is None else given["axis"] for name in ("axisa", "axisb", "axisc")]
    if any(anp.shape(given[name])[axis] != 3 for name, axis in zip("ab", axes)):
        raise refusal(anp.cross, "for vectors of two elements: write the product out")
    x, y = (anp.moveaxis(given[name], axis, -1) for name, axis in zip("ab", axes))

    def part(i: int, g: Array) -> Array:
        g = anp.moveaxis(g, axes[2], -1)
        return anp.moveaxis(fitted(anp.cross(y, g), x) if i == 0 else fitted(anp.cross(g, x), y), -1, axes[i])

    return lambda g: tuple([part(i, g) for i in argnums])


VJPS = {anp.dot: _product_vjp(anp.dot), anp.matmul: _product_vjp(anp.matmul)}
VJPS.update({anp.outer: outer_vjp, anp.kron: kron_vjp, anp.cross: cross_vjp})
JVPS: dict = {}
