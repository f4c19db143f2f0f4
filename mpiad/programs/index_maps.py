"""Affine maps from the indices of a resulting array to those of a source: slices, transposes, broadcasts, compositions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from mpiad._typing import Shape


class Axis(NamedTuple):
    """The index along one axis of the array that is read: stride times an index of the resulting array, plus offset."""

    source: int | None  # axis of the resulting array; None if the index is constant, the offset
    stride: int
    offset: int


IndexMap: TypeAlias = tuple[Axis, ...]
"""One `Axis` for each axis of the array that is read."""


def identity(ndim: int) -> IndexMap:
    """Return the map of an array to itself."""
    return tuple([Axis(k, 1, 0) for k in range(ndim)])


def is_identity(map: IndexMap, shape: Shape, made: Shape) -> bool:
    """Return whether a map from an array of a given shape is the identity."""
    return shape == made and all(axis == (k, 1, 0) or shape[k] == 1 for k, axis in enumerate(map))


def composed(inner: IndexMap, outer: IndexMap) -> IndexMap:
    """Return the composition of two maps: `inner` reads the source, and `outer` reads the result of that."""
    axes = []
    for source, stride, offset in inner:
        through = Axis(None, 0, 0) if source is None else outer[source]
        axes.append(Axis(through.source, stride * through.stride, stride * through.offset + offset))
    return tuple(axes)


def shifted(map: IndexMap, axis: int, by: int) -> IndexMap:
    """Return a map with the index along one axis of the source shifted."""
    return tuple([old._replace(offset=old.offset + by) if k == axis else old for k, old in enumerate(map)])


def within(map: IndexMap, starts: Sequence[int]) -> IndexMap:
    """Return a map from an array as a map from its block that begins at these indices."""
    return tuple([axis._replace(offset=axis.offset - start) for axis, start in zip(map, starts)])


def broadcast(shape: Shape, made: Shape) -> IndexMap:
    """Return the map by which an array is broadcast to a shape."""
    lead = len(made) - len(shape)
    pairs = enumerate(zip(shape, made[lead:]), lead)
    return tuple([Axis(None, 0, 0) if n == 1 != length else Axis(k, 1, 0) for k, (n, length) in pairs])


def of_key(shape: Shape, key: Sequence[int | slice | None]) -> tuple[IndexMap, Shape]:
    """Return the map of a basic index, without Ellipsis and with an entry for each axis, and the shape of the result."""
    axes: list[Axis] = []
    made: list[int] = []
    for part in key:
        if part is None:
            made.append(1)
        elif isinstance(part, slice):
            start, stop, step = part.indices(shape[len(axes)])
            axes.append(Axis(len(made), step, start))
            made.append(len(range(start, stop, step)))
        else:
            axes.append(Axis(None, 0, part % shape[len(axes)] if part < 0 else part))
    return tuple(axes), tuple(made)


def axes_of(axis: Any, ndim: int) -> set[int]:
    """Return the axes given by one or several integers, as nonnegative integers."""
    return {int(k) % ndim for k in (axis if isinstance(axis, (tuple, list)) else (axis,))}


def long_axes(shape: Shape) -> Shape:
    """Return the lengths of the axes with more than one entry, which are the index space of loops."""
    return tuple([n for n in shape if n != 1])


def to_long(shape: Shape) -> IndexMap:
    """Return the map from the indices of loops over an array to the array's."""
    axes, place = [], 0
    for n in shape:
        axes.append(Axis(None, 0, 0) if n == 1 else Axis(place, 1, 0))
        place += n != 1
    return tuple(axes)


def beginning_at(starts: Sequence[int]) -> IndexMap:
    """Return the map from a block's indices to those of a buffer in which the block begins at `starts`."""
    return tuple([Axis(k, 1, start) for k, start in enumerate(starts)])


def moved(map: IndexMap, axis: int, by: int) -> IndexMap:
    """Return a map with the index along one axis of the resulting array shifted."""
    return tuple([old._replace(offset=old.offset + by * old.stride) if old.source == axis else old for old in map])


def inverse(map: IndexMap, shape: Shape, made: Shape) -> IndexMap | None:
    """Return the inverse map of a view, None if the view doesn't contain every entry of its source, in order."""
    back: list[Axis] = [Axis(None, 0, 0)] * len(made)
    for k, (source, stride, offset) in enumerate(map):
        if source is None:
            if shape[k] != 1:
                return None
        elif (stride, offset) != (1, 0) or made[source] != shape[k] or back[source].source is not None:
            return None
        else:
            back[source] = Axis(k, 1, 0)
    return tuple(back) if all(made[k] == 1 or axis.source is not None for k, axis in enumerate(back)) else None
