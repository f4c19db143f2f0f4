"""Cotangents and tangents in the shape and dtype of what they belong to."""

from __future__ import annotations

from typing import Any

import autograd.numpy as anp
import numpy as np

from mpiad.transport import Spec

__all__ = ["conform", "spec_like", "tangent_of"]


def spec_like(x: Any) -> Spec:
    """Return shape and dtype of a value, traced or not."""
    dtype = getattr(x, "dtype", None)
    return Spec((), np.result_type(x)) if dtype is None else Spec(x.shape, dtype)


def conform(g: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """Return a cotangent or tangent in the shape and dtype of what it belongs to."""
    if not hasattr(g, "dtype"):
        g = dtype.type(g)
    if g.dtype == dtype and g.shape == shape:
        return g
    if g.dtype.kind == "c" and dtype.kind != "c":
        g = anp.real(g)
    if g.dtype != dtype:
        g = g.astype(dtype)
    return g if g.shape == shape else anp.broadcast_to(g, shape)


def tangent_of(x: Any, dx: Any) -> Any:
    """Return the tangent of an input in its shape and dtype; zeros where it isn't traced (`dx` None)."""
    spec = spec_like(x)
    return spec.zeros() if dx is None else conform(dx, *spec)
