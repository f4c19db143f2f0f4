"""Colors of the columns of a sparse matrix: columns that have a row in common have different colors.

One product with the matrix then yields all columns of a color: see `Probing` in `linalg` and `sparsity` in `ensemble`.

References
----------
A. H. Gebremedhin, F. Manne and A. Pothen, What color is your Jacobian? Graph coloring for computing derivatives, SIAM
Review 47 (2005).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import scipy.sparse


def colors_of(near: scipy.sparse.csr_matrix, colors: np.ndarray, count: int) -> np.ndarray:
    """Give each of the first `count` columns, in order, the first color that no neighbor has; return `colors`.

    `near` is a CSR matrix with an entry for each pair of columns that have a row in common. Columns without a color have
    the color -1.
    """
    for k in range(count):
        taken = set(colors[near.indices[near.indptr[k] : near.indptr[k + 1]]].tolist())
        colors[k] = first_missing(taken)
    return colors


def first_missing(numbers: set[int]) -> int:
    """Return the smallest integer from 0 on that isn't in a set."""
    return next(k for k in itertools.count() if k not in numbers)
