"""How the points of one level are divided among the ranks: finer levels among all, coarser ones among fewer.

A level's blocks follow from those of the level above: a coarse point belongs to the rank that owns the fine point at the
same place, the one with twice its index. Where blocks become too small, neighbouring ones are merged, and the first rank
of each group goes on alone.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from mpiad._typing import Rank, Shape
from mpiad.domain.partition import Partition


@dataclass(frozen=True)
class Box:
    """The points from `low` up to, not including, `high` along each dimension."""

    low: Shape
    high: Shape

    @property
    def shape(self) -> Shape:
        """Return the number of points along each dimension."""
        return tuple(b - a for a, b in zip(self.low, self.high))

    def coarse(self) -> Box:
        """Return the coarse points that lie on points of this box."""
        return Box(tuple((a + 1) // 2 for a in self.low), tuple((b + 1) // 2 for b in self.high))

    def grown(self, width: int) -> Box:
        """Return the box with points around it."""
        return Box(tuple(a - width for a in self.low), tuple(b + width for b in self.high))

    def within(self, other: Box) -> tuple[slice, ...]:
        """Return the index of this box in an array of the points of another."""
        return tuple(slice(a - c, b - c) for a, b, c in zip(self.low, self.high, other.low))


@dataclass(frozen=True)
class Spread:
    """Blocks and their owners."""

    cuts: tuple[tuple[int, ...], ...]  # along each dimension where blocks begin, and the number of points at the end
    # The owners: for each position along each dimension its share of the owner's number, which is their sum.
    ranks: tuple[tuple[int, ...], ...]
    periodic: tuple[bool, ...]

    @property
    def shape(self) -> Shape:
        """Return the number of points along each dimension."""
        return tuple(along[-1] for along in self.cuts)

    @property
    def dims(self) -> tuple[int, ...]:
        """Return the number of blocks along each dimension."""
        return tuple(map(len, self.ranks))

    def positions(self) -> itertools.product:
        """Return the positions of all blocks."""
        return itertools.product(*map(range, self.dims))

    def owner(self, position: tuple[int, ...]) -> Rank:
        """Return the rank of a block."""
        # Ranks count like the digits of a number, with a dimension for each place: what each adds is in `ranks`.
        return sum(along[place] for along, place in zip(self.ranks, position))

    def position(self, rank: Rank) -> tuple[int, ...] | None:
        """Return where a rank's block is, None for one without."""
        return next((position for position in self.positions() if self.owner(position) == rank), None)

    def box(self, position: tuple[int, ...]) -> Box:
        """Return the points of a block."""
        low = tuple(along[place] for along, place in zip(self.cuts, position))
        return Box(low, tuple(along[place + 1] for along, place in zip(self.cuts, position)))

    def beside(self, position: tuple[int, ...], axis: int, step: int) -> Rank | None:
        """Return the owner of a neighbouring block, None beyond a physical side."""
        place, count = position[axis] + step, self.dims[axis]
        if not self.periodic[axis] and not 0 <= place < count:
            return None
        return self.owner((*position[:axis], place % count, *position[axis + 1 :]))

    def coarse(self) -> Spread:
        """Return the spread of the points of even index, where some blocks may be empty."""
        return Spread(tuple(tuple((cut + 1) // 2 for cut in along) for along in self.cuts), self.ranks, self.periodic)

    def merged(self, least: int) -> Spread:
        """Return the spread with neighbouring blocks made one, until none that has neighbours is shorter than `least`."""
        cuts, ranks = list(self.cuts), list(self.ranks)
        for axis in range(len(cuts)):
            # Pairs, so that a leader gathers from few: a level later it may be pairs of pairs.
            while len(ranks[axis]) > 1 and min(b - a for a, b in zip(cuts[axis], cuts[axis][1:])) < least:
                cuts[axis] = (*cuts[axis][:-1][::2], cuts[axis][-1])
                ranks[axis] = ranks[axis][::2]
        return Spread(tuple(cuts), tuple(ranks), self.periodic)

    def alone(self) -> Spread:
        """Return the spread in which the first rank owns everything."""
        # Of several blocks along a dimension the shortest is shorter than all of them together.
        return self.merged(max(self.shape))


def spread_of(partition: Partition) -> Spread:
    """Return how a domain's grid is divided."""
    cuts, ranks = [], []
    for axis, (n, count) in enumerate(zip(partition.shape, partition.dims)):
        # Neighbours along the last dimension have neighbouring ranks.
        stride = math.prod(partition.dims[axis + 1 :])
        ranks.append(tuple(place * stride for place in range(count)))
        cuts.append((*[partition.block(rank)[axis].start for rank in ranks[-1]], n))
    return Spread(tuple(cuts), tuple(ranks), partition.periodic)
