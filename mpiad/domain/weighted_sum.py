"""The arithmetic of a stencil: shifted pieces of an array, added up with weights, in slabs that stay in the cache.

Written with slices, a stencil of k terms passes k times through memory and makes as many arrays. Here the sum of one slab
is finished before the next is begun, in two arrays that are used again, and terms with equal weights are added before
they are multiplied.
"""

from __future__ import annotations

import itertools
import math
from typing import TypeAlias

import numpy as np

from mpiad._typing import LocalArray

__all__ = ["Box", "Terms", "terms_of", "weighted_sum"]

Terms: TypeAlias = tuple[tuple[float, tuple[tuple[int, ...], ...]], ...]
"""For each weight the offsets with that weight, counted from the lowest corner."""
Box: TypeAlias = tuple[slice, ...]

# In entries: smaller slabs cost more calls than the cache saves.
_SLAB = 32_768


def terms_of(weights: np.ndarray) -> Terms:
    """Return the terms of a stencil's weights, those with the largest groups first."""
    groups: dict[float, list[tuple[int, ...]]] = {}
    for offset in np.argwhere(weights):
        groups.setdefault(weights[tuple(offset)].item(), []).append(tuple(offset.tolist()))
    return tuple((weight, tuple(offsets)) for weight, offsets in sorted(groups.items(), key=lambda item: -len(item[1])))


def weighted_sum(source: LocalArray, terms: Terms, out: LocalArray, box: Box) -> None:
    """Write the weighted sums of a box of cells.

    Parameters
    ----------
    source : array of shape (..., *padded)
    terms : Terms
    out : array of shape (..., *cells)
        Cell 0 is summed from the offsets as they are.
    box : tuple of slice
        The cells that are written.
    """
    ndim = len(box)
    across = math.prod([cells.stop - cells.start for cells in box[1:]])
    start, stop = box[0].start, box[0].stop
    if stop <= start or across == 0:
        return
    rows = min(stop - start, max(1, _SLAB // across))
    room = np.empty((rows, *[cells.stop - cells.start for cells in box[1:]]), out.dtype)
    for place in np.ndindex(out.shape[: out.ndim - ndim]):
        field, result = source[place], out[place]
        for first in range(start, stop, rows):
            slab = (slice(first, min(first + rows, stop)), *box[1:])
            _sum_slab(field, terms, result[slab], slab, room[: slab[0].stop - first])


def _sum_slab(field: LocalArray, terms: Terms, total: LocalArray, slab: Box, room: LocalArray) -> None:
    if not terms:
        total[...] = 0
    for number, (weight, offsets) in enumerate(terms):
        pieces = [field[tuple([slice(c.start + o, c.stop + o) for c, o in zip(slab, offset)])] for offset in offsets]
        part = room if number else total
        if len(pieces) == 1:
            np.multiply(pieces[0], weight, out=part)
        else:
            np.add(pieces[0], pieces[1], out=part)
            for piece in itertools.islice(pieces, 2, None):
                part += piece
            if weight != 1:
                part *= weight
        if number:
            total += room
