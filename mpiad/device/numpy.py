"""autograd.numpy for host and device arrays: ``import mpiad.device.numpy as np``.

This module has all names of autograd.numpy. Most of its functions support device arrays, since NumPy dispatches the calls
to the array's library. The functions below replace functions that would fail. For host arrays they call autograd's
functions.
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
    return sorted({*globals(), *dir(anp)})


def vstack(arrays: Sequence[Array]) -> Array:
    """Join arrays along the first axis; arrays with one axis are rows."""
    return concatenate([anp.atleast_2d(piece) for piece in arrays], 0)


row_stack = vstack


def hstack(arrays: Sequence[Array]) -> Array:
    """Join arrays along the second axis, or one-dimensional arrays along the first axis."""
    pieces = [anp.atleast_1d(piece) for piece in arrays]
    return concatenate(pieces, 0 if len(pieces[0].shape) == 1 else 1)


def dstack(arrays: Sequence[Array]) -> Array:
    """Join arrays along the third axis."""
    return concatenate([anp.atleast_3d(piece) for piece in arrays], 2)


def column_stack(arrays: Sequence[Array]) -> Array:
    """Join arrays along the second axis; arrays with one axis are columns."""
    pieces = [anp.atleast_1d(piece) for piece in arrays]
    return concatenate([piece[:, None] if len(piece.shape) == 1 else piece for piece in pieces], 1)


def append(start: Array, values: Array, axis: int | None = None) -> Array:
    """Join two arrays along an axis; if the axis is None, flatten both arrays first."""
    return concatenate([start, values], axis)
