"""Diagonals of (c - ∇·(a∇))⁻ᵖ on a box, by the heat kernel: exact for the grid, without a solve.

A power of an operator is an integral over its semigroup, A⁻ᵖ = ∫ tᵖ⁻¹ e^(-tA) dt / Γ(p), and on a box e^(-tA) is a product
of one factor for each dimension, whose diagonal is a sum over the cosines of that dimension. With t = eˢ the trapezoidal
rule converges geometrically.

References
----------
L. N. Trefethen and J. A. C. Weideman, "The exponentially convergent trapezoidal rule", SIAM Review 56 (2014), sections 5
and 15.
"""

from __future__ import annotations

import math

import numpy as np

from mpiad._typing import LocalArray
from mpiad.domain import Domain

__all__ = ["inverse_diagonal"]

_STEP = 0.2  # of s: the rule's error is then below 1e-12
_SMALL = 1e-8  # of t by the operator's largest eigenvalue: beneath, the integrand is negligible
_DECAYED = 40.0  # e to this power is beyond double precision


def inverse_diagonal(domain: Domain, a: np.ndarray, c: float, power: int) -> LocalArray:
    """Return this rank's block of the diagonal of A⁻ᵖ, A = c - Σ a_i ∂²_i with unit spacing, and no flux through sides.

    Each of a (d,) is divided by the square of its spacing already; c is positive, and the power p is 1 or 2.
    """
    largest = c + 4.0 * sum(a)
    s = np.arange(math.log(_SMALL / largest), math.log(_DECAYED / c), _STEP)
    times = np.exp(s)
    # One power of t more for dt = t ds. What isn't there is 1 / t of the largest: e^(-tA) is the identity at first.
    weights = _STEP * times**power * np.exp(-c * times) / math.gamma(power)
    factors = [
        _diagonal(n, cells, rate, wraps, times)
        for n, cells, rate, wraps in zip(domain.shape, domain.owned, a, domain.periodic)
    ]
    head, *rest = factors
    found = np.stack([_outer(weights * row, rest) for row in head])
    # The rule begins at the first t; before it the integrand is tᵖ⁻¹ to all digits.
    return found + (times[0] * math.exp(-0.5 * _STEP)) ** power / math.gamma(power + 1)


def _outer(row: np.ndarray, factors: list[np.ndarray]) -> np.ndarray:
    """Return the sums over times of the products of factors, shape (n_1, n_2, ...)."""
    if not factors:
        return np.asarray(row.sum())
    if len(factors) == 1:
        return factors[0] @ row
    return (factors[0] * row) @ factors[1].T


def _diagonal(n: int, cells: slice, rate: float, wraps: bool, times: np.ndarray) -> np.ndarray:
    """Return the diagonal of e^(-tA) of one dimension at some cells, shape (cells, times)."""
    k, i = np.arange(n), np.arange(cells.start, cells.stop)
    decay = np.exp(-np.outer(rate * (2.0 - 2.0 * np.cos((2.0 if wraps else 1.0) * math.pi * k / n)), times))
    if wraps:
        squares = np.full((i.size, n), 1.0 / n)
    else:
        squares = 2.0 / n * np.cos(math.pi * np.outer(i + 0.5, k) / n) ** 2
        squares[:, 0] = 1.0 / n
    return squares @ decay
