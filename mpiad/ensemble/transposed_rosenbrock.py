"""The adjoint of one Rosenbrock step of several columns.

With W k_i = r_i, where r_i = f(y_i) + Σ C_ij k_j + d_i h T (see `rosenbrock_tableaus`), a cotangent of stage i goes back
through the transposed matrix, r̄_i = W⁻ᵀ k̄_i, and from there to the argument, as in a Runge-Kutta step, and to the stages
before it. What is left is how W and T move with the state, the parameters and time: as the gradient of

    φ = Σ r̄_i · h (J k_i + d_i T),

with r̄ and k held fixed. It is a sum of derivatives of f along (h k_i, h d_i), so its gradient is that of r̄_i · f, along the
same directions: second derivatives of f, of which no matrix is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.linearization import Tracing
from mpiad.ensemble.run import Run
from mpiad.ensemble.stage_systems import StageSystems
from mpiad.ensemble.step_sweep import Visit
from mpiad.ensemble.transposed_step import Arrival, TransposedStep, over_slots


def transposed_steps(run: Run, tracing: Tracing, places: Sequence[int]) -> Callable[[Visit, Sequence[Any]], TransposedStep]:
    """Return what makes the way back through a visit, by the parameters of its columns and the places of their leaves."""
    if not run.tableau.implicit:
        return lambda visit, leaves: TransposedStep(run.coefficients, tracing, visit, leaves)
    systems = StageSystems(run, places)
    return lambda visit, leaves: _TransposedRosenbrockStep(run, tracing, systems, visit, leaves)


class _TransposedRosenbrockStep(TransposedStep):
    """The stages of one step, and the way back through them: see `TransposedStep`. f at its ends isn't among them."""

    def __init__(self, run: Run, tracing: Tracing, systems: StageSystems, visit: Visit, leaves: Sequence[Any]):
        self._systems, self._table, real = systems, systems.table, run.coefficients.real
        h, self._time = (x.astype(real, copy=False) for x in (visit.h, visit.t))
        self._jacobian, self._rise, self._lu = systems.at(visit.u, leaves, self._time, h)
        super().__init__(run.coefficients, tracing, visit, leaves)
        # Of f at the new state nothing is a part.
        self.k.append(np.zeros_like(visit.u))

    def _evaluate(self, y: Array, i: int) -> None:
        if not i:
            self._stages[0][...] = 0
            self.k.append(self._stages[0])
            return
        super()._evaluate(y, i)
        k, slope = self._stages[i], self._table.slopes[i - 1]
        self._systems.add_stages(k, i, self.k)
        if self._rise is not None and slope:
            k += slope * self.h * self._rise
        self._lu.solve(k)

    def argument(self, i: int) -> Array:
        """Return the argument of stage i; that of the last is the new state."""
        if i == 1 == len(self.y):  # no stage is before it
            self.y.append(self.y[0])
        return super().argument(i)

    def add_last_stage(self) -> None:
        """Do nothing: no state inside a step depends on f at its end."""

    def pull(self, cotangent: Array, arrivals: Sequence[Arrival], gains: Callable) -> Array:
        """Return the cotangent of the state before the step; only once. See `TransposedStep.pull`."""
        total, h, slopes = cotangent, self.h, self._table.slopes
        bars, room = self._coefficients.bars(total), np.empty_like(total)
        bars[self.last] = total * h
        rights: dict[int, Array] = {}
        for j in range(self.last - 1, 0, -1):
            right = self._coefficients.column(j, bars, room, self._term).copy()
            for i, behind in rights.items():
                if self._table.coupling[i - 1][j]:
                    right += self._systems.mass.times(self._table.coupling[i - 1][j] * behind, transposed=True)
            for arrival in arrivals:
                if j in arrival.weights:
                    right[:, arrival.columns] += over_slots(arrival.value * arrival.weights[j])
            self._lu.solve_transposed(right)
            rights[j] = right
            y_bar, *parts = self._pulls.pop()(right)
            gains(j, parts, y_bar)
            if y_bar is not None:
                total += y_bar
                bars[j] = y_bar * h
        order = range(1, self.last)
        right, along = (np.stack(rows, axis=1) for rows in ([rights[j] for j in order], [self.k[j] * h for j in order]))
        in_time = np.stack([h.dtype.type(slope) * h for slope in slopes])
        by_u, *parts = self._systems.pull(self.y[0], self._leaves, self._time, right, along, in_time)
        total += by_u
        gains(0, parts, by_u)
        self.by_size = self._moved_by_size(rights)
        return total

    def _moved_by_size(self, rights: dict[int, Array]) -> Array:
        """Return how φ moves with the size of the step, of which it is a multiple."""
        total = np.zeros_like(self.h, dtype=float)
        for j, right in rights.items():
            moved = (self._jacobian * self.k[j]).sum(axis=1)
            if self._rise is not None:
                moved = moved + self._table.slopes[j - 1] * self._rise
            total += (right * moved).sum(axis=0)
        return total
