"""What all rules share: the types of autograd's protocol, its own rules, and the marks of traced values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import autograd.numpy
from autograd.core import primitive_jvps, primitive_vjps
from autograd.tracer import Box

__all__ = [
    "BOX_TYPES",
    "Argnums",
    "JvpMaker",
    "Primitive",
    "Vjp",
    "VjpMaker",
    "anp",
    "inherited_jvp",
    "inherited_vjp",
    "one_negated",
    "one_unchanged",
    "primitive_mean",
    "primitive_where",
    "two_unchanged",
]

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


def inherited_vjp(fun: Primitive, argnums: Argnums, ans: Any, args: tuple, kwargs: dict) -> Vjp:
    """Make the adjoint by autograd's own rule."""
    return primitive_vjps[fun](argnums, ans, args, kwargs)


def inherited_jvp(fun: Primitive, argnums: Argnums, gs: Any, ans: Any, args: tuple, kwargs: dict) -> Any:
    """Compute the tangent by autograd's own rule."""
    return primitive_jvps[fun](argnums, gs, ans, args, kwargs)


def one_unchanged(g: Any) -> tuple[Any]:
    """Pass the cotangent on to the one argument."""
    return (g,)


def one_negated(g: Any) -> tuple[Any]:
    """Negate the cotangent for the one argument."""
    return (-g,)


def two_unchanged(g: Any) -> tuple[Any, Any]:
    """Pass the cotangent on to both arguments."""
    return (g, g)
