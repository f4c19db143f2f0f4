"""Vectors of several systems at once, in rows: what an iteration does with them, in place and in one pass over memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.linalg import get_blas_funcs

from mpiad._typing import LocalArray

__all__ = ["add_scaled", "inner", "lengths"]

_AXPY: dict[str, Any] = {kind: get_blas_funcs("axpy", dtype=np.dtype(kind)) for kind in "fdFD"}
_NRM2: dict[str, Any] = {kind: get_blas_funcs("nrm2", dtype=np.dtype(kind)) for kind in "fdFD"}


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


def lengths(x: LocalArray) -> list[float]:
    """Return the norm of this rank's share of each row, right where squares leave the range of the dtype."""
    return [float(_NRM2[x.dtype.char](row)) if x.shape[1] else 0.0 for row in x]
