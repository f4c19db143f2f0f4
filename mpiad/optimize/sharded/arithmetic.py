"""The passes of an iteration over all vectors, in NumPy and BLAS; `compiled` does the same with less memory read."""

from __future__ import annotations

import math

import numpy as np

from mpiad.optimize.sharded.tiles import Tiles

__all__ = ["Arithmetic", "Parts", "largest_of"]

# Where rows lie: as slices, each with the places of its coefficients or products.
Parts = list[tuple[slice, slice]]


class Arithmetic:
    """The passes of an iteration without bounds; rows are those of the tiles, vectors have shape (size,)."""

    def products(self, tiles: Tiles, parts: Parts, row: int, out: np.ndarray) -> float:
        """Write the products of rows with one of them; return that one's square."""
        out.fill(0.0)
        square = 0.0
        for _, tile in tiles:
            square += float(tile[row] @ tile[row])
            _add_products(tile, parts, tile[row], out)
        return square

    def change(self, tiles: Tiles, parts: Parts, before: int, row: int, out: np.ndarray) -> float:
        """Turn the gradient in row `before` into the change to that in `row`, and write the products of rows with it.

        Returns
        -------
        float
            The square of the gradient in `row`.
        """
        out.fill(0.0)
        square = 0.0
        for _, tile in tiles:
            np.subtract(tile[row], tile[before], out=tile[before])
            square += float(tile[row] @ tile[row])
            _add_products(tile, parts, tile[before], out)
        return square

    def combine(self, tiles: Tiles, parts: Parts, coefficients: np.ndarray, row: int) -> None:
        """Write the combination of rows with coefficients into another row."""
        for _, tile in tiles:
            _combine(tile, parts, coefficients, tile[row])

    def advance(
        self, tiles: Tiles, parts: Parts, coefficients: np.ndarray, row: int, here: np.ndarray, step: float,
        outs: tuple[np.ndarray, np.ndarray | None],
    ) -> None:
        """Combine as `combine` does, where there are parts, and write where a step along the row leads from `here`.

        `outs` are a vector for that, and one for a copy or None.
        """
        out, copy = outs
        for part, tile in tiles:
            way, there = tile[row], out[part]
            if parts:
                _combine(tile, parts, coefficients, way)
            np.multiply(way, step, out=there)
            there += here[part]
            if copy is not None:
                np.copyto(copy[part], there)

    @np.errstate(over="ignore", invalid="ignore")  # at a trial point nothing need be finite: the line search looks
    def take(self, tiles: Tiles, gradient: np.ndarray, way: int, out: int) -> tuple[float, float, float]:
        """Copy a gradient into row `out`; return its largest absolute entry, its slope along a way, and the way's square.

        Where an entry isn't finite, the largest is infinite.
        """
        largest = slope = square = 0.0
        for part, tile in tiles:
            copied, along = tile[out], tile[way]
            np.copyto(copied, gradient[part])
            largest = max(largest, largest_of(copied))
            slope += float(copied @ along)
            square += float(along @ along)
        return largest, slope, square


def largest_of(gradient: np.ndarray) -> float:
    """Return the largest absolute entry; infinite where one is NaN."""
    # Two passes that make no array, as np.abs would; a NaN comes through both.
    size = max(float(gradient.max()), -float(gradient.min()))
    return size if size < math.inf else math.inf


def _add_products(tile: np.ndarray, parts: Parts, vector: np.ndarray, out: np.ndarray) -> None:
    for rows, places in parts:
        out[places] += tile[rows] @ vector


def _combine(tile: np.ndarray, parts: Parts, coefficients: np.ndarray, out: np.ndarray) -> None:
    first, *others = parts
    np.matmul(coefficients[first[1]], tile[first[0]], out=out)
    for rows, places in others:
        out += coefficients[places] @ tile[rows]
