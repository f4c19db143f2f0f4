"""`stencil`, `laplacian` and `correlate`: sums over the neighbors of each cell."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import factorial
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval, isbox

from mpiad._typing import Array, LocalArray
from mpiad.domain.boundary import Boundary, Sides, sides_of
from mpiad.domain.decomposition import Decomposition, listed, per_dimension
from mpiad.domain.halo import Halo, fill_halo
from mpiad.domain.root_copies import require_own_block
from mpiad.domain.routes import IN_TURN
from mpiad.domain.stencil_sums import StencilSums, apply_stencil, transposed_stencil
from mpiad.domain.varying_stencil import varying_sum
from mpiad.domain.weighted_sum import Finish
from mpiad.extend import custom_operator, defjvp, defjvp_together, defvjp, defvjp_together
from mpiad.primitives.cotangents import tangent_of
from mpiad.transport.buffers import empty_beside, zeros_beside
from mpiad.transport.device_arrays import is_array
from mpiad.transport.tracing import tracing

# Stencils: each cell's new value is a sum of its neighbors' values, with weights that are the same in all cells.


# A step of a wave equation, u' = 2 u - u₋ + f S u, as one operator: memory traffic dominates its time.
#
# As separate operations, a step makes four arrays besides S u, and its reverse pass adds up five cotangents of u. Here S u
# is completed in place, as a whole or slab by slab while a slab is in the cache (see `Finish`), and the adjoint,
#
#     ū = 2 g + Sᵀ (f g),   ū₋ = -g,   f̄ = g S u
#
# is one pass of the transposed stencil. S u is kept for f̄ while a tape records, so that no message is sent twice; in
# nested traces it is computed again, as part of them.


@custom_operator
def advance(u: LocalArray, before: LocalArray, factor: LocalArray, stencil: StencilSums, kept: list | None) -> LocalArray:
    """Return 2 u - before + factor S u; store S u in `kept`, if given."""
    factors = np.broadcast_to(factor, u.shape)
    sums = None if kept is None else empty_beside(u, u.shape)
    out = stencil.summed(u, finish=Finish(u, before, factors, sums))
    if kept is not None:
        kept[:] = [sums]
    return out


@custom_operator
def retreat(g: LocalArray, factor: LocalArray, stencil: StencilSums) -> LocalArray:
    """Return 2 g + Sᵀ (factor g), the cotangent of u."""
    factors = np.broadcast_to(factor, g.shape)
    # Cotangents of copies beyond a side are added to their sources separately: a pass of the stencil doesn't do that.
    if stencil.copies_sides:
        return stencil.spread(g * factors) + 2.0 * g
    return stencil.mirrored.summed(g, factors, Finish(g))


def _advance_adjoint(
    ans: LocalArray, u: LocalArray, before: LocalArray, factor: LocalArray, stencil: StencilSums, kept: list | None
) -> Callable:
    def vjp(g: LocalArray) -> list:
        product = _like(g * _sums(u, stencil, kept), factor)
        return [retreat(g, factor, stencil=stencil), -g, product]

    return vjp


def _sums(u: LocalArray, stencil: StencilSums, kept: list | None) -> LocalArray:
    # All ranks decide alike: whether a tape is current is the same on all of them; whether u is traced may differ.
    # S u was computed in the forward pass; if outer traces need derivatives of it, it is computed again as part of them.
    return kept[0] if kept and tracing.tape is None and not isbox(u) else apply_stencil(u, stencil)


def _advance_tangent(
    gs: list, ans: LocalArray, u: LocalArray, before: LocalArray, factor: LocalArray, stencil: StencilSums,
    kept: list | None,
) -> LocalArray:  # fmt: skip
    du, dbefore = tangent_of(u, gs[0]), tangent_of(before, gs[1])
    moved = advance(du, dbefore, factor, stencil=stencil.homogeneous, kept=None)
    return moved + tangent_of(factor, gs[2]) * apply_stencil(u, stencil)


defvjp_together(advance, _advance_adjoint)
defjvp_together(advance, _advance_tangent)
# Linear in g and in the factor, and the transpose in g of the step's linear part.
defvjp(
    retreat,
    lambda ans, g, factor, stencil: lambda v: _linear(v, factor, stencil),
    lambda ans, g, factor, stencil: lambda v: _like(g * apply_stencil(v, stencil.homogeneous), factor),
)
defjvp(
    retreat,
    lambda dg, ans, g, factor, stencil: retreat(dg, factor, stencil=stencil),
    lambda df, ans, g, factor, stencil: transposed_stencil(df * g, stencil),
)


def _linear(v: LocalArray, factor: LocalArray, stencil: StencilSums) -> LocalArray:
    found = getval(v)
    return advance(v, zeros_beside(found, found.shape), factor, stencil=stencil.homogeneous, kept=None)


def _like(value: LocalArray, factor: LocalArray) -> LocalArray:
    """Return the sum over the leading dimensions that a factor lacks."""
    extra = np.ndim(getval(value)) - np.ndim(getval(factor))
    return anp.sum(value, axis=tuple(range(extra))) if extra else value


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

    def leapfrog(self, u: LocalArray, before: LocalArray, factor: LocalArray) -> LocalArray:
        """Take a step of a wave: ``2 * u - before + factor * stencil(u)``, in a fraction of the passes through memory.

        Parameters
        ----------
        u, before : float or complex array of shape (..., *local_shape)
            The current field and that of the previous step, of one shape.
        factor : array of shape (*local_shape), or of the shape of `u`
            For the wave equation the square of the speed times the step.

        Returns
        -------
        array of the shape of `u`

        Raises
        ------
        TypeError, ValueError
            If an array has another shape, or they differ in dtype.

        Ranks
        -----
        All ranks of the domain call it.

        Adjoint
        -------
        With Sᵀ the stencil's transpose and g the cotangent of the result, ``2 * g + Sᵀ(factor * g)`` goes to `u`, ``-g`` to
        `before` and ``g * stencil(u)`` to `factor`.
        """
        self._checked(u, "Stencil.leapfrog")
        found = [getval(each) for each in (u, before, factor)]
        shapes, dtypes = [np.shape(each) for each in found], {np.result_type(each) for each in found}
        if shapes[1] != shapes[0] or shapes[2] not in (shapes[0], self.sums.halo.shape):
            raise ValueError(
                f"Stencil.leapfrog: u and before must have one shape, and factor that or the block's, "
                f"{self.sums.halo.shape}, but they have {shapes[0]}, {shapes[1]} and {shapes[2]}."
            )
        if len(dtypes) > 1:
            raise TypeError(
                f"Stencil.leapfrog: u, before and factor must have one dtype, but have "
                f"{', '.join(str(np.result_type(each)) for each in found)}. Convert them."
            )
        # Without a derivative nothing is kept: a wave of a thousand steps would hold a thousand fields.
        recorded = tracing.tape is not None or any(map(isbox, (u, before, factor)))
        return advance(u, before, factor, stencil=self.sums, kept=[] if recorded else None)

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
