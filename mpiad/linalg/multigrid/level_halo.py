"""The halo of a level's arrays: one layer, of the colours that were changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Comm, LocalArray, Rank
from mpiad.linalg.multigrid.colour_layout import Colour, Layout
from mpiad.linalg.multigrid.spread import Spread
from mpiad.primitives import mpi_irecv, mpi_send, mpi_wait
from mpiad.primitives.operation import suspended
from mpiad.transport.buffers import empty_beside
from mpiad.transport.tracing import restoring_state

# Far from what users choose, and below the 32767 that MPI guarantees.
_TAG_UP, _TAG_DOWN = 32752, 32753


class _Side(NamedTuple):
    """One side of a block: the layer that its neighbour gets, the layer of the halo, and their parities."""

    rank: Rank
    axis: int
    own: int
    own_parity: int
    ghost: int
    ghost_parity: int
    tag: int
    tag_back: int


class LevelHalo:
    """Where the halo of a block of a level comes from."""

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
                # Entries of the colour that the layer has, one further for the halo's own.
                place = [index // 2 - first + 1 for index in (own, ghost)]
                sides.append(_Side(rank, axis, place[0], own % 2, place[1], ghost % 2, *tags))
        return sides

    def fill(self, arrays: Mapping[Colour, LocalArray]) -> None:
        """Fill the halo, corners included, of arrays (..., size) of some colours; all ranks call it with the same ones."""
        if self._needed and arrays:
            whole = {colour: self._layout.whole(array) for colour, array in arrays.items()}
            # One dimension after the other: what is sent along one holds the halo of those before, so corners arrive.
            # Suspended once more: an exception that comes after these messages has left none of them under way.
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
        # The layer before the block is the last one of its own, and the other way round.
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
