"""`stencil`, `laplacian` and `correlate`: sums over the neighbors of each cell."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import factorial

import numpy as np
from autograd.extend import defjvp, defvjp, primitive
from autograd.tracer import getval, isbox

from mpiad._typing import Array, Function, LocalArray
from mpiad.domain.boundary import Boundary, Sides, check_values, sides_of
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
            If `u` isn't an array of this kind and shape, or is real and a boundary value is complex.

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
        check_values(self.sums.sides, field.dtype, "Stencil")
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
    _require_untraced(sides, call)
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
    # Only the ranks with a physical side use the values, but all ranks raise.
    _require_untraced(sides, call)
    check_values(sides, u.dtype, call)
    return derivative(None, weights, fill_halo(u, halo, sides, BY_AXIS), ndim)


def _require_untraced(sides: Sides, call: str) -> None:
    if any(isbox(side.value) for pair in sides for side in pair):
        raise TypeError(f"{call}: a boundary value can't be traced here. Use Domain.exchange and slices.")


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


# Stencils with different weights in each cell.
#
# Let T(y, w, u) be the sum over k of ⟨y, w_k u_k⟩, with the weights w_k at offset k, and the parts u_k of a padded field
# that are shifted by k. The weighted sums Σ_k w_k u_k are the derivative of T with respect to y. T is linear in each
# factor, so the derivatives of its derivatives are again derivatives of T.


@primitive
def derivative(y: LocalArray, w: LocalArray, u: LocalArray, ndim: int) -> LocalArray:
    """Return the derivative of T with respect to the factor that is None, for a grid of `ndim` dimensions.

    The factors have the shapes (..., *cells), (*lengths, *cells) and (..., *padded).
    """
    first, second = (factor for factor in (y, w, u) if factor is not None)
    like = first[:0].astype(np.result_type(first.dtype, second.dtype))
    cells = w.shape[ndim:] if y is None else y.shape[y.ndim - ndim :]
    if w is None:
        lengths = tuple(m - n + 1 for m, n in zip(u.shape[u.ndim - ndim :], cells))
        found = empty_like(like, lengths + cells)
    else:
        lengths, padded = w.shape[:ndim], tuple(n + length - 1 for n, length in zip(cells, w.shape))
        lead = u.shape[: u.ndim - ndim] if y is None else y.shape[: y.ndim - ndim]
        found, scratch = zeros_like(like, lead + (cells if y is None else padded)), empty_like(like, lead + cells)
    for offset in np.ndindex(lengths):
        part = (..., *[slice(o, o + n) for o, n in zip(offset, cells)])
        if w is None:
            # The fields along leading axes share the weights, so the contributions of the fields are added.
            found[offset] = (y * u[part]).reshape(-1, *cells).sum(axis=0)
        else:
            np.multiply(u[part] if y is None else y, w[offset], out=scratch)
            found[... if y is None else part] += scratch
    return found


def _adjoint(k: int, ans: LocalArray, *args: Array) -> Function:
    """Return the function from the cotangent of the result, which replaces the factor None, to that of factor k."""

    def vjp(g: LocalArray) -> LocalArray:
        factors = [g if factor is None else factor for factor in args[:3]]
        factors[k] = None
        return tangent_of(args[k], derivative(*factors, args[3]))

    return vjp


defvjp(derivative, *[partial(_adjoint, k) for k in range(3)])
defjvp(derivative, "same", "same", "same")
