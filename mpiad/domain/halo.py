"""Halo exchange: a block with the layers of cells around it that other ranks own, and its transpose.

One dimension after the other: the layers that are sent along a dimension hold the halo of the dimensions before it, so
that corners arrive without messages of their own, and the physical sides are filled as `numpy.pad` fills them. The
transpose goes the other way and adds every halo cell's cotangent to the cell it was copied from, on its owner's rank.
Both are one node on the tape, and each is the other's derivative.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Comm, LocalArray, Rank, Shape
from mpiad.domain.boundary import Sides, homogeneous
from mpiad.extend import communicating, defjvp, defvjp
from mpiad.primitives import mpi_irecv, mpi_send, mpi_wait

__all__ = ["Halo", "fill_halo", "fold_halo"]

# Far from what users choose, and below the 32767 that MPI guarantees.
_TAG_UP, _TAG_DOWN = 32750, 32751


class Copy(NamedTuple):
    """One side's halo, the cells it is a copy of, and the ranks that own these and that copy this rank's.

    Parameters
    ----------
    owned : index
        This rank's layers that `dest` copies.
    ghost : index
        This rank's halo, a copy of layers that `source` owns.
    dest, source : int or None
        None beyond a physical side.
    tag : int
    """

    owned: tuple[Any, ...]
    ghost: tuple[Any, ...]
    dest: Rank | None
    source: Rank | None
    tag: int


class Beyond(NamedTuple):
    """A halo beyond a physical side.

    Parameters
    ----------
    ghost : index
        The halo.
    copied : index or None
        The layers it is a copy of, None where it holds a value.
    axis, place : int
        Its dimension, and 0 or 1 for before or after.
    """

    ghost: tuple[Any, ...]
    copied: tuple[Any, ...] | None
    axis: int
    place: int


class Halo:
    """Where a block's halo comes from.

    Parameters
    ----------
    shape : tuple of int
        Cells of the block.
    widths : tuple of int
        Layers on each side, for each dimension.
    neighbours : tuple of pairs of int or None
        Ranks before and after, for each dimension; None beyond a physical side.
    rank : int
        This rank.
    comm : mpi4py intracommunicator or None

    Attributes
    ----------
    padded : tuple of int
        Cells of the block with its halo.
    interior : index
        The block within the block with its halo.
    copies : list of tuples of Copy
        Of each dimension, towards higher and towards lower coordinates; empty where its halo has no width.
    """

    def __init__(
        self,
        shape: Shape,
        widths: tuple[int, ...],
        neighbours: tuple[tuple[Rank | None, Rank | None], ...],
        rank: Rank,
        comm: Comm,
    ):
        self.shape, self.widths, self.neighbours, self.rank, self.comm = shape, widths, neighbours, rank, comm
        self.padded = tuple(n + 2 * h for n, h in zip(shape, widths))
        self.interior = (..., *[slice(h, h + n) for n, h in zip(shape, widths)])
        self.copies = [self._copies(axis) if h else () for axis, h in enumerate(widths)]
        self._beyond: dict[tuple, list[list[Beyond]]] = {}

    def layers(self, axis: int, along: slice) -> tuple[Any, ...]:
        """Return the index of layers along a dimension: with the halo of those before, without that of those after."""
        after = [slice(h, h + n) for n, h in zip(self.shape[axis + 1 :], self.widths[axis + 1 :])]
        return (..., *([slice(None)] * axis), along, *after)

    def _copies(self, axis: int) -> tuple[Copy, Copy]:
        n, h = self.shape[axis], self.widths[axis]
        low, high = self.neighbours[axis]
        last, before = self.layers(axis, slice(n, n + h)), self.layers(axis, slice(0, h))
        first, after = self.layers(axis, slice(h, 2 * h)), self.layers(axis, slice(n + h, n + 2 * h))
        return Copy(last, before, high, low, _TAG_UP), Copy(first, after, low, high, _TAG_DOWN)

    def beyond(self, sides: Sides) -> list[list[Beyond]]:
        """Return, for each dimension, how the halo beyond its physical sides is filled."""
        kinds = tuple([kind if type(kind) is str else None for pair in sides for kind in pair])
        if kinds not in self._beyond:
            self._beyond[kinds] = [
                [self._one_beyond(axis, place, kinds[2 * axis + place]) for place in (0, 1) if pair[place] is None and h]
                for axis, (pair, h) in enumerate(zip(self.neighbours, self.widths))
            ]
        return self._beyond[kinds]

    def _one_beyond(self, axis: int, place: int, kind: str | None) -> Beyond:
        n, h = self.shape[axis], self.widths[axis]
        ghost = slice(0, h) if place == 0 else slice(n + h, n + 2 * h)
        edge = h if place == 0 else n + h - 1
        copied = None
        if kind == "edge":
            copied = slice(edge, edge + 1)
        elif kind == "reflect":
            # The layers next to the edge, the nearest last on the low side and first on the high side.
            first = edge + h if place == 0 else edge - 1
            copied = slice(first, first - h if first >= h else None, -1)
        return Beyond(self.layers(axis, ghost), None if copied is None else self.layers(axis, copied), axis, place)


@communicating
def fill_halo(u: LocalArray, halo: Halo, sides: Sides) -> LocalArray:
    """Return the block with its halo.

    Parameters
    ----------
    u : array of shape (..., *halo.shape)
    halo : Halo
    sides : Sides
        What lies beyond physical sides.

    Returns
    -------
    array of shape (..., *halo.padded)

    Ranks
    -----
    All ranks of the domain call it.

    Adjoint
    -------
    `fold_halo`
    """
    lead = u.shape[: u.ndim - len(halo.shape)]
    out = np.empty(lead + halo.padded, u.dtype)
    out[halo.interior] = u
    for copies, beyond in zip(halo.copies, halo.beyond(sides)):
        _receive_halo(out, halo, copies)
        for side in beyond:
            out[side.ghost] = sides[side.axis][side.place] if side.copied is None else out[side.copied]
    return out


@communicating
def fold_halo(g: LocalArray, halo: Halo, sides: Sides) -> LocalArray:
    """Add what belongs to halo cells to the cells that they are copies of.

    Parameters
    ----------
    g : array of shape (..., *halo.padded)
    halo : Halo
    sides : Sides
        What lies beyond physical sides.

    Returns
    -------
    array of shape (..., *halo.shape)

    Ranks
    -----
    All ranks of the domain call it.

    Adjoint
    -------
    `fill_halo`, with zero for the values of `sides`
    """
    total = np.array(g)
    for copies, beyond in zip(reversed(halo.copies), reversed(halo.beyond(sides))):
        for side in beyond:
            if side.copied is not None:
                _fold_beyond(total, side, sides[side.axis][side.place] == "edge", len(halo.shape))
        _return_halo(total, halo, copies)
    return total[halo.interior].copy()


# Filling copies cells (a row of ones and zeros for each, but for the given values); folding is its transpose.
defvjp(fill_halo, lambda ans, u, halo, sides: lambda g: fold_halo(g, halo, sides))
defjvp(fill_halo, lambda du, ans, u, halo, sides: fill_halo(du, halo, homogeneous(sides)))
defvjp(fold_halo, lambda ans, g, halo, sides: lambda v: fill_halo(v, halo, homogeneous(sides)))
defjvp(fold_halo, lambda dg, ans, g, halo, sides: fold_halo(dg, halo, sides))


def _fold_beyond(total: np.ndarray, side: Beyond, repeated: bool, ndim: int) -> None:
    layers = total[side.ghost]
    total[side.copied] += layers.sum(axis=side.axis - ndim, keepdims=True) if repeated else layers


def _receive_halo(out: np.ndarray, halo: Halo, copies: tuple[Copy, ...]) -> None:
    coming = []
    for copy in copies:
        if copy.source == halo.rank:
            out[copy.ghost] = out[copy.owned]
        elif copy.source is not None:
            coming.append((copy.ghost, mpi_irecv(out[copy.ghost], copy.source, copy.tag, halo.comm)))
    for copy in copies:
        if copy.dest is not None and copy.dest != halo.rank:
            mpi_send(out[copy.owned], copy.dest, copy.tag, halo.comm)
    for ghost, request in coming:
        out[ghost] = mpi_wait(request)


def _return_halo(total: np.ndarray, halo: Halo, copies: tuple[Copy, ...]) -> None:
    coming = []
    for copy in copies:
        if copy.dest is not None and copy.dest != halo.rank:
            coming.append((copy.owned, mpi_irecv(total[copy.owned], copy.dest, copy.tag, halo.comm)))
    for copy in copies:
        if copy.source == halo.rank:
            total[copy.owned] += total[copy.ghost]
        elif copy.source is not None:
            mpi_send(total[copy.ghost], copy.source, copy.tag, halo.comm)
    for owned, request in coming:
        total[owned] += mpi_wait(request)
