"""Memory layout of a block: its points are sorted by color, so that operations on one color use contiguous arrays.

A point's color is the parity of its indices, so there are 4 colors in two dimensions, and 8 in three. Points of one color
aren't neighbors, not even diagonal ones, so a Gauss-Seidel step updates all of them at once. The points of color (0, ...)
are the points of the next coarser level. In the array of a color, the point with the index 2k + color is entry
k - first + 1; `first` is half the lowest index of the block, rounded down, and the 1 is for the halo, a layer around the
block. All arrays are flat, so that the neighbors of all points of a color are one shifted slice: on small levels, loops
over rows would take longer than the arithmetic.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mpiad._typing import LocalArray, Rank, Shape
from mpiad.domain.partition import Partition
from mpiad.transport.devices.device_arrays import Spec, arrays_of, empty_like

# Distribution of the points of one level over the ranks: finer levels are on all ranks, coarser levels on fewer ranks.
#
# A coarse point belongs to the rank that owns the fine point at the same position, whose index is twice the coarse index.
# If blocks become too small, neighboring blocks are merged, and the owner of the first block owns the merged block.


@dataclass(frozen=True)
class Box:
    """The points with indices low <= index < high along each dimension."""

    low: Shape
    high: Shape

    @property
    def shape(self) -> Shape:
        """Return the number of points along each dimension."""
        return tuple(b - a for a, b in zip(self.low, self.high))

    def coarse(self) -> Box:
        """Return the coarse points that coincide with points of this box."""
        return Box(tuple((a + 1) // 2 for a in self.low), tuple((b + 1) // 2 for b in self.high))

    def grown(self, width: int) -> Box:
        """Return the box extended by `width` points on each side."""
        return Box(tuple(a - width for a in self.low), tuple(b + width for b in self.high))

    def within(self, other: Box) -> tuple[slice, ...]:
        """Return the index of this box in an array of the points of another box."""
        return tuple(slice(a - c, b - c) for a, b, c in zip(self.low, self.high, other.low))


@dataclass(frozen=True)
class Distribution:
    """The blocks of a level, and the ranks that own them."""

    cuts: tuple[tuple[int, ...], ...]  # per dimension, the first point of each block, followed by the number of points
    # Per dimension, the contribution of each position to the rank: the owner of a block is the sum over dimensions.
    ranks: tuple[tuple[int, ...], ...]
    periodic: tuple[bool, ...]

    @property
    def shape(self) -> Shape:
        """Return the number of points along each dimension."""
        return tuple(cuts[-1] for cuts in self.cuts)

    @property
    def dims(self) -> tuple[int, ...]:
        """Return the number of blocks along each dimension."""
        return tuple(map(len, self.ranks))

    def positions(self) -> itertools.product:
        """Return the positions of all blocks."""
        return itertools.product(*map(range, self.dims))

    def owner(self, position: tuple[int, ...]) -> Rank:
        """Return the rank of a block."""
        return sum(ranks[index] for ranks, index in zip(self.ranks, position))

    def position(self, rank: Rank) -> tuple[int, ...] | None:
        """Return the position of a rank's block, or None for a rank without a block."""
        return next((position for position in self.positions() if self.owner(position) == rank), None)

    def box(self, position: tuple[int, ...]) -> Box:
        """Return the points of a block."""
        low = tuple(cuts[index] for cuts, index in zip(self.cuts, position))
        return Box(low, tuple(cuts[index + 1] for cuts, index in zip(self.cuts, position)))

    def neighbor(self, position: tuple[int, ...], axis: int, step: int) -> Rank | None:
        """Return the owner of the neighboring block in a direction, or None beyond a physical side."""
        index, count = position[axis] + step, self.dims[axis]
        if not self.periodic[axis] and not 0 <= index < count:
            return None
        return self.owner((*position[:axis], index % count, *position[axis + 1 :]))

    def coarse(self) -> Distribution:
        """Return the distribution of the points of even index, in which some blocks may be empty."""
        return Distribution(tuple(tuple((cut + 1) // 2 for cut in cuts) for cuts in self.cuts), self.ranks, self.periodic)

    def merged(self, length: int) -> Distribution:
        """Return the distribution after merging blocks until no block with neighbors is shorter than `length`."""
        cuts, ranks = list(self.cuts), list(self.ranks)
        for axis in range(len(cuts)):
            # Blocks are merged in pairs, so that a rank gathers data from few other ranks; the next level may merge again.
            while len(ranks[axis]) > 1 and min(b - a for a, b in zip(cuts[axis], cuts[axis][1:])) < length:
                cuts[axis] = (*cuts[axis][:-1][::2], cuts[axis][-1])
                ranks[axis] = ranks[axis][::2]
        return Distribution(tuple(cuts), tuple(ranks), self.periodic)


def distribution_of(partition: Partition) -> Distribution:
    """Return the distribution of a domain's grid."""
    cuts, ranks = [], []
    for axis, (n, count) in enumerate(zip(partition.shape, partition.dims)):
        # Ranks are numbered in row-major order: the last dimension varies fastest.
        stride = math.prod(partition.dims[axis + 1 :])
        ranks.append(tuple(index * stride for index in range(count)))
        cuts.append((*[partition.block(rank)[axis].start for rank in ranks[-1]], n))
    return Distribution(tuple(cuts), tuple(ranks), partition.periodic)


Color = tuple[int, ...]


@functools.cache
def neighbor_color(color: Color, offset: Color) -> tuple[Color, Color]:
    """Return the color of the neighbors at an offset of a color's points, and the offset between their entries."""
    target = [p + o for p, o in zip(color, offset)]
    return tuple(m % 2 for m in target), tuple(m // 2 for m in target)


class Layout:
    """The arrays of one block, `box`: one per color, flattened from `shape`; the color (0, ...) comes first."""

    def __init__(self, box: Box):
        self.box = box
        self.first = tuple(low // 2 for low in box.low)
        self.shape: Shape = tuple((high + 1) // 2 - start + 2 for high, start in zip(box.high, self.first))
        self.size = math.prod(self.shape)
        self.strides = tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))
        # The flat range from the first to the last entry outside of the halo, which is the outermost layer.
        margin = sum(self.strides)
        self.inner = slice(margin, self.size - margin)
        self.colors: list[Color] = list(itertools.product((0, 1), repeat=len(self.shape)))
        self.row = {color: row for row, color in enumerate(self.colors)}
        # The results are cached, since on small levels their computation takes longer than the arithmetic.
        self.slices_of = functools.cache(self._slices_of)

    def shifted(self, steps: Iterable[int], sign: int = 1) -> slice:
        """Return the range `inner`, shifted by steps along the dimensions."""
        shift = sign * sum(step * stride for step, stride in zip(steps, self.strides))
        return slice(self.inner.start + shift, self.inner.stop + shift)

    def _slices_of(self, color: Color, rim: int = 0) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Return the slices of a color's points in the color's array, and in the block with `rim` layers around it."""
        entries, points = [], []
        for parity, low, high, first in zip(color, self.box.low, self.box.high, self.first):
            # The range of k with low - rim <= 2k + parity < high + rim, so both of its bounds are rounded up.
            start, stop = ((bound - parity + 1) // 2 for bound in (low - rim, high + rim))
            entries.append(slice(start - first + 1, stop - first + 1))
            points.append(slice(2 * start + parity - (low - rim), None, 2))
        return tuple(entries), tuple(points)

    def coarse(self, rim: int = 0) -> tuple[slice, ...]:
        """Return the entries of the coarse points of the block, with `rim` layers around them."""
        box = self.box.coarse().grown(rim)
        return tuple(slice(a - f + 1, b - f + 1) for a, b, f in zip(box.low, box.high, self.first))

    def shaped(self, flat: LocalArray) -> LocalArray:
        """Return flat arrays (..., size) of colors in the shape (..., *shape)."""
        return flat.reshape(flat.shape[:-1] + self.shape)

    def split(self, block: LocalArray, out: LocalArray | None = None) -> LocalArray:
        """Return a block (..., *box.shape) as doubles (..., colors, size), zero in the halo; `out` must contain zeros."""
        if out is None:
            lead = block.shape[: block.ndim - len(self.shape)]
            out = Spec((*lead, len(self.colors), self.size), np.dtype(float), arrays_of(block)).zeros()
        whole = self.shaped(out)
        for row, color in enumerate(self.colors):
            entries, points = self.slices_of(color)
            whole[(..., row, *entries)] = block[(..., *points)]
        return out

    def join(self, split: LocalArray, rim: int = 0) -> LocalArray:
        """Return the block from the arrays of all colors, with `rim` layers of the halo around it."""
        out = empty_like(split, split.shape[:-2] + self.box.grown(rim).shape)
        whole = self.shaped(split)
        for row, color in enumerate(self.colors):
            entries, points = self.slices_of(color, rim)
            out[(..., *points)] = whole[(..., row, *entries)]
        return out


@functools.lru_cache(maxsize=64)
def layout_of(box: Box) -> Layout:
    """Return the layout of a block; it is cached, since levels are computed again for each κ."""
    return Layout(box)
