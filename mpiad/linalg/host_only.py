"""What of linear algebra works on the host alone says so by name: SciPy's sparse matrices, multigrid, PETSc."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiad.transport.device_arrays import is_device_array, named

__all__ = ["require_floats", "require_host"]


def require_host(call: str, *values: Any) -> None:
    """Raise a TypeError where a plain value is a device array."""
    for value in values:
        if is_device_array(value):
            raise TypeError(
                f"{call} works on the host, but got {named(value)} of shape {value.shape}. Bring it there with "
                "mpiad.device.to_host, and the result back with mpiad.device.to_device; linalg.solve runs on devices."
            )


def require_floats(call: str, value: Any, length: int) -> None:
    """Raise a TypeError where a plain value isn't an array of floats on the host; `length` is that of its last axis."""
    require_host(call, value)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fc":
        kind = f"an array of dtype {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise TypeError(f"{call}: expected an array of floats of shape (..., {length}), but got {kind}.")
