"""The limited memory of a rank's piece: two passes over it for each iteration, and one reduction.

The first pass writes the newest pair and takes its products, and the gradient's, with all others; their sums go to the
root in one message, which answers with the coefficients of the direction. The second pass makes it. Both work in blocks
that stay in cache, so that the memory is read twice: (4m + 3) n numbers travel, and little else.
"""

from __future__ import annotations

import numpy as np

from mpiad.optimize.sharded.blocks import blocks
from mpiad.optimize.sharded.box import Box
from mpiad.optimize.sharded.point import Point
from mpiad.optimize.sharded.recursion import combination
from mpiad.optimize.sharded.totals import Totals

__all__ = ["Memory"]


class Memory:
    """The last steps and gradient changes.

    Parameters
    ----------
    size : int
        Variables of this rank's piece.
    maxcor : int
        Pairs that are kept.
    box : Box or None
        With bounds, products are taken over the free variables, anew in each iteration.
    totals : Totals

    Attributes
    ----------
    reach : float
        Length of the direction, over all ranks, where there are no bounds.
    """

    def __init__(self, size: int, maxcor: int, box: Box | None, totals: Totals):
        self._size, self._maxcor, self._box, self._totals = size, maxcor, box, totals
        # Row 2j holds the steps of pair j, row 2j + 1 the changes of the gradient; untouched rows take no memory.
        self._rows = np.empty((2 * maxcor, size))
        self._products = np.zeros((2 * maxcor, 2 * maxcor))  # on the root
        self._pairs: list[int] = []
        self._coefficients = np.zeros(1)
        self.reach = 0.0

    @property
    def empty(self) -> bool:
        """Return whether there is no pair."""
        return not self._pairs

    def forget(self) -> None:
        """Drop all pairs."""
        self._pairs = []

    def update(
        self, new: Point, pair: tuple[Point, np.ndarray, float] | None, stop: bool
    ) -> tuple[float, float, bool]:
        """Take a new point into account; return the direction's slope, its square's root, and whether any rank stops.

        Parameters
        ----------
        new : Point
            Its norm is known.
        pair : (Point, array, float) or None
            The point before, the direction from there and the step along it, where the two make a pair.
        stop : bool
            Whether this rank wants the solve to end.
        """
        place = self._place_of_next() if pair is not None else -1
        products, extra = self._products_of(new, pair, place)
        parts = np.concatenate([products.ravel(), extra, [float(stop)]])

        def decide(sums: np.ndarray) -> np.ndarray:
            return self._decide(sums[: products.size].reshape(products.shape), sums[products.size :], place)

        # Every rank knows the pairs, so it knows how many coefficients come.
        decision = self._totals.decided(parts, 2 * self._filled + 5, decide)
        self._coefficients, self.reach = decision[:-4], float(decision[-4])
        return float(decision[-3]), float(decision[-2]), bool(decision[-1])

    @property
    def _filled(self) -> int:
        return max(self._pairs, default=-1) + 1

    def _place_of_next(self) -> int:
        place = self._pairs.pop(0) if len(self._pairs) == self._maxcor else self._filled
        self._pairs.append(place)
        return place

    def _products_of(
        self, new: Point, pair: tuple[Point, np.ndarray, float] | None, place: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return this rank's part of the products of old vectors with new ones, and of g · g and the bounds' slope."""
        rows = self._rows[: 2 * self._filled]
        fresh = len(rows) if self._box is not None else 2 * (pair is not None)
        products, extra = np.zeros((len(rows), fresh + 1)), np.zeros(2)
        for part in blocks(self._size):
            if pair is not None:
                old, direction, step = pair
                np.multiply(direction[part], step, out=rows[2 * place, part])
                np.subtract(new.gradient[part], old.gradient[part], out=rows[2 * place + 1, part])
            block, gradient = rows[:, part], new.gradient[part]
            if self._box is not None:
                free = self._box.free(new.x[part], gradient, new.norm, part)
                way = self._box.way(new.x[part], gradient, part)
                extra[1] += gradient @ np.where(free, 0.0, way)
                block, gradient = block * free, gradient * free
                products[:, :-1] += block @ block.T
            elif pair is not None:
                # One by one: BLAS's product with a matrix of two columns takes twice as long.
                products[:, 0] += block @ rows[2 * place, part]
                products[:, 1] += block @ rows[2 * place + 1, part]
            products[:, -1] += block @ gradient
            extra[0] += gradient @ gradient
        return products, extra

    def _decide(self, products: np.ndarray, others: np.ndarray, place: int) -> np.ndarray:
        """Return what the root tells: the coefficients, the direction's length, its slope, the gradient's length, stop."""
        count = len(products)
        if self._box is not None:
            self._products[:count, :count] = products[:, :-1]
        elif place >= 0:
            new = slice(2 * place, 2 * place + 2)
            self._products[:count, new] = products[:, :-1]
            self._products[new, :count] = products[:, :-1].T
        square, of_held, stop = others
        coefficients, slope = combination(
            self._products[:count, :count], products[:, -1], float(square), self._pairs
        )
        own, of_gradient = coefficients[:-1], coefficients[-1]
        reach = own @ (self._products[:count, :count] @ own + 2.0 * of_gradient * products[:, -1])
        reach = np.sqrt(max(reach + of_gradient**2 * square, 0.0))
        return np.concatenate([coefficients, [reach, slope + of_held, np.sqrt(square), stop]])

    def direction(self, at: Point, out: np.ndarray) -> None:
        """Write the direction at a point, for which `update` was called last, shape (n,)."""
        coefficients, of_gradient = self._coefficients[:-1], self._coefficients[-1]
        rows = self._rows[: len(coefficients)]
        for part in blocks(self._size):
            gradient, piece = at.gradient[part], out[part]
            np.matmul(coefficients, rows[:, part], out=piece)
            piece += of_gradient * gradient
            if self._box is not None:
                free = self._box.free(at.x[part], gradient, at.norm, part)
                np.copyto(piece, self._box.way(at.x[part], gradient, part), where=~free)
