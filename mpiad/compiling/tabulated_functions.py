"""NumPy's functions of one variable that are given by numbers: tables and polynomials."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpiad.compiling.symbols import Symbol, choose
from mpiad.compiling.ufuncs import entrywise

if TYPE_CHECKING:
    from mpiad.compiling.symbolic_arrays import SymbolicArray

__all__ = ["interpolated", "polynomial"]

# Each entry is a comparison, whatever the place.
_LONGEST_TABLE = 64


def interpolated(
    like: SymbolicArray, x: Any, xp: Any, fp: Any, left: Any = None, right: Any = None, period: Any = None
) -> SymbolicArray:
    """Return what `numpy.interp` does, by a choice between all lines of the table.

    Raises
    ------
    Refusal
        Where the table is traced or long.
    """
    traced = any(isinstance(part, type(like)) for part in (xp, fp, left, right, period))
    if traced or period is not None or np.size(xp) > _LONGEST_TABLE:
        like.builder.refuse(
            f"it calls numpy.interp with {'traced values in the table' if traced else f'a table of {np.size(xp)} entries'}"
            f"{', and a period' if period is not None else ''}; tables of up to {_LONGEST_TABLE} numbers can be compiled"
        )
    places, values = np.asarray(xp, float), np.asarray(fp, complex if np.iscomplexobj(fp) else float)
    low, high = (values[end] if given is None else given for end, given in ((0, left), (-1, right)))
    slopes = np.diff(values) / np.diff(places)

    def one(x: Symbol) -> Symbol:
        made = choose(x < places[0], low, values[0])
        # Of the choices that hold the last one counts: that of the line on which x lies.
        for place, value, slope in zip(places, values, slopes):
            made = choose(x >= place, slope * (x - place) + value, made)
        made = choose(x == places[-1], values[-1], choose(x > places[-1], high, made))
        return choose(x != x, x, made)

    return entrywise(like, one, x)


def polynomial(like: SymbolicArray, coefficients: Any, x: Any) -> Any:
    """Return what `numpy.polyval` does."""
    made = 0.0 * x
    for coefficient in coefficients:
        made = made * x + coefficient
    return made
