"""One step of a Runge-Kutta pair on a device."""

from __future__ import annotations

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.ensemble.coefficients import DeviceCoefficients, polynomials
from mpiad.ensemble.derivative import Derivative

__all__ = ["DeviceStages"]


class DeviceStages:
    """The stages of steps, as `Stages` on the host; each step's are new arrays.

    Parameters
    ----------
    first : array, shape (d, n)
        f at the present states, in the direction of the solve.

    Attributes
    ----------
    k : array, shape (stages, d, n)
    new : array, shape (d, n)
        The states after the step.
    """

    k: Array
    new: Array

    def __init__(self, table: DeviceCoefficients, derivative: Derivative, first: Array):
        self._table, self._derivative, self.first = table, derivative, first
        self._h: Array = None

    def take(self, u: Array, p: Tree, t: Array, h: Array, t_new: Array, sign: Array | None) -> None:
        """Compute all stages and the new states; parameters as in `Stages.take`, but for h, which may be signed."""
        table = self._table
        self.k, self._h = table.stages(u.shape, u), h.astype(table.real)
        self.k[0] = self.first
        backwards = None if sign is None else sign.astype(table.real)
        for i in range(1, table.last + 1):
            self.new = u + self._h * table.row(i, self.k, u, u)
            self._derivative.write(self.k[i], self.new, p, table.time(i, t, h, t_new, sign))
            if backwards is not None:
                self.k[i] *= backwards

    def error(self, u: Array, rtol: Array | float, atol: Array | float) -> Array:
        """Return the mean square of the error over its tolerance, shape (n,)."""
        scale = atol + rtol * np.maximum(np.abs(u), np.abs(self.new))
        relative = np.abs(self._h * np.tensordot(self._table.error, self.k, 1)) / scale
        return np.sum(relative * relative, axis=0).astype(float) / len(u)

    def following(self, accepted: Array) -> Array:
        """Return f where the next step starts."""
        return np.where(accepted, self.k[-1], self.first)

    def inside(self, u: Array, x: Array) -> Array:
        """Return the states at parts of the step, shape (m, d, n), x of shape (m, n)."""
        terms = polynomials(self._table, u, self._h, self.k)
        total, x = terms[-1], x[:, None].astype(self._table.real)
        for power in range(len(terms) - 2, -1, -1):
            total = total * x + terms[power]
        return total
