"""Whether an array is as it was, by its bits: asked of all that a jitted function reads, at each of its calls."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from mpiad._typing import Array


def _c_comparison() -> Any:
    """Return the C library's memcmp, None where it can't be had: it makes no copies and no temporary arrays."""
    try:
        compare = ctypes.CDLL(None).memcmp
    except (OSError, TypeError, AttributeError):  # not on Windows
        return None
    compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    return compare


_memcmp = _c_comparison()


def same_bits(x: Array, y: Array) -> bool:
    """Tell whether two arrays have the same bits; NaN is itself."""
    if x is y:
        return True
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if _memcmp is None or not (x.flags.c_contiguous and y.flags.c_contiguous):
        return x.tobytes() == y.tobytes()
    return _memcmp(x.ctypes.data, y.ctypes.data, x.nbytes) == 0


def is_writable(x: Any) -> bool:
    """Tell whether an array can change: it, or one whose memory it has."""
    while isinstance(x, np.ndarray):
        if x.flags.writeable:
            return True
        x = x.base
    return x is not None  # memory that isn't NumPy's
