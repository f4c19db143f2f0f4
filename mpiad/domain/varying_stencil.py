"""Stencils whose weights differ from cell to cell: bilinear in the field and the weights.

Three maps, each written out once, are each other's derivatives: the weighted sums y = Σ_k w_k u_k over shifted pieces u_k
of a padded field, the transpose that adds w_k g to these pieces, and the products g u_k, the derivative with respect to
the weights. They don't communicate; the exchange around them does.
"""

from __future__ import annotations

from collections.abc import Iterator

import autograd.numpy as anp
import numpy as np
from autograd.extend import defjvp, defvjp, primitive
from autograd.tracer import getval

from mpiad._typing import LocalArray, Shape
from mpiad.transport.buffers import empty_like, zeros_like


@primitive
def varying_sum(padded: LocalArray, weights: LocalArray) -> LocalArray:
    """Return the sums (..., *cells) of an array (..., *padded) by weights (*lengths, *cells) of odd lengths."""
    lengths, cells = _shapes(weights)
    like, shape = _wider(padded, weights), padded.shape[: padded.ndim - len(cells)] + cells
    total = zeros_like(like, shape)
    # One array for all products, instead of a new one for each offset.
    room = np.empty_like(total)
    for offset, piece in _pieces(lengths, cells):
        np.multiply(padded[piece], weights[offset], out=room)
        total += room
    return total


@primitive
def spread(g: LocalArray, weights: LocalArray) -> LocalArray:
    """Return the transpose of the weighted sums: an array of shape (..., *padded)."""
    lengths, cells = _shapes(weights)
    padded = tuple(n + length - 1 for n, length in zip(cells, lengths))
    total = zeros_like(_wider(g, weights), g.shape[: g.ndim - len(cells)] + padded)
    room = empty_like(total, g.shape)
    for offset, piece in _pieces(lengths, cells):
        np.multiply(g, weights[offset], out=room)
        total[piece] += room
    return total


@primitive
def products(g: LocalArray, padded: LocalArray, ndim: int) -> LocalArray:
    """Return the derivative with respect to the weights: the grid has the last `ndim` dimensions."""
    cells = g.shape[g.ndim - ndim :]
    lengths = tuple(m - n + 1 for m, n in zip(padded.shape[padded.ndim - ndim :], cells))
    total = empty_like(_wider(g, padded), lengths + cells)
    for offset, piece in _pieces(lengths, cells):
        # Fields along leading axes share the weights, so their cotangents add up.
        total[offset] = (g * padded[piece]).reshape(-1, *cells).sum(axis=0)
    return total


def _wider(x: LocalArray, y: LocalArray) -> LocalArray:
    """Return one of two arrays, or an empty one, with the dtype of their product, on their device."""
    dtype = np.result_type(x.dtype, y.dtype)
    return x if x.dtype == dtype else y if y.dtype == dtype else x[:0].astype(dtype)


def _shapes(weights: LocalArray) -> tuple[Shape, Shape]:
    ndim = weights.ndim // 2
    return weights.shape[:ndim], weights.shape[ndim:]


def _pieces(lengths: Shape, cells: Shape) -> Iterator[tuple[Shape, tuple]]:
    """Return each offset with the index of the shifted piece of a padded array."""
    for offset in np.ndindex(lengths):
        yield offset, (..., *[slice(o, o + n) for o, n in zip(offset, cells)])


def _of_kind(value: LocalArray, x: LocalArray) -> LocalArray:
    """Return the real part of `value` if `x` is real, else `value`."""
    return anp.real(value) if np.iscomplexobj(getval(value)) and not np.iscomplexobj(getval(x)) else value


# Each map is the derivative of Σ g w u with respect to one factor, and linear in the other two.
defvjp(
    varying_sum,
    lambda ans, u, w: lambda g: _of_kind(spread(g, w), u),
    lambda ans, u, w: lambda g: _of_kind(products(g, u, w.ndim // 2), w),
)
defvjp(
    spread,
    lambda ans, g, w: lambda v: _of_kind(varying_sum(v, w), g),
    lambda ans, g, w: lambda v: _of_kind(products(g, v, w.ndim // 2), w),
)
defvjp(
    products,
    lambda ans, g, u, ndim: lambda v: _of_kind(varying_sum(u, v), g),
    lambda ans, g, u, ndim: lambda v: _of_kind(spread(g, v), u),
)
for _map in (varying_sum, spread, products):
    defjvp(
        _map,
        lambda g, ans, a, b, *ndim, fun=_map: fun(g, b, *ndim),
        lambda g, ans, a, b, *ndim, fun=_map: fun(a, g, *ndim),
    )
