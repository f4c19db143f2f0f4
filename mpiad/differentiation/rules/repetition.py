"""Functions that repeat or interpolate elements; the adjoints are sums."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from numpy.typing import DTypeLike

from mpiad._typing import Array, Shape
from mpiad.differentiation.rules.broadcasting import fitted
from mpiad.differentiation.rules.protocol import (
    Argnums,
    JvpMaker,
    Primitive,
    Vjp,
    anp,
    arrays_like,
    bound,
    composition,
    refusal,
)


def repeat_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Add the cotangents of the copies of an element."""
    named = bound(anp.repeat, "a repeats axis", args, kwargs)
    shape, axis = anp.shape(named["a"]), named.get("axis")
    if np.size(named["repeats"]) != 1 or argnums != (0,):
        raise refusal(anp.repeat, "with a number of copies per element: index with an array of indices instead")
    before = shape[: axis % max(len(shape), 1) + 1] if axis is not None else (math.prod(shape),)
    split = (*before, int(np.sum(named["repeats"])), *(shape[len(before) :] if axis is not None else ()))
    return lambda g: (anp.reshape(anp.sum(anp.reshape(g, split), axis=len(before)), shape),)


def tile_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Add the cotangents of the tiles."""
    named = bound(anp.tile, "A reps", args, kwargs)
    shape, reps = anp.shape(named["A"]), [int(n) for n in np.ravel(named["reps"])]
    lengths = (1,) * (len(reps) - len(shape)) + shape
    reps = [1] * (len(shape) - len(reps)) + reps
    split = [n for pair in zip(reps, lengths) for n in pair]
    return lambda g: (anp.reshape(anp.sum(anp.reshape(g, split), axis=tuple(range(0, len(split), 2))), shape),)


def _broadcast_vjp(argnum: int, argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Sum the cotangent over the axes along which the argument `argnum` was repeated."""
    return lambda g: (fitted(g, args[argnum]),)


_FULL: Primitive = anp.full  # of programs that have imported it by name before this library


@composition(anp.full)
def full(shape: int | Shape, fill_value: Array, dtype: DTypeLike | None = None, order: str = "C", **_: object) -> Array:
    """Return `numpy.full`."""
    x = anp.array(fill_value) if isinstance(fill_value, (list, tuple)) else fill_value
    filled = anp.copy(anp.broadcast_to(x, shape), order)
    return filled if dtype is None or filled.dtype == dtype else filled.astype(dtype)


@composition(anp.full_like)
def full_like(
    a: Array,
    fill_value: Array,
    dtype: DTypeLike | None = None,
    order: str = "K",
    subok: bool = True,
    shape: int | Shape | None = None,
    **_: object,
) -> Array:
    """Return `numpy.full_like`, which has a derivative with respect to `fill_value`; for autograd it is a constant."""
    x = anp.array(fill_value) if isinstance(fill_value, (list, tuple)) else fill_value
    zero = anp.zeros_like(a, dtype, order, subok, shape)
    np.broadcast_to(np.empty(anp.shape(x)), zero.shape)  # raises NumPy's error
    filled = anp.where(zero == 0, x, zero)  # on the device of `a`, even if the value is a number on the host
    return filled if filled.dtype == zero.dtype else filled.astype(zero.dtype)


def linspace_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Sum the cotangents; the weight for each end is the relative distance from the other end."""
    named = bound(anp.linspace, "start stop num endpoint", args, kwargs)
    n = ans.shape[0]
    steps = n - 1 if named.get("endpoint", True) else n
    towards_stop = arrays_like(ans).arange(n) / max(steps, 1)
    weights = {0: 1.0 - towards_stop, 1: towards_stop}
    return lambda g: tuple([fitted(anp.tensordot(weights[i].astype(ans.dtype), g, 1), args[i]) for i in argnums])


VJPS = {
    anp.repeat: repeat_vjp,
    anp.tile: tile_vjp,
    anp.broadcast_to: partial(_broadcast_vjp, 0),
    _FULL: partial(_broadcast_vjp, 1),
    anp.linspace: linspace_vjp,
}
JVPS: dict[Primitive, JvpMaker] = {_FULL: lambda argnums, gs, ans, args, kwargs: anp.broadcast_to(gs[0], args[0])}
