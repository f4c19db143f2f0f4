"""The adjoint of one Runge-Kutta step of several columns.

With y_i = u + h Σ_{j<i} a_ij k_j, k_i = f(y_i) and the new state y_s of the same form, a cotangent λ of the new state goes
back from the last stage to the first:

    k̄_j = Σ_{i>j} a_ij h ȳ_i,    ȳ_s = λ,    ȳ_j = f'(y_j)ᵀ k̄_j,    ū = λ + Σ_j ȳ_j.

The stages are computed again from the state before the step. All is sums of products, column by column: a trajectory's
cotangent depends on no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.coefficients import Coefficients
from mpiad.ensemble.linearization import Tracing
from mpiad.ensemble.step_sweep import Columns, Visit

__all__ = ["Arrival", "TransposedStep", "over_slots"]


def over_slots(x: Array) -> Array:
    """Return the sum over several values in one step of each column, where there are such, as on devices; shape (d, n)."""
    return x if x.ndim == 2 else np.sum(x, axis=0)


class Arrival(NamedTuple):
    """Cotangents of stages that come from elsewhere: what is saved inside a step.

    Parameters
    ----------
    columns : array of int, shape (m,)
        None comes twice.
    value : array, shape (d, m), or (s, d, m) for several in each column
    weights : dict
        From stages to arrays of shape (m,), or (s, 1, m): the cotangent of a stage gains `value` times this.
    """

    columns: Columns
    value: Array
    weights: dict[int, Array]


class TransposedStep:
    """The stages of one step, and the way back through them.

    Parameters
    ----------
    leaves : sequence
        Of the parameters of these columns.

    Attributes
    ----------
    y, k : list of array, shape (d, n)
        Arguments and values of the stages; without the last, which belongs to the next step.
    h : array, shape (n,)
        Steps in the precision of the states.
    tableau : Tableau
    last : int
        The number of the last stage.
    """

    def __init__(self, coefficients: Coefficients, tracing: Tracing, visit: Visit, leaves: Sequence[Any]):
        self._coefficients, self._tracing, self._visit, self._leaves = coefficients, tracing, visit, leaves
        self.h, self.tableau = visit.h.astype(coefficients.real, copy=False), coefficients.tableau
        self.last = coefficients.last
        self._stages, self._term = coefficients.stages(visit.u.shape, visit.u), np.empty_like(visit.u)
        self.y: list[Array] = [visit.u]
        self.k: list[Array] = []
        self._pulls: list[Callable] = []
        for i in range(self.last):
            self._evaluate(self.argument(i), i)

    def argument(self, i: int) -> Array:
        """Return the argument of stage i; that of the last is the new state."""
        if i == len(self.y):
            y = self._coefficients.row(i, self._stages, np.empty_like(self._term), self._term)
            np.multiply(y, self.h, out=y)
            self.y.append(np.add(y, self.y[0], out=y))
        return self.y[i]

    def _evaluate(self, y: Array, i: int) -> None:
        k, t = self._stages[i], (self._visit.t + self.tableau.c[i] * self._visit.h).astype(self.h.dtype, copy=False)
        self._pulls.append(self._tracing.transposed(k, y, self._leaves, t))
        self.k.append(k)

    def add_last_stage(self) -> None:
        """Compute the stage at the new state too, where no step follows that would; once."""
        if len(self.k) == self.last:
            self._evaluate(self.argument(self.last), self.last)

    def pull(self, cotangent: Array, arrivals: Sequence[Arrival], gains: Callable) -> Array:
        """Return the cotangent of the state before the step; only once.

        Parameters
        ----------
        cotangent : array, shape (d, n)
            Of the state after the step; is written over.
        gains : callable
            ``gains(j, parts, y_bar)`` is told, stage by stage, the cotangents of the leaves (and of time) and of the
            stage's argument.

        Returns
        -------
        array, shape (d, n)
        """
        total, last = cotangent, self.last
        bars, room = self._coefficients.bars(total), np.empty_like(total)
        # With the last stage, which is evaluated at the new state, that one's cotangent is complete only after it.
        if len(self.k) == last:
            bars[last] = total * self.h
        for j in range(len(self.k) - 1, -1, -1):
            k_bar = self._coefficients.column(j, bars, room, self._term)
            for arrival in arrivals:
                if j in arrival.weights:
                    k_bar[:, arrival.columns] += over_slots(arrival.value * arrival.weights[j])
            y_bar, *parts = self._pulls.pop()(k_bar)
            gains(j, parts, y_bar)
            if y_bar is not None:
                total += y_bar
            if j == last:
                bars[last] = total * self.h
            elif j and y_bar is not None:
                bars[j] = y_bar * self.h
        return total
