"""The limited memory on a device: all rows in one array, whose products with two vectors are one operation and one copy.

What the host learns in an iteration is a few numbers: those of the trial point, and the products that go to the root. Of
the vectors themselves nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.optimize.sharded.arithmetic import Arithmetic, Parts
from mpiad.optimize.sharded.box import Box
from mpiad.optimize.sharded.memory import Memory
from mpiad.optimize.sharded.point import Point
from mpiad.optimize.sharded.totals import Totals

__all__ = ["DeviceMemory"]

# Columns that are worked on at a time where that makes arrays of their length: a few tens of megabytes.
_STRETCH = 1 << 18


class _Rows:
    """As `Tiles`: one tile, of all rows in whole length.

    Parameters
    ----------
    height, size : int
    home : ArrayModule
    """

    def __init__(self, height: int, size: int, home: Any):
        self._size, self.memory = size, home.full((height, size), 0.0, float)

    def __iter__(self) -> Iterator[tuple[slice, Array]]:
        yield slice(0, self._size), self.memory

    def read(self, row: int, out: Array) -> Array:
        """Copy a row to a vector, and return that."""
        out[...] = self.memory[row]
        return out

    def write(self, row: int, vector: Array) -> None:
        """Copy a vector to a row."""
        self.memory[row] = vector


class _DeviceArithmetic(Arithmetic):
    """As `Arithmetic`, for arrays of one device."""

    def __init__(self, home: Any):
        self._home = home

    def combine(self, tiles: Any, parts: Parts, coefficients: np.ndarray, row: int) -> None:
        """Combine rows, with coefficients that travel to the device."""
        rows, there = tiles.memory, self._home.to_device(coefficients)
        (part, places), *others = parts
        total = there[places] @ rows[part]
        for part, places in others:
            total += there[places] @ rows[part]
        rows[row] = total

    def advance(
        self, tiles: Any, parts: Parts, coefficients: np.ndarray, row: int, here: Array, step: float,
        outs: tuple[Array, None],
    ) -> None:
        """Combine rows, where there are parts, and write where a step leads."""
        rows, out = tiles.memory, outs[0]
        if parts:
            self.combine(tiles, parts, coefficients, row)
        np.multiply(rows[row], step, out=out)
        out += here

    def take(self, tiles: Any, gradient: Array, way: int, out: int) -> tuple[float, float, float]:
        """Copy a gradient, and measure it by one copy of three numbers."""
        if not gradient.size:  # of nothing there is no largest entry
            return 0.0, 0.0, 0.0
        rows = tiles.memory
        rows[out] = gradient
        copied, along = rows[out], rows[way]
        found = self._home.to_host(np.stack([np.max(np.abs(copied)), np.sum(copied * along), np.sum(along * along)]))
        largest, slope, square = found.tolist()
        # Where an entry is NaN, so is the largest.
        return largest if largest < math.inf else math.inf, slope, square


class DeviceMemory(Memory):
    """As `Memory`, for a piece on a device.

    Parameters
    ----------
    size, maxcor : int
    box : DeviceBox or None
    totals : Totals
    home : ArrayModule

    Attributes
    ----------
    clipped : array of bool, shape ()
        Whether a bound stopped any variable in the last move; on the device.
    """

    def __init__(self, size: int, maxcor: int, box: Box | None, totals: Totals, home: Any):
        self._home = home
        self.clipped: Array = home.full((), False, bool)
        super().__init__(size, maxcor, box, totals)

    def _room(self) -> None:
        self.tiles, self.arithmetic = _Rows(self.ring.height, self._size, self._home), _DeviceArithmetic(self._home)

    def _empty(self) -> Array:
        return self._home.empty((self._size,), float)

    def written(self, x: Array) -> np.ndarray:
        """Return an array on the host, for a file."""
        return self._home.to_host(x)

    def taken(self, x: np.ndarray) -> Array:
        """Return what was read from a file."""
        return self._home.to_device(x)

    def fetched(self, numbers: Array) -> np.ndarray:
        """Return numbers on the host."""
        return self._home.to_host(numbers)

    def _stretches(self) -> Iterator[tuple[slice, Array]]:
        """Yield all rows in stretches, whose sums stay on the device."""
        for start in range(0, self._size, _STRETCH):
            part = slice(start, min(start + _STRETCH, self._size))
            yield part, self.tiles.memory[:, part]

    def _products_of(self, keep: bool, anew: bool) -> np.ndarray:
        rows, gradient = self.tiles.memory, self.tiles.memory[self.ring.gradient]
        vectors = []
        square = np.sum(gradient * gradient)
        if keep:
            change = rows[self.ring.newest]
            np.subtract(gradient, change, out=change)
            vectors.append(change)
        if anew:
            vectors.append(gradient)
        length = 2 * self.ring.count + 1
        of_change, of_gradient = np.zeros((2, length))
        if not self._size:
            return np.zeros(2 * length)
        if not vectors:
            return np.concatenate([of_change, of_gradient[:-1], [float(self._home.to_host(square))]])
        # All rows, those in no use too: one product costs less than two of parts.
        products = rows @ np.stack(vectors, axis=1)
        found = self._home.to_host(np.concatenate([products.reshape(-1), square.reshape(1)]))
        products = found[:-1].reshape(self.ring.height, len(vectors))[self.ring.rows()]
        if keep:
            of_change = products[:, 0]
        if anew:
            of_gradient = products[:, -1]
        return np.concatenate([of_change, of_gradient[:-1], found[-1:]])

    def _products_of_free(self, new: Point, before: Point | None) -> np.ndarray:
        count = 2 * self.ring.count + 1
        if not self._size:
            return np.zeros(count**2 + 1)
        rows, newest, box = self.tiles.memory, self.ring.newest, self._box
        gradient = rows[self.ring.gradient]
        if before is not None:
            np.subtract(gradient, rows[newest], out=rows[newest])
            np.subtract(new.x, before.x, out=rows[newest + 1])  # the step that the bounds have left
        free = box.free(new.x, gradient, new.norm, slice(None))  # type: ignore[union-attr]
        way = box.way(new.x, gradient, slice(None))  # type: ignore[union-attr]
        of_held = np.sum(gradient * np.where(free, 0.0, way))
        # All rows, those in no use too: to pick some on the device would copy their numbers there.
        products = _products_of_columns(rows, free)
        found = self.fetched(np.concatenate([products.reshape(-1), of_held.reshape(1)]))
        wanted = np.ix_(self.ring.rows(), self.ring.rows())
        return np.append(found[:-1].reshape(self.ring.height, self.ring.height)[wanted], found[-1])

    def move(self, at: Point, step: float, out: Array, copy: None) -> bool:  # type: ignore[override]
        """As `Memory.move`; with bounds, `clipped` says on the device what the host isn't told here."""
        if self._box is None:
            return super().move(at, step, out, copy)
        parts = [] if self._made else self.ring.parts()
        row = self.ring.gradient + 1
        if parts:
            self.arithmetic.combine(self.tiles, parts, self._coefficients, row)
            self._turn(at, self._box)
        np.multiply(self.tiles.memory[row], step, out=out)
        out += at.x
        self.clipped, self._made = self._box.project(out), True  # type: ignore[assignment]
        return False

    def _turn(self, at: Point, box: Box) -> None:
        rows, gradient = self.tiles.memory, self.tiles.memory[self.ring.gradient]
        free = box.free(at.x, gradient, at.norm, slice(None))
        rows[self.ring.gradient + 1] = np.where(free, rows[self.ring.gradient + 1], box.way(at.x, gradient, slice(None)))

    def gradient(self, point: Point) -> Array:
        """Return the gradient at the point where the solve is, or at the last trial point."""
        return self.tiles.read(self.ring.gradient if point.settled else self.ring.trial, self._empty())


def _products_of_columns(rows: Array, free: Array) -> Array:
    """Return the products of all rows with each other over the free columns."""
    total: Any = None
    for start in range(0, free.size, _STRETCH):
        part = slice(start, start + _STRETCH)
        products = (rows[:, part] * free[part]) @ rows[:, part].T
        total = products if total is None else total + products
    return total
