"""Constant arrays on the same device as a given array, or on the host."""

from __future__ import annotations

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.transport.devices.device_arrays import arrays_of


def arrays_like(x: Array) -> Array:
    """Return the module with `full` and `arange` for the device of `x`, which may be traced."""
    return arrays_of(getval(x)) or np


def identity(like: Array, rows: int, columns: int | None = None, k: int = 0) -> Array:
    """Return a matrix with ones on the k-th diagonal, shape (rows, columns), in the real dtype of `like`."""
    arrays = arrays_like(like)
    i, j = arrays.arange(rows)[:, None], arrays.arange(rows if columns is None else columns)[None, :]
    return (j - i == k).astype(_real(like))


def lower_triangle(like: Array, n: int) -> Array:
    """Return a matrix with ones below the diagonal, shape (n, n), in the real dtype of `like`."""
    i = arrays_like(like).arange(n)
    return (i[None, :] < i[:, None]).astype(_real(like))


def _real(like: Array) -> Array:
    dtype = getval(like).dtype
    return dtype.char.lower() if dtype.kind == "c" else dtype
