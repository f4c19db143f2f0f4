"""The passes of an iteration compiled, where llvmlite is installed and the piece is large.

BLAS multiplies rows of a tile with vectors at two thirds of the speed at which memory can be read, and each of NumPy's
calls goes over its arrays again. Here each stretch is read once, seven rows at a time: one row alone is read at half of
the speed, since a core then waits for too few lines of memory at once.
"""

from __future__ import annotations

import functools
import inspect
import math
from importlib.util import find_spec

import numpy as np

from mpiad.compiling.cache import kernel_of
from mpiad.optimize.sharded import kernels
from mpiad.optimize.sharded.arithmetic import Arithmetic, Parts
from mpiad.optimize.sharded.tiles import LENGTH, PADDING, Tiles

__all__ = ["arithmetic_for"]

# Below, an iteration takes less than a millisecond, and to compile the loops half a second.
_LARGE = 1 << 18
# Sums may be reordered; NaN and infinities stay what they are.
_FAST = "reassoc contract nsz arcp"


def arithmetic_for(size: int) -> Arithmetic:
    """Return what a piece of this many variables is worked on with."""
    return Arithmetic() if size < _LARGE or find_spec("llvmlite") is None else Compiled(_functions())


class Compiled(Arithmetic):
    """As `Arithmetic`, compiled.

    Parameters
    ----------
    functions : tuple
        Of `_functions`.
    """

    def __init__(self, functions: tuple):
        self._products, self._combination, self._taken = functions

    def products(self, tiles: Tiles, parts: Parts, row: int, out: np.ndarray) -> float:
        """Write the products of rows with one of them."""
        return self._multiplied(tiles, parts, row, row, out)

    def change(self, tiles: Tiles, parts: Parts, before: int, row: int, out: np.ndarray) -> float:
        """Turn the gradient before into the change, and write the products of rows with it."""
        return self._multiplied(tiles, parts, before, row, out)

    def _multiplied(self, tiles: Tiles, parts: Parts, before: int, row: int, out: np.ndarray) -> float:
        rows = _rows_of(parts)
        found = np.zeros(rows.size)
        total = np.zeros(1)
        self._products(*_place(tiles), rows, before, row, found, total)
        out[:] = found[: out.size]
        return total[0]

    def combine(self, tiles: Tiles, parts: Parts, coefficients: np.ndarray, row: int) -> None:
        """Write the combination of rows."""
        nothing = np.zeros(0)
        self._combination(*_place(tiles), *_weighed(parts, coefficients), row, nothing, 0.0, nothing, nothing)

    def advance(
        self, tiles: Tiles, parts: Parts, coefficients: np.ndarray, row: int, here: np.ndarray, step: float,
        outs: tuple[np.ndarray, np.ndarray | None],
    ) -> None:
        """Combine, and write where a step leads."""
        out, copy = outs
        copy = out if copy is None else copy
        self._combination(*_place(tiles), *_weighed(parts, coefficients), row, here, step, out, copy)

    def take(self, tiles: Tiles, gradient: np.ndarray, way: int, out: int) -> tuple[float, float, float]:
        """Copy a gradient, and measure it."""
        gradient = np.require(gradient, np.float64, ["C", "A", "W"])  # of one type, which is compiled
        bits, total = np.zeros(1, np.int64), np.zeros(2)
        self._taken(*_place(tiles), gradient, gradient.view(np.int64), way, out, bits, total)
        largest, (slope, square) = float(bits.view(np.float64)[0]), total
        return largest if largest < math.inf else math.inf, slope, square


def _place(tiles: Tiles) -> tuple[np.ndarray, int, int, int, int]:
    return tiles.memory, tiles.height, tiles.size, LENGTH, PADDING


def _rows_of(parts: Parts) -> np.ndarray:
    """Return the numbers of rows, and the last once more until they are a multiple of those that are read at once."""
    rows = [np.arange(rows.start, rows.stop) for rows, _ in parts]
    found = np.concatenate([*rows, np.zeros(0, np.int64)])
    return np.pad(found, (0, -found.size % kernels.AT_ONCE), "edge") if found.size else found


def _weighed(parts: Parts, coefficients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows = _rows_of(parts)
    weights = np.zeros(rows.size)  # zero for the last row's repetitions
    for _, places in parts:
        weights[places] = coefficients[places]
    return rows, weights


@functools.cache
def _functions() -> tuple:
    text, vector, numbers = inspect.getsource(kernels), "float64[::1]", "int64[::1]"
    place = f"{vector}, int64, int64, int64, int64"
    signatures = {
        "products": f"void({place}, {numbers}, int64, int64, {vector}, {vector})",
        "combination": f"void({place}, {numbers}, {vector}, int64, {vector}, float64, {vector}, {vector})",
        "taken": f"void({place}, {vector}, {numbers}, int64, int64, {numbers}, {vector})",
    }
    return tuple(kernel_of(text, name, signature, _FAST).function for name, signature in signatures.items())
