"""The evaluations that the root's method requests: values and gradients are stored, counted and limited."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array, Function, Scalar
from mpiad.optimize.objective_evaluation import Evaluation

_MAX_STORED = 4  # number of stored points, since a line search may accept an earlier point than the last one
# In all methods, if the objective isn't finite at a trial point, the next trial step has this fraction of its length. For
# log barriers, values from 0.2 to 0.4 need the fewest evaluations.
RETREAT = 0.3
RTOL_OF_VALUES = 1e-8  # a larger relative difference of two values at one point means that the function has changed


class Ending(NamedTuple):
    """The status of a result (see SciPy's method; in `minimize`, zero means success), and its message."""

    status: int
    message: str


# The exit status of a program that is ended by SIGTERM: 128 plus the signal's number.
INTERRUPTED = Ending(
    143,
    "INTERRUPTED: a rank received SIGTERM, or another signal of the checkpoint, and the state is written. Make the same "
    "call again to continue.",
)
# SciPy's status.
STOPPED = Ending(99, "`callback` raised `StopIteration`.")


class EndMethod(Exception):  # noqa: N818 - like StopIteration, not an error
    """Raised in a function that a method calls, to end the method; `at_best`: whether the result is the best point."""

    def __init__(self, ending: Ending, at_best: bool = False):
        super().__init__(ending.message)
        self.ending, self.at_best = ending, at_best


class Point:
    """A point, with the value and the gradient if they have been evaluated."""

    def __init__(self, x: np.ndarray, value: float | None = None, gradient: np.ndarray | None = None):
        self.x, self.value, self.gradient = x.copy(), value, gradient  # SciPy's methods may overwrite x
        self.key = x.tobytes()  # points are compared by bits, so that NaN equals NaN

    @property
    def norm(self) -> float:
        """Return the gradient's largest absolute entry; NaN if it hasn't been evaluated."""
        return math.nan if self.gradient is None else float(np.abs(self.gradient).max(initial=0.0))

    @property
    def finite(self) -> bool:
        """Return whether value and gradient are finite, as far as they have been evaluated."""
        return all(np.all(np.isfinite(each)) for each in (self.value, self.gradient) if each is not None)


class Points:
    """Values and gradients, stored or evaluated on all ranks by `request`; `together`: the method needs both at a point."""

    def __init__(self, evaluation: Evaluation, request: Function, together: bool):
        self._evaluation, self._request = evaluation, request
        self._for_value = "both" if together or evaluation.only_both else "value"
        self._last_with_value: Point | None = None
        self.recent: deque[Point] = deque(maxlen=_MAX_STORED)
        self.counts = {"value": 0, "gradient": 0, "both": 0, "product": 0}  # of collective evaluations; "gradient": alone
        self.maxfun: float | None = None  # maximum number of evaluations of the objective; the first is always made
        self.violation: Callable[[np.ndarray], float] = lambda x: 0.0  # the largest violation of bounds and constraints
        self.best: Point | None = None  # the point with the lowest finite objective among those with the least violation
        self.first: Point | None = None
        self.iterate: Point | None = None  # the last iterate
        self.interruptible = False  # whether the solve ends after a rank received SIGTERM
        self._merit = math.inf, math.inf  # violation and objective of the best point

    def count(self, kind: str) -> int:
        """Return the number of evaluations of the "value" or the "gradient", alone or with the other."""
        return self.counts[kind] + self.counts["both"]

    @property
    def exhausted(self) -> bool:
        """Return whether no further evaluation of the objective is allowed."""
        # The objective at x0 is evaluated in any case.
        return self.maxfun is not None and self.count("value") >= max(self.maxfun, 1)

    def limit_reached(self) -> EndMethod:
        """Return the exception that ends a method that needs more evaluations than `maxfun`."""
        text = f"STOP: all maxfun={self.maxfun:.0f} evaluations are done. Raise options['maxfun'], or accept "
        return EndMethod(Ending(1, text + "x, the best point so far."), at_best=True)

    def with_value(self, x: np.ndarray) -> Point:
        """Return the point x with its objective."""
        x = np.ascontiguousarray(x, dtype=float)
        point = self.at(x)
        if point.value is None:
            self._evaluate(self._for_value, point, x)
        return point

    def gradient(self, x: np.ndarray) -> np.ndarray:
        """Return the gradient at x, shape (n,)."""
        x = np.ascontiguousarray(x, dtype=float)
        point = self.at(x)
        if point.gradient is None:
            # All ranks store the forward pass of the last evaluation of the value.
            ready = point is self._last_with_value or (self._evaluation.separate and point.value is not None)
            self._evaluate("gradient" if ready else "both", point, x)
        return self.for_method(point)[1].copy()

    def for_method(self, point: Point) -> tuple[Scalar, Array]:
        """Return value and gradient, or finite ones of a parabola from the iterate: SciPy's line searches fail at NaN."""
        iterate, pair = self.iterate, (point.value, point.gradient)
        if point.finite or iterate is None or iterate.gradient is None or iterate.value is None:
            return pair
        with np.errstate(over="ignore", invalid="ignore"):
            step = point.x - iterate.x
            slope, square = float(iterate.gradient @ step), float(step @ step)
        if not (slope < 0.0 and 0.0 < square < math.inf and math.isfinite(iterate.value)):
            return pair
        return iterate.value + slope * (1.0 - 0.5 / RETREAT), step * (slope * (1.0 - 1.0 / RETREAT) / square)

    def is_still(self, point: Any) -> bool:
        """Return whether the objective has the value of an earlier run, by an evaluation that isn't counted."""
        found = self._request(self._for_value, point.x)
        return math.isclose(found[0] if self._for_value == "both" else found, point.value, rel_tol=RTOL_OF_VALUES)

    def product(self, x: np.ndarray, direction: np.ndarray) -> np.ndarray:
        """Return the product of the Hessian at x with a direction, shape (n,)."""
        return self._carry_out("product", x, np.asarray(direction, dtype=float).reshape(-1))

    def at(self, x: np.ndarray) -> Point:
        """Return the stored point at x, an array of doubles, or a new point if none is stored."""
        # The best point and the iterate may be older than the recent points.
        key = x.tobytes()
        for point in (*reversed(self.recent), self.best, self.iterate):
            if point is not None and point.key == key:
                return point
        self.recent.append(Point(x))
        return self.recent[-1]

    def _evaluate(self, kind: str, point: Point, x: np.ndarray) -> None:
        if kind != "gradient" and self.exhausted and self.first is not None:
            raise self.limit_reached()
        if self.interruptible and self.iterate is not None and self._evaluation.agreement.end_requested:
            raise EndMethod(INTERRUPTED)
        self.first = self.first or point
        found = self._carry_out(kind, x)
        value, gradient = found if kind == "both" else (found, None) if kind == "value" else (None, found)
        # An evaluation of the gradient consumes the forward pass.
        self._last_with_value = point if kind == "value" else None
        point.gradient = point.gradient if gradient is None else gradient
        if value is not None and point.value is None:
            point.value = value
            if not math.isfinite(value):
                return
            merit = self.violation(point.x), value
            if self.best is None or merit < self._merit:
                self.best, self._merit = point, merit

    def best_improves_on(self, x: np.ndarray, value: float) -> bool:
        """Return whether the best point has a smaller violation than x, or the same violation and a lower value."""
        return self.best is not None and self._merit < (self.violation(x), value)

    @property
    def last_or_best(self) -> Point | None:
        """Return the last iterate or the best point, whichever is better: SLSQP reports trial points as iterates."""
        if self.iterate is None or self.iterate.value is None or self.best is None:
            return self.iterate or self.best
        finite = math.isfinite(self.iterate.value)
        return self.best if not finite or self.best_improves_on(self.iterate.x, self.iterate.value) else self.iterate

    def _carry_out(self, kind: str, *vectors: np.ndarray) -> Any:
        found = self._request(kind, *vectors)
        self.counts[kind] += 1
        return found
