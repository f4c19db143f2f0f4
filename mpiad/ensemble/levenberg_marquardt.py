"""Levenberg-Marquardt for many small least-squares problems at once, each with its own damping and termination.

In each round every active problem tries one step, and these steps are evaluated together. A problem is represented by the
triangular factor R of [J r], with the Jacobian J of the residuals r. Steps are computed from R, so their cost doesn't
depend on the number of residuals. J'J isn't formed, since its condition number is the square of the condition number of J.
A step minimizes the damped quadratic model within the bounds, by an active-set method. No operation combines different
problems, so the results of a problem don't depend on other problems.

References
----------
Moré, "The Levenberg-Marquardt algorithm: implementation and theory" (1978), for the scaling and the tests of convergence;
Nielsen, "Damping parameter in Marquardt's method" (1999), eq. 2.5, for the damping; Stark and Parker, "Bounded-variable
least squares" (1995), for the active sets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.outcome import ConvergenceCode

_START_DAMPING = 1e-2  # the initial damping, relative to the largest squared norm of the columns of the scaled Jacobian
# The smallest factor by which the damping is multiplied after a step for which the model was accurate.
_LEAST_SHRINKAGE = 0.1
_LEAST_RATIO = 1e-4  # smallest ratio of the actual to the predicted decrease for which a step is accepted
# Columns are linearly dependent if the ratio of their smallest to their largest singular value is at most this number.
_SINGULAR = 1e-12
# A short step means convergence only if its damping is less than this fraction of the damping of the last step to a point
# at which the residuals were undefined.
_NEAR_FAILURE = 0.01
# Maximum number of active sets that are tried per step and variable; usually two or three are enough.
_ACTIVE_SETS = 10

# Maximum number of times that a starting point is drawn again.
MOST_REDRAWS = 20

_ACTIVE = -1  # the code of problems that haven't ended


class Evaluation(NamedTuple):
    """The residuals of some problems and their derivatives, at one point per problem."""

    cost: Array  # shape (n,); half the sums of squares; infinite if undefined
    factor: Array  # shape (n, m + 1, m + 1); the triangular R of [J r] = Q R


class Stopping(NamedTuple):
    """Termination criteria, defined as in SciPy and MINPACK."""

    ftol: float
    xtol: float
    gtol: float
    max_nfev: int


Evaluate: TypeAlias = Callable[[Array, Array], Evaluation]
Redraw: TypeAlias = Callable[[Array, int], Array]


def scaled_factor(factor: Array, free: Array) -> tuple[Array, Array]:
    """Return the columns of R that belong to J, scaled to norm one, and their norms. Columns that aren't free are zero."""
    columns = factor[:, :, :-1] * free[:, None]
    norms = np.sqrt(np.add.reduce(columns * columns, axis=1))
    norms[norms == 0] = 1.0
    return columns / norms[:, None], norms


@dataclass(eq=False)
class LeastSquares:
    """N problems: the minima of the sums of squares that ``evaluate(x, ids)`` returns, within bounds.

    After `minimize`, the results are `x`, `cost`, ..., as in `FitResult`, and `codes`; `factor`, shape (N, m + 1, m + 1),
    has the factors at the minima: see `Evaluation`.
    """

    evaluate: Evaluate
    x: Array  # shape (N, m), as the bounds; the starting points, then the iterates
    lower: Array
    upper: Array
    scale: Array | None  # of steps, shape (N, m); by default the inverse of the largest norm so far of each column of J
    stopping: Stopping
    # ``redraw(ids, attempt)`` returns other starting points, for those at which the residuals are undefined.
    redraw: Redraw | None = None

    def minimize(self) -> LeastSquares:
        """Minimize all sums, and return the problems."""
        self._start()
        while self.active.size:
            self._try_step()
        self._finish()
        return self

    def _start(self) -> None:
        """Evaluate the residuals at the starting points."""
        count, m = self.x.shape
        self.x = np.clip(self.x, self.lower, self.upper)
        self.nfev, self.njev = np.ones(count, int), np.ones(count, int)
        self.codes = np.full(count, _ACTIVE)
        none = Evaluation(np.empty(0), np.empty((0, m + 1, m + 1)))
        self.cost, self.factor = self.evaluate(self.x, np.arange(count)) if count else none
        for attempt in range(MOST_REDRAWS if self.redraw is not None else 0):
            failed = np.flatnonzero(~np.isfinite(self.cost))
            if not failed.size:
                break
            self.x[failed] = self.redraw(failed, attempt)  # type: ignore[misc]
            self.cost[failed], self.factor[failed] = self.evaluate(self.x[failed], failed)
            self.nfev[failed] += 1
        self._gradient = _gradient(self.factor)
        self.codes[~np.isfinite(self.cost)] = ConvergenceCode.InitialFailure.code
        self._inverse_scale = np.zeros((count, m))
        self._rescale(np.arange(count))
        norms = scaled_factor(self.factor, np.ones((count, m), bool))[1] / self._inverse_scale
        self._damping, self._growth = _START_DAMPING * norms.max(axis=1, initial=0.0) ** 2, np.full(count, 2.0)
        # The damping of the last step to a point at which the residuals were undefined.
        self._failed_damping = np.full(count, np.inf)
        self._set_code(self.active, self._optimality(self.active) <= self.stopping.gtol)
        self._set_code(self.active, self.nfev[self.active] >= self.stopping.max_nfev, ConvergenceCode.MaxIters)

    @property
    def active(self) -> Array:
        """The indices of the problems that haven't ended."""
        return np.flatnonzero(self.codes == _ACTIVE)

    def _try_step(self) -> None:
        ids = self.active
        x, cost, factor, inverse = self.x[ids], self.cost[ids], self.factor[ids], self._inverse_scale[ids]
        step, trial = _bounded_step(
            factor, np.sqrt(self._damping[ids])[:, None] * inverse, x, self.lower[ids], self.upper[ids], self._fixed(ids)
        )
        candidate = self.evaluate(trial, ids)
        self.nfev[ids] += 1
        # The difference of two values of the model would consist of rounding errors near a minimum.
        predicted = -_dot(self._gradient[ids], step) - 0.5 * _squared(_apply(factor, step))
        actual = cost - candidate.cost
        with np.errstate(all="ignore"):
            ratio = np.where(predicted > 0, actual / predicted, -1.0)
        better = (actual > 0) & (ratio > _LEAST_RATIO)
        failed = ~np.isfinite(candidate.cost)
        self._failed_damping[ids[failed]] = self._damping[ids[failed]]
        near_failure = self._damping[ids] >= _NEAR_FAILURE * self._failed_damping[ids]
        accepted = ids[better]
        self.x[accepted], self.cost[accepted], self.factor[accepted] = trial[better], *(part[better] for part in candidate)
        self._gradient[accepted] = _gradient(self.factor[accepted])
        self.njev[accepted] += 1
        self._rescale(accepted)
        shrinkage = np.maximum(_LEAST_SHRINKAGE, 1 - (2 * np.minimum(ratio, 1.0) - 1) ** 3)
        self._damping[ids] *= np.where(better, shrinkage, self._growth[ids])
        self._growth[ids] = np.where(better, 2.0, 2 * self._growth[ids])

        stop = self.stopping
        flat = (np.abs(actual) <= stop.ftol * cost) & (np.abs(predicted) <= stop.ftol * cost) & (ratio <= 2)
        lengths = np.sqrt(_squared(inverse * step)), np.sqrt(_squared(inverse * x))
        short = (lengths[0] <= stop.xtol * (stop.xtol + lengths[1])) | (trial == x).all(axis=1)
        stationary = self._optimality(ids) <= stop.gtol
        self._set_code(ids, (flat | short) & ~stationary & near_failure, ConvergenceCode.ConvergenceFailure)
        self._set_code(ids, flat | short | stationary)
        self._set_code(ids, self.nfev[ids] >= stop.max_nfev, ConvergenceCode.MaxIters)

    def _finish(self) -> None:
        """Compute the other results; a problem whose residuals don't determine the variables gets the code Singular."""
        every = np.arange(len(self.x))
        fixed, succeeded = self._fixed(every), self.codes == ConvergenceCode.Success.code
        columns, _ = scaled_factor(self.factor[succeeded], ~fixed[succeeded])
        # Variables that are fixed at a bound add singular values of zero, which come last.
        values, free = np.linalg.svd(columns, compute_uv=False), np.count_nonzero(~fixed[succeeded], axis=1)
        least = np.take_along_axis(values, np.maximum(free - 1, 0)[:, None], axis=1)[:, 0]
        self.codes[np.flatnonzero(succeeded)[(free > 0) & (least <= _SINGULAR * values[:, 0])]] = (
            ConvergenceCode.Singular.code
        )
        failed = self.codes == ConvergenceCode.InitialFailure.code
        self.active_mask = np.where(self.x <= self.lower, -1, np.where(self.x >= self.upper, 1, 0))
        self.cost, self.optimality = (np.where(failed, np.nan, x) for x in (self.cost, self._optimality(every)))

    def _fixed(self, ids: Array) -> Array:
        """Return a mask, shape (n, m), of the variables at a bound that a descent step would violate."""
        x, g = self.x[ids], self._gradient[ids]
        return ((x <= self.lower[ids]) & (g >= 0)) | ((x >= self.upper[ids]) & (g <= 0))

    def _optimality(self, ids: Array) -> Array:
        return np.abs(np.where(self._fixed(ids), 0.0, self._gradient[ids])).max(axis=1, initial=0.0)

    def _rescale(self, ids: Array) -> None:
        if self.scale is not None:
            self._inverse_scale[ids] = 1 / self.scale[ids]
            return
        norms = scaled_factor(self.factor[ids], np.ones_like(self.x[ids], bool))[1]
        self._inverse_scale[ids] = np.maximum(self._inverse_scale[ids], norms)

    def _set_code(self, ids: Array, done: Array, code: ConvergenceCode = ConvergenceCode.Success) -> None:
        """Set the code of the problems in the mask `done` that don't have a code yet."""
        chosen = ids[done]
        self.codes[chosen[self.codes[chosen] == _ACTIVE]] = code.code


def _bounded_step(factor: Array, damping: Array, x: Array, lower: Array, upper: Array, fixed: Array) -> tuple[Array, Array]:
    """Return the steps that minimize the damped models within the bounds, and their end points, by an active-set method.

    An iteration moves towards the minimum over the free variables, up to the first bound; the variable at this bound is
    then fixed. At a minimum one fixed variable is freed: the variable with the largest Lagrange multiplier of the wrong
    sign, if any.
    `damping`: shape (n, m); the square roots of the numbers that are added to the diagonal of J'J.
    """
    fixed, end, todo = fixed.copy(), x.copy(), np.arange(len(x))
    for _ in range(_ACTIVE_SETS * x.shape[1]):
        low, high, start = lower[todo], upper[todo], end[todo]
        step = _damped(factor[todo], damping[todo], ~fixed[todo], start - x[todo])
        bound = np.where(step < 0, low, high)
        with np.errstate(all="ignore"):
            fraction = np.where(step != 0, (bound - start) / step, np.inf)
        least = fraction.min(axis=1, keepdims=True)
        hit = (fraction == least) & (least < 1)
        end[todo] = np.where(hit, bound, np.clip(start + np.minimum(least, 1.0) * step, low, high))
        arrived = ~hit.any(axis=1)
        fixed[todo] |= hit
        freed = _to_free(factor[todo], damping[todo], end[todo] - x[todo], fixed[todo], end[todo] <= low, end[todo] >= high)
        # Multipliers are meaningful only at a minimum, not if a bound has cut the step short.
        freed[~arrived] = False
        fixed[todo] &= ~freed
        todo = todo[~arrived | freed.any(axis=1)]
        if not todo.size:
            break
    return end - x, end


def _to_free(factor: Array, damping: Array, step: Array, fixed: Array, at_lower: Array, at_upper: Array) -> Array:
    """Return a mask, (n, m), of the fixed variable per problem with the largest scaled multiplier of the wrong sign."""
    reached = factor[:, :, -1] + _apply(factor, step)
    slope = (np.swapaxes(factor[:, :, :-1], 1, 2) @ reached[..., None])[..., 0] + damping**2 * step
    multiplier = np.where(at_lower, -slope, slope) / damping
    # Multipliers of the size of rounding errors are ignored.
    least = 1e-13 * np.sqrt(_squared(factor[:, :, -1]))[:, None]
    multiplier = np.where(fixed & (at_lower != at_upper) & (multiplier > least), multiplier, 0.0)
    return (multiplier > 0) & (np.arange(multiplier.shape[1]) == multiplier.argmax(axis=1)[:, None])


def _damped(factor: Array, damping: Array, free: Array, step: Array) -> Array:
    """Return the change of `step` that minimizes |J s + r|² + |damping s|² over the free variables of the new step s."""
    n, m = damping.shape
    system = np.zeros((n, 2 * m + 1, m + 1))
    system[:, : m + 1, :m] = factor[:, :, :m] * free[:, None]
    system[:, : m + 1, m] = -(factor[:, :, m] + _apply(factor, step))
    every = np.arange(m)
    system[:, m + 1 + every, every] = damping
    system[:, m + 1 :, m] = np.where(free, -damping * step, 0.0)
    triangle: Array = np.linalg.qr(system, mode="r")
    return np.linalg.solve(triangle[:, :m, :m], triangle[:, :m, m:])[..., 0]


def _apply(factor: Array, step: Array) -> Array:
    return (factor[:, :, :-1] @ step[..., None])[..., 0]


def _gradient(factor: Array) -> Array:
    return (np.swapaxes(factor[:, :, :-1], 1, 2) @ factor[:, :, -1:])[..., 0]


def _dot(a: Array, b: Array) -> Array:
    return (a[:, None] @ b[..., None])[:, 0, 0]


def _squared(a: Array) -> Array:
    return _dot(a, a)
