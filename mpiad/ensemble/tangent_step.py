"""The tangents of one step of several columns, beside its values.

With W k_i = r_i in a Rosenbrock step, a tangent of stage i is W⁻¹ of that of r_i, which gains what moves W and ∂f/∂t: see
`stage_systems`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.coefficients import Coefficients
from mpiad.ensemble.stage_systems import StageSystems, System
from mpiad.ensemble.step_sweep import Visit

# Columns up to which each number gets its own step size.
_FEW = 1024


class TangentStep:
    """The stages of a step with their tangents, each of shape (1 + m, d, n).

    - `write`: writes f and its tangents: see `Tracing.along`.
    - `shape`: (1 + m, d, n).
    - `like`: of the states' kind.
    - `u`: before the step.
    - `k`: the stages.
    """

    def __init__(self, coefficients: Coefficients, write: Callable, shape: tuple[int, int, int], like: Array):
        self._coefficients, self._write, self.last = coefficients, write, coefficients.last
        # In C order, which NumPy takes fastest: what is made by an index of two columns has another.
        self.u, self._argument, self._end, self._term = (np.empty_like(like, shape=shape, order="C") for _ in range(4))
        self._stages = coefficients.stages(shape, self.u)
        self.k: list[Array] = []
        # Of few columns each number has its own h, as to repeat one takes as long as to multiply.
        self._few = np.empty_like(self.u, dtype=coefficients.real) if shape[2] <= _FEW else None
        self._new: Array | None = None

    def take(self, visit: Visit, tangents: Array) -> None:
        """Compute the stages of a visit, but for the last."""
        u, h = self.u, visit.h
        u[0], u[1:] = visit.u, tangents
        self._times = self._coefficients.times(visit.t, h)
        if self._few is None:
            self._h = h.astype(self._coefficients.real, copy=False)
        else:
            self._few[...] = h
            self._h = self._few
        self._new, self.k = None, []
        for i in range(self.last):
            self._evaluate(self._sum(i, self._argument) if i else u)

    def new(self) -> Array:
        """Return the new state: the argument of the last stage."""
        if self._new is None:
            self._new = self._sum(self.last, self._end)
        return self._new

    def add_last_stage(self) -> None:
        """Compute the stage at the new state too; once."""
        if len(self.k) == self.last:
            self._evaluate(self.new())

    def _sum(self, i: int, y: Array) -> Array:
        y = self._coefficients.row(i, self._stages, y, self._term)
        np.multiply(y, self._h, y)
        return np.add(y, self.u, y)

    def _evaluate(self, y: Array) -> None:
        i = len(self.k)
        self._write(self._stages[i], y, self._times[i])
        self.k.append(self._stages[i])


class TangentRosenbrockStep(TangentStep):
    """The stages of a step with their tangents: see `TangentStep`. f at both ends isn't among them.

    `leaves`: of the parameters of the step's columns. `along`: for each leaf to differentiate by its tangents, None
    where one is zero.
    """

    def __init__(
        self, coefficients: Coefficients, write: Callable, shape: tuple[int, int, int], like: Array, systems: StageSystems,
        leaves: Sequence[Any], along: Sequence[Sequence[Any]],
    ):  # fmt: skip
        super().__init__(coefficients, write, shape, like)
        self._systems, self._leaves = systems, leaves
        self._rows = systems.tangent_rows(leaves, along, self.u[0])
        self._system: System

    def take(self, visit: Visit, tangents: Array) -> None:
        """Compute the stages of a visit."""
        real = self._coefficients.real
        self._size, self._time = (x.astype(real, copy=False) for x in (visit.h, visit.t))
        self._system = self._systems.at(visit.u, self._leaves, self._time, self._size)
        super().take(visit, tangents)

    def _sum(self, i: int, y: Array) -> Array:
        return self.u if i == 1 else super()._sum(i, y)

    def _evaluate(self, y: Array) -> None:
        i = len(self.k)
        k = self._stages[i]
        self.k.append(k)
        if i in (0, self.last):
            k[...] = 0
            return
        self._write(k, y, self._times[i])
        self._systems.add_stages(k, i, self.k)
        slope, system = self._systems.table.slopes[i - 1], self._system
        if system.rise is not None and slope:
            k[0] += slope * self._size * system.rise
        system.lu.solve(k[0])
        moved = self._systems.push(
            self.u[0], self._leaves, self._time, k[0] * self._size, slope * self._size, self.u[1:], self._rows
        )
        for j in range(1, len(k)):
            k[j] += moved[:, j - 1]
            system.lu.solve(k[j])
