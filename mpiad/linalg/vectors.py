"""Vectors of several systems at once, in rows: what an iteration does with them, in place and in one pass over memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.linalg import get_blas_funcs

from mpiad._typing import LocalArray

__all__ = ["add_scaled", "inner"]

_AXPY: dict[str, Any] = {kind: get_blas_funcs("axpy", dtype=np.dtype(kind)) for kind in "fdFD"}


def add_scaled(y: LocalArray, a: LocalArray, x: LocalArray) -> None:
    """Add to each row of `y` that of `x`, times its number in `a`.

    Parameters
    ----------
    y, x : array of shape (k, n)
        `y` is changed.
    a : array of shape (k,)
    """
    axpy = _AXPY[y.dtype.char]
    if y.shape[1]:
        for row, number, other in zip(y, a, x):
            axpy(other, row, a=number)


def inner(x: LocalArray, y: LocalArray) -> list:
    """Return this rank's share of the inner product of each pair of rows, the first conjugated."""
    return [np.vdot(one, other) for one, other in zip(x, y)]
