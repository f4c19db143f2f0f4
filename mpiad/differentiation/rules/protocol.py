"""What all rules share: the types of autograd's protocol, its own rules, and the marks of traced values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import autograd.numpy
import numpy as np
from autograd.core import primitive_jvps, primitive_vjps
from autograd.tracer import Box, getval

from mpiad._typing import Array
from mpiad.device.transfer import array_to_host
from mpiad.transport.device_arrays import ArrayModule, arrays_of

Argnums: TypeAlias = tuple[int, ...]
Primitive: TypeAlias = Callable[..., Any]
Vjp: TypeAlias = Callable[[Any], Any]
VjpMaker: TypeAlias = Callable[[Argnums, Any, tuple, dict], Vjp]
JvpMaker: TypeAlias = Callable[[Argnums, Any, Any, tuple, dict], Any]

anp: Any = autograd.numpy
"""Autograd's NumPy, whose names are made at run time; importing it fills autograd's tables of rules."""

BOX_TYPES = Box.types
"""Autograd's live set of the types of traced values; `type(x) in BOX_TYPES` tells a traced value."""
# In later versions of autograd these two names of its NumPy are plain functions around the primitive.
primitive_mean: Primitive = getattr(autograd.numpy.numpy_wrapper, "_primitive_mean", anp.mean)
primitive_where: Primitive = getattr(autograd.numpy, "_original_where", anp.where)


# Filled by `on_device`: rules where autograd's own make arrays of NumPy's, and what has none.
DEVICE_VJPS: dict[Primitive, VjpMaker] = {}
DEVICE_JVPS: dict[Primitive, JvpMaker] = {}
DEVICE_REFUSALS: dict[Primitive, tuple[str, str]] = {}


_NUMBERS = (float, complex, np.inexact)


def inherited_vjp(fun: Primitive, argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Make the adjoint by autograd's own rule; for device arrays by the one of `on_device`, where there is one."""
    if type(ans) is np.ndarray or _place(ans) is None:
        return primitive_vjps[fun](argnums, ans, args, kwargs)
    if fun in DEVICE_REFUSALS:
        refuse_on_device(fun, ans)
    rule: VjpMaker = DEVICE_VJPS.get(fun) or primitive_vjps[fun]
    pull = rule(argnums, ans, args, kwargs)
    # A number of the host's beside device arrays.
    at_home = [isinstance(getval(args[i]), _NUMBERS) for i in argnums]
    if not any(at_home):
        return pull
    return lambda g: tuple([array_to_host(part) if home else part for part, home in zip(pull(g), at_home)])


def inherited_jvp(fun: Primitive, argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Compute the tangent by autograd's own rule; for device arrays by the one of `on_device`, where there is one."""
    if type(ans) is np.ndarray or _place(ans) is None:
        return primitive_jvps[fun](argnums, gs, ans, args, kwargs)
    if fun in DEVICE_REFUSALS:
        refuse_on_device(fun, ans)
    return DEVICE_JVPS.get(fun, primitive_jvps.get(fun))(argnums, gs, ans, args, kwargs)  # type: ignore[misc]


def _place(x: Array) -> ArrayModule | None:
    """Return what makes arrays where a value lives, or the first part of a result that has several; None: the host."""
    x = getval(x)
    if isinstance(x, (tuple, list)) and len(x) > 0:
        x = getval(x[0])
    return arrays_of(x)


def refuse_on_device(fun: Primitive, ans: Array) -> None:
    """Raise a NotImplementedError for a function that has no derivative on a device, naming it and what to do."""
    name, advice = DEVICE_REFUSALS[fun]
    arrays = _place(ans)
    kind = "device" if arrays is None else arrays.name
    raise NotImplementedError(f"{name} can't be differentiated for {kind} arrays: {advice}.")


def one_unchanged(g: Array) -> tuple[Any]:
    """Pass the cotangent on to the one argument."""
    return (g,)


def one_negated(g: Array) -> tuple[Any]:
    """Negate the cotangent for the one argument."""
    return (-g,)


def two_unchanged(g: Array) -> tuple[Any, Any]:
    """Pass the cotangent on to both arguments."""
    return (g, g)
