"""One step of a Runge-Kutta pair for all columns on the device: each sum over stages is one product."""

from __future__ import annotations

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.ensemble.coefficients import DeviceCoefficients
from mpiad.ensemble.on_device.rates import Rates

__all__ = ["Stages"]


class Stages:
    """The stages of one step.

    Parameters
    ----------
    table : DeviceCoefficients
    rates : Rates
    u, k0 : array, shape (d, n)
        The states, and f there in the direction of the solve.
    p : nest
    t, h, t_new : array, shape (n,)
        In the direction of the solve.
    sign : array, shape (n,), or None
        -1 for columns that go backwards; None where there are none.

    Attributes
    ----------
    k : array, shape (stages, d, n)
    new : array, shape (d, n)
    """

    def __init__(
        self, table: DeviceCoefficients, rates: Rates, u: Array, k0: Array, p: Tree, t: Array, h: Array, t_new: Array,
        sign: Array | None,
    ):  # fmt: skip
        self.k = np.empty_like(u, shape=(table.tableau.stages, *u.shape))
        self.k[0] = k0
        self._table, self.h = table, h.astype(table.real)
        backwards = None if sign is None else sign.astype(table.real)
        for i, row in enumerate(table.rows, 1):
            self.new = u + self.h * np.tensordot(row, self.k[:i], 1)
            rates.write(self.k[i], self.new, p, table.time(i, t, h, t_new, sign))
            if backwards is not None:
                self.k[i] *= backwards

    def error(self, u: Array, rtol: float, atol: Array | float) -> Array:
        """Return the mean square of the error over its tolerance, shape (n,)."""
        scale = atol + rtol * np.maximum(np.abs(u), np.abs(self.new))
        relative = np.abs(self.h * np.tensordot(self._table.error, self.k, 1)) / scale
        return np.sum(relative * relative, axis=0).astype(float) / len(u)

    def inside(self, u: Array, x: Array) -> Array:
        """Return the states at parts of the step, shape (m, d, n), x of shape (m, n)."""
        total = np.zeros_like(u, shape=(len(x), *u.shape))
        weights = self._table.weights(x).astype(self._table.real)
        for i in range(len(weights)):
            total += weights[i][:, None] * self.k[i]
        return u + self.h * total
