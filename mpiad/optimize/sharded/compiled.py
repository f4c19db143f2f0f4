"""The arithmetic of an iteration compiled by numba, where that is installed and the piece is large.

BLAS multiplies rows of a tile with vectors at two thirds of the speed at which memory can be read, and each of NumPy's
calls goes over its arrays again. Here each stretch is read once.
"""

from __future__ import annotations

import functools
import math
import os
from typing import Any

import numpy as np

from mpiad.optimize.sharded.arithmetic import Arithmetic, Parts

__all__ = ["arithmetic_for"]

# Below, an iteration takes less than a millisecond, and to load numba a second.
_LARGE = 1 << 18
# Sums may be reordered; NaN and infinities stay what they are.
_FAST = {"reassoc", "contract", "nsz", "arcp"}


def arithmetic_for(size: int) -> Arithmetic:
    """Return what a piece of this many variables is worked on with."""
    if size < _LARGE or os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        return Arithmetic()
    kernels = _kernels()
    return Arithmetic() if kernels is None else Compiled(kernels)


class Compiled(Arithmetic):
    """As `Arithmetic`, compiled.

    Parameters
    ----------
    kernels : tuple
        Of `_kernels`.
    """

    def __init__(self, kernels: tuple):
        self._products, self._combination, self._moved, self._taken, self._changed = kernels

    def add_products(self, tile: np.ndarray, parts: Parts, vector: np.ndarray, out: np.ndarray) -> None:
        """Add the products of rows with a vector."""
        for rows, places in parts:
            self._products(tile, rows.start, rows.stop, vector, out[places])

    def change(self, gradient: np.ndarray, before: np.ndarray) -> float:
        """Turn the gradient before into the change since then."""
        return self._changed(gradient, before)

    def combine(self, tile: np.ndarray, parts: Parts, coefficients: np.ndarray, out: np.ndarray) -> None:
        """Write the combination of rows."""
        out.fill(0.0)
        for rows, places in parts:
            self._combination(tile, rows.start, rows.stop, coefficients[places], out)

    def move(self, here: np.ndarray, way: np.ndarray, step: float, out: np.ndarray, copy: np.ndarray | None) -> None:
        """Write where a step leads."""
        self._moved(here, way, step, out, out if copy is None else copy)

    def take(self, gradient: np.ndarray, way: np.ndarray, out: np.ndarray) -> tuple[float, float, float]:
        """Copy a gradient, and measure it."""
        gradient = np.require(gradient, np.float64, ["C", "A", "W"])  # of one type, which is compiled
        bits, slope, square = self._taken(gradient, gradient.view(np.int64), way, out)
        largest = float(np.int64(bits).view(np.float64))
        return largest if largest < math.inf else math.inf, slope, square


@functools.cache
def _kernels() -> tuple | None:
    try:
        import numba
    except ImportError:
        return None
    vector, tile = "float64[::1]", "float64[:, ::1]"
    kernels = (
        (f"void({tile}, int64, int64, {vector}, {vector})", _add_products),
        (f"void({tile}, int64, int64, {vector}, {vector})", _add_rows),
        (f"void({vector}, {vector}, float64, {vector}, {vector})", _move),
        (f"Tuple((int64, float64, float64))({vector}, int64[::1], {vector}, {vector})", _take),
        (f"float64({vector}, {vector})", _change),
    )

    def made(cache: bool) -> tuple:
        return tuple(numba.njit(kind, fastmath=_FAST, cache=cache)(kernel) for kind, kernel in kernels)

    try:
        return made(True)
    except RuntimeError:  # there is no folder that it may write to
        return made(False)


def _add_products(tile: Any, start: Any, stop: Any, y: Any, out: Any) -> None:
    j = start
    while j + 4 <= stop:  # four at once: more streams than that slow each other down
        a, b, c, d = tile[j], tile[j + 1], tile[j + 2], tile[j + 3]
        p = q = r = s = 0.0
        for i in range(y.size):
            p += a[i] * y[i]
            q += b[i] * y[i]
            r += c[i] * y[i]
            s += d[i] * y[i]
        out[j - start] += p
        out[j - start + 1] += q
        out[j - start + 2] += r
        out[j - start + 3] += s
        j += 4
    while j < stop:
        a, p = tile[j], 0.0
        for i in range(y.size):
            p += a[i] * y[i]
        out[j - start] += p
        j += 1


def _add_rows(tile: Any, start: Any, stop: Any, coefficients: Any, out: Any) -> None:
    j = start
    while j + 4 <= stop:
        a, b, c, d = tile[j], tile[j + 1], tile[j + 2], tile[j + 3]
        p, q = coefficients[j - start], coefficients[j - start + 1]
        r, s = coefficients[j - start + 2], coefficients[j - start + 3]
        for i in range(out.size):
            out[i] += p * a[i] + q * b[i] + r * c[i] + s * d[i]
        j += 4
    while j < stop:
        a, p = tile[j], coefficients[j - start]
        for i in range(out.size):
            out[i] += p * a[i]
        j += 1


def _move(here: Any, way: Any, step: Any, out: Any, copy: Any) -> None:
    for i in range(out.size):
        moved = here[i] + step * way[i]
        out[i] = moved
        copy[i] = moved


def _take(gradient: Any, bits: Any, way: Any, out: Any) -> Any:
    largest, slope, square = 0, 0.0, 0.0
    for i in range(out.size):
        out[i] = gradient[i]
        slope += gradient[i] * way[i]
        square += way[i] * way[i]
        # Without their sign, doubles are in the order of their bits, and NaN comes behind infinity.
        largest = max(largest, bits[i] & 0x7FFFFFFFFFFFFFFF)
    return largest, slope, square


def _change(gradient: Any, before: Any) -> Any:
    square = 0.0
    for i in range(gradient.size):
        before[i] = gradient[i] - before[i]
        square += gradient[i] * gradient[i]
    return square
