"""Operations that reshape, transpose or shift elements, or change their dtype."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from autograd.numpy.numpy_wrapper import _astype
from autograd.tracer import getval

from mpiad._typing import Array, Axis
from mpiad.differentiation.rules.protocol import BOX_TYPES, Argnums, Primitive, Vjp, anp, inherited_vjp


def _shape_vjp(fun: Primitive, most: int, argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Reshape the cotangent to the argument's shape."""
    # `order` and `copy` are left to autograd's rule.
    if argnums != (0,) or len(args) > most or kwargs.keys() - _HARMLESS:
        return inherited_vjp(fun, argnums, ans, args, kwargs)
    shape = np.shape(getval(args[0]))
    return lambda g: ((anp if type(g) in BOX_TYPES else np).reshape(g, shape),)


_HARMLESS = frozenset({"axis", "newshape", "shape"})


def transpose_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Transpose the cotangent back."""
    axes = args[1] if len(args) > 1 else kwargs.get("axes")
    if axes is None:
        return lambda g: (g.T,)
    if not isinstance(axes, (tuple, list)):
        return inherited_vjp(anp.transpose, argnums, ans, args, kwargs)
    # Axes may be negative, which autograd's rule doesn't support.
    places = [axis % len(axes) for axis in axes]
    back = tuple(sorted(range(len(places)), key=places.__getitem__))
    return lambda g: ((anp if type(g) in BOX_TYPES else np).transpose(g, back),)


def roll_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Shift the cotangent back."""
    if argnums != (0,):
        return inherited_vjp(anp.roll, argnums, ans, args, kwargs)
    bound = dict(zip(("a", "shift", "axis"), args), **kwargs)
    shift, axis = bound["shift"], bound.get("axis")
    back = [-s for s in shift] if isinstance(shift, (tuple, list)) else -shift

    def vjp(g: Array) -> tuple[Array]:
        if type(g) in BOX_TYPES:
            return (anp.roll(g, back, axis=axis),)
        return (_rolled(g, back, axis),)

    return vjp


def _rolled(g: Array, shift: int | Sequence[int], axis: Axis) -> Array:
    """Roll along one axis by one concatenation; np.roll takes several times as long on small arrays."""
    if not isinstance(shift, int) or g.ndim == 0 or (axis is None and g.ndim > 1):
        return np.roll(g, shift, axis)
    axis = 0 if axis is None else axis
    if not isinstance(axis, int):
        return np.roll(g, shift, axis)
    n = g.shape[axis]
    lead = (slice(None),) * (axis % g.ndim)
    cut = -shift % n if n else 0
    return np.concatenate((g[(*lead, slice(cut, None))], g[(*lead, slice(cut))]), axis)


def astype_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Cast the tangent like the value."""
    return _astype(gs[0], *args[1:], **kwargs)


VJPS = {
    anp.reshape: partial(_shape_vjp, anp.reshape, 2),
    anp.ravel: partial(_shape_vjp, anp.ravel, 1),
    anp.squeeze: partial(_shape_vjp, anp.squeeze, 2),
    anp.expand_dims: partial(_shape_vjp, anp.expand_dims, 2),
    anp.transpose: transpose_vjp,
    anp.roll: roll_vjp,
}
JVPS = {_astype: astype_jvp}
