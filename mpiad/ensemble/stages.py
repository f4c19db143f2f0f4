"""One step of a Runge-Kutta or Rosenbrock method, vectorized over trajectories (columns).

Sums of products are elementwise over columns; BLAS isn't used, since its order of summation depends on the number of
columns. Buffers are allocated once for each number of columns.

For few columns the overhead of NumPy's calls dominates. Then a sum of n products takes two calls instead of 2 n - 1: one
multiplies all stages by their weights, and the other adds up the products along the first axis. Two calls sum in the same
order as many calls, so the results are bitwise equal (see `controller` on reductions along the first axis).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.coefficients import Weights, weighted_sum
from mpiad.ensemble.column_lu import ColumnLU, Mass
from mpiad.ensemble.controller import mean_square
from mpiad.ensemble.derivative import Derivative, derivative_of, locked
from mpiad.ensemble.field_jacobian import JacobianWriter, jacobian_of
from mpiad.ensemble.tableaus import RosenbrockTableau, Tableau

# These functions are called with `out` as a positional argument, which is faster than a keyword argument.
_multiply, _add = np.multiply, np.add
# Sums take two calls for arrays of up to this number of entries, if the sum has at least this number of terms.
_FEW = 512
_LEAST_TERMS = 3


class Stages:
    """The stages `k` of n columns, of which the first is f at the current state, and the new state `new`.

    `like`: the states, shape (d, n). `many`: whether there are enough steps for the preparation of faster sums.
    """

    def __init__(self, tableau: Tableau, derivative: Derivative, like: Array, many: bool):
        self.tableau, self._write, shape, dtype = tableau, derivative.write, like.shape, like.dtype
        self._real = like.real.dtype
        # Weights are arrays without axes, which ufuncs process fastest, and without promoting float32. Zero weights are
        # omitted, since zero times a stage that isn't finite would be NaN.
        self._rows: list[Weights] = [[(i, np.array(w, self._real)) for i, w in enumerate(row) if w] for row in tableau.sums]
        self.k: list[Array] = [np.empty(shape, dtype) for _ in range(tableau.stages)]
        self._sums: _StageSums | None = None
        if many and shape[0] * shape[1] <= _FEW:
            block = np.empty((tableau.stages, *shape), dtype)
            self.k, self._sums = list(block), _StageSums(block, self._rows)
        self.new, self._argument, self._term = (np.empty(shape, dtype) for _ in range(3))
        self._locked_new, self._locked_argument = locked(self.new), locked(self._argument)
        self._h = np.empty(shape, self._real)
        # The times of the stages after the first; stages at the end of the step share the last row.
        inner = [i for i, c in enumerate(tableau.c) if i and c != 1]
        self._c = np.array([tableau.c[i] for i in inner])[:, None]
        self._elapsed = np.empty((len(inner), shape[1]))
        self._time = np.empty((len(inner) + 1, shape[1]), self._real)
        self._before_end, self._at_end = self._time[:-1], self._time[-1]
        rows, places = list(map(locked, self._time)), {i: row for row, i in enumerate(inner)}
        self._locked_time = [rows[places.get(i, -1)] for i in range(tableau.stages)]
        self._scale, self._scale_new = np.empty(shape, self._real), np.empty(shape, self._real)

    def compute(self, u: Array, p: Tree, t: Array, h: Array, t_new: Array, sign: Array | None) -> None:
        """Compute all stages and the new state from u, shape (d, n), and times and step sizes, shape (n,).

        Times are in the direction of the solve (see `initialization`), so h isn't negative. `sign`: 1, or -1 for columns
        integrated backwards in time; None if there are no such columns.
        """
        self._begin(t, h, t_new, sign)
        last = len(self.k) - 1
        for i in range(1, last + 1):
            self._evaluate(self.k[i], i, u, p, sign, i == last)

    def _evaluate(self, out: Array, i: int, u: Array, p: Tree, sign: Array | None, at_end: bool) -> None:
        """Write f at the argument of stage i, which is the new state if `at_end`."""
        target, locked_target = (self.new, self._locked_new) if at_end else (self._argument, self._locked_argument)
        _multiply(self._sum(i - 1, target), self._h, target)
        _add(target, u, target)
        self._write(out, locked_target, p, self._locked_time[i])
        if sign is not None:
            _multiply(out, sign, out)

    def error(self, u: Array, rtol: Array, atol: Array) -> Array:
        """Return the mean square of the error relative to its tolerance, shape (n,)."""
        e, scale, scale_new = self._argument, self._scale, self._scale_new
        _multiply(self._sum(-1, e), self._h, e)
        np.abs(u, scale)
        np.abs(self.new, scale_new)
        np.maximum(scale, scale_new, out=scale)
        _multiply(scale, rtol, scale)
        _add(scale, atol, scale)
        np.divide(e, scale, e)
        return mean_square(e)

    def advance(self, u: Array, accepted: Array | None) -> Array:
        """Return the states after the step in accepted columns (None: all), and the states before it in the others."""
        k = self.k
        if accepted is None:
            # The last stage is the first stage of the next step. Large buffers are swapped, and small ones copied.
            if self._sums is None:
                k[0], k[-1] = k[-1], k[0]
            else:
                k[0][...] = k[-1]
            before, self.new, self._locked_new = self.new, u, locked(u)
            return before
        np.copyto(u, self.new, where=accepted)
        np.copyto(k[0], k[-1], where=accepted)
        return u

    def _sum(self, row: int, out: Array) -> Array:
        """Return the sum of stages weighted by a row of the table, in `out` or in another buffer."""
        total = None if self._sums is None else self._sums.sum(row)
        return weighted_sum(self._rows[row], self.k, out, self._term) if total is None else total

    def _begin(self, t: Array, h: Array, t_new: Array, sign: Array | None) -> None:
        """Set the sizes of the steps and the times of their stages."""
        self._h[:] = h
        _multiply(self._c, h, self._elapsed)
        _add(self._elapsed, t, self._before_end, casting="same_kind")
        # t + h may differ from the end of the step by rounding.
        self._at_end[:] = t_new
        if sign is not None:
            np.multiply(self._time, sign, out=self._time)


class _StageSums:
    """Weighted sums over the stages, shape (stages, d, n), each in two calls of NumPy."""

    def __init__(self, k: Array, rows: list[Weights]):
        self._products, self._total = np.empty_like(k), np.empty_like(k[0])
        self._flat_total = self._total.reshape(-1)
        self._terms = [self._prepared(k, row) if len(row) >= _LEAST_TERMS else None for row in rows]

    def _prepared(self, k: Array, row: Weights) -> tuple[list[tuple[Array, Array, Array]], Array]:
        """Return stages, weights and products for each run of adjacent stages, and the array of all products."""
        runs, first = [], 0
        for _, run in groupby(enumerate(row), lambda entry: entry[1][0] - entry[0]):
            entries = [entry for _, entry in run]
            start, stop = entries[0][0], entries[-1][0] + 1
            weights = np.empty(k[start:stop].shape, k.real.dtype)
            weights[...] = np.stack([weight for _, weight in entries])[:, None, None]
            runs.append((k[start:stop], weights, self._products[first : first + len(entries)]))
            first += len(entries)
        return runs, self._products.reshape(len(k), -1)[:first]

    def sum(self, row: int) -> Array | None:
        """Return the sum for a row of the table, in a buffer that is overwritten by the next sum; None for few terms."""
        terms_of_row = self._terms[row]
        if terms_of_row is None:
            return None
        runs, products = terms_of_row
        for stages, weights, terms in runs:
            np.multiply(stages, weights, terms)
        np.add.reduce(products, 0, None, self._flat_total)
        return self._total


def stages_for(tableau: Tableau, batch: Batch, mass: Array | None) -> Callable[..., Stages]:
    """Return a function of `like` and `many` (see `Stages`) that creates the stages for steps of a method."""
    derivative = derivative_of(batch.f, batch.shape)
    if isinstance(tableau, RosenbrockTableau):
        return partial(RosenbrockStages, tableau, derivative, jacobian_of(batch), Mass(mass, tableau.gamma))
    return partial(Stages, tableau, derivative)


class RosenbrockStages(Stages):
    """`Stages` of a Rosenbrock method, between f at the current state and f at the new state (see `tableaus`)."""

    tableau: RosenbrockTableau

    def __init__(
        self, tableau: RosenbrockTableau, derivative: Derivative, write: JacobianWriter, mass: Mass, like: Array, many: bool
    ):
        super().__init__(tableau, derivative, like, many)
        self._differentiate, self._mass, shape = write, mass, (len(like), *like.shape)
        self._jacobian, self._matrix = np.zeros(shape, like.dtype), np.zeros(shape, like.dtype)
        self._slopes = [np.array(weight, self._real) for weight in tableau.slopes]

    def compute(self, u: Array, p: Tree, t: Array, h: Array, t_new: Array, sign: Array | None) -> None:
        """Compute all stages and the new state: see `Stages.compute`."""
        tableau, k = self.tableau, self.k
        self._begin(t, h, t_new, sign)
        time_derivative = self._differentiate(self._jacobian, u, p, self._locked_time[1])
        # Backwards in time f changes its sign, but ∂f/∂t doesn't.
        np.multiply(self._jacobian, -self._h[0] if sign is None else -self._h[0] * sign.astype(self._real), self._matrix)
        self._mass.add_to(self._matrix)
        lu = ColumnLU(self._matrix)
        if time_derivative is not None:
            time_derivative *= self._h
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
            if time_derivative is not None and tableau.slopes[i - 1]:
                k[i] += time_derivative * self._slopes[i - 1]
            lu.solve(k[i])
        if tableau.ends_at_new_state:
            return
        self._evaluate(k[-1], count + 1, u, p, sign, True)
