"""Krylov spaces of several systems for GMRES, with one reduction per vector, on arrays or, for doubles, by kernels.

Orthogonalization is classical Gram-Schmidt with two passes in one reduction. The reduction contains the inner
products s of the basis with the new vector w, and the inner products of the basis with its last vector, which complete
the Gram matrix G of the basis. So the correction of the second pass, s - G s, needs no further reduction. The norm of
the remainder follows from the same inner products; if too many digits cancel, the norm is computed directly, with another
pass. The basis needn't be exactly orthonormal, since A V = V H holds for any basis V computed in this way.

A vector y with yᵀ H = 0 and y₀ = 1 follows from H by forward substitution, one entry per step. The minimal residual is
proportional to the conjugate of V y, and its norm is |r| / |y|. A least-squares problem is solved only for the solution.

For vectors of doubles on the host, kernels compute the products and the step. They are written in the kernel language (see
`mpiad.compiling.translation`), and compiled from the source code of this file.

References
----------
E. H. Ayachour, A fast implementation for GMRES method, Journal of Computational and Applied Mathematics 159 (2003).
K. Swirydowicz, J. Langou, S. Ananthan, U. Yang and S. Thomas, Low synchronization Gram-Schmidt and generalized minimal
residual algorithms, Numerical Linear Algebra with Applications 28 (2021), section 3.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import scipy.linalg

from mpiad._typing import LocalArray
from mpiad.compiling.cache import functions_of
from mpiad.linalg.system import System
from mpiad.linalg.vectors import column, combined, inner, products


def arnoldi_of(first: LocalArray, norms: np.ndarray, targets: np.ndarray, length: int) -> Arnoldi:
    """Return the spaces of residuals `first` (k, n) with given norms and targets, for up to `length` steps."""
    # The ranks must take the same decisions, so the number of this rank's unknowns has no influence.
    is_compiled = type(first) is np.ndarray and first.dtype == np.float64
    return (CompiledArnoldi if is_compiled else Arnoldi)(first, norms, targets, length)


class Arnoldi:
    """The Krylov spaces of k systems: bases V (m, k, n), Gram matrices G (k, m, m), Hessenberg matrices H (k, m, m - 1).

    `null` contains the vector y of each system, and `squares` its squared norm. `norms` are those of the minimal
    residuals. `complete`: whether a space can't grow, in which case the true residual shows if it contains the solution.
    """

    def __init__(self, first: LocalArray, norms: np.ndarray, targets: np.ndarray, length: int):
        k, n = first.shape
        kind = np.result_type(first.dtype, float)
        self.vectors = np.empty_like(first, order="C", shape=(length + 1, k, n))
        self.vectors[0] = first / column(first, np.where(norms > 0.0, norms, 1.0))
        self._gram, self._null = np.zeros((k, length + 1, length + 1), kind), np.zeros((k, length + 1), kind)
        self._hessenberg = np.zeros((k, length + 1, length), kind)
        self._null[:, 0] = 1.0
        # The rows are for the kernel.
        self._state = np.array([norms, norms, targets, np.ones(k), np.zeros(k), np.zeros(k)])
        self._first_norms, self.norms, self._targets, self._squares, self.steps, self._complete = self._state
        self._certain = math.sqrt(np.finfo(first.dtype).eps)
        self.grows = bool(self._growing(0))  # whether another step is needed

    def _growing(self, j: int) -> list[int]:
        """Return the systems that haven't converged after j steps, and whose spaces can grow."""
        _, norms, targets, _, steps, complete = self._state
        return np.flatnonzero((norms > targets) & (steps == j) & (complete == 0.0)).tolist()

    def local_products(self, j: int) -> np.ndarray:
        """Return this rank's part of the sums of a step (k, 2 j + 3), for which w is the vector after the last one."""
        basis = self.vectors[: j + 1]
        return np.concatenate([products(basis, basis[j]), products(self.vectors[: j + 2], self.vectors[j + 1])], axis=1)

    def extend(self, system: System, j: int, sums: np.ndarray) -> None:
        """Orthogonalize and normalize w."""
        basis, w, growing, count = self.vectors[: j + 1], self.vectors[j + 1], self._growing(j), j + 1
        h, remainders, inverses = np.zeros((len(w), count), self._null.dtype), np.zeros(len(w)), np.zeros(len(w))
        squares = np.real(sums[:, -1])
        for c in growing:
            of_last, s, gram = sums[c, :count], sums[c, count:-1], self._gram[c, :count, :count]
            gram[:, j], gram[j] = of_last, of_last.conj()
            # The sum of both passes of Gram-Schmidt is s + (s - G s). |w - V h|² follows up to order |G - 1|² |s|².
            h[c] = s + s - gram @ s
            remainders[c] = squares[c] - np.vdot(s, h[c]).real
        w = w - combined(basis, h)
        # If the remainder is below this fraction of |w|², half of the digits are lost by cancellation.
        if any(remainders[c] <= self._certain * squares[c] for c in growing):
            total = system.sums(np.concatenate([products(basis, w), inner((w, w)).T], axis=1))
            s, remainders = total[:, :-1], np.real(total[:, -1]) - np.sum(np.abs(total[:, :-1]) ** 2, axis=1)
            w, h = w - combined(basis, s), h + s
            # A remainder below this bound consists of rounding errors.
            remainders[remainders <= (10.0 * np.finfo(w.dtype).eps) ** 2 * squares] = 0.0
        for c in growing:
            inverses[c] = self._extended(c, h[c], math.sqrt(max(remainders[c], 0.0)))
        np.multiply(w, column(w, inverses.astype(w.real.dtype)), out=self.vectors[count])
        self.grows = bool(self._growing(count))

    def _extended(self, c: int, h: np.ndarray, norm: float) -> float:
        """Add a column to H; return the inverse of the norm of w - V h, or 0 if the space can't grow."""
        count, null = len(h), self._null[c]
        self._hessenberg[c, :count, count - 1], self._hessenberg[c, count, count - 1], self.steps[c] = h, norm, count
        if norm == 0.0:
            self._complete[c], self.norms[c] = 1.0, self._least_squares(c)[1]
            return 0.0
        null[count] = -(null[:count] @ h) / norm
        self._squares[c] += abs(null[count]) ** 2
        self.norms[c] = self._first_norms[c] / math.sqrt(self._squares[c])
        return 1.0 / norm

    def _least_squares(self, c: int) -> tuple[np.ndarray, float]:
        """Return the coefficients of one system's vector with the minimal residual, and the norm of this residual."""
        steps = int(self.steps[c])
        h, right = self._hessenberg[c, : steps + 1, :steps], np.zeros(steps + 1, self._hessenberg.dtype)
        right[0] = self._first_norms[c]
        # For a singular operator, the columns of H may be dependent: the rank is determined by pivoting.
        condition = steps * np.finfo(h.dtype).eps
        solution: Any = scipy.linalg.lstsq(h, right, condition, check_finite=False, lapack_driver="gelsy")
        return solution[0], float(np.linalg.norm(right - h @ solution[0]))

    def combination(self) -> LocalArray:
        """Return the vectors in the Krylov spaces with minimal residuals, shape (k, n)."""
        numbers = np.zeros((len(self.steps), int(self.steps.max())), self._hessenberg.dtype)
        for c, steps in enumerate(self.steps.astype(int).tolist()):
            numbers[c, :steps] = self._least_squares(c)[0]
        return combined(self.vectors[: numbers.shape[1]], numbers)


class CompiledArnoldi(Arnoldi):
    """The same for vectors of doubles on the host, by kernels, except for steps in which digits cancel."""

    def __init__(self, first: LocalArray, norms: np.ndarray, targets: np.ndarray, length: int):
        super().__init__(first, norms, targets, length)
        k, n = first.shape
        self._sums, self._numbers = np.zeros(k * (2 * length + 1)), np.array([0, k, n, length + 1, 0, 0])
        arrays = [self._numbers, self.vectors, self._sums, self._gram, self._hessenberg, self._null, self._state]
        words = [word for array in (*arrays, np.zeros(1)) for word in (array.ctypes.data, array.size)]
        self._block = np.array([0, 0, *words])
        self._address, self._kernels = self._block.ctypes.data, _kernels()

    def local_products(self, j: int) -> np.ndarray:
        """Return this rank's part of the sums of a step."""
        self._numbers[0] = j + 1
        self._kernels[0](self._address)
        k = len(self.steps)
        return self._sums[: k * (2 * j + 3)].reshape(k, 2 * j + 3)

    def extend(self, system: System, j: int, sums: np.ndarray) -> None:
        """Orthogonalize and normalize w."""
        self._sums[: sums.size] = sums.ravel()
        self._kernels[1](self._address)
        *_, is_uncertain, growing = self._numbers.tolist()
        self.grows = growing > 0
        if is_uncertain:
            super().extend(system, j, sums)


@functools.cache
def _kernels() -> list[Any]:
    signature = f"linked(int64[::1], {', '.join(['float64[::1]'] * 6)})"
    return functions_of(__name__, dict.fromkeys(("inner_products", "extended_spaces"), signature), "reassoc contract")


def inner_products(
    numbers: np.ndarray, vectors: np.ndarray, sums: np.ndarray, gram: np.ndarray, hessenberg: np.ndarray, null: np.ndarray,
    state: np.ndarray,
) -> None:  # fmt: skip
    """Compute the inner products of the basis with its last vector and with w, and of w with itself."""
    count, systems, n = numbers[0], numbers[1], numbers[2]
    for c in range(systems):
        first, last, out = ((count - 1) * systems + c) * n, (count * systems + c) * n, c * (2 * count + 1)
        v, w = vectors[first : first + n], vectors[last : last + n]
        for i in range(count + 1):
            first = (i * systems + c) * n
            x, a, b = vectors[first : first + n], 0.0, 0.0
            for p in range(n):
                a += x[p] * v[p]
                b += x[p] * w[p]
            if i < count:
                sums[out + i] = a
            sums[out + count + i] = b


def extended_spaces(
    numbers: np.ndarray, vectors: np.ndarray, sums: np.ndarray, gram: np.ndarray, hessenberg: np.ndarray, null: np.ndarray,
    state: np.ndarray,
) -> None:  # fmt: skip
    """Do what `Arnoldi.extend` does, and count unfinished systems; if `numbers[4]` is 1, it must do the rest."""
    count, k, n, m = numbers[0], numbers[1], numbers[2], numbers[3]
    numbers[4] = numbers[5] = 0
    for c in range(k):
        if state[k + c] > state[2 * k + c] and state[4 * k + c] == count - 1 and state[5 * k + c] == 0.0:
            s, g, column = c * (2 * count + 1), c * m * m, c * m * (m - 1) + count - 1
            for i in range(count):
                gram[g + i * m + count - 1] = sums[s + i]
                gram[g + (count - 1) * m + i] = sums[s + i]
            square = sums[s + 2 * count]
            remainder = square
            for i in range(count):
                a, row = 2.0 * sums[s + count + i], g + i * m
                for p in range(count):
                    a -= gram[row + p] * sums[s + count + p]
                hessenberg[column + i * (m - 1)] = a
                remainder -= a * sums[s + count + i]
            hessenberg[column + count * (m - 1)] = remainder
            if remainder <= 1.4901161193847656e-08 * square:  # the root of the precision
                numbers[4] = 1
    if numbers[4] == 0:
        for c in range(k):
            first, inverse = (count * k + c) * n, 0.0
            w = vectors[first : first + n]
            if state[k + c] > state[2 * k + c] and state[4 * k + c] == count - 1 and state[5 * k + c] == 0.0:
                column, dot = c * m * (m - 1) + count - 1, 0.0
                for i in range(count):
                    h, first = hessenberg[column + i * (m - 1)], (i * k + c) * n
                    x = vectors[first : first + n]
                    for p in range(n):
                        w[p] -= h * x[p]
                    dot += null[c * m + i] * h
                norm = math.sqrt(hessenberg[column + count * (m - 1)])
                hessenberg[column + count * (m - 1)] = norm
                inverse = 1.0 / norm
                null[c * m + count] = -dot * inverse
                state[3 * k + c] += dot * dot * inverse * inverse
                state[k + c] = state[c] / math.sqrt(state[3 * k + c])
                state[4 * k + c] = count
                if state[k + c] > state[2 * k + c]:
                    numbers[5] += 1
            for p in range(n):
                w[p] *= inverse
