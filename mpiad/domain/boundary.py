"""Boundary conditions: beyond a physical side of the grid, a halo cell is a value plus a factor times a cell of the block.

The named kinds of boundary are the entries of `_KINDS`. All code that depends on the kind is in this file.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from autograd.tracer import getval, isbox

from mpiad._typing import Array, LocalArray

Boundary: TypeAlias = Any
"""The argument `boundary`: a name or number for all sides, or a tuple with one entry per dimension.

An entry is a name or number for both sides of its dimension, or a pair (before, after) of names or numbers.
"""


def _edge(n: int, h: int, end: int) -> slice:
    """Return the outermost layer of a block of n cells at its low (end=0) or high (end=1) side; the halo has h layers."""
    edge = h if end == 0 else n + h - 1
    return slice(edge, edge + 1)


def _reflected(n: int, h: int, end: int) -> slice:
    """Return the h layers next to the outermost one, in reverse order, as `numpy.pad` reflects them."""
    first = 2 * h if end == 0 else n + h - 2
    return slice(first, first - h if first >= h else None, -1)


class Side(NamedTuple):
    """The values of halo cells beyond one side of the grid: value + factor * layers."""

    # ``layers(n, h, end)`` returns the slice of the copied layers in a block with its halo: h layers, or one repeated
    # layer. With None nothing is copied.
    layers: Callable[[int, int, int], slice] | None = None
    # Minimum number of cells of the grid along the dimension, minus the width of the halo; None if any number suffices.
    extra_cells: int | None = None
    factor: complex = 1
    value: Array = 0

    def filled(self, layers: LocalArray | None) -> Array:
        """Return the values of the halo, given the copied layers of the block."""
        if layers is None:
            return self.value
        scaled = layers if self.factor == 1 else self.factor * layers
        return scaled if type(self.value) is int and self.value == 0 else scaled + self.value

    def folded(self, halo: LocalArray, layers: LocalArray, axis: int) -> LocalArray:
        """Return the cotangent of the layers from the halo's cotangent: the transpose of the linear part of `filled`."""
        # If all layers of the halo are copies of one layer, their cotangents are added.
        total = halo if layers.shape == halo.shape else halo.sum(axis=axis, keepdims=True)
        return total if self.factor == 1 else self.factor * total


Sides: TypeAlias = tuple[tuple[Side, Side], ...]
"""For each dimension, the boundaries before its first cell and after its last cell."""

ZERO = Side()
_KINDS = {"zero": ZERO, "edge": Side(_edge), "reflect": Side(_reflected, extra_cells=1)}
_NAMES = ", ".join(f'"{name}"' for name in _KINDS)
_ALLOWED = f"one of {_NAMES} or a number; or, in a tuple, one of these or a pair for each dimension"


def sides_of(boundary: Boundary, ndim: int, call: str) -> Sides:
    """Return the boundary of each side; raise a ValueError or TypeError if the argument is invalid."""
    return tuple((_side(low, call), _side(high, call)) for low, high in pairs_of(boundary, ndim, _ALLOWED, call))


def pairs_of(boundary: Boundary, ndim: int, allowed: str, call: str) -> list[tuple[Boundary, ...]]:
    """Return a pair of entries, before and after, for each dimension; raise a ValueError for a wrong number of entries."""
    entries = boundary if isinstance(boundary, (tuple, list)) else (boundary,) * ndim
    if len(entries) != ndim:
        raise ValueError(
            f"{call}: boundary has {len(entries)} entries for a grid of {ndim} dimensions: {boundary!r}. "
            f"It must be {allowed}."
        )
    pairs = [tuple(entry) if isinstance(entry, (tuple, list)) else (entry, entry) for entry in entries]
    for pair in pairs:
        if len(pair) != 2:
            raise ValueError(f"{call}: a dimension has two sides, but boundary has {len(pair)} entries for it: {pair!r}.")
    return pairs


def _side(kind: object, call: str) -> Side:
    if isinstance(kind, str):
        if kind in _KINDS:
            return _KINDS[kind]
        raise ValueError(f"{call}: boundary must be {_ALLOWED}, but got {kind!r}.")
    if isbox(kind) or (isinstance(kind, Number) and not isinstance(kind, bool)):
        return Side(value=kind)
    if isinstance(kind, np.ndarray) and kind.ndim == 0:
        return Side(value=kind[()])
    raise TypeError(f"{call}: boundary must be {_ALLOWED}, but got {type(kind).__name__} {kind!r}.")


def homogeneous(sides: Sides) -> Sides:
    """Return the boundaries of the derivative of an exchange: the same factors, and values of zero."""
    return tuple([(low._replace(value=0), high._replace(value=0)) for low, high in sides])


def shifted(sides: Sides, call: str) -> tuple[Array | None, Sides]:
    """Return the traced boundary value v (None if no value is traced), and the sides with zero instead of v."""
    # An exchange of u with the value v is equal to an exchange of u - v with the value zero, plus v; v must be one number.
    all_sides = [side for pair in sides for side in pair]
    values = [side.value for side in all_sides if side.layers is None]
    traced = [side.value for side in all_sides if isbox(side.value)]
    if not traced:
        return None, sides
    value = traced[0]
    shape = np.shape(getval(value))
    # v is subtracted from all cells of u, so other sides must copy layers with factor one and value zero.
    uniform = all(side.value is value if side.layers is None else side[2:] == (1, 0) for side in all_sides)
    if shape != () or not uniform:
        raise TypeError(
            f"{call}: a traced boundary value must be one number, the same on all sides that have a value, but got "
            f"shape {shape} and {values!r}. Exchange with zero on these sides, and add the contributions of the values."
        )
    return value, homogeneous(sides)


def check_values(sides: Sides, dtype: np.dtype, call: str) -> None:
    """Raise a TypeError if a boundary value can't be cast to the field's dtype by the rule "same_kind", or overflows."""
    for value in [side.value for pair in sides for side in pair]:
        fits = not value or np.can_cast(np.min_scalar_type(value), dtype, "same_kind")
        if not fits or dtype.kind in "iu" and not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
            raise TypeError(
                f"{call}: the boundary value {value!r} doesn't fit into an array of dtype {dtype}. Convert the array first."
            )
