"""The vectors of L-BFGS on a device, as the rows of one array; an iteration copies only a few numbers to the host."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator

import numpy as np

from mpiad._typing import Array
from mpiad.optimize.constraints import Box
from mpiad.optimize.sharded.host_vectors import Parts, Ring
from mpiad.transport.devices.device_arrays import ArrayModule

# Columns per range that `DeviceVectors` yields, so that temporary copies of a range take at most a few tens of megabytes.
_MAX_COLUMNS = 1 << 18


class DeviceVectors:
    """The counterpart of `HostVectors` on a device, with the same methods; the given `box` is copied to the device."""

    def __init__(self, height: int, size: int, box: Box | None, xp: ArrayModule):
        self.height, self.size, self._xp = height, size, xp
        self.memory: Array = xp.full((height, size), 0.0, float)
        self.box = None if box is None else Box(*map(xp.to_device, box))
        # Whether the last point was changed by the projection onto the bounds; on the device.
        self._clipped: Array = xp.full((), False, bool)

    def __iter__(self) -> Iterator[tuple[slice, Array]]:
        """Yield ranges of columns, and these columns of all rows."""
        for start in range(0, self.size, _MAX_COLUMNS):
            part = slice(start, min(start + _MAX_COLUMNS, self.size))
            yield part, self.memory[:, part]

    def new(self) -> Array:
        """Return an uninitialized vector."""
        return self._xp.empty((self.size,), float)

    def to_host(self, x: Array) -> np.ndarray:
        """Return an array on the host."""
        return self._xp.to_host(x)

    def from_host(self, x: np.ndarray) -> Array:
        """Return a copy of a host array on the device."""
        return self._xp.to_device(x)

    def read(self, row: int, out: Array) -> Array:
        """Copy a row to a vector, and return the vector."""
        out[...] = self.memory[row]
        return out

    def write(self, row: int, vector: Array) -> None:
        """Copy a vector to a row."""
        self.memory[row] = vector

    def products(self, ring: Ring, change: bool, gradient: bool) -> tuple[np.ndarray, np.ndarray, float]:
        """Return the inner products of the ring's rows with the newest change y of the gradient, and with the gradient g.

        The third result is g·g. For the parameters see `HostVectors.products`.
        """
        current, vectors = self.memory[ring.gradient], []
        square = np.sum(current * current)
        if change:
            newest = self.memory[ring.newest]
            np.subtract(current, newest, out=newest)
            vectors.append(newest)
        if gradient:
            vectors.append(current)
        of_change, of_gradient = np.zeros((2, 2 * ring.count + 1))
        if not self.size:
            return of_change, of_gradient, 0.0
        # One product with all rows, including unused ones, costs less than two products with the used rows.
        products = self.memory @ np.stack(vectors, axis=1)
        found = self.to_host(np.concatenate([products.reshape(-1), square.reshape(1)]))
        products = found[:-1].reshape(self.height, len(vectors))[ring.rows()]
        return products[:, 0] if change else of_change, products[:, -1] if gradient else of_gradient, found[-1]

    def combine(self, parts: Parts, coefficients: np.ndarray, row: int) -> None:
        """Write a linear combination of rows to another row; the coefficients are copied to the device."""
        factors = self._xp.to_device(coefficients)
        (part, positions), *others = parts
        total = factors[positions] @ self.memory[part]
        for part, positions in others:
            total += factors[positions] @ self.memory[part]
        self.memory[row] = total

    def advance(self, parts: Parts, coefficients: np.ndarray, row: int, origin: Array, step: float, out: Array) -> None:
        """Call `combine`, unless `parts` is empty, and write the point ``origin + step * row``."""
        if parts:
            self.combine(parts, coefficients, row)
        np.multiply(self.memory[row], step, out=out)
        out += origin

    def store_trial(self, gradient: Array, direction: int, out: int) -> tuple[float, float, float]:
        """Copy a gradient to a row, and return the numbers of `HostVectors.store_trial`, by one copy to the host."""
        if not self.size:  # an empty array has no largest entry
            return 0.0, 0.0, 0.0
        self.memory[out] = gradient
        copied, d = self.memory[out], self.memory[direction]
        found = self.to_host(np.stack([np.max(np.abs(copied)), np.sum(copied * d), np.sum(d * d)]))
        largest, slope, square = found.tolist()
        # If an entry is NaN, the largest is NaN, too.
        return largest if largest < math.inf else math.inf, slope, square

    def project(self, x: Array) -> Array:
        """Project a vector onto the bounds, in place; return whether any variable changed, as an array on the device."""
        low, high = self.box  # type: ignore[misc]
        moved = np.any((x < low) | (x > high))
        x[...] = np.clip(x, low, high)
        return moved

    def products_of_free(self, ring: Ring, x: Array, norm: float, before: Array | None) -> tuple[np.ndarray, float]:
        """Return the numbers of `HostVectors.products_of_free`, by one copy to the host."""
        count = 2 * ring.count + 1
        if not self.size:
            return np.zeros((count, count)), 0.0
        rows, gradient = self.memory, self.memory[ring.gradient]
        if before is not None:
            np.subtract(gradient, rows[ring.newest], out=rows[ring.newest])
            np.subtract(x, before, out=rows[ring.newest + 1])  # the step after projection
        free, projected = self.box.free_and_step(x, gradient, norm, slice(None))  # type: ignore[union-attr]
        other_slope = np.sum(gradient * np.where(free, 0.0, projected))
        # All rows are multiplied, since an array of only the used rows would be a copy.
        products = functools.reduce(operator.add, ((tile * free[part]) @ tile.T for part, tile in self))
        found = self.to_host(np.concatenate([products.reshape(-1), other_slope.reshape(1)]))
        return found[:-1].reshape(self.height, self.height)[np.ix_(ring.rows(), ring.rows())], found[-1]

    def set_direction_at_bounds(self, ring: Ring, x: Array, norm: float) -> None:
        """Set the direction of the variables that aren't free to their projected gradient step."""
        gradient, whole = self.memory[ring.gradient], slice(None)
        free, projected = self.box.free_and_step(x, gradient, norm, whole)  # type: ignore[union-attr]
        self.memory[ring.direction] = np.where(free, self.memory[ring.direction], projected)

    def advance_within(self, row: int, origin: Array, step: float, out: Array) -> None:
        """Write the projection of the point ``origin + step * row``."""
        np.multiply(self.memory[row], step, out=out)
        out += origin
        self._clipped = self.project(out)

    def store_trial_within(self, ring: Ring, gradient: Array, x: Array, origin: Array | None) -> list[float]:
        """Copy the gradient of a trial point to its row; return the numbers of `HostVectors.store_trial_within`."""
        if not self.size:
            return [0.0] * 6
        box: Box = self.box  # type: ignore[assignment]
        self.memory[ring.trial] = gradient
        numbers = [np.max(np.abs(gradient)), np.max(np.abs(box.projected_step(x, gradient, slice(None))))]
        if origin is not None:
            moved = x - origin
            # Variables that a bound has stopped don't contribute to the slope.
            direction = self.memory[ring.direction] * box.inside(x, slice(None))
            factors = (gradient, direction), (self.memory[ring.gradient], moved), (gradient, moved), (moved, moved)
            numbers += [*(np.sum(a * b) for a, b in factors), self._clipped.astype(float)]
        entry, largest, *rest = self.to_host(np.stack(numbers)).tolist()
        # If a gradient isn't finite, its projected step may still be finite; if an entry is NaN, the largest is NaN, too.
        return [largest if entry < math.inf else math.inf, *(rest or [0.0] * 5)]
