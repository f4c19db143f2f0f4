"""The arithmetic of a stencil: shifted pieces of an array, added up with weights, in slabs that stay in the cache.

Terms with equal weights are added before they are multiplied. If a box of cells is nearly as wide as the array, its rows
are treated as one long row, including the halo cells between them, whose meaningless sums are dropped: pieces of one row
are added 1.5 times as fast as pieces of many.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from mpiad._typing import LocalArray
from mpiad.domain.partition import lengths
from mpiad.transport.buffers import empty_beside

Terms: TypeAlias = tuple[tuple[float, tuple[tuple[int, ...], ...]], ...]
"""For each weight the offsets with that weight, counted from the lowest corner."""
Box: TypeAlias = tuple[slice, ...]
_SLAB = 32_768  # entries: smaller slabs cost more calls than the cache saves


class Finish(NamedTuple):
    """How sums are completed: ``factor * sums - before + u + u``, or ``sums + u + u`` if only `u` is given."""

    u: LocalArray  # array of the shape of the result
    before: LocalArray | None = None
    factor: LocalArray | None = None
    kept: LocalArray | None = None  # output array for the sums themselves

    def complete(self, out: LocalArray, index: tuple) -> None:
        """Complete the sums of a slab in place: `out` is the whole result's part at `index`."""
        if self.kept is not None:
            self.kept[index] = out
        # While the slab of sums is still in the cache: one pass through memory for the whole step.
        if self.factor is not None and self.before is not None:
            out *= self.factor[index]
            out -= self.before[index]
        out += self.u[index]  # twice: without an array for 2 u
        out += self.u[index]

    def form(self) -> tuple[str, str]:
        """Return the names of the arrays that there are, and the text of the same for one entry of each."""
        names = " ".join(name for name, array in zip(self._fields, self) if array is not None)
        return names, f"{'total' if self.factor is None else 'total * factor_[i] - before_[i]'} + u_[i] + u_[i]"


class Slab(NamedTuple):
    """Inputs, workspace and output of the sums of a slab."""

    pieces: list[list[LocalArray]]  # for each term the shifted pieces of the array, of one shape
    # `total`, `room`: array of that shape.
    total: LocalArray
    room: LocalArray
    sums: LocalArray  # array of the shape of the slab; a view of `total`


def terms_of(weights: np.ndarray) -> Terms:
    """Return the terms of a stencil's weights, those with the largest groups first."""
    groups: dict[float, list[tuple[int, ...]]] = {}
    for offset in np.argwhere(weights):
        groups.setdefault(weights[tuple(offset)].item(), []).append(tuple(offset.tolist()))
    return tuple((weight, tuple(offsets)) for weight, offsets in sorted(groups.items(), key=lambda item: -len(item[1])))


def weighted_sum(source: LocalArray, terms: Terms, out: LocalArray, box: Box, finish: Finish | None = None) -> None:
    """Write the weighted sums of a box of cells.

    `source` (..., *padded) is C-contiguous; cell 0 of `out` (..., *cells) is summed from the offsets as they are. Each slab
    is completed by `finish` while it is in the cache.
    """
    ndim = len(box)
    padded, lead = source.shape[source.ndim - ndim :], out.shape[: out.ndim - ndim]
    across = math.prod(lengths(box[1:]))
    start, stop = box[0].start, box[0].stop
    if stop <= start or across == 0:
        return
    long_rows = 3 * across > 2 * math.prod(padded[1:])
    # On a device all at once: there calls cost more than memory.
    rows = min(stop - start, max(1, _SLAB // across)) if type(out) is np.ndarray else stop - start
    buffers = [empty_beside(out, (rows, *(padded[1:] if long_rows else lengths(box[1:])))) for _ in range(2)]
    make = _as_long_rows if long_rows else _as_boxes
    for place in np.ndindex(lead):
        for first in range(start, stop, rows):
            along = slice(first, min(first + rows, stop))
            slab = make(source[place], terms, (along, *box[1:]), buffers)
            index = (*place, along, *box[1:])
            _sum(slab, terms)
            # Arithmetic on rows with gaps takes twice as long as this copy.
            out[index] = slab.sums
            if finish is not None:
                finish.complete(out[index], index)


def _sum(slab: Slab, terms: Terms) -> None:
    """Add the pieces up."""
    total, room = slab.total, slab.room
    if not terms:
        total[...] = 0
    # Pieces of equal weight are added first and multiplied once; all in two buffers that stay in the cache.
    for number, ((weight, _), pieces) in enumerate(zip(terms, slab.pieces)):
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


def _as_boxes(field: LocalArray, terms: Terms, box: Box, buffers: Sequence[LocalArray]) -> Slab:
    """Return a slab whose pieces have its shape."""
    pieces = [
        [field[tuple([slice(cells.start + o, cells.stop + o) for cells, o in zip(box, offset)])] for offset in offsets]
        for _, offsets in terms
    ]
    total, room = (buffer[: box[0].stop - box[0].start] for buffer in buffers)
    return Slab(pieces, total, room, total)


def _as_long_rows(field: LocalArray, terms: Terms, box: Box, buffers: Sequence[LocalArray]) -> Slab:
    """Return a slab whose pieces are rows that go from its first cell to its last one, also through cells of no use."""
    row, rows = field.reshape(-1), box[0].stop - box[0].start
    steps = [math.prod(field.shape[axis + 1 :]) for axis in range(field.ndim)]
    # From the beginning of the slab's first row to its last cell, in the padded array.
    length = sum((cells - 1) * step for cells, step in zip([rows, *[c.stop for c in box[1:]]], steps)) + 1
    start = box[0].start * steps[0]
    pieces = []
    for _, offsets in terms:
        starts = [start + sum(o * step for o, step in zip(offset, steps)) for offset in offsets]
        pieces.append([row[first : first + length] for first in starts])
    total, room = (buffer.reshape(-1)[:length] for buffer in buffers)
    return Slab(pieces, total, room, buffers[0][(slice(0, rows), *box[1:])])
