"""The adjoint of one step, for several trajectories, which are the columns of all arrays.

In a Runge-Kutta step, y_i = u + h Σ_{j<i} a_ij k_j and k_i = f(y_i). The formula for y_i also defines the new state, y_s.
The cotangent λ of the new state is propagated from the last stage to the first (k̄ and ȳ are the cotangents of k and y):

    k̄_j = Σ_{i>j} a_ij h ȳ_i,    ȳ_s = λ,    ȳ_j = f'(y_j)ᵀ k̄_j,    ū = λ + Σ_j ȳ_j.

The stages are computed again from the state before the step. All operations are elementwise over columns, so the cotangent
of a trajectory doesn't depend on other trajectories.

In a Rosenbrock step W k_i = r_i, with r_i = f(y_i) + Σ C_ij k_j + d_i h T (see `tableaus`). The cotangent of stage i is
propagated to r_i by the transposed matrix, r̄_i = W⁻ᵀ k̄_i, and from r_i to the argument, as above, and to the earlier
stages. The remaining terms, from the dependence of W and T on the state, the parameters and time, are the gradient of

    φ = Σ r̄_i · h (J k_i + d_i T),

with r̄ and k held fixed. φ is a sum of directional derivatives of r̄_i · f along (h k_i, h d_i), so its gradient consists of
products with second derivatives of f, whose matrices are never formed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.batch import Parameters
from mpiad.ensemble.coefficients import Coefficients, stage_rates
from mpiad.ensemble.linearization import Tracing
from mpiad.ensemble.run import Run
from mpiad.ensemble.stage_systems import StageSystems
from mpiad.ensemble.step_sweep import Columns, Visit


def over_slots(x: Array, ndim: int = 2) -> Array:
    """Return x or, if x has more than `ndim` axes, its sum over the first axis: the slots of a column on a device."""
    return x if x.ndim == ndim else np.sum(x, axis=0)


class Arrival(NamedTuple):
    """Contributions of values saved inside a step to the cotangents of the stages."""

    columns: Columns  # int, shape (m,); each at most once
    value: Array  # shape (d, m), or (s, d, m) for s values per column
    # Per stage, shape (m,) or (s, 1, m). The product of `value` and these weights is added to the cotangent of the stage.
    weights: dict[int, Array]


class TransposedStep:
    """The stages of one step, and the backward pass through them.

    - `y`, `k`: arrays of shape (d, n), arguments and values of the stages except the last (the next step's first stage).
    - `h`: shape (n,); step sizes in the precision of the states.
    - `last`: the index of the last stage.
    - `by_size`: shape (n,), or float; after `pull`, the derivative of φ with respect to h; zero for Runge-Kutta steps.
    """

    by_size: Array | float = 0.0
    _first = 0  # the index of the first stage whose cotangent `pull` propagates

    def __init__(self, coefficients: Coefficients, tracing: Tracing, visit: Visit, leaves: Sequence[Any]):
        self._coefficients, self._tracing, self._visit, self._leaves = coefficients, tracing, visit, leaves
        self.h, self.tableau = visit.h.astype(coefficients.real, copy=False), coefficients.tableau
        self.last = coefficients.last
        self._stages, self._term = coefficients.stages(visit.u.shape, visit.u), np.empty_like(visit.u)
        self.y: list[Array] = [visit.u]
        self.k: list[Array] = []
        self._pulls: list[Callable] = []
        for i in range(self.last):
            self._evaluate(self.argument(i), i)

    def argument(self, i: int) -> Array:
        """Return the argument of stage i; the argument of the last stage is the new state."""
        if i == len(self.y):
            y = self._coefficients.row(i, self._stages, np.empty_like(self._term), self._term)
            np.multiply(y, self.h, out=y)
            self.y.append(np.add(y, self.y[0], out=y))
        return self.y[i]

    def _evaluate(self, y: Array, i: int) -> None:
        k, t = self._stages[i], (self._visit.t + self.tableau.c[i] * self._visit.h).astype(self.h.dtype, copy=False)
        self._pulls.append(self._tracing.transposed(k, y, self._leaves, t))
        self.k.append(k)

    def add_last_stage(self) -> None:
        """Compute f at the new state, which is needed if no step follows."""
        if len(self.k) == self.last:
            self._evaluate(self.argument(self.last), self.last)

    def pull(self, cotangent: Array, arrivals: Sequence[Arrival], note_stage: Callable) -> Array:
        """Return the cotangent of the state before the step, shape (d, n); `pull` can be called only once.

        `cotangent`: that of the state after the step; overwritten. ``note_stage(j, parts, y_bar)`` is called for each stage
        j with the cotangents of the leaves (and of time) and of the argument.
        """
        total, last = cotangent, self.last
        bars, scratch = self._coefficients.bars(total), np.empty_like(total)
        # If the last stage was computed, its contribution to the cotangent of the new state is added first.
        if len(self._pulls) <= last:
            bars[last] = total * self.h
        for j in reversed(range(self._first, self._first + len(self._pulls))):
            k_bar = self._propagated(j, self._coefficients.column(j, bars, scratch, self._term), arrivals)
            # `pop` frees the memory of the stage's trace.
            y_bar, *parts = self._pulls.pop()(k_bar)
            note_stage(j, parts, y_bar)
            # Each argument is u plus an increment, so its cotangent is added to the cotangent of u.
            if y_bar is not None:
                total += y_bar
            if j == last:
                bars[last] = total * self.h
            elif j and y_bar is not None:
                bars[j] = y_bar * self.h
        return total

    def _propagated(self, j: int, k_bar: Array, arrivals: Sequence[Arrival]) -> Array:
        """Return the cotangent of f at the argument of stage j, given the contributions of the later arguments."""
        for arrival in arrivals:
            if j in arrival.weights:
                k_bar[:, arrival.columns] += over_slots(arrival.value * arrival.weights[j])
        return k_bar


class _TransposedRosenbrockStep(TransposedStep):
    """`TransposedStep` for Rosenbrock methods, which doesn't compute f at the ends of the step."""

    _first = 1

    def __init__(self, run: Run, tracing: Tracing, systems: StageSystems, visit: Visit, leaves: Sequence[Any]):
        self._systems, self._table, real = systems, systems.table, run.coefficients.real
        h, self._time = (x.astype(real, copy=False) for x in (visit.h, visit.t))
        self._jacobian, self._time_derivative, self._lu = systems.at(visit.u, leaves, self._time, h)
        super().__init__(run.coefficients, tracing, visit, leaves)
        # f at the new state isn't used in the step.
        self.k.append(np.zeros_like(visit.u))

    def _evaluate(self, y: Array, i: int) -> None:
        if not i:
            self._stages[0][...] = 0
            self.k.append(self._stages[0])
            return
        super()._evaluate(y, i)
        k, slope = self._stages[i], self._table.slopes[i - 1]
        self._systems.add_stages(k, i, self.k)
        if self._time_derivative is not None and slope:
            k += slope * self.h * self._time_derivative
        self._lu.solve(k)

    def argument(self, i: int) -> Array:
        """Return the argument of stage i; the argument of the last stage is the new state."""
        if i == 1 == len(self.y):
            self.y.append(self.y[0])
        return super().argument(i)

    def add_last_stage(self) -> None:
        """Do nothing, since the interpolant doesn't depend on f at the new state."""

    def pull(self, cotangent: Array, arrivals: Sequence[Arrival], note_stage: Callable) -> Array:
        """Return the cotangent of the state before the step: see `TransposedStep.pull`."""
        self._rights: dict[int, Array] = {}  # the cotangents of the right-hand sides
        total, h, order = super().pull(cotangent, arrivals, note_stage), self.h, range(1, self.last)
        right, du = (np.stack(rows, axis=1) for rows in ([self._rights[j] for j in order], [self.k[j] * h for j in order]))
        dt = np.stack([h.dtype.type(slope) * h for slope in self._table.slopes])
        by_u, *parts = self._systems.pull(self.y[0], self._leaves, self._time, right, du, dt)
        total += by_u
        note_stage(0, parts, by_u)
        self.by_size = self._derivative_by_size(self._rights)
        return total

    def _propagated(self, j: int, k_bar: Array, arrivals: Sequence[Arrival]) -> Array:
        right = k_bar.copy()
        for i, later in self._rights.items():
            if self._table.coupling[i - 1][j]:
                right += self._systems.mass.times(self._table.coupling[i - 1][j] * later, transposed=True)
        self._rights[j] = super()._propagated(j, right, arrivals)
        self._lu.solve_transposed(right)
        return right

    def _derivative_by_size(self, rights: dict[int, Array]) -> Array:
        """Return the derivative of φ with respect to the size of the step."""
        total = np.zeros_like(self.h, dtype=float)
        for j, right in rights.items():
            rate = (self._jacobian * self.k[j]).sum(axis=1)
            if self._time_derivative is not None:
                rate = rate + self._table.slopes[j - 1] * self._time_derivative
            total += (right * rate).sum(axis=0)
        return total


def transposed_steps(run: Run, tracing: Tracing, places: Sequence[int]) -> Callable[[Visit, Sequence[Any]], TransposedStep]:
    """Return a function that creates the backward pass of a visit; `places`: the indices of the differentiated leaves."""
    if not run.tableau.implicit:
        return lambda visit, leaves: TransposedStep(run.coefficients, tracing, visit, leaves)
    systems = StageSystems(run, places)
    return lambda visit, leaves: _TransposedRosenbrockStep(run, tracing, systems, visit, leaves)


class Inside(NamedTuple):
    """Cotangents of states u + h Σ w_i(x) k_i inside a step."""

    columns: Columns  # int, shape (m,); each at most once
    value: Array  # shape (d, m), or (s, d, m) for s values per column
    x: Array  # shape (m,), or (s, m)
    weights: Sequence[Array]  # per stage: shape (m,), or (s, 1, m)
    # Bool, shape (m,), or None for all columns: whether this step, not the next, adds the last stage's contribution.
    whole: Array | None = None

    def arrival(self, step: TransposedStep) -> Arrival:
        """Return the contributions to the cotangents of the stages of a step."""
        last = step.last
        weights = dict(enumerate(self.weights[:last]))
        if len(step.k) > last:
            weights[last] = self.weights[last] if self.whole is None else self.weights[last] * self.whole
        return Arrival(self.columns, self.value * step.h[self.columns], weights)


class StepCotangents:
    """Accumulates the contributions of one step to cotangents.

    - `parts`: the cotangents of leaves by their indices; updated.
    - `timed`: whether to differentiate with respect to times.
    - `width`: the number of columns, without the duplicate of a single column (see `Run.doubled`).
    - `t_bar`, `h_bar`: shape (n,); cotangents of the time before the step and of its size.
    """

    def __init__(self, step: TransposedStep, parts: dict[int, Array], p: Parameters, width: int, timed: bool):
        self.step, self.parts, self._p, self._width, self.timed = step, parts, p, width, timed
        if timed:
            self.t_bar, self.h_bar = (np.zeros_like(step.h, dtype=float) for _ in range(2))
            self._divisor = np.where(step.h == 0, 1, step.h)  # columns without a step have zero increments

    def note_stage(self, j: int, parts: list[Any], y_bar: Array | None) -> None:
        """Add the contributions of stage j, given the cotangents `parts` of leaves and time, and that of its argument."""
        self.note_leaves(parts, np.s_[: self._width], self._width)
        if not self.timed:
            return
        if parts[-1] is not None:
            self.t_bar += parts[-1]
            self.h_bar += self.step.tableau.c[j] * parts[-1]
        if j and y_bar is not None:
            # The derivative of y_j = u + h Σ a k, which may be the new state, with respect to h is (y_j - u) / h.
            self.h_bar += _dot(y_bar, self.step.y[j] - self.step.y[0]) / self._divisor

    def note_leaves(self, parts: Sequence[Any], columns: Columns, count: int) -> None:
        """Add the cotangents of leaves for the trajectories `columns`; `count`: their number."""
        varies = self._p.varies
        found = {place: x[..., :count] if varies[place] and x is not None else x for place, x in zip(self.parts, parts)}
        self._p.add_cotangents(self.parts, found, columns)

    def note_new(self, cotangent: Array) -> None:
        """Add the contribution of the new state to the cotangent of the step size."""
        step = self.step
        self.h_bar += _dot(cotangent, step.argument(step.last) - step.y[0]) / self._divisor

    def note_saved(self, inside: Sequence[Inside]) -> None:
        """Add the contributions of states at fixed times inside the step to the cotangents of the step's time and size."""
        step = self.step
        for part in inside:
            columns = part.columns
            stages = [k[:, columns] for k in step.k]
            rates = stage_rates(step.tableau, part.x)
            rate = _dot(part.value, sum(r[..., None, :] * k for r, k in zip(rates, stages)))
            by_size = _dot(part.value, sum(w * k for w, k in zip(part.weights, stages)))
            # At a fixed time, x = (time - t) / h.
            self.t_bar[columns] -= over_slots(rate, 1)
            self.h_bar[columns] += over_slots(by_size - rate * part.x, 1)


def _dot(cotangent: Array, change: Array) -> Array:
    return (cotangent * change).real.sum(axis=-2)
