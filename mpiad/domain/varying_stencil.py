"""Stencils with different weights in each cell, which are bilinear in the field and the weights.

The derivatives of each of three maps are the other two maps: the sums y = Σ_k w_k u_k over shifted parts u_k of a padded
field; the transpose, which adds w_k g to these parts; and the products g u_k, the derivative with respect to the weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import autograd.numpy as anp
import numpy as np
from autograd.extend import defjvp, defvjp, primitive
from autograd.tracer import getval

from mpiad._typing import LocalArray, Shape
from mpiad.transport.devices.device_arrays import empty_like, zeros_like


@primitive
def varying_sum(padded: LocalArray, weights: LocalArray) -> LocalArray:
    """Return weighted sums, shape (..., *cells), of an array of shape (..., *padded), with weights (*lengths, *cells)."""
    lengths, cells = _shapes(weights)
    like, shape = _like_product(padded, weights), padded.shape[: padded.ndim - len(cells)] + cells
    total = zeros_like(like, shape)
    scratch = np.empty_like(total)
    for offset, part in _shifted_parts(lengths, cells):
        np.multiply(padded[part], weights[offset], out=scratch)
        total += scratch
    return total


@primitive
def varying_sum_transpose(g: LocalArray, weights: LocalArray) -> LocalArray:
    """Apply the transpose of `varying_sum`; return an array of shape (..., *padded)."""
    lengths, cells = _shapes(weights)
    padded = tuple(n + length - 1 for n, length in zip(cells, lengths))
    total = zeros_like(_like_product(g, weights), g.shape[: g.ndim - len(cells)] + padded)
    scratch = empty_like(total, g.shape)
    for offset, part in _shifted_parts(lengths, cells):
        np.multiply(g, weights[offset], out=scratch)
        total[part] += scratch
    return total


@primitive
def products(g: LocalArray, padded: LocalArray, ndim: int) -> LocalArray:
    """Return the derivative of `varying_sum` with respect to the weights, for a grid of `ndim` dimensions."""
    cells = g.shape[g.ndim - ndim :]
    lengths = tuple(m - n + 1 for m, n in zip(padded.shape[padded.ndim - ndim :], cells))
    total = empty_like(_like_product(g, padded), lengths + cells)
    for offset, part in _shifted_parts(lengths, cells):
        # The fields along leading axes share the weights, so the contributions of the fields are added.
        total[offset] = (g * padded[part]).reshape(-1, *cells).sum(axis=0)
    return total


def _like_product(x: LocalArray, y: LocalArray) -> LocalArray:
    """Return an array with the dtype of the product of x and y, and arbitrary shape and values."""
    dtype = np.result_type(x.dtype, y.dtype)
    return x if x.dtype == dtype else y if y.dtype == dtype else x[:0].astype(dtype)


def _shapes(weights: LocalArray) -> tuple[Shape, Shape]:
    ndim = weights.ndim // 2
    return weights.shape[:ndim], weights.shape[ndim:]


def _shifted_parts(lengths: Shape, cells: Shape) -> Iterator[tuple[Shape, tuple]]:
    """Yield each offset, and the index of the correspondingly shifted part of a padded array."""
    for offset in np.ndindex(lengths):
        yield offset, (..., *[slice(o, o + n) for o, n in zip(offset, cells)])


def _with_dtype_of(value: LocalArray, x: LocalArray) -> LocalArray:
    """Return `value` with the dtype of `x`; if `x` is real, the real part."""
    value = anp.real(value) if np.iscomplexobj(getval(value)) and not np.iscomplexobj(getval(x)) else value
    dtype = getval(x).dtype
    return value if getval(value).dtype == dtype else value.astype(dtype)


# Each map is the derivative of Σ g w u with respect to one factor, and linear in the other two.
defvjp(
    varying_sum,
    lambda ans, u, w: lambda g: _with_dtype_of(varying_sum_transpose(g, w), u),
    lambda ans, u, w: lambda g: _with_dtype_of(products(g, u, w.ndim // 2), w),
)
defvjp(
    varying_sum_transpose,
    lambda ans, g, w: lambda v: _with_dtype_of(varying_sum(v, w), g),
    lambda ans, g, w: lambda v: _with_dtype_of(products(g, v, w.ndim // 2), w),
)
defvjp(
    products,
    lambda ans, g, u, ndim: lambda v: _with_dtype_of(varying_sum(u, v), g),
    lambda ans, g, u, ndim: lambda v: _with_dtype_of(varying_sum_transpose(g, v), u),
)
for _map in (varying_sum, varying_sum_transpose, products):
    defjvp(
        _map,
        lambda g, ans, a, b, *ndim, fun=_map: fun(g, b, *ndim),
        lambda g, ans, a, b, *ndim, fun=_map: fun(a, g, *ndim),
    )
