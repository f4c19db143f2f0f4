"""Stencils: each cell's new value is a sum of its neighbours' values, with weights that are the same in all cells."""

from __future__ import annotations

import math

import numpy as np
from autograd.tracer import getval, isbox

from mpiad._typing import LocalArray
from mpiad.domain.leapfrog import advance
from mpiad.domain.root_copies import require_own_block
from mpiad.domain.stencil_sums import StencilSums, apply_stencil
from mpiad.primitives.operation import current
from mpiad.transport.device_arrays import is_array


class Stencil:
    """A stencil on a domain; made by `Domain.stencil` and `Domain.laplacian`.

    Attributes
    ----------
    weights : array
        Of odd lengths; the centre is the cell's own weight.
    radius : tuple of int
        How far it reaches along each dimension.
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
            Where `u` isn't such an array.

        Ranks
        -----
        All ranks of the domain call it.

        Adjoint
        -------
        The stencil mirrored in its centre, and what that brings to halo cells is added to the cells they are copies of.
        """
        self._checked(u, "Stencil")
        return apply_stencil(u, self.sums)

    def leapfrog(self, u: LocalArray, before: LocalArray, factor: LocalArray) -> LocalArray:
        """Take a step of a wave: ``2 * u - before + factor * stencil(u)``, in a fraction of the passes through memory.

        Parameters
        ----------
        u, before : float or complex array of shape (..., *local_shape)
            The field now and a step before, of one shape.
        factor : array of shape (*local_shape), or of the shape of `u`
            For the wave equation the square of the speed times the step.

        Returns
        -------
        array of the shape of `u`

        Raises
        ------
        TypeError, ValueError
            Where an array has another shape, or they differ in dtype.

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
        recorded = current.tape is not None or any(map(isbox, (u, before, factor)))
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
