"""One step of a Rosenbrock method on a device: the same formulas as on the host, in new arrays and without a look at any.

The Jacobian is a program of what f computes, evaluated one operation after the other; the program is made on the host, from
a few trajectories.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.compiling.program import evaluated
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.coefficients import DeviceCoefficients
from mpiad.ensemble.column_lu import ColumnLU
from mpiad.ensemble.compiled.jacobian_programs import JacobianProgram, jacobian_program
from mpiad.ensemble.compiled.parameter_packing import packing_of
from mpiad.ensemble.derivative import Derivative
from mpiad.ensemble.field_jacobian import derived, leaves_of
from mpiad.ensemble.mass import Mass
from mpiad.ensemble.on_device.device_stages import DeviceStages
from mpiad.transport.device_arrays import arrays_of, is_device_array

__all__ = ["DeviceRosenbrockStages"]

# Trajectories by which a program is compared with f.
_FEW = 3


class DeviceRosenbrockStages(DeviceStages):
    """The stages of steps: see `DeviceStages`. In front of the method's stages stands f at the present state."""

    def __init__(self, table: DeviceCoefficients, derivative: Derivative, first: Array, batch: Batch):
        super().__init__(table, derivative, first)
        self._tableau: Any = table.tableau
        self._jacobian, self._mass = _DeviceJacobian(batch), Mass(None, self._tableau.gamma)

    def take(self, u: Array, p: Tree, t: Array, h: Array, t_new: Array, sign: Array | None) -> None:
        """Compute all stages and the new states: see `DeviceStages.take`."""
        table, tableau = self._table, self._tableau
        self.k, self._h = table.stages(u.shape, u), h.astype(table.real)
        self.k[0] = self.first
        backwards = None if sign is None else sign.astype(table.real)
        jacobian, rise = self._jacobian.of(u, p, table.time(1, t, h, t_new, sign))
        # Backwards in time f changes its sign, and ∂f/∂t doesn't.
        matrices = jacobian * (-self._h if backwards is None else -self._h * backwards)
        self._mass.add_to(matrices)
        lu, count = ColumnLU(matrices), len(tableau.coupling)
        for i in range(1, count + 1):
            right = self.first
            if i > 1:
                right = self._evaluated(i, u, p, table.time(i, t, h, t_new, sign), backwards)
                if i == count and tableau.ends_at_new_state:
                    self.k[-1] = right
                for j, weight in enumerate(tableau.coupling[i - 1]):
                    if weight:
                        right = right + table.real.type(weight) * self.k[j]
            if rise is not None and tableau.slopes[i - 1]:
                right = right + table.real.type(tableau.slopes[i - 1]) * (self._h * rise)
            self.k[i] = right
            lu.solve(self.k[i])
        if not tableau.ends_at_new_state:
            self.k[-1] = self._evaluated(count + 1, u, p, table.time(count + 1, t, h, t_new, sign), backwards)

    def _evaluated(self, i: int, u: Array, p: Tree, t: Array, sign: Array | None) -> Array:
        """Return f at the argument of stage i, which is `new` from then on."""
        self.new = u + self._h * self._table.row(i, self.k, u, u)
        out = np.empty_like(u)
        self._derivative.write(out, self.new, p, t)
        return out if sign is None else out * sign


class _DeviceJacobian:
    """The derivatives of f by the state and by time, at columns on a device."""

    def __init__(self, batch: Batch):
        home: Any = arrays_of(batch.u0)
        few = batch.share(slice(0, _FEW))
        leaves = [home.to_host(leaf) if is_device_array(leaf) else leaf for leaf in few.p.leaves]
        few = few._replace(u0=home.to_host(few.u0), p=few.p._replace(leaves=leaves))
        found = derived(jacobian_program, few)
        if not isinstance(found, JacobianProgram):
            raise TypeError(
                f"solve: on a device a Rosenbrock method needs the Jacobian of what f computes, but f can't be traced "
                f"({found}). Write it with the functions of autograd.numpy and without branches on values, or bring the "
                "arrays to the host with mpiad.device.to_host."
            )
        self._program, self._places, self._slopes = found
        self._layout, self._p, self._rows = packing_of(few.p), None, {}

    def of(self, u: Array, p: Tree, t: Array) -> tuple[Array, Array | None]:
        """Return ∂f/∂u, shape (d, d, n), and ∂f/∂t, shape (d, n), or None where that is zero."""
        if p is not self._p:  # it changes with the working set only
            self._p, self._rows = p, self._parameters(p, u.shape[1])
        values = evaluated(self._program, u, self._rows, [t])
        jacobian = np.zeros_like(u, shape=(len(u), *u.shape))
        for (i, j), value in zip(self._places, values):
            jacobian[i, j] = value
        if not self._slopes:
            return jacobian, None
        slope = np.zeros_like(u)
        for i, value in zip(self._slopes, values[len(self._places) :]):
            slope[i] = value
        return jacobian, slope

    def _parameters(self, p: Tree, count: int) -> dict[int, Any]:
        """Return the numbers of the parameters as the program takes them."""
        leaves, rows = leaves_of(p), {}
        for part in self._layout.parts:
            leaf = np.reshape(leaves[part.place], (-1, count) if part.varies else (-1,))
            numbers = [leaf[j] for j in range(leaf.shape[0])]
            if part.complex:
                numbers = [half for number in numbers for half in (number.real, number.imag)]
            rows |= dict(zip(part.scalars, numbers))
        return rows
