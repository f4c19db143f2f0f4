"""Which physical sides of a grid have a value given, and how far beyond the last points it is."""

from __future__ import annotations

import math
from typing import NamedTuple

from mpiad.domain import Domain
from mpiad.domain.domain_arguments import per_dimension

__all__ = ["Sides", "sides_of"]

_KINDS = ("dirichlet", "neumann")
_ALLOWED = '"dirichlet" or "neumann"; or, in a tuple, one of these or a pair (before, after) for each dimension'


class Sides(NamedTuple):
    """What an elliptic operator knows of its grid.

    Parameters
    ----------
    spacing : tuple of float
        Between neighbouring points along each dimension.
    fixed : tuple of pairs of bool
        For each dimension whether the value is given beyond its first point and after its last.
    centred : bool
        Whether given values are half a spacing beyond the last points, not a whole one.
    """

    spacing: tuple[float, ...]
    fixed: tuple[tuple[bool, bool], ...]
    centred: bool


def sides_of(domain: Domain, spacing: object, boundary: object, centred: bool, call: str) -> Sides:
    """Return the sides of a domain.

    Raises
    ------
    TypeError, ValueError
        Where an argument isn't what `Elliptic` takes.
    """
    ndim = len(domain.shape)
    try:
        steps = tuple(float(step) for step in per_dimension(spacing, ndim, "spacing"))
    except TypeError:
        raise TypeError(f"{call}: spacing must be a number, or one for each dimension, but got {spacing!r}.") from None
    if not all(0 < step < math.inf for step in steps):
        raise ValueError(f"{call}: spacing must be positive and finite, but got {spacing!r}.")
    return Sides(steps, _fixed(domain, boundary, call), bool(centred))


def _fixed(domain: Domain, boundary: object, call: str) -> tuple[tuple[bool, bool], ...]:
    ndim = len(domain.shape)
    along = boundary if isinstance(boundary, (tuple, list)) else (boundary,) * ndim
    if len(along) != ndim:
        raise ValueError(
            f"{call}: boundary has {len(along)} entries for a grid of {ndim} dimensions: {boundary!r}. It must be "
            f"{_ALLOWED}."
        )
    pairs = [tuple(kinds) if isinstance(kinds, (tuple, list)) else (kinds, kinds) for kinds in along]
    for pair in pairs:
        if len(pair) != 2 or any(kind not in _KINDS for kind in pair):
            raise ValueError(f"{call}: boundary must be {_ALLOWED}, but got {boundary!r}.")
    return tuple(
        # A ring has no sides, whatever is said of them.
        (False, False) if wraps else (low == _KINDS[0], high == _KINDS[0])
        for (low, high), wraps in zip(pairs, domain.periodic)
    )
