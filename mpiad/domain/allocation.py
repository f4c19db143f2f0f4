"""Memory of a shape where an array lives: on the host, or on its device."""

from __future__ import annotations

import numpy as np

from mpiad._typing import Array, Shape
from mpiad.transport.device_arrays import arrays_of

__all__ = ["copy_of", "empty_beside", "zeros_beside"]


def empty_beside(u: Array, shape: Shape) -> Array:
    """Return a C-contiguous array without values, of the dtype of `u` and where it lives."""
    arrays = arrays_of(u)
    return np.empty(shape, u.dtype) if arrays is None else arrays.empty(shape, u.dtype)


def zeros_beside(u: Array, shape: Shape) -> Array:
    """Return a C-contiguous array of zeros, of the dtype of `u` and where it lives."""
    arrays = arrays_of(u)
    return np.zeros(shape, u.dtype) if arrays is None else arrays.full(shape, 0, u.dtype)


def copy_of(u: Array) -> Array:
    """Return a copy."""
    arrays = arrays_of(u)
    return np.array(u) if arrays is None else arrays.copy(u)
