"""The root's whole array as the blocks of all ranks one after the other, and back: what scatter and gather move."""

from __future__ import annotations

import math

import numpy as np
from autograd.extend import defjvp, defvjp, primitive

from mpiad._typing import RootArray
from mpiad.domain.allocation import empty_beside
from mpiad.domain.partition import Partition

__all__ = ["from_blocks", "into_blocks"]


@primitive
def into_blocks(u: RootArray, partition: Partition) -> RootArray:
    """Reorder a whole array by ranks.

    Parameters
    ----------
    u : array of shape (..., *partition.shape)

    Returns
    -------
    array of shape (cells, ...)
        The cells of rank 0's block, then those of rank 1's, and so on.
    """
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
    """Put the blocks of all ranks together.

    Parameters
    ----------
    cells : array of shape (cells, ...)
        As `into_blocks` returns them.

    Returns
    -------
    array of shape (..., *partition.shape)
    """
    lead = cells.shape[1:]
    out = empty_beside(cells, lead + partition.shape)
    start = 0
    for rank in range(math.prod(partition.dims)):
        block = partition.block(rank)
        shape = tuple([along.stop - along.start for along in block])
        stop = start + math.prod(shape)
        out[(..., *block)] = np.moveaxis(cells[start:stop], 0, -1).reshape(lead + shape)
        start = stop
    return out


# Both reorder cells: a permutation's transpose is its inverse.
defvjp(into_blocks, lambda ans, u, partition: lambda g: from_blocks(g, partition))
defjvp(into_blocks, lambda du, ans, u, partition: into_blocks(du, partition))
defvjp(from_blocks, lambda ans, cells, partition: lambda g: into_blocks(g, partition))
defjvp(from_blocks, lambda dcells, ans, cells, partition: from_blocks(dcells, partition))
