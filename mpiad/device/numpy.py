"""autograd.numpy, with those functions replaced that can't take device arrays: ``import mpiad.device.numpy as np``.

All names of autograd.numpy are here. Most of its functions need no change, since NumPy dispatches them to the device;
the original ones of those below always make NumPy's arrays. For arrays on the host they do the same as autograd's, so a
program that imports this module runs on either side.
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
    """Join arrays along the first axis, as rows if they have one axis."""
    return concatenate([anp.atleast_2d(piece) for piece in arrays], 0)


row_stack = vstack


def hstack(arrays: Sequence[Array]) -> Array:
    """Join arrays along the second axis, or along the first if they have one."""
    pieces = [anp.atleast_1d(piece) for piece in arrays]
    return concatenate(pieces, 0 if len(pieces[0].shape) == 1 else 1)


def dstack(arrays: Sequence[Array]) -> Array:
    """Join arrays along the third axis."""
    return concatenate([anp.atleast_3d(piece) for piece in arrays], 2)


def column_stack(arrays: Sequence[Array]) -> Array:
    """Join columns and matrices along the second axis."""
    pieces = [anp.atleast_1d(piece) for piece in arrays]
    return concatenate([piece[:, None] if len(piece.shape) == 1 else piece for piece in pieces], 1)


def append(start: Array, values: Array, axis: int | None = None) -> Array:
    """Join two arrays, flattened without an axis."""
    return concatenate([start, values], axis)
