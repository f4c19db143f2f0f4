"""Interpolation that follows the operator: across a jump of the coefficient it keeps the flux, not the slope.

Between two coarse points the value is taken for which the equation holds there, with the couplings across the line
between them summed up onto it; then in the middle of four coarse points, in three dimensions with those across the plane
summed up; last in the middle of eight with the equation itself.

References
----------
J. E. Dendy, Black box multigrid, Journal of Computational Physics 48 (1982), section 2.
"""

from __future__ import annotations

import numpy as np

from mpiad.linalg.multigrid.colour_layout import Colour, reach
from mpiad.linalg.multigrid.level_halo import LevelHalo
from mpiad.linalg.multigrid.level_stencil import Stencil, corners

__all__ = ["find_interpolation"]


def find_interpolation(stencil: Stencil, halo: LevelHalo) -> None:
    """Find the weights of a level's interpolation, also of points in its halo: the stencil gets them. Collective."""
    colours = stencil.layout.colours
    # Points between two coarse points first: those in the middle of four or eight are interpolated from them.
    for odd in range(1, len(colours[0]) + 1):
        group = [colour for colour in colours if sum(colour) == odd]
        for colour in group:
            _find_weights(stencil, colour)
        halo.fill({colour: stencil.weights_of(colour) for colour in group})


def _find_weights(stencil: Stencil, colour: Colour) -> None:
    layout, at = stencil.layout, {corner: k for k, corner in enumerate(corners(colour))}
    inner, row = stencil.weights_of(colour)[:, layout.inner], layout.row[colour]
    centre = stencil.diagonal[row, layout.inner].copy()
    for along, coupling in _collapsed(stencil, colour).items():
        if not any(along):
            centre -= coupling
            continue
        neighbour, steps = reach(colour, along)
        there = layout.shifted(steps)
        for k, corner in enumerate(corners(neighbour)):
            target = at[tuple(s + t for s, t in zip(steps, corner))]
            inner[target] += coupling * stencil.weights_of(neighbour)[k, there] if any(neighbour) else coupling
    # Points without couplings (outside of the block) have no weights; a centre that isn't positive says the same.
    inner *= np.divide(1.0, centre, out=np.zeros_like(centre), where=centre > 0)


def _collapsed(stencil: Stencil, colour: Colour) -> dict[tuple[int, ...], np.ndarray]:
    """Return a colour's couplings summed up over the dimensions in which it lies on coarse points."""
    layout = stencil.layout
    out: dict[tuple[int, ...], np.ndarray] = {}
    for offset, coupling in stencil.couplings.items():
        along = tuple(o if odd else 0 for o, odd in zip(offset, colour))
        part = coupling[layout.row[colour], layout.inner]
        out[along] = out[along] + part if along in out else part
    return out
