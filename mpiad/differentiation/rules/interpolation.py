"""Interpolation in tables: the derivatives of `numpy.interp`, and functions of which its compiled form consists."""

from __future__ import annotations

from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.core import make_vjp
from autograd.tracer import getval, isbox

from mpiad._typing import Array
from mpiad.differentiation.rules.protocol import Argnums, Vjp, bound, recorder_of


def entries_of(table: Array, index: Array, like: Array = None) -> Array:
    """Return the entries of a table, shape (K,), or (K, n) with one table per column, at indices of shape (n,)."""
    # If `like` is traced by a recorder, constant entries are traced, too: they remain entries of the table.
    recorder = recorder_of(like, index, table)
    if recorder is not None and not isbox(table):
        return recorder.call(entries_of, (table, index), {})
    return table[index] if anp.ndim(table) == 1 else table[index, np.arange(anp.shape(table)[1])]


def interval_of(places: Array, x: Array) -> Array:
    """Return the index of the last interval that begins at or before x; 0 if there is none, or x is NaN."""
    places, x = getval(places), getval(x)
    low, count = np.zeros(np.shape(x), int), max(len(places) - 1, 1)
    if not hasattr(places, "recorder") and not hasattr(x, "recorder") and np.ndim(places) == 1:
        return np.clip(np.searchsorted(places, np.where(x == x, x, -np.inf), "right") - 1, 0, count - 1)
    while count > 1:  # a search without branches, which can be compiled
        half = count // 2
        low = np.where(entries_of(places, low + half, x) <= x, low + half, low)
        count -= half
    return low


def _ends(x: Array, xp: Array, fp: Array) -> tuple[list[Array], Array]:
    """Return the places and values at both ends of the interval of x, and the slope."""
    # Differences of integers with few bits, or without a sign, would overflow.
    xp, fp = (part.astype(float) if part.dtype.kind in "iub" else part for part in (xp, fp))
    i = interval_of(xp, x)
    x0, x1, y0, y1 = (entries_of(part, k) for part in (xp, fp) for k in (i, i + min(1, len(xp) - 1)))
    return [x0, x1, y0, y1], (y1 - y0) / anp.where(x1 == x0, 1.0, x1 - x0)  # intervals of length 0 aren't used


def interpolated(x: Array, xp: Array, fp: Array, left: Array = None, right: Array = None) -> Array:
    """Return `numpy.interp`; `xp` and `fp` may have an axis of columns, as in `entries_of`."""
    (x0, x1, y0, y1), slope = _ends(x, xp, fp)
    low, high = (y if end is None else end + np.zeros(anp.shape(x)) for y, end in ((y0, left), (y1, right)))
    # Only the first interval contains places before x0, and only the last one x1 and places after x1.
    inside = anp.where(x < x1, slope * (x - x0) + y0, anp.where(x == x1, y1, anp.where(x > x1, high, x)))
    return anp.where(x < x0, low, inside)


def _slope_at(x: Array, xp: Array, fp: Array) -> Array:
    (x0, x1, _, _), slope = _ends(x, xp, fp)
    return anp.where((x < x0) | (x >= x1), 0.0, slope)


def _named(args: tuple, kwargs: dict) -> dict[str, Any]:
    """Return the arguments of a call of `numpy.interp` by name, with arrays instead of lists."""
    named = bound(anp.interp, "x xp fp left right", args, kwargs)
    return {name: anp.array(part) if isinstance(part, (list, tuple)) else part for name, part in named.items()}


def interp_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Multiply by the slope; cotangents of the table by the adjoint of `interpolated`, which has the same values."""
    named = _named(args, kwargs)
    if argnums == (0,):
        slope = _slope_at(named["x"], named["xp"], named["fp"])
        return lambda g: (g * slope,)
    names = [list(named)[i] for i in argnums]
    value = lambda parts: interpolated(**{**named, **dict(zip(names, parts))})  # noqa: E731
    return make_vjp(value, tuple([named[name] for name in names]))[0]


def interp_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Add the tangent of the place times the slope, and the interpolated tangent of the values."""
    named = _named(args, kwargs)
    x, xp, fp, total = named["x"], named["xp"], named["fp"], 0.0 * ans
    tangents = dict(zip([list(named)[i] for i in argnums], gs))
    if "x" in tangents or "xp" in tangents:
        along = tangents.get("x", 0.0) - (interpolated(x, xp, tangents["xp"]) if "xp" in tangents else 0.0)
        total = total + _slope_at(x, xp, fp) * along
    if tangents.keys() - {"x", "xp"}:
        ends = {name: tangents.get(name, 0.0) for name in ("left", "right") if named.get(name) is not None}
        total = total + interpolated(x, xp, tangents.get("fp", 0.0 * fp), **ends)
    return total


VJPS = {anp.interp: interp_vjp}
JVPS = {anp.interp: interp_jvp}
