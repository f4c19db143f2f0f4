"""Coarse points brought together on fewer ranks, and the correction brought back: one message each way for each rank."""

from __future__ import annotations

from typing import Any

from mpiad._typing import Array, Comm, LocalArray, Rank
from mpiad.linalg.multigrid.spread import Box, Spread
from mpiad.primitives import mpi_irecv, mpi_send, mpi_wait
from mpiad.primitives.operation import suspended
from mpiad.transport.buffers import copied, empty_beside
from mpiad.transport.tracing import restoring_state

# Far from what users choose, and below the 32767 that MPI guarantees.
_TAG_GATHER, _TAG_SCATTER = 32754, 32755


class Agglomeration:
    """The blocks of one spread as parts of those of another, whose owners own some of them already.

    `rank`: one that owns a block before. `box` (or None): what this rank owns afterwards.
    """

    def __init__(self, before: Spread, after: Spread, rank: Rank, comm: Comm):
        self._rank, self._comm, self._same = rank, comm, before == after
        position: Any = before.position(rank)
        self._mine = before.box(position)
        place = after.position(rank)
        self.box: Box | None = None if place is None else after.box(place)
        self._leader = _leader(before, after, position)
        self._members = [
            (before.owner(other), before.box(other))
            for other in before.positions()
            if self.box is not None and _leader(before, after, other) == rank
        ]

    def gather(self, block: LocalArray) -> LocalArray:
        """Return what this rank owns afterwards of a block, shape (..., *own points before); None where that is nothing.

        All ranks that own a block before call it.
        """
        if self._same:
            return block
        with restoring_state(), suspended():
            return self._gathered(block)

    def _gathered(self, block: LocalArray) -> LocalArray:
        # A block of the level above may own no coarse point at all.
        # Sends first: they don't wait, and a leader receives from its members in any order.
        if self._leader != self._rank and block.size:
            mpi_send(copied(block), self._leader, _TAG_GATHER, self._comm)
        if self.box is None:
            return None
        lead = block.shape[: block.ndim - len(self.box.low)]
        whole, coming = empty_beside(block, lead + self.box.shape), []
        for member, box in self._members:
            there = (..., *box.within(self.box))
            if member == self._rank:
                whole[there] = block
            elif whole[there].size:
                coming.append((there, mpi_irecv(whole[there], member, _TAG_GATHER, self._comm)))
        for there, request in coming:
            whole[there] = mpi_wait(request)
        return whole

    def scatter(self, whole: Array, beside: LocalArray) -> LocalArray:
        """Return this rank's points before, and one layer around them, of what was computed on those afterwards.

        `whole` has shape (..., *points), of the points that this rank owns afterwards with one layer around them, or is
        None; the result lives where `beside` does, a block of this rank's points before. All ranks that own a block before
        call it.
        """
        if self._same:
            return whole
        with restoring_state(), suspended():
            return self._scattered(whole, beside)

    def _scattered(self, whole: Array, beside: LocalArray) -> LocalArray:
        # With the layer around it, which saves the exchange that interpolation would need.
        mine = self._mine.grown(1)
        if self.box is None:
            like = empty_beside(beside, beside.shape[: beside.ndim - len(mine.low)] + mine.shape)
            return mpi_wait(mpi_irecv(like, self._leader, _TAG_SCATTER, self._comm))
        for member, box in self._members:
            if member != self._rank:
                mpi_send(copied(whole[(..., *box.grown(1).within(self.box.grown(1)))]), member, _TAG_SCATTER, self._comm)
        return whole[(..., *mine.within(self.box.grown(1)))]


def _leader(before: Spread, after: Spread, position: tuple[int, ...]) -> Rank:
    """Return who owns a block afterwards: the last of the new owners that isn't beyond it, along each dimension."""
    shares = [along[place] for along, place in zip(before.ranks, position)]
    return sum(max(kept for kept in along if kept <= share) for along, share in zip(after.ranks, shares))
