"""Sum the cotangents that reach one node of the tape.

The first cotangent is kept as it came, by reference: it may be shared with other nodes, or be a read-only
view with strides of zero. Only a sum that was made here is *owned*, and further cotangents are added to it in
place. A cotangent that is zero but for some elements (`Scatter`) is added without being written out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from autograd.core import SparseObject, sparse_add, sparse_object_types
from autograd.extend import vspace
from autograd.tracer import Box

from mpiad._typing import Array
from mpiad.differentiation.rules.scatter_add import Scatter
from mpiad.transport.device_arrays import is_device_array

__all__ = ["accumulate"]

_ndarray, _boxes = np.ndarray, Box.types


def accumulate(total: Array, owned: bool, g: Array) -> tuple[Any, bool]:
    """Add one more cotangent to the sum of those that reached a node.

    Parameters
    ----------
    total : array, scalar, container or None
        Sum so far; None before the first cotangent.
    owned : bool
        Whether `total` was made by an earlier call and may be changed.
    g : array, scalar, container, Scatter, SparseObject or None
        Cotangent to add, maybe traced; never changed. None adds nothing.

    Returns
    -------
    total : array, scalar or container
        The sum; never a `Scatter` or `SparseObject`.
    owned : bool
        Whether the sum may be changed by the next call.
    """
    if g is None:
        return total, owned
    kind = type(g)
    if total is None:
        if kind is Scatter:
            return g.dense(), True
        if kind in sparse_object_types:
            return sparse_add(vspace(g), None, g), True
        # By reference: it may be another node's cotangent too, or a view, and isn't added to in place.
        return g, False
    if kind is type(total) and (kind is _ndarray or is_device_array(g)):
        # One pass over memory that is in the cache; only where neither shape nor precision would be lost.
        if owned and g.dtype == total.dtype and g.shape == total.shape and g.size > 1:
            total += g
            return total, True
        return total + g, True
    if kind is Scatter or kind in sparse_object_types:
        return _with_sparse(total, owned, g), True
    if kind in _boxes or type(total) in _boxes or isinstance(g, (tuple, list, dict)):
        space = vspace(g)
        return (space.mut_add(total, g) if owned else space.add(total, g)), True
    return total + g, True


def _with_sparse(total: Array, owned: bool, g: Array) -> Any:
    if type(g) is not Scatter:
        space = vspace(g)
        # A copy: the first cotangent was kept by reference, and others may hold it.
        if not owned:
            total = space.mut_add(None, total)
        return sparse_add(space, total, g)
    if type(total) in _boxes:
        if not owned:
            total = vspace(total).mut_add(None, total)
        return sparse_add(vspace(total), total, SparseObject(vspace(total), g.mut_add))
    if type(total) is _ndarray or is_device_array(total):
        # In place only where neither precision nor an imaginary part would be lost.
        if total.shape == g.shape and np.can_cast(g.dtype, total.dtype):
            return g.mut_add(total if owned else total.copy())
    return total + g.dense()
