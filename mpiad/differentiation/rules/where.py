"""`where`: elements of two arrays, chosen by a condition."""

from __future__ import annotations

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array, Function
from mpiad.differentiation.rules.broadcasting import broadcast_tangent, fitting
from mpiad.differentiation.rules.protocol import BOX_TYPES, Argnums, Vjp, anp, inherited_jvp, inherited_vjp, primitive_where
from mpiad.transport.devices.device_arrays import is_device_array


def where_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Pass each element of the cotangent to the array from which the result took this element."""
    if kwargs or len(args) != 3:
        return inherited_vjp(primitive_where, argnums, ans, args, kwargs)
    condition = getval(args[0])
    condition = condition.astype(bool) if is_device_array(condition) else np.asarray(condition, dtype=bool)
    parts = [(i, None if i == 0 else fitting(args[i], ans)) for i in argnums]

    def part(argnum: int, fit: Function | None, g: Array) -> Array | None:
        if argnum == 0:
            return None
        chosen = (anp if type(g) in BOX_TYPES else np).where(condition if argnum == 1 else ~condition, g, 0.0)
        return chosen if fit is None else fit(chosen)

    return lambda g: tuple([part(i, fit, g) for i, fit in parts])


def where_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Choose between the tangents by the same condition."""
    if kwargs or len(args) != 3:
        return inherited_jvp(primitive_where, argnums, gs, ans, args, kwargs)
    tangents = dict(zip(argnums, gs))
    return broadcast_tangent(anp.where(getval(args[0]), tangents.get(1, 0.0), tangents.get(2, 0.0)), ans)


VJPS = {primitive_where: where_vjp}
JVPS = {primitive_where: where_jvp}
