"""One level of a V-cycle: smooth, restrict the residual, add the correction of the coarser level, smooth in reverse order.

A Gauss-Seidel sweep over the colors is followed, after the correction, by one in the reverse order: its transpose, so that
the whole cycle is a symmetric operator. After the first sweep the last group's equations hold, so none of its residuals
are restricted; in the second sweep that group comes first and is computed from the others, so nothing is interpolated
to it. The fine level has two groups of colors: there this halves the work.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpiad._typing import Comm, LocalArray, Rank
from mpiad.linalg.multigrid.colour_layout import Colour, Layout, Spread, reach
from mpiad.linalg.multigrid.compiled_sums import CompiledSums
from mpiad.linalg.multigrid.level_sums import Step, Sums, Term, WeightedSum
from mpiad.primitives import mpi_irecv, mpi_send, mpi_wait
from mpiad.primitives.operation import suspended
from mpiad.transport.buffers import empty_beside
from mpiad.transport.device_arrays import ArrayModule
from mpiad.transport.tracing import restoring_state

if TYPE_CHECKING:
    from mpiad.linalg.multigrid.hierarchy import Coarser


# The halo of a level's arrays: one layer, of the changed colors.


# Unlikely to be used by users, and below the 32767 that MPI guarantees.
_TAG_UP, _TAG_DOWN = 32752, 32753


class _Side(NamedTuple):
    """One side of a block: the layer sent to the neighbor, the layer of the halo, and their parities."""

    rank: Rank
    axis: int
    own: int
    own_parity: int
    ghost: int
    ghost_parity: int
    tag: int
    tag_back: int


class LevelHalo:
    """Exchange of the halo of a level's block."""

    def __init__(self, layout: Layout, spread: Spread, rank: Rank, comm: Comm):
        self._layout, self._rank, self._comm = layout, rank, comm
        position: Any = spread.position(rank)
        self._sides = [self._sides_along(axis, spread, position) for axis in range(len(spread.cuts))]
        self._needed = any(self._sides)

    def _sides_along(self, axis: int, spread: Spread, position: tuple[int, ...]) -> list[_Side]:
        low, high = self._layout.box.low[axis], self._layout.box.high[axis]
        first, sides = self._layout.first[axis], []
        for step, own, ghost, tags in ((-1, low, low - 1, (_TAG_DOWN, _TAG_UP)), (1, high - 1, high, (_TAG_UP, _TAG_DOWN))):
            rank = spread.beside(position, axis, step)
            if rank is not None:
                # Entries of the layer's color, shifted by one for the halo of the array.
                place = [index // 2 - first + 1 for index in (own, ghost)]
                sides.append(_Side(rank, axis, place[0], own % 2, place[1], ghost % 2, *tags))
        return sides

    def fill(self, arrays: Mapping[Colour, LocalArray]) -> None:
        """Fill the halo, corners included, of arrays (..., size) of some colors; all ranks call it with the same ones."""
        if self._needed and arrays:
            whole = {colour: self._layout.whole(array) for colour, array in arrays.items()}
            # One dimension after the other: the layers sent along one include the halo of those before, and so the corners.
            # Suspended once more: an exception after these messages must not leave any of them pending.
            with restoring_state(), suspended():
                for sides in self._sides:
                    self._fill_along(whole, sides)

    def _fill_along(self, whole: dict[Colour, LocalArray], sides: list[_Side]) -> None:
        coming = []
        # A ring on one rank has this rank on both sides.
        here = [side for side in sides if side.rank == self._rank]
        away = [side for side in sides if side.rank != self._rank]
        for side in away:
            ghosts = _layers(whole, side.axis, side.ghost, side.ghost_parity)
            if ghosts:
                like = empty_beside(ghosts[0], (sum(layer.size for layer in ghosts),))
                coming.append((ghosts, mpi_irecv(like, side.rank, side.tag_back, self._comm)))
        for side in away:
            own = _layers(whole, side.axis, side.own, side.own_parity)
            if own:
                mpi_send(np.concatenate([layer.ravel() for layer in own]), side.rank, side.tag, self._comm)
        # On a ring the layer before the block is its last one, and the layer after it its first one.
        for side, other in zip(here, reversed(here)):
            for ghost, own in zip(
                _layers(whole, side.axis, side.ghost, side.ghost_parity),
                _layers(whole, other.axis, other.own, other.own_parity),
            ):
                ghost[...] = own
        for ghosts, request in coming:
            received, start = mpi_wait(request), 0
            for ghost in ghosts:
                ghost[...] = received[start : start + ghost.size].reshape(ghost.shape)
                start += ghost.size


def _layers(whole: dict[Colour, LocalArray], axis: int, index: int, parity: int) -> list[LocalArray]:
    along = len(next(iter(whole))) - axis - 1
    place = (..., index, *[slice(None)] * along)
    return [array[place] for colour, array in whole.items() if colour[axis] == parity]


# The operator of a level: the diagonal and the couplings with neighbors, for each color of points.


Offset = tuple[int, ...]


def offsets(ndim: int) -> list[Offset]:
    """Return the offsets of all neighbors, corners included, in an order whose reverse is the opposite one."""
    return [offset for offset in itertools.product((-1, 0, 1), repeat=ndim) if any(offset)]


@functools.cache
def corners(colour: Colour) -> list[tuple[int, ...]]:
    """Return the positions, in entries, of the coarse points from which a color is interpolated."""
    return list(itertools.product(*[(0, 1) if odd else (0,) for odd in colour]))


class Stencil:
    """A symmetric operator on the points of a level: (A u)(x) = D(x) u(x) - Σ N(x, offset) u(x + offset).

    - `memory`, of shape (rows, size): zero outside of the block: for each color D, and 1 / D if D isn't zero; for
      each offset the N of all colors; last the weights of the level's interpolation.
    - `diagonal`, `inverse`: shape (colors, size).
    - `couplings`: from offsets to arrays of shape (colors, size).
    - `sweep`: the order of a Gauss-Seidel sweep: groups of colors whose points aren't coupled with each other.
    - `weights`: from each color but 0 to its first row in the memory; there is one row per corner.
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
        """Return the same operator on a device, with a copy of its memory."""
        return Stencil(self.layout, self._found, home.to_device(self.memory))

    def weights_of(self, colour: Colour) -> LocalArray:
        """Return the weights for interpolating a color, shape (corners, size)."""
        return self.memory[self.weights[colour] : self.weights[colour] + len(corners(colour))]

    def terms(self, colour: Colour, among: Sequence[Colour] | None = None) -> list[Term]:
        """Return the terms of a color's neighbors, or only those in the colors `among`."""
        terms, row, count = [], self.layout.row[colour], len(self.layout.colours)
        for k, offset in enumerate(self._found, 2):
            neighbour, steps = reach(colour, offset)
            if among is None or neighbour in among:
                shift = self.layout.shifted(steps).start - self.layout.inner.start
                terms.append(Term(k * count + row, self.layout.row[neighbour], shift))
        return terms


def _sweep(colours: list[Colour], corners: bool) -> list[list[Colour]]:
    # By the sum of the indices: in a star stencil the neighbors of an even point are odd, so a group updates at once.
    even = [colour for colour in colours if sum(colour) % 2 == 0]
    odd = [colour for colour in colours if sum(colour) % 2]
    if corners:
        return [[colour] for colour in even + odd]
    # Without corners two groups are enough, as on a chessboard. In three dimensions smoothing limits the convergence of the
    # fine level: an additional half sweep saves three of eleven iterations.
    return [odd, even, odd] if len(colours) == 8 else [even, odd]


def stencil_of(layout: Layout, found: Sequence[Offset], blocks: Sequence[np.ndarray]) -> Stencil:
    """Return the stencil of a block's diagonal and couplings per offset; its interpolation is still zero."""
    count = len(layout.colours)
    weights = sum(len(corners(colour)) for colour in layout.colours[1:])
    stencil = Stencil(layout, found, np.zeros(((2 + len(found)) * count + weights, layout.size)))
    for out, block in zip((stencil.diagonal, *stencil.couplings.values()), blocks, strict=True):
        layout.split(block, out)
    np.divide(1.0, stencil.diagonal, out=stencil.inverse, where=stencil.diagonal > 0)
    return stencil


class Level:
    """A level on a rank that takes part in it."""

    def __init__(self, stencil: Stencil, halo: LevelHalo, below: Coarser, compiled: bool = False):
        self.layout, self._stencil, self._halo, self._below = stencil.layout, stencil, halo, below
        self._count = count = len(self.layout.colours)
        # Rows of the state: for each color u, its residual and its product with the operator; the restricted residual.
        self._coarse, self.is_compiled = 3 * count, compiled
        self.sums = (CompiledSums if compiled else Sums)(self.layout, stencil.memory, 3 * count + 1)
        step, done = self.sums.step, list[Colour]()
        self._before: list[tuple[Step, list[Colour]]] = []
        for group in stencil.sweep:
            # Starting from zero, only computed colors contribute.
            self._before.append((step([self._relaxed(colour, done) for colour in group]), group))
            done = done + group
        left, later = self._unfinished(), _later(stencil.sweep)
        self._residuals = step([self._residual(colour, later.get(colour)) for colour in left])
        self._restriction = step([self._restricted(left)])
        self._interpolation = step([self._interpolated(colour) for colour in left])
        # In reverse, so that the cycle is symmetric; all neighbors contribute, since none is zero.
        self._after = [(step([self._relaxed(c, None) for c in group]), group) for group in reversed(stencil.sweep)]
        self._product = step([self._multiplied(colour) for colour in self.layout.colours])

    def on(self, home: ArrayModule) -> Level:
        """Return the same level, and all below, on a device: copies of the host's data, made here."""
        return Level(self._stencil.on(home), self._halo, self._below.on(home))

    def cycle(self, f: LocalArray) -> LocalArray:
        """Return the result of one V-cycle from zero for right-hand sides, shape (systems, colors, size); collective.

        They are contiguous, and zero outside of the block. The result, of the same shape, has its halo filled, and is
        overwritten by the next cycle.
        """
        if len(f) != len(self.sums.state):
            self.sums.allocate(len(f))
        for relax, group in self._before:
            relax(f)
            self._fill(group)
        self._interpolate(self._below.correct(self._restrict(f)), f)
        for relax, group in self._after:
            relax(f)
            self._fill(group)
        return self.sums.state[:, : self._count]

    def product_after(self, f: LocalArray) -> LocalArray:
        """Return the operator's product with the last result of `cycle`, which was for `f`; equal to `f` in the last group.

        The next product overwrites it.
        """
        self._product(f)
        return self.sums.state[:, 2 * self._count : self._coarse]

    def _fill(self, colours: list[Colour], first: int = 0) -> None:
        rows = {colour: first + self.layout.row[colour] for colour in colours}
        self._halo.fill({colour: self.sums.state[:, row] for colour, row in rows.items()})

    def _restrict(self, f: LocalArray) -> LocalArray:
        """Return the residual, restricted to this rank's coarse points."""
        self._residuals(f)
        # Restriction reads the residuals of neighboring points; those of color 0 aren't sent.
        self._fill([colour for colour in self._unfinished() if any(colour)], self._count)
        self._restriction(f)
        return self.layout.whole(self.sums.state[:, self._coarse])[(..., *self.layout.coarse())]

    def _interpolate(self, correction: LocalArray, f: LocalArray) -> None:
        self.layout.whole(self.sums.state[:, self._coarse])[(..., *self.layout.coarse(rim=1))] = correction
        self._interpolation(f)
        self._fill(self._unfinished())

    def _unfinished(self) -> list[Colour]:
        """Return the colors whose equations don't hold after a sweep."""
        return [colour for colour in self.layout.colours if colour not in self._stencil.sweep[-1]]

    # ---- the sums

    def _relaxed(self, colour: Colour, among: list[Colour] | None) -> WeightedSum:
        """Return the solution of a color's equations for its own points."""
        row = self.layout.row[colour]
        # Entries that are no points of this rank have a zero inverse: they become zero, until the halo is filled.
        return WeightedSum(row, self._stencil.terms(colour, among), base=row, scale=self._count + row)

    def _residual(self, colour: Colour, later: list[Colour] | None) -> WeightedSum:
        row = self.layout.row[colour]
        terms = self._stencil.terms(colour, later)
        if later is None:
            return WeightedSum(self._count + row, terms, base=row, diagonal=Term(row, row))
        # Its equations held when it was relaxed: the residual comes from later updates of points that were zero.
        return WeightedSum(self._count + row, terms)

    def _multiplied(self, colour: Colour) -> WeightedSum:
        row = self.layout.row[colour]
        if colour in self._stencil.sweep[0]:
            return WeightedSum(2 * self._count + row, base=row)
        return WeightedSum(2 * self._count + row, self._stencil.terms(colour), diagonal=Term(row, row), negative=True)

    def _restricted(self, left: list[Colour]) -> WeightedSum:
        terms = []
        for colour in left:
            for weights, shift in self._corners(colour) if any(colour) else ():
                terms.append(Term(weights, self._count + self.layout.row[colour], -shift, -shift))
        return WeightedSum(
            self._coarse, terms, base=self._count if self.layout.colours[0] in left else None, of_right=False
        )

    def _interpolated(self, colour: Colour) -> WeightedSum:
        """Return the sum of weights times the coarse values around a point: the transpose of restriction."""
        row = self.layout.row[colour]
        found = self._corners(colour) if any(colour) else [(None, 0)]
        return WeightedSum(row, [Term(weights, self._coarse, shift) for weights, shift in found], base=row, of_right=False)

    def _corners(self, colour: Colour) -> list[tuple[int, int]]:
        """Return the rows of a color's weights, and the distances to the coarse points."""
        start, first = self.layout.inner.start, self._stencil.weights[colour]
        return [(first + k, self.layout.shifted(corner).start - start) for k, corner in enumerate(corners(colour))]


def _later(sweep: list[list[Colour]]) -> dict[Colour, list[Colour]]:
    """Return the later colors of each color in a sweep; nothing for a sweep that visits a color twice."""
    order = [colour for group in sweep for colour in group]
    if len(set(order)) < len(order):
        return {}
    return {
        colour: [other for after in sweep[number + 1 :] for other in after]
        for number, group in enumerate(sweep)
        for colour in group
    }
