"""One step of a Rosenbrock method for all columns at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import DTypeLike

from mpiad._typing import Array, Tree
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.column_lu import ColumnLU, Mass
from mpiad.ensemble.derivative import Derivative, derivative_of
from mpiad.ensemble.field_jacobian import Jacobian, jacobian_of
from mpiad.ensemble.rosenbrock_tableaus import RosenbrockTableau
from mpiad.ensemble.stages import Stages
from mpiad.ensemble.tableaus import Tableau

__all__ = ["RosenbrockStages", "stages_for"]


def stages_for(tableau: Tableau, batch: Batch, mass: Array | None) -> Callable[..., Stages]:
    """Return what makes the stages of a method's steps: from dtype, shape (d, n) and whether many steps will be taken."""
    derivative = derivative_of(batch.f, batch.shape)
    if isinstance(tableau, RosenbrockTableau):
        return partial(RosenbrockStages, tableau, derivative, jacobian_of(batch), Mass(mass, tableau.gamma))
    return partial(Stages, tableau, derivative)


class RosenbrockStages(Stages):
    """The buffers of n columns: see `Stages`. In front of the method's stages stands f at the present state."""

    tableau: RosenbrockTableau

    def __init__(
        self, tableau: RosenbrockTableau, derivative: Derivative, jacobian: Jacobian, mass: Mass, dtype: DTypeLike,
        shape: tuple[int, int], many: bool = False,
    ):  # fmt: skip
        super().__init__(tableau, derivative, dtype, shape, many)
        d = shape[0]
        self._differentiate = jacobian.write
        self._jacobian, self._matrix, self._mass = *(np.zeros((d, *shape), dtype) for _ in range(2)), mass
        self._slopes = [np.array(weight, self._real) for weight in tableau.slopes]

    def take(self, u: Array, p: Tree, t: Array, h: Array, t_new: Array, sign: Array | None) -> None:
        """Compute all stages and the new state: see `Stages.take`."""
        tableau, k = self.tableau, self.k
        self._h[:] = h
        self._set_times(t, h, t_new, sign)
        # By the present time, which is that of the first stage.
        rise = self._differentiate(self._jacobian, u, p, self._seen_time[1])
        self._factor(sign)
        if rise is not None:
            rise *= self._h
        count = len(tableau.coupling)
        for i in range(1, count + 1):
            if i == 1:
                np.copyto(k[1], k[0])
            else:
                at_end = i == count and tableau.ends_at_new_state
                self._evaluate(k[i], i, u, p, sign, at_end)
                if at_end:
                    np.copyto(k[-1], k[i])
                k[i] += self._mass.times(self._sum(count + i, self._argument))
            if rise is not None and tableau.slopes[i - 1]:
                k[i] += rise * self._slopes[i - 1]
            self._lu.solve(k[i])
        if tableau.ends_at_new_state:
            return
        self._evaluate(k[-1], count + 1, u, p, sign, True)

    def _evaluate(self, out: Array, i: int, u: Array, p: Tree, sign: Array | None, at_end: bool) -> None:
        """Write f at the argument of stage i, which is the new state where the step ends there."""
        target, seen = (self.new, self._seen_new) if at_end else (self._argument, self._seen_argument)
        np.multiply(self._sum(i - 1, target), self._h, target)
        np.add(target, u, target)
        self._write(out, seen, p, self._seen_time[i])
        if sign is not None:
            np.multiply(out, sign, out)

    def _factor(self, sign: Array | None) -> None:
        """Factor the matrices W of the columns."""
        # Backwards in time f changes its sign, and ∂f/∂t doesn't.
        scale = -self._h[0] if sign is None else -self._h[0] * sign.astype(self._real)
        np.multiply(self._jacobian, scale, self._matrix)
        self._mass.add_to(self._matrix)
        self._lu = ColumnLU(self._matrix)
