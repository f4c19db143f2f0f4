"""What is done with a stretch of the vectors, in NumPy and BLAS; `compiled` does the same in fewer passes."""

from __future__ import annotations

import math

import numpy as np

__all__ = ["Arithmetic", "Parts", "largest_of"]

Parts = list[tuple[slice, slice]]


class Arithmetic:
    """The steps of an iteration without bounds, on arrays of shape (length,) and tiles of shape (rows, length)."""

    def add_products(self, tile: np.ndarray, parts: Parts, vector: np.ndarray, out: np.ndarray) -> None:
        """Add the products of rows with a vector, those of each part to its places."""
        for rows, places in parts:
            out[places] += tile[rows] @ vector

    def change(self, gradient: np.ndarray, before: np.ndarray) -> float:
        """Turn the gradient before into the change since then, in place; return the gradient's square."""
        np.subtract(gradient, before, out=before)
        return float(gradient @ gradient)

    def combine(self, tile: np.ndarray, parts: Parts, coefficients: np.ndarray, out: np.ndarray) -> None:
        """Write the combination of rows with coefficients, those of each part at its places."""
        first, *others = parts
        np.matmul(coefficients[first[1]], tile[first[0]], out=out)
        for rows, places in others:
            out += coefficients[places] @ tile[rows]

    def move(self, here: np.ndarray, way: np.ndarray, step: float, out: np.ndarray, copy: np.ndarray | None) -> None:
        """Write where a step leads, and once more where there is a copy."""
        np.multiply(way, step, out=out)
        out += here
        if copy is not None:
            np.copyto(copy, out)

    def take(self, gradient: np.ndarray, way: np.ndarray, out: np.ndarray) -> tuple[float, float, float]:
        """Copy a gradient; return its largest absolute entry, its slope along a way, and the way's square.

        Where an entry isn't finite, the largest is infinite.
        """
        np.copyto(out, gradient)
        return largest_of(out), float(out @ way), float(way @ way)


def largest_of(gradient: np.ndarray) -> float:
    """Return the largest absolute entry; infinite where one is NaN."""
    size = max(float(gradient.max()), -float(gradient.min()))
    return size if size < math.inf else math.inf
