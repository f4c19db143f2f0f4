"""From a domain's arguments to its partition, checked and agreed on by all ranks."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

from mpiad._typing import Shape
from mpiad.domain.partition import Partition, choose_dims
from mpiad.transport import Channel
from mpiad.transport.agreement import raising_together, require_same

__all__ = ["layout", "per_dimension"]

PerDimension: TypeAlias = "int | Sequence[int]"
"""A number for all dimensions, or one for each."""


def layout(
    channel: Channel, shape: PerDimension, halo: PerDimension, periodic: bool | Sequence[bool], dims: PerDimension | None
) -> tuple[Partition, tuple[int, ...]]:
    """Return the partition and the halo's width along each dimension.

    Parameters
    ----------
    shape, halo, periodic, dims
        As `Domain` takes them.

    Raises
    ------
    TypeError, ValueError
        On all ranks: see `Domain`.

    Ranks
    -----
    All ranks of the channel call it.
    """
    # Before the comparison: who raised alone would leave the others in it.
    with raising_together(channel):
        made = _made(channel.size, shape, halo, periodic, dims)
    require_same(channel, f"shape={shape!r}, halo={halo!r}, periodic={periodic!r}, dims={dims!r}", "Domain")
    return made


def _made(
    size: int, shape: PerDimension, halo: PerDimension, periodic: bool | Sequence[bool], dims: PerDimension | None
) -> tuple[Partition, tuple[int, ...]]:
    cells = _shape(shape)
    ndim = len(cells)
    widths = tuple(_integers(per_dimension(halo, ndim, "halo"), "halo", 0))
    wraps = tuple(map(bool, per_dimension(periodic, ndim, "periodic")))
    ranks = _chosen(size, cells, widths, wraps) if dims is None else _given(size, cells, widths, wraps, dims)
    return Partition(cells, ranks, wraps), widths


def _shape(shape: int | Sequence[int]) -> Shape:
    cells = tuple(_integers(shape if isinstance(shape, Sequence) else [shape], "shape", 1))
    if not 1 <= len(cells) <= 3:
        raise ValueError(f"Domain: shape must have 1, 2 or 3 dimensions, but got {shape!r}.")
    return cells


def per_dimension(value: Any, ndim: int, argument: str) -> list[Any]:
    """Return one entry for each dimension, of one for all or of a sequence.

    Raises
    ------
    ValueError
        Where the sequence has another length.
    """
    if isinstance(value, str) or not hasattr(value, "__len__"):
        return [value] * ndim
    if len(value) != ndim:
        raise ValueError(f"Domain: {argument} must have one entry for each of {ndim} dimensions, but got {value!r}.")
    return list(value)


def _integers(values: Sequence[Any], argument: str, least: int) -> list[int]:
    try:
        found = [operator.index(value) for value in values]
    except TypeError:
        raise TypeError(f"Domain: {argument} must be an integer or a tuple of integers, but got {values!r}.") from None
    if found and min(found) < least:
        raise ValueError(f"Domain: {argument} must be {least} or more along each dimension, but got {tuple(found)}.")
    return found


def _chosen(size: int, cells: Shape, widths: tuple[int, ...], wraps: tuple[bool, ...]) -> tuple[int, ...]:
    found = choose_dims(cells, size, widths, wraps)
    if found is None:
        raise ValueError(
            f"Domain: {cells} cells can't be divided among {size} ranks so that each block has at least one cell, and "
            f"no fewer than the halo of {widths} along each dimension. Use fewer ranks, a larger grid or a smaller halo."
        )
    return found


def _given(
    size: int, cells: Shape, widths: tuple[int, ...], wraps: tuple[bool, ...], dims: int | Sequence[int] | None
) -> tuple[int, ...]:
    ranks = tuple(_integers(per_dimension(dims, len(cells), "dims"), "dims", 1))
    if math.prod(ranks) != size:
        raise ValueError(
            f"Domain: dims {ranks} make {math.prod(ranks)} blocks, but the communicator has {size} ranks. "
            "Their product must be the number of ranks; None chooses them."
        )
    for axis, (n, p, h) in enumerate(zip(cells, ranks, widths)):
        if n < p:
            raise ValueError(
                f"Domain: {n} cells along dimension {axis} can't be divided among {p} ranks: some would own nothing. "
                "Use fewer ranks along it, or a larger grid."
            )
        # A rank exchanges with those beside it alone, so a halo can't reach beyond them.
        if n // p < h:
            raise ValueError(
                f"Domain: the halo is {h} wide along dimension {axis}, but the smallest of the {p} blocks of {n} cells "
                f"has {n // p}. Use a smaller halo, fewer ranks along it, or a larger grid."
            )
    return ranks
