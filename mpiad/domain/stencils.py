"""`stencil`, `laplacian` and `correlate`: sums over the neighbors of each cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import factorial
from typing import Any

import numpy as np
from autograd.tracer import getval, isbox

from mpiad._typing import Array, LocalArray
from mpiad.domain.boundary import Boundary, Sides, sides_of
from mpiad.domain.decomposition import Decomposition, listed, per_dimension
from mpiad.domain.halo import Halo, fill_halo
from mpiad.domain.root_copies import require_own_block
from mpiad.domain.routes import IN_TURN
from mpiad.domain.stencil_sums import StencilSums, apply_stencil
from mpiad.domain.varying_stencil import varying_sum
from mpiad.transport.device_arrays import is_array

# Stencils: each cell's new value is a sum of its neighbors' values, with weights that are the same in all cells.


class Stencil:
    """A stencil on a domain; made by `Domain.stencil` and `Domain.laplacian`.

    Attributes
    ----------
    weights : array
        Of odd lengths; the center is the cell's own weight.
    radius : tuple of int
        Largest offset along each dimension.
    """

    def __init__(self, sums: StencilSums):
        self.sums, self.weights, self.radius = sums, sums.weights, sums.radius
        self._ranks = math.prod(sums.halo.geometry.partition.dims)

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
            If `u` isn't such an array.

        Ranks
        -----
        All ranks of the domain call it.

        Adjoint
        -------
        The stencil mirrored in its center; its values in halo cells are added to the cells that these are copies of.
        """
        self._checked(u, "Stencil")
        return apply_stencil(u, self.sums)

    def _checked(self, u: LocalArray, call: str) -> None:
        found = getval(u)
        shape = self.sums.halo.shape
        if not is_array(found) or found.dtype.kind not in "fc":
            raise TypeError(
                f"{call}: expected an array of floats or complex numbers of shape (..., *{shape}), but got "
                f"{type(found).__name__}{f' of {found.dtype}' if is_array(found) else ''}."
            )
        if found.shape[max(0, found.ndim - len(shape)) :] != shape:
            raise ValueError(
                f"{call}: expected an array of shape (..., *{shape}), this rank's block, but got {found.shape}."
            )
        require_own_block(u, shape, self._ranks, self.sums.halo.geometry.rank, call)

    def __repr__(self) -> str:
        return f"Stencil(radius={self.radius}, {np.count_nonzero(self.weights)} weights)"


class Stencils(Decomposition):
    """Operations of a domain on each cell and its neighbors."""

    def stencil(self, weights: Array, boundary: Boundary = "zero") -> Stencil:
        """Make an operator that adds up each cell's neighbors with weights, the same in all cells.

        Parameters
        ----------
        weights : real array with an odd length along each dimension of the grid
            The weights of the neighbors; the center is the cell's own.
        boundary : {"zero", "edge", "reflect"} or number, or a tuple
            Values beyond the sides, as in `exchange`, untraced.

        Returns
        -------
        Stencil
            ``stencil(u)`` exchanges what it needs (the domain's own halo doesn't matter) and returns an array like u. It is
            one step on the tape, in all modes and at any order; backwards it takes about as long as forwards.

        Raises
        ------
        TypeError, ValueError
            On all ranks, if the weights aren't such an array, or extend over more cells than the smallest block has.

        Ranks
        -----
        All ranks make it with the same arguments, and call it together.

        Adjoint
        -------
        The stencil mirrored in its center; its values in halo cells are added to the cells that these are copies of.
        """
        call = "Domain.stencil"
        found = np.asarray(weights)
        if isbox(weights) or found.dtype.kind not in "fiu":
            raise TypeError(
                f"{call}: weights must be an array of real numbers, untraced, but got {type(weights).__name__} of dtype "
                f"{found.dtype}. Domain.correlate is differentiable by its weights."
            )
        sides = sides_of(boundary, len(self.shape), call)
        if any(isbox(side.value) for pair in sides for side in pair):
            raise TypeError(f"{call}: a boundary value can't be traced here. Use Domain.exchange and slices.")
        return Stencil(StencilSums(found.astype(float), self._halo_for(found.shape, sides, call), sides))

    def laplacian(self, spacing: float | Sequence[float] = 1.0, *, order: int = 2, boundary: Boundary = "zero") -> Stencil:
        """Make the Laplacian by central differences, as an operator on fields.

        Parameters
        ----------
        spacing : float or one for each dimension
            Distance from cell to cell.
        order : {2, 4, 6, 8, ...}
            Order of accuracy in the spacing; order / 2 neighbors on each side are used.
        boundary : {"zero", "edge", "reflect"} or number, or a tuple
            As in `stencil`.

        Raises
        ------
        TypeError, ValueError
            On all ranks: for an odd order or a spacing of zero, and as `stencil`.

        Ranks
        -----
        As `stencil`.

        Adjoint
        -------
        As `stencil`; it is self-adjoint if cells beyond the sides are zero or those of the other end.

        References
        ----------
        B. Fornberg, "Generation of finite difference formulas on arbitrarily spaced grids", Mathematics of Computation 51
        (1988), table 1.

        Examples
        --------
        >>> domain = mpiad.Domain(12)
        >>> (x,) = domain.coordinates()
        >>> curvature = domain.laplacian(boundary="edge")(x**2)
        >>> print(domain.sum(curvature))
        0.0
        """
        ndim = len(self.shape)
        if order not in range(2, 42, 2):
            raise ValueError(f"Domain.laplacian: order must be even, from 2 to 40, but got {order!r}.")
        reach, along = order // 2, _second_difference(order)
        weights = np.zeros((order + 1,) * ndim)
        for axis, step in enumerate(per_dimension(spacing, ndim, "spacing")):
            if not float(step) > 0:
                raise ValueError(f"Domain.laplacian: spacing must be positive along each dimension, but got {spacing!r}.")
            line = [reach] * ndim
            line[axis] = slice(None)  # type: ignore[call-overload]
            weights[tuple(line)] += along / float(step) ** 2
        return self.stencil(weights, boundary)

    def correlate(self, u: LocalArray, weights: LocalArray, boundary: Boundary = "zero") -> LocalArray:
        """Add up each cell's neighbors with weights of its own.

        Parameters
        ----------
        u : array of shape (..., *local_shape)
        weights : array of shape (*lengths, *local_shape)
            Odd lengths, one for each dimension of the grid; ``weights[k]`` are the factors of the neighbors at offset k,
            for each cell. Differentiable.
        boundary : {"zero", "edge", "reflect"} or number, or a tuple
            Values beyond the sides, as in `exchange`, untraced.

        Returns
        -------
        array of shape (..., *local_shape)
            In cell i the sum over k of ``weights[k][i] * u[i + k - lengths // 2]``.

        Raises
        ------
        TypeError, ValueError
            If an array has another shape, or the weights extend over more cells than the smallest block has.

        Ranks
        -----
        All ranks call it.

        Adjoint
        -------
        Each cell's cotangent goes to its neighbors, times their weights, and to these weights, times the neighbors'
        values.
        """
        call = "Domain.correlate"
        ndim, u = len(self.shape), self._checked(u, self.local_shape, call)
        shape = np.shape(getval(weights))
        if len(shape) != 2 * ndim or shape[ndim:] != self.local_shape:
            raise ValueError(
                f"{call}: weights must have {ndim} odd lengths and then the block's shape, ({listed(self.local_shape)}), "
                f"but have {shape}."
            )
        sides = sides_of(boundary, ndim, call)
        halo = self._halo_for(shape[:ndim], sides, call)
        return varying_sum(fill_halo(u, halo, sides, IN_TURN), weights)

    def _halo_for(self, lengths: tuple[int, ...], sides: Sides, call: str) -> Halo:
        """Return a halo of the width that weights of these lengths need."""
        if len(lengths) != len(self.shape) or any(length % 2 == 0 for length in lengths):
            raise ValueError(
                f"{call}: weights must have an odd length along each of {len(self.shape)} dimensions, but have {lengths}."
            )
        radius = tuple(length // 2 for length in lengths)
        # Kept by width: the messages are the same for all stencils of one radius.
        known: dict[Any, Halo] = self.__dict__.setdefault("_halos", {})
        if radius not in known:
            for axis, (n, p, r) in enumerate(zip(self.shape, self.dims, radius)):
                if n // p < r:
                    raise ValueError(
                        f"{call}: the weights reach {r} cells along dimension {axis}, but the smallest of the {p} blocks "
                        f"of {n} cells has {n // p}. Use fewer ranks along it, or a larger grid."
                    )
            known[radius] = Halo(self._partition, self._channel.rank, radius, self.comm)
        self._check_reflection(sides, call, radius)
        return known[radius]


def _second_difference(order: int) -> np.ndarray:
    """Return the weights of the second derivative's central difference."""
    m = order // 2
    # The coefficients of `laplacian`'s reference, table 1, in closed form; with the one in the middle they add up to zero.
    side = [
        2.0 * (-1) ** (k + 1) * factorial(m) ** 2 / (k**2 * factorial(m - k) * factorial(m + k)) for k in range(1, m + 1)
    ]
    return np.array([*side[::-1], -2 * sum(side), *side])
