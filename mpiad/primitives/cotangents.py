"""Conversion of cotangents and tangents to the shape, dtype and device of their primal values."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.transport import Spec
from mpiad.transport.devices.device_arrays import ArrayModule, arrays_of

_new = tuple.__new__  # the constructor of a named tuple takes twice as long


def spec_like(x: Array) -> Spec:
    """Return shape, dtype and device of a value, which may be traced."""
    if type(x) is np.ndarray or type(x) is np.float64:
        return _new(Spec, (x.shape, x.dtype, None))
    dtype = getattr(x, "dtype", None)
    return Spec((), np.result_type(x)) if dtype is None else Spec(x.shape, dtype, arrays_of(getval(x)))


def conform(g: Array, shape: tuple[int, ...], dtype: np.dtype, arrays: ArrayModule | None = None) -> Array:
    """Convert a (co)tangent to its primal's shape, dtype and device; raise a TypeError instead of copying to a device."""
    if arrays is not None and not hasattr(type(g), "__cuda_array_interface__"):
        g = _on_device(g, shape, dtype, arrays)
    elif not hasattr(g, "dtype"):
        g = dtype.type(g)
    if g.dtype == dtype and g.shape == shape:
        return g
    # The cotangent of a real input is real.
    if g.dtype.kind == "c" and dtype.kind != "c":
        g = anp.real(g)
    if g.dtype != dtype:
        g = g.astype(dtype)
    return g if g.shape == shape else anp.broadcast_to(g, shape)


def _on_device(g: Array, shape: tuple[int, ...], dtype: np.dtype, arrays: ArrayModule) -> Array:
    plain = getval(g)
    if arrays_of(plain) is not None:
        return g
    if isinstance(plain, np.ndarray):
        if arrays.takes_host_arrays:
            return g
        raise TypeError(
            f"got a cotangent or tangent of shape {plain.shape} on the host for an array on {arrays.name} device "
            f"{arrays.device}. Copies to a device are never implicit: pass mpiad.device.to_device(x)."
        )
    if plain is g:
        return arrays.full(shape, g.real if dtype.kind != "c" else g, dtype)
    # A product, because it is traced if g is traced.
    return g * arrays.full(shape, 1, dtype)


def conformed(g: Array, spec: Spec) -> Array:
    """Return a cotangent or tangent with the given shape, dtype and device; zeros for None."""
    return spec.zeros() if g is None else conform(g, *spec)


def tangent_of(x: Array, dx: Array) -> Array:
    """Return the tangent of x in the shape and dtype of x; zeros if `dx` is None."""
    return conformed(dx, spec_like(x))
