"""The two-loop recursion in coordinates: numbers of the size of the memory, none of the size of the variables.

With the scalar products of the steps s, the gradient changes y and the gradient g, the direction -H g is a combination of
these 2m + 1 vectors whose coefficients need no further products. Those of two steps are never asked for, nor those of a
step with an older change: the first loop meets a step with newer changes only, the second a change with older steps.

References
----------
.. [1] W. Chen, Z. Wang and J. Zhou, "Large-scale L-BFGS using MapReduce", NIPS 2014, algorithm 3.
.. [2] J. Nocedal, Math. Comp. 35 (1980), the recursion itself.
"""

from __future__ import annotations

import sys

import numpy as np

__all__ = ["combination"]


def combination(products: np.ndarray, with_gradient: np.ndarray, square: float) -> tuple[np.ndarray, float]:
    """Return the coefficients of -H g, shape (2m + 1,), g's the last, and its slope g · (-H g).

    Parameters
    ----------
    products : array, shape (2m, 2m)
        Of all y and s with each other; those of pair j lie in rows 2j and 2j + 1, the oldest pair's first. A pair of no
        positive curvature is left out.
    with_gradient : array, shape (2m,)
        Of all y and s with g.
    square : float
        g · g.
    """
    pairs = [j for j in range(len(products) // 2) if _curves(products, j)]
    inner = np.append(with_gradient, square)
    whole = np.vstack([products, with_gradient])  # a row for each vector, a column for each y and s
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
