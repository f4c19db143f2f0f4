"""One level of a V-cycle: smooth, restrict the residual, add the correction of the coarser level, smooth in reverse order.

A Gauss-Seidel sweep over the colours is followed, after the correction, by one in the reverse order: its transpose, and so
the whole cycle is a symmetric operator. After the first sweep the last group's equations hold, so nothing of it is
restricted; in the second sweep that group comes first and is computed from the others, so nothing need be interpolated
to it. The fine level has two groups of colours: there this halves the work.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from mpiad._typing import LocalArray
from mpiad.domain.allocation import empty_beside, zeros_beside
from mpiad.linalg.multigrid.colour_layout import Colour
from mpiad.linalg.multigrid.level_halo import LevelHalo
from mpiad.linalg.multigrid.level_stencil import Stencil
from mpiad.linalg.multigrid.prolongation import Weights, corners
from mpiad.transport.device_arrays import ArrayModule

__all__ = ["Below", "Level"]


class Below(Protocol):
    """What a level needs of the coarser one."""

    def correct(self, residual: LocalArray) -> LocalArray:
        """Return the correction on this rank's coarse points and the layer around them, of the residual on the former."""
        ...

    def on(self, home: ArrayModule) -> Below:
        """Return the same on a device."""
        ...


class Level:
    """A level on a rank that takes part in it."""

    def __init__(self, stencil: Stencil, weights: Weights, halo: LevelHalo, below: Below):
        self.layout, self._stencil, self._halo, self._below = stencil.layout, stencil, halo, below
        self._weights, self._later = weights, _later(stencil.sweep)
        # Kept from cycle to cycle: new memory costs more than the arithmetic. Halos beyond physical sides stay zero.
        beside, size, length = stencil.diagonal, self.layout.size, self.layout.inner.stop - self.layout.inner.start
        self._u, self._residual = (zeros_beside(beside, (len(self.layout.colours), size)) for _ in range(2))
        self._coarse = zeros_beside(beside, (size,))
        self._sum, self._part = (empty_beside(beside, (length,)) for _ in range(2))

    def on(self, home: ArrayModule) -> Level:
        """Return the same level, and all below, on a device: copies of what was found on the host, made here."""
        copies = {colour: home.to_device(array) for colour, array in self._weights.items()}
        # One by one, since arrays on devices aren't taken apart by a loop.
        weights = {colour: [array[k] for k in range(len(array))] for colour, array in copies.items()}
        return Level(self._stencil.on(home), weights, self._halo, self._below.on(home))

    def cycle(self, f: LocalArray) -> LocalArray:
        """Return what one V-cycle from zero makes of a right-hand side.

        Parameters
        ----------
        f : array of shape (colours, size)
            Zero outside of the block.

        Returns
        -------
        array of shape (colours, size)
            Its halo filled; overwritten by the next cycle.

        Ranks
        -----
        All ranks of the level call it.
        """
        self._presmooth(f)
        correction = self._below.correct(self._restricted(f))
        self._interpolate(correction)
        # In reverse, so that the cycle is symmetric; all neighbours count now, none is zero any more.
        for group in reversed(self._stencil.sweep):
            self._relax(group, f, None)
        return self._u

    def product_after(self, f: LocalArray) -> LocalArray:
        """Return the operator's product with what `cycle` just returned for `f`: equal to `f` in the last relaxed group.

        Parameters
        ----------
        f : array of shape (colours, size)
        """
        out, inner = np.zeros_like(f), self.layout.inner
        for colour in self.layout.colours:
            row = self.layout.row[colour]
            if colour in self._stencil.sweep[0]:
                out[row] = f[row]
                continue
            np.multiply(self._stencil.diagonal[row, inner], self._u[row, inner], out=out[row, inner])
            self._stencil.neighbours(out[row, inner], self._u, colour, sign=-1)
        return out

    def _presmooth(self, f: LocalArray) -> None:
        done: list[Colour] = []
        for group in self._stencil.sweep:
            # Starting from zero, only what has been computed contributes.
            self._relax(group, f, done)
            done = done + group

    def _relax(self, group: list[Colour], f: LocalArray, among: list[Colour] | None) -> None:
        """Solve the equations of a group of colours for their own points."""
        inner = self.layout.inner
        for colour in group:
            row = self.layout.row[colour]
            known = f[row, inner]
            # Entries that are no points of this rank have zero for an inverse: they become zero, until the halo is filled.
            if among != []:
                self._sum[:] = known
                self._stencil.neighbours(self._sum, self._u, colour, among)
                known = self._sum
            np.multiply(known, self._stencil.inverse[row, inner], out=self._u[row, inner])
        self._halo.fill({colour: self._u[self.layout.row[colour]] for colour in group})

    def _restricted(self, f: LocalArray) -> LocalArray:
        """Return the residual, restricted to this rank's coarse points."""
        layout, inner, left = self.layout, self.layout.inner, self._unfinished()
        for colour in left:
            self._find_residual(colour, f)
        # Restriction reads the residuals of neighbours' points; those of colour 0 stay where they are.
        self._halo.fill({colour: self._residual[layout.row[colour]] for colour in left if any(colour)})
        coarse = self._coarse[inner]
        coarse[:] = self._residual[0, inner] if layout.colours[0] in left else 0
        for colour in left:
            if any(colour):
                for weight, corner in zip(self._weights[colour], corners(colour)):
                    there = layout.shifted(corner, -1)
                    np.multiply(weight[there], self._residual[layout.row[colour], there], out=self._part)
                    coarse += self._part
        return layout.whole(self._coarse)[layout.coarse()]

    def _find_residual(self, colour: Colour, f: LocalArray) -> None:
        row, inner = self.layout.row[colour], self.layout.inner
        residual = self._residual[row, inner]
        later = self._later.get(colour)
        if later is None:
            np.multiply(self._stencil.diagonal[row, inner], self._u[row, inner], out=residual)
            np.subtract(f[row, inner], residual, out=residual)
        else:
            # Its equations held when it was relaxed: what remains is what came later, to points that were zero.
            residual[:] = 0
        self._stencil.neighbours(residual, self._u, colour, later)

    def _unfinished(self) -> list[Colour]:
        """Return the colours whose equations don't hold after a sweep."""
        return [colour for colour in self.layout.colours if colour not in self._stencil.sweep[-1]]

    def _interpolate(self, correction: LocalArray) -> None:
        layout, inner, changed = self.layout, self.layout.inner, self._unfinished()
        layout.whole(self._coarse)[layout.coarse(rim=1)] = correction
        for colour in changed:
            u = self._u[layout.row[colour], inner]
            if not any(colour):
                u += self._coarse[inner]
                continue
            # The weights at a point, times the values of the coarse points around it; restricting is the transpose.
            for weight, corner in zip(self._weights[colour], corners(colour)):
                np.multiply(weight[inner], self._coarse[layout.shifted(corner)], out=self._part)
                u += self._part
        self._halo.fill({colour: self._u[layout.row[colour]] for colour in changed})


def _later(sweep: list[list[Colour]]) -> dict[Colour, list[Colour]]:
    """Return for each colour those that come after it in a sweep; nothing for a sweep that comes to a colour twice."""
    order = [colour for group in sweep for colour in group]
    if len(set(order)) < len(order):
        return {}
    return {
        colour: [other for after in sweep[number + 1 :] for other in after]
        for number, group in enumerate(sweep)
        for colour in group
    }
