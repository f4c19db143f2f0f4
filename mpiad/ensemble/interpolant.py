"""States inside a step, by the pair's own interpolant."""

from __future__ import annotations

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.tableaus import Tableau

__all__ = ["interpolate", "stage_rates", "stage_weights"]


def stage_weights(tableau: Tableau, x: Array) -> Array:
    """Return the weights of the stages at the parts x of the steps.

    Parameters
    ----------
    tableau : Tableau
    x : array, shape (n,)

    Returns
    -------
    array, shape (stages, n)
    """
    # Horner's scheme for all stages at once, elementwise in x.
    dense = tableau.dense
    weights = dense[:, -1:] * x
    for j in range(dense.shape[1] - 2, -1, -1):
        weights += dense[:, j : j + 1]
        weights *= x
    return weights


def interpolate(tableau: Tableau, u: Array, h: Array, k: list[Array], x: Array) -> Array:
    """Return the states at the parts x of the steps.

    Parameters
    ----------
    tableau : Tableau
    u : array, shape (d, n)
        Before the step.
    h, x : array, shape (n,)
    k : list of array, shape (d, n)
        The stages.

    Returns
    -------
    array, shape (d, n)
    """
    total = np.zeros_like(u)
    for weight, stage in zip(stage_weights(tableau, x).astype(u.real.dtype, copy=False), k):
        total += weight * stage
    total *= h.astype(u.real.dtype, copy=False)
    total += u
    return total


def stage_rates(tableau: Tableau, x: Array) -> list[Array]:
    """Return the derivatives of the stages' weights by x, each of shape (n,)."""
    rates = []
    for row in tableau.dense:
        rate = np.full_like(x, len(row) * row[-1])  # Horner's scheme for the sum of j w_j x^(j - 1)
        for power in range(len(row) - 1, 0, -1):
            rate = rate * x + power * row[power - 1]
        rates.append(rate)
    return rates
