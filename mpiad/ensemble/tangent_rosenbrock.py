"""The tangents of one Rosenbrock step of several columns.

With W k_i = r_i, a tangent of stage i is W⁻¹ of that of r_i, which gains what moves W and ∂f/∂t: see `stage_systems`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpiad._typing import Array
from mpiad.ensemble.coefficients import Coefficients
from mpiad.ensemble.stage_systems import StageSystems, System
from mpiad.ensemble.step_sweep import Visit
from mpiad.ensemble.tangent_step import TangentStep

__all__ = ["TangentRosenbrockStep"]


class TangentRosenbrockStep(TangentStep):
    """The stages of a step with their tangents: see `TangentStep`. f at both ends isn't among them.

    Parameters
    ----------
    leaves : sequence
        Of the parameters of the step's columns.
    along : sequence of sequence
        For each leaf to differentiate by its tangents, None where one is zero.
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
