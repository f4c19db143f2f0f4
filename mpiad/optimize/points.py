"""The root's view of the objective: each thing evaluated once per point, and counted."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np

from mpiad.optimize.evaluation import Evaluation
from mpiad.optimize.protocol import BOTH, GRADIENT, PRODUCT, VALUE, Instructions, evaluate

__all__ = ["Counts", "Point", "Points"]

# A line search may accept a point that isn't the last one it tried.
_REMEMBERED = 4


class Counts(dict):
    """Numbers of collective evaluations: "value", "gradient" (alone), "both", "product"."""

    @property
    def of_objective(self) -> int:
        """Number of evaluations of the objective, with its gradient or without."""
        return self["value"] + self["both"]


class Point:
    """A point and what is known there."""

    __slots__ = ("gradient", "value", "x")

    def __init__(self, x: np.ndarray):
        self.x = x.copy()  # SciPy's methods go on working in their arrays
        self.value: float | None = None
        self.gradient: np.ndarray | None = None

    @property
    def gradient_norm(self) -> float:
        """Return the gradient's largest absolute entry; NaN where it isn't known."""
        return math.nan if self.gradient is None else float(np.max(np.abs(self.gradient), initial=0.0))


class Points:
    """Evaluate on all ranks, where the last points don't know the answer.

    Parameters
    ----------
    evaluation : Evaluation
    instructions : Instructions
    together : bool
        Whether the method always wants the gradient where it wants the value.
    """

    def __init__(self, evaluation: Evaluation, instructions: Instructions, together: bool):
        self._evaluation, self._instructions = evaluation, instructions
        self._for_value = BOTH if together or evaluation.only_both else VALUE
        self._last_valued: Point | None = None
        self._recent: deque[Point] = deque(maxlen=_REMEMBERED)
        self.counts = Counts(value=0, gradient=0, both=0, product=0)

    def value(self, x: np.ndarray) -> float:
        """Return the objective at x, shape (n,)."""
        point = self.at(x)
        if point.value is None:
            self._ask(self._for_value, point)
        return point.value  # type: ignore[return-value]

    def gradient(self, x: np.ndarray) -> np.ndarray:
        """Return the gradient at x, shape (n,)."""
        point = self.at(x)
        if point.gradient is None:
            # The value's forward pass is kept on all ranks until the next one.
            ready = point is self._last_valued or (self._evaluation.separate and point.value is not None)
            self._ask(GRADIENT if ready else BOTH, point)
        return point.gradient.copy()  # type: ignore[union-attr]

    def product(self, x: np.ndarray, direction: np.ndarray) -> np.ndarray:
        """Return the product of the Hessian at x with a direction, shape (n,)."""
        return self._carry_out(PRODUCT, "product", x, np.asarray(direction, dtype=float).reshape(-1))

    def at(self, x: np.ndarray) -> Point:
        """Return what is known at x."""
        for point in reversed(self._recent):
            if np.array_equal(point.x, x):
                return point
        self._recent.append(Point(np.asarray(x, dtype=float)))
        return self._recent[-1]

    def _ask(self, kind: int, point: Point) -> None:
        value, gradient = self._carry_out(kind, {VALUE: "value", GRADIENT: "gradient", BOTH: "both"}[kind], point.x)
        self._last_valued = point if kind == VALUE else None
        point.value = point.value if value is None else value
        point.gradient = point.gradient if gradient is None else gradient

    def _carry_out(self, kind: int, name: str, x: np.ndarray, direction: np.ndarray | None = None) -> Any:
        self._evaluation.raise_if_ended()  # the other ranks don't listen any more
        self.counts[name] += 1
        self._instructions.give(kind, x, direction)
        return evaluate(self._evaluation, kind, x, direction)
