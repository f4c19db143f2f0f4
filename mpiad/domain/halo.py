"""Halo exchange: a block with the layers of cells around it that other ranks own, and its transpose.

One dimension after the other: the layers that are sent along a dimension hold the halo of the dimensions before it, so
that corners arrive without messages of their own, and the physical sides are filled as `numpy.pad` fills them. The
transpose goes the other way and adds every halo cell's cotangent to the cell it was copied from, on its owner's rank.
Both are one node on the tape, and each is the other's derivative.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Comm, LocalArray, Rank, Shape
from mpiad.domain.boundary import Side, Sides, homogeneous
from mpiad.extend import communicating, defjvp, defvjp
from mpiad.primitives import mpi_exchange

__all__ = ["Halo", "fill_halo", "fold_halo"]

# Far from what users choose, and below the 32767 that MPI guarantees.
_TAG_UP, _TAG_DOWN = 32750, 32751


class Halo(NamedTuple):
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
    """

    shape: Shape
    widths: tuple[int, ...]
    neighbours: tuple[tuple[Rank | None, Rank | None], ...]
    rank: Rank
    comm: Comm

    @property
    def padded(self) -> Shape:
        """Return the cells of the block with its halo."""
        return tuple(n + 2 * h for n, h in zip(self.shape, self.widths))

    def layers(self, axis: int, along: slice) -> tuple[Any, ...]:
        """Return the index of some layers along a dimension: with the halo of those before, without that of those after."""
        after = [slice(h, h + n) for n, h in zip(self.shape[axis + 1 :], self.widths[axis + 1 :])]
        return (..., *([slice(None)] * axis), along, *after)

    def interior(self) -> tuple[Any, ...]:
        """Return the index of the block within the block with its halo."""
        return (..., *[slice(h, h + n) for n, h in zip(self.shape, self.widths)])


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
    out[halo.interior()] = u
    for axis, width in enumerate(halo.widths):
        if width:
            _receive_halo(out, halo, axis)
            for place, kind in _physical_sides(halo, axis, sides):
                _fill_side(out, halo, axis, place, kind)
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
    for axis in reversed(range(len(halo.widths))):
        if halo.widths[axis]:
            for place, kind in _physical_sides(halo, axis, sides):
                _fold_side(total, halo, axis, place, kind)
            _return_halo(total, halo, axis)
    return total[halo.interior()].copy()


# Filling copies cells (a row of ones and zeros for each, but for the given values); folding is its transpose.
defvjp(fill_halo, lambda ans, u, halo, sides: lambda g: fold_halo(g, halo, sides))
defjvp(fill_halo, lambda du, ans, u, halo, sides: fill_halo(du, halo, homogeneous(sides)))
defvjp(fold_halo, lambda ans, g, halo, sides: lambda v: fill_halo(v, halo, homogeneous(sides)))
defjvp(fold_halo, lambda dg, ans, g, halo, sides: fold_halo(dg, halo, sides))


def _steps(halo: Halo, axis: int) -> Iterator[tuple[tuple, tuple, Rank | None, Rank | None, int]]:
    """Yield for each direction what is sent, the halo that is received, to whom, from whom, and the tag."""
    n, h = halo.shape[axis], halo.widths[axis]
    low, high = halo.neighbours[axis]
    last, before = halo.layers(axis, slice(n, n + h)), halo.layers(axis, slice(0, h))
    first, after = halo.layers(axis, slice(h, 2 * h)), halo.layers(axis, slice(n + h, n + 2 * h))
    yield last, before, high, low, _TAG_UP
    yield first, after, low, high, _TAG_DOWN


def _receive_halo(out: np.ndarray, halo: Halo, axis: int) -> None:
    for owned, ghost, dest, source, tag in _steps(halo, axis):
        if dest == halo.rank:
            out[ghost] = out[owned]
            continue
        if dest is not None or source is not None:
            came = mpi_exchange(out[owned], dest, source, tag=tag, comm=halo.comm)
            if source is not None:
                out[ghost] = came


def _return_halo(total: np.ndarray, halo: Halo, axis: int) -> None:
    for owned, ghost, dest, source, tag in _steps(halo, axis):
        if dest == halo.rank:
            total[owned] += total[ghost]
            continue
        if dest is not None or source is not None:
            came = mpi_exchange(total[ghost], source, dest, tag=tag, comm=halo.comm)
            if dest is not None:
                total[owned] += came


def _physical_sides(halo: Halo, axis: int, sides: Sides) -> Iterator[tuple[int, Side]]:
    for place in (0, 1):
        if halo.neighbours[axis][place] is None:
            yield place, sides[axis][place]


def _fill_side(out: np.ndarray, halo: Halo, axis: int, place: int, kind: Side) -> None:
    ghosts, copied = _side_layers(halo, axis, place, kind)
    out[ghosts] = kind if copied is None else out[copied]


def _fold_side(total: np.ndarray, halo: Halo, axis: int, place: int, kind: Side) -> None:
    ghosts, copied = _side_layers(halo, axis, place, kind)
    if kind == "edge":
        along = axis - len(halo.shape)
        total[copied] += total[ghosts].sum(axis=along, keepdims=True)
    elif copied is not None:
        total[copied] += total[ghosts]


def _side_layers(halo: Halo, axis: int, place: int, kind: Side) -> tuple[tuple, tuple | None]:
    """Return the halo beyond a physical side and the layers it is a copy of, None where it is a value."""
    n, h = halo.shape[axis], halo.widths[axis]
    ghosts = slice(0, h) if place == 0 else slice(n + h, n + 2 * h)
    edge = h if place == 0 else n + h - 1
    copied = None
    if kind == "edge":
        copied = slice(edge, edge + 1)
    elif kind == "reflect":
        # The layers next to the edge, the nearest last on the low side and first on the high side.
        first = edge + h if place == 0 else edge - 1
        copied = slice(first, first - h if first >= h else None, -1)
    return halo.layers(axis, ghosts), None if copied is None else halo.layers(axis, copied)
