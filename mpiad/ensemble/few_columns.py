"""Sums of products over the stages of few columns.

What a call of NumPy computes then takes less time than its start, so a sum of n products takes two calls instead of
2 n - 1: one multiplies all stages by their weights, each repeated for all numbers, the other adds row after row. That is
the order in which `Stages` adds, so the numbers are the same to the last bit (see `norms` on reductions along the first
axis).
"""

from __future__ import annotations

from itertools import groupby

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.coefficients import Weights

__all__ = ["FEW", "StageSums"]

# Numbers in one array, columns times components, up to which that pays.
FEW = 512
_LEAST_TERMS = 3


class StageSums:
    """Sums over the stages in one block.

    Parameters
    ----------
    k : array, shape (stages, d, n)
    rows : list of Weights
        For each sum the stages, in their order, with their weights.
    """

    def __init__(self, k: Array, rows: list[Weights]):
        self._products, self._total = np.empty_like(k), np.empty_like(k[0])
        self._flat_total = self._total.reshape(-1)
        self._terms = [self._of(k, row) if len(row) >= _LEAST_TERMS else None for row in rows]

    def _of(self, k: Array, row: Weights) -> tuple[list[tuple[Array, Array, Array]], Array]:
        """Return factors and products, in runs of neighbours among the stages, and all products, each as one row."""
        runs, first = [], 0
        for _, run in groupby(enumerate(row), lambda entry: entry[1][0] - entry[0]):
            entries = [entry for _, entry in run]
            start, stop = entries[0][0], entries[-1][0] + 1
            weights = np.empty(k[start:stop].shape, k.real.dtype)
            weights[...] = np.stack([weight for _, weight in entries])[:, None, None]
            runs.append((k[start:stop], weights, self._products[first : first + len(entries)]))
            first += len(entries)
        return runs, self._products.reshape(len(k), -1)[:first]

    def sum(self, row: int) -> Array | None:
        """Return one of the sums, in a buffer that the next one overwrites; None where it has too few terms."""
        found = self._terms[row]
        if found is None:
            return None
        runs, products = found
        for stages, weights, terms in runs:
            np.multiply(stages, weights, terms)
        np.add.reduce(products, 0, None, self._flat_total)
        return self._total
