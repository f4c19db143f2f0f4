"""What lies beyond the physical sides of a grid: a value, the edge repeated, or the reflection in the edge."""

from __future__ import annotations

from numbers import Number
from typing import Any, TypeAlias

import numpy as np
from autograd.tracer import getval, isbox

__all__ = ["Boundary", "Side", "Sides", "check_values", "homogeneous", "shifted", "sides_of"]

Side: TypeAlias = Any
"""One of "edge", "reflect", or a number."""
Sides: TypeAlias = tuple[tuple[Side, Side], ...]
"""For each dimension what lies before its first cell and after its last."""
Boundary: TypeAlias = Any
"""What users give: a side or "zero", for all sides; or a tuple of one, or of a pair, for each dimension."""

_ALLOWED = 'one of "zero", "edge", "reflect" or a number; or, in a tuple, one of these or a pair for each dimension'


def sides_of(boundary: Boundary, ndim: int, call: str) -> Sides:
    """Return what lies beyond each side.

    Raises
    ------
    ValueError
        Where the text or the number of dimensions isn't right.
    TypeError
        For anything else than text, numbers and tuples of them.
    """
    if not isinstance(boundary, (tuple, list)):
        return ((_side(boundary, call),) * 2,) * ndim
    if len(boundary) != ndim:
        raise ValueError(
            f"{call}: boundary has {len(boundary)} entries for a grid of {ndim} dimensions: {boundary!r}. "
            f"It must be {_ALLOWED}."
        )
    return tuple(_pair(along, call) for along in boundary)


def _pair(along: Any, call: str) -> tuple[Side, Side]:
    if not isinstance(along, (tuple, list)):
        return (_side(along, call),) * 2
    if len(along) != 2:
        raise ValueError(f"{call}: a dimension has two sides, but boundary gives it {len(along)}: {along!r}.")
    return _side(along[0], call), _side(along[1], call)


def _side(kind: Any, call: str) -> Side:
    if isinstance(kind, str):
        if kind == "zero":
            return 0
        if kind in ("edge", "reflect"):
            return kind
        raise ValueError(f"{call}: boundary must be {_ALLOWED}, but got {kind!r}.")
    if isbox(kind) or (isinstance(kind, Number) and not isinstance(kind, bool)):
        return kind
    if isinstance(kind, np.ndarray) and kind.ndim == 0:
        return kind[()]
    raise TypeError(f"{call}: boundary must be {_ALLOWED}, but got {type(kind).__name__} {kind!r}.")


def homogeneous(sides: Sides) -> Sides:
    """Return the sides of a derivative: zero where a value was given."""
    return tuple([(low if isinstance(low, str) else 0, high if isinstance(high, str) else 0) for low, high in sides])


def shifted(sides: Sides, call: str) -> tuple[Any, Sides]:
    """Take a traced value out of the sides: filling u with v is filling u - v with zero and adding v.

    Returns
    -------
    value : traced number or None
        The value v, None where none is traced.
    sides : Sides
        Without it.

    Raises
    ------
    TypeError
        Where the traced value isn't a number, or isn't the only one.
    """
    values = [kind for pair in sides for kind in pair if not isinstance(kind, str)]
    traced = [value for value in values if isbox(value)]
    if not traced:
        return None, sides
    value = traced[0]
    shape = np.shape(getval(value))
    # What is taken from u is one number for all of its cells, so several can't be.
    if shape != () or any(other is not value for other in values):
        raise TypeError(
            f"{call}: a traced boundary value must be one number, the same on all sides that have a value, but got "
            f"shape {shape} and {values!r}. Exchange with zero there, and add what the values contribute."
        )
    return value, homogeneous(sides)


def check_values(sides: Sides, dtype: np.dtype, call: str) -> None:
    """Raise a TypeError where a value would be cast to the dtype of the array with loss of its kind."""
    for value in [kind for pair in sides for kind in pair if not isinstance(kind, str)]:
        if value and not np.can_cast(np.min_scalar_type(value), dtype, "same_kind"):
            raise TypeError(
                f"{call}: the boundary value {value!r} doesn't fit into an array of dtype {dtype}. "
                "Convert the array first."
            )
