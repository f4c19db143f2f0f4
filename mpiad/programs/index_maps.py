"""Affine maps from the indices of a result to indices of the source that it reads: slices, transposes, broadcasts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided

from mpiad._typing import Shape


class Axis(NamedTuple):
    """The index along one axis of the source: `stride` times the result's index along axis `source`, plus `offset`."""

    source: int | None  # axis of the result; None if the index is constant, and then the stride is 0
    stride: int
    offset: int


IndexMap: TypeAlias = tuple[Axis, ...]  # an `Axis` for each axis of the source


def identity(ndim: int) -> IndexMap:
    """Return the map of an array to itself."""
    return tuple([Axis(k, 1, 0) for k in range(ndim)])


def is_identity(map: IndexMap, shape: Shape, made: Shape) -> bool:
    """Return whether a map is the identity, for a source of shape `shape` and a result of shape `made`."""
    return shape == made and all(axis == (k, 1, 0) or shape[k] == 1 for k, axis in enumerate(map))


def composed(inner: IndexMap, outer: IndexMap) -> IndexMap:
    """Return the composition of two maps: `inner` reads the source, and `outer` reads the result of `inner`."""
    axes = []
    for source, stride, offset in inner:
        through = Axis(None, 0, 0) if source is None else outer[source]
        axes.append(Axis(through.source, stride * through.stride, stride * through.offset + offset))
    return tuple(axes)


def shifted(map: IndexMap, axis: int, by: int) -> IndexMap:
    """Return a map with `by` added to the index along one axis of the source."""
    return tuple([old._replace(offset=old.offset + by) if k == axis else old for k, old in enumerate(map)])


def within(map: IndexMap, starts: Sequence[int]) -> IndexMap:
    """Return the map that reads from a block of the source, which begins at these indices, instead of the source."""
    return tuple([axis._replace(offset=axis.offset - start) for axis, start in zip(map, starts)])


def broadcast(shape: Shape, made: Shape) -> IndexMap:
    """Return the map that broadcasts an array of shape `shape` to shape `made`."""
    lead = len(made) - len(shape)
    pairs = enumerate(zip(shape, made[lead:]), lead)
    return tuple([Axis(None, 0, 0) if n == 1 != length else Axis(k, 1, 0) for k, (n, length) in pairs])


def without_memory(shape: Shape) -> np.ndarray:
    """Return an array for `of_view`, whose entries mustn't be read: it has the memory of one entry."""
    strides = [math.prod([max(n, 1) for n in shape[k + 1 :]]) for k in range(len(shape))]
    return as_strided(np.empty(1, np.int8), shape, strides)


def of_view(whole: np.ndarray, part: np.ndarray) -> IndexMap:
    """Return the map of a view of an array returned by `without_memory`, from its strides and its first entry."""
    offset = part.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    axes = []
    for n, stride in zip(whole.shape, whole.strides):
        ends = enumerate(zip(part.shape, part.strides))
        source = next((k for k, (length, by) in ends if length > 1 and stride <= abs(by) < n * stride), None)
        axes.append(Axis(source, 0 if source is None else part.strides[source] // stride, offset // stride))
        offset %= stride
    return tuple(axes)


def axes_of(axis: Any, ndim: int) -> set[int]:
    """Return the axes given by one integer, or by a list or tuple of integers, as nonnegative integers."""
    return {int(k) % ndim for k in (axis if isinstance(axis, (tuple, list)) else (axis,))}


def long_axes(shape: Shape) -> Shape:
    """Return the shape without axes of length 1: the index space of a loop over the array."""
    return tuple([n for n in shape if n != 1])


def to_long(shape: Shape) -> IndexMap:
    """Return the map from the indices of a loop over an array to indices of the array."""
    axes, place = [], 0
    for n in shape:
        axes.append(Axis(None, 0, 0) if n == 1 else Axis(place, 1, 0))
        place += n != 1
    return tuple(axes)


def beginning_at(starts: Sequence[int]) -> IndexMap:
    """Return the map from indices of a block to indices of the buffer in which the block begins at `starts`."""
    return tuple([Axis(k, 1, start) for k, start in enumerate(starts)])


def moved(map: IndexMap, axis: int, by: int) -> IndexMap:
    """Return a map with `by` added to the index along one axis of the result."""
    return tuple([old._replace(offset=old.offset + by * old.stride) if old.source == axis else old for old in map])


def inverse(map: IndexMap, shape: Shape, made: Shape) -> IndexMap | None:
    """Return the inverse of a view's map; None unless the view has each source entry exactly once and reverses no axis.

    `shape`: of the source. `made`: of the view.
    """
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
