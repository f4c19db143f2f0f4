"""Arrays that MPI can send: contiguous, with a dtype that has an MPI datatype. Nothing is cast here."""

from __future__ import annotations

import sys

import numpy as np
from mpi4py.MPI import IN_PLACE, Datatype

from mpiad._typing import Array, Rank
from mpiad.transport.devices.device_arrays import Spec, arrays_of, contiguous

_INEXACT = tuple(np.dtype(name) for name in ("f4", "f8", "c8", "c16"))
_EXACT = tuple(np.dtype(name) for name in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"))
_DTYPES = frozenset(_INEXACT + _EXACT)
_SCALARS = (bool, int, float, complex, np.generic)
_ALLOWED = "an array or number of dtype float32/64, complex64/128, an integer type or bool"


def outgoing(x: Array, call: str) -> Array:
    """Return `x`, or a C-contiguous copy on the same device; raise a TypeError if MPI has no datatype for it."""
    if type(x) is np.ndarray and x.dtype in _DTYPES:
        return x if x.flags.c_contiguous else x.copy(order="C")
    return _converted(x, call)


def require_sendable(x: Array, call: str) -> None:
    """Raise a TypeError if `outgoing` would."""
    if type(x) is not np.ndarray or x.dtype not in _DTYPES:
        _converted(x, call)


def _converted(x: Array, call: str) -> Array:
    arrays = arrays_of(x)
    if arrays is None and (_is_masked(x) or not isinstance(x, (np.ndarray, *_SCALARS))):
        raise TypeError(f"{call}: x must be {_ALLOWED}, but got {type(x).__name__} ({_shortened(x)}). {_advice(x, call)}")
    # np.ascontiguousarray would add a dimension to an array without dimensions.
    array = np.asarray(x) if arrays is None and not np.ndim(x) else contiguous(x)
    if array.dtype not in _DTYPES:
        raise _of_other_dtype(call, "x", array)
    return array


def _is_masked(x: Array) -> bool:
    # NumPy loads this module at its first use; until then there are no masked arrays.
    return "numpy.ma" in sys.modules and isinstance(x, np.ma.MaskedArray)


def _of_other_dtype(call: str, argument: str, x: Array) -> TypeError:
    text = f"{call}: {argument} must be {_ALLOWED}, but got dtype {x.dtype!r} with shape {x.shape}."
    return TypeError(f"{text} {conversion(x.dtype, argument)}".rstrip())


def conversion(dtype: np.dtype, argument: str) -> str:
    """Return advice on the conversion of an argument with an unsupported dtype; empty if no conversion is obvious."""
    native = dtype.newbyteorder("=")
    if native in _DTYPES and not dtype.isnative:
        return f"Its bytes are in another order than this machine's: pass {argument}.astype({native.name!r})."
    if native in _DTYPES or dtype.kind not in "fc":
        return ""
    return f"Pass {argument}.astype({'float64' if dtype.kind == 'f' else 'complex128'!r})."


def _advice(x: Array, call: str) -> str:
    if x is None:
        return "Only ranks whose x isn't used may pass None."
    if _is_masked(x):
        return "Send its data and its mask separately."
    if isinstance(x, (list, tuple)):
        if any(isinstance(item, Datatype) for item in x):
            return "Pass the array alone: its datatype and the number of its entries are known."
        lengths = [shape[0] if (shape := getattr(item, "shape", ())) else None for item in x]
        if call in ("mpi_scatter", "mpi_alltoall") and x and None not in lengths:
            return (
                f"Pass the whole array, whose blocks np.concatenate of autograd.numpy joins, with axis=0, counts={lengths}."
            )
        return "Make it an array with autograd.numpy.array, or send its items one by one."
    if x is IN_PLACE:
        return "Pass the array itself: it isn't overwritten, and the result is returned."
    return "Objects aren't pickled: send their numbers as an array; for objects of constants use mpi4py's methods."


def _shortened(x: Array) -> str:
    return f"{x!r:.60}" if arrays_of(x) is None else f"shape {x.shape}, dtype {x.dtype}"


def private_copy(array: Array, x: Array) -> Array:
    """Return `array`, of `outgoing(x)`, in memory that the user can't change; the sender of device arrays copies them."""
    if type(array) is not np.ndarray:
        return array
    # For a subclass of ndarray, asarray returns a new object that is a view of the user's memory.
    return array.copy() if array is x or array.base is not None else array


def spec_of(like: Array, call: str, argument: str = "like") -> Spec:
    """Return the spec of a template; raise a TypeError if it is missing or isn't an array that can be received."""
    if isinstance(like, np.ndarray) or isinstance(like, _SCALARS):
        dtype = np.result_type(like) if isinstance(like, (bool, int, float, complex)) else like.dtype
        if dtype in _DTYPES:
            return Spec(np.shape(like), dtype)
        raise _of_other_dtype(call, argument, like)
    arrays = arrays_of(like)
    if arrays is not None and like.dtype in _DTYPES:
        return Spec(like.shape, like.dtype, arrays)
    raise TypeError(
        f"{call}: {argument} gives the shape and dtype of the array to receive and must be {_ALLOWED}, "
        f"but got {type(like).__name__} ({_shortened(like)}).{' ' + _advice(like, call) if argument == 'x' else ''}"
    )


def even_lengths(length: int, size: int) -> list[int]:
    """Return the lengths of the ranks' parts, as in numpy.array_split: the first parts may be longer by one."""
    share, longer = divmod(length, size)
    return [share + (rank < longer) for rank in range(size)]


def even_range(length: int, size: int, rank: Rank) -> tuple[int, int]:
    """Return where a rank's part of the lengths `even_lengths` begins and ends."""
    share, longer = divmod(length, size)
    start = rank * share + min(rank, longer)
    return start, start + share + (rank < longer)
