"""Whole grids and blocks: scatter, gather, and index conversions."""

from __future__ import annotations

import math

import autograd.numpy as anp
import numpy as np
from autograd.extend import defjvp, defvjp, primitive

from mpiad._typing import Array, LocalArray, Rank, RootArray
from mpiad.domain.decomposition import Decomposition
from mpiad.domain.partition import Partition, lengths
from mpiad.primitives import mpi_gather, mpi_scatter
from mpiad.transport.agreement import raising_together
from mpiad.transport.buffers import empty_beside


class Placement(Decomposition):
    """Transfers and index conversions between blocks and the whole grid."""

    def scatter(self, u: RootArray, root: Rank = 0) -> LocalArray:
        """Give each rank its block of the root's whole array.

        Parameters
        ----------
        u : array of shape (..., *shape)
            Used on the root only; other ranks may pass None.
        root : int

        Returns
        -------
        array of shape (..., *local_shape)

        Raises
        ------
        TypeError, ValueError
            On all ranks, if the root's `u` isn't an array of that shape; if `root` isn't a rank.

        Ranks
        -----
        All ranks call it.

        Adjoint
        -------
        The blocks' cotangents are assembled on the root: `gather`.

        Examples
        --------
        >>> domain = mpiad.Domain(12)
        >>> block = domain.scatter(np.arange(12.0) if rank == 0 else None)
        >>> print(np.array_equal(block, np.arange(12)[domain.owned]))
        True
        """
        cells = None
        # Only the root checks the array; on an error the others would wait in the scatter.
        with raising_together(self._channel):
            if self._channel.rank == root:
                cells = into_blocks(self._checked(u, self.shape, "Domain.scatter"), self._partition)
        # Known to all ranks from the partition: only cells are communicated.
        counts = [math.prod(lengths(self._partition.block(r))) for r in range(self._channel.size)]
        block = mpi_scatter(cells, root, axis=0, counts=counts, comm=self.comm)
        return anp.moveaxis(block, 0, -1).reshape(block.shape[1:] + self.local_shape)

    def gather(self, u: LocalArray, root: Rank = 0) -> RootArray:
        """Assemble the blocks of all ranks on the root.

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
            If `u` isn't an array of that shape; on all ranks, if the blocks don't fit together.

        Ranks
        -----
        All ranks call it.

        Adjoint
        -------
        Each rank gets the cotangent of its block: `scatter`.

        Examples
        --------
        >>> domain = mpiad.Domain(12)
        >>> (x,) = domain.coordinates()
        >>> whole = domain.gather(x)
        >>> print(np.array_equal(whole, np.arange(12)) == (rank == 0))
        True
        """
        u = self._checked(u, self.local_shape, "Domain.gather")
        lead = u.shape[: u.ndim - len(self.shape)]
        # Cells first, as `from_blocks` takes them; blocks of different lengths then differ along that axis alone.
        cells = mpi_gather(anp.moveaxis(u.reshape((*lead, -1)), -1, 0), root, axis=0, comm=self.comm)
        if self._channel.rank == root:
            return from_blocks(cells, self._partition)
        # Empty, but of the right number of axes, so that the same program runs on all ranks.
        return cells.reshape((*lead, 0, *self.shape[1:]))

    def owner(self, index: Array) -> Array:
        """Return the ranks that own cells.

        Parameters
        ----------
        index : int array of shape (..., dimensions), or a tuple of int for one cell
            In the whole grid. On a periodic dimension any integer is valid; on others negative ones aren't.

        Returns
        -------
        int array of shape (...), or int for one cell

        Raises
        ------
        IndexError
            If a cell isn't in the grid.
        TypeError, ValueError
            If it isn't an array of integers of that shape.

        Ranks
        -----
        Any rank may call it; nothing is sent.

        Examples
        --------
        >>> domain = mpiad.Domain(12)
        >>> print(domain.owner([0]) == 0, domain.owner([11]) == size - 1)
        True True
        """
        owners = self._partition.owners(self._in_grid(index, "Domain.owner"))
        return owners if owners.ndim else int(owners)

    def to_local(self, index: Array, *, halo: bool = False) -> Array:
        """Return the indices in this rank's block of cells of the whole grid.

        Parameters
        ----------
        index : int array of shape (..., dimensions), or a tuple of int for one cell
            As in `owner`.
        halo : bool
            Whether to return indices in the block with its halo; cells of the halo are then included.

        Returns
        -------
        int array of the shape of `index`
            ``u[tuple(local)]`` is one cell, ``u[tuple(local.T)]`` are all cells of a list.

        Raises
        ------
        IndexError
            If a cell isn't in the grid, or not in this rank's block.
        TypeError, ValueError
            If it isn't an array of integers of that shape.

        Ranks
        -----
        Any rank may call it; nothing is sent.

        Examples
        --------
        >>> domain = mpiad.Domain(12)
        >>> first = domain.owned[0].start
        >>> print(domain.to_local([first]), domain.to_global([0]) - first)
        [0] [0]
        """
        call = "Domain.to_local"
        cells = self._in_grid(index, call)
        widths = np.array(self.halo if halo else (0,) * len(self.shape))
        starts = np.array([cells.start for cells in self.owned]) - widths
        local = cells - starts
        # A halo may hold the cells of the grid's other end.
        local = np.where(np.array(self.periodic), local % np.array(self.shape), local)
        outside = ((local < 0) | (local >= np.array(self.local_shape) + 2 * widths)).any(axis=-1)
        if outside.any():
            cell = tuple(cells[outside][0].tolist())
            raise IndexError(
                f"{call}: cell {cell} belongs to rank {self.owner(cell)}, and isn't in the block "
                f"{'with its halo ' if halo else ''}of rank {self._channel.rank}, {_ranges(self.owned)}. "
                "domain.owner(index) tells whose cells are."
            )
        return local

    def to_global(self, index: Array, *, halo: bool = False) -> Array:
        """Return the cells of the whole grid at indices of this rank's block.

        Parameters
        ----------
        index : int array of shape (..., dimensions), or a tuple of int for one place
            In this rank's block.
        halo : bool
            Whether these are indices in the block with its halo.

        Returns
        -------
        int array of the shape of `index`

        Raises
        ------
        IndexError
            If an index isn't in the block, or is in a halo beyond a physical side.
        TypeError, ValueError
            If it isn't an array of integers of that shape.

        Ranks
        -----
        Any rank may call it; nothing is sent.
        """
        call = "Domain.to_global"
        places = self._index_array(index, call)
        widths = np.array(self.halo if halo else (0,) * len(self.shape))
        room = np.array(self.local_shape) + 2 * widths
        _require_inside(places, room, f"{call}: place {{}} isn't in a block of {{}} cells")
        return self._in_grid(places + np.array([cells.start for cells in self.owned]) - widths, call)

    def _index_array(self, index: object, call: str) -> np.ndarray:
        found = np.asarray(index)
        if found.dtype.kind not in "iu":
            raise TypeError(f"{call}: expected integers, but got {type(index).__name__} of dtype {found.dtype}.")
        if found.shape[-1:] != (len(self.shape),):
            raise ValueError(
                f"{call}: expected an index of shape (..., {len(self.shape)}), one entry for each dimension of the grid, "
                f"but got {found.shape}."
            )
        return found.astype(np.intp)

    def _in_grid(self, index: object, call: str) -> np.ndarray:
        cells, room = self._index_array(index, call), np.array(self.shape)
        wrapped = np.where(np.array(self.periodic), cells % room, cells)
        _require_inside(wrapped, room, f"{call}: cell {{}} isn't in a grid of {{}} cells")
        return wrapped


def _require_inside(index: np.ndarray, room: np.ndarray, message: str) -> None:
    outside = ((index < 0) | (index >= room)).any(axis=-1)
    if outside.any():
        raise IndexError(message.format(tuple(index[outside][0].tolist()), tuple(room.tolist())) + ".")


def _ranges(block: tuple[slice, ...]) -> str:
    return "[" + ", ".join(f"{cells.start}:{cells.stop}" for cells in block) + "]"


@primitive
def into_blocks(u: RootArray, partition: Partition) -> RootArray:
    """Reorder a whole array (..., *partition.shape) by ranks: (cells, ...), the cells of rank 0's block first."""
    lead = u.shape[: u.ndim - len(partition.shape)]
    out = empty_beside(u, (math.prod(partition.shape), *lead))
    start = 0
    for rank in range(math.prod(partition.dims)):
        block = u[(..., *partition.block(rank))].reshape(*lead, -1)
        stop = start + block.shape[-1]
        # Cells first, since a scatter divides an array along one axis.
        out[start:stop] = np.moveaxis(block, -1, 0)
        start = stop
    return out


@primitive
def from_blocks(cells: RootArray, partition: Partition) -> RootArray:
    """Put the blocks of all ranks, as `into_blocks` returns them, together: an array (..., *partition.shape)."""
    lead = cells.shape[1:]
    out = empty_beside(cells, lead + partition.shape)
    start = 0
    for rank in range(math.prod(partition.dims)):
        block = partition.block(rank)
        shape = lengths(block)
        stop = start + math.prod(shape)
        out[(..., *block)] = np.moveaxis(cells[start:stop], 0, -1).reshape(lead + shape)
        start = stop
    return out


# Both reorder cells: a permutation's transpose is its inverse.
defvjp(into_blocks, lambda ans, u, partition: lambda g: from_blocks(g, partition))
defjvp(into_blocks, lambda du, ans, u, partition: into_blocks(du, partition))
defvjp(from_blocks, lambda ans, cells, partition: lambda g: into_blocks(g, partition))
defjvp(from_blocks, lambda dcells, ans, cells, partition: from_blocks(dcells, partition))
