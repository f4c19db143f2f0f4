"""The method of moving asymptotes for distributed variables with bounds, and few constraints f_i(x) ≤ 0.

In each iteration the objective f_0 and the constraints are replaced by separable convex functions with the same values and
slopes at the current point, sums of p_ij / (U_j - x_j) + q_ij / (x_j - L_j). The asymptotes L_j and U_j move away from x_j
while x_j moves in one direction, and closer if it oscillates. The dual of this problem has one unknown per constraint.
Given these multipliers, each rank computes the minimizer for its own variables in closed form, so that the ranks only
exchange sums. The root maximizes the dual by a projected Newton method.

With the option `conservative`, each approximation whose value at the minimizer is below its function's gets a larger
curvature, and the problem is solved again. So from a feasible point, the objective falls in each iteration.

A constraint i may be violated at a cost c_i y_i + ½ d_i y_i², so that the approximate problem always has a solution. If the
violations y_i don't fall below those of the current point, the constraints can't be met.

References
----------
.. [1] K. Svanberg, "The method of moving asymptotes: a new method for structural optimization", Int. J. Numer. Meth. Eng.
   24 (1987), sections 3 to 5.
.. [2] K. Svanberg, "MMA and GCMMA: two methods for nonlinear optimization", KTH Stockholm (2007), sections 1 to 4: all
   constants, with the exception of c and d.
.. [3] D.-H. Li, M. Fukushima, L. Qi and N. Yamashita, "Regularized Newton methods for convex minimization problems with
   singular solutions", Comput. Optim. Appl. 28 (2004): the Hessian of the dual may be singular.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

import numpy as np

from mpiad._typing import Array
from mpiad.device import to_host
from mpiad.optimize.constraints import Box
from mpiad.optimize.evaluated_points import RETREAT, Ending
from mpiad.optimize.iterates import ShardedIterates
from mpiad.optimize.sharded.constraint_values import ConstraintValues
from mpiad.optimize.sharded.convergence import EVALUATIONS, MMASettings
from mpiad.optimize.sharded.sharded_method import ShardedMethod, StateFiles
from mpiad.optimize.sharded.vectors import local_dot
from mpiad.pytrees import put
from mpiad.transport.devices.device_arrays import arrays_of

OPTIMAL = Ending(0, "CONVERGENCE: the optimality conditions hold up to gtol, and the constraints up to catol.")
SMALL_STEP = Ending(0, "CONVERGENCE: no variable moved by more than xtol times the distance of its bounds.")
UNDEFINED = Ending(2, "ABNORMAL: the objective or a constraint isn't finite at any point of the last step. Check both.")
# The largest distance of the asymptotes, the smallest distance of the variables from them, and the curvature that the
# approximations have in addition to that of the slopes.
_FARTHEST, _MARGIN, _CURVATURE, _LEAST = 10.0, 0.1, 1e-3, 1e-5
# The least curvature of conservative approximations, and the scaled error up to which they may lie below their functions.
_LEAST_MEAN, _ACCURATE = 1e-6, 1e-9


@dataclass(eq=False, slots=True)
class MMAPoint:
    """A point: this rank's variables and derivatives, and scalars that are the same on all ranks."""

    x: Array  # shape (n,)
    slopes: list[Array]  # gradients of the objective and of the constraints, shape (n,) each
    value: float = math.nan  # of the objective
    constraints: np.ndarray = field(default_factory=lambda: np.zeros(0))  # values, shape (m,)
    scales: np.ndarray = field(default_factory=lambda: np.zeros(0))  # Σ |slope| times distance of bounds; shape (m + 1,)
    norm: float = math.nan  # error of the optimality conditions
    length: float = 0.0  # 2-norm of the step from the previous point
    change: float = math.inf  # largest change of a variable in this step, relative to the distance of its bounds

    @property
    def finite(self) -> bool:
        """Return whether all values and derivatives are finite."""
        return bool(np.all(np.isfinite([self.value, *self.constraints, *self.scales])))

    @property
    def violation(self) -> float:
        """Return the largest violation of a constraint."""
        return float(np.max(self.constraints, initial=0.0))


class Approximation:
    """The separable approximations at a point, scaled so that the sums of their slopes are about one."""

    def __init__(
        self, point: MMAPoint, scales: np.ndarray, asymptotes: Box, limits: Box, width: Array, curvatures: np.ndarray
    ):
        self._x, (self._lower, self._upper), self._limits, self._width = point.x, asymptotes, limits, width
        above, below = self._upper - self._x, self._x - self._lower
        self._coefficients = []
        for slope, scale, curvature in zip(point.slopes, scales.tolist(), curvatures.tolist()):
            least = _CURVATURE * np.abs(slope) + curvature / width
            p, q = above**2 * (np.maximum(slope, 0.0) + least), below**2 * (np.maximum(-slope, 0.0) + least)
            self._coefficients.append((p / scale, q / scale))

    def minimizer(self, multipliers: np.ndarray) -> tuple[Array, Array, Array]:
        """Return the minimizer of the Lagrangian, and the coefficients p and q of the Lagrangian."""
        weights = [1.0, *multipliers.tolist()]
        p = sum(weight * p for weight, (p, _) in zip(weights, self._coefficients))
        q = sum(weight * q for weight, (_, q) in zip(weights, self._coefficients))
        a, b = np.sqrt(p), np.sqrt(q)
        return np.clip((a * self._lower + b * self._upper) / (a + b), *self._limits), p, q

    def sums(self, multipliers: np.ndarray) -> np.ndarray:
        """Return this rank's terms: changes of all functions up to the minimizer, and the dual's negative Hessian."""
        x, p, q = self.minimizer(multipliers)
        above, below, moved = self._upper - x, x - self._lower, x - self._x
        first, second = moved / (above * (self._upper - self._x)), moved / (below * (self._x - self._lower))
        changes = [local_dot(p, first) - local_dot(q, second) for p, q in self._coefficients]
        free = (x > self._limits.low) & (x < self._limits.high)
        root = np.sqrt(free / (2.0 * p / above**3 + 2.0 * q / below**3))
        rows = [(p / above**2 - q / below**2) * root for p, q in self._coefficients[1:]]
        return np.array(changes + [local_dot(a, b) for a in rows for b in rows])

    def added(self, x: Array) -> float:
        """Return this rank's terms of the values at x that a curvature of one adds."""
        moved = x - self._x
        return local_dot(moved * (self._upper - self._lower) / self._width, moved / ((self._upper - x) * (x - self._lower)))


_PENALTY = 1e3  # the slopes c and d of the cost of violations; a scaled multiplier is about one
_ROUNDING, _DUAL_TOLERANCE, _DECREASE, _MAX_DUAL = 1e-14, 1e-10, 1e-4, 200


def dual_ascent(values: np.ndarray, start: np.ndarray) -> Generator[np.ndarray, np.ndarray, None]:
    """Maximize the dual on the root; receive the ranks' `Approximation.sums` at the multipliers that are yielded."""
    count, trial, best, damping = len(values), start, start, 1.0
    value, residual, gradient, hessian = -math.inf, math.inf, np.zeros(0), np.zeros(0)
    for _ in range(_MAX_DUAL):
        sums = yield np.append(trial, 0.0)  # the last entry is 1 for the solution
        excess = np.maximum(trial - _PENALTY, 0.0) / _PENALTY
        new_value = sums[0] + trial @ (values + sums[1 : count + 1]) - 0.5 * _PENALTY * excess @ excess
        slope = values + sums[1 : count + 1] - excess
        new_residual = float(np.max(np.abs(np.where(trial > 0.0, slope, np.maximum(slope, 0.0)))))
        rise, rounding = new_value - value, _ROUNDING * (1.0 + np.sum(trial))
        required = 0.0 if value == -math.inf else _DECREASE * gradient @ (trial - best)
        if rise >= required > rounding or (rise >= -rounding and new_residual < residual):
            best, value, residual, gradient, damping = trial, new_value, new_residual, slope, 0.25 * damping
            hessian = sums[count + 1 :].reshape(count, count) + np.diag((trial > _PENALTY) / _PENALTY)
        else:
            damping *= 8.0
        free = (best > 0.0) | (gradient > 0.0)
        if residual <= _DUAL_TOLERANCE or damping > 1.0 / _ROUNDING:
            break
        shift = damping * np.linalg.norm(gradient[free]) / max(1.0, np.linalg.norm(best))
        trial = best.copy()
        trial[free] += np.linalg.solve(hessian[np.ix_(free, free)] + shift * np.eye(free.sum()), gradient[free])
        trial = np.maximum(trial, 0.0)
    yield np.append(best, 1.0)


class MMA(ShardedMethod[MMAPoint]):
    """The iteration; `multipliers` are those of the constraints, shape (m,)."""

    _box: Box
    _settings: MMASettings

    def __init__(
        self, constraints: ConstraintValues, iterates: ShardedIterates, settings: MMASettings, files: StateFiles, box: Box
    ):
        super().__init__(iterates, files, box, settings)
        self._evaluation, self._constraints, self._totals = constraints.evaluation, constraints, constraints.totals
        width = box.high - box.low
        self._width = np.where(width > 0.0, width, 1.0)  # one for fixed variables
        self.multipliers = np.zeros(0)
        self._before: tuple[Array, Array] | None = None  # the last two iterates before the current one
        self._asymptotes: Box | None = None

    def _ending(self, point: MMAPoint) -> Ending | None:
        settings = self._settings
        if point.violation <= settings.catol:
            if point.norm <= settings.gtol:
                return OPTIMAL
            if point.change <= settings.xtol:
                return SMALL_STEP
        return self._limit_reached(math.inf, point.value, self._iterates.any_stopped)

    def _evaluated(self, x: Array, before: MMAPoint | None) -> MMAPoint:
        self.count += 1
        value, gradient = self._evaluation.both(x)
        point = MMAPoint(x, [gradient])  # type: ignore[union-attr]
        point.constraints, rows = self._constraints.at(x)
        point.slopes += rows
        if not len(self.multipliers):
            self.multipliers = np.zeros(len(rows))
        with np.errstate(over="ignore", invalid="ignore"):  # a trial point may not be finite
            lagrangian: Array = sum((y * row for y, row in zip(self.multipliers.tolist(), rows)), point.slopes[0])
            moved = x * 0.0 if before is None else x - before.x
            projected = self._box.projected_step(x, lagrangian)
            terms = [
                local_dot(moved, moved),
                float(x.size),
                *(local_dot(np.abs(slope), self._width) for slope in point.slopes),
            ]
            largest = [float(to_host(np.max(np.abs(part)))) if x.size else 0.0 for part in (projected, moved / self._width)]
        square, self._size, *found = self._totals.reduce(terms, largest, [value])
        point.scales, (optimality, point.change, point.value) = np.array(found[:-3]), found[-3:]
        point.length = math.sqrt(square)
        point.change = math.inf if before is None else point.change
        point.norm = max(optimality, float(np.max(np.abs(self.multipliers * point.constraints), initial=0.0)))
        return point

    def _next_point(self, point: MMAPoint) -> MMAPoint | Ending:
        """Return the approximations' minimizer, or a closer point with finite functions; raise if infeasible."""
        scales = point.scales + np.append(0.0, np.abs(point.constraints))
        scales[scales == 0.0] = 1.0
        values, per_multiplier = point.constraints / scales[1:], scales[1:] / scales[0]
        asymptotes, limits = self._moved_asymptotes(point.x)
        curvatures = np.full(len(scales), _LEAST)
        if self._settings.conservative:
            curvatures = np.maximum(_LEAST_MEAN, 0.1 * point.scales / self._size)
        new: MMAPoint | Ending = UNDEFINED
        for attempt in range(self._settings.maxls):
            approximation = Approximation(point, scales, asymptotes, limits, self._width, curvatures)
            scaled = self._maximized(approximation, values, np.minimum(self.multipliers * per_multiplier, _PENALTY))
            if attempt == 0:  # with larger curvatures, problems have short steps also if the constraints can be met
                self._require_feasible(point, values, np.maximum(scaled - _PENALTY, 0.0) / _PENALTY)
            self.multipliers, tried = scaled / per_multiplier, self.count
            new = self._finite_point(approximation.minimizer(scaled)[0], point)
            if isinstance(new, Ending) or not self._settings.conservative or self.count > tried + 1:
                break
            terms = [*approximation.sums(scaled)[: len(scales)].tolist(), approximation.added(new.x)]
            *changes, added = self._totals.reduce(terms, [], [])
            errors = np.append(new.value, new.constraints) - np.append(point.value, point.constraints) - scales * changes
            if np.all(errors <= _ACCURATE * scales):
                break
            raised = np.minimum(10.0 * curvatures, 1.1 * (curvatures + errors / added))
            curvatures = np.where(errors > 0.0, raised, curvatures)
        self._before = point.x, point.x if self._before is None else self._before[0]
        self._asymptotes = asymptotes
        return new

    def _finite_point(self, x: Array, point: MMAPoint) -> MMAPoint | Ending:
        """Return the functions at x, or at a point closer to `point` at which they are finite."""
        for _ in range(self._settings.maxls):
            if self.count >= self._settings.maxfun:
                return EVALUATIONS
            new = self._evaluated(x, point)
            if new.finite:
                return new
            x = point.x + RETREAT * (x - point.x)
        return EVALUATIONS if self.count >= self._settings.maxfun else UNDEFINED

    def _moved_asymptotes(self, x: Array) -> tuple[Box, Box]:
        """Return the asymptotes, and the limits of the variables in this iteration."""
        settings, width = self._settings, self._width
        if self._iterates.record.iterations < 2:
            below = above = settings.asyinit * width
        else:
            (last, earlier), (lower, upper) = self._before, self._asymptotes  # type: ignore[misc]
            trend = (x - last) * (last - earlier)
            factor = np.where(trend > 0.0, settings.asyincr, np.where(trend < 0.0, settings.asydecr, 1.0))
            below, above = (
                np.clip(factor * distance, settings.asymin * width, _FARTHEST * width)
                for distance in (last - lower, upper - last)
            )
        low, high = (np.minimum((1.0 - _MARGIN) * distance, settings.move * width) for distance in (below, above))
        return Box(x - below, x + above), Box(np.maximum(x - low, self._box.low), np.minimum(x + high, self._box.high))

    def _maximized(self, approximation: Approximation, values: np.ndarray, start: np.ndarray) -> np.ndarray:
        """Return the scaled multipliers that maximize the dual."""
        if not len(values):
            return start
        ascent, multipliers, done = dual_ascent(values, start), start, 0.0
        next(ascent)
        while not done:
            sums = approximation.sums(multipliers)
            found = self._totals.decide_on_root(sums, len(start) + 1, ascent.send)
            multipliers, done = found[:-1], found[-1]
        return multipliers

    def _require_feasible(self, point: MMAPoint, values: np.ndarray, excess: np.ndarray) -> None:
        """Raise a ValueError if the approximate problem can't lower the sum of scaled violations."""
        if point.violation > self._settings.catol and np.sum(excess) >= (1.0 - 1e-3) * np.sum(np.maximum(values, 0.0)):
            worst = int(np.argmax(values))
            name = self._constraints.names[worst]
            raise ValueError(
                f"minimize: the constraints can't be met. After {self._iterates.record.iterations} iterations {name} is "
                f"violated by {point.constraints[worst]:.3e}, and no change of the variables within their bounds lowers "
                "the sum of the violations. Check the constraints and bounds, or start from an x0 that meets them."
            )

    def _arrays(self, point: MMAPoint) -> Iterator[tuple[str, np.ndarray]]:
        rows = [*(self._before or ()), *(self._asymptotes or ())]
        yield "rows", np.array([to_host(row) for row in rows]).reshape(len(rows), len(point.x))
        yield "multipliers", self.multipliers
        yield "numbers", np.array([point.norm, point.length, point.change])
        yield "count", np.array(self.count)

    def _restored(self, arrays: dict[str, np.ndarray], x: Array) -> MMAPoint:
        rows = put(list(arrays["rows"]), [arrays_of(x)] * len(arrays["rows"]))
        self.multipliers = arrays["multipliers"]
        point = self._evaluated(x, None)
        if rows:
            self._before, self._asymptotes = (rows[0], rows[1]), Box(rows[2], rows[3])
        point.norm, point.length, point.change = arrays["numbers"].tolist()
        self.count = int(arrays["count"])
        return point
