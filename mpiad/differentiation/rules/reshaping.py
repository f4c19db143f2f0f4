"""Operations that only name the same elements otherwise; the adjoint is a view of the cotangent."""

from __future__ import annotations

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.differentiation.rules.protocol import (
    BOX_TYPES,
    Argnums,
    Primitive,
    Vjp,
    VjpMaker,
    anp,
    inherited_vjp,
)

__all__ = ["JVPS", "VJPS"]


def _shape_restored(fun: Primitive, most: int) -> VjpMaker:
    def shape_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
        """Give the cotangent the argument's shape."""
        # `order` and `copy` are autograd's to interpret.
        if argnums != (0,) or len(args) > most or kwargs.keys() - _HARMLESS:
            return inherited_vjp(fun, argnums, ans, args, kwargs)
        shape = np.shape(getval(args[0]))
        return lambda g: ((anp if type(g) in BOX_TYPES else np).reshape(g, shape),)

    return shape_vjp


_HARMLESS = frozenset({"axis", "newshape", "shape"})


def transpose_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Transpose the cotangent back."""
    axes = args[1] if len(args) > 1 else kwargs.get("axes")
    if axes is None:
        return lambda g: (g.T,)
    if not isinstance(axes, (tuple, list)):
        return inherited_vjp(anp.transpose, argnums, ans, args, kwargs)
    # Axes may count from the last; which autograd's rule forgets.
    places = [axis % len(axes) for axis in axes]
    back = tuple(sorted(range(len(places)), key=places.__getitem__))
    return lambda g: ((anp if type(g) in BOX_TYPES else np).transpose(g, back),)


VJPS = {
    anp.reshape: _shape_restored(anp.reshape, 2),
    anp.ravel: _shape_restored(anp.ravel, 1),
    anp.squeeze: _shape_restored(anp.squeeze, 2),
    anp.expand_dims: _shape_restored(anp.expand_dims, 2),
    anp.transpose: transpose_vjp,
}
JVPS: dict = {}
