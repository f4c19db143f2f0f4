"""What a kernel takes: the types of its arguments, and arrays that it can take."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from mpiad._typing import Array

__all__ = ["Argument", "aligned", "argument", "arguments_of", "is_linked"]

# Bytes of a line of the processor's cache.
_LINE = 64


class Argument(NamedTuple):
    """The type of an argument.

    Parameters
    ----------
    dtype : dtype
    ndim : int or None
        Of a contiguous array; None is a number.
    """

    dtype: np.dtype
    ndim: int | None


def arguments_of(signature: str) -> list[Argument]:
    """Return the types of a signature such as ``void(int64, float64[:, ::1])`` or ``linked(float64[::1])``."""
    found = re.findall(r"(\w+)(\[[^\]]*\])?(?:, |\)$)", signature.partition("(")[2])
    return [
        Argument(np.dtype(name.replace("boolean", "bool")), axes.count(":") - 1 if axes else None) for name, axes in found
    ]


def is_linked(signature: str) -> bool:
    """Tell whether a signature is that of a linked kernel (see `machine_code`)."""
    return signature.startswith("linked(")


def argument(x: Array, dtype: DTypeLike = float) -> Array:
    """Return an array as kernels take it: itself, where it is contiguous, of this dtype, and may be written."""
    return np.require(x, dtype, ["C_CONTIGUOUS", "WRITEABLE"])


def aligned(count: int, dtype: np.dtype) -> Array:
    """Return zeros that begin with a cache line, and share none with what another thread has."""
    # Memory begins at any multiple of 16 bytes. From some, each vector of 64 bytes lies in two lines: up to a fifth slower.
    bytes_ = np.zeros(count * dtype.itemsize + 2 * _LINE, np.uint8)
    first = -bytes_.ctypes.data % _LINE
    return bytes_[first : first + count * dtype.itemsize].view(dtype)
