"""A pair's table as sums of products read it: for each stage the nonzero weights, by rows and by columns."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.tableaus import Tableau

__all__ = ["Coefficients", "Weights", "weighted_sum"]

Weights: TypeAlias = list[tuple[int, Array]]


class Coefficients:
    """The table of a pair in the precision of the states.

    Parameters
    ----------
    tableau : Tableau
    dtype : dtype
        Real.

    Attributes
    ----------
    rows : list of list of (int, array)
        Row i: which stages, with which weights, make the argument of stage i. The last gives the new state.
    columns : list of list of (int, array)
        Column j: in which arguments stage j takes part, with which weights.
    """

    def __init__(self, tableau: Tableau, dtype: Any):
        # Arrays without axes are what ufuncs take fastest, and they keep float32.
        table = [(), *tableau.a]
        self.rows: list[Weights] = [[(j, np.array(w, dtype)) for j, w in enumerate(row) if w] for row in table]
        self.columns: list[Weights] = [
            [(i, np.array(row[j], dtype)) for i, row in enumerate(table) if j < len(row) and row[j]]
            for j in range(len(table))
        ]


def weighted_sum(weights: Weights, arrays: Any, out: Array, term: Array) -> Array:
    """Write a sum of products into `out`; `term` is room for one of them."""
    (first, weight), *others = weights
    multiply, add = np.multiply, np.add
    multiply(arrays[first], weight, out)
    for i, weight in others:
        multiply(arrays[i], weight, term)
        add(out, term, out)
    return out
