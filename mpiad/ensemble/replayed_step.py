"""One step of a solve once more, in functions that traces see: see `replay`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array, Function
from mpiad.differentiation.products import jvp
from mpiad.ensemble.run import Run
from mpiad.ensemble.step_sweep import Columns
from mpiad.transport.device_arrays import is_device_array

# Newton's steps at an event: its derivatives are right up to the third.
_ROOT_STEPS = 2


class StepReplay:
    """One step of several columns."""

    def __init__(self, run: Run, leaves: list[Any], u: Array, t: Array, h: Array):
        self._run, self._leaves, self._u, self.t, self.h = run, leaves, u, t, h
        self._k: list[Array] = []
        for i in range(run.tableau.stages - 1):
            self._evaluate(i)

    def _evaluate(self, i: int) -> None:
        self._k.append(self._rate(i))

    def _rate(self, i: int) -> Array:
        """Return f at the argument of a stage."""
        t = _like(self.t + self._run.tableau.c[i] * self.h, self._u)
        return self._run.field.array(self.argument(i), self._leaves, t)

    def argument(self, i: int) -> Array:
        """Return the argument of stage i; that of the last is the new state."""
        if i == 0:
            return self._u
        total = sum(k * weight for k, weight in zip(self._k, self._run.tableau.a[i - 1]) if weight)
        return total * _like(self.h, self._u) + self._u

    def inside(self, x: Array, columns: Columns) -> Array:
        """Return the states of some columns at the parts x of the step, of shape (m,), or (s, m) for several in each."""
        if len(self._k) < self._run.tableau.stages:
            self._evaluate(len(self._k))
        weights = [_like(_polynomial(row, x), self._u)[..., None, :] for row in self._run.tableau.dense.tolist()]
        total = sum(k[:, columns] * weight for k, weight in zip(self._k, weights))
        return total * _like(self.h[columns], self._u) + self._u[:, columns]

    def root(self, condition: Function, x: Array, columns: Array) -> Array:
        """Return the root of an event's condition, known by its value, as a function of all that moves it."""
        leaves = self._run.columns(self._leaves, columns)

        def value(x: Array) -> Array:
            t = self.t[columns] + x * self.h[columns]
            return condition(self.inside(x, columns), self._run.batch.p.build(leaves), t)

        # Newton's steps stay where they are, and each doubles the order to which the root's derivatives are right.
        for _ in range(_ROOT_STEPS):
            found, slope = jvp(value, x, np.ones_like(getval(x)))
            x = x - (found - getval(found)) / slope
        return x


class RosenbrockReplay(StepReplay):
    """One step of a Rosenbrock method: see `rosenbrock_tableaus`."""

    def _evaluate(self, i: int) -> None:
        table: Any = self._run.tableau
        rate = self._rate(i) if i != 1 else self._k[0]
        if i == 0:
            self._matrices, self._rise = self._linearized(table.gamma)
        if 0 < i < table.stages - 1:
            before = [weight * k for weight, k in zip(table.coupling[i - 1], self._k) if weight]
            coupled = sum(before[1:], before[0]) if before else 0.0
            coupled = coupled if self._mass is None or not before else anp.dot(self._mass, coupled)
            rate = rate + table.slopes[i - 1] * self._rise + coupled
            rate = anp.transpose(anp.linalg.solve(self._matrices, anp.transpose(rate)[..., None])[..., 0])
        self._k.append(rate)

    def _linearized(self, gamma: float) -> tuple[Array, Array]:
        """Return the matrices W, shape (n, d, d), and h ∂f/∂t, shape (d, n)."""
        u, t, h, field, leaves = self._u, _like(self.t, self._u), _like(self.h, self._u), self._run.field, self._leaves
        if is_device_array(getval(u)):
            raise NotImplementedError(
                "solve: second derivatives of a Rosenbrock method are there on the host only, but u0 or p are device "
                "arrays. Bring them there with mpiad.device.to_host."
            )
        ones, units = np.ones_like(getval(u)[0]), np.eye(len(u), dtype=u.dtype)
        columns = [jvp(lambda u: field.array(u, leaves, t), u, np.outer(unit, ones))[1] for unit in units]
        rise = jvp(lambda t: field.array(u, leaves, t), t, ones)[1]
        jacobian = anp.transpose(anp.stack(columns), (2, 1, 0))
        self._mass = self._run.settings.mass
        return (units if self._mass is None else self._mass) / gamma - anp.reshape(h, (-1, 1, 1)) * jacobian, h * rise


def _polynomial(row: Sequence[float], x: Array) -> Array:
    total = row[-1] * x
    for coefficient in row[-2::-1]:
        total = (total + coefficient) * x
    return total


def _like(x: Array, u: Array) -> Array:
    """Return real numbers in the precision of the states."""
    real = np.zeros(0, u.dtype).real.dtype
    return x if x.dtype == real else x.astype(real)
