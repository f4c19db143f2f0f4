"""The plan of an exchange: the cells that each rank sends to other ranks, in consecutive stages.

There are three schemes. "By axis" has one stage per dimension, and at most six messages; the layers of a stage include the
halo of earlier dimensions, and thus the corners. "At once" has one stage for all neighbors, including diagonal neighbors,
and at most 26 messages. "Faces only" has one stage without diagonal neighbors, for star stencils.

All cells that a rank needs from another rank in one stage form one message, even if they are on two sides of its block.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple, TypeAlias

from mpiad._typing import Rank, Shape
from mpiad.domain.partition import Partition, lengths

BY_AXIS, AT_ONCE, FACES_ONLY = "by axis", "at once", "faces only"

Index: TypeAlias = tuple[Any, ...]
Step: TypeAlias = tuple[int, ...]
"""The offset of a neighbor in the grid of ranks: -1, 0 or 1 along each dimension."""


class Route(NamedTuple):
    """The cells that two ranks copy from each other in one stage: one message in each direction."""

    peer: Rank
    owned: tuple[Index, ...]  # this rank's cells that the peer copies, in the order of the message
    ghosts: tuple[Index, ...]  # this rank's halo cells that copy cells of the peer, in the order of the message


class Stage(NamedTuple):
    """Copies of cells that don't depend on each other, and are made simultaneously."""

    routes: tuple[Route, ...]
    own_copies: tuple[tuple[Index, Index], ...]  # pairs: cells of the block, the halo cells that copy them
    # The physical sides, in the order in which they are filled after the messages: the dimension, 0 or 1 for the low or
    # high side, and the extent of the layers along the other dimensions.
    sides: tuple[tuple[int, int, tuple[slice, ...]], ...]
    empty: tuple[Index, ...] = ()  # halo cells that are set to zero


class Geometry:
    """A block, its halo and its neighbors; `block` is the index of the block in a padded array."""

    def __init__(self, partition: Partition, rank: Rank, widths: tuple[int, ...]):
        self.partition, self.rank, self.widths = partition, rank, widths
        self.shape: Shape = lengths(partition.block(rank))
        self.padded: Shape = tuple(n + 2 * h for n, h in zip(self.shape, widths))
        self.block = tuple(slice(h, h + n) for n, h in zip(self.shape, widths))
        self.neighbours = partition.neighbours(rank)

    def steps(self, diagonal: bool) -> list[Step]:
        """Return the steps to adjacent or to diagonal neighbors along dimensions with a halo."""
        steps = itertools.product(*[(-1, 0, 1) if h else (0,) for h in self.widths])
        return [step for step in steps if any(step) and (len(step) - step.count(0) > 1) == diagonal]

    def cells(self, step: Step, extents: tuple[slice, ...], inside: bool = False) -> Index:
        """Return the halo cells in the direction of a step, or the cells that the neighbor there copies, over `extents`."""
        return (..., *[self.layers(axis, s, inside) if s else extents[axis] for axis, s in enumerate(step)])

    def layers(self, axis: int, side: int, inside: bool = False) -> slice:
        """Return the layers of the halo on a side (-1 or 1), or the same number of layers of the block at that side."""
        n, h = self.shape[axis], self.widths[axis]
        start = (h if side < 0 else n) if inside else (0 if side < 0 else n + h)
        return slice(start, start + h)

    def extent(self, axis: int) -> slice:
        """Return the range of the block and its halo along a dimension, without the halo beyond physical sides."""
        low, high = self.neighbours[axis]
        n, h = self.shape[axis], self.widths[axis]
        return slice(0 if low is not None else h, n + h + (h if high is not None else 0))


def plan(geometry: Geometry, scheme: str) -> tuple[Stage, ...]:
    """Return the stages of a scheme: `BY_AXIS`, `AT_ONCE` or `FACES_ONLY`."""
    ndim, pairs = len(geometry.shape), enumerate(zip(geometry.neighbours, geometry.widths))
    physical = [(axis, end) for axis, (pair, h) in pairs for end in (0, 1) if h and pair[end] is None]
    if scheme == BY_AXIS:
        stages = []
        for axis in [axis for axis in range(ndim) if geometry.widths[axis]]:
            # The layers include the halo of earlier dimensions, so corners need no separate messages.
            extents = (*[slice(None)] * axis, *geometry.block[axis:])
            steps = [step for step in geometry.steps(diagonal=False) if step[axis]]
            sides = tuple((along, end, extents) for along, end in physical if along == axis)
            stages.append(_stage(geometry, steps, extents, sides))
        return tuple(stages)
    adjacent, diagonal = geometry.steps(diagonal=False), geometry.steps(diagonal=True)
    if scheme == FACES_ONLY:
        sides = tuple((axis, end, geometry.block) for axis, end in physical)
        empty = tuple(geometry.cells(step, geometry.block) for step in diagonal)
        return (_stage(geometry, adjacent, geometry.block, sides, empty),)
    extents = [geometry.extent(axis) for axis in range(ndim)]
    # The layers of a side include the whole halo along earlier dimensions. Along later dimensions, they exclude the halo
    # beyond physical sides.
    sides = tuple((axis, end, (*[slice(None)] * axis, *extents[axis:])) for axis, end in physical)
    return (_stage(geometry, adjacent + diagonal, geometry.block, sides),)


def _stage(
    geometry: Geometry, steps: list[Step], extents: tuple[slice, ...], sides: tuple, empty: tuple[Index, ...] = ()
) -> Stage:
    steps_to: dict[Rank, list[Step]] = {}
    own_copies = []
    for step in steps:
        peer = geometry.partition.neighbour(geometry.rank, step)
        if peer == geometry.rank:
            # With one rank along a periodic dimension, the halo is a copy of layers at the block's opposite side.
            back = tuple(-s for s in step)
            own_copies.append((geometry.cells(back, extents, inside=True), geometry.cells(step, extents)))
        elif peer is not None:
            steps_to.setdefault(peer, []).append(step)
    routes = []
    for peer, found in steps_to.items():
        # Both ranks sort the parts of a message by the sender's step; the peer's steps are opposite to those of this rank.
        owned = [geometry.cells(step, extents, inside=True) for step in sorted(found)]
        ghosts = [geometry.cells(step, extents) for step in sorted(found, reverse=True)]
        routes.append(Route(peer, tuple(owned), tuple(ghosts)))
    return Stage(tuple(routes), tuple(own_copies), sides, empty)
