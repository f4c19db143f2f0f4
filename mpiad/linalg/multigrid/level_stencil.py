"""The operator of a level: for each colour of points the couplings with their neighbours, and the diagonal."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np

from mpiad._typing import LocalArray
from mpiad.linalg.multigrid.colour_layout import Colour, Layout, reach
from mpiad.linalg.multigrid.level_sums import Term
from mpiad.transport.device_arrays import ArrayModule

Offset = tuple[int, ...]


def offsets(ndim: int) -> list[Offset]:
    """Return the offsets of all neighbours, corners included, in an order of which the reverse is the opposite one."""
    return [offset for offset in itertools.product((-1, 0, 1), repeat=ndim) if any(offset)]


@functools.cache
def corners(colour: Colour) -> list[tuple[int, ...]]:
    """Return where the coarse points are that a colour is interpolated from, in entries."""
    return list(itertools.product(*[(0, 1) if odd else (0,) for odd in colour]))


class Stencil:
    """A symmetric operator on the points of a level: (A u)(x) = D(x) u(x) - Σ N(x, offset) u(x + offset).

    - `memory`, of shape (rows, size): zero outside of the block: for each colour D, and 1 / D where D isn't zero; for
      each offset the N of all colours; last the weights of the level's interpolation.
    - `diagonal`, `inverse`: shape (colours, size).
    - `couplings`: from offsets to arrays of shape (colours, size).
    - `sweep`: the order of a Gauss-Seidel sweep: groups of colours whose points aren't coupled with each other.
    - `weights`: from each colour but 0 to the first of its rows in the memory, one for each corner.
    """

    def __init__(self, layout: Layout, found: Sequence[Offset], memory: LocalArray):
        self.layout, self.memory, self._found, count = layout, memory, list(found), len(layout.colours)
        self.diagonal, self.inverse = memory[:count], memory[count : 2 * count]
        self.couplings = {o: memory[k * count : (k + 1) * count] for k, o in enumerate(found, 2)}
        self.sweep = _sweep(layout.colours, any(np.count_nonzero(offset) > 1 for offset in found))
        self.weights: dict[Colour, int] = {}
        first = (2 + len(found)) * count
        for colour in layout.colours[1:]:
            self.weights[colour] = first
            first += len(corners(colour))

    def on(self, home: ArrayModule) -> Stencil:
        """Return the same operator on a device, of a copy of its memory."""
        return Stencil(self.layout, self._found, home.to_device(self.memory))

    def weights_of(self, colour: Colour) -> LocalArray:
        """Return the weights by which a colour is interpolated, shape (corners, size)."""
        return self.memory[self.weights[colour] : self.weights[colour] + len(corners(colour))]

    def terms(self, colour: Colour, among: Sequence[Colour] | None = None) -> list[Term]:
        """Return what the neighbours of a colour contribute, or those of some colours, whose rows are their own."""
        terms, row, count = [], self.layout.row[colour], len(self.layout.colours)
        for k, offset in enumerate(self._found, 2):
            neighbour, steps = reach(colour, offset)
            if among is None or neighbour in among:
                shift = self.layout.shifted(steps).start - self.layout.inner.start
                terms.append(Term(k * count + row, self.layout.row[neighbour], shift))
        return terms


def _sweep(colours: list[Colour], corners: bool) -> list[list[Colour]]:
    # By the sum of the indices: in a star the neighbours of an even point are odd, so a group updates at once.
    even = [colour for colour in colours if sum(colour) % 2 == 0]
    odd = [colour for colour in colours if sum(colour) % 2]
    if corners:
        return [[colour] for colour in even + odd]
    # Without corners two groups are enough, as on a chessboard. In three dimensions, where smoothing is what limits the
    # fine level, half a sweep more takes three iterations from eleven.
    return [odd, even, odd] if len(colours) == 8 else [even, odd]


def stencil_of(layout: Layout, found: Sequence[Offset], blocks: Sequence[np.ndarray]) -> Stencil:
    """Return the stencil of a block's diagonal, and its couplings for each offset; its interpolation isn't known yet."""
    count = len(layout.colours)
    weights = sum(len(corners(colour)) for colour in layout.colours[1:])
    stencil = Stencil(layout, found, np.zeros(((2 + len(found)) * count + weights, layout.size)))
    for out, block in zip((stencil.diagonal, *stencil.couplings.values()), blocks, strict=True):
        layout.split(block, out)
    np.divide(1.0, stencil.diagonal, out=stencil.inverse, where=stencil.diagonal > 0)
    return stencil
