"""One step of a Runge-Kutta or Rosenbrock method on a device, without copies to the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.coefficients import DeviceCoefficients, polynomials, states_at
from mpiad.ensemble.column_lu import ColumnLU, Mass
from mpiad.ensemble.derivative import Derivative
from mpiad.ensemble.field_jacobian import jacobian_of


class DeviceStages:
    """The stages of steps, like `Stages` on the host, in new arrays for each step; `first` is f at the current states."""

    k: Array  # shape (stages, d, n)
    new: Array  # shape (d, n); the states after the step

    def __init__(self, table: DeviceCoefficients, derivative: Derivative, first: Array):
        self._table, self._derivative, self.first = table, derivative, first
        self._h: Array = None

    def compute(self, u: Array, p: Tree, t: Array, h: Array, t_new: Array, sign: Array | None) -> None:
        """Compute all stages and the new states; parameters as for `Stages.compute`, except that h may be signed."""
        self._begin(u, h, sign)
        for i in range(1, self._table.last + 1):
            self._evaluate(self.k[i], i, u, p, self._table.time(i, t, h, t_new, sign))

    def _begin(self, u: Array, h: Array, sign: Array | None) -> None:
        table = self._table
        self.k, self._h = table.stages(u.shape, u), h.astype(table.real)
        self.k[0] = self.first
        self._sign = None if sign is None else sign.astype(table.real)

    def _evaluate(self, out: Array, i: int, u: Array, p: Tree, t: Array) -> None:
        """Write f at the argument of stage i, and store the argument as `new`."""
        self.new = u + self._h * self._table.row(i, self.k, u, u)
        self._derivative.write(out, self.new, p, t)
        if self._sign is not None:
            out *= self._sign

    def error(self, u: Array, rtol: Array | float, atol: Array | float) -> Array:
        """Return the mean square of the error over its tolerance, shape (n,)."""
        scale = atol + rtol * np.maximum(np.abs(u), np.abs(self.new))
        relative = np.abs(self._h * np.tensordot(self._table.error, self.k, 1)) / scale
        return np.sum(relative * relative, axis=0).astype(float) / len(u)

    def following(self, accepted: Array) -> Array:
        """Return f at the start of the next step."""
        return np.where(accepted, self.k[-1], self.first)

    def inside(self, u: Array, x: Array) -> Array:
        """Return the states, shape (m, d, n), at the fractions x, shape (m, n), of the step."""
        return states_at(polynomials(self._table, u, self._h, self.k), x[:, None].astype(self._table.real))


def stages_on_device(table: DeviceCoefficients, derivative: Derivative, first: Array, batch: Batch) -> DeviceStages:
    """Return the stages of a method's steps; `first`: f at the current states, times the `sign` given to `compute`."""
    if table.tableau.implicit:
        return DeviceRosenbrockStages(table, derivative, first, batch)
    return DeviceStages(table, derivative, first)


class DeviceRosenbrockStages(DeviceStages):
    """`DeviceStages` for Rosenbrock methods: k[0] is f at the current states; k[1], k[2], ... are the method's stages."""

    def __init__(self, table: DeviceCoefficients, derivative: Derivative, first: Array, batch: Batch):
        super().__init__(table, derivative, first)
        self._tableau: Any = table.tableau
        self._write_jacobian, self._mass = jacobian_of(batch), Mass(None, self._tableau.gamma)

    def compute(self, u: Array, p: Tree, t: Array, h: Array, t_new: Array, sign: Array | None) -> None:
        """Compute all stages and the new states: see `DeviceStages.compute`."""
        self._begin(u, h, sign)
        table, tableau = self._table, self._tableau
        jacobian = np.zeros_like(u, shape=(len(u), *u.shape))
        time_derivative = self._write_jacobian(jacobian, u, p, table.time(1, t, h, t_new, sign))
        # If time is reversed, f changes its sign, but ∂f/∂t doesn't.
        matrices = jacobian * (-self._h if self._sign is None else -self._h * self._sign)
        self._mass.add_to(matrices)
        lu, count = ColumnLU(matrices), len(tableau.coupling)
        for i in range(1, count + 1):
            right = self.first
            if i > 1:
                right = np.empty_like(u)
                self._evaluate(right, i, u, p, table.time(i, t, h, t_new, sign))
                if i == count and tableau.ends_at_new_state:
                    self.k[-1] = right
                for j, weight in enumerate(tableau.coupling[i - 1]):
                    if weight:
                        right = right + table.real.type(weight) * self.k[j]
            if time_derivative is not None and tableau.slopes[i - 1]:
                right = right + table.real.type(tableau.slopes[i - 1]) * (self._h * time_derivative)
            self.k[i] = right
            lu.solve(self.k[i])
        if not tableau.ends_at_new_state:
            self._evaluate(self.k[-1], count + 1, u, p, table.time(count + 1, t, h, t_new, sign))
