"""The passes of an iteration without bounds compiled, if the piece is large.

BLAS multiplies rows of a tile with vectors at two thirds of the speed at which memory can be read, and each of NumPy's
calls goes over its arrays again. Here each stretch is read once, seven rows at a time: one row alone is read at half of
the speed, since a core then waits for too few lines of memory at once.

Loops of `jit` read all rows at once: 21 rows of 2²⁰ numbers are multiplied with a vector in 11.9 ms, and combined in 8.8,
where these loops take 6.2 and 6.0; and each number of pairs, at each place of the ring, would be a program of its own.

The loops are in the language of `mpiad.compiling.translation`, which takes them from this file's text. `memory` holds
tiles of `height` rows of `length` numbers, with `padding` behind each row of a full tile: see `host_vectors`.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from mpiad.compiling.cache import functions_of
from mpiad.optimize.box_constraints import Box
from mpiad.optimize.sharded.host_vectors import LENGTH, PADDING, HostVectors, Parts

# Below, an iteration takes less than a millisecond, and to compile the loops half a second.
_LARGE = 1 << 18
# Sums may be reordered; NaN and infinities stay what they are.
_FAST = "reassoc contract nsz arcp"
# Rows that are read at the same time, each by a name of its own; lists of rows have a multiple of so many.
_AT_ONCE = 7


def host_vectors(height: int, size: int, box: Box | None) -> HostVectors:
    """Return what a piece of this many variables is worked on with."""
    compiled = size >= _LARGE
    return (CompiledVectors if compiled else HostVectors)(height, size, box)


class CompiledVectors(HostVectors):
    """As `HostVectors`, with compiled passes."""

    def __init__(self, height: int, size: int, box: Box | None = None):
        super().__init__(height, size, box)
        self._products, self._combination, self._taken = _functions()

    @property
    def _place(self) -> tuple[np.ndarray, int, int, int, int]:
        return self.memory, self.height, self.size, LENGTH, PADDING

    def multiply(self, parts: Parts, before: int, row: int, out: np.ndarray) -> float:
        """Turn a row into a change, and write the products of rows with it."""
        rows = _rows_of(parts)
        found, total = np.zeros(rows.size), np.zeros(1)
        self._products(*self._place, rows, before, row, found, total)
        out[:] = found[: out.size]
        return total[0]

    def combine(self, parts: Parts, coefficients: np.ndarray, row: int) -> None:
        """Write the combination of rows."""
        nothing = np.zeros(0)
        self._combination(*self._place, *_weighed(parts, coefficients), row, nothing, 0.0, nothing, nothing)

    def advance(
        self, parts: Parts, coefficients: np.ndarray, row: int, here: np.ndarray, step: float,
        outs: tuple[np.ndarray, np.ndarray | None],
    ) -> None:  # fmt: skip
        """Combine, and write where a step leads."""
        out, copy = outs
        copy = out if copy is None else copy
        self._combination(*self._place, *_weighed(parts, coefficients), row, here, step, out, copy)

    def take(self, gradient: np.ndarray, way: int, out: int) -> tuple[float, float, float]:
        """Copy a gradient, and measure it."""
        gradient = np.require(gradient, np.float64, ["C", "A", "W"])  # of one type, which is compiled
        bits, total = np.zeros(1, np.int64), np.zeros(2)
        self._taken(*self._place, gradient, gradient.view(np.int64), way, out, bits, total)
        largest, (slope, square) = float(bits.view(np.float64)[0]), total
        return largest if largest < math.inf else math.inf, slope, square


def _rows_of(parts: Parts) -> np.ndarray:
    """Return the numbers of rows, and the last once more until they are a multiple of those that are read at once."""
    rows = [np.arange(rows.start, rows.stop) for rows, _ in parts]
    found = np.concatenate([*rows, np.zeros(0, np.int64)])
    return np.pad(found, (0, -found.size % _AT_ONCE), "edge") if found.size else found


def _weighed(parts: Parts, coefficients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows = _rows_of(parts)
    weights = np.zeros(rows.size)  # zero for the last row's repetitions
    for _, places in parts:
        weights[places] = coefficients[places]
    return rows, weights


@functools.cache
def _functions() -> tuple:
    vector, numbers = "float64[::1]", "int64[::1]"
    place = f"{vector}, int64, int64, int64, int64"
    signatures = {
        "products": f"void({place}, {numbers}, int64, int64, {vector}, {vector})",
        "combination": f"void({place}, {numbers}, {vector}, int64, {vector}, float64, {vector}, {vector})",
        "taken": f"void({place}, {vector}, {numbers}, int64, int64, {numbers}, {vector})",
    }
    return tuple(functions_of(__name__, signatures, _FAST))


def products(
    memory: np.ndarray, height: int, size: int, length: int, padding: int, rows: np.ndarray, before: int, row: int,
    out: np.ndarray, total: np.ndarray,
) -> None:  # fmt: skip
    """Turn row `before` into the change to `row`, if it is another; add its products with rows, and give row's square."""
    square, begin = 0.0, 0
    for start in range(0, size, length):
        n = min(length, size - start)
        stride = n + padding if n == length else n
        v = memory[begin + before * stride : begin + before * stride + n]
        w = memory[begin + row * stride : begin + row * stride + n]
        if row != before:
            for i in range(n):
                v[i] = w[i] - v[i]
                square += w[i] * w[i]
        else:
            for i in range(n):
                square += w[i] * w[i]
        for j in range(0, rows.size, 7):
            k = begin + rows[j] * stride
            a = memory[k : k + n]
            k = begin + rows[j + 1] * stride
            b = memory[k : k + n]
            k = begin + rows[j + 2] * stride
            c = memory[k : k + n]
            k = begin + rows[j + 3] * stride
            d = memory[k : k + n]
            k = begin + rows[j + 4] * stride
            e = memory[k : k + n]
            k = begin + rows[j + 5] * stride
            f = memory[k : k + n]
            k = begin + rows[j + 6] * stride
            g = memory[k : k + n]
            p = q = r = s = t = u = x = 0.0
            for i in range(n):
                p += a[i] * v[i]
                q += b[i] * v[i]
                r += c[i] * v[i]
                s += d[i] * v[i]
                t += e[i] * v[i]
                u += f[i] * v[i]
                x += g[i] * v[i]
            out[j] += p
            out[j + 1] += q
            out[j + 2] += r
            out[j + 3] += s
            out[j + 4] += t
            out[j + 5] += u
            out[j + 6] += x
        begin += height * stride
    total[0] = square


def combination(
    memory: np.ndarray, height: int, size: int, length: int, padding: int, rows: np.ndarray, weights: np.ndarray, row: int,
    here: np.ndarray, step: float, out: np.ndarray, copy: np.ndarray,
) -> None:  # fmt: skip
    """Write the weighted sum of rows into `row`, if there are any, and where a step along it leads, if that is asked."""
    begin = 0
    for start in range(0, size, length):
        n = min(length, size - start)
        stride = n + padding if n == length else n
        way = memory[begin + row * stride : begin + row * stride + n]
        for j in range(0, rows.size, 7):
            k = begin + rows[j] * stride
            a = memory[k : k + n]
            k = begin + rows[j + 1] * stride
            b = memory[k : k + n]
            k = begin + rows[j + 2] * stride
            c = memory[k : k + n]
            k = begin + rows[j + 3] * stride
            d = memory[k : k + n]
            k = begin + rows[j + 4] * stride
            e = memory[k : k + n]
            k = begin + rows[j + 5] * stride
            f = memory[k : k + n]
            k = begin + rows[j + 6] * stride
            g = memory[k : k + n]
            p, q, r, s = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
            t, u, v = weights[j + 4], weights[j + 5], weights[j + 6]
            if j == 0:
                for i in range(n):
                    way[i] = p * a[i] + q * b[i] + r * c[i] + s * d[i] + t * e[i] + u * f[i] + v * g[i]
            else:
                for i in range(n):
                    way[i] += p * a[i] + q * b[i] + r * c[i] + s * d[i] + t * e[i] + u * f[i] + v * g[i]
        if out.size > 0:
            x, moved, copied = here[start : start + n], out[start : start + n], copy[start : start + n]
            for i in range(n):
                there = x[i] + step * way[i]
                moved[i] = there
                copied[i] = there
        begin += height * stride


def taken(
    memory: np.ndarray, height: int, size: int, length: int, padding: int, gradient: np.ndarray, bits: np.ndarray, way: int,
    out: int, most: np.ndarray, total: np.ndarray,
) -> None:  # fmt: skip
    """Copy a gradient into row `out`; give its largest entry's bits, its slope along row `way`, and that one's square."""
    largest, slope, square, begin = 0, 0.0, 0.0, 0
    for start in range(0, size, length):
        n = min(length, size - start)
        stride = n + padding if n == length else n
        along = memory[begin + way * stride : begin + way * stride + n]
        copied = memory[begin + out * stride : begin + out * stride + n]
        g, b = gradient[start : start + n], bits[start : start + n]
        for i in range(n):
            copied[i] = g[i]
            slope += g[i] * along[i]
            square += along[i] * along[i]
            # Without their sign, doubles are in the order of their bits, and NaN comes behind infinity.
            largest = max(largest, b[i] & 0x7FFFFFFFFFFFFFFF)
        begin += height * stride
    most[0] = largest
    total[0] = slope
    total[1] = square
