"""The transpose of a sum over axes: repetition of the cotangent along these axes, as a view if possible."""

from __future__ import annotations

from typing import Any

import numpy as np
from autograd.extend import defjvp, defvjp, primitive

from mpiad._typing import Array, Axis, Shape
from mpiad.differentiation.rules.protocol import BOX_TYPES, anp
from mpiad.transport.devices.device_arrays import is_device_array


def has_supported_arguments(args: tuple, kwargs: dict, names: frozenset[str]) -> bool:
    """Return whether a reduction's arguments are an array, optionally an axis, and keywords in `names` only."""
    # NumPy's own functions also pass `out=None`.
    return len(args) <= 2 and kwargs.get("out") is None and not (kwargs.keys() - names - {"out"})


def axis_of(args: tuple, kwargs: dict) -> Any:
    """Return the argument `axis` of a reduction whose first argument is the array."""
    return args[1] if len(args) == 2 else kwargs.get("axis")


def kept_shape(shape: Shape, axis: Axis) -> Shape:
    """Return the shape of a reduction with `keepdims=True`."""
    if axis is None or not shape:  # NumPy allows the axes 0 and -1 of a number
        return (1,) * len(shape)
    kept = list(shape)
    for i in axis if isinstance(axis, tuple) else (axis,):
        kept[i] = 1
    return tuple(kept)


def expanded(g: Array, shape: Shape, kept: Shape, dtype: np.dtype) -> Array:
    """Repeat the cotangent g of a reduction, whose shape with `keepdims=True` is `kept`; a complex g remains complex."""
    # The result is traced if g is; otherwise it is a view with strides of zero, and read-only if g is on the host.
    if type(g) in BOX_TYPES:
        return expand(g, shape, kept)
    if is_device_array(g):
        g = g if g.dtype == dtype or g.dtype.kind == "c" else g.astype(dtype)
        return np.broadcast_to(g.reshape(kept), shape)
    # np.broadcast_to would be several times slower for small arrays.
    g = np.asarray(g)
    g = np.ascontiguousarray(g, dtype if g.dtype.kind != "c" else None)
    dtype = g.dtype
    strides, step = [], dtype.itemsize
    for n, k in zip(reversed(shape), reversed(kept)):
        strides.append(0 if k != n else step)
        step *= k
    view = np.ndarray(shape, dtype, g, 0, strides[::-1])
    view.flags.writeable = False
    return view


def filled(g: Array, shape: Shape, dtype: np.dtype) -> Array:
    """Return an array that is filled with the cotangent g, a number; see `expanded`."""
    if type(g) is np.float64 and dtype == np.float64:
        return np.ndarray(shape, dtype, g, 0, (0,) * len(shape))
    return expanded(g, shape, (1,) * len(shape), dtype)


@primitive
def expand(g: Array, shape: Shape, kept: Shape) -> Array:
    """Repeat the traced cotangent of a reduction, whose shape with `keepdims=True` is `kept`."""
    return np.broadcast_to(np.reshape(g, kept), shape)


def _expand_vjp(ans: Array, g: Array, shape: Shape, kept: Shape):
    # Repetition along axes and summation over these axes are transposes of each other.
    axes = tuple(i for i, (n, k) in enumerate(zip(shape, kept)) if n != k)
    reduced = anp.shape(g)
    return lambda h: anp.reshape(anp.sum(h, axis=axes), reduced)


defvjp(expand, _expand_vjp)
defjvp(expand, lambda dg, ans, g, shape, kept: expand(dg, shape, kept))
