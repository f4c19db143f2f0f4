"""`stencil`, `laplacian` and `correlate`: sums over the neighbors of each cell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import factorial

import numpy as np
from autograd.extend import defjvp, defvjp, primitive
from autograd.tracer import getval, isbox

from mpiad._typing import Array, LocalArray, Shape
from mpiad.domain.boundary import Boundary, Sides, sides_of
from mpiad.domain.decomposition import Decomposition, check_reflection, checked_block, listed, per_dimension
from mpiad.domain.halo import Halo, fill_halo
from mpiad.domain.routes import BY_AXIS
from mpiad.domain.stencil_sums import StencilSums, apply_stencil
from mpiad.primitives.cotangents import tangent_of
from mpiad.transport.devices.device_arrays import empty_like, zeros_like


class Stencil:
    """A stencil on a domain; created by `Domain.stencil` and `Domain.laplacian`.

    Attributes
    ----------
    weights : array
        The weights of the neighbors, an odd number along each dimension; the center is the weight of the cell itself.
    radius : tuple of int
        Largest offset along each dimension.
    """

    def __init__(self, domain: Decomposition, sums: StencilSums):
        self._domain, self.sums, self.weights, self.radius = domain, sums, sums.weights, sums.radius

    def __call__(self, u: LocalArray) -> LocalArray:
        """Apply the stencil to a field.

        Parameters
        ----------
        u : float or complex array of shape (..., *local_shape)

        Returns
        -------
        array of the shape of `u`
            In cell i the sum over k of ``weights[k] * u[i + k - radius]``.

        Raises
        ------
        TypeError, ValueError
            If `u` isn't an array of this kind and shape.

        Ranks
        -----
        All ranks of the domain call it.

        Adjoint
        -------
        The stencil with reversed weights along each dimension; cotangents of halo cells are added to the cells they copy.
        """
        field = getval(checked_block(self._domain, u, "Stencil"))
        if field.dtype.kind not in "fc":
            kind = f"{type(field).__name__} of {field.dtype}"
            raise TypeError(f"Stencil: expected an array of floats or complex numbers, but got {kind}. Convert it.")
        return apply_stencil(u, self.sums)

    def __repr__(self) -> str:
        return f"Stencil(radius={self.radius}, {np.count_nonzero(self.weights)} weights)"


def stencil(domain: Decomposition, weights: Array, boundary: Boundary) -> Stencil:
    """See `Domain.stencil`."""
    call = "Domain.stencil"
    array = np.asarray(weights)
    if isbox(weights) or array.dtype.kind not in "fiu":
        raise TypeError(
            f"{call}: weights must be an array of real numbers, untraced, but got {type(weights).__name__} of dtype "
            f"{array.dtype}. For derivatives with respect to weights use Domain.correlate."
        )
    sides = sides_of(boundary, len(domain.shape), call)
    if any(isbox(side.value) for pair in sides for side in pair):
        raise TypeError(f"{call}: a boundary value can't be traced here. Use Domain.exchange and slices.")
    return Stencil(domain, StencilSums(array.astype(float), _halo_for(domain, array.shape, sides, call), sides))


def laplacian(domain: Decomposition, spacing: float | Sequence[float], order: int, boundary: Boundary) -> Stencil:
    """See `Domain.laplacian`."""
    ndim = len(domain.shape)
    if order not in range(2, 42, 2):
        raise ValueError(f"Domain.laplacian: order must be even, from 2 to 40, but got {order!r}.")
    m = order // 2
    # The closed form of the coefficients in table 1 of Fornberg (see `Domain.laplacian`). All weights add up to zero.
    side = [
        2.0 * (-1) ** (k + 1) * factorial(m) ** 2 / (k**2 * factorial(m - k) * factorial(m + k)) for k in range(1, m + 1)
    ]
    line_weights = np.array([*side[::-1], -2 * sum(side), *side])
    weights = np.zeros((order + 1,) * ndim)
    for axis, step in enumerate(per_dimension(spacing, ndim, "spacing")):
        if not float(step) > 0:
            raise ValueError(f"Domain.laplacian: spacing must be positive along each dimension, but got {spacing!r}.")
        np.moveaxis(weights, axis, -1)[(m,) * (ndim - 1)] += line_weights / float(step) ** 2
    return stencil(domain, weights, boundary)


def correlate(domain: Decomposition, u: LocalArray, weights: LocalArray, boundary: Boundary) -> LocalArray:
    """See `Domain.correlate`."""
    call = "Domain.correlate"
    ndim, u = len(domain.shape), checked_block(domain, u, call)
    shape = np.shape(getval(weights))
    if len(shape) != 2 * ndim or shape[ndim:] != domain.local_shape:
        raise ValueError(
            f"{call}: the shape of weights must be {ndim} odd lengths, followed by the block's shape, "
            f"({listed(domain.local_shape)}), but is {shape}."
        )
    sides = sides_of(boundary, ndim, call)
    halo = _halo_for(domain, shape[:ndim], sides, call)
    return varying_sum(fill_halo(u, halo, sides, BY_AXIS), weights)


def _halo_for(domain: Decomposition, lengths: tuple[int, ...], sides: Sides, call: str) -> Halo:
    """Return the halo that is needed by weights with these lengths along the dimensions."""
    if len(lengths) != len(domain.shape) or any(length % 2 == 0 for length in lengths):
        raise ValueError(
            f"{call}: weights must have an odd length along each of {len(domain.shape)} dimensions, but have {lengths}."
        )
    radius = tuple(length // 2 for length in lengths)
    for axis, (n, p, r) in enumerate(zip(domain.shape, domain.dims, radius)):
        if n // p < r:
            raise ValueError(
                f"{call}: the weights have radius {r} along dimension {axis}, but the smallest of the {p} blocks "
                f"of {n} cells has {n // p} cells. Use fewer ranks along this dimension, or a larger grid."
            )
    check_reflection(domain, sides, call, radius)
    return domain.halo_of(radius)


# Stencils with different weights in each cell, which are bilinear in the field and the weights.
#
# The derivatives of each of three maps are the other two maps: the sums y = Σ_k w_k u_k over shifted parts u_k of a padded
# field; the transpose, which adds w_k g to these parts; and the products g u_k, the derivative with respect to the weights.


@primitive
def varying_sum(padded: LocalArray, weights: LocalArray) -> LocalArray:
    """Return weighted sums, shape (..., *cells), of an array of shape (..., *padded), with weights (*lengths, *cells)."""
    lengths, cells = weights.shape[: weights.ndim // 2], weights.shape[weights.ndim // 2 :]
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
    lengths, cells = weights.shape[: weights.ndim // 2], weights.shape[weights.ndim // 2 :]
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


def _shifted_parts(lengths: Shape, cells: Shape) -> Iterator[tuple[Shape, tuple]]:
    """Yield each offset, and the index of the correspondingly shifted part of a padded array."""
    for offset in np.ndindex(lengths):
        yield offset, (..., *[slice(o, o + n) for o, n in zip(offset, cells)])


# Each map is the derivative of Σ g w u with respect to one factor, and linear in the other two.
defvjp(
    varying_sum,
    lambda ans, u, w: lambda g: tangent_of(u, varying_sum_transpose(g, w)),
    lambda ans, u, w: lambda g: tangent_of(w, products(g, u, w.ndim // 2)),
)
defvjp(
    varying_sum_transpose,
    lambda ans, g, w: lambda v: tangent_of(g, varying_sum(v, w)),
    lambda ans, g, w: lambda v: tangent_of(w, products(g, v, w.ndim // 2)),
)
defvjp(
    products,
    lambda ans, g, u, ndim: lambda v: tangent_of(g, varying_sum(u, v)),
    lambda ans, g, u, ndim: lambda v: tangent_of(u, varying_sum_transpose(g, v)),
)
for _map in (varying_sum, varying_sum_transpose, products):
    defjvp(_map, "same", "same")
