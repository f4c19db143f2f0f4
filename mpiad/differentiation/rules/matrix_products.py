"""Products: `dot`, `inner`, `matmul`, `tensordot` and `vdot`; outer, Kronecker and cross products.

Products of factors with more than two axes have the adjoint of `einsum`. `dot` and `matmul` of such an array and a matrix
are computed as one product of two matrices: NumPy's `matmul` calls BLAS for each matrix of a stack, and `dot` for each pair
of vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from string import ascii_letters
from typing import Any

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.differentiation.rules.broadcasting import fitted
from mpiad.differentiation.rules.einsum import einsum_vjp
from mpiad.differentiation.rules.protocol import (
    BOX_TYPES,
    Argnums,
    Primitive,
    Vjp,
    anp,
    bound,
    composition,
    inherited_vjp,
    refusal,
    substitute,
)
from mpiad.transport.devices.device_arrays import is_device_array


def _product_vjp(fun: Primitive, argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Multiply the cotangent by the other factor, transposed."""
    if fun is not anp.tensordot and (kwargs or len(args) != 2):
        return inherited_vjp(fun, argnums, ans, args, kwargs)
    x, y = args[:2]
    a, b = getval(x), getval(y)
    # If the dtypes differ, the cotangents must be cast.
    same_kind = type(a) is type(b) and (type(a) is np.ndarray or is_device_array(a)) and a.dtype == b.dtype
    axes = (a.ndim, b.ndim) if same_kind and fun in (anp.dot, anp.matmul) else None
    if axes not in _RULES:
        subscripts = _subscripts(fun, args, kwargs, len(anp.shape(x)), len(anp.shape(y)))
        return einsum_vjp(tuple([i + 1 for i in argnums]), ans, (subscripts, x, y), {})
    rules = _RULES[axes]
    return lambda g: tuple([rules[i](g, args[1 - i]) for i in argnums])


def _dot(x: Array, y: Array) -> Array:
    return anp.dot(x, y) if type(x) in BOX_TYPES or type(y) in BOX_TYPES else np.dot(x, y)


# For the factors' numbers of axes, functions of the product's cotangent and the other factor, which return the cotangent of
# the first and of the second factor.
_RULES: Any = {
    (1, 1): (lambda g, y: g * y, lambda g, x: g * x),
    (2, 1): (lambda g, y: g[:, None] * y, lambda g, x: _dot(x.T, g)),
    (1, 2): (lambda g, y: _dot(y, g), lambda g, x: x[:, None] * g),
    (2, 2): (lambda g, y: _dot(g, y.T), lambda g, x: _dot(x.T, g)),
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
    letters = ascii_letters[: 2 * n]
    subscripts = f"{letters[::2]},{letters[1::2]}->{letters}"
    pull = einsum_vjp(tuple([i + 1 for i in argnums]), ans, (subscripts, x, y), {})
    return lambda g: tuple([anp.reshape(h, anp.shape(args[i])) for i, h in zip(argnums, pull(anp.reshape(g, split)))])


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


def vdot_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Multiply the cotangent by the other factor; the first factor of the product is conjugated."""
    x, y = args
    parts = (lambda g: anp.conj(g * y), lambda g: g * anp.conj(x))
    return lambda g: tuple([fitted(anp.reshape(parts[i](g), anp.shape(args[i])), args[i]) for i in argnums])


def vdot_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Apply the product to the tangent of each factor."""
    return sum([anp.vdot(*args[:i], g, *args[i + 1 :]) for i, g in zip(argnums, gs)])


@composition(anp.linalg.multi_dot)
def multi_dot(arrays: Sequence[Array]) -> Array:
    """Return `numpy.linalg.multi_dot`: the product with the fewest multiplications."""
    shapes = [anp.shape(x) for x in arrays]
    ndims = [len(shape) for shape in shapes]
    if len(arrays) == 2:
        return anp.dot(*arrays)
    if len(arrays) < 2 or not {ndims[0], ndims[-1]} <= {1, 2} or set(ndims[1:-1]) != {2}:
        raise ValueError(f"multi_dot: expected matrices, or vectors as first and last factor, but got shapes {shapes}.")
    lengths = [1 if len(shapes[0]) == 1 else shapes[0][0], *[shape[0] for shape in shapes[1:]]]
    lengths.append(1 if len(shapes[-1]) == 1 else shapes[-1][1])

    @cache
    def cheapest(i: int, j: int) -> tuple[int, int]:
        """Return the number of multiplications of the product of the arrays from i to j - 1, and where it is divided."""
        sides = [(cheapest(i, k)[0] + cheapest(k, j)[0] + lengths[i] * lengths[k] * lengths[j], k) for k in range(i + 1, j)]
        return min(sides, default=(0, i))

    def product(i: int, j: int) -> Array:
        k = cheapest(i, j)[1]
        return arrays[i] if j - i == 1 else anp.dot(product(i, k), product(k, j))

    return product(0, len(arrays))


def _subscripts(fun: Primitive, args: tuple, kwargs: dict, n: int, m: int) -> str:
    """Return the subscripts of a product, as for `einsum`, of factors with `n` and `m` axes."""
    if fun is anp.matmul:
        return f"{'...i' if n > 1 else ''}j,{'...jk' if m > 1 else 'j'}->...{'i' if n > 1 else ''}{'k' if m > 1 else ''}"
    axes: Any = args[2] if len(args) > 2 else kwargs.get("axes", 2)
    if fun is not anp.tensordot:
        axes = ([n - 1], [m - 2 if fun is anp.dot and m > 1 else m - 1]) if n and m else 0
    if isinstance(axes, (int, np.integer)):
        axes = range(n - axes, n), range(axes)
    x, y = list(ascii_letters[:n]), list(ascii_letters[n : n + m])
    for i, j in zip(*map(np.ravel, axes)):
        y[j] = x[i]
    free = [letter for letter in x + y if (letter in x) != (letter in y)]
    return f"{''.join(x)},{''.join(y)}->{''.join(free)}"


def _flattened(fun: Callable, *args: Any, **kwargs: Any) -> Array:
    """Compute a product; of an array of matrices and a matrix, as one product of matrices."""
    x, y = args[:2]
    if type(x) is type(y) is np.ndarray and y.ndim == 2 < x.ndim and x.flags.c_contiguous and not kwargs and len(args) == 2:
        rows = x.shape[:-1]
        return fun(np.reshape(x, (math.prod(rows), x.shape[-1])), y).reshape(*rows, y.shape[1])
    return fun(*args, **kwargs)


VJPS = {fun: partial(_product_vjp, fun) for fun in (anp.dot, anp.inner, anp.matmul, anp.tensordot)}
VJPS.update({anp.outer: outer_vjp, anp.kron: kron_vjp, anp.cross: cross_vjp, anp.vdot: vdot_vjp})
JVPS = {anp.vdot: vdot_jvp}
for _fun in (anp.dot, anp.matmul):
    substitute(_fun, partial(_flattened, _fun.fun))
