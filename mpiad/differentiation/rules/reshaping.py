"""Transposition, cyclic shifts, and conversion to another dtype."""

from __future__ import annotations

from functools import partial

import numpy as np
from autograd.numpy.numpy_wrapper import _astype

from mpiad._typing import Array
from mpiad.differentiation.rules.protocol import BOX_TYPES, Argnums, Vjp, anp, inherited_vjp, linear_jvp


def transpose_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Apply the inverse transposition to the cotangent."""
    axes = args[1] if len(args) > 1 else kwargs.get("axes")
    if axes is None:
        return lambda g: (g.T,)
    if not isinstance(axes, (tuple, list)):
        return inherited_vjp(anp.transpose, argnums, ans, args, kwargs)
    # Autograd's rule doesn't support negative axes.
    axes = [axis % len(axes) for axis in axes]
    inverse = tuple(sorted(range(len(axes)), key=axes.__getitem__))
    return lambda g: ((anp if type(g) in BOX_TYPES else np).transpose(g, inverse),)


def roll_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Shift the cotangent in the opposite direction."""
    if argnums != (0,):
        return inherited_vjp(anp.roll, argnums, ans, args, kwargs)
    bound = dict(zip(("a", "shift", "axis"), args), **kwargs)
    shift, axis = bound["shift"], bound.get("axis")
    opposite = [-s for s in shift] if isinstance(shift, (tuple, list)) else -shift
    return lambda g: ((anp if type(g) in BOX_TYPES else np).roll(g, opposite, axis=axis),)


VJPS = {anp.transpose: transpose_vjp, anp.roll: roll_vjp}
JVPS = {_astype: partial(linear_jvp, _astype)}
