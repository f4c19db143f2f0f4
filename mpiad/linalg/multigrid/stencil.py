"""The operator of a level with its halo, its interpolation, and the operator of the coarser level.

Interpolation depends on the operator: across a jump of the coefficient, it preserves the flux, not the slope. At a point
between two coarse points, the interpolated value satisfies the operator's equation, after the couplings perpendicular to
their line are subtracted from the diagonal. At a point between four coarse points in three dimensions, the couplings
perpendicular to their plane are subtracted; at a point between eight, none.

References
----------
J. E. Dendy, Black box multigrid, Journal of Computational Physics 48 (1982), section 2.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpiad._typing import Comm, LocalArray, Rank
from mpiad.domain.halo import complete, post
from mpiad.domain.routes import Index, Route
from mpiad.linalg.multigrid.color_layout import Color, Distribution, Layout, neighbor_color
from mpiad.linalg.multigrid.weighted_sums import Term
from mpiad.primitives.operation import suspended
from mpiad.transport.core.tracing import restoring_state
from mpiad.transport.devices.device_arrays import ArrayModule

_TAG = 32752  # MPI guarantees tags up to 32767
Rows = Mapping[Color, int | slice]
"""For each color, its row or rows of an array (..., rows, size)."""


class LevelHalo:
    """The exchange of the halo of a block of a level."""

    def __init__(self, layout: Layout, distribution: Distribution, rank: Rank, comm: Comm):
        self._layout, self._rank, self._comm = layout, rank, comm
        position: Any = distribution.position(rank)
        # For each dimension and each neighbor, index and parity of sent layers, and of received layers.
        self._neighbors: list[dict[Rank, tuple[list, list]]] = []
        for axis, (low, high) in enumerate(zip(layout.box.low, layout.box.high)):
            neighbors: dict[Rank, tuple[list, list]] = {}
            for step, own, ghost in ((-1, low, low - 1), (1, high - 1, high)):
                rank_there = distribution.neighbor(position, axis, step)
                if rank_there is not None:
                    # In the arrays of colors, indices are shifted by one, because of the halo.
                    sent, received = ((index // 2 - layout.first[axis] + 1, index % 2) for index in (own, ghost))
                    owned, ghosts = neighbors.setdefault(rank_there, ([], []))
                    owned.append(sent)
                    # A neighbor on both sides sends its first layer first, which is the layer after this block.
                    ghosts.insert(0, received)
            self._neighbors.append(neighbors)

    def fill(self, values: LocalArray, rows: Rows) -> None:
        """Fill the halo, including corners, of some colors' rows (the same on all ranks) of an array (..., rows, size)."""
        if not any(self._neighbors) or not rows:
            return
        whole = self._layout.shaped(values)
        # Dimensions are exchanged one after another: the layers that are sent along a dimension include the halo of
        # earlier dimensions, and thus the corners. `suspended` marks the channel as unusable if an exception leaves a
        # message pending.
        with restoring_state(), suspended():
            for axis, neighbors in enumerate(self._neighbors):
                routes = []
                for rank, layers in neighbors.items():
                    owned, ghosts = (self._parts(axis, side, rows) for side in layers)
                    if rank != self._rank:
                        routes.append(Route(rank, owned, ghosts))
                        continue
                    # A single block along a periodic dimension is its own neighbor on both sides.
                    for source, target in zip(owned, ghosts):
                        whole[target] = whole[source]
                complete(whole, post(whole, tuple(routes), False, _TAG, self._comm), False)

    def _parts(self, axis: int, layers: list[tuple[int, int]], rows: Rows) -> tuple[Index, ...]:
        before, after = [slice(None)] * axis, [slice(None)] * (len(self._neighbors) - axis - 1)
        found = [(index, row) for index, parity in layers for color, row in rows.items() if color[axis] == parity]
        return tuple((..., row, *before, index, *after) for index, row in found)


Offset = tuple[int, ...]


def offsets(ndim: int) -> list[Offset]:
    """Return the offsets of a point and all its neighbors; the k-th offset from the end is minus the k-th offset."""
    return list(itertools.product((-1, 0, 1), repeat=ndim))


@functools.cache
def corners(color: Color) -> list[tuple[int, ...]]:
    """Return the offsets, in entries, of the coarse points from which a color is interpolated."""
    return list(itertools.product(*[(0, 1) if odd else (0,) for odd in color]))


class Stencil:
    """A symmetric operator on the points of a level: (A u)(x) = -Σ N(x, offset) u(x + offset), with N(x, 0) < 0."""

    def __init__(self, layout: Layout, offsets: Sequence[Offset], memory: LocalArray):
        # The rows of the memory: -1 / N(x, 0), or 0 if N(x, 0) is 0, for each color; N for each offset and color; and the
        # interpolation weights, for each color except (0, ...) and each corner. The inverse and N are zero outside of the
        # block; the weights are zero until `find_interpolation` fills them, also in the halo.
        self.layout, self.memory, self._offsets, count = layout, memory, list(offsets), len(layout.colors)
        self.inverse = memory[:count]
        self.couplings = {o: memory[k * count : (k + 1) * count] for k, o in enumerate(offsets, 1)}
        self.sweep = _sweep(layout.colors, any(np.count_nonzero(offset) > 1 for offset in offsets))
        self.weights: dict[Color, int] = {}  # for each color, the row of its first weight
        first = (1 + len(offsets)) * count
        for color in layout.colors[1:]:
            self.weights[color] = first
            first += len(corners(color))

    def on(self, xp: ArrayModule) -> Stencil:
        """Return the same operator on a device, with a copy of its memory."""
        return Stencil(self.layout, self._offsets, xp.to_device(self.memory))

    def weights_of(self, color: Color) -> LocalArray:
        """Return the weights for interpolating a color, shape (corners, size)."""
        return self.memory[self.weights[color] : self.weights[color] + len(corners(color))]

    def terms(self, color: Color, among: Sequence[Color] | None = None) -> list[Term]:
        """Return the terms N u of a color's points and their neighbors, or only of those whose colors are in `among`."""
        terms, row, count = [], self.layout.row[color], len(self.layout.colors)
        for k, offset in enumerate(self._offsets, 1):
            neighbor, steps = neighbor_color(color, offset)
            if among is None or neighbor in among:
                shift = self.layout.shifted(steps).start - self.layout.inner.start
                terms.append(Term(k * count + row, self.layout.row[neighbor], shift))
        return terms


def _sweep(colors: list[Color], has_diagonal_neighbors: bool) -> list[list[Color]]:
    """Return the groups of colors that a Gauss-Seidel sweep updates, in order; points of a group aren't neighbors."""
    even = [color for color in colors if sum(color) % 2 == 0]
    odd = [color for color in colors if sum(color) % 2]
    if has_diagonal_neighbors:
        return [[color] for color in even + odd]
    # Without diagonal neighbors, two groups suffice, since the neighbors of points with an even sum of indices have odd
    # sums. In three dimensions, the smoothing of the finest level limits the convergence: an additional half sweep saves
    # three of eleven iterations.
    return [odd, even, odd] if len(colors) == 8 else [even, odd]


def stencil_of(layout: Layout, couplings: Mapping[Offset, np.ndarray]) -> Stencil:
    """Return the stencil with given blocks of couplings; the interpolation weights are zero."""
    count = len(layout.colors)
    weights = sum(len(corners(color)) for color in layout.colors[1:])
    stencil = Stencil(layout, list(couplings), np.zeros(((1 + len(couplings)) * count + weights, layout.size)))
    for offset, block in couplings.items():
        layout.split(block, stencil.couplings[offset])
    diagonal = stencil.couplings[(0,) * len(layout.shape)]
    np.divide(-1.0, diagonal, out=stencil.inverse, where=diagonal < 0)
    return stencil


def find_interpolation(stencil: Stencil, halo: LevelHalo) -> None:
    """Compute the weights of a level's interpolation, including those in the halo, in the stencil's memory; collective."""
    colors = stencil.layout.colors
    # Weights of points between two coarse points come first, since the other weights are computed from them.
    for odd in range(1, len(colors[0]) + 1):
        group = [color for color in colors if sum(color) == odd]
        for color in group:
            _find_weights(stencil, color)
        first = stencil.weights
        halo.fill(stencil.memory, {color: slice(first[color], first[color] + len(corners(color))) for color in group})


def _find_weights(stencil: Stencil, color: Color) -> None:
    layout, row_of = stencil.layout, {corner: k for k, corner in enumerate(corners(color))}
    inner = stencil.weights_of(color)[:, layout.inner]
    along = _couplings_along(stencil, color)
    center = -along.pop((0,) * len(color))
    for offset, coupling in along.items():
        neighbor, steps = neighbor_color(color, offset)
        entries = layout.shifted(steps)
        for k, corner in enumerate(corners(neighbor)):
            target = row_of[tuple(s + t for s, t in zip(steps, corner))]
            inner[target] += coupling * stencil.weights_of(neighbor)[k, entries] if any(neighbor) else coupling
    # The weights are zero outside of the block, and for points with a nonpositive `center`.
    inner *= np.divide(1.0, center, out=np.zeros_like(center), where=center > 0)


def _couplings_along(stencil: Stencil, color: Color) -> dict[tuple[int, ...], np.ndarray]:
    """Return a color's couplings, summed over the dimensions in which its points have even indices."""
    layout = stencil.layout
    out: dict[tuple[int, ...], np.ndarray] = {}
    for offset, coupling in stencil.couplings.items():
        projected = tuple(o if odd else 0 for o, odd in zip(offset, color))
        part = coupling[layout.row[color], layout.inner]
        out[projected] = out[projected] + part if projected in out else part
    return out


def coarse_operator(stencil: Stencil, halo: LevelHalo) -> np.ndarray:
    """Return the couplings of the coarse operator PᵀAP, per offset, on this rank's coarse points; collective."""
    layout, ndim, first = stencil.layout, len(stencil.layout.shape), 0
    # -A P at the points, one row per color and neighboring coarse point; the rows by the offset in entries.
    product, row_of_color = np.zeros((5**ndim, layout.size)), {}
    for color in layout.colors:
        coarse = itertools.product(*[(0, 1) if odd else (-1, 0, 1) for odd in color])
        row_of_color[color] = row_of = {steps: first + k for k, steps in enumerate(coarse)}
        first += len(row_of)
        _multiply(stencil, color, product, row_of)
    # Restriction reads the products of neighboring points, which other ranks may own.
    halo.fill(product, {color: slice(min(rows.values()), max(rows.values()) + 1) for color, rows in row_of_color.items()})
    out = np.zeros((3**ndim, layout.size))
    for color, row_of in row_of_color.items():
        for k, corner in enumerate(corners(color)):
            # Restriction is the transpose of interpolation, so its offsets have opposite signs.
            entries = layout.shifted(corner, -1)
            for number, target in enumerate(offsets(ndim)):
                # Keys of `row_of` are relative to the product's entry; `target` is relative to the coarse point.
                row = row_of.get(tuple(s + t for s, t in zip(target, corner)))
                if row is not None:
                    part = product[row, entries]
                    out[number, layout.inner] += part * stencil.weights_of(color)[k, entries] if any(color) else part
    return layout.shaped(out)[(slice(None), *layout.coarse())].copy()


def _multiply(stencil: Stencil, color: Color, product: np.ndarray, row_of: dict[tuple[int, ...], int]) -> None:
    """Compute -A P at a color's points, in the rows of neighboring coarse points."""
    layout, number = stencil.layout, stencil.layout.row[color]
    # In the rows of A, each neighbor's value is replaced by its interpolation from coarse points.
    for offset, coupling in stencil.couplings.items():
        neighbor, steps = neighbor_color(color, offset)
        entries, factor = layout.shifted(steps), coupling[number, layout.inner]
        for k, corner in enumerate(corners(neighbor)):
            row = product[row_of[tuple(s + t for s, t in zip(steps, corner))], layout.inner]
            row += factor * stencil.weights_of(neighbor)[k, entries] if any(neighbor) else factor
