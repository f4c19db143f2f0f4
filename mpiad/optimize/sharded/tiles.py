"""Rows of vectors that lie side by side in tiles: each tile is a stretch of all rows, in one piece of memory.

Passes over all rows go tile by tile. What is written in one step of a tile and read in the next stays in cache, and the
memory is read from one end to the other, which is a tenth faster than from as many places as there are rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

__all__ = ["LENGTH", "PADDING", "Tiles"]

# Two stretches fit a core's own cache; a call for a whole tile takes little beside its arithmetic.
LENGTH = 16384
# Between the rows of a full tile: at distances of a power of two they would share a few places of the cache, and seven rows
# read at once be a fifth slower.
PADDING = 24


class Tiles:
    """Rows of doubles.

    Parameters
    ----------
    height : int
        Number of rows.
    size : int
        Length of each.
    """

    def __init__(self, height: int, size: int):
        self.height, self.size = height, size
        whole, rest = divmod(size, LENGTH)
        # Zeros, since all of it is written to a checkpoint, also before it is used.
        self.memory = np.zeros(height * (whole * (LENGTH + PADDING) + rest))

    def __iter__(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield each tile, shape (rows, length), after the part of the vectors that it holds."""
        height, size, begin = self.height, self.size, 0
        for start in range(0, size, LENGTH):
            length = min(LENGTH, size - start)
            stride = length + PADDING if length == LENGTH else length
            tile = self.memory[begin : begin + height * stride].reshape(height, stride)
            yield slice(start, start + length), tile[:, :length]
            begin += height * stride

    def read(self, row: int, out: np.ndarray) -> np.ndarray:
        """Copy a row to a vector, and return that."""
        for part, tile in self:
            np.copyto(out[part], tile[row])
        return out

    def write(self, row: int, vector: np.ndarray) -> None:
        """Copy a vector to a row."""
        for part, tile in self:
            np.copyto(tile[row], vector[part])
