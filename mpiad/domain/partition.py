"""The division of a grid: a Cartesian grid of ranks, and the block of cells that each rank owns.

Ranks are numbered in row-major order, as in MPI's Cartesian communicators. If the cells along a dimension don't divide
evenly, the first blocks have one additional cell.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mpiad._typing import Rank, Shape
from mpiad.transport.core.buffers import even_range


@dataclass(frozen=True)
class Partition:
    """A grid of cells, and the grid of ranks that own its blocks."""

    shape: Shape  # number of cells along each dimension
    dims: tuple[int, ...]  # number of ranks along each dimension
    periodic: tuple[bool, ...]  # whether the last cell along a dimension is followed by the first

    def position(self, rank: Rank) -> tuple[int, ...]:
        """Return a rank's position in the grid of ranks."""
        return tuple(int(index) for index in np.unravel_index(rank, self.dims))

    def neighbours(self, rank: Rank) -> tuple[tuple[Rank | None, Rank | None], ...]:
        """Return the ranks before and after a rank along each dimension."""
        units = np.eye(len(self.dims), dtype=int)
        return tuple((self.neighbour(rank, -unit), self.neighbour(rank, unit)) for unit in units)

    def neighbour(self, rank: Rank, step: Iterable[int]) -> Rank | None:
        """Return the rank at an offset from a rank in the grid of ranks, or None beyond a side that isn't periodic."""
        number = 0
        for start, s, n, wraps in zip(self.position(rank), step, self.dims, self.periodic):
            index = start + int(s)
            if not 0 <= index < n and not wraps:
                return None
            number = number * n + index % n
        return number

    def block(self, rank: Rank) -> tuple[slice, ...]:
        """Return the cells that a rank owns, as slices of the grid."""
        return tuple(slice(*even_range(n, p, i)) for n, p, i in zip(self.shape, self.dims, self.position(rank)))

    def owners(self, cells: np.ndarray) -> np.ndarray:
        """Return the ranks (...) that own cells, given by indices (..., dimensions) in the whole grid."""
        number = np.zeros(cells.shape[:-1], np.intp)
        for axis, (n, p) in enumerate(zip(self.shape, self.dims)):
            stops = [even_range(n, p, position)[1] for position in range(p)]
            number = number * p + np.searchsorted(stops, cells[..., axis], side="right")
        return number


def lengths(block: tuple[slice, ...]) -> Shape:
    """Return the number of cells of a block along each dimension."""
    return tuple(cells.stop - cells.start for cells in block)


def choose_dims(shape: Shape, size: int, halo: tuple[int, ...], periodic: tuple[bool, ...]) -> tuple[int, ...] | None:
    """Return the grid of ranks with the smallest halos, or None if in each grid a rank has too few cells."""
    divisors = [k for k in range(1, size + 1) if size % k == 0]
    firsts = [first for first in itertools.product(divisors, repeat=len(shape) - 1) if size % math.prod(first) == 0]
    grids = [(*first, size // math.prod(first)) for first in firsts]
    fitting = [dims for dims in grids if all(n // p >= max(1, h) for n, p, h in zip(shape, dims, halo))]

    def cost(dims: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        cuts = [0 if p == 1 else p if wraps else p - 1 for p, wraps in zip(dims, periodic)]
        # At each cut across a dimension of n cells, h layers are exchanged, each with 1 / n of the grid's cells.
        exchanged = sum(cut * max(1, h) * (math.prod(shape) // n) for cut, h, n in zip(cuts, halo, shape))
        # At equal costs, more ranks along the first dimensions are better, since halo layers are then contiguous in memory.
        return exchanged, tuple(-p for p in dims)

    return min(fitting, key=cost, default=None)
