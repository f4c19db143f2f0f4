"""The operator of the next coarser level: interpolate, apply the operator, and restrict by the transpose."""

from __future__ import annotations

import itertools

import numpy as np

from mpiad.linalg.multigrid.colour_layout import Colour, reach
from mpiad.linalg.multigrid.level_halo import LevelHalo
from mpiad.linalg.multigrid.level_stencil import Stencil, offsets
from mpiad.linalg.multigrid.prolongation import Weights, corners

__all__ = ["coarse_operator"]


def coarse_operator(stencil: Stencil, weights: Weights, halo: LevelHalo) -> np.ndarray:
    """Return the coarse operator PᵀAP on this rank's coarse points.

    Parameters
    ----------
    stencil : Stencil
    weights : Weights
    halo : LevelHalo

    Returns
    -------
    array of shape (1 + offsets, *coarse points)
        Its diagonal, and its couplings in the order of `offsets`.

    Ranks
    -----
    All ranks of the level call it.
    """
    layout = stencil.layout
    products = {colour: _product(stencil, weights, colour) for colour in layout.colours}
    # Restriction reads the rows of neighbouring points, which other ranks may own.
    halo.fill({colour: rows for colour, (rows, _) in products.items()})
    ndim = len(layout.shape)
    out = np.zeros((3**ndim, layout.size))
    targets = [(0,) * ndim, *offsets(ndim)]
    for colour, (rows, at) in products.items():
        for k, corner in enumerate(corners(colour)):
            # Restricting is the transpose of interpolating, so it looks the other way.
            there = layout.shifted(corner, -1)
            for number, target in enumerate(targets):
                # A row is counted from the coarse point at its own entry, a target from the one that is restricted to.
                row = at.get(tuple(s + t for s, t in zip(target, corner)))
                if row is not None:
                    part = rows[row, there]
                    out[number, layout.inner] += part * weights[colour][k, there] if any(colour) else part
    out[1:] *= -1
    return layout.whole(out)[(slice(None), *layout.coarse())].copy()


def _product(stencil: Stencil, weights: Weights, colour: Colour) -> tuple[np.ndarray, dict[tuple[int, ...], int]]:
    """Return the rows of AP of a colour, and which of them belongs to which coarse point, in entries."""
    layout, number = stencil.layout, stencil.layout.row[colour]
    coarse = itertools.product(*[(0, 1) if odd else (-1, 0, 1) for odd in colour])
    at = {steps: k for k, steps in enumerate(coarse)}
    rows = np.zeros((len(at), layout.size))
    inner = rows[:, layout.inner]
    zero = (0,) * len(colour)
    # A row of A, with each neighbour's value written as what it is interpolated from.
    terms = [(zero, stencil.diagonal, np.add), *[(o, n, np.subtract) for o, n in stencil.couplings.items()]]
    for offset, coefficient, gather in terms:
        neighbour, steps = reach(colour, offset)
        there, factor = layout.shifted(steps), coefficient[number, layout.inner]
        for k, corner in enumerate(corners(neighbour)):
            row = inner[at[tuple(s + t for s, t in zip(steps, corner))]]
            gather(row, factor * weights[neighbour][k, there] if any(neighbour) else factor, out=row)
    return rows, at
