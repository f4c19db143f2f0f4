"""One level of a V-cycle: smooth, restrict the residual, add the correction of the coarser level, smooth in reverse order.

A Gauss-Seidel sweep over the colours is followed, after the correction, by one in the reverse order: its transpose, and so
the whole cycle is a symmetric operator. After the first sweep the last group's equations hold, so nothing of it is
restricted; in the second sweep that group comes first and is computed from the others, so nothing need be interpolated
to it. The fine level has two groups of colours: there this halves the work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpiad._typing import LocalArray
from mpiad.linalg.multigrid.colour_layout import Colour
from mpiad.linalg.multigrid.compiled_sums import CompiledSums
from mpiad.linalg.multigrid.level_halo import LevelHalo
from mpiad.linalg.multigrid.level_stencil import Stencil, corners
from mpiad.linalg.multigrid.level_sums import Step, Sums, Term, WeightedSum
from mpiad.transport.device_arrays import ArrayModule

if TYPE_CHECKING:  # it makes levels, and so imports this file
    from mpiad.linalg.multigrid.hierarchy import Coarser


class Level:
    """A level on a rank that takes part in it."""

    def __init__(self, stencil: Stencil, halo: LevelHalo, below: Coarser, compiled: bool = False):
        self.layout, self._stencil, self._halo, self._below = stencil.layout, stencil, halo, below
        self._count = count = len(self.layout.colours)
        # Of the state: for each colour u, its residual and its product with the operator; the restricted residual.
        self._coarse, self.is_compiled = 3 * count, compiled
        self.sums = (CompiledSums if compiled else Sums)(self.layout, stencil.memory, 3 * count + 1)
        step, done = self.sums.step, list[Colour]()
        self._before: list[tuple[Step, list[Colour]]] = []
        for group in stencil.sweep:
            # Starting from zero, only what has been computed contributes.
            self._before.append((step([self._relaxed(colour, done) for colour in group]), group))
            done = done + group
        left, later = self._unfinished(), _later(stencil.sweep)
        self._residuals = step([self._residual(colour, later.get(colour)) for colour in left])
        self._restriction = step([self._restricted(left)])
        self._interpolation = step([self._interpolated(colour) for colour in left])
        # In reverse, so that the cycle is symmetric; all neighbours count now, none is zero any more.
        self._after = [(step([self._relaxed(c, None) for c in group]), group) for group in reversed(stencil.sweep)]
        self._product = step([self._multiplied(colour) for colour in self.layout.colours])

    def on(self, home: ArrayModule) -> Level:
        """Return the same level, and all below, on a device: copies of what was found on the host, made here."""
        return Level(self._stencil.on(home), self._halo, self._below.on(home))

    def cycle(self, f: LocalArray) -> LocalArray:
        """Return what one V-cycle from zero makes of right-hand sides, shape (systems, colours, size); collective.

        They are contiguous, and zero outside of the block. The result, of the same shape, has its halo filled, and is
        overwritten by the next cycle.
        """
        if len(f) != len(self.sums.state):
            self.sums.allocate(len(f))
        for relax, group in self._before:
            relax(f)
            self._fill(group)
        self._interpolate(self._below.correct(self._restrict(f)), f)
        for relax, group in self._after:
            relax(f)
            self._fill(group)
        return self.sums.state[:, : self._count]

    def product_after(self, f: LocalArray) -> LocalArray:
        """Return the operator's product with what `cycle` just returned for `f`: equal to `f` in the last relaxed group.

        The next product overwrites it.
        """
        self._product(f)
        return self.sums.state[:, 2 * self._count : self._coarse]

    def _fill(self, colours: list[Colour], first: int = 0) -> None:
        rows = {colour: first + self.layout.row[colour] for colour in colours}
        self._halo.fill({colour: self.sums.state[:, row] for colour, row in rows.items()})

    def _restrict(self, f: LocalArray) -> LocalArray:
        """Return the residual, restricted to this rank's coarse points."""
        self._residuals(f)
        # Restriction reads the residuals of neighbours' points; those of colour 0 stay where they are.
        self._fill([colour for colour in self._unfinished() if any(colour)], self._count)
        self._restriction(f)
        return self.layout.whole(self.sums.state[:, self._coarse])[(..., *self.layout.coarse())]

    def _interpolate(self, correction: LocalArray, f: LocalArray) -> None:
        self.layout.whole(self.sums.state[:, self._coarse])[(..., *self.layout.coarse(rim=1))] = correction
        self._interpolation(f)
        self._fill(self._unfinished())

    def _unfinished(self) -> list[Colour]:
        """Return the colours whose equations don't hold after a sweep."""
        return [colour for colour in self.layout.colours if colour not in self._stencil.sweep[-1]]

    # ---- the sums

    def _relaxed(self, colour: Colour, among: list[Colour] | None) -> WeightedSum:
        """Return the solution of a colour's equations for its own points."""
        row = self.layout.row[colour]
        # Entries that are no points of this rank have zero for an inverse: they become zero, until the halo is filled.
        return WeightedSum(row, self._stencil.terms(colour, among), base=row, scale=self._count + row)

    def _residual(self, colour: Colour, later: list[Colour] | None) -> WeightedSum:
        row = self.layout.row[colour]
        terms = self._stencil.terms(colour, later)
        if later is None:
            return WeightedSum(self._count + row, terms, base=row, diagonal=Term(row, row))
        # Its equations held when it was relaxed: what remains is what came later, to points that were zero.
        return WeightedSum(self._count + row, terms)

    def _multiplied(self, colour: Colour) -> WeightedSum:
        row = self.layout.row[colour]
        if colour in self._stencil.sweep[0]:
            return WeightedSum(2 * self._count + row, base=row)
        return WeightedSum(2 * self._count + row, self._stencil.terms(colour), diagonal=Term(row, row), negative=True)

    def _restricted(self, left: list[Colour]) -> WeightedSum:
        terms = []
        for colour in left:
            for weights, shift in self._corners(colour) if any(colour) else ():
                terms.append(Term(weights, self._count + self.layout.row[colour], -shift, -shift))
        return WeightedSum(
            self._coarse, terms, base=self._count if self.layout.colours[0] in left else None, of_right=False
        )

    def _interpolated(self, colour: Colour) -> WeightedSum:
        """Return the weights at a point, times the values of the coarse points around it: the transpose of restricting."""
        row = self.layout.row[colour]
        found = self._corners(colour) if any(colour) else [(None, 0)]
        return WeightedSum(row, [Term(weights, self._coarse, shift) for weights, shift in found], base=row, of_right=False)

    def _corners(self, colour: Colour) -> list[tuple[int, int]]:
        """Return the rows of a colour's weights, and how far the coarse points are."""
        start, first = self.layout.inner.start, self._stencil.weights[colour]
        return [(first + k, self.layout.shifted(corner).start - start) for k, corner in enumerate(corners(colour))]


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
