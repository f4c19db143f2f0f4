"""Points between the cells: coordinates, who owns a point, and values there.

The cells of a grid stand for points with equal spacing. A point of the user's lies between a cell and the next one along
each dimension; it belongs to the rank that owns the lower of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import autograd.numpy as anp
import numpy as np

from mpiad._typing import Array, LocalArray
from mpiad.domain.coordinates import Lattice, lattice_of, points_along
from mpiad.domain.division import Division
from mpiad.domain.halo import Halo, fill_halo
from mpiad.domain.interpolation import Location, interpolated, located
from mpiad.primitives import mpi_allgather, mpi_allreduce, mpi_reduce_scatter, stop
from mpiad.transport.agreement import raise_together
from mpiad.transport.device_arrays import is_device_array

__all__ = ["Points"]


class Points(Division):
    """What a domain knows of points in space."""

    def coordinates(
        self,
        spacing: float | Sequence[float] = 1.0,
        origin: float | Sequence[float] = 0.0,
        *,
        extent: float | Sequence | None = None,
        centred: bool = False,
        halo: bool = False,
    ) -> tuple[LocalArray, ...]:
        """Return the coordinates of this rank's cells, one array for each dimension, in shapes that broadcast.

        Parameters
        ----------
        spacing, origin : float or one for each dimension
            Cell i lies at ``origin + i * spacing``.
        extent : float, or a length or pair (low, high) for each dimension, optional
            Instead of both: what the whole grid covers; its first and last cells lie on the ends.
        centred : bool
            Whether cells lie half a spacing further, at the centre of equal parts.
        halo : bool
            Whether to include the cells of the halo.

        Returns
        -------
        tuple of array
            In two dimensions of shape (n, 1) and (1, m).

        Raises
        ------
        ValueError
            Where an argument has another number of entries than the grid has dimensions.
        """
        ndim = len(self.shape)
        firsts, steps = lattice_of(self.shape, self.periodic, spacing, origin, extent, centred)
        widths = self.halo if halo else (0,) * ndim
        return tuple(
            points_along(axis, ndim, cells.start - width, cells.stop + width, first, step)
            for axis, (cells, width, first, step) in enumerate(zip(self.owned, widths, firsts, steps))
        )

    def locate(
        self,
        points: Array,
        spacing: float | Sequence[float] = 1.0,
        origin: float | Sequence[float] = 0.0,
        *,
        extent: float | Sequence | None = None,
        centred: bool = False,
    ) -> Location:
        """Return who owns points, between which cells, and where between them.

        Parameters
        ----------
        points : array of shape (..., dimensions)
            Coordinates; on periodic dimensions any number counts.
        spacing, origin, extent, centred
            Where the cells lie, as `coordinates` takes them.

        Returns
        -------
        Location
            ``owner`` of shape (...): the rank that owns ``cell``. ``cell`` of shape (..., dimensions): the cell before the
            point along each dimension, as index of the whole grid. ``fraction`` of the shape of `points`: the way from
            there to the next cell, from 0 to 1; differentiable.

        Raises
        ------
        ValueError
            Where a point lies outside of the grid, before its first cell or beyond its last one.
        TypeError
            Where points aren't numbers.

        Ranks
        -----
        Any rank may call it; nothing is sent.

        Adjoint
        -------
        The cotangent of `fraction`, divided by the spacing, goes to `points`.
        """
        lattice = lattice_of(self.shape, self.periodic, spacing, origin, extent, centred)
        return located(points, lattice, self._partition, "Domain.locate")

    def interpolate(
        self,
        u: LocalArray,
        points: Array,
        spacing: float | Sequence[float] = 1.0,
        origin: float | Sequence[float] = 0.0,
        *,
        extent: float | Sequence | None = None,
        centred: bool = False,
        result: str = "all",
    ) -> Array:
        """Return the values of a field at points, linear between cells along each dimension.

        Parameters
        ----------
        u : array of shape (..., *local_shape)
        points : array of shape (..., dimensions)
            Coordinates; with ``result="own"`` each rank's own points, otherwise the same on all ranks.
        spacing, origin, extent, centred
            Where the cells lie, as `coordinates` takes them.
        result : {"all", "share", "own"}
            "all": every rank gets the values at all points. "share": a rank gets those at the points that it owns, and
            zeros at the others, so that the sum over ranks is "all"; this saves a reduction where many steps are added up
            first. "own": each rank gets the values at its own points.

        Returns
        -------
        array
            The leading dimensions of `u`, then those of `points`.

        Raises
        ------
        ValueError
            Where a point lies outside of the grid (which one, and where), or `result` isn't one of these; with "own" on all
            ranks.
        TypeError
            Where `u` or `points` can't be used.

        Ranks
        -----
        All ranks call it. With "own" all points pass through every rank: it is meant for receivers and probes, not for
        as many particles as there are cells.

        Adjoint
        -------
        Each value's cotangent goes to the cells around the point, on their owners, by the weights with which they made the
        value; and to the point's coordinates by the slopes between these cells.
        """
        call = "Domain.interpolate"
        if result not in ("all", "share", "own"):
            raise ValueError(f'{call}: result must be one of "all", "share" or "own", but got {result!r}.')
        u = self._checked(u, self.local_shape, call)
        if is_device_array(stop(u)):
            raise NotImplementedError(
                f"{call}: values between cells are computed on the host, but u is a device array. Bring it there with "
                "mpiad.device.to_host, and the values back with mpiad.device.to_device."
            )
        lattice = lattice_of(self.shape, self.periodic, spacing, origin, extent, centred)
        if result == "own":
            return self._interpolate_own(u, points, lattice, call)
        share = self._share(u, located(points, lattice, self._partition, call))
        return share if result == "share" else mpi_allreduce(share, comm=self.comm)

    def _share(self, u: LocalArray, where: Location) -> LocalArray:
        """Return the values at the points that this rank owns, and zeros at the others."""
        # With its own edge beyond physical sides: those values have weight zero, but must be finite.
        padded = fill_halo(u, self._beside, (("edge", "edge"),) * len(self.shape))
        starts = np.array([cells.start for cells in self.owned]) - 1
        return interpolated(padded, where, self._channel.rank, starts)

    def _interpolate_own(self, u: LocalArray, points: Array, lattice: Lattice, call: str) -> LocalArray:
        error = None
        try:
            located(points, lattice, self._partition, call)
        except (TypeError, ValueError) as found:
            error = found
        # Each rank has other points; all learn of one outside before the points travel.
        raise_together(self._channel, error)
        ndim, shape = len(self.shape), np.shape(stop(points))[:-1]
        # As floats, also where some ranks give integers: what is gathered has one dtype.
        flat = anp.reshape(points, (-1, ndim)) * 1.0
        counts = [int(n) for n in mpi_allgather(np.array([math.prod(shape)]), axis=0, comm=self.comm)]
        everywhere = mpi_allgather(flat, axis=0, comm=self.comm)
        share = self._share(u, located(everywhere, lattice, self._partition, call))
        # Each point has one owner, and zeros elsewhere: the sum is the owner's value, and each rank gets its points' alone.
        mine = mpi_reduce_scatter(anp.moveaxis(share, -1, 0), axis=0, counts=counts, comm=self.comm)
        return anp.reshape(anp.moveaxis(mine, 0, -1), u.shape[: u.ndim - ndim] + shape)

    @cached_property
    def _beside(self) -> Halo:
        """A halo of one cell, whatever that of the domain is: the cell after the block's last one."""
        return Halo(self._partition, self._channel.rank, (1,) * len(self.shape), self.comm)
