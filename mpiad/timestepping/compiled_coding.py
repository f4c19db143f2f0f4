"""The compiled passes over a field stored in 16 bits per entry: each reads it once.

NumPy makes a dozen passes over a field, which take as long as one or two steps of a wave. The loops are in the language of
`mpiad.compiling.translation`, which takes them from this file's text. A field consists of rows of `width` entries. They are
processed by ranges of columns, so that the few rounded rows from which differences are computed, the ring, stay in cache.

Numbers are integers in doubles, which are exact. Adding 1.5 * 2^52 rounds them to the nearest integer, ties to even, as
NumPy does, and leaves them in the last bits of the sum: many processors have vector instructions for that, but none that
convert doubles to integers of 64 bits.
"""

from __future__ import annotations

import functools
from math import comb

import numpy as np

from mpiad.compiling.cache import functions_of

# Below, NumPy takes a few milliseconds, and compiling the loops takes half a second.
_LARGE, _NARROWEST = 1 << 16, 32
_RING = 8 * 512  # entries: eight rows of a range


def pays_off(dtype: np.dtype, size: int, width: int) -> bool:
    """Return whether compiled passes pay for rows of this width."""
    return dtype == np.float64 and size >= _LARGE and width >= _NARROWEST


def weights(order: int) -> np.ndarray:
    """Return the factors of the four preceding numbers in a number's difference."""
    return np.array([(-1.0) ** k * comb(order, k) for k in range(1, 5)])


def tops(field: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's largest absolute value, and that of its change from another field; NaN if the row has one."""
    found = np.zeros((2, len(field)), np.int64)
    _functions()[0](field.reshape(-1), before.reshape(-1), field.size // len(field), found[0], found[1])
    return found[0].view(np.float64), found[1].view(np.float64)


def write_differences(
    field: np.ndarray, before: np.ndarray | None, step: float, weights: np.ndarray, out: np.ndarray
) -> int:
    """Write the differences of the rows that have as many predecessors as there are weights; return the largest."""
    largest, flat, order = np.zeros(1, np.int64), field.reshape(-1), np.count_nonzero(weights)
    relative = (flat, 0) if before is None else (before.reshape(-1), 1)
    width, ring = field.size // len(field), np.zeros(_RING)
    _functions()[1](flat, *relative, 1.0 / step, weights, order, width, ring, out.reshape(-1), largest)
    return int(largest[0])


def write_sums(
    differences: np.ndarray, before: np.ndarray | None, step: float, weights: np.ndarray, head: np.ndarray, out: np.ndarray
) -> None:
    """Write a field from its differences; `head` contains its first rows, in multiples of the step."""
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


def largest_of_rows(field: np.ndarray, before: np.ndarray, width: int, most: np.ndarray, change: np.ndarray) -> None:
    """Compute the bits of each row's largest absolute value and largest absolute change."""
    row = 0
    for begin in range(0, field.size, width):
        a, b = field[begin : begin + width], before[begin : begin + width]
        m = n = 0
        for i in range(width):
            # Without their sign, doubles are in the order of their bits, and NaN comes after infinity.
            m = max(m, bits_of(a[i]) & 0x7FFFFFFFFFFFFFFF)  # type: ignore  # noqa: F821
            n = max(n, bits_of(a[i] - b[i]) & 0x7FFFFFFFFFFFFFFF)  # type: ignore  # noqa: F821
        most[row] = m
        change[row] = n
        row += 1


def differences_of_rows(
    field: np.ndarray, before: np.ndarray, relative: int, inverse: float, weights: np.ndarray, order: int, width: int,
    ring: np.ndarray, out: np.ndarray, largest: np.ndarray,
) -> None:  # fmt: skip
    """Round rows to multiples of a step, and write their differences."""
    u, v, w, x = weights[0], weights[1], weights[2], weights[3]
    most = 0
    for start in range(0, width, 512):
        n, row = min(512, width - start), 0
        for begin in range(start, field.size, width):
            k = 512 * (row & 7)
            now = ring[k : k + n]
            a, b = field[begin : begin + n], before[begin : begin + n]
            if relative:
                for i in range(n):
                    now[i] = (a[i] - b[i]) * inverse + 6755399441055744.0 - 6755399441055744.0
            else:
                for i in range(n):
                    now[i] = a[i] * inverse + 6755399441055744.0 - 6755399441055744.0
            if row >= order:
                k = 512 * ((row - 1) & 7)
                c = ring[k : k + n]
                k = 512 * ((row - 2) & 7)
                d = ring[k : k + n]
                k = 512 * ((row - 3) & 7)
                e = ring[k : k + n]
                k = 512 * ((row - 4) & 7)
                f = ring[k : k + n]
                to = out[begin : begin + n]
                for i in range(n):
                    difference = now[i] + u * c[i] + v * d[i] + w * e[i] + x * f[i]
                    found = bits_of(difference + 6755399441055744.0)  # type: ignore  # noqa: F821
                    to[i] = found
                    most = max(most, abs(found - 0x4338000000000000))
            row += 1
    largest[0] = most


def sums_of_rows(
    differences: np.ndarray, before: np.ndarray, relative: int, step: float, weights: np.ndarray, order: int, width: int,
    head: np.ndarray, ring: np.ndarray, out: np.ndarray,
) -> None:  # fmt: skip
    """Write a field from its differences and its first rows."""
    u, v, w, x = weights[0], weights[1], weights[2], weights[3]
    for start in range(0, width, 512):
        n, row = min(512, width - start), 0
        for begin in range(start, out.size, width):
            k = 512 * (row & 7)
            now = ring[k : k + n]
            if row < order:
                given = head[begin : begin + n]
                for i in range(n):
                    now[i] = given[i]
            else:
                k = 512 * ((row - 1) & 7)
                c = ring[k : k + n]
                k = 512 * ((row - 2) & 7)
                d = ring[k : k + n]
                k = 512 * ((row - 3) & 7)
                e = ring[k : k + n]
                k = 512 * ((row - 4) & 7)
                f = ring[k : k + n]
                kept = differences[begin : begin + n]
                for i in range(n):
                    now[i] = kept[i] - (u * c[i] + v * d[i] + w * e[i] + x * f[i])
            b, to = before[begin : begin + n], out[begin : begin + n]
            if relative:
                for i in range(n):
                    to[i] = now[i] * step + b[i]
            else:
                for i in range(n):
                    to[i] = now[i] * step
            row += 1
