"""The vectors of L-BFGS on a device, as the rows of one array; an iteration copies only a few numbers to the host."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator

import numpy as np

from mpiad._typing import Array
from mpiad.optimize.constraints import Box
from mpiad.optimize.sharded.host_vectors import HostVectors, Parts, Ring
from mpiad.transport.devices.device_arrays import ArrayModule

# Columns that are multiplied at once, so that temporary copies take at most a few tens of megabytes.
_MAX_COLUMNS = 1 << 18


class DeviceVectors(HostVectors):
    """The vectors on a device, as one tile; the given `box` is copied to the device."""

    def __init__(self, height: int, size: int, box: Box | None, xp: ArrayModule):
        self.height, self.size, self._xp = height, size, xp
        self.memory: Array = xp.full((height, size), 0.0, float)
        self.box = None if box is None else Box(*map(xp.to_device, box))

    def __iter__(self) -> Iterator[tuple[slice, Array]]:
        """Yield the range of all columns, and all rows."""
        if self.size:  # empty arrays have no largest entries
            yield slice(0, self.size), self.memory

    def new(self) -> Array:
        """Return an uninitialized vector."""
        return self._xp.empty((self.size,), float)

    def to_host(self, x: Array) -> np.ndarray:
        """Return an array on the host."""
        return self._xp.to_host(x)

    def from_host(self, x: np.ndarray) -> Array:
        """Return a copy of a host array on the device."""
        return self._xp.to_device(x)

    def products(self, ring: Ring, change: bool, gradient: bool) -> tuple[np.ndarray, np.ndarray, float]:
        """Return the inner products of the ring's rows with y and with g, and g·g; see `HostVectors.products`."""
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
        terms = (factors[positions] @ self.memory[rows] for rows, positions in parts)
        self.memory[row] = functools.reduce(operator.add, terms)

    def numbers(self, found: list[Array]) -> list[float]:
        """Return scalars on the host, by one copy."""
        return self.to_host(np.stack(found)).tolist()

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
        ranges = [slice(start, start + _MAX_COLUMNS) for start in range(0, self.size, _MAX_COLUMNS)]
        products = functools.reduce(operator.add, ((rows[:, part] * free[part]) @ rows[:, part].T for part in ranges))
        found = self.to_host(np.concatenate([products.reshape(-1), other_slope.reshape(1)]))
        return found[:-1].reshape(self.height, self.height)[np.ix_(ring.rows(), ring.rows())], found[-1]
