"""Points between cells: where they are, and the values of a field there, linear along each dimension.

Written with differentiable functions of the positions: within a cell the value is a polynomial of them, and from cell to
cell it is continuous.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array
from mpiad.domain.coordinates import Lattice
from mpiad.domain.partition import Partition
from mpiad.primitives import stop

__all__ = ["Location", "corner_weight", "located"]

_ROUNDING = 1e-9  # in cells: points at the very end of the grid, computed by other ways, are inside


class Location(NamedTuple):
    """Where points are."""

    owner: Array  # int array of shape (...); the rank that owns the cell
    # Int array of shape (..., dimensions). The cell before the point along each dimension, as index of the whole grid.
    cell: Array
    fraction: Array  # shape (..., dimensions); the way from there to the next cell, from 0 to 1


def located(points: Array, lattice: Lattice, partition: Partition, call: str) -> Location:
    """Return where points are.

    A TypeError where points aren't numbers; a ValueError where they have another number of coordinates than the grid, or
    one lies outside.
    """
    ndim, plain = len(partition.shape), np.asarray(stop(points))
    if plain.dtype.kind not in "fiu":
        raise TypeError(f"{call}: points must be an array of numbers, but got {type(points).__name__} of {plain.dtype}.")
    if plain.shape[-1:] != (ndim,):
        raise ValueError(
            f"{call}: points must have shape (..., {ndim}), one coordinate for each dimension of the grid, but have "
            f"{plain.shape}."
        )
    firsts, steps = np.array(lattice.firsts), np.array(lattice.steps)
    place = ((points if isbox(points) else plain) - firsts) / steps  # in cells, from cell 0
    _require_inside(plain, np.asarray(stop(place)), lattice, partition, call)
    base = np.floor(np.asarray(stop(place))).astype(np.intp)
    # A point on the last cell lies between the one before and it, with weight one, and needs no cell beyond the grid.
    last = np.maximum(np.array(partition.shape) - 2, 0)
    base = np.where(np.array(partition.periodic), base, np.clip(base, 0, last))
    # Traced where the points are: inside a cell the value is a polynomial of it, and the cell itself is constant.
    fraction = place - base
    cell = base % np.array(partition.shape)
    return Location(partition.owners(cell), cell, fraction)


def _require_inside(points: np.ndarray, place: np.ndarray, lattice: Lattice, partition: Partition, call: str) -> None:
    last = np.array(partition.shape) - 1
    inside = np.array(partition.periodic) & np.isfinite(place)
    # Written so that NaN is outside.
    outside = ~(inside | ((place >= -_ROUNDING) & (place <= last + _ROUNDING)))
    if not outside.any():
        return
    *which, axis = np.argwhere(outside)[0].tolist()
    first, step = lattice.firsts[axis], lattice.steps[axis]
    point = tuple(points[tuple(which)].tolist())
    raise ValueError(
        f"{call}: point {which[0] if len(which) == 1 else tuple(which)} at {point} is outside of the grid along dimension "
        f"{axis}, whose {partition.shape[axis]} cells lie from {first:g} to {first + step * int(last[axis]):g}"
        f"{' (periodic, but the coordinate is not finite)' if partition.periodic[axis] else ''}. "
        f"{int(outside.any(axis=-1).sum())} of {max(1, points.size // points.shape[-1])} points are outside."
    )


def corner_weight(fraction: Array, step: tuple[int, ...]) -> Array:
    """Return the weight of one corner of a cell: the product of those along each dimension."""
    weight = 1.0
    for axis, s in enumerate(step):
        weight = weight * (fraction[:, axis] if s else 1.0 - fraction[:, axis])
    return weight
