"""Sums and means over all or some axes."""

from __future__ import annotations

from typing import Any

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.differentiation.rules.expansion import filled, kept_shape, spread
from mpiad.differentiation.rules.protocol import PRIMITIVES, Argnums, Vjp, anp, inherited_vjp

__all__ = ["JVPS", "VJPS"]

_KNOWN = frozenset({"axis", "keepdims", "dtype"})
# autograd.numpy.mean is a plain function around the primitive.
_mean = PRIMITIVES[np.mean]


def sum_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Repeat the cotangent of a sum to every term."""
    x = args[0]
    if type(x) is np.ndarray and len(args) == 1 and not kwargs:
        shape, dtype = x.shape, x.dtype
        return lambda g: (filled(g, shape, dtype),)
    x = getval(x)
    if len(args) > 2 or kwargs.keys() - _KNOWN:
        return inherited_vjp(anp.sum, argnums, ans, args, kwargs)
    shape, dtype = np.shape(x), np.result_type(x)
    kept = kept_shape(shape, _axis(args, kwargs))
    return lambda g: (spread(g, shape, kept, dtype),)


def mean_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Repeat the cotangent of a mean to every term, divided by their number."""
    x = getval(args[0])
    if len(args) > 2 or kwargs.keys() - _KNOWN:
        return inherited_vjp(_mean, argnums, ans, args, kwargs)
    shape, dtype = np.shape(x), np.result_type(x)
    kept = kept_shape(shape, _axis(args, kwargs))
    terms = np.size(x) / max(np.size(getval(ans)), 1)
    return lambda g: (spread(g / terms, shape, kept, dtype),)


def _axis(args: tuple, kwargs: dict) -> Any:
    return args[1] if len(args) == 2 else kwargs.get("axis")


VJPS = {anp.sum: sum_vjp, _mean: mean_vjp}
JVPS: dict = {}
