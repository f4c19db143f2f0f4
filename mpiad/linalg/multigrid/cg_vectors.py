"""The vectors of conjugate gradients on a level: by NumPy where they live, or compiled, with one pass for each reduction.

The loops are in the language of `mpiad.compiling.translation`, which takes them from this file's text.
"""

from __future__ import annotations

import functools

import numpy as np

from mpiad._typing import Array, LocalArray
from mpiad.compiling.cache import functions_of
from mpiad.linalg.vectors import beside, inner

__all__ = ["FusedVectors", "Vectors", "over_systems", "squares_of"]


def over_systems(blocks: LocalArray, numbers: np.ndarray) -> Array:
    """Return numbers of the host, one for each system, as what blocks are multiplied with; a single one needs no copy."""
    if len(numbers) == 1:
        return blocks.dtype.type(numbers[0])
    return beside(blocks, numbers).reshape(-1, *[1] * (blocks.ndim - 1))


def squares_of(blocks: LocalArray) -> np.ndarray:
    """Return the square of the norm of this rank's share of each system, on the host."""
    rows = blocks.reshape(len(blocks), -1)
    return inner((rows, rows))[0]


class Vectors:
    """Solutions, residuals and directions, shape (systems, colours, size).

    `x`: zeros at first.
    """

    def __init__(self, r: LocalArray):
        self.r, self.x, self._p, self._s = r, np.zeros_like(r), np.zeros_like(r), np.zeros_like(r)

    def products(self, z: LocalArray, w: LocalArray) -> np.ndarray:
        """Return this rank's share of r·z and w·z, shape (2, systems), on the host: one copy of arrays on a device."""
        r, z, w = (one.reshape(len(one), -1) for one in (self.r, z, w))
        return inner((r, z), (w, z))

    def advance(self, z: LocalArray, w: LocalArray, beta: np.ndarray, alpha: np.ndarray) -> np.ndarray:
        """Renew the directions by z and w = A z, take the steps, and return this rank's squares of the residuals' norms."""
        for direction, new in ((self._p, z), (self._s, w)):
            direction *= over_systems(direction, beta)
            direction += new
        step = over_systems(self.r, alpha)
        self.x += step * self._p
        self.r -= step * self._s
        return squares_of(self.r)


class FusedVectors(Vectors):
    """As `Vectors`, by compiled loops."""

    def __init__(self, r: LocalArray):
        super().__init__(r)
        self._products, self._advance = _functions()

    def products(self, z: LocalArray, w: LocalArray) -> np.ndarray:
        """Return this rank's share of r·z and w·z."""
        out = np.empty((2, len(z)))
        self._products(*_rows(z, w), self.r.ravel(), out)
        return out

    def advance(self, z: LocalArray, w: LocalArray, beta: np.ndarray, alpha: np.ndarray) -> np.ndarray:
        """Renew the directions, and take the steps."""
        out = np.empty(len(z))
        vectors = (one.reshape(-1) for one in (self._p, self._s, self.x, self.r))
        self._advance(*_rows(z, w), np.stack([beta, alpha]), *vectors, out)
        return out


def _rows(z: LocalArray, w: LocalArray) -> tuple[Array, Array, int]:
    """Return the memory of two parts of a state, and how far one system's is from the next one's."""
    length = z.size // len(z)
    stride = z.strides[0] // z.itemsize if len(z) > 1 else length
    size = (len(z) - 1) * stride + length
    # As one axis, which goes over the rows between those of one system and the next.
    z, w = (np.lib.stride_tricks.as_strided(one, (size,), (one.itemsize,)) for one in (z, w))
    return z, w, stride


@functools.cache
def _functions() -> tuple:
    row = "float64[::1]"
    signatures = {
        "inner_products": f"void({row}, {row}, int64, {row}, float64[:, ::1])",
        "conjugate_step": f"void({row}, {row}, int64, float64[:, ::1], {row}, {row}, {row}, {row}, {row})",
    }
    # Sums may be reordered; NaN and infinities stay what they are.
    return tuple(functions_of(__name__, signatures, "reassoc contract nsz arcp"))


def inner_products(z: np.ndarray, w: np.ndarray, stride: int, r: np.ndarray, out: np.ndarray) -> None:
    """Give r·z and w·z of each system."""
    length = z.size - (out.shape[1] - 1) * stride
    for system in range(out.shape[1]):
        a, b = z[system * stride : system * stride + length], w[system * stride : system * stride + length]
        c = r[system * length : (system + 1) * length]
        first, second = 0.0, 0.0
        for i in range(length):
            first += c[i] * a[i]
            second += b[i] * a[i]
        out[0, system] = first
        out[1, system] = second


def conjugate_step(
    z: np.ndarray, w: np.ndarray, stride: int, factors: np.ndarray, p: np.ndarray, s: np.ndarray, x: np.ndarray,
    r: np.ndarray, out: np.ndarray,
) -> None:  # fmt: skip
    """Renew directions, take steps, and give the square of each residual."""
    length = z.size - (out.size - 1) * stride
    for system in range(out.size):
        beta, alpha, square = factors[0, system], factors[1, system], 0.0
        for start in range(0, length, 512):
            n = min(512, length - start)
            k = system * stride + start
            new, product = z[k : k + n], w[k : k + n]
            k = system * length + start
            a, b, c, d = p[k : k + n], s[k : k + n], x[k : k + n], r[k : k + n]
            for i in range(n):
                a[i] = beta * a[i] + new[i]
                c[i] += alpha * a[i]
            for i in range(n):
                b[i] = beta * b[i] + product[i]
                d[i] -= alpha * b[i]
                square += d[i] * d[i]
        out[system] = square
