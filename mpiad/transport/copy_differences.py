"""Where two arrays of one shape and dtype differ first, and by how much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mpiad._typing import Array

_SHOWN = 8
_HUGE = 2**1023  # integers from here on have no float
# Of the 16 bytes of a long double on x86 ten hold its 80 bits; whatever the memory held before is in the others.
_MEANT = 10 if np.finfo(np.longdouble).nmant == 63 else np.dtype(np.longdouble).itemsize


class Difference(NamedTuple):
    """How one rank's copy differs from another's."""

    path: str  # of the first leaf that differs
    index: tuple[int, ...]  # of its first entry that differs
    # `absolute`, `relative`: the largest difference of that leaf's entries, and relative to the larger of both; NaN where
    # there is none (a NaN, a string, another shape).
    absolute: float
    relative: float
    text: str

    def __str__(self) -> str:
        return self.text


def compare(path: str, kind: str, mine: Array, theirs: Array, reference: int, others: int) -> Difference:
    """Compare what differs in its bits; rank `reference` holds `theirs`, and so many other leaves differ, too."""
    more = f"; {others} more differ" if others else ""
    if not isinstance(mine, np.ndarray):
        text = f"{path} is {mine!r:.60} instead of rank {reference}'s {theirs!r:.60}{more}"
        return Difference(path, (), *_of_integers(mine, theirs), text)
    places = np.flatnonzero((bits_of(mine) != bits_of(theirs)).any(axis=1))
    first = tuple(int(i) for i in np.unravel_index(places[0], mine.shape))
    absolute, relative = _largest(mine.reshape(-1)[places], theirs.reshape(-1)[places])
    size = "in the sign of a zero or the bits of a NaN only" if absolute == 0 else f"by at most {absolute:.2g}"
    if absolute != absolute:
        size = "where one of both is no number"
    elif absolute != 0:
        size += f" (relative {relative:.2g})"
    at, count = (f" first at {list(first)}", f"{len(places)} of {mine.size} entries differ, ") if first else ("", "")
    text = f"{path} ({kind}){at} is {mine[first]} instead of rank {reference}'s {theirs[first]}; {count}{size}{more}"
    return Difference(path, first, absolute, relative, text)


def bits_of(array: np.ndarray) -> np.ndarray:
    """Return the bytes that say what an array holds, shape (size, bytes of an entry), without those that only fill up."""
    if not array.size:
        return np.empty((0, 1), np.uint8)
    if array.dtype.names:  # there may be gaps between the fields
        return np.concatenate([bits_of(array[name]).reshape(array.size, -1) for name in array.dtype.names], axis=1)
    # A view of the memory copies nothing.
    whole = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if array.dtype.char not in "gG":
        return whole.reshape(array.size, -1)
    return whole.reshape(array.size, -1, np.dtype(np.longdouble).itemsize)[:, :, :_MEANT].reshape(array.size, -1)


def listed(differences: Mapping[int, Difference]) -> str:
    """Return a line for each rank's difference, of many the first few and how many more there are."""
    lines = [f"\n  rank {rank}: {difference}" for rank, difference in differences.items()]
    return "".join(lines[:_SHOWN]) + (f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else "")


def greatest(values: Sequence[float] | np.ndarray) -> float:
    """Return the greatest number, NaN where there is none."""
    known = np.asarray(values)[~np.isnan(values)]
    return float(known.max()) if known.size else float("nan")


def _of_integers(mine: Array, theirs: Array) -> tuple[float, float]:
    if not (isinstance(mine, int) and isinstance(theirs, int)):
        return float("nan"), float("nan")
    absolute = abs(mine - theirs)
    return float(min(absolute, _HUGE)), absolute / max(abs(mine), abs(theirs))


def _largest(mine: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    """Return the largest absolute and relative difference; NaN where no two entries are numbers."""
    if mine.dtype.kind not in "biufc":
        return float("nan"), float("nan")
    # In their own type, integers wrap and halves overflow.
    wide = np.clongdouble if mine.dtype.kind == "c" else np.longdouble
    a, b = mine.astype(wide), theirs.astype(wide)
    with np.errstate(all="ignore"):
        absolute = np.abs(a - b)
        relative = absolute / np.maximum(np.abs(a), np.abs(b))
    absolute[np.isnan(a) & np.isnan(b)] = 0
    relative[absolute == 0] = 0
    return greatest(absolute), greatest(relative)
