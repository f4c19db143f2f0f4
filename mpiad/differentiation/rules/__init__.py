"""Local adjoints and tangents that the node types look up before autograd's own.

Autograd's rules are often slow: the adjoint of a slice uses `np.add.at`, that of `x**2` computes
`x ** where(2, 1, 1.0)`, and every broadcasting operation inspects its operands at each call. Some are wrong, or
raise, for unsupported axes, shapes or complex numbers; tests/derivative_sweep.py compares all of them.
The rules here are optimized for plain arrays. Their arguments may also be traced values of an outer
differentiation; then they use operators and traced functions only, so that they can be differentiated again.

A rule follows autograd's protocol: `vjpmaker(argnums, ans, args, kwargs) -> vjp` with `vjp(g) -> cotangents`,
one for each argnum, and `jvpmaker(argnums, gs, ans, args, kwargs) -> tangent`. A cotangent may also be None,
which adds nothing, or a `Scatter`; `accumulate` sums them. Arguments that a rule doesn't know go to
autograd's own rule. Nothing in autograd is changed: these tables affect only their users.
"""

from __future__ import annotations

from mpiad.differentiation.rules import (
    arithmetic,
    einsum,
    elementwise,
    extrema,
    factorizations,
    indexing,
    matrix_products,
    moments,
    padding,
    powers,
    rearrangements,
    reductions,
    repetition,
    reshaping,
    stacking,
    transforms,
    where,
)
from mpiad.differentiation.rules.protocol import JvpMaker, Primitive, VjpMaker

__all__ = ["JVP_RULES", "VJP_RULES"]

_FAMILIES = (
    arithmetic, stacking, einsum, elementwise, extrema, indexing, padding, powers, matrix_products, reductions, reshaping,
    where, moments, rearrangements, repetition, factorizations, transforms,
)  # fmt: skip

VJP_RULES: dict[Primitive, VjpMaker] = {}
JVP_RULES: dict[Primitive, JvpMaker] = {}
for _family in _FAMILIES:
    VJP_RULES.update(_family.VJPS)
    JVP_RULES.update(_family.JVPS)
