"""Assembly of arrays: concatenate, stack, dstack, block and array literals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import numpy as np
from autograd.numpy import numpy_wrapper as wrapped
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.device.assembly import concatenate
from mpiad.device.numpy import dstack
from mpiad.differentiation.rules.protocol import (
    Argnums,
    Vjp,
    anp,
    composition,
    inherited_jvp,
    inherited_vjp,
    one_unchanged,
    refuse_on_device,
)
from mpiad.transport.devices.device_arrays import is_device_array

_KEEPING_SHAPE = {"dtype", "copy", "order"}  # the arguments of `array` that don't change the shape


def concatenate_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Split the cotangent into one part per concatenated array."""
    axis, arrays = args[0], args[1:]
    _refuse_object_array(ans)
    if kwargs:
        return inherited_vjp(anp.concatenate_args, argnums, ans, args, kwargs)
    if axis is None:
        flat = concatenate_vjp(argnums, ans, (0, *[np.ravel(getval(x)) for x in arrays]), kwargs)
        return lambda g: tuple([anp.reshape(part, anp.shape(args[i])) for part, i in zip(flat(g), argnums)])
    lead = (slice(None),) * (axis % ans.ndim)
    cuts, stop = [], 0
    for x in arrays:
        shape = x.shape if type(x) is np.ndarray else np.shape(getval(x))
        start, stop = stop, stop + shape[axis]
        cuts.append((*lead, slice(start, stop)))
    chosen = [(cuts[i - 1], _must_be_real(arrays[i - 1], ans)) for i in argnums]
    return lambda g: tuple([anp.real(g[cut]) if real else g[cut] for cut, real in chosen])


def _refuse_object_array(ans: Array) -> None:
    # Autograd's concatenate calls view(ndarray), which CuPy interprets as a view of dtype object.
    if ans.dtype.kind == "O" and is_device_array(getval(ans)):
        refuse_on_device(anp.concatenate_args, ans)


def concatenate_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Join the tangents, with zeros for arrays without a tangent."""
    _refuse_object_array(ans)
    return anp.concatenate_args(args[0], *_all_tangents(argnums, gs, args, 1))


def _of_lists(fun: Callable[..., Array]) -> Callable[..., Array]:
    """Let a function that joins arrays take lists of traced numbers among them, as in `concatenate([[a], x])`."""

    @wraps(fun)
    def function(arrays: Iterable[object], *args: object, **kwargs: object) -> Array:
        return fun([anp.array(x) if isinstance(x, (list, tuple)) else x for x in arrays], *args, **kwargs)

    return function


def array_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Return the part of the cotangent for each element of the literal."""
    if len(args[0]) > 1 or not args[1].keys() <= _KEEPING_SHAPE:
        return inherited_vjp(anp.array_from_args, argnums, ans, args, kwargs)
    # The elements are the arguments after the first two.
    chosen = [(i - 2, _must_be_real(args[i], ans)) for i in argnums]

    def vjp(g: Array) -> tuple[Array, ...]:
        if type(g) is np.ndarray and len(chosen) == len(g) and g.dtype.kind != "c":
            return tuple(g)
        return tuple([anp.real(g[i]) if real else g[i] for i, real in chosen])

    return vjp


def array_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Make an array of the tangents, with zeros for elements without a tangent."""
    if len(args[0]) > 1 or not args[1].keys() <= _KEEPING_SHAPE:
        return inherited_jvp(anp.array_from_args, argnums, gs, ans, args, kwargs)
    return anp.array_from_args(args[0], args[1], *_all_tangents(argnums, gs, args, 2))


def element_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Pass on the cotangent of an array made from one array or scalar."""
    if args[0] or args[1]:
        return inherited_vjp(wrapped._array_from_scalar_or_array, argnums, ans, args, kwargs)
    return one_unchanged


def _must_be_real(x: Array, ans: Array) -> bool:
    return ans.dtype.kind == "c" and not anp.iscomplexobj(x)


def _all_tangents(argnums: Argnums, gs: list, args: tuple, first: int) -> list[Array]:
    """Return the tangents of the arguments from `first` on, with zeros for arguments without a tangent."""
    tangents = dict(zip(argnums, gs))
    return [tangents[i] if i in tangents else np.zeros_like(getval(args[i])) for i in range(first, len(args))]


@composition(anp.block)
def block(arrays: Any) -> Array:
    """Return `numpy.block`: joins along the last axis in the innermost lists, and along earlier axes in outer ones."""
    depth, first = 0, arrays
    np.block(_mapped(lambda _: np.empty(0), arrays))  # raises NumPy's errors for the nesting
    while isinstance(first, list):
        depth, first = depth + 1, first[0]
    ndims = list[int]()
    _mapped(lambda x: ndims.append(anp.ndim(x)), arrays)
    ndim = max(depth, *ndims)

    def joined(part: Any, axis: int) -> Array:
        if isinstance(part, list):
            return concatenate([joined(each, axis + 1) for each in part], ndim + axis)
        return anp.reshape(part, (*[1] * (ndim - anp.ndim(part)), *anp.shape(part)))

    return joined(arrays, -depth)


def _mapped(function: Callable[[Any], Any], nested: Any) -> Any:
    return [_mapped(function, part) for part in nested] if isinstance(nested, list) else function(nested)


composition(anp.dstack)(dstack)
for _name in ("concatenate", "hstack", "vstack", "row_stack"):
    _joining = _of_lists(getattr(wrapped, _name))
    setattr(wrapped, _name, _joining)
    setattr(anp, _name, _joining)
VJPS = {
    anp.concatenate_args: concatenate_vjp,
    anp.array_from_args: array_vjp,
    wrapped._array_from_scalar_or_array: element_vjp,
}
JVPS = {anp.concatenate_args: concatenate_jvp, anp.array_from_args: array_jvp}
