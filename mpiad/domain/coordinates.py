"""Coordinates of cells in a grid with equal spacing, and differentiable positions of points between cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array, Shape
from mpiad.domain.decomposition import per_dimension
from mpiad.domain.partition import Partition
from mpiad.primitives import stop_gradient

_ROUNDING = 1e-9  # tolerance for points at the ends of the grid, as a fraction of the spacing


class Lattice(NamedTuple):
    """Positions of the cells of a grid."""

    firsts: list[float]  # coordinate of cell 0 along each dimension
    steps: list[float]  # distance from one cell to the next


def lattice_of(
    shape: Shape, periodic: tuple[bool, ...], spacing: object, origin: object, extent: Any, centred: bool
) -> Lattice:
    """Return the positions of cells from the arguments of `Domain.coordinates`; raise a ValueError if one is invalid."""
    if extent is None:
        ndim = len(shape)
        steps = [float(h) for h in per_dimension(spacing, ndim, "spacing")]
        origins = per_dimension(origin, ndim, "origin")
        return Lattice([float(x) + centred * h / 2 for x, h in zip(origins, steps)], steps)
    firsts, steps = [], []
    for n, wraps, (low, high) in zip(shape, periodic, _ends(extent, len(shape))):
        if not high > low:
            raise ValueError(f"Domain.coordinates: extent must have ends low < high, but got ({low}, {high}).")
        # The upper end of a periodic dimension coincides with the first cell, so there are as many steps as cells.
        step = (high - low) / (n if centred or wraps else max(1, n - 1))
        firsts.append(low + step / 2 if centred else low)
        steps.append(step)
    return Lattice(firsts, steps)


def _ends(extent: float | Sequence, ndim: int) -> list[tuple[float, float]]:
    if not isinstance(extent, (Sequence, np.ndarray)):
        return [(0.0, float(extent))] * ndim
    if len(extent) != ndim:
        raise ValueError(
            f"Domain.coordinates: extent must be a length, or have a length or a pair (low, high) for each of {ndim} "
            f"dimensions, but got {extent!r}."
        )
    return [(0.0, float(e)) if np.ndim(e) == 0 else (float(e[0]), float(e[1])) for e in extent]


class Location(NamedTuple):
    """The owners of points, their cells, and their positions between cells."""

    owner: Array  # int array of shape (...); the rank that owns the cell
    # Int array of shape (..., dimensions): the index, in the whole grid, of the last cell at or before the point.
    cell: Array
    fraction: Array  # shape (..., dimensions); the distance from that cell, from 0 to 1 (the next cell)


def located(points: Array, lattice: Lattice, partition: Partition, call: str) -> Location:
    """Return the location of points; raise a TypeError or ValueError if `points` aren't points of the grid."""
    ndim, plain = len(partition.shape), np.asarray(stop_gradient(points))
    if plain.dtype.kind not in "fiu":
        raise TypeError(f"{call}: points must be an array of numbers, but got {type(points).__name__} of {plain.dtype}.")
    if plain.shape[-1:] != (ndim,):
        raise ValueError(
            f"{call}: points must have shape (..., {ndim}), one coordinate for each dimension of the grid, but have "
            f"{plain.shape}."
        )
    firsts, steps = np.array(lattice.firsts), np.array(lattice.steps)
    position = ((points if isbox(points) else plain) - firsts) / steps  # distance from cell 0, in units of the spacing
    _require_inside(plain, np.asarray(stop_gradient(position)), lattice, partition, call)
    base = np.floor(np.asarray(stop_gradient(position))).astype(np.intp)
    # For a point at the last cell, the preceding cell and the fraction one are returned, so no cell beyond it is needed.
    last = np.maximum(np.array(partition.shape) - 2, 0)
    base = np.where(np.array(partition.periodic), base, np.clip(base, 0, last))
    fraction = position - base
    cell = base % np.array(partition.shape)
    return Location(partition.owners(cell), cell, fraction)


def _require_inside(points: np.ndarray, position: np.ndarray, lattice: Lattice, partition: Partition, call: str) -> None:
    last = np.array(partition.shape) - 1
    inside = np.array(partition.periodic) & np.isfinite(position)
    # The condition is negated, so that NaN counts as outside.
    outside = ~(inside | ((position >= -_ROUNDING) & (position <= last + _ROUNDING)))
    if not outside.any():
        return
    *index, axis = np.argwhere(outside)[0].tolist()
    first, step = lattice.firsts[axis], lattice.steps[axis]
    point = tuple(points[tuple(index)].tolist())
    raise ValueError(
        f"{call}: point {index[0] if len(index) == 1 else tuple(index)} at {point} is outside of the grid along dimension "
        f"{axis}, whose {partition.shape[axis]} cells lie from {first:g} to {first + step * int(last[axis]):g}"
        f"{' (periodic, but the coordinate is not finite)' if partition.periodic[axis] else ''}. "
        f"{int(outside.any(axis=-1).sum())} of {max(1, points.size // points.shape[-1])} points are outside."
    )
