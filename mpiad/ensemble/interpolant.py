"""States inside a step, by the pair's own interpolant."""

from __future__ import annotations

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.tableaus import Tableau

__all__ = ["interpolate", "stage_weights"]


def stage_weights(tableau: Tableau, x: Array) -> list[Array]:
    """Return the weight of each stage at the parts x of the steps.

    Parameters
    ----------
    tableau : Tableau
    x : array, shape (n,)

    Returns
    -------
    list of array, shape (n,)
    """
    weights = []
    for row in tableau.dense:
        weight = np.full_like(x, row[-1])
        for coefficient in row[-2::-1]:
            weight *= x
            weight += coefficient
        weight *= x
        weights.append(weight)
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
    for i, weight in enumerate(stage_weights(tableau, x)):
        if tableau.dense[i].any():
            total += weight.astype(u.real.dtype, copy=False) * k[i]
    total *= h.astype(u.real.dtype, copy=False)
    total += u
    return total
