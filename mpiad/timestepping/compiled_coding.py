"""Compiled loops that convert fields to 16 bits per entry and back.

Each loop reads the field once. NumPy would read the field a dozen times, which takes as long as one or two time steps of a
wave equation. The loops are written in the kernel language (see `mpiad.compiling.translation`), and compiled from the
source code of this file. A field consists of rows of `width` entries. The loops process a field in blocks of
columns: a ring buffer, which fits into the cache, contains the last eight rounded rows of a block, from which differences
are computed.

Integers are represented exactly, by doubles. Adding 1.5 * 2^52 = 6755399441055744 rounds a double to the nearest
integer, with ties to even as in NumPy. The bits of the sum, minus 0x4338000000000000 (the bits of 1.5 * 2^52), are equal to
this integer. The addition is used because few processors have vector instructions for the conversion.
"""

from __future__ import annotations

import functools
from math import comb

import numpy as np

from mpiad.compiling.cache import functions_of

# Minimum numbers of entries of a field and of a row. For smaller fields compilation (half a second) takes too long.
_MIN_ENTRIES, _MIN_WIDTH = 1 << 16, 32
_RING = 8 * 512  # entries of the ring buffer: eight rows of a block


def pays_off(dtype: np.dtype, size: int, width: int) -> bool:
    """Return whether the compiled loops are faster than NumPy for a field."""
    return dtype == np.float64 and size >= _MIN_ENTRIES and width >= _MIN_WIDTH


def weights(order: int) -> np.ndarray:
    """Return the coefficients of the four preceding numbers in the backward difference of the given order."""
    return np.array([(-1.0) ** k * comb(order, k) for k in range(1, 5)])


def row_maxima(field: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's maximum absolute value, and its maximum change from `before`; NaN if the row contains NaN."""
    maxima = np.zeros((2, len(field)), np.int64)
    _functions()[0](field.reshape(-1), before.reshape(-1), field.size // len(field), maxima[0], maxima[1])
    return maxima[0].view(np.float64), maxima[1].view(np.float64)


def write_differences(
    field: np.ndarray, before: np.ndarray | None, step: float, weights: np.ndarray, out: np.ndarray
) -> int:
    """Write differences of rows (not of the first) minus `before`, in units of `step`; return the largest one."""
    largest, flat, order = np.zeros(1, np.int64), field.reshape(-1), np.count_nonzero(weights)
    relative = (flat, 0) if before is None else (before.reshape(-1), 1)
    width, ring = field.size // len(field), np.zeros(_RING)
    _functions()[1](flat, *relative, 1.0 / step, weights, order, width, ring, out.reshape(-1), largest)
    return int(largest[0])


def write_sums(
    differences: np.ndarray, before: np.ndarray | None, step: float, weights: np.ndarray, head: np.ndarray, out: np.ndarray
) -> None:
    """Write the field with given differences; `head` contains the first rows (minus `before`), in units of `step`."""
    flat, width, ring = out.reshape(-1), out.size // len(out), np.zeros(_RING)
    relative = (flat, 0) if before is None else (before.reshape(-1), 1)
    _functions()[2](differences.reshape(-1), *relative, step, weights, len(head), width, head.reshape(-1), ring, flat)


@functools.cache
def _functions() -> tuple:
    vector, numbers = "float64[::1]", "int64[::1]"
    signatures = {
        "largest_of_rows": f"void({vector}, {vector}, int64, {numbers}, {numbers})",
        "differences_of_rows": f"void({vector}, {vector}, int64, float64, {vector}, int64, int64, {vector}, int16[::1], "
        f"{numbers})",
        "sums_of_rows": f"void(int16[::1], {vector}, int64, float64, {vector}, int64, int64, {vector}, {vector}, {vector})",
    }
    return tuple(functions_of(__name__, signatures))


def largest_of_rows(field: np.ndarray, before: np.ndarray, width: int, maxima: np.ndarray, changes: np.ndarray) -> None:
    """Compute the maximum absolute value and the maximum change of each row, as the bits of doubles."""
    row = 0
    for begin in range(0, field.size, width):
        a, b = field[begin : begin + width], before[begin : begin + width]
        m = n = 0
        for i in range(width):
            # The bits of absolute values, read as integers, are ordered like the values; NaN is larger than infinity.
            m = max(m, bits_of(a[i]) & 0x7FFFFFFFFFFFFFFF)  # type: ignore  # noqa: F821
            n = max(n, bits_of(a[i] - b[i]) & 0x7FFFFFFFFFFFFFFF)  # type: ignore  # noqa: F821
        maxima[row] = m
        changes[row] = n
        row += 1


def differences_of_rows(
    field: np.ndarray, before: np.ndarray, relative: int, inverse: float, weights: np.ndarray, order: int, width: int,
    ring: np.ndarray, out: np.ndarray, largest: np.ndarray,
) -> None:  # fmt: skip
    """Round rows to multiples of a step, and write their differences."""
    u, v, w, x = weights[0], weights[1], weights[2], weights[3]
    maximum = 0
    for start in range(0, width, 512):
        n, row = min(512, width - start), 0
        for begin in range(start, field.size, width):
            k = 512 * (row & 7)
            rounded = ring[k : k + n]
            a, b = field[begin : begin + n], before[begin : begin + n]
            if relative:
                for i in range(n):
                    rounded[i] = (a[i] - b[i]) * inverse + 6755399441055744.0 - 6755399441055744.0
            else:
                for i in range(n):
                    rounded[i] = a[i] * inverse + 6755399441055744.0 - 6755399441055744.0
            if row >= order:
                i, j, k, m = 512 * ((row - 1) & 7), 512 * ((row - 2) & 7), 512 * ((row - 3) & 7), 512 * ((row - 4) & 7)
                c, d, e, f = ring[i : i + n], ring[j : j + n], ring[k : k + n], ring[m : m + n]
                target = out[begin : begin + n]
                for i in range(n):
                    difference = rounded[i] + u * c[i] + v * d[i] + w * e[i] + x * f[i]
                    bits = bits_of(difference + 6755399441055744.0)  # type: ignore  # noqa: F821
                    target[i] = bits
                    maximum = max(maximum, abs(bits - 0x4338000000000000))
            row += 1
    largest[0] = maximum


def sums_of_rows(
    differences: np.ndarray, before: np.ndarray, relative: int, step: float, weights: np.ndarray, order: int, width: int,
    head: np.ndarray, ring: np.ndarray, out: np.ndarray,
) -> None:  # fmt: skip
    """Write the field with given differences and first rows."""
    u, v, w, x = weights[0], weights[1], weights[2], weights[3]
    for start in range(0, width, 512):
        n, row = min(512, width - start), 0
        for begin in range(start, out.size, width):
            k = 512 * (row & 7)
            rounded = ring[k : k + n]
            if row < order:
                first_row = head[begin : begin + n]
                for i in range(n):
                    rounded[i] = first_row[i]
            else:
                i, j, k, m = 512 * ((row - 1) & 7), 512 * ((row - 2) & 7), 512 * ((row - 3) & 7), 512 * ((row - 4) & 7)
                c, d, e, f = ring[i : i + n], ring[j : j + n], ring[k : k + n], ring[m : m + n]
                coded = differences[begin : begin + n]
                for i in range(n):
                    rounded[i] = coded[i] - (u * c[i] + v * d[i] + w * e[i] + x * f[i])
            b, target = before[begin : begin + n], out[begin : begin + n]
            if relative:
                for i in range(n):
                    target[i] = rounded[i] * step + b[i]
            else:
                for i in range(n):
                    target[i] = rounded[i] * step
            row += 1
