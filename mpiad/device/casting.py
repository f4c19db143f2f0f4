"""Changes of dtype on the device; NumPy's own function for it isn't dispatched by all versions of CuPy."""

from __future__ import annotations

from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.extend import defjvp, defvjp, primitive

from mpiad._typing import Array

__all__ = ["cast"]


@primitive
def cast(x: Array, dtype: np.dtype) -> Array:
    """Return a device array in another dtype, its real part for a real one."""
    if x.dtype.kind == "c" and np.dtype(dtype).kind != "c":
        x = x.real
    return x.astype(dtype)


def _back(g: Array, dtype: np.dtype) -> Any:
    return cast(anp.real(g) if anp.iscomplexobj(g) and dtype.kind != "c" else g, dtype)


def _cast_vjp(ans: Array, x: Array, dtype: np.dtype) -> Any:
    # An integer's value carries no derivative, so neither does what is made of it.
    own = x.dtype
    return lambda g: _back(g, own)


defvjp(cast, _cast_vjp)
defjvp(cast, lambda g, ans, x, dtype: cast(g, dtype))
