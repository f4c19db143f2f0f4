"""The linear systems of Rosenbrock steps, with derivatives (see `tableaus` for the notation).

If W = M/γ - h J and T = ∂f/∂t change, a stage k changes as if the change of h (J k + d T), with k held fixed, were added to
the right-hand side. This term is the derivative of f along (h k, h d), so its derivatives are second derivatives of f.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.program import Program, evaluated
from mpiad.ensemble.column_lu import ColumnLU, Mass
from mpiad.ensemble.compiled.trace import packing_of
from mpiad.ensemble.field_jacobian import derived, jacobian_of, second_adjoint_program, second_tangent_program
from mpiad.ensemble.run import Run
from mpiad.ensemble.tableaus import RosenbrockTableau


class StageSystems:
    """The linear systems of a run's steps, with derivatives; `places`: the indices of the differentiated leaves."""

    def __init__(self, run: Run, places: Sequence[int]):
        self._batch, self._places, self._layout = run.batch, places, packing_of(run.batch.p)
        self.table: RosenbrockTableau = run.tableau  # type: ignore[assignment]
        self.mass = Mass(run.settings.mass, self.table.gamma)
        self._write_jacobian = jacobian_of(run.batch)

    @cached_property
    def _second_adjoint(self) -> Program:
        return self._program(second_adjoint_program)

    @cached_property
    def _second_tangent(self) -> Program:
        return self._program(second_tangent_program)

    def _program(self, derivative: Any) -> Program:
        result = derived(derivative, self._batch)
        if isinstance(result, Program):
            return result
        raise NotImplementedError(
            "solve: derivatives of a Rosenbrock method need second derivatives of f, but f can't be traced "
            f"({result}). Write f with the functions of autograd.numpy, and without branches on values."
        )

    def at(self, u: Array, leaves: Sequence[Any], t: Array, h: Array) -> tuple[Array, Array | None, ColumnLU]:
        """Return the linear systems of steps of sizes h from states u, one per column.

        These are ∂f/∂u, shape (d, d, n); ∂f/∂t, shape (d, n), or None if it is zero; and the LU factors of W.
        """
        jacobian, p = np.zeros_like(u, shape=(len(u), *u.shape)), self._batch.p.of_columns(list(leaves), False)
        time_derivative = self._write_jacobian(jacobian, u, p, t)
        matrices = jacobian * -h
        self.mass.add_to(matrices)
        return jacobian, time_derivative, ColumnLU(matrices)

    def add_stages(self, right: Array, i: int, stages: Sequence[Array]) -> None:
        """Add the coupling terms of the earlier stages to the right-hand side of stage i."""
        for weight, before in zip(self.table.coupling[i - 1], stages):
            if weight:
                right += self.mass.times(weight * before)

    def rows(self, leaves: Sequence[Any], count: int, dtype: np.dtype) -> dict[int, Array]:
        """Return the scalars of the parameters by index, as programs take them: of shape (n,), or one number if shared."""
        return self._layout.numbers(list(leaves), count, dtype)

    def pull(self, u: Array, leaves: Sequence[Any], t: Array, right: Array, du: Array, dt: Array) -> list[Any]:
        """Return the gradient of Σ right · D with respect to u, leaves and time; D is the derivative of f along (du, dt).

        `right` and `du` have shape (d, stages, n), `dt` (stages, n).
        """
        count, d = u.shape[1], len(u)
        gradients = evaluated(
            self._second_adjoint, u, self.rows(leaves, count, u.dtype), [t], right, [*(du[i] for i in range(d)), dt]
        )
        zeros = np.zeros_like(dt)
        sums = [np.sum(x if np.shape(x) == zeros.shape else x + zeros, axis=0) for x in gradients]
        leaves = []
        if self._places:
            layout, parameters = self._layout, sums[d:-1]
            varying, shared = [parameters[j] for j in layout.varying], [parameters[j].sum() for j in layout.shared]
            joined = layout.joined(varying, shared, count)
            leaves = [joined[place] for place in self._places]
        return [np.stack(sums[:d]), *leaves, sums[-1]]

    def tangent_rows(self, leaves: Sequence[Any], tangents: Sequence[Sequence[Any]], u: Array) -> list[Array]:
        """Return the m tangents of each scalar of the parameters, shape (m, n), or zeros, (1, n), if `tangents` is empty.

        `tangents`: for each differentiated leaf m arrays, or None for zeros.
        """
        count, dtype = u.shape[-1], u.dtype
        numbers, zeros = range(self._layout.size), np.zeros_like(u, shape=(count,))
        if not tangents:
            return [zeros[None] for _ in numbers]
        rows_along, zero_leaves = [], list(leaves)
        for part in self._layout.parts:
            zero_leaves[part.place] = np.zeros_like(leaves[part.place], dtype=dtype)
        for j in range(len(tangents[0])):
            filled = list(zero_leaves)
            for place, gs in zip(self._places, tangents):
                filled[place] = zero_leaves[place] if gs[j] is None else gs[j]
            rows_along.append(self.rows(filled, count, dtype))
        return [np.stack([row[k] + zeros for row in rows_along]) for k in numbers]

    def push(
        self, u: Array, leaves: Sequence[Any], t: Array, du: Array, dt: Array, tangents: Array, rows: list[Array]
    ) -> Array:
        """Return the tangents of the derivative of f along (du, dt), shape (d, m, n).

        `du` has shape (d, n), `dt` (n,). `tangents`: those of u, shape (m, d, n). `rows`: see `tangent_rows`.
        """
        given = self.rows(leaves, u.shape[1], u.dtype)
        moved = [*(tangents[:, i] for i in range(len(u))), *rows]
        found = evaluated(self._second_tangent, u, given, [t], [*(du[i] for i in range(len(u))), dt], moved)
        zeros = np.zeros_like(tangents[:, 0])
        return np.stack([x if np.shape(x) == zeros.shape else x + zeros for x in found])
