"""Sums and extrema over the whole grid."""

from __future__ import annotations

import math

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval

from mpiad._typing import LocalArray, ReplicatedArray
from mpiad.domain.decomposition import Decomposition
from mpiad.primitives import mpi_allreduce
from mpiad.transport import MAX, MIN
from mpiad.transport.device_arrays import is_device_array


class Reductions(Decomposition):
    """Reductions over the whole grid."""

    def sum(self, u: LocalArray) -> ReplicatedArray:
        """Add up an array over the whole grid.

        Parameters
        ----------
        u : array of shape (..., *local_shape)

        Returns
        -------
        scalar
            The same on all ranks.

        Raises
        ------
        TypeError, ValueError
            If `u` isn't an array of that shape.

        Ranks
        -----
        All ranks call it.

        Adjoint
        -------
        The sum of all ranks' cotangents goes to every cell.
        """
        return mpi_allreduce(anp.sum(self._checked(u, self.local_shape, "Domain.sum")), comm=self.comm)

    def mean(self, u: LocalArray) -> ReplicatedArray:
        """Average an array over the whole grid; as `sum`, divided by the number of entries."""
        lead = np.shape(getval(u))[: -len(self.shape)]
        return self.sum(u) / math.prod(lead + self.shape)

    def dot(self, u: LocalArray, v: LocalArray) -> ReplicatedArray:
        """Add up the product of two arrays over the whole grid, without conjugation; otherwise as `sum`.

        Examples
        --------
        >>> domain = mpiad.Domain(12)
        >>> u = np.ones(domain.local_shape)
        >>> print(domain.dot(u, 2 * u), domain.mean(u))
        24.0 1.0
        """
        u = self._checked(u, self.local_shape, "Domain.dot")
        return self.sum(u * self._checked(v, self.local_shape, "Domain.dot"))

    def gram(self, u: LocalArray, v: LocalArray) -> ReplicatedArray:
        """Return the products of several arrays with several others over the whole grid, in one reduction.

        Parameters
        ----------
        u : array of shape (k, *local_shape)
        v : array of shape (l, *local_shape)

        Returns
        -------
        array of shape (k, l)
            Without conjugation, as `dot`; the same on all ranks.

        Raises
        ------
        TypeError, ValueError
            If `u` or `v` isn't an array of such a shape.

        Ranks
        -----
        All ranks call it.

        Adjoint
        -------
        To u the sum of all ranks' cotangents times v, and to v its transpose times u.
        """
        for several in (u, v):
            if np.ndim(getval(self._checked(several, self.local_shape, "Domain.gram"))) != len(self.shape) + 1:
                raise ValueError(
                    f"Domain.gram: expected arrays of shape (k, {', '.join(map(str, self.local_shape))}), but got "
                    f"{np.shape(getval(several))}."
                )
        # One product of matrices, and one message for all k l sums.
        flat = [anp.reshape(each, (np.shape(getval(each))[0], -1)) for each in (u, v)]
        return mpi_allreduce(anp.dot(flat[0], flat[1].T), comm=self.comm)

    def norm(self, u: LocalArray) -> ReplicatedArray:
        """Return the square root of the sum of |u|² over the whole grid; its derivative at u = 0 is taken as zero.

        Otherwise as `sum`.
        """
        square = anp.real(self.dot(anp.conj(u), u))
        if is_device_array(getval(square)):  # the host doesn't read its values
            zero = getval(square) == 0
            # The root of one in its place, so that the derivative at zero isn't zero times infinity.
            return anp.where(zero, 0.0, anp.sqrt(anp.where(zero, 1.0, square)))
        return anp.sqrt(square) if getval(square) else square

    def max(self, u: LocalArray) -> ReplicatedArray:
        """Return the largest value of the whole grid; NaN if any cell is NaN.

        Parameters
        ----------
        u : real array of shape (..., *local_shape)

        Returns
        -------
        scalar
            The same on all ranks.

        Raises
        ------
        TypeError, ValueError
            If `u` isn't an array of that shape.

        Ranks
        -----
        All ranks call it.

        Adjoint
        -------
        The sum of all ranks' cotangents goes to the cell with that value; if several have it, to their ranks in equal
        parts, and there to the cells in equal parts. If the value is NaN, so are the cotangents of all cells.
        """
        return mpi_allreduce(anp.max(self._checked(u, self.local_shape, "Domain.max")), MAX, comm=self.comm)

    def min(self, u: LocalArray) -> ReplicatedArray:
        """Return the smallest value of the whole grid; otherwise as `max`."""
        return mpi_allreduce(anp.min(self._checked(u, self.local_shape, "Domain.min")), MIN, comm=self.comm)
