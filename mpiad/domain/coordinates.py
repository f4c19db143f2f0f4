"""Coordinates of a block's cells in a grid with equal spacing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import LocalArray, Shape
from mpiad.domain.decomposition import per_dimension

__all__ = ["Lattice", "lattice_of", "points_along"]


class Lattice(NamedTuple):
    """Where the cells of a grid lie."""

    firsts: list[float]  # coordinate of cell 0 along each dimension
    steps: list[float]  # distance from one cell to the next


def lattice_of(
    shape: Shape, periodic: tuple[bool, ...], spacing: object, origin: object, extent: Any, centred: bool
) -> Lattice:
    """Return where cells lie, from the arguments of `Domain.coordinates`.

    A ValueError where one has another number of entries than the grid has dimensions, or an extent has no length.
    """
    if extent is not None:
        return Lattice(*spacing_of(shape, periodic, extent, centred))
    ndim = len(shape)
    steps = [float(h) for h in per_dimension(spacing, ndim, "spacing")]
    return Lattice([float(x) + centred * h / 2 for x, h in zip(per_dimension(origin, ndim, "origin"), steps)], steps)


def spacing_of(
    shape: Shape,
    periodic: tuple[bool, ...],
    extent: float | Sequence,
    centred: bool,
) -> tuple[list[float], list[float]]:
    """Return the first coordinate and the spacing along each dimension of a grid that fills an extent.

    An extent is a length from 0, or lower and upper end, for all dimensions or each. Points are the centres of equal cells
    where `centred`; else the first and the last are on the ends (on a periodic dimension the upper end is the first point
    again). A ValueError where it doesn't have one entry for each dimension, or an end is not above the other.
    """
    firsts, steps = [], []
    for n, wraps, (low, high) in zip(shape, periodic, _ends(extent, len(shape))):
        if not high > low:
            raise ValueError(f"Domain.coordinates: extent must go from a lower to a higher end, but got ({low}, {high}).")
        # Around a ring the last cell is followed by the first, so there are as many steps as cells.
        step = (high - low) / (n if centred or wraps else max(1, n - 1))
        firsts.append(low + step / 2 if centred else low)
        steps.append(step)
    return firsts, steps


def _ends(extent: float | Sequence, ndim: int) -> list[tuple[float, float]]:
    if not isinstance(extent, (Sequence, np.ndarray)):
        # One length: each dimension goes from zero to it.
        return [(0.0, float(extent))] * ndim
    if len(extent) != ndim:
        raise ValueError(
            f"Domain.coordinates: extent must be a length or hold a length or a pair (low, high) for each of {ndim} "
            f"dimensions, but got {extent!r}."
        )
    return [(0.0, float(e)) if np.ndim(e) == 0 else (float(e[0]), float(e[1])) for e in extent]


def points_along(axis: int, ndim: int, start: int, stop: int, first: float, step: float) -> LocalArray:
    """Return coordinates of the cells from `start` to `stop` along one dimension, in a shape that broadcasts."""
    shape = [1] * ndim
    shape[axis] = stop - start
    return (first + step * np.arange(start, stop)).reshape(shape)
