"""Points along a direction: every rank moves its piece, all evaluate, and two small messages tell what is to be known."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from mpiad.optimize.sharded.arithmetic import largest_of
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
            piece, copy = point.x[part], None if lent is None else lent[part]
            self._memory.arithmetic.move(here.x[part], way, step, piece, copy)
            if self._box is not None and self._box.project(piece, part):
                point.clipped = True
                if copy is not None:
                    np.copyto(copy, piece)
        return self._evaluated(point, here)

    def release(self, point: Point) -> None:
        """Take back the memory of a point that is not needed any more."""
        self._spare.append(point.x)

    def _evaluated(self, point: Point, here: Point | None) -> Point:
        self.count += 1
        value, gradient = self._evaluation.both(point.x)
        terms, largest = [0.0] * 4, 0.0
        for part, tile in self._memory.tiles:
            measured = self._measured(point, here, gradient[part], tile, part)  # type: ignore[index]
            largest = max(largest, measured[0])
            terms = [term + product for term, product in zip(terms, measured[1:])]
        broken = not math.isfinite(largest)
        numbers = self._totals.of(terms, [0.0 if broken else largest, broken, point.clipped], [value])
        point.slope, point.predicted, point.met, square, point.norm, any_broken, clipped, point.value = numbers
        point.clipped, point.length = bool(clipped), math.sqrt(square)
        point.finite = not any_broken and math.isfinite(point.value) and math.isfinite(point.slope)
        return point

    def _measured(
        self, point: Point, here: Point | None, gradient: np.ndarray, tile: np.ndarray, part: slice
    ) -> tuple[float, float, float, float, float]:
        """Put a stretch of the gradient into the memory; return its largest entry, and its terms.

        The terms are those of the slope, of the changes that the gradients before and here predict, and of the square of
        the way.
        """
        before, trial = self._memory.ring.gradient, tile[self._memory.ring.trial]
        direction = tile[before + 1]
        if self._box is None:
            largest, slope, square = self._memory.arithmetic.take(gradient, direction, trial)
            return largest, slope, 0.0, 0.0, 0.0 if here is None else point.step**2 * square
        np.copyto(trial, gradient)
        # Where a gradient isn't finite, its projected step may be.
        largest = largest_of(trial)
        if largest < math.inf:
            largest = float(np.max(np.abs(self._box.way(point.x[part], trial, part))))
        if here is None:
            return largest, 0.0, 0.0, 0.0, 0.0
        moved = point.x[part] - here.x[part]
        inside = self._box.inside(point.x[part], part)
        slope, square = float(trial @ (direction * inside)), float(moved @ moved)
        return largest, slope, float(tile[before] @ moved), float(trial @ moved), square
