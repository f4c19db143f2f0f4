"""The operator S E of a stencil: E exchanges the halo, and S computes the sums.

The operator is one node on the tape, and saves no arrays. Communication overlaps with the sums in the interior. The
transpose is Eᵀ Sᵀ, and Sᵀ is the mirrored stencil: the weights are reversed along each dimension. If each dimension is
periodic or has a fixed boundary value, Eᵀ Sᵀ is the mirrored stencil with the same exchange, so the reverse pass costs as
much as the forward pass. With "edge" or "reflect", cells beyond a side are copies of cells of the grid; the transpose also
computes the sums of the mirrored stencil beyond the side, and adds each sum to the copied cell.
"""

from __future__ import annotations

from functools import cached_property
from itertools import islice
from typing import TypeAlias

import numpy as np

from mpiad._typing import LocalArray, Shape
from mpiad.domain.boundary import Sides, homogeneous
from mpiad.domain.halo import Halo, complete, fill_local, fold_in_place, post
from mpiad.domain.routes import AT_ONCE, FACES_ONLY
from mpiad.extend import custom_operator, defjvp, defvjp
from mpiad.primitives.cotangents import spec_like
from mpiad.transport.devices.device_arrays import empty_like, zeros_like

_TAG = 32749

Terms: TypeAlias = tuple[tuple[float, tuple[tuple[int, ...], ...]], ...]
"""Pairs of a weight and all offsets with this weight, which are counted from the lowest corner of the stencil."""
Box: TypeAlias = tuple[slice, ...]


class StencilSums:
    """The operator of a stencil with odd lengths; `halo` is as wide as the radius of the weights."""

    def __init__(self, weights: np.ndarray, halo: Halo, sides: Sides):
        self.weights, self.radius, self.halo, self.sides, self.comm = weights, halo.widths, halo, sides, halo.comm
        self.terms: Terms = terms_of(weights)
        offset_axes = np.argwhere(weights) != np.array(self.radius)
        # Star stencils, whose offsets are nonzero along one dimension only, need no corners.
        self.scheme = FACES_ONLY if (offset_axes.sum(axis=1) <= 1).all() else AT_ONCE
        (self.stage,) = halo.stages(self.scheme)
        self.interior, self.boundary_boxes = _parts_of(halo) if self.stage.routes else (None, [_all_of(halo.shape)])

    @cached_property
    def homogeneous(self) -> StencilSums:
        """The linear part of the operator: boundary values are zero."""
        sides = homogeneous(self.sides)
        return self if sides == self.sides else StencilSums(self.weights, self.halo, sides)

    @cached_property
    def mirrored(self) -> StencilSums:
        """The linear part of the stencil with reversed weights."""
        weights = np.flip(self.weights)
        if (weights == self.weights).all():
            return self.homogeneous
        return StencilSums(weights, self.halo, homogeneous(self.sides))

    @cached_property
    def has_copied_ghosts(self) -> bool:
        """Whether cells beyond a physical side are copies of cells of the grid."""
        periodic = self.halo.geometry.partition.periodic
        return any(side.layers is not None for pair, wraps in zip(self.sides, periodic) if not wraps for side in pair)


def terms_of(weights: np.ndarray) -> Terms:
    """Return the terms of a stencil, sorted by the number of offsets, the largest first."""
    groups: dict[float, list[tuple[int, ...]]] = {}
    for offset in np.argwhere(weights):
        groups.setdefault(weights[tuple(offset)].item(), []).append(tuple(offset.tolist()))
    return tuple((weight, tuple(offsets)) for weight, offsets in sorted(groups.items(), key=lambda item: -len(item[1])))


def weighted_sum(source: LocalArray, terms: Terms, out: LocalArray, box: Box) -> None:
    """Compute the sums in a box of cells: ``out[i]`` is the sum of ``weight * source[i + offset]``."""
    target = out[(..., *box)]
    if not terms:
        target[...] = 0
    if not target.size:
        return
    scratch = empty_like(out, target.shape)
    for number, (weight, offsets) in enumerate(terms):
        shifted = [[slice(cells.start + o, cells.stop + o) for cells, o in zip(box, offset)] for offset in offsets]
        parts, part = [source[(..., *index)] for index in shifted], scratch if number else target
        # Values of equal weight are added first and multiplied once.
        if len(parts) == 1:
            np.multiply(parts[0], weight, out=part)
        else:
            np.add(parts[0], parts[1], out=part)
            for next_part in islice(parts, 2, None):
                part += next_part
            if weight != 1:
                part *= weight
        if number:
            target += scratch


@custom_operator
def apply_stencil(u: LocalArray, stencil: StencilSums) -> LocalArray:
    """Return the stencil's sums: S E u. See `Stencil`."""
    halo, terms = stencil.halo, stencil.terms
    padded = empty_like(u, u.shape[: u.ndim - len(halo.shape)] + halo.padded)
    padded[halo.interior] = u
    out = empty_like(u, u.shape)
    # Cells whose neighbors are all in the block are summed during the exchange.
    pending = post(padded, stencil.stage.routes, False, _TAG, halo.comm)
    if stencil.interior is not None:
        weighted_sum(padded, terms, out, stencil.interior)
    complete(padded, pending, False)
    fill_local(padded, halo.local(stencil.sides, stencil.scheme)[0], stencil.sides)
    for box in stencil.boundary_boxes:
        weighted_sum(padded, terms, out, box)
    return out


@custom_operator
def apply_transpose(g: LocalArray, stencil: StencilSums) -> LocalArray:
    """Apply the transpose of the linear part of `apply_stencil`: return Eᵀ Sᵀ g."""
    halo, radius, lead = stencil.halo, stencil.radius, g.shape[: g.ndim - len(stencil.halo.shape)]
    # Sums are also computed in the halo, so g is padded with 2 * radius layers of zeros on each side.
    padded_g = zeros_like(g, lead + tuple(n + 4 * r for n, r in zip(halo.shape, radius)))
    padded_g[(..., *[slice(2 * r, 2 * r + n) for n, r in zip(halo.shape, radius)])] = g
    total = empty_like(g, lead + halo.padded)
    weighted_sum(padded_g, stencil.mirrored.terms, total, _all_of(halo.padded))
    for ghost in stencil.stage.empty:
        total[ghost] = 0
    fold_in_place(total, halo, stencil.sides, stencil.scheme)
    return total[halo.interior]


apply_stencil.spec_of = apply_transpose.spec_of = lambda u, _: spec_like(u)
# S E is affine, because of the values beyond the sides; its derivative is the same stencil with zeros beyond the sides. The
# transpose of this linear part is a mirrored stencil if no cell beyond a side is a copy.
defvjp(
    apply_stencil,
    lambda ans, u, s: lambda g: apply_transpose(g, s) if s.has_copied_ghosts else apply_stencil(g, s.mirrored),
)
defjvp(apply_stencil, lambda du, ans, u, stencil: apply_stencil(du, stencil.homogeneous))
defvjp(apply_transpose, lambda ans, g, stencil: lambda v: apply_stencil(v, stencil.homogeneous))
defjvp(apply_transpose, lambda dg, ans, g, stencil: apply_transpose(dg, stencil))


def _all_of(shape: Shape) -> Box:
    return tuple(slice(0, n) for n in shape)


def _parts_of(halo: Halo) -> tuple[Box | None, list[Box]]:
    """Return the box of cells whose sums need no halo, or None, and boxes that cover the other cells."""
    interior, boxes = list(_all_of(halo.shape)), []
    for axis, (n, r) in enumerate(zip(halo.shape, halo.widths)):
        # If a block isn't longer than the halos of both sides together, every sum needs halo cells.
        if n <= 2 * r:
            return None, [_all_of(halo.shape)]
        if r:
            boxes += [(*interior[:axis], cells, *interior[axis + 1 :]) for cells in (slice(0, r), slice(n - r, n))]
            interior[axis] = slice(r, n - r)
    return tuple(interior), boxes
