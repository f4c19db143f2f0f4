"""Where the arrays of a call live: all of them on the host, or all on one device. Nothing is copied unasked.

What works on the host alone says so by name (PETSc), or goes there and back with one copy each way (SciPy's factors).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpiad._typing import Array, LocalArray
from mpiad.transport.device_arrays import arrays_of, is_device_array, named


def require_floats(call: str, value: Array, length: int) -> None:
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


def _shown(value: Array) -> str:
    return named(value) if is_device_array(value) else f"{type(value).__name__} on the host"


def require_host(call: str, *values: Any) -> None:
    """Raise a TypeError where a plain value is a device array."""
    for value in values:
        if is_device_array(value):
            raise TypeError(
                f"{call} works on the host, but got {named(value)} of shape {value.shape}. Bring it there with "
                "mpiad.device.to_host, and the result back with mpiad.device.to_device; linalg.solve runs on devices."
            )


def through_host(solve: Callable[[LocalArray], LocalArray], r: LocalArray) -> LocalArray:
    """Return what a function of arrays on the host makes of an untraced one, where that one lives."""
    home = arrays_of(r)
    return solve(r) if home is None else home.to_device(solve(home.to_host(r)))
