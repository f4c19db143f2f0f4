"""`where` and `select`: elements of two or more arrays, chosen by conditions.

Autograd's `select` takes the result apart, into one traced value per element. It is replaced by a primitive, whose adjoint
and tangent choose by the same conditions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import autograd.numpy.numpy_wrapper
import numpy as np
from autograd.core import defjvp_argnums, defvjp_argnums
from autograd.extend import primitive
from autograd.tracer import getval

from mpiad._typing import Array, Function
from mpiad.differentiation.rules.broadcasting import broadcast_tangent, fitting
from mpiad.differentiation.rules.protocol import (
    BOX_TYPES,
    Argnums,
    Vjp,
    anp,
    composition,
    inherited_jvp,
    inherited_vjp,
    primitive_where,
)
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


@primitive
def selected(conditions: list[Array], default: Array, *choices: Array) -> Array:
    """Return NumPy's `select`; the default is the last choice, since NumPy doesn't pass calls on to the default's type."""
    if conditions and is_device_array(default):
        always = np.equal(conditions[0], conditions[0])
        conditions, choices, default = [*conditions, always], (*choices, default), False
    return np.select(conditions, choices, default)


def select_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Pass each element of the cotangent to the choice from which the result took this element."""
    masks, others = list[Array](), None  # the elements that the choices are, and those that are left for later ones
    for condition in args[0]:
        condition = condition if is_device_array(condition) else np.asarray(condition)
        masks.append(condition if others is None else others & condition)
        others = ~condition if others is None else others & ~condition
    masks.append(others)  # the default
    parts = [(masks[i - 2], fitting(args[i], ans)) for i in argnums]

    def vjp(g: Array) -> tuple[Array, ...]:
        where = (anp if type(g) in BOX_TYPES else np).where
        chosen = [(where(mask, g, 0.0), fit) for mask, fit in parts]
        return tuple([part if fit is None else fit(part) for part, fit in chosen])

    return vjp


def select_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Select among the tangents by the same conditions."""
    tangents = dict(zip(argnums, gs))
    return broadcast_tangent(selected(args[0], *[tangents.get(i, 0.0) for i in range(1, len(args))]), ans)


defvjp_argnums(selected, select_vjp)
defjvp_argnums(selected, select_jvp)


def select(condlist: Iterable[Any], choicelist: Iterable[Any], default: Any = 0) -> Array:
    """Return NumPy's `select`, whose choices and default may be traced, also in lists."""
    choices = [anp.array(x) if isinstance(x, (list, tuple)) else x for x in (default, *choicelist)]
    return selected([getval(condition) for condition in condlist], *choices)


wrapped: Any = autograd.numpy.numpy_wrapper
anp.select = wrapped.select = select


@composition(anp.choose)
def choose(a: Array, choices: Sequence[Array], *, mode: str = "raise") -> Array:
    """Return `numpy.choose`, whose choices may be traced."""
    a = getval(a)
    given: Any = a, range(len(choices)), None, mode
    # The number of the choice for each entry, or NumPy's error for a number out of range.
    number = a.recorder.call(np.choose, given, {}) if hasattr(a, "recorder") else np.choose(*given)
    return select([number == k for k in range(len(choices))], choices, choices[-1])


VJPS = {primitive_where: where_vjp}
JVPS = {primitive_where: where_jvp}
