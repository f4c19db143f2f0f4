"""Placement of the arrays of a call: all of them on the host, or all on one device. Nothing is copied implicitly.

Functions that work only on the host say so by name (PETSc), or copy there and back once each (SciPy's factors).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpiad._typing import Array, LocalArray
from mpiad.transport.device_arrays import arrays_of, is_device_array, named


def require_floats(call: str, value: Array, length: int) -> None:
    """Raise a TypeError if a plain value isn't an array of floats; `length` is that of its last axis."""
    known = isinstance(value, np.ndarray) or is_device_array(value)
    if not known or value.dtype.kind not in "fc":
        kind = f"an array of dtype {value.dtype}" if known else type(value).__name__
        raise TypeError(f"{call}: expected an array of floats of shape (..., {length}), but got {kind}.")


def require_together(call: str, **values: Any) -> None:
    """Raise a TypeError if some plain arrays are on another device than the first of them; numbers fit all."""
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
    """Raise a TypeError if a plain value is a device array."""
    for value in values:
        if is_device_array(value):
            raise TypeError(
                f"{call} works on the host, but got {named(value)} of shape {value.shape}. Bring it there with "
                "mpiad.device.to_host, and the result back with mpiad.device.to_device; linalg.solve runs on devices."
            )


def through_host(solve: Callable[[LocalArray], LocalArray], r: LocalArray) -> LocalArray:
    """Return the result of a function of host arrays for an untraced array, on the device of that array."""
    home = arrays_of(r)
    return solve(r) if home is None else home.to_device(solve(home.to_host(r)))
