"""Points along a direction: every rank moves its piece, all evaluate, and two small messages tell what is to be known."""

from __future__ import annotations

import math

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

    def along(self, here: Point, step: float) -> Point:
        """Evaluate a step along the direction from a point, projected onto the bounds."""
        point = Point(self._spare.pop() if self._spare else np.empty_like(here.x))
        point.step = step
        point.clipped = self._memory.move(here, step, point.x, self._evaluation.lend())
        return self._evaluated(point, here)

    def release(self, point: Point) -> None:
        """Take back the memory of a point that is not needed any more."""
        self._spare.append(point.x)

    def _evaluated(self, point: Point, here: Point | None) -> Point:
        self.count += 1
        value, gradient = self._evaluation.both(point.x)
        largest, *terms = self._measured(point, here, gradient)  # type: ignore[arg-type]
        # Told by a number of its own, since what MPI takes for the maximum of a NaN isn't said.
        broken = not math.isfinite(largest)
        numbers = self._totals.of(terms, [0.0 if broken else largest, broken, point.clipped], [value])
        point.slope, point.predicted, point.met, square, point.norm, any_broken, clipped, point.value = numbers
        point.clipped, point.length = bool(clipped), math.sqrt(square)
        point.finite = not any_broken and math.isfinite(point.value) and math.isfinite(point.slope)
        return point

    def _measured(self, point: Point, here: Point | None, gradient: np.ndarray) -> list[float]:
        """Put the gradient into the memory; return its largest entry, and this rank's terms.

        The terms are those of the slope, of the changes that the gradients before and here predict, and of the square of
        the way.
        """
        ring, tiles = self._memory.ring, self._memory.tiles
        if self._box is None:
            largest, slope, square = self._memory.arithmetic.take(tiles, gradient, ring.gradient + 1, ring.trial)
            return [largest, slope, 0.0, 0.0, 0.0 if here is None else point.step**2 * square]
        found = np.zeros(5)
        for part, tile in tiles:
            largest, *terms = self._measured_within(self._box, (point, here), gradient[part], tile, part)
            found[0] = max(found[0], largest)
            found[1:] += terms
        return found.tolist()

    @np.errstate(over="ignore", invalid="ignore")  # as in `take`: nothing need be finite at a trial point
    def _measured_within(
        self, box: Box, points: tuple[Point, Point | None], gradient: np.ndarray, tile: np.ndarray, part: slice
    ) -> tuple[float, float, float, float, float]:
        """Return what `_measured` does, of one stretch."""
        point, here = points
        before, trial = self._memory.ring.gradient, tile[self._memory.ring.trial]
        direction = tile[before + 1]
        np.copyto(trial, gradient)
        # Where a gradient isn't finite, its projected step may be.
        largest = largest_of(trial)
        if largest < math.inf:
            largest = float(np.max(np.abs(box.way(point.x[part], trial, part))))
        if here is None:
            return largest, 0.0, 0.0, 0.0, 0.0
        moved = point.x[part] - here.x[part]
        # A variable that a bound has stopped doesn't move with the step any more, so it takes no part in the slope.
        slope, square = float(trial @ (direction * box.inside(point.x[part], part))), float(moved @ moved)
        return largest, slope, float(tile[before] @ moved), float(trial @ moved), square
