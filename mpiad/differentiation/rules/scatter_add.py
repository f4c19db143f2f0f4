"""The adjoint of taking elements, kept as sparse data: a few values and their index.

A program that reads an array in many slices gives it one cotangent per slice, zero outside of that slice. None
of them is formed as a dense array: `Scatter` holds the slice's cotangent and adds it in place once the sum exists. A
traced cotangent is treated in the same way by autograd's `SparseObject`, as the result of a primitive, `put`,
whose adjoint takes the elements.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from autograd.extend import SparseObject, defjvp_argnums, defvjp, primitive

from mpiad._typing import Array, Index, Shape
from mpiad.transport.device_arrays import arrays_of

_FEW = 16  # if less than 1/16 of an array's elements are added to, numbering all elements doesn't pay
_BASIC = frozenset({int, slice, type(None), type(...), np.int64, np.int32})


@dataclass(slots=True, eq=False)
class Scatter:
    """A cotangent with `values` at `idx` and zeros elsewhere.

    - `shape`: shape of the array that elements were taken from.
    - `dtype`: its dtype.
    - `idx`: index of the values.
    - `values`: cotangent of the taken elements, untraced.
    - `repeats`: whether `idx` may name an element more than once.
    """

    shape: Shape
    dtype: np.dtype
    idx: Index
    values: Array
    repeats: bool

    def dense(self) -> Array:
        """Return the cotangent as a new dense array of the `shape`."""
        arrays = arrays_of(self.values)
        total = np.zeros(self.shape, self.dtype) if arrays is None else arrays.full(self.shape, 0, self.dtype)
        if self.repeats:
            return _add_repeated(total, self.idx, self.values)
        total[self.idx] = self.values
        return total

    def mut_add(self, total: Array) -> Array:
        """Add the cotangent to the sum so far, in place, and return that."""
        if self.repeats:
            return _add_repeated(total, self.idx, self.values)
        total[self.idx] += self.values
        return total


def _add_repeated(total: Array, idx: Index, values: Array) -> Array:
    """Add in place with an index that may repeat elements, in the order of the index."""
    arrays = arrays_of(total)
    if arrays is not None:
        arrays.add_at(total, idx, values)
        return total
    if total.ndim == 1 or not total.flags.c_contiguous or np.size(values) * _FEW < total.size:
        np.add.at(total, idx, values)
        return total
    # np.add.at is ten times as fast for one axis as for several, so flat indices are used.
    places = np.arange(total.size).reshape(total.shape)[idx]
    np.add.at(total.reshape(-1), np.ravel(places), np.ravel(values).astype(total.dtype, copy=False))
    return total


def is_basic(idx: Index) -> bool:
    """Return whether NumPy returns a view for an index: integers, slices, None and Ellipsis only."""
    if type(idx) is not tuple:
        return type(idx) in _BASIC
    # A loop, since this runs at each slice of each stencil; all() over a generator takes three times as long.
    for i in idx:  # noqa: SIM110
        if type(i) not in _BASIC:
            return False
    return True


@primitive
def put(g: Array, idx: Index, repeats: bool, vs: Array) -> SparseObject:
    """Return a traced cotangent of an array from that of its elements at `idx`, which autograd adds as sparse data.

    `repeats` says whether `idx` may name an element more than once; `vs` has the shape and dtype of the array.
    """
    return SparseObject(vs, Scatter(vs.shape, vs.dtype, idx, g, repeats).mut_add)


# Taking elements and putting them back are each other's transposes.
defvjp(put, lambda ans, g, idx, repeats, vs: lambda h: h[idx])
# The tangent of a sparse cotangent is sparse; autograd's defjvp would form a dense array.
defjvp_argnums(put, lambda argnums, gs, ans, args, kwargs: put(gs[0], *args[1:]))
