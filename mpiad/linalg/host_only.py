"""What of linear algebra works on the host alone says so by name: PETSc."""

from __future__ import annotations

from typing import Any

from mpiad.transport.device_arrays import is_device_array, named

__all__ = ["require_host"]


def require_host(call: str, *values: Any) -> None:
    """Raise a TypeError where a plain value is a device array."""
    for value in values:
        if is_device_array(value):
            raise TypeError(
                f"{call} works on the host, but got {named(value)} of shape {value.shape}. Bring it there with "
                "mpiad.device.to_host, and the result back with mpiad.device.to_device; linalg.solve runs on devices."
            )
