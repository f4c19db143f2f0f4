"""The vectors of a rank's variables on the host, stored as adjacent rows, and the passes of an iteration over them.

A tile is a range of columns of all rows, in contiguous memory. Passes over all rows go tile by tile, so that the output of
one step on a tile is still in cache for the next. The memory is read from one end to the other, which is a tenth faster
than from as many places as there are rows. On a device, `device_vectors` does the same.

The rows are those of the memory of L-BFGS. A slot has two rows. That of a pair stores a gradient change y and a step s. The
current slot, after the newest pair, stores the gradient g at the current point, and the direction from there once it is
computed; the next one stores the gradients of trial points. When a trial is accepted, the slots only change their roles,
and nothing is moved: g becomes y in place, the direction is the step, and the oldest pair's slot is the next for trials.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from mpiad.optimize.constraints import Box
from mpiad.transport.threads import combination, gram, vdot, vdots

# Two ranges fit a core's own cache; the overhead of a call for a whole tile is small compared with its arithmetic.
LENGTH = 16384
# Between the rows of a full tile: at distances of a power of two they would share a few places of the cache, and reading
# seven rows at once would be a fifth slower.
PADDING = 24

# Positions of rows: as slices, each with the positions of its coefficients or products.
Parts = list[tuple[slice, slice]]
Outputs = tuple[np.ndarray, np.ndarray | None]


class Ring:
    """Roles of the slots.

    `maxcor`: largest number of pairs. `first`: slot of the oldest pair. `count`: number of pairs.
    """

    def __init__(self, maxcor: int):
        self._maxcor, self._slots = maxcor, maxcor + 2  # the current one, and that of trials
        self.first = self.count = 0

    @property
    def height(self) -> int:
        """Return the number of rows."""
        return 2 * self._slots

    @property
    def gradient(self) -> int:
        """Return the current gradient's row."""
        return 2 * ((self.first + self.count) % self._slots)

    @property
    def direction(self) -> int:
        """Return the row of the direction from there."""
        return self.gradient + 1

    @property
    def newest(self) -> int:
        """Return the row of the newest pair's y; that of its s is the next."""
        return 2 * ((self.first + self.count - 1) % self._slots)

    @property
    def trial(self) -> int:
        """Return the row for a trial point's gradient."""
        return 2 * ((self.first + self.count + 1) % self._slots)

    def advance(self) -> None:
        """Make the current slot the newest pair, and the trial's the current one."""
        if self.count < self._maxcor:
            self.count += 1
        else:
            self.first = (self.first + 1) % self._slots

    def forget(self) -> None:
        """Drop all pairs; the current slot is unchanged."""
        # Without pairs the current slot is the first.
        self.first, self.count = self.gradient // 2, 0

    def rows(self) -> np.ndarray:
        """Return the rows of all pairs, y before s and the oldest first, and the current gradient's at the end."""
        return (2 * self.first + np.arange(2 * self.count + 1)) % self.height

    def parts(self) -> list[tuple[slice, slice]]:
        """Return the slices of those rows, one or two, each with its positions in `rows()`."""
        start, length = 2 * self.first, 2 * self.count + 1
        before_end = min(length, self.height - start)
        found = [(slice(start, start + before_end), slice(0, before_end))]
        if before_end < length:
            found.append((slice(0, length - before_end), slice(before_end, length)))
        return found


class HostVectors:
    """Rows of doubles; other vectors have shape (size,).

    `height`: number of rows. `size`: length of each. `box`: the bounds of the variables.
    """

    def __init__(self, height: int, size: int, box: Box | None = None):
        self.height, self.size, self.box, self._clipped = height, size, box, False
        whole, rest = divmod(size, LENGTH)
        # Zeros, since all of it is written to a checkpoint, also before its first use.
        self.memory = np.zeros(height * (whole * (LENGTH + PADDING) + rest))

    def __iter__(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield each tile, shape (rows, length), after the slice of the vectors that it stores."""
        height, size, begin = self.height, self.size, 0
        for start in range(0, size, LENGTH):
            length = min(LENGTH, size - start)
            stride = length + PADDING if length == LENGTH else length
            tile = self.memory[begin : begin + height * stride].reshape(height, stride)
            yield slice(start, start + length), tile[:, :length]
            begin += height * stride

    def new(self) -> np.ndarray:
        """Return an uninitialized vector."""
        return np.empty(self.size)

    def to_host(self, x: np.ndarray) -> np.ndarray:
        """Return an array on the host."""
        return x

    def from_host(self, x: np.ndarray) -> np.ndarray:
        """Return an array of the host in the form for the passes; for rows, shape (height, size), the memory."""
        if x.ndim == 1:
            return x
        for part, tile in self:
            tile[...] = x[:, part]
        return self.memory

    def read(self, row: int, out: np.ndarray) -> np.ndarray:
        """Copy a row to a vector, and return the vector."""
        for part, tile in self:
            np.copyto(out[part], tile[row])
        return out

    def write(self, row: int, vector: np.ndarray) -> None:
        """Copy a vector to a row."""
        for part, tile in self:
            np.copyto(tile[row], vector[part])

    # ---- without bounds

    def products(self, ring: Ring, change: bool, gradient: bool) -> tuple[np.ndarray, np.ndarray, float]:
        """Return the products of the ring's rows with two vectors, and the square of the gradient if one is requested.

        With `change` the newest pair has the previous gradient in place of its change: the change is computed, and is the
        first vector. With `gradient` the gradient is the second.
        """
        of_change, of_gradient = np.zeros((2, 2 * ring.count + 1))
        parts, square = ring.parts(), 0.0
        if change:
            square = self.multiply(parts, ring.newest, ring.gradient, of_change)
        if gradient:
            square = self.multiply(parts, ring.gradient, ring.gradient, of_gradient)
        return of_change, of_gradient, square

    def multiply(self, parts: Parts, before: int, row: int, out: np.ndarray) -> float:
        """Replace row `before` by the change from it to `row`, if they differ; write the products of rows with it.

        Returns the square of `row`.
        """
        out.fill(0.0)
        square = 0.0
        for _, tile in self:
            if before != row:
                np.subtract(tile[row], tile[before], out=tile[before])
            square += float(vdot(tile[row], tile[row]))
            for rows, places in parts:
                out[places] += vdots(tile[rows], tile[before], self.size)
        return square

    def combine(self, parts: Parts, coefficients: np.ndarray, row: int) -> None:
        """Write the combination of rows with coefficients into another row."""
        for _, tile in self:
            self._combine(tile, parts, coefficients, tile[row])

    def advance(
        self, parts: Parts, coefficients: np.ndarray, row: int, here: np.ndarray, step: float, outs: Outputs
    ) -> None:
        """Combine as `combine` does, if there are parts, and write the point at a step along the row from `here`.

        `outs` are a vector for the point, and one for a copy or None.
        """
        out, copy = outs
        for part, tile in self:
            direction, there = tile[row], out[part]
            if parts:
                self._combine(tile, parts, coefficients, direction)
            np.multiply(direction, step, out=there)
            there += here[part]
            if copy is not None:
                np.copyto(copy[part], there)

    def _combine(self, tile: np.ndarray, parts: Parts, coefficients: np.ndarray, out: np.ndarray) -> None:
        first, *others = parts
        combination(coefficients[first[1]], tile[first[0]], self.size, out)
        for rows, places in others:
            out += combination(coefficients[places], tile[rows], self.size)

    @np.errstate(over="ignore", invalid="ignore")  # a trial point may not be finite, which the line search checks
    def take(self, gradient: np.ndarray, direction: int, out: int) -> tuple[float, float, float]:
        """Copy a gradient to row `out`; return its largest absolute entry, slope along `direction`, and that row's square.

        If an entry isn't finite, the largest is infinite.
        """
        largest = slope = square = 0.0
        for part, tile in self:
            copied, along = tile[out], tile[direction]
            np.copyto(copied, gradient[part])
            largest = max(largest, _largest(copied))
            slope += float(vdot(copied, along))
            square += float(vdot(along, along))
        return largest, slope, square

    # ---- within bounds

    def project(self, x: np.ndarray) -> None:
        """Project a vector onto the bounds, in place."""
        self.box.project(x)  # type: ignore[union-attr]

    def products_of_free(
        self, ring: Ring, x: np.ndarray, norm: float, before: np.ndarray | None
    ) -> tuple[np.ndarray, float]:
        """Return the products of the ring's rows with each other over free variables, and the slope of the others.

        At `x`, the current point, `norm` is the largest absolute entry of the projected gradient on any rank; `before` is
        the previous point if the step from it belongs to the newest pair.
        """
        rows, box = ring.rows(), self.box
        products, of_held = np.zeros((len(rows), len(rows))), 0.0
        for part, tile in self:
            gradient = tile[ring.gradient]
            if before is not None:
                np.subtract(gradient, tile[ring.newest], out=tile[ring.newest])
                np.subtract(x[part], before[part], out=tile[ring.newest + 1])  # the step after projection
            free, projected = box.free_and_step(x[part], gradient, norm, part)  # type: ignore[union-attr]
            of_held += vdot(gradient, np.where(free, 0.0, projected))
            products += gram(tile[rows] * free)
        return products, of_held

    def turn(self, ring: Ring, x: np.ndarray, norm: float) -> None:
        """Make the direction send variables held by a bound straight to it."""
        for part, tile in self:
            free, projected = self.box.free_and_step(x[part], tile[ring.gradient], norm, part)  # type: ignore[union-attr]
            np.copyto(tile[ring.direction], projected, where=~free)

    def advance_within(self, row: int, here: np.ndarray, step: float, outs: Outputs) -> None:
        """Write the projected point at a step along the row from `here`; see `advance`."""
        out, copy = outs
        self._clipped = False
        for part, tile in self:
            np.multiply(tile[row], step, out=out[part])
            out[part] += here[part]
            self._clipped |= self.box.project(out[part], part)  # type: ignore[union-attr]
        if copy is not None:
            np.copyto(copy, out)

    @np.errstate(over="ignore", invalid="ignore")  # as in `take`
    def take_within(self, ring: Ring, gradient: np.ndarray, x: np.ndarray, here: np.ndarray | None) -> list[float]:
        """Copy the gradient of a trial point x into its row; return the measures of the point.

        They are the largest absolute entry of the projected gradient, infinite if an entry of the gradient isn't finite;
        for a step from `here` the slope along the direction, the step times the gradients before and here, and its square;
        and whether a bound has stopped any variable.
        """
        found = np.zeros(5)
        for part, tile in self:
            largest, *terms = self._measured(ring, tile, gradient[part], part, (x, here))
            found[0] = max(found[0], largest)
            found[1:] += terms
        return [*found.tolist(), float(here is not None and self._clipped)]

    def _measured(
        self, ring: Ring, tile: np.ndarray, gradient: np.ndarray, part: slice, points: tuple[np.ndarray, np.ndarray | None]
    ) -> tuple[float, float, float, float, float]:
        (x, here), trial, box = points, tile[ring.trial], self.box
        np.copyto(trial, gradient)
        # If a gradient isn't finite, its projected step may still be finite.
        largest = _largest(trial)
        if largest < math.inf:
            largest = float(np.max(np.abs(box.projected_step(x[part], trial, part))))  # type: ignore[union-attr]
        if here is None:
            return largest, 0.0, 0.0, 0.0, 0.0
        moved = x[part] - here[part]
        # A variable that a bound has stopped doesn't move with the step, so it isn't part of the slope.
        direction = tile[ring.direction] * box.inside(x[part], part)  # type: ignore[union-attr]
        slope, square = float(vdot(trial, direction)), float(vdot(moved, moved))
        return largest, slope, float(vdot(tile[ring.gradient], moved)), float(vdot(trial, moved)), square


def _largest(gradient: np.ndarray) -> float:
    """Return the largest absolute entry; infinite if one is NaN."""
    # Two passes without a temporary array, unlike np.abs; both propagate a NaN.
    size = max(float(gradient.max()), -float(gradient.min()))
    return size if size < math.inf else math.inf


def untiled(memory: np.ndarray, size: int) -> np.ndarray:
    """Return the rows of a stored memory, shape (height, size); that of a device has this shape already."""
    if memory.ndim == 2:
        return memory
    whole, rest = divmod(size, LENGTH)
    vectors = HostVectors(len(memory) // (whole * (LENGTH + PADDING) + rest), 0)
    vectors.size, vectors.memory = size, memory
    return np.concatenate([tile for _, tile in vectors], axis=1)
