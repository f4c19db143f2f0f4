"""`Domain`: a grid divided among the ranks, with what a program on it needs of the other ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval

from mpiad._typing import Comm, LocalArray, Rank, ReplicatedArray, RootArray, Shape
from mpiad.domain.blocks import from_blocks, into_blocks
from mpiad.domain.boundary import Boundary, Sides, check_values, shifted, sides_of
from mpiad.domain.coordinates import points_along, spacing_of
from mpiad.domain.halo import Halo, fill_halo
from mpiad.domain.layout import layout, per_dimension
from mpiad.primitives import mpi_allreduce, mpi_gather, mpi_scatter
from mpiad.transport import channel
from mpiad.transport.agreement import raise_together

__all__ = ["Domain"]


class Domain:
    """Divide a 1-, 2- or 3-dimensional grid among the ranks, one block for each.

    Parameters
    ----------
    shape : int or tuple of int
        Cells of the whole grid along each dimension.
    halo : int or tuple of int
        Width of the halo that `exchange` puts around a block; one number, or one for each dimension.
    periodic : bool or tuple of bool
        Whether the last cell along a dimension is followed by the first.
    dims : tuple of int, optional
        Ranks along each dimension; by default those with the least halo surface.
    comm : mpi4py intracommunicator, optional

    Attributes
    ----------
    shape, halo, periodic, dims : tuple
        As given or chosen, one entry for each dimension.
    position : tuple of int
        This rank's place in the grid of ranks.
    neighbours : tuple of pairs of int or None
        Ranks before and after along each dimension; None beyond a physical side.
    owned : tuple of slice
        This rank's cells, as slices of the whole grid.
    local_shape, padded_shape : tuple of int
        Cells of this rank's block, without and with its halo.
    interior : tuple of slice
        The block within the block with its halo.

    Raises
    ------
    TypeError, ValueError
        On all ranks: where an argument can't be used or differs between ranks, a rank would own nothing, or the halo is
        wider than the smallest block.

    Ranks
    -----
    All ranks of `comm` call it, with the same arguments. A block's place follows from its rank, the last dimension
    fastest; along each dimension the first blocks are longer by one where the cells don't divide evenly.
    """

    def __init__(
        self,
        shape: int | Sequence[int],
        *,
        halo: int | Sequence[int] = 1,
        periodic: bool | Sequence[bool] = False,
        dims: Sequence[int] | None = None,
        comm: Comm = None,
    ):
        used = channel(comm, "Domain")
        partition, self.halo = layout(used, shape, halo, periodic, dims)
        self.comm, self._channel, self._partition = comm, used, partition
        self.shape, self.dims, self.periodic = partition.shape, partition.dims, partition.periodic
        self.position = partition.position(used.rank)
        self.neighbours = partition.neighbours(used.rank)
        self.owned = partition.block(used.rank)
        self.local_shape: Shape = tuple(s.stop - s.start for s in self.owned)
        self._halo = Halo(self.local_shape, self.halo, self.neighbours, used.rank, comm)
        self.padded_shape = self._halo.padded
        self.interior = self._halo.interior[1:]

    def __repr__(self) -> str:
        return f"Domain({self.shape}, halo={self.halo}, periodic={self.periodic}, dims={self.dims})"

    def scatter(self, u: RootArray, root: Rank = 0) -> LocalArray:
        """Give each rank its block of the root's whole array.

        Parameters
        ----------
        u : array of shape (..., *shape)
            Counts on the root; other ranks may pass None.
        root : int

        Returns
        -------
        array of shape (..., *local_shape)

        Raises
        ------
        TypeError, ValueError
            On all ranks, where the root's `u` isn't an array of that shape; where there is no such root.

        Ranks
        -----
        All ranks call it.

        Adjoint
        -------
        The blocks' cotangents are put together on the root: `gather`.
        """
        cells = None
        error = None
        if self._channel.rank == root:
            try:
                cells = into_blocks(self._checked(u, self.shape, "Domain.scatter"), self._partition)
            except (TypeError, ValueError) as found:
                error = found
        raise_together(self._channel, error)
        counts = [math.prod(_lengths(self._partition.block(r))) for r in range(self._channel.size)]
        block = mpi_scatter(cells, root, axis=0, counts=counts, comm=self.comm)
        return anp.moveaxis(block, 0, -1).reshape(block.shape[1:] + self.local_shape)

    def gather(self, u: LocalArray, root: Rank = 0) -> RootArray:
        """Put the blocks of all ranks together on the root.

        Parameters
        ----------
        u : array of shape (..., *local_shape)
        root : int

        Returns
        -------
        array
            On the root of shape (..., *shape); elsewhere empty, of length 0 along the first dimension of the grid.

        Raises
        ------
        TypeError, ValueError
            Where `u` isn't an array of that shape; on all ranks, where the blocks don't fit together.

        Ranks
        -----
        All ranks call it.

        Adjoint
        -------
        Each rank gets the cotangent of its block: `scatter`.
        """
        u = self._checked(u, self.local_shape, "Domain.gather")
        lead = u.shape[: u.ndim - len(self.shape)]
        cells = mpi_gather(anp.moveaxis(u.reshape((*lead, -1)), -1, 0), root, axis=0, comm=self.comm)
        if self._channel.rank == root:
            return from_blocks(cells, self._partition)
        return cells.reshape((*lead, 0, *self.shape[1:]))

    def exchange(self, u: LocalArray | Sequence[LocalArray], boundary: Boundary = "zero") -> Any:
        """Return the block with its halo: the neighbours' cells around it, corners included.

        Parameters
        ----------
        u : array of shape (..., *local_shape), or a tuple or list of them
            Several fields of one dtype travel in one message to each neighbour.
        boundary : {"zero", "edge", "reflect"} or number, or a tuple
            What lies beyond the sides of the grid that aren't periodic, as `numpy.pad` fills constant, edge and reflect;
            in a tuple, one of these or a pair (before, after) for each dimension. A traced number is allowed, the same
            on all sides that have a value.

        Returns
        -------
        array of shape (..., *padded_shape), or a list of them
            The block itself is at ``[..., *interior]``.

        Raises
        ------
        TypeError, ValueError
            Where `u` isn't an array of that shape, or there is no such boundary.

        Ranks
        -----
        All ranks call it, with the same boundary.

        Adjoint
        -------
        The cotangent of each halo cell is added, on its owner's rank, to that of the cell it is a copy of.
        """
        sides = sides_of(boundary, len(self.shape), "Domain.exchange")
        if isinstance(u, (tuple, list)):
            return self._exchange_fields(u, sides)
        return self._exchange_field(u, sides)

    def _exchange_field(self, u: LocalArray, sides: Sides) -> LocalArray:
        value, sides = shifted(sides, "Domain.exchange")
        u = self._checked(u, self.local_shape, "Domain.exchange")
        check_values(sides, u.dtype, "Domain.exchange")
        self._check_reflection(sides)
        if value is None:
            return fill_halo(u, self._halo, sides)
        return fill_halo(u - value, self._halo, sides) + value

    def _exchange_fields(self, fields: Sequence[LocalArray], sides: Sides) -> list[LocalArray]:
        fields = [self._checked(field, self.local_shape, "Domain.exchange") for field in fields]
        if len({field.dtype for field in fields}) > 1:
            raise TypeError(
                "Domain.exchange: fields that travel in one message must have one dtype, but got "
                f"{', '.join(str(field.dtype) for field in fields)}. Convert them, or exchange them apart."
            )
        leads = [field.shape[: field.ndim - len(self.shape)] for field in fields]
        if not fields:
            return []
        joined = anp.concatenate([field.reshape((-1, *self.local_shape)) for field in fields])
        padded = self._exchange_field(joined, sides)
        stops = np.cumsum([math.prod(lead) for lead in leads])
        return [
            padded[stop - math.prod(lead) : stop].reshape(lead + self.padded_shape) for stop, lead in zip(stops, leads)
        ]

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
            Where `u` isn't an array of that shape.

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
        """Add up the product of two arrays over the whole grid, without conjugation; otherwise as `sum`."""
        u = self._checked(u, self.local_shape, "Domain.dot")
        return self.sum(u * self._checked(v, self.local_shape, "Domain.dot"))

    def norm(self, u: LocalArray) -> ReplicatedArray:
        """Return the square root of the sum of |u|² over the whole grid; its derivative at u = 0 is taken as zero.

        Otherwise as `sum`.
        """
        square = anp.real(self.dot(anp.conj(u), u))
        return anp.sqrt(square) if getval(square) else square

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
        if extent is None:
            steps = [float(h) for h in per_dimension(spacing, ndim, "spacing")]
            firsts = [float(x) + centred * h / 2 for x, h in zip(per_dimension(origin, ndim, "origin"), steps)]
        else:
            firsts, steps = spacing_of(self.shape, self.periodic, extent, centred)
        widths = self.halo if halo else (0,) * ndim
        return tuple(
            points_along(axis, ndim, cells.start - width, cells.stop + width, first, step)
            for axis, (cells, width, first, step) in enumerate(zip(self.owned, widths, firsts, steps))
        )

    def _checked(self, u: Any, shape: Shape, call: str) -> Any:
        found = getval(u)
        if not isinstance(found, np.ndarray):
            raise TypeError(f"{call}: expected an array of shape (..., {_listed(shape)}), but got {type(found).__name__}.")
        if found.shape[max(0, found.ndim - len(shape)) :] != shape:
            raise ValueError(
                f"{call}: expected an array of shape (..., {_listed(shape)}), but got {found.shape} on rank "
                f"{self._channel.rank}, which owns {self.local_shape} of {self.shape} cells."
            )
        return u

    def _check_reflection(self, sides: Sides) -> None:
        for axis, (n, p, h, pair) in enumerate(zip(self.shape, self.dims, self.halo, sides)):
            if p == 1 and h >= n and not self.periodic[axis] and "reflect" in pair:
                raise ValueError(
                    f"Domain.exchange: a halo of {h} can't be reflected along dimension {axis}, which has {n} cells: "
                    f"at least {h + 1} are needed."
                )


def _lengths(block: tuple[slice, ...]) -> Shape:
    return tuple(cells.stop - cells.start for cells in block)


def _listed(shape: Shape) -> str:
    return ", ".join(map(str, shape))
