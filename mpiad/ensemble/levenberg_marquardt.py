"""Levenberg-Marquardt for many small least-squares problems at once, each with its own damping and its own end.

In each round every problem that is still under way tries one step, and all of them are evaluated together. A problem is
known by the triangular factor R of [J r], of which J'J, J'r and the sum of squares are made, so nothing depends on how many
residuals there are, and no condition number is squared. Steps minimise the damped quadratic model in the box of the bounds:
variables that are held by a bound, and those that would leave the box, are fixed, and the others solved for again.

Matrices are factorised one by one and sums over components are matrix products of one problem, so a problem's numbers don't
depend on those beside it.

References
----------
Moré, "The Levenberg-Marquardt algorithm: implementation and theory" (1978), for the scaling and the tests of convergence;
Nielsen, "Damping parameter in Marquardt's method" (1999), eq. 2.5, for the damping; Stark and Parker, "Bounded-variable
least squares" (1995), for the active sets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.outcome import ConvergenceCode

_START_DAMPING = 1e-2
# How much smaller the damping gets at once where the model was right.
_LEAST_SHRINKAGE = 0.1
_LEAST_RATIO = 1e-4
# Of scaled columns: rounding leaves 1e-14 or so of columns that depend on each other.
_SINGULAR = 1e-12

# A step with nearly the damping of one that failed is short for that reason.
_NEAR_WALL = 0.01
# Of a step's active sets, for each variable; two or three are enough.
_TURNS = 10

_UNDER_WAY = -1


class Evaluation(NamedTuple):
    """The residuals of some problems and their derivatives, at one point for each."""

    cost: Array  # shape (n,); half the sums of squares; infinite where there is none
    factor: Array  # shape (n, m + 1, m + 1); of [J r] = Q R the triangular R

    def rows(self, rows: Array) -> Evaluation:
        """Return some of the problems."""
        return Evaluation(self.cost[rows], self.factor[rows])


class Stopping(NamedTuple):
    """When a problem is done, as SciPy and MINPACK say it."""

    ftol: float
    xtol: float
    gtol: float
    max_nfev: int


class Minima(NamedTuple):
    """Where N problems ended.

    Parameters
    ----------
    x : array, shape (N, m)
    cost, optimality : array, shape (N,)
    active_mask : array of int, shape (N, m)
        -1 and 1 where the lower or the upper bound holds a variable.
    nfev, njev, codes : array of int, shape (N,)
    factor : array, shape (N, m + 1, m + 1)
    """

    x: Array
    cost: Array
    optimality: Array
    active_mask: Array
    nfev: Array
    njev: Array
    codes: Array
    factor: Array


def minimize_each(
    evaluate: Callable[[Array, Array], Evaluation], x0: Array, lower: Array, upper: Array, scale: Array | None,
    stopping: Stopping,
) -> Minima:  # fmt: skip
    """Minimise each problem's sum of squares in its box; x0, lower and upper have shape (N, m).

    ``evaluate(x, ids)`` is for the problems of some numbers, x of shape (n, m). A step of each variable is measured by
    `scale`, shape (N, m); by default by the norms of the columns of J, the largest so far.
    """
    problems = _Problems(evaluate, np.clip(x0, lower, upper), lower, upper, scale, stopping)
    while problems.under_way.size:
        problems.try_step()
    return problems.minima()


def scaled_factor(factor: Array, free: Array) -> tuple[Array, Array]:
    """Return R of the Jacobian with columns of norm one, zeros for those that aren't free, and the columns' norms."""
    columns = factor[:, :, :-1] * free[:, None]
    norms = np.sqrt(np.add.reduce(columns * columns, axis=1))
    norms[norms == 0] = 1.0
    return columns / norms[:, None], norms


class _Problems:
    """The problems, and how far each has come."""

    def __init__(self, evaluate: Callable, x: Array, lower: Array, upper: Array, scale: Array | None, stopping: Stopping):
        count, m = x.shape
        self._evaluate, self._lower, self._upper, self._stopping = evaluate, lower, upper, stopping
        self._x, self._given_scale = x, scale
        self._nfev, self._njev = np.ones(count, int), np.ones(count, int)
        self._codes = np.full(count, _UNDER_WAY)
        self._cost, self._factor = evaluate(x, np.arange(count)) if count else (np.empty(0), np.empty((0, m + 1, m + 1)))
        self._gradient = _gradient(self._factor)
        self._codes[~np.isfinite(self._cost)] = ConvergenceCode.InitialFailure.code
        self._scale = np.ones((count, m))
        self._rescale(np.arange(count), first=True)
        norms = scaled_factor(self._factor, np.ones((count, m), bool))[1] / self._scale
        self._damping, self._growth = _START_DAMPING * norms.max(axis=1, initial=0.0) ** 2, np.full(count, 2.0)
        # The damping of the last step that led to where there is no value.
        self._wall = np.full(count, np.inf)
        self._settle(self.under_way, self._optimality(self.under_way) <= stopping.gtol)
        self._settle(self.under_way, self._nfev[self.under_way] >= stopping.max_nfev, ConvergenceCode.MaxIters)

    @property
    def under_way(self) -> Array:
        return np.flatnonzero(self._codes == _UNDER_WAY)

    def try_step(self) -> None:
        ids = self.under_way
        x, cost, factor, scale = self._x[ids], self._cost[ids], self._factor[ids], self._scale[ids]
        step, trial = _step_in_box(
            factor, np.sqrt(self._damping[ids])[:, None] * scale, x, self._lower[ids], self._upper[ids], self._held(ids)
        )
        found = self._evaluate(trial, ids)
        self._nfev[ids] += 1
        # Of the model's values and not of their difference, which near the end is all rounding.
        predicted = -_dot(self._gradient[ids], step) - 0.5 * _squared(_apply(factor, step))
        actual = cost - found.cost
        with np.errstate(all="ignore"):
            ratio = np.where(predicted > 0, actual / predicted, -1.0)
        better = (actual > 0) & (ratio > _LEAST_RATIO)
        lost = ~np.isfinite(found.cost)
        self._wall[ids[lost]] = self._damping[ids[lost]]
        walled = self._damping[ids] >= _NEAR_WALL * self._wall[ids]
        self._take(ids[better], trial[better], found.rows(better))
        self._damp(ids, better, ratio)

        stop = self._stopping
        # As MINPACK: both what the model foresaw and what came is nothing to speak of.
        flat = (np.abs(actual) <= stop.ftol * cost) & (np.abs(predicted) <= stop.ftol * cost) & (ratio <= 2)
        lengths = np.sqrt(_squared(scale * step)), np.sqrt(_squared(scale * x))
        short = (lengths[0] <= stop.xtol * (stop.xtol + lengths[1])) | (trial == x).all(axis=1)
        level = self._optimality(ids) <= stop.gtol
        self._settle(ids, (flat | short) & ~level & walled, ConvergenceCode.ConvergenceFailure)
        self._settle(ids, flat | short | level)
        self._settle(ids, self._nfev[ids] >= stop.max_nfev, ConvergenceCode.MaxIters)

    def minima(self) -> Minima:
        """Return where all ended; what the residuals don't determine there is called singular."""
        every = np.arange(len(self._x))
        held, succeeded = self._held(every), self._codes == ConvergenceCode.Success.code
        columns, _ = scaled_factor(self._factor[succeeded], ~held[succeeded])
        # Held variables make zeros of their own, which come last.
        values, free = np.linalg.svd(columns, compute_uv=False), np.count_nonzero(~held[succeeded], axis=1)
        least = np.take_along_axis(values, np.maximum(free - 1, 0)[:, None], axis=1)[:, 0]
        codes = self._codes.copy()
        codes[np.flatnonzero(succeeded)[(free > 0) & (least <= _SINGULAR * values[:, 0])]] = ConvergenceCode.Singular.code
        failed = codes == ConvergenceCode.InitialFailure.code
        side = np.where(self._x <= self._lower, -1, np.where(self._x >= self._upper, 1, 0))
        return Minima(
            self._x, np.where(failed, np.nan, self._cost), np.where(failed, np.nan, self._optimality(every)), side,
            self._nfev, self._njev, codes, self._factor,
        )  # fmt: skip

    def _held(self, ids: Array) -> Array:
        """Return which variables are at a bound, and would leave the box downhill: shape (n, m)."""
        x, g = self._x[ids], self._gradient[ids]
        return ((x <= self._lower[ids]) & (g >= 0)) | ((x >= self._upper[ids]) & (g <= 0))

    def _optimality(self, ids: Array) -> Array:
        return np.abs(np.where(self._held(ids), 0.0, self._gradient[ids])).max(axis=1, initial=0.0)

    def _take(self, ids: Array, x: Array, found: Evaluation) -> None:
        self._x[ids], self._cost[ids], self._factor[ids] = x, found.cost, found.factor
        self._gradient[ids] = _gradient(found.factor)
        self._njev[ids] += 1
        self._rescale(ids)

    def _rescale(self, ids: Array, first: bool = False) -> None:
        if self._given_scale is not None:
            self._scale[ids] = 1 / self._given_scale[ids]
            return
        norms = scaled_factor(self._factor[ids], np.ones_like(self._x[ids], bool))[1]
        self._scale[ids] = norms if first else np.maximum(self._scale[ids], norms)

    def _damp(self, ids: Array, better: Array, ratio: Array) -> None:
        shrinkage = np.maximum(_LEAST_SHRINKAGE, 1 - (2 * np.minimum(ratio, 1.0) - 1) ** 3)
        self._damping[ids] *= np.where(better, shrinkage, self._growth[ids])
        self._growth[ids] = np.where(better, 2.0, 2 * self._growth[ids])

    def _settle(self, ids: Array, done: Array, code: ConvergenceCode = ConvergenceCode.Success) -> None:
        """Give those that are done a code, and keep the codes that they have."""
        chosen = ids[done]
        self._codes[chosen[self._codes[chosen] == _UNDER_WAY]] = code.code


def _step_in_box(factor: Array, damping: Array, x: Array, lower: Array, upper: Array, held: Array) -> tuple[Array, Array]:
    """Return the steps that minimise the damped models in the boxes, and where they end.

    By active sets: towards the minimum over the free variables up to the first bound, which then holds its variable; at the
    minimum the variable that pulls away from its bound most is let go. Each turn lowers the model. `damping` (n, m) has the
    roots of the numbers on the diagonal.
    """
    fixed, end, todo = held.copy(), x.copy(), np.arange(len(x))
    for _ in range(_TURNS * x.shape[1]):
        low, high, start = lower[todo], upper[todo], end[todo]
        # Towards the minimum of the damped model from x over the free variables, from where the last turn ended.
        step = _damped(factor[todo], damping[todo], ~fixed[todo], start - x[todo])
        bound = np.where(step < 0, low, high)
        with np.errstate(all="ignore"):
            part = np.where(step != 0, (bound - start) / step, np.inf)
        # No further than to the nearest bound: variables that reach theirs together are all held.
        reach = part.min(axis=1, keepdims=True)
        hit = (part == reach) & (reach < 1)
        end[todo] = np.where(hit, bound, np.clip(start + np.minimum(reach, 1.0) * step, low, high))
        arrived = ~hit.any(axis=1)
        fixed[todo] |= hit
        loose = _loosest(factor[todo], damping[todo], end[todo] - x[todo], fixed[todo], end[todo] <= low, end[todo] >= high)
        # Multipliers say which way a variable pulls at a minimum only, not where a bound has cut the way to it short.
        loose[~arrived] = False
        fixed[todo] &= ~loose
        todo = todo[~arrived | loose.any(axis=1)]
        if not todo.size:
            break
    return end - x, end


def _loosest(factor: Array, damping: Array, step: Array, fixed: Array, at_lower: Array, at_upper: Array) -> Array:
    """Return which fixed variable, if any, lowers the model most by leaving its bound: array of bool, shape (n, m)."""
    reached = factor[:, :, -1] + _apply(factor, step)
    slope = (np.swapaxes(factor[:, :, :-1], 1, 2) @ reached[..., None])[..., 0] + damping**2 * step
    pull = np.where(at_lower, -slope, slope) / damping
    # Rounding lets nothing go; where both bounds are one, neither does.
    least = 1e-13 * np.sqrt(_squared(factor[:, :, -1]))[:, None]
    pull = np.where(fixed & (at_lower != at_upper) & (pull > least), pull, 0.0)
    return (pull > 0) & (np.arange(pull.shape[1]) == pull.argmax(axis=1)[:, None])


def _damped(factor: Array, damping: Array, free: Array, step: Array) -> Array:
    """Return the way from `step` to the least |J s + r|² + |damping s|² over what is free: QR of the augmented matrix."""
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
