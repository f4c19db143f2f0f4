"""Arguments of kernels: their types, and conversion of arrays.

Complex arrays are passed as real and imaginary parts, one after the other, in twice as many rows or columns; real arrays
are passed as they are. A cotangent g of autograd's belongs to a + ib as ∂/∂a - i ∂/∂b, so the parts' cotangents are the
parts of its conjugate.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from mpiad._typing import Array

# Bytes of a line of the processor's cache.
_LINE = 64


class Argument(NamedTuple):
    """The type of an argument."""

    dtype: np.dtype
    ndim: int | None  # of a contiguous array; None is a number


def arguments_of(signature: str) -> list[Argument]:
    """Return the types of a signature such as ``void(int64, float64[:, ::1])`` or ``linked(float64[::1])``."""
    found = re.findall(r"(\w+)(\[[^\]]*\])?(?:, |\)$)", signature.partition("(")[2])
    return [
        Argument(np.dtype(name.replace("boolean", "bool")), axes.count(":") - 1 if axes else None) for name, axes in found
    ]


@lru_cache(64)
def signature_in(text: str, name: str) -> str:
    """Return the signature of a kernel from its annotations, as ``def kernel(n: int64, x: float64[:, ::1]):``."""
    head = text.partition(f"def {name}(")[2].partition("):")[0]
    kinds = re.findall(r": (\w+(?:\[[^]]*\])?)", head)
    return f"void({', '.join(kinds)})"


def is_linked(signature: str) -> bool:
    """Return whether a signature is that of a linked kernel (see `machine_code`)."""
    return signature.startswith("linked(")


def argument(x: Array, dtype: DTypeLike = float) -> Array:
    """Return an array as kernels take it: itself, if it is contiguous, of this dtype, and writable."""
    return np.require(x, dtype, ["C_CONTIGUOUS", "WRITEABLE"])


def aligned(count: int, dtype: np.dtype) -> Array:
    """Return zeros that begin with a cache line, and share none with another thread's data."""
    # Memory begins at any multiple of 16 bytes. From some, each vector of 64 bytes lies in two lines: up to a fifth slower.
    bytes_ = np.zeros(count * dtype.itemsize + 2 * _LINE, np.uint8)
    first = -bytes_.ctypes.data % _LINE
    return bytes_[first : first + count * dtype.itemsize].view(dtype)


def is_complex(x: Array) -> bool:
    """Return whether an array's, a number's or a dtype's numbers are complex."""
    return np.issubdtype(x, np.complexfloating) if isinstance(x, (type, np.dtype)) else np.iscomplexobj(x)


def real_dtype(dtype: DTypeLike) -> np.dtype:
    """Return the dtype of the parts."""
    parts: Array = np.zeros(0, dtype)
    return parts.real.dtype


def parts(x: Array) -> Array:
    """Return an array whose last axis, contiguous, is one of parts: a view, of real arrays themselves."""
    return x.view(real_dtype(x.dtype)) if is_complex(x) else x


def from_parts(x: Array, dtype: DTypeLike) -> Array:
    """Return an array of a dtype whose `parts` these are."""
    return np.ascontiguousarray(x, real_dtype(dtype)).view(dtype) if is_complex(dtype) else x


def row_parts(x: Array) -> Array:
    """Return an array of shape (..., d, n) with its last axis but one as one of parts."""
    if not is_complex(x):
        return x
    return np.stack([x.real, x.imag], axis=-2).reshape(*x.shape[:-2], 2 * x.shape[-2], x.shape[-1])


def from_row_parts(x: Array, dtype: DTypeLike) -> Array:
    """Return an array of a dtype whose `row_parts` these are."""
    if not is_complex(dtype):
        return x
    made = np.empty((*x.shape[:-2], x.shape[-2] // 2, x.shape[-1]), dtype)
    made.real, made.imag = x[..., ::2, :], x[..., 1::2, :]
    return made
