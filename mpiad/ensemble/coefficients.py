"""A method's table in the form that sums over stages need: for each stage the nonzero weights, by rows and by columns.

On the host a sum is computed product by product, so that a column's numbers depend on no other column; on a device, where a
call costs as much as computing a thousand numbers, it is one matrix product over a block of stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from mpiad._typing import Array, Shape
from mpiad.ensemble.tableaus import Tableau
from mpiad.transport.device_arrays import arrays_of

Weights: TypeAlias = list[tuple[int, Array]]
# Lists of arrays on the host, one block on a device.
StageArrays: TypeAlias = Sequence[Array] | Array
Bars: TypeAlias = dict[int, Array] | Array


class Coefficients:
    """The table of a method in the precision of the states.

    - `like`: a state.
    - `last`: the index of the last stage.
    - `real`: the dtype of times and steps as f sees them.
    - `dense`: shape (stages, degree); that of the interpolant, in double precision, on the device of the states.
    """

    def __init__(self, tableau: Tableau, like: Array):
        self.tableau, self.last, self.real = tableau, tableau.stages - 1, np.zeros(0, like.dtype).real.dtype
        self.dense = tableau.dense
        # Arrays without axes are processed fastest by ufuncs, and they keep float32.
        table = [(), *tableau.a]
        self._rows: list[Weights] = [[(j, np.array(w, self.real)) for j, w in enumerate(row) if w] for row in table]
        self._columns: list[Weights] = [
            [(i, np.array(row[j], self.real)) for i, row in enumerate(table) if j < len(row) and row[j]]
            for j in range(len(table))
        ]
        self._c = np.array(tableau.c)[:, None]

    def stages(self, shape: Shape, like: Array) -> StageArrays:
        """Return buffers for all stages, each of a shape, as arguments of `row`."""
        return [np.empty_like(like, shape=shape) for _ in range(self.last + 1)]

    def row(self, i: int, k: StageArrays, out: Array, term: Array) -> Array:
        """Return the sum of the stages before stage i in its argument; that of the last stage gives the new state."""
        return weighted_sum(self._rows[i], k, out, term)

    def bars(self, like: Array) -> Bars:
        """Return a container for the cotangents of the stages' arguments, times h, for `column`; initially empty."""
        return {}

    def column(self, j: int, bars: Bars, out: Array, term: Array) -> Array:
        """Return the sum of the cotangents of the later arguments that stage j contributes to."""
        weights = [(i, weight) for i, weight in self._columns[j] if i in bars]
        if weights:
            return weighted_sum(weights, bars, out, term)
        out[...] = 0
        return out

    def powers(self, k: StageArrays) -> list[Array] | Array:
        """Return the interpolant's coefficients of x, x², …, sums of the stages; x is the fraction of the step."""
        weights = zip(*self.dense.tolist())
        return [sum(weight * stage for weight, stage in zip(row, k) if weight) for row in weights]  # type: ignore[misc]

    def times(self, t: Array, h: Array) -> StageArrays:
        """Return the times of all stages."""
        times = self._c * h
        times += t
        return times if times.dtype == self.real else times.astype(self.real)

    def weights(self, x: Array) -> Array:
        """Return the weights of the stages in the state at the fractions x of the step, each of the shape of x."""
        # Horner's scheme for all stages at once, elementwise in x.
        dense = self.dense.reshape(*self.dense.shape, *(1,) * np.ndim(x))
        weights = dense[:, -1] * x
        for j in range(dense.shape[1] - 2, -1, -1):
            weights += dense[:, j]
            weights *= x
        return weights


class DeviceCoefficients(Coefficients):
    """The same for states on a device; row i of `rows` has the weights in the argument of stage i + 1."""

    def __init__(self, tableau: Tableau, like: Array):
        self.tableau, self.last, self.real = tableau, tableau.stages - 1, np.zeros(0, like.dtype).real.dtype
        last = self.last
        columns = [tuple(tableau.a[i - 1][j] for i in range(j + 1, last + 1)) for j in range(last)]
        pieces = [*tableau.a, *columns, tableau.error or (), tableau.dense.reshape(-1)]
        cuts = np.cumsum([0, *[len(piece) for piece in pieces]]).tolist()
        # In one copy: each copy costs as much as computing a thousand numbers.
        xp: Any = arrays_of(like)
        exact = xp.to_device(np.concatenate(pieces))
        found = [exact.astype(like.dtype)[a:b] for a, b in zip(cuts, cuts[1:])]
        self.rows, self._behind = found[:last], found[last : 2 * last]
        self.error: Any = None if tableau.error is None else found[-2]
        self.dense = exact[cuts[-2] :].reshape(tableau.dense.shape)
        self._powers = found[-1].reshape(tableau.dense.shape).T

    def stages(self, shape: Shape, like: Array) -> Array:
        """Return a buffer for all stages: one block."""
        return np.empty_like(like, shape=(self.last + 1, *shape))

    def row(self, i: int, k: Array, out: Array, term: Array) -> Array:
        """Return the sum of the stages before stage i in its argument."""
        return np.tensordot(self.rows[i - 1], k[:i], 1)

    def bars(self, like: Array) -> Array:
        """Return a block for the cotangents of the stages' arguments, initially zero."""
        return np.zeros_like(like, shape=(self.last + 1, *like.shape))

    def column(self, j: int, bars: Array, out: Array, term: Array) -> Array:
        """Return the sum of the cotangents of the later arguments."""
        return np.tensordot(self._behind[j], bars[j + 1 :], 1) if j < self.last else np.zeros_like(out)

    def powers(self, k: Array) -> Array:
        """Return the interpolant's coefficients of x, x², …, which are sums of the stages."""
        return np.tensordot(self._powers, k, 1)

    def times(self, t: Array, h: Array) -> StageArrays:
        """Return the times of all stages."""
        return [(t + c * h).astype(self.real) for c in self.tableau.c]

    def time(self, i: int, t: Array, h: Array, t_new: Array, sign: Array | None) -> Array:
        """Return the times of stage i as f sees them, for a step in the direction of the solve that ends at `t_new`."""
        times = t_new if self.tableau.c[i] == 1 else t + self.tableau.c[i] * h
        return (times if sign is None else times * sign).astype(self.real)


def weighted_sum(weights: Weights, arrays: StageArrays | Bars, out: Array, term: Array) -> Array:
    """Write a sum of products into `out`; `term` is a buffer for one of them."""
    (first, weight), *others = weights
    multiply, add = np.multiply, np.add
    multiply(arrays[first], weight, out)
    for i, weight in others:
        multiply(arrays[i], weight, term)
        add(out, term, out)
    return out


def interpolate(coefficients: Coefficients, u: Array, h: Array, k: StageArrays, x: Array) -> Array:
    """Return the states at the fractions x (n,) of steps of signed sizes h (n,) from u, as an array of shape (d, n)."""
    total = np.zeros_like(u)
    weights = coefficients.weights(x).astype(coefficients.real, copy=False)
    for i in range(len(weights)):
        total += weights[i] * k[i]
    total *= h.astype(coefficients.real, copy=False)
    total += u
    return total


def polynomials(coefficients: Coefficients, u: Array, h: Array, k: StageArrays) -> list[Array]:
    """Return the states inside a step as polynomials in the fraction of the step: degree + 1 arrays (d, n).

    The step's size h (n,) is in the precision of the states, and signed if the stages, (stages, d, n), aren't.
    """
    powers = coefficients.powers(k)
    return [u, *[h * powers[j] for j in range(len(powers))]]


def states_at(terms: Sequence[Array], x: Array | float) -> Array:
    """Return the states at the fractions x, from such polynomials; x is real, of shape (n,) or one number."""
    total = terms[-1]
    for power in range(len(terms) - 2, -1, -1):
        total = total * x + terms[power]
    return total


def stage_rates(tableau: Tableau, x: Array) -> list[Array]:
    """Return the derivatives of the stages' weights with respect to x, each of the shape of x."""
    rates = []
    for row in tableau.dense.tolist():
        rate = np.full_like(x, len(row) * row[-1])  # Horner's scheme for the sum of j w_j x^(j - 1)
        for power in range(len(row) - 1, 0, -1):
            rate = rate * x + power * row[power - 1]
        rates.append(rate)
    return rates
