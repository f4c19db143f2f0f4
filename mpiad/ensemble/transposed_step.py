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
from mpiad.ensemble.coefficients import Coefficients, weighted_sum
from mpiad.ensemble.linearization import Tracing

__all__ = ["Arrival", "TransposedStep"]


class Arrival(NamedTuple):
    """Cotangents of stages that come from elsewhere: what is saved inside a step.

    Parameters
    ----------
    columns : array of int, shape (m,)
        None comes twice.
    value : array, shape (d, m)
    weights : dict
        From stages to arrays of shape (m,): the cotangent of a stage gains `value` times this.
    """

    columns: Array
    value: Array
    weights: dict[int, Array]


class TransposedStep:
    """The stages of one step, and the way back through them.

    Parameters
    ----------
    coefficients : Coefficients
    c : sequence of float
        Times of the stages.
    tracing : Tracing
    u : array, shape (d, n)
        Before the step.
    t, h : array, shape (n,)
    leaves : sequence
        Of the parameters of these columns.

    Attributes
    ----------
    y, k : list of array, shape (d, n)
        Arguments and values of the stages; without the last, which belongs to the next step.
    h, c, last
        Steps in the precision of the states, times of the stages, and the number of the last stage.
    """

    def __init__(
        self, coefficients: Coefficients, c: Sequence[float], tracing: Tracing, u: Array, t: Array, h: Array,
        leaves: Sequence[Any],
    ):  # fmt: skip
        self._coefficients, self.c, self._tracing, self._leaves = coefficients, c, tracing, leaves
        self._t, self._exact_h, self.h = t, h, h.astype(u.real.dtype, copy=False)
        self.last = len(coefficients.rows) - 1
        self._term = np.empty_like(u)
        self.y: list[Array] = [u]
        self.k: list[Array] = []
        self._pulls: list[Callable] = []
        for i in range(self.last):
            self._evaluate(self.argument(i), i)

    def argument(self, i: int) -> Array:
        """Return the argument of stage i; that of the last is the new state."""
        if i == len(self.y):
            y = weighted_sum(self._coefficients.rows[i], self.k, np.empty_like(self._term), self._term)
            np.multiply(y, self.h, out=y)
            self.y.append(np.add(y, self.y[0], out=y))
        return self.y[i]

    def time(self, i: int) -> Array:
        """Return the times of stage i as f sees them."""
        return (self._t + self.c[i] * self._exact_h).astype(self.h.dtype, copy=False)

    def _evaluate(self, y: Array, i: int) -> None:
        k = np.empty_like(self._term)
        self._pulls.append(self._tracing.transposed(k, y, self._leaves, self.time(i)))
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
        arrivals : sequence of Arrival
        gains : callable
            ``gains(j, parts, y_bar)`` is told, stage by stage, the cotangents of the leaves (and of time) and of the
            stage's argument.

        Returns
        -------
        array, shape (d, n)
        """
        total, last = cotangent, self.last
        # With the last stage, which is evaluated at the new state, that one's cotangent is complete only after it.
        bars = {} if len(self.k) > last else {last: total * self.h}
        k_bar = np.empty_like(total)
        for j in range(len(self.k) - 1, -1, -1):
            self._cotangent_of_stage(j, bars, arrivals, k_bar)
            y_bar, *parts = self._pulls.pop()(k_bar)
            gains(j, parts, y_bar)
            if y_bar is not None:
                total += y_bar
            if j == last:
                bars[last] = total * self.h
            elif j and y_bar is not None:
                bars[j] = y_bar * self.h
        return total

    def _cotangent_of_stage(self, j: int, bars: dict[int, Array], arrivals: Sequence[Arrival], out: Array) -> None:
        weights = [(i, weight) for i, weight in self._coefficients.columns[j] if i in bars]
        if weights:
            weighted_sum(weights, bars, out, self._term)
        else:
            out[...] = 0
        for arrival in arrivals:
            if j in arrival.weights:
                out[:, arrival.columns] += arrival.value * arrival.weights[j]
