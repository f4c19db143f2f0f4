"""Maxima and minima of floating-point numbers as NumPy's: a NaN on any rank is the result on all.

MPI leaves open what its MAX and MIN make of a NaN. Its libraries keep it or lose it by the order in which they compare, and
that order differs between the ranks. So each rank's numbers travel with one more, the mark, which tells whether there is a
NaN among them. Nearly always there is none on any rank, and one reduction is all. Else a second one tells the ranks where,
and they write the same NaN there. Zeros go as 0.0: -0.0 is as great, and the order would decide which of them comes out.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from mpiad._typing import Array, Op, Shape
from mpiad.transport.device_arrays import arrays_of

__all__ = ["any_marked", "are_meant", "marked", "unmarked"]


def are_meant(array: Array, op: Op) -> bool:
    """Tell whether a reduction is one that could lose a NaN, the same on all ranks."""
    return op is not MPI.SUM and array.dtype.kind == "f" and op in (MPI.MAX, MPI.MIN)


def marked(array: Array, op: Op) -> Array:
    """Return the entries of a contiguous array and behind them the mark, new memory where the array lies."""
    arrays = arrays_of(array)
    # What loops wait for is one number, and these calls of NumPy would take longer than the reduction of it.
    if arrays is None and array.size == 1:
        number = array.item() + 0.0
        return np.array((number, (number != number) * _greater(op)), array.dtype)
    flat = array.reshape(-1)
    out = np.empty(flat.size + 1, flat.dtype) if arrays is None else arrays.empty((flat.size + 1,), flat.dtype)
    entries, mark = out[:-1], out[-1:]
    mark.fill(0.0)
    np.add(flat, mark, out=entries)  # -0.0 + 0.0 is 0.0
    mark[0] = np.count_nonzero(np.isnan(entries)) * _greater(op)
    return out


def _greater(op: Op) -> float:
    """Return a mark that comes out among zeros, those of ranks without NaN."""
    return 1.0 if op == MPI.MAX else -1.0


def any_marked(found: Array) -> bool:
    """Tell from what was reduced whether any rank had a NaN."""
    arrays = arrays_of(found)
    return bool(found[-1] if arrays is None else arrays.to_host(found[-1:])[0])


def unmarked(found: Array, shape: Shape) -> Array:
    """Return what was reduced, without the mark."""
    return found[:-1].reshape(shape) if shape else found[0]
