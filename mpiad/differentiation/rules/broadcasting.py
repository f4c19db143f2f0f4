"""Conversion of a cotangent from the shape of a broadcast result to the shape of an operand.

The cotangent is summed over the axes along which the operand was repeated, converted to real if the operand is real, and
cast to the operand's precision. If one operand is a number on the host and the other is a device array, the cotangent of
the number is copied to the host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array, Shape
from mpiad.device.transfer import array_to_host
from mpiad.differentiation.rules.protocol import BOX_TYPES, anp
from mpiad.transport.devices.device_arrays import arrays_of

_ndarray, _float64 = np.ndarray, np.float64


def fitting(operand: Array, ans: Array) -> Callable[[Array], Array] | None:
    """Return the transpose of broadcasting `operand` to the shape of `ans`, None for the identity; both may be traced."""
    # The most common cases first, since every operation calls this function.
    kind = type(operand)
    if kind is _ndarray:
        if operand.shape == ans.shape and operand.dtype == ans.dtype:
            return None
    elif kind is _float64 and type(ans) is _float64:
        return None
    x, value = getval(operand), getval(ans)
    fit = _general_fitting(x, value)
    if type(value) is _ndarray or arrays_of(value) is None or arrays_of(x) is not None:
        return fit
    return array_to_host if fit is None else lambda g: array_to_host(fit(g))


def fitted(part: Array, operand: Array) -> Array:
    """Sum a cotangent over the axes along which `operand` was repeated; both arguments may be traced."""
    fit = fitting(operand, part)
    return part if fit is None else fit(part)


def _general_fitting(operand: Array, ans: Array) -> Callable[[Array], Array] | None:
    shape, full = getattr(operand, "shape", ()), ans.shape
    lead = len(full) - len(shape)
    stretched = [lead + i for i, n in enumerate(shape) if n == 1 and full[lead + i] != 1]
    axes = (*range(lead), *stretched)
    dtype = getattr(operand, "dtype", None)  # None for a Python number
    becomes_real = ans.dtype.kind == "c" and not np.iscomplexobj(operand)
    if dtype == ans.dtype:
        dtype = None
    if not axes and not becomes_real and dtype is None:
        return None
    return partial(_fit, shape, axes, becomes_real, dtype)


def _fit(shape: Shape, axes: tuple[int, ...], becomes_real: bool, dtype: np.dtype | None, g: Array) -> Array:
    traced = type(g) in BOX_TYPES
    space = anp if traced else np
    if axes:
        # NumPy's sum is much faster without the argument `axis`.
        g = space.sum(g, axis=axes) if shape else space.sum(g)
        if g.shape != shape:
            g = space.reshape(g, shape)
    if becomes_real:
        g = space.real(g)
    # A traced cotangent keeps its precision, since autograd's cast has no tangent.
    if dtype is not None and not traced and dtype.kind == np.result_type(g).kind:
        g = g.astype(dtype) if hasattr(g, "astype") else dtype.type(g)  # a Python number
    return g


def broadcast_tangent(tangent: Array, ans: Array) -> Array:
    """Broadcast the tangent of a summand to the shape of the sum `ans`; both may be traced."""
    value = getval(tangent)
    if type(value) is _ndarray and value.shape == ans.shape and value.dtype == ans.dtype:
        return tangent
    arrays = arrays_of(getval(ans))
    if arrays is not None:
        return tangent + arrays.full(ans.shape, 0, ans.dtype)
    return tangent + np.zeros(anp.shape(ans), anp.result_type(ans))
