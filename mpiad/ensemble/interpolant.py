"""States inside a step, by the pair's own interpolant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.coefficients import Coefficients
from mpiad.ensemble.tableaus import Tableau

__all__ = ["interpolate", "polynomials", "stage_rates", "states_at"]


def interpolate(coefficients: Coefficients, u: Array, h: Array, k: Any, x: Array) -> Array:
    """Return the states at the parts x of the steps.

    Parameters
    ----------
    coefficients : Coefficients
    u : array, shape (d, n)
        Before the step.
    h, x : array, shape (n,)
    k : sequence of array, shape (d, n)
        The stages.

    Returns
    -------
    array, shape (d, n)
    """
    total = np.zeros_like(u)
    weights = coefficients.weights(x).astype(coefficients.real, copy=False)
    for i in range(len(weights)):
        total += weights[i] * k[i]
    total *= h.astype(coefficients.real, copy=False)
    total += u
    return total


def polynomials(coefficients: Coefficients, u: Array, h: Array, k: Any) -> list[Array]:
    """Return the states inside of a step as polynomials in the part of it that is gone: degree + 1 arrays (d, n).

    Parameters
    ----------
    coefficients : Coefficients
    u : array, shape (d, n)
        Before the step.
    h : array, shape (n,)
        In the precision of the states; signed where the stages aren't.
    k : array, shape (stages, d, n), or a sequence of its parts
    """
    powers = coefficients.powers(k)
    return [u, *[h * powers[j] for j in range(len(powers))]]


def states_at(terms: Sequence[Array], x: Any) -> Array:
    """Return the states at the parts x of such polynomials, x of shape (n,) and real, or one number."""
    total = terms[-1]
    for power in range(len(terms) - 2, -1, -1):
        total = total * x + terms[power]
    return total


def stage_rates(tableau: Tableau, x: Array) -> list[Array]:
    """Return the derivatives of the stages' weights by x, each of the shape of x."""
    rates = []
    for row in tableau.dense.tolist():
        rate = np.full_like(x, len(row) * row[-1])  # Horner's scheme for the sum of j w_j x^(j - 1)
        for power in range(len(row) - 1, 0, -1):
            rate = rate * x + power * row[power - 1]
        rates.append(rate)
    return rates
