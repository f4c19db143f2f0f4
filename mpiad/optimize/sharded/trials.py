"""Points along a direction: every rank moves its piece, all evaluate, and two small messages tell what is to be known."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from mpiad.optimize.sharded.box import Box
from mpiad.optimize.sharded.memory import Memory
from mpiad.optimize.sharded.pieces import PieceEvaluation
from mpiad.optimize.sharded.point import Point
from mpiad.optimize.sharded.totals import Totals

__all__ = ["Trials"]


class Trials:
    """Evaluate, and count.

    Parameters
    ----------
    evaluation : PieceEvaluation
    totals : Totals
    box : Box or None
    memory : Memory
        Where the direction comes from and gradients go to.

    Attributes
    ----------
    count : int
        Evaluations so far.
    """

    def __init__(self, evaluation: PieceEvaluation, totals: Totals, box: Box | None, memory: Memory):
        self._evaluation, self._totals, self._box, self._memory = evaluation, totals, box, memory
        self._spare: list[np.ndarray] = []
        self.count = 0

    def start(self, x: np.ndarray) -> Point:
        """Evaluate the starting point, moved into the bounds; x belongs to the point from now on."""
        if self._box is not None:
            self._box.project(x)
        return self._evaluated(Point(x), None)

    def along(self, here: Point, direction: Iterator[tuple[slice, np.ndarray]], step: float) -> Point:
        """Evaluate a step along the direction, projected onto the bounds.

        Parameters
        ----------
        here : Point
        direction : iterator of (slice, array)
            Its blocks, which may be made only now.
        step : float
        """
        point = Point(self._spare.pop() if self._spare else np.empty_like(here.x))
        point.step = step
        lent = self._evaluation.lend()
        for part, way in direction:
            piece = point.x[part]
            np.multiply(way, step, out=piece)
            piece += here.x[part]
            if self._box is not None:
                point.clipped |= self._box.project(piece, part)
            if lent is not None:
                np.copyto(lent[part], piece)
        return self._evaluated(point, here)

    def release(self, point: Point) -> None:
        """Take back the memory of a point that is not needed any more."""
        self._spare.append(point.x)

    def _evaluated(self, point: Point, here: Point | None) -> Point:
        self.count += 1
        value, gradient = self._evaluation.both(point.x)
        trial, terms, largest = self._memory.ring.trial, [0.0] * 4, 0.0
        for part, tile in self._memory.tiles:
            np.copyto(tile[trial], gradient[part])  # type: ignore[index]
            largest = max(largest, self._largest(point, tile[trial], part))
            if here is not None:
                products = self._products(point, here, tile, part)
                terms = [term + product for term, product in zip(terms, products)]
        broken = not math.isfinite(largest)
        numbers = self._totals.of(terms, [0.0 if broken else largest, broken, point.clipped], [value])
        point.slope, point.predicted, point.met, square, point.norm, any_broken, clipped, point.value = numbers
        point.clipped, point.length = bool(clipped), math.sqrt(square)
        point.finite = not any_broken and math.isfinite(point.value) and math.isfinite(point.slope)
        return point

    def _largest(self, point: Point, gradient: np.ndarray, part: slice) -> float:
        size = max(float(gradient.max()), -float(gradient.min()))
        # NaN too: where a gradient isn't finite, its projected step may be.
        if not size < math.inf:
            return math.inf
        return size if self._box is None else float(np.max(np.abs(self._box.way(point.x[part], gradient, part))))

    def _products(self, point: Point, here: Point, tile: np.ndarray, part: slice) -> tuple[float, float, float, float]:
        """Return terms of the slope, of the changes that the gradients before and here predict, and of the way's square."""
        before = self._memory.ring.gradient
        gradient, direction = tile[self._memory.ring.trial], tile[before + 1]
        if self._box is None:
            slope = float(gradient @ direction)
            return slope, 0.0, 0.0, point.step**2 * float(direction @ direction)
        moved = point.x[part] - here.x[part]
        inside = self._box.inside(point.x[part], part)
        slope, square = float(gradient @ (direction * inside)), float(moved @ moved)
        return slope, float(tile[before] @ moved), float(gradient @ moved), square
