"""Where the arrays of a call live: all of them on the host, or all on one device. Nothing is copied unasked."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiad.transport.device_arrays import arrays_of, is_device_array, named

__all__ = ["require_floats", "require_together"]


def require_floats(call: str, value: Any, length: int) -> None:
    """Raise a TypeError where a plain value isn't an array of floats; `length` is that of its last axis."""
    known = isinstance(value, np.ndarray) or is_device_array(value)
    if not known or value.dtype.kind not in "fc":
        kind = f"an array of dtype {value.dtype}" if known else type(value).__name__
        raise TypeError(f"{call}: expected an array of floats of shape (..., {length}), but got {kind}.")


def require_together(call: str, **values: Any) -> None:
    """Raise a TypeError where some plain arrays are in another place than the first of them; numbers are everywhere."""
    arrays = [(name, value) for name, value in values.items() if is_device_array(value) or np.ndim(value)]
    if not arrays:
        return
    first, known = arrays[0]
    home = arrays_of(known)
    for name, value in arrays[1:]:
        if arrays_of(value) != home:
            raise TypeError(
                f"{call}: {first} and {name} must be in one place, but {first} is {_shown(known)} and {name} "
                f"{_shown(value)}. Nothing is copied unasked: see mpiad.device.to_device and to_host."
            )


def _shown(value: Any) -> str:
    return named(value) if is_device_array(value) else f"{type(value).__name__} on the host"
