"""Indexing of arrays by integers, slices, masks and lists."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from autograd.core import sparse_add, sparse_object_types
from autograd.extend import vspace
from autograd.numpy.numpy_boxes import ArrayBox
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.differentiation.rules.broadcasting import fitted
from mpiad.differentiation.rules.protocol import (
    BOX_TYPES,
    Argnums,
    Vjp,
    anp,
    bound,
    inherited_jvp,
    inherited_vjp,
    linear_jvp,
    refusal,
)
from mpiad.differentiation.rules.scatter_add import Scatter, copy_of, is_basic, put
from mpiad.transport.devices.device_arrays import arrays_of, is_array, is_device_array

_getitem = ArrayBox.__getitem__


def getitem_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Add the cotangent to zeros at the positions of the taken elements."""
    if argnums != (0,):
        return inherited_vjp(_getitem, argnums, ans, args, kwargs)
    x, idx = args
    if isinstance(idx, list):  # NumPy would convert an empty list to floats
        idx = np.asarray(idx, dtype=None if idx else np.intp)
    basic, parts = is_basic(idx), idx if type(idx) is tuple else (idx,)
    shape, dtype = x.shape, x.dtype
    if basic and type(ans) is np.ndarray and ans.ndim and ans.size == x.size:
        # A basic index that takes all elements changes their order only if it has a negative step.
        if not any(type(i) is slice and i.step is not None and i.step < 0 for i in parts):  # type: ignore[operator]
            return lambda g: (g.reshape(shape),)
    repeats = False
    if not basic:
        # An array of indices may select an element twice; a mask doesn't.
        advanced: list[Any] = [i for i in parts if type(i) is tuple or not is_basic(i)]
        repeats = len(advanced) > 1 or not is_array(advanced[0]) or advanced[0].dtype != bool
    space = vspace(x) if is_device_array(getval(x)) else None

    def vjp(g: Array) -> tuple[Array]:
        if type(g) in BOX_TYPES:
            return (put(g, idx, repeats, space or vspace(np.empty(shape, dtype))),)
        return (Scatter(shape, dtype, idx, g, repeats),)

    return vjp


def take_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Add the cotangents at the positions of the taken elements."""
    named = bound(anp.take, "a indices axis out mode", args, kwargs)
    if argnums != (0,):
        raise refusal(anp.take, "with respect to the indices")
    x, indices, axis = named["a"], named["indices"], named.get("axis")
    shape = np.shape(getval(x))
    if not shape:
        return lambda g: (fitted(g, x),)
    indices = indices if is_array(indices) else np.asarray(indices, np.intp)
    n = math.prod(shape) if axis is None else shape[axis]
    # Indices of mode "raise" count from the end if they are negative, as those of mode "wrap".
    indices = np.clip(indices, 0, n - 1) if named.get("mode") == "clip" else indices % max(n, 1)
    if axis is not None:
        return getitem_vjp(argnums, ans, (x, (slice(None),) * (axis % len(shape)) + (indices,)), {})
    key: tuple = ()
    for n in reversed(shape):
        key, indices = (indices % max(n, 1), *key), indices // max(n, 1)
    return getitem_vjp(argnums, ans, (x, key), {})


def take_along_axis_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Add the cotangents at the positions of the taken elements."""
    named = bound(anp.take_along_axis, "arr indices axis", args, kwargs)
    if argnums != (0,):
        raise refusal(anp.take_along_axis, "with respect to the indices")
    x, indices, axis = named["arr"], named["indices"], named.get("axis", -1)
    if axis is None:
        return take_vjp(argnums, ans, (x, indices), {})
    arrays, ndim = arrays_of(indices), len(x.shape)
    numbers = [
        (np if arrays is None else arrays).arange(n).reshape(-1, *(1,) * (ndim - 1 - k)) for k, n in enumerate(x.shape)
    ]
    numbers[axis] = indices
    return getitem_vjp(argnums, ans, (x, tuple(numbers)), {})


def getitem_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Take the same elements of the tangent."""
    if argnums != (0,):
        return inherited_jvp(_getitem, argnums, gs, ans, args, kwargs)
    return gs[0][args[1]]


def sparse_add_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Return the tangent of a sum with a sparse cotangent: the sum of both tangents, in a new array."""
    tangent = gs[-1]
    if argnums == (1,) or type(tangent) not in sparse_object_types:
        return inherited_jvp(sparse_add, argnums, gs, ans, args, kwargs)
    space = vspace(tangent)
    if argnums == (2,):
        return sparse_add(space, None, tangent)
    return sparse_add(space, copy_of(gs[0]), tangent)


VJPS = {_getitem: getitem_vjp, anp.take: take_vjp, anp.take_along_axis: take_along_axis_vjp}
JVPS = {_getitem: getitem_jvp, sparse_add: sparse_add_jvp}
JVPS |= {fun: partial(linear_jvp, fun) for fun in (anp.take, anp.take_along_axis)}
