"""Points along a direction: every rank moves its piece, all evaluate, and two small messages tell what is to be known."""

from __future__ import annotations

import math

import numpy as np

from mpiad.optimize.sharded.blocks import blocks
from mpiad.optimize.sharded.box import Box
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

    Attributes
    ----------
    count : int
        Evaluations so far.
    """

    def __init__(self, evaluation: PieceEvaluation, totals: Totals, box: Box | None):
        self._evaluation, self._totals, self._box = evaluation, totals, box
        self._spare: list[np.ndarray] = []
        self.count = 0

    def start(self, x: np.ndarray) -> Point:
        """Evaluate the starting point, moved into the bounds; x belongs to the point from now on."""
        if self._box is not None:
            self._box.project(x)
        return self._evaluated(Point(x), None, None)

    def along(self, here: Point, direction: np.ndarray, step: float) -> Point:
        """Evaluate a step along the direction, projected onto the bounds."""
        point = Point(self._spare.pop() if self._spare else np.empty_like(direction))
        point.step = step
        for part in blocks(direction.size):
            piece = point.x[part]
            np.multiply(direction[part], step, out=piece)
            piece += here.x[part]
            if self._box is not None:
                point.clipped |= self._box.project(piece, part)
        return self._evaluated(point, here, direction)

    def release(self, point: Point) -> None:
        """Take back the memory of a point that is not needed any more."""
        self._spare.append(point.x)

    def _evaluated(self, point: Point, here: Point | None, direction: np.ndarray | None) -> Point:
        self.count += 1
        value, point.gradient = self._evaluation.both(point.x)  # type: ignore[assignment]
        terms, largest = [0.0, 0.0, 0.0, 0.0], 0.0
        for part in blocks(point.x.size):
            largest = max(largest, self._largest(point, part))
            if here is not None:
                products = self._products(point, here, direction[part], part)  # type: ignore[index]
                terms = [term + product for term, product in zip(terms, products)]
        broken = not math.isfinite(largest)
        numbers = self._totals.of(terms, [0.0 if broken else largest, broken, point.clipped], [value])
        point.slope, point.predicted, point.met, square, point.norm, any_broken, clipped, point.value = numbers
        point.clipped, point.length = bool(clipped), math.sqrt(square)
        point.finite = not any_broken and math.isfinite(point.value) and math.isfinite(point.slope)
        return point

    def _largest(self, point: Point, part: slice) -> float:
        gradient = point.gradient[part]
        size = max(float(gradient.max()), -float(gradient.min()))
        # NaN too: where a gradient isn't finite, its projected step may be.
        if not size < math.inf:
            return math.inf
        return size if self._box is None else float(np.max(np.abs(self._box.way(point.x[part], gradient, part))))

    def _products(self, point: Point, here: Point, direction: np.ndarray, part: slice) -> tuple[float, float, float, float]:
        gradient = point.gradient[part]
        if self._box is None:
            return float(gradient @ direction), 0.0, 0.0, 0.0
        moved = point.x[part] - here.x[part]
        inside = self._box.inside(point.x[part], part)
        slope, square = float(gradient @ (direction * inside)), float(moved @ moved)
        return slope, float(here.gradient[part] @ moved), float(gradient @ moved), square
