"""autograd.numpy for host and device arrays: ``import mpiad.device.numpy as np``.

This module has all names of autograd.numpy. Most of these functions support device arrays, since NumPy dispatches calls to
the library of the array. The functions below replace functions that fail for device arrays; for host arrays they call
autograd's functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import autograd.numpy as anp

from mpiad._typing import Array
from mpiad.device.assembly import array, concatenate, stack

__all__ = ["append", "array", "column_stack", "concatenate", "dstack", "hstack", "row_stack", "stack", "vstack"]


def __getattr__(name: str) -> Any:
    return getattr(anp, name)


def __dir__() -> list[str]:
    return [*__all__, *(name for name in dir(anp) if name[0] != "_")]


def vstack(arrays: Sequence[Array]) -> Array:
    """Join arrays along the first axis; arrays with one axis are rows."""
    return concatenate([anp.atleast_2d(x) for x in arrays], 0)


row_stack = vstack


def hstack(arrays: Sequence[Array]) -> Array:
    """Join arrays along the second axis, or one-dimensional arrays along the first axis."""
    arrays = [anp.atleast_1d(x) for x in arrays]
    return concatenate(arrays, 0 if len(arrays[0].shape) == 1 else 1)


def dstack(arrays: Sequence[Array]) -> Array:
    """Join arrays along the third axis."""
    return concatenate([anp.atleast_3d(array(x)) for x in arrays], 2)


def column_stack(arrays: Sequence[Array]) -> Array:
    """Join arrays along the second axis; arrays with one axis are columns."""
    arrays = [anp.atleast_1d(x) for x in arrays]
    return concatenate([x[:, None] if len(x.shape) == 1 else x for x in arrays], 1)


def append(start: Array, values: Array, axis: int | None = None) -> Array:
    """Join two arrays along an axis; if `axis` is None, flatten both arrays first."""
    return concatenate([start, values], axis)
