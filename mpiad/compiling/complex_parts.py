"""Complex arrays as kernels take them: real and imaginary parts, one after the other, in twice as many rows or columns.

Real arrays are what they are. A cotangent g of autograd's belongs to a + ib as ∂/∂a - i ∂/∂b, so the parts' cotangents are
the parts of its conjugate.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

from mpiad._typing import Array

__all__ = ["from_parts", "from_row_parts", "is_complex", "parts", "real_dtype", "row_parts"]


def is_complex(x: Array) -> bool:
    """Tell whether an array's, a number's or a dtype's numbers are complex."""
    return np.issubdtype(x, np.complexfloating) if isinstance(x, (type, np.dtype)) else np.iscomplexobj(x)


def real_dtype(dtype: DTypeLike) -> np.dtype:
    """Return the dtype of the parts."""
    parts: Array = np.zeros(0, dtype)
    return parts.real.dtype


def parts(x: Array) -> Array:
    """Return an array whose last axis, contiguous, is one of parts: a view, of real arrays themselves."""
    return x.view(real_dtype(x.dtype)) if is_complex(x) else x


def from_parts(x: Array, dtype: DTypeLike) -> Array:
    """Return an array of a dtype whose `parts` these are."""
    return np.ascontiguousarray(x, real_dtype(dtype)).view(dtype) if is_complex(dtype) else x


def row_parts(x: Array) -> Array:
    """Return an array of shape (..., d, n) with its last axis but one as one of parts."""
    if not is_complex(x):
        return x
    return np.stack([x.real, x.imag], axis=-2).reshape(*x.shape[:-2], 2 * x.shape[-2], x.shape[-1])


def from_row_parts(x: Array, dtype: DTypeLike) -> Array:
    """Return an array of a dtype whose `row_parts` these are."""
    if not is_complex(dtype):
        return x
    made = np.empty((*x.shape[:-2], x.shape[-2] // 2, x.shape[-1]), dtype)
    made.real, made.imag = x[..., ::2, :], x[..., 1::2, :]
    return made
