"""Adjoints and tangents of NumPy functions, which the nodes of mpiad's traces use instead of autograd's rules.

Many of autograd's rules are slow: the adjoint of a slice uses `np.add.at`, and the adjoint of `x**2` computes
`x ** where(2, 1, 1.0)`. Some rules are wrong or raise for some axes, shapes or complex numbers (tests/derivative_sweep.py).
The rules in this package are fast for plain arrays, and can be differentiated: they call traced functions for values of an
outer trace.

A rule has autograd's signature: `vjpmaker(argnums, ans, args, kwargs)` returns a function that maps the cotangent of the
result to those of the arguments `argnums`; `jvpmaker(argnums, gs, ans, args, kwargs)` returns the tangent. A cotangent may
be None for zero, or a `Scatter`. For unsupported arguments, a rule calls autograd's rule or raises an error.
"""

from __future__ import annotations

from mpiad.differentiation.rules import (
    arithmetic,
    conversions,  # noqa: F401 - compositions only
    einsum,
    elementwise,
    extrema,
    factorizations,
    indexing,
    interpolation,
    matrix_products,
    moments,
    padding,
    powers,
    rearrangements,
    reductions,
    repetition,
    scipy_solvers,  # noqa: F401 - rules that are found by name
    stacking,
    transforms,
    ufunc_methods,  # noqa: F401 - attributes of functions only
    where,
)
from mpiad.differentiation.rules.protocol import JvpMaker, Primitive, VjpMaker

__all__ = ["JVP_RULES", "VJP_RULES"]

_FAMILIES = [arithmetic, stacking, einsum, elementwise, extrema, indexing, interpolation, padding, powers]
_FAMILIES += [matrix_products, reductions, where, moments, rearrangements, repetition, factorizations, transforms]

VJP_RULES: dict[Primitive, VjpMaker] = {}
JVP_RULES: dict[Primitive, JvpMaker] = {}
for _family in _FAMILIES:
    VJP_RULES.update(_family.VJPS)
    JVP_RULES.update(_family.JVPS)
