"""The operator of a level: for each colour of points the couplings with their neighbours, and the diagonal."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from mpiad._typing import LocalArray
from mpiad.domain.allocation import empty_beside
from mpiad.linalg.multigrid.colour_layout import Colour, Layout, reach
from mpiad.transport.device_arrays import ArrayModule

__all__ = ["Offset", "Stencil", "offsets", "stencil_of"]

Offset = tuple[int, ...]


def offsets(ndim: int) -> list[Offset]:
    """Return the offsets of all neighbours, corners included, in an order of which the reverse is the opposite one."""
    return [offset for offset in itertools.product((-1, 0, 1), repeat=ndim) if any(offset)]


class Stencil:
    """A symmetric operator on the points of a level: (A u)(x) = D(x) u(x) - Σ N(x, offset) u(x + offset).

    Parameters
    ----------
    layout : Layout
    couplings : mapping
        For each offset the N of all colours, of shape (colours, size); zero outside of the block.
    diagonal : array of shape (colours, size)
        D; zero outside of the block.
    inverse : array, optional
        1 / D where D isn't zero, where that is known.

    Attributes
    ----------
    sweep : list of list of colours
        The order of a Gauss-Seidel sweep: groups of colours whose points aren't coupled with each other.
    """

    def __init__(
        self,
        layout: Layout,
        couplings: Mapping[Offset, LocalArray],
        diagonal: LocalArray,
        inverse: LocalArray | None = None,
    ):
        self.layout, self.couplings, self.diagonal = layout, couplings, diagonal
        known = np.divide(1.0, diagonal, out=np.zeros_like(diagonal), where=diagonal > 0) if inverse is None else inverse
        self.inverse: LocalArray = known
        self.sweep = _sweep(layout.colours, any(np.count_nonzero(offset) > 1 for offset in couplings))
        self._terms = {colour: self._terms_of(colour) for colour in layout.colours}
        # The slices of all neighbours are found once: on small levels finding them takes longer than using them.
        self._product = empty_beside(diagonal, (layout.inner.stop - layout.inner.start,))

    def on(self, home: ArrayModule) -> Stencil:
        """Return the same operator on a device, of copies of its arrays."""
        couplings = {offset: home.to_device(coupling) for offset, coupling in self.couplings.items()}
        return Stencil(self.layout, couplings, home.to_device(self.diagonal), home.to_device(self.inverse))

    def _terms_of(self, colour: Colour) -> list[tuple[Colour, int, slice, LocalArray]]:
        terms, row = [], self.layout.row[colour]
        for offset, coupling in self.couplings.items():
            neighbour, steps = reach(colour, offset)
            inner = coupling[row, self.layout.inner]
            terms.append((neighbour, self.layout.row[neighbour], self.layout.shifted(steps), inner))
        return terms

    def neighbours(
        self, out: LocalArray, u: LocalArray, colour: Colour, among: Sequence[Colour] | None = None, sign: int = 1
    ) -> None:
        """Add (or, by its sign, subtract) what the neighbours of a colour contribute, or those of some colours.

        Parameters
        ----------
        out : array, the inner part of a colour's array
        u : array of shape (colours, size)
        colour : tuple of int
        among : sequence of colours, optional
        sign : {1, -1}
        """
        gather = np.add if sign > 0 else np.subtract
        for neighbour, row, there, coupling in self._terms[colour]:
            if among is None or neighbour in among:
                np.multiply(coupling, u[row, there], out=self._product)
                gather(out, self._product, out=out)


def _sweep(colours: list[Colour], corners: bool) -> list[list[Colour]]:
    # By the sum of the indices: in a star the neighbours of an even point are odd, so a group updates at once.
    even = [colour for colour in colours if sum(colour) % 2 == 0]
    odd = [colour for colour in colours if sum(colour) % 2]
    if corners:
        return [[colour] for colour in even + odd]
    # Without corners two groups are enough, as on a chessboard. In three dimensions, where smoothing is what limits the
    # fine level, half a sweep more takes three iterations from eleven.
    return [odd, even, odd] if len(colours) == 8 else [even, odd]


def stencil_of(layout: Layout, stack: np.ndarray, found: Sequence[Offset]) -> Stencil:
    """Return the stencil of a block's couplings.

    Parameters
    ----------
    stack : array of shape (1 + len(found), *box.shape)
        The diagonal, and the couplings of each offset.
    """
    split = layout.split(stack)
    return Stencil(layout, dict(zip(found, split[1:])), split[0])
