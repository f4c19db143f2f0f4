"""The error norm, as sums of products in a fixed order.

A column's norm must not depend on the columns beside it. NumPy's reductions along the first axis of a contiguous array of
two columns or more add row after row; with one column they add in another order, so there are always two at least.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from mpiad._typing import Array

__all__ = ["constant", "mean_square", "tolerance"]

_FEW = 16


@cache
def constant(x: float) -> Array:
    """Return a number as an array without axes, which ufuncs take faster; for arrays of float64 beside it."""
    return np.array(float(x))


def mean_square(e: Array) -> Array:
    """Return the mean over the rows of the squares of their moduli.

    Parameters
    ----------
    e : array, shape (d, n), n ≥ 2
        Is written over.

    Returns
    -------
    array of float64, shape (n,)
    """
    if e.dtype.kind == "c":
        e = np.abs(e)
    np.multiply(e, e, out=e)
    if len(e) > _FEW or type(e) is not np.ndarray:  # what lives on a device keeps no order, and pays for each call
        total = np.sum(e, axis=0)
    else:
        first, *others = e
        total = first.copy()
        for row in others:
            np.add(total, row, total)
    total = total.astype(float, copy=False)
    total /= len(e) if type(e) is not np.ndarray else constant(len(e))
    return total


def tolerance(u: Array, rtol: float, atol: Array | float) -> Array:
    """Return atol + rtol |u|."""
    scale = np.abs(u)
    scale *= rtol
    scale += atol
    return scale
