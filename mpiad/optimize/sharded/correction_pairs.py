"""The correction pairs of limited-memory BFGS: the roles of the rows of the memory, and the two-loop recursion over them.

A slot has two rows. That of a pair stores a gradient change y and a step s. The current slot, after the newest pair,
stores the gradient g at the current point, and the direction from there once it is computed; the next one stores the
gradients of trial points. When a trial is accepted, the slots only change their roles, and nothing is moved: g becomes y
in place, the direction is the step, and the oldest pair's slot becomes the next for trials.

The recursion works on numbers of the size of the memory, not of the variables. Given the scalar products of the steps s,
the gradient changes y and the gradient g, the direction -H g is a combination of these 2m + 1 vectors whose coefficients
need no further products. Products of two steps aren't needed, nor those of a step with an older change: the first loop
uses a step with newer changes only, the second a change with older steps.

References
----------
.. [1] W. Chen, Z. Wang and J. Zhou, "Large-scale L-BFGS using MapReduce", NIPS 2014, algorithm 3.
.. [2] J. Nocedal, Math. Comp. 35 (1980), the recursion itself.
"""

from __future__ import annotations

import sys

import numpy as np


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


def two_loop_recursion(products: np.ndarray, with_gradient: np.ndarray, square: float) -> tuple[np.ndarray, float]:
    """Return the coefficients of -H g, shape (2m + 1,), that of g last, and its slope g · (-H g).

    The products (2m, 2m) are those of all y and s with each other: those of pair j are in rows 2j and 2j + 1, the oldest
    pair's first. A pair without positive curvature is omitted. The products with g are `with_gradient` (2m,), and `square`
    is g · g.
    """
    pairs = [j for j in range(len(products) // 2) if _curves(products, j)]
    inner = np.append(with_gradient, square)
    whole = np.vstack([products, with_gradient])  # one row per vector, one column per y and s
    coefficients, alphas = np.zeros(len(inner)), {}
    coefficients[-1] = -1.0
    for j in reversed(pairs):
        alphas[j] = coefficients @ whole[:, 2 * j + 1] / products[2 * j, 2 * j + 1]
        coefficients[2 * j] -= alphas[j]
    if pairs:
        y, s = 2 * pairs[-1], 2 * pairs[-1] + 1
        coefficients *= products[s, y] / products[y, y]  # the usual first Hessian, s·y / y·y times the identity
    for j in pairs:
        beta = coefficients @ whole[:, 2 * j] / products[2 * j, 2 * j + 1]
        coefficients[2 * j + 1] += alphas[j] - beta
    return coefficients, float(coefficients @ inner)


def _curves(products: np.ndarray, j: int) -> bool:
    return bool(products[2 * j, 2 * j + 1] > sys.float_info.epsilon * products[2 * j, 2 * j])
