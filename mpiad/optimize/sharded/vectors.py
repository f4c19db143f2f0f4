"""The vectors of L-BFGS, stored as the rows of a matrix, and the operations on them: `HostVectors`, and `DeviceVectors`.

A tile is a range of columns of all rows. Operations process one tile after the other, since the one or two rows that a
tile's operations use repeatedly fit into the cache. On a device there is one tile.

Two rows form a slot. The slot of a pair stores a gradient change y and a step s. The current slot, after the newest pair,
stores the gradient g at the current point and the next direction. The slot after it stores the gradient of a trial point,
and that of the best earlier trial of the search.
When a trial is accepted, the slots change their roles without copies: g becomes y in place, the direction becomes the step,
and the slot of the oldest pair becomes the slot for trials.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator
from typing import cast

import numpy as np

from mpiad._typing import Array, Scalar
from mpiad.device import to_host
from mpiad.optimize.constraints import Box
from mpiad.transport.devices.device_arrays import ArrayModule
from mpiad.transport.resources import combination, gram, vdot, vdots

# Columns of a tile: two rows of this length fit into the cache of a core.
LENGTH = 16384
_PADDING = 24  # unused columns, since rows at distances of a power of two share cache sets

# Slices of rows, each with the slice of the corresponding coefficients or products.
Parts = list[tuple[slice, slice]]


class Ring:
    """The roles of the slots: `first` is the slot of the oldest pair, `count` the number of pairs, at most `maxcor`."""

    def __init__(self, maxcor: int):
        self._maxcor, self._slots = maxcor, maxcor + 2  # with the current slot and the slot for trials
        self.first = self.count = 0

    @property
    def height(self) -> int:
        """Return the number of rows."""
        return 2 * self._slots

    @property
    def gradient(self) -> int:
        """Return the row of the current gradient."""
        return 2 * ((self.first + self.count) % self._slots)

    @property
    def direction(self) -> int:
        """Return the row of the current direction."""
        return self.gradient + 1

    @property
    def newest(self) -> int:
        """Return the row of the newest pair's y; the next row is that of its s."""
        return 2 * ((self.first + self.count - 1) % self._slots)

    @property
    def trial(self) -> int:
        """Return the row for a trial point's gradient."""
        return 2 * ((self.first + self.count + 1) % self._slots)

    def advance(self) -> None:
        """Make the current slot the newest pair, and the slot for trials the current slot."""
        if self.count < self._maxcor:
            self.count += 1
        else:
            self.first = (self.first + 1) % self._slots

    def forget(self) -> None:
        """Discard all pairs; the current slot is unchanged."""
        self.first, self.count = self.gradient // 2, 0

    def rows(self) -> np.ndarray:
        """Return the rows of all pairs, y before s and the oldest first, followed by that of the current gradient."""
        return (2 * self.first + np.arange(2 * self.count + 1)) % self.height

    def parts(self) -> list[tuple[slice, slice]]:
        """Return the result of `rows` as one or two slices, each with the slice of its positions in `rows`."""
        start, length = 2 * self.first, 2 * self.count + 1
        before_end = min(length, self.height - start)
        found = [(slice(start, start + before_end), slice(0, before_end))]
        if before_end < length:
            found.append((slice(0, length - before_end), slice(before_end, length)))
        return found


class HostVectors:
    """A matrix of `height` rows of `size` doubles; other vectors have shape (size,). `box` are the bounds."""

    def __init__(self, height: int, size: int, box: Box | None = None):
        self.size, self.box, self._clipped, self._length = size, box, False, LENGTH
        # Zeros, since checkpoints contain all rows, including those that haven't been used.
        self.memory: Array = np.zeros((height, size + _PADDING))[:, :size]

    def __iter__(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield the range of columns of each tile, and the tile, shape (rows, length)."""
        for start in range(0, self.size, self._length):
            part = slice(start, min(start + self._length, self.size))
            yield part, self.memory[:, part]

    def products(self, ring: Ring, change: bool, gradient: bool) -> tuple[np.ndarray, np.ndarray, float]:
        """Return products of the ring's rows with y, which `change` first computes in place, and with g; and g·g."""
        wanted, found, square = np.flatnonzero([change, gradient]).tolist(), np.zeros((2, 2 * ring.count + 1)), 0.0
        for _, tile in self:
            current, newest = tile[ring.gradient], tile[ring.newest]
            if change:
                np.subtract(current, newest, out=newest)
            vectors = [(newest, current)[k] for k in wanted]
            numbers = self.joined(self.row_products(ring, tile, vectors), vdot(current, current))
            found[wanted] += numbers[:-1].reshape(len(vectors), -1)
            square += numbers[-1]
        return found[0], found[1], square

    def row_products(self, ring: Ring, tile: Array, vectors: list[Array]) -> Array:
        """Return a tile's products of the ring's rows with vectors, shape (number of vectors, 2m + 1)."""
        return np.array([np.concatenate([vdots(tile[rows], x, self.size) for rows, _ in ring.parts()]) for x in vectors])

    def joined(self, array: Array, number: Scalar) -> np.ndarray:
        """Return the entries of an array and a number on the host, by one copy from a device."""
        return to_host(np.concatenate([array.reshape(-1), number.reshape(1)]))

    def combine(self, parts: Parts, coefficients: np.ndarray, row: int) -> None:
        """Write a linear combination of rows to another row."""
        (first, positions), *others = parts
        for _, tile in self:
            combination(coefficients[positions], tile[first], self.size, tile[row])
            for rows, positions_of_rows in others:
                tile[row] += combination(coefficients[positions_of_rows], tile[rows], self.size)

    def advance(self, row: int, origin: Array, step: float, out: Array) -> None:
        """Write the point ``origin + step * row``, projected onto the bounds, to the vector `out`."""
        for part, tile in self:
            np.multiply(tile[row], step, out=out[part])
            out[part] += origin[part]
        if self.box is not None:
            self._clipped = self.box.project(out)

    @np.errstate(over="ignore", invalid="ignore")  # a trial point may not be finite, which the line search checks
    def store_trial(self, gradient: Array, direction: int, out: int) -> list[float]:
        """Copy a gradient g to row `out`; return its largest absolute entry (infinite if not finite), g·d and d·d."""
        found = np.zeros(3)
        for part, tile in self:
            copied, d = tile[out], tile[direction]
            np.copyto(copied, gradient[part])
            largest, *products = self.numbers([_largest(copied), vdot(copied, d), vdot(d, d)])
            found[0] = max(found[0], largest if largest < math.inf else math.inf)
            found[1:] += products
        return found.tolist()

    def numbers(self, scalars: list[Array]) -> list[float]:
        """Return scalars on the host, by one copy from a device."""
        return list(map(float, scalars))

    def products_of_free(self, ring: Ring, x: Array, norm: float, before: Array | None) -> tuple[np.ndarray, float]:
        """Return the rows' products over free variables, and the slope over others, at x; store the step from `before`."""
        count, box = 2 * ring.count + 1, cast(Box, self.box)
        found = np.zeros(count**2 + 1)
        for part, tile in self:
            gradient = tile[ring.gradient]
            if before is not None:
                np.subtract(gradient, tile[ring.newest], out=tile[ring.newest])
                np.subtract(x[part], before[part], out=tile[ring.newest + 1])  # the step after projection
            free, projected = box.free_and_step(x[part], gradient, norm, part)
            found += self.joined(self.gram(ring, tile, free), vdot(gradient, np.where(free, 0.0, projected)))
        return found[:-1].reshape(count, count), found[-1]

    def gram(self, ring: Ring, tile: Array, free: Array) -> Array:
        """Return a tile's products of the ring's rows over the free variables."""
        return gram(tile[ring.rows()] * free)

    def set_direction_at_bounds(self, ring: Ring, x: Array, norm: float) -> None:
        """Set the direction of the variables that aren't free to their projected gradient step."""
        for part, tile in self:
            free, projected = self.box.free_and_step(x[part], tile[ring.gradient], norm, part)  # type: ignore[union-attr]
            tile[ring.direction] = np.where(free, tile[ring.direction], projected)

    @np.errstate(over="ignore", invalid="ignore")  # as in `store_trial`
    def store_trial_within(self, ring: Ring, gradient: Array, x: Array, origin: Array | None) -> list[float]:
        """Copy the gradient of a trial point x to its row, and return numbers for the line search.

        These are: the largest absolute entry of the projected gradient, infinite if an entry of the gradient isn't finite;
        for a step from `origin` the slope along the direction, the products of the step with the gradients at `origin` and
        x, and the square of the step; a positive number if a bound has stopped any variable, otherwise zero.
        """
        found, box = np.zeros(6), cast(Box, self.box)
        for part, tile in self:
            trial = tile[ring.trial]
            np.copyto(trial, gradient[part])
            numbers = [_largest(trial), _largest(box.projected_step(x[part], trial, part))]
            if origin is not None:
                moved = x[part] - origin[part]
                # Variables that a bound has stopped don't contribute to the slope.
                direction = tile[ring.direction] * box.inside(x[part], part)
                factors = (trial, direction), (tile[ring.gradient], moved), (trial, moved), (moved, moved)
                numbers += [*(vdot(a, b) for a, b in factors), 1.0 * self._clipped]
            entry, largest, *others = self.numbers(numbers)
            # If a gradient isn't finite, its projected step may still be finite.
            found[0] = max(found[0], largest if entry < math.inf else math.inf)
            found[1:] += others or 0.0
        return found.tolist()


def local_dot(a: Array, b: Array) -> float:
    """Return this rank's term of the inner product of two vectors, which are on the host or a device."""
    return float(to_host(vdot(a, b)))


def _largest(gradient: Array) -> Scalar:
    """Return the largest absolute entry; NaN if one is NaN."""
    return np.maximum(np.max(gradient), -np.min(gradient))  # without the temporary array of np.abs


# Columns that are multiplied at once, so that temporary copies take at most a few tens of megabytes.
_MAX_COLUMNS = 1 << 18


class DeviceVectors(HostVectors):
    """The vectors on a device, as one tile."""

    def __init__(self, height: int, size: int, box: Box | None, xp: ArrayModule):
        self.size, self.box, self._xp, self._length = size, box, xp, max(size, 1)
        self.memory = xp.full((height, size), 0.0, float)

    def row_products(self, ring: Ring, tile: Array, vectors: list[Array]) -> Array:
        """Return the products; see `HostVectors.row_products`."""
        # One product with all rows, including unused ones, costs less than two products with the used rows.
        return _of_ring(ring, tile @ np.stack(vectors, axis=1)).T

    def combine(self, parts: Parts, coefficients: np.ndarray, row: int) -> None:
        """Write a linear combination of rows to another row; the coefficients are copied to the device."""
        factors = self._xp.to_device(coefficients)
        terms = (factors[positions] @ self.memory[rows] for rows, positions in parts)
        self.memory[row] = functools.reduce(operator.add, terms)

    def numbers(self, scalars: list[Array]) -> list[float]:
        """Return scalars on the host, by one copy."""
        return to_host(np.stack(scalars)).tolist()

    def gram(self, ring: Ring, tile: Array, free: Array) -> Array:
        """Return the products; see `HostVectors.gram`."""
        # All rows are multiplied, since an array of only the used rows would be a copy.
        ranges = [slice(start, start + _MAX_COLUMNS) for start in range(0, self.size, _MAX_COLUMNS)]
        products = functools.reduce(operator.add, ((tile[:, part] * free[part]) @ tile[:, part].T for part in ranges))
        return _of_ring(ring, _of_ring(ring, products).T).T


def _of_ring(ring: Ring, array: Array) -> Array:
    """Return the ring's rows of a device array."""
    return np.concatenate([array[rows] for rows, _ in ring.parts()])
