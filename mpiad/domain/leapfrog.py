"""A step of a wave, u' = 2 u - u₋ + f S u, as one operator: what passes through memory is what counts.

Written out, a step makes four arrays beside S u, and its reverse pass adds up five cotangents of u. Here S u is completed
where it is computed, or each slab of it while that is in the cache (see `Finish`), and the adjoint,

    ū = 2 g + Sᵀ (f g),   ū₋ = -g,   f̄ = g S u

is one pass of the transposed stencil. S u is kept for f̄ where a tape records, so that no message is sent twice; in nested
traces it is computed again, as part of them.
"""

from __future__ import annotations

from collections.abc import Callable

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval, isbox

from mpiad._typing import LocalArray
from mpiad.domain.stencil_sums import StencilSums, apply_stencil, transposed_stencil
from mpiad.domain.weighted_sum import Finish
from mpiad.extend import custom_operator, defjvp, defjvp_together, defvjp, defvjp_together
from mpiad.primitives.cotangents import tangent_of
from mpiad.primitives.operation import current
from mpiad.transport.buffers import empty_beside, zeros_beside


@custom_operator
def advance(u: LocalArray, before: LocalArray, factor: LocalArray, stencil: StencilSums, kept: list | None) -> LocalArray:
    """Return 2 u - before + factor S u, and append S u to what is kept."""
    factors = np.broadcast_to(factor, u.shape)
    sums = None if kept is None else empty_beside(u, u.shape)
    out = stencil.summed(u, finish=Finish(u, before, factors, sums))
    if kept is not None:
        kept[:] = [sums]
    return out


@custom_operator
def retreat(g: LocalArray, factor: LocalArray, stencil: StencilSums) -> LocalArray:
    """Return 2 g + Sᵀ (factor g), the cotangent of u."""
    factors = np.broadcast_to(factor, g.shape)
    # Cells that were copied beyond a side get their cotangents back one by one: no pass of the stencil does that.
    if stencil.copies_sides:
        return stencil.spread(g * factors) + 2.0 * g
    return stencil.mirrored.summed(g, factors, Finish(g))


def _advance_adjoint(
    ans: LocalArray, u: LocalArray, before: LocalArray, factor: LocalArray, stencil: StencilSums, kept: list | None
) -> Callable:
    def vjp(g: LocalArray) -> list:
        product = _like(g * _sums(u, stencil, kept), factor)
        return [retreat(g, factor, stencil=stencil), -g, product]

    return vjp


def _sums(u: LocalArray, stencil: StencilSums, kept: list | None) -> LocalArray:
    # All ranks decide alike: whether a tape is current is the same on all of them, whether u is traced need not be.
    # S u was computed on the way; where further traces want derivatives of it, it is computed again as they see it.
    return kept[0] if kept and current.tape is None and not isbox(u) else apply_stencil(u, stencil)


def _advance_tangent(
    gs: list, ans: LocalArray, u: LocalArray, before: LocalArray, factor: LocalArray, stencil: StencilSums,
    kept: list | None,
) -> LocalArray:  # fmt: skip
    du, dbefore = tangent_of(u, gs[0]), tangent_of(before, gs[1])
    moved = advance(du, dbefore, factor, stencil=stencil.homogeneous, kept=None)
    return moved + tangent_of(factor, gs[2]) * apply_stencil(u, stencil)


defvjp_together(advance, _advance_adjoint)
defjvp_together(advance, _advance_tangent)
# Linear in g and in the factor, and the transpose in g of the step's linear part.
defvjp(
    retreat,
    lambda ans, g, factor, stencil: lambda v: _linear(v, factor, stencil),
    lambda ans, g, factor, stencil: lambda v: _like(g * apply_stencil(v, stencil.homogeneous), factor),
)
defjvp(
    retreat,
    lambda dg, ans, g, factor, stencil: retreat(dg, factor, stencil=stencil),
    lambda df, ans, g, factor, stencil: transposed_stencil(df * g, stencil),
)


def _linear(v: LocalArray, factor: LocalArray, stencil: StencilSums) -> LocalArray:
    found = getval(v)
    return advance(v, zeros_beside(found, found.shape), factor, stencil=stencil.homogeneous, kept=None)


def _like(value: LocalArray, factor: LocalArray) -> LocalArray:
    """Return the sum over the leading dimensions that a factor doesn't have."""
    extra = np.ndim(getval(value)) - np.ndim(getval(factor))
    return anp.sum(value, axis=tuple(range(extra))) if extra else value
