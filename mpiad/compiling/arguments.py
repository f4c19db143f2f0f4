"""Arguments of kernels: their types, and the conversion of arrays.

Complex arrays are passed as real arrays with twice as many rows or columns, in which the real and imaginary parts of an
entry are neighbors. autograd's cotangent of a + ib is ∂/∂a - i ∂/∂b, so the real and imaginary parts of its complex
conjugate are the cotangents of a and b.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from mpiad._typing import Array

# Bytes in a cache line.
_LINE = 64


class Argument(NamedTuple):
    """The type of an argument."""

    dtype: np.dtype
    ndim: int | None  # number of axes of a contiguous array; None for a number


def arguments_of(signature: str) -> list[Argument]:
    """Return the types of a signature such as ``void(int64, float64[:, ::1])`` or ``linked(float64[::1])``."""
    kinds = signature.partition("(")[2].removesuffix(")").replace(", :", ",:").split(", ")
    parts = [kind.partition("[") for kind in kinds if kind]
    return [
        Argument(np.dtype(name.replace("boolean", "bool")), axes.count(":") - 1 if axes else None)
        for name, _, axes in parts
    ]


def is_linked(signature: str) -> bool:
    """Return whether a signature is that of a linked kernel (see `cache`)."""
    return signature.startswith("linked(")


def argument(x: Array, dtype: DTypeLike = float) -> Array:
    """Return a contiguous, writable array of a dtype: x itself if possible, otherwise a copy."""
    if type(x) is np.ndarray and x.dtype == dtype and x.flags.carray:
        return x
    return np.array(x, dtype, order="C")


def aligned(count: int, dtype: np.dtype, allocate: Callable = np.zeros) -> Array:
    """Return an array that shares no cache line with other data; `allocate`: `np.zeros` or `np.empty`."""
    # NumPy aligns memory to 16 bytes. A 64-byte vector across two cache lines is up to 20 % slower.
    bytes_ = allocate(count * dtype.itemsize + 2 * _LINE, np.uint8)
    first = -ctypes.addressof(ctypes.c_char.from_buffer(bytes_)) % _LINE  # four times as fast as `ctypes.data`
    return bytes_[first : first + count * dtype.itemsize].view(dtype)


def is_complex(x: Array) -> bool:
    """Return whether an array, a number or a dtype is complex."""
    if isinstance(x, type):
        return issubclass(x, complex | np.complexfloating)
    dtype = x if isinstance(x, np.dtype) else getattr(x, "dtype", None)
    return np.iscomplexobj(x) if dtype is None else dtype.kind == "c"  # type: ignore[arg-type]


def real_dtype(dtype: DTypeLike) -> np.dtype:
    """Return the dtype of the real and imaginary parts."""
    parts: Array = np.zeros(0, dtype)
    return parts.real.dtype


def parts(x: Array) -> Array:
    """Return a real view of a complex array, whose last axis alternates real and imaginary parts; a real x unchanged."""
    return x.view(real_dtype(x.dtype)) if is_complex(x) else x


def from_parts(x: Array, dtype: DTypeLike) -> Array:
    """Return the array of this dtype whose `parts` equal x."""
    return np.ascontiguousarray(x, real_dtype(dtype)).view(dtype) if is_complex(dtype) else x


def row_parts(x: Array) -> Array:
    """Return a real x unchanged; for a complex x, (..., d, n), its alternating real and imaginary rows, (..., 2 d, n)."""
    if not is_complex(x):
        return x
    return np.stack([x.real, x.imag], axis=-2).reshape(*x.shape[:-2], 2 * x.shape[-2], x.shape[-1])


def from_row_parts(x: Array, dtype: DTypeLike) -> Array:
    """Return the array of this dtype whose `row_parts` equal x."""
    if not is_complex(dtype):
        return x
    result = np.empty((*x.shape[:-2], x.shape[-2] // 2, x.shape[-1]), dtype)
    result.real, result.imag = x[..., ::2, :], x[..., 1::2, :]
    return result


def address_of(x: Array) -> int:
    """Return the address of the first entry of an array on the host."""
    return x.__array_interface__["data"][0]
