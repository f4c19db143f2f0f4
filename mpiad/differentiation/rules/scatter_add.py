"""The adjoint of taking elements, as sparse data: a few values and their index.

If a program reads many slices of an array, each slice contributes a cotangent that is zero elsewhere. `Scatter` holds
the values of such a cotangent, and adds them to the total of a node in place. For a traced cotangent the primitive
`put` returns autograd's `SparseObject`, which does the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from autograd.extend import SparseObject, defjvp, defjvp_argnums, defvjp, primitive, vspace
from autograd.numpy.numpy_vspaces import ArrayVSpace

from mpiad._typing import Array, Index, Shape
from mpiad.transport.devices.device_arrays import arrays_of

_FEW = 16  # if fewer than 1/16 of an array's elements change, an array of all indices takes too long
_BASIC = frozenset({int, slice, type(None), type(...), np.int64, np.int32})


@dataclass(slots=True, eq=False)
class Scatter:
    """A cotangent with `values` at `idx` and zeros elsewhere."""

    shape: Shape  # of the array from which elements were taken
    dtype: np.dtype
    idx: Index
    values: Array  # untraced
    repeats: bool  # whether `idx` may select an element more than once

    def dense(self) -> Array:
        """Return the cotangent as a new dense array."""
        arrays = arrays_of(self.values)
        total = np.zeros(self.shape, self.dtype) if arrays is None else arrays.full(self.shape, 0, self.dtype)
        if self.repeats:
            return self.mut_add(total)
        total[self.idx] = self.values
        return total

    def mut_add(self, total: Array) -> Array:
        """Add the cotangent to an array in place, and return this array."""
        idx, values = self.idx, self.values
        if not self.repeats:
            total[idx] += values
        elif (arrays := arrays_of(total)) is not None:
            arrays.add_at(total, idx, values)
        elif total.ndim == 1 or not total.flags.c_contiguous or np.size(values) * _FEW < total.size:
            np.add.at(total, idx, values)
        else:  # np.add.at is ten times as fast for one axis as for several
            indices = np.arange(total.size).reshape(total.shape)[idx]
            np.add.at(total.reshape(-1), np.ravel(indices), np.ravel(values).astype(total.dtype, copy=False))
        return total


def is_basic(idx: Index) -> bool:
    """Return whether an index has only integers, slices, None and Ellipsis, so that NumPy returns a view or a number."""
    if type(idx) is not tuple:
        return type(idx) in _BASIC
    # all() with a generator would take three times as long.
    for i in idx:  # noqa: SIM110
        if type(i) not in _BASIC:
            return False
    return True


@primitive
def _copied(x: Array) -> Array:
    return x.copy()  # no operation in a compiled program


defvjp(_copied, lambda ans, x: lambda g: g)
defjvp(_copied, "same")


def copy_of(total: Array) -> Array:
    """Return a copy of a total, which may be traced, to which cotangents can be added in place."""
    space = vspace(total)
    return _copied(total) if isinstance(space, ArrayVSpace) else space.mut_add(None, total)


@primitive
def put(g: Array, idx: Index, repeats: bool, vs: Array) -> SparseObject:
    """Return the traced, sparse cotangent of an array in the space `vs`, from the cotangent of its elements at `idx`."""
    return SparseObject(vs, Scatter(vs.shape, vs.dtype, idx, g, repeats).mut_add)


# Adding elements to an array of zeros is the transpose of taking elements.
defvjp(put, lambda ans, g, idx, repeats, vs: lambda h: h[idx])
# The tangent of a sparse cotangent is sparse; autograd's defjvp would form a dense array.
defjvp_argnums(put, lambda argnums, gs, ans, args, kwargs: put(gs[0], *args[1:]))
