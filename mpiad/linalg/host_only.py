"""What of linear algebra works on the host alone says so by name: SciPy's sparse matrices, multigrid, PETSc."""

from __future__ import annotations

from typing import Any

from mpiad.transport.device_arrays import is_device_array

__all__ = ["require_host"]


def require_host(call: str, *values: Any) -> None:
    """Raise a TypeError where a plain value is a device array."""
    for value in values:
        if is_device_array(value):
            raise TypeError(
                f"{call} works on the host, but got a {type(value).__name__} of shape {value.shape}. Bring it there with "
                "mpiad.device.to_host, and the result back with mpiad.device.to_device; linalg.solve runs on devices."
            )
