"""The operator of a stencil, S E: E exchanges the halo, S sums. Both are one node on the tape, which keeps nothing.

Communication overlaps with the sums of the interior. The transpose is Eᵀ Sᵀ, and Sᵀ is the stencil mirrored in its center.
If cells beyond the sides are zero or those of the other end, Eᵀ Sᵀ is the mirrored stencil with the same exchange: the
reverse pass costs as much as the forward pass. If they are copies of cells inside ("edge", "reflect"), the halo values of
the mirrored stencil are folded back.
"""

from __future__ import annotations

from functools import cached_property
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from mpiad._typing import Array, LocalArray, Shape
from mpiad.domain.boundary import Sides, homogeneous
from mpiad.domain.halo import Halo, fill_local, fold_in_place
from mpiad.domain.halo_messages import post, put
from mpiad.domain.routes import FACES, TOGETHER
from mpiad.extend import custom_operator, defjvp, defvjp
from mpiad.transport.buffers import empty_like, zeros_like

_TAG = 32749

Terms: TypeAlias = tuple[tuple[float, tuple[tuple[int, ...], ...]], ...]
"""For each weight the offsets with that weight, counted from the lowest corner."""
Box: TypeAlias = tuple[slice, ...]


class StencilSums:
    """The operator of a stencil.

    `weights`: of odd lengths; the center is the cell's own weight. `halo`: as wide as the radius of the weights. `sides`:
    values beyond physical sides.
    """

    def __init__(self, weights: np.ndarray, halo: Halo, sides: Sides):
        self.weights, self.radius, self.halo, self.sides, self.comm = weights, halo.widths, halo, sides, halo.comm
        self.terms: Terms = terms_of(weights)
        reached = np.argwhere(weights) != np.array(self.radius)
        # If every term is offset along at most one dimension, corners aren't needed.
        self.scheme = FACES if (reached.sum(axis=1) <= 1).all() else TOGETHER
        (self._stage,) = halo.stages(self.scheme)
        self._inside, self._along_sides = _parts_of(halo) if self._stage.routes else (None, [_all_of(halo.shape)])
        # Blocks with a halo, used again: fresh memory costs more than the sums.
        self._rooms: list[Any] = []

    @cached_property
    def homogeneous(self) -> StencilSums:
        """The linear part: zero beyond the sides that have a value."""
        sides = homogeneous(self.sides)
        return self if sides == self.sides else StencilSums(self.weights, self.halo, sides)

    @cached_property
    def mirrored(self) -> StencilSums:
        """The stencil mirrored in its center, which for a symmetric one is itself."""
        weights = np.flip(self.weights)
        if (weights == self.weights).all():
            return self.homogeneous
        return StencilSums(weights, self.halo, homogeneous(self.sides))

    @cached_property
    def copies_sides(self) -> bool:
        """Whether cells beyond some physical side of some rank are copies of cells inside."""
        periodic = self.halo.geometry.partition.periodic
        return any(side.layers is not None for pair, wraps in zip(self.sides, periodic) if not wraps for side in pair)

    def room(self, u: LocalArray) -> LocalArray:
        """Return an array of shape (..., *padded) with any numbers, for `u`; `give_back` keeps it for the next call."""
        shape = u.shape[: u.ndim - len(self.halo.shape)] + self.halo.padded
        # Removed from the cache while in use: another thread makes its own.
        room = self._rooms.pop() if self._rooms else None
        if room is not None and room.shape == shape and room.dtype == u.dtype and type(room) is type(u):
            return room
        # Halo cells are added up before they have come, and the sums dropped: NumPy must not warn of them.
        return zeros_like(u, shape)

    def give_back(self, room: Array) -> None:
        """Keep an array for the next call."""
        self._rooms = [room]

    def summed(self, u: LocalArray) -> LocalArray:
        """Return S E u."""
        halo, stage = self.halo, self._stage
        padded = self.room(u)
        padded[halo.interior] = u
        out = empty_like(u, u.shape)
        # Cells whose neighbors are all in the block are summed during the exchange.
        coming = post(padded, stage.routes, False, _TAG, halo.comm)
        if self._inside is not None:
            weighted_sum(padded, self.terms, out, self._inside)
        put(padded, coming)
        fill_local(padded, halo.local(self.sides, self.scheme)[0], self.sides)
        for box in self._along_sides:
            weighted_sum(padded, self.terms, out, box)
        self.give_back(padded)
        return out

    def spread(self, g: LocalArray) -> LocalArray:
        """Return Eᵀ Sᵀ g."""
        halo, ndim = self.halo, len(self.halo.shape)
        lead = g.shape[: g.ndim - ndim]
        # Around it as many zeros as the mirrored stencil reaches from the outermost halo cell.
        framed = zeros_like(g, lead + tuple(n + 4 * r for n, r in zip(halo.shape, self.radius)))
        framed[(..., *[slice(2 * r, 2 * r + n) for n, r in zip(halo.shape, self.radius)])] = g
        total = empty_like(g, lead + halo.padded)
        weighted_sum(framed, self.mirrored.terms, total, _all_of(halo.padded))
        for ghost in self._stage.empty:
            total[ghost] = 0
        fold_in_place(total, halo, self.sides, self.scheme)
        return total[halo.interior]


def terms_of(weights: np.ndarray) -> Terms:
    """Return the terms of a stencil's weights, those with the largest groups first."""
    groups: dict[float, list[tuple[int, ...]]] = {}
    for offset in np.argwhere(weights):
        groups.setdefault(weights[tuple(offset)].item(), []).append(tuple(offset.tolist()))
    return tuple((weight, tuple(offsets)) for weight, offsets in sorted(groups.items(), key=lambda item: -len(item[1])))


def weighted_sum(source: LocalArray, terms: Terms, out: LocalArray, box: Box) -> None:
    """Write the weighted sums of a box of cells; cell 0 of `out` is summed from the offsets as they are."""
    target = out[(..., *box)]
    if not terms:
        target[...] = 0
    if not target.size:
        return
    scratch = empty_like(out, target.shape)
    for number, (weight, offsets) in enumerate(terms):
        shifted = [[slice(cells.start + o, cells.stop + o) for cells, o in zip(box, offset)] for offset in offsets]
        pieces, part = [source[(..., *index)] for index in shifted], scratch if number else target
        # Pieces of equal weight are added first and multiplied once.
        if len(pieces) == 1:
            np.multiply(pieces[0], weight, out=part)
        else:
            np.add(pieces[0], pieces[1], out=part)
            for piece in islice(pieces, 2, None):
                part += piece
            if weight != 1:
                part *= weight
        if number:
            target += scratch


@custom_operator
def apply_stencil(u: LocalArray, stencil: StencilSums) -> LocalArray:
    """Return the stencil's sums; see `Stencil`."""
    return stencil.summed(u)


@custom_operator
def spread_stencil(g: LocalArray, stencil: StencilSums) -> LocalArray:
    """Return the transpose of `apply_stencil`, whose adjoint is its linear part."""
    return stencil.spread(g)


def transposed_stencil(g: LocalArray, stencil: StencilSums) -> LocalArray:
    """Return the transpose of a stencil's linear part, applied to a field."""
    return spread_stencil(g, stencil) if stencil.copies_sides else apply_stencil(g, stencil.mirrored)


apply_stencil.alike = spread_stencil.alike = True
# S E is linear except for values beyond the sides; a weight from cell i to cell j is one from j to i in the transpose.
defvjp(apply_stencil, lambda ans, u, stencil: lambda g: transposed_stencil(g, stencil))
defjvp(apply_stencil, lambda du, ans, u, stencil: apply_stencil(du, stencil.homogeneous))
defvjp(spread_stencil, lambda ans, g, stencil: lambda v: apply_stencil(v, stencil.homogeneous))
defjvp(spread_stencil, lambda dg, ans, g, stencil: spread_stencil(dg, stencil))


def _all_of(shape: Shape) -> Box:
    return tuple(slice(0, n) for n in shape)


def _parts_of(halo: Halo) -> tuple[Box | None, list[Box]]:
    """Return the cells whose sums need no halo, and boxes that cover the others."""
    inside, boxes = list(_all_of(halo.shape)), []
    for axis, (n, r) in enumerate(zip(halo.shape, halo.widths)):
        # Not longer than both halos together: every sum needs some halo cells.
        if n <= 2 * r:
            return None, [_all_of(halo.shape)]
        if r:
            boxes += [(*inside[:axis], cells, *inside[axis + 1 :]) for cells in (slice(0, r), slice(n - r, n))]
            inside[axis] = slice(r, n - r)
    return tuple(inside), boxes
