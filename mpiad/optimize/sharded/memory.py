"""The limited memory of a rank's piece: two passes over it for each iteration, and one reduction.

The first pass turns the gradient before into the newest change and takes that one's products with all others; their sums
go to the root in one message, which answers with the coefficients of the direction. The second pass makes it. So the
memory is read twice and the direction written: (4m + 3) n numbers travel, and little else.

Of the gradient no products are taken: those with what is in the memory change by those of the newest change. Only where
it has become so much smaller that rounding would show are they taken anew.

Once a trial point wasn't finite, the direction of `hyperbolas` may be made after the first pass, and the root says
whether it is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mpiad.optimize.sharded.arithmetic import Arithmetic
from mpiad.optimize.sharded.attempts import PAIRS, Attempts
from mpiad.optimize.sharded.box import Box
from mpiad.optimize.sharded.compiled import arithmetic_for
from mpiad.optimize.sharded.hyperbolas import Pair, are_followed, misfit, way
from mpiad.optimize.sharded.point import Point
from mpiad.optimize.sharded.recursion import combination
from mpiad.optimize.sharded.ring import Ring
from mpiad.optimize.sharded.tiles import Tiles
from mpiad.optimize.sharded.totals import Totals

__all__ = ["Memory"]

# How far the gradient may have fallen since its products were last taken themselves: their error is this many times that
# of rounding.
_FALL = 100.0


class Memory:
    """The last steps and gradient changes, and the gradients of the point where the solve is and of a trial point.

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
    ring : Ring
        Which row holds what.
    tiles : Tiles
        The rows.
    arithmetic : Arithmetic
        What works on them.
    attempts : Attempts
        When hyperbolas are tried, and whether the direction is theirs.
    """

    def __init__(self, size: int, maxcor: int, box: Box | None, totals: Totals):
        self._size, self._box, self._totals = size, box, totals
        self.ring = Ring(maxcor)
        height = self.ring.height
        self._room()
        # A row of steps holds the direction; the step is so many times as long.
        self._lengths = np.ones(height)
        self._products, self._with_gradient = np.zeros((height, height)), np.zeros(height)  # on the root
        self._coefficients, self._made = np.zeros(1), False  # whether the direction is made of them
        self._largest_norm = 0.0  # of the gradients since the products with one were taken
        self._aside: np.ndarray | None = None
        self.attempts = Attempts()

    def _room(self) -> None:
        self.tiles: Any = Tiles(self.ring.height, self._size)
        self.arithmetic: Arithmetic = arithmetic_for(self._size)

    def _empty(self) -> Any:
        return np.empty(self._size)

    def written(self, x: Any) -> np.ndarray:
        """Return an array as it is written to a file."""
        return x

    def taken(self, x: np.ndarray) -> Any:
        """Return an array that was read from a file where the memory works on it."""
        return x

    def fetched(self, numbers: Any) -> np.ndarray:
        """Return a few numbers on the host."""
        return numbers

    def _stretches(self) -> Iterator[tuple[slice, Any]]:
        """Yield all rows in stretches so short that a few arrays as long can be made of each."""
        return iter(self.tiles)

    @property
    def empty(self) -> bool:
        """Return whether there is no pair."""
        return self.ring.count == 0

    def forget(self) -> None:
        """Drop all pairs."""
        self.ring.forget()

    def put_aside(self, point: Point) -> None:
        """Keep a trial point's gradient while others are tried."""
        if self._aside is None:
            self._aside = self._empty()
        self.tiles.read(self.ring.trial, self._aside)
        point.aside = True

    def take_back(self, point: Point) -> None:
        """Put a gradient that was kept where that of a trial point belongs."""
        if point.aside:
            self.tiles.write(self.ring.trial, self._aside)  # type: ignore[arg-type]
            point.aside = False

    def gradient(self, point: Point) -> np.ndarray:
        """Return the gradient at the point where the solve is, or at the last trial point."""
        return self.tiles.read(self.ring.gradient if point.settled else self.ring.trial, self._empty())

    def update(self, new: Point, before: Point | None, stop: bool) -> tuple[float, float, bool]:
        """Move to a trial point; return the next direction's slope, the gradient's length, and whether any rank stops.

        Parameters
        ----------
        new : Point
            The last trial point, or where the solve already is.
        before : Point or None
            Where the solve was, if the step from there makes a pair.
        stop : bool
            Whether this rank wants the solve to end.
        """
        keep = before is not None
        self._move(new, keep)
        anew = self._is_due(new.norm) or not keep
        parts = self._products_of(keep, anew) if self._box is None else self._products_of_free(new, before)

        bent = self._bent(new) if self.attempts.due(self.ring.count) else np.zeros(0)

        def decide(sums: np.ndarray) -> np.ndarray:
            told = self._decide(sums[len(bent) :], new, keep, anew)
            followed = len(bent) > 0 and are_followed(*sums[:3])
            told[-3] = sums[0] if followed else told[-3]
            return np.append(told, float(followed))

        # Every rank knows how many pairs there are, so it knows how many coefficients come.
        sent = np.concatenate([bent, parts, [float(stop)]])
        decision = self._totals.decided(sent, 2 * self.ring.count + 5, decide)
        *coefficients, slope, length, stopped, followed = decision.tolist()
        self.attempts.note(len(bent) > 0, bool(followed))
        self._coefficients, self._made = np.array(coefficients), bool(followed)
        return slope, length, bool(stopped)

    def state(self) -> dict[str, np.ndarray]:
        """Return all that the next steps depend on, in arrays; the largest is the memory itself, not a copy."""
        numbers = [self.ring.first, self.ring.count, self._largest_norm]
        return {
            "rows": self.written(self.tiles.memory), "ring": np.array(numbers), "lengths": self._lengths,
            "products": self._products, "with_gradient": self._with_gradient, "coefficients": self._coefficients,
            "attempts": self.attempts.numbers(),
        }

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Take over what `state` returned."""
        self.tiles.memory = self.taken(state["rows"])
        first, count, self._largest_norm = state["ring"].tolist()
        self.ring.first, self.ring.count = int(first), int(count)
        self._lengths, self._products = state["lengths"], state["products"]
        self._with_gradient, self._coefficients = state["with_gradient"], state["coefficients"]
        self.attempts.restore(state["attempts"])
        self._made = self.attempts.followed  # that direction was written with the rows; any other is made anew

    def _move(self, new: Point, keep: bool) -> None:
        self.attempts.count(keep)
        if keep:
            self.ring.advance()
            self._lengths[self.ring.newest + 1] = new.step if self._box is None else 1.0
        elif not new.settled:
            for _, tile in self.tiles:
                np.copyto(tile[self.ring.gradient], tile[self.ring.trial])
        new.settled = True

    def _is_due(self, norm: float) -> bool:
        self._largest_norm = max(self._largest_norm, norm)
        if self._largest_norm <= _FALL * norm:
            return False
        self._largest_norm = norm
        return True

    def _products_of(self, keep: bool, anew: bool) -> np.ndarray:
        """Return this rank's part of the products with the newest change, with the gradient, and of its square."""
        of_change, of_gradient = np.zeros((2, 2 * self.ring.count + 1))
        parts, current, square = self.ring.parts(), self.ring.gradient, 0.0
        if keep:
            square = self.arithmetic.change(self.tiles, parts, self.ring.newest, current, of_change)
        if anew:
            square = self.arithmetic.products(self.tiles, parts, current, of_gradient)
        return np.concatenate([of_change, of_gradient[:-1], [square]])

    def _products_of_free(self, new: Point, before: Point | None) -> np.ndarray:
        """Return all products of free variables as a flat square, and the slope of those that a bound holds."""
        rows, box, newest = self.ring.rows(), self._box, self.ring.newest
        products, of_held = np.zeros((len(rows), len(rows))), 0.0
        for part, tile in self.tiles:
            gradient = tile[self.ring.gradient]
            if before is not None:
                np.subtract(gradient, tile[newest], out=tile[newest])
                np.subtract(new.x[part], before.x[part], out=tile[newest + 1])  # the step that the bounds have left
            free = box.free(new.x[part], gradient, new.norm, part)  # type: ignore[union-attr]
            way = box.way(new.x[part], gradient, part)  # type: ignore[union-attr]
            of_held += gradient @ np.where(free, 0.0, way)
            block = tile[rows] * free
            products += block @ block.T
        return np.append(products, of_held)

    def _bent(self, new: Point) -> np.ndarray:
        """Write the way to the zeros of hyperbolas as the direction; return this rank's part of its slope and misfit."""
        rows, row, found = self.ring.last(PAIRS), self.ring.gradient, []
        otherwise = new.length**2 / (new.met - new.predicted)  # of the newest pair, s·s / s·y
        with np.errstate(all="ignore"):  # what can't be divided is left out by what comes out
            for part, tile in self._stretches():
                gradient = tile[row]
                newest, older, oldest = (Pair(self._lengths[y + 1] * tile[y + 1], tile[y]) for y in rows)
                there = way(gradient, newest, older, otherwise)
                if self._box is not None:
                    free = self._box.free(new.x[part], gradient, new.norm, part)
                    there = np.where(free, there, self._box.way(new.x[part], gradient, part))
                tile[row + 1] = there
                found.append(np.stack([np.sum(gradient * there), *misfit(gradient, newest, older, oldest)]))
        return self.fetched(sum(found)) if found else np.zeros(3)

    def _decide(self, sums: np.ndarray, new: Point, keep: bool, anew: bool) -> np.ndarray:
        """Return what the root tells: the coefficients, the slope, the gradient's length, whether to stop."""
        rows, stop, of_held = self.ring.rows(), sums[-1], 0.0
        lengths = self._lengths[rows]
        if self._box is not None:
            of_held = sums[-2]
            products = sums[:-2].reshape(len(rows), len(rows))
            with_gradient = products[-1]
        else:
            self._take(sums, rows, new, keep, anew)
            products, with_gradient = self._products[np.ix_(rows, rows)], self._with_gradient[rows]
        coefficients, slope = combination(products[:-1, :-1], with_gradient[:-1], float(with_gradient[-1]))
        return np.concatenate([coefficients * lengths, [slope + of_held, np.sqrt(with_gradient[-1]), stop]])

    def _take(self, sums: np.ndarray, rows: np.ndarray, new: Point, keep: bool, anew: bool) -> None:
        """Put new products into the tables, those of a direction times its step's length."""
        lengths, old, known = self._lengths[rows], rows[:-1], self._with_gradient
        of_change, of_gradient = sums[: len(rows)] * lengths, sums[len(rows) : 2 * len(rows) - 1] * lengths[:-1]
        if keep:
            change = self.ring.newest
            self._products[change, rows] = self._products[rows, change] = of_change
            known[old] += of_change[:-1]
            # The step's product with the gradient is known from the line search: its slope times its length.
            known[change], known[change + 1] = of_change[-1], new.step * new.slope
        if anew:
            known[old] = of_gradient
        known[rows[-1]] = sums[2 * len(rows) - 1]

    def move(self, at: Point, step: float, out: np.ndarray, copy: np.ndarray | None) -> bool:
        """Write where a step along the direction from a point leads, and once more where there is a copy.

        Parameters
        ----------
        at : Point
            Where the solve is; `update` was called there last. The first step from it also makes the direction.
        step : float
        out : array, shape (n,)
        copy : array, shape (n,), or None

        Returns
        -------
        bool
            Whether a bound stopped any variable.
        """
        parts = [] if self._made else self.ring.parts()
        row, clipped = self.ring.gradient + 1, False
        if self._box is None:
            self.arithmetic.advance(self.tiles, parts, self._coefficients, row, at.x, step, (out, copy))
        else:
            if parts:
                self.arithmetic.combine(self.tiles, parts, self._coefficients, row)
                self._turn(at, self._box)
            for part, tile in self.tiles:
                np.multiply(tile[row], step, out=out[part])
                out[part] += at.x[part]
                clipped |= self._box.project(out[part], part)
            if copy is not None:
                np.copyto(copy, out)
        self._made = True
        return clipped

    def _turn(self, at: Point, box: Box) -> None:
        """Send variables that a bound holds straight to it."""
        for part, tile in self.tiles:
            gradient = tile[self.ring.gradient]
            free = box.free(at.x[part], gradient, at.norm, part)
            np.copyto(tile[self.ring.gradient + 1], box.way(at.x[part], gradient, part), where=~free)
