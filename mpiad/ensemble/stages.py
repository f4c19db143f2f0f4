"""One step of a Runge-Kutta or Rosenbrock method, vectorized over trajectories (columns), on the host or on a device.

On the host, sums of products are elementwise over columns; BLAS isn't used, since its order of summation depends on the
number of columns. Buffers are allocated once for each number of columns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.ensemble.batch import Batch, is_on_device
from mpiad.ensemble.coefficients import Coefficients
from mpiad.ensemble.column_lu import Mass
from mpiad.ensemble.controller import mean_square
from mpiad.ensemble.derivative import Derivative, derivative_of, locked
from mpiad.ensemble.field_jacobian import FieldJacobian, jacobian_of
from mpiad.ensemble.sparse_lu import StepMatrices
from mpiad.ensemble.tableaus import RosenbrockTableau

# These functions are called with `out` as a positional argument, which is faster than a keyword argument.
_multiply, _add = np.multiply, np.add


class Stages:
    """The stages `k` of n columns, of which the first is f at the current state, and the new state `new`, shape (d, n)."""

    def __init__(self, coefficients: Coefficients, derivative: Derivative, like: Array):
        self._coefficients, self._write, self._real = coefficients, derivative.write, coefficients.real
        self.k = coefficients.stages(like.shape, like)
        self.new, self._argument, self._term = (np.empty_like(like, order="C") for _ in range(3))
        self._h, self._scale, self._scale_new = (np.empty_like(like, order="C", dtype=self._real) for _ in range(3))
        self._locked_new, self._locked_argument = locked(self.new), locked(self._argument)
        self._times: list[Array] = []

    def compute(self, u: Array, p: Tree, t: Array, h: Array, t_new: Array, sign: Array | None) -> None:
        """Compute all stages and the new state from u, shape (d, n), and times in the solve's direction, shape (n,)."""
        # `sign`: 1, or -1 for backward integration; None if no column has -1, or if times are actual and h is signed.
        self._begin(t, h, t_new, sign)
        last = self._coefficients.last
        for i in range(1, last + 1):
            self._evaluate(self.k[i], i, u, p, sign, i == last)

    def _begin(self, t: Array, h: Array, t_new: Array, sign: Array | None) -> None:
        """Set the sizes of the steps and the times of their stages."""
        self._h[...] = h
        if sign is not None:
            t, h, t_new = t * sign, h * sign, t_new * sign
        # t + h may differ from the end of the step by rounding.
        end = t_new.astype(self._real, copy=False)
        times = zip(self._coefficients.tableau.c, self._coefficients.times(t, h))
        self._times = [locked(end if c == 1 else time) for c, time in times]

    def _evaluate(self, out: Array, i: int, u: Array, p: Tree, sign: Array | None, at_end: bool) -> None:
        """Write f at the argument of stage i, which is the new state if `at_end`."""
        target, locked_target = (self.new, self._locked_new) if at_end else (self._argument, self._locked_argument)
        _multiply(self._coefficients.row(i, self.k, target, self._term), self._h, target)
        _add(target, u, target)
        self._write(out, locked_target, p, self._times[i])
        if sign is not None:
            _multiply(out, sign, out)

    def error(self, u: Array, rtol: Array | float, atol: Array | float) -> Array:
        """Return the mean square of the error relative to its tolerance, shape (n,)."""
        e, scale, scale_new = self._argument, self._scale, self._scale_new
        _multiply(self._coefficients.row(-1, self.k, e, self._term), self._h, e)
        np.abs(u, scale)
        np.abs(self.new, scale_new)
        np.maximum(scale, scale_new, out=scale)
        _multiply(scale, rtol, scale)
        _add(scale, atol, scale)
        np.divide(e, scale, e)
        return mean_square(e)

    def advance(self, u: Array, accepted: Array | None) -> Array:
        """Return the states after the step if accepted (None: all), else before it; the last stage becomes the first."""
        k = self.k
        if accepted is None:
            k[0], k[-1] = k[-1], k[0]  # type: ignore[index]
            before, self.new, self._locked_new = self.new, u, locked(u)
            return before
        np.copyto(k[0], k[-1], where=accepted)
        if type(u) is not np.ndarray:
            return np.where(accepted, self.new, u)  # the record refers to the states before the step
        np.copyto(u, self.new, where=accepted)
        return u


def stages_for(coefficients: Coefficients, batch: Batch, mass: Array | None) -> Callable[[Array], Stages]:
    """Return a function of `like` (see `Stages`) that creates the stages for steps of a method."""
    derivative, tableau = derivative_of(batch.f, batch.shape), coefficients.tableau
    if isinstance(tableau, RosenbrockTableau):
        jacobian = jacobian_of(batch)
        matrices = StepMatrices(jacobian.places, Mass(mass, tableau.gamma), len(batch.u0), not is_on_device(batch))
        return partial(RosenbrockStages, jacobian, matrices, coefficients, derivative)
    return partial(Stages, coefficients, derivative)


class RosenbrockStages(Stages):
    """`Stages` of a Rosenbrock method, between f at the current state and f at the new state (see `tableaus`)."""

    def __init__(
        self,
        jacobian: FieldJacobian,
        matrices: StepMatrices,
        coefficients: Coefficients,
        derivative: Derivative,
        like: Array,
    ):
        super().__init__(coefficients, derivative, like)
        self._jacobian, self._matrices = jacobian, matrices

    def compute(self, u: Array, p: Tree, t: Array, h: Array, t_new: Array, sign: Array | None) -> None:
        """Compute all stages and the new state: see `Stages.compute`."""
        tableau, k, last = cast(RosenbrockTableau, self._coefficients.tableau), self.k, self._coefficients.last
        self._begin(t, h, t_new, sign)
        entries, time_derivative = self._jacobian.entries(u, p, self._times[1])
        # Backwards in time f changes its sign, but ∂f/∂t doesn't.
        entries *= -self._h[0] if sign is None else -self._h[0] * sign.astype(self._real)
        lu = self._matrices.factorized(entries)
        if time_derivative is not None:
            time_derivative *= self._h
        for i in range(1, last):
            stage = k[i]
            if i == 1:
                np.copyto(stage, k[0])
            else:
                at_end = i == last - 1 and tableau.ends_at_new_state
                self._evaluate(stage, i, u, p, sign, at_end)
                if at_end:
                    np.copyto(k[-1], stage)
                self._coefficients.add_row(stage, last + i, k, self._matrices.mass, self._argument, self._term)
            if time_derivative is not None and tableau.slopes[i - 1]:
                stage += time_derivative * self._real.type(tableau.slopes[i - 1])
            lu.solve(stage)
        if not tableau.ends_at_new_state:
            self._evaluate(k[-1], last, u, p, sign, True)
