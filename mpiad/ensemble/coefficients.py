"""The nonzero weights of a method's table, and sums over stages with these weights.

On the host a sum is computed product by product, so that the results of a trajectory don't depend on other trajectories. On
a device, where a call costs as much as computing a thousand numbers, a sum is one matrix product over a block of stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from mpiad._typing import Array, Shape
from mpiad.ensemble.column_lu import Mass
from mpiad.ensemble.step_operators import advanced
from mpiad.ensemble.tableaus import Tableau
from mpiad.transport.devices.device_arrays import arrays_of

# Lists of arrays on the host, one block on a device.
StageArrays: TypeAlias = Sequence[Array] | Array

# Up to this number of multiplications, BLAS computes a matrix product in one thread.
_ONE_THREAD = 1 << 18


class Coefficients:
    """The table of a method in the precision of the states `like`; f gets times and step sizes of the dtype `real`."""

    def __init__(self, tableau: Tableau, like: Array):
        self.tableau, self.last, self.real = tableau, tableau.stages - 1, np.zeros(0, like.dtype).real.dtype
        self._dense_stages, self._dtype = np.flatnonzero(tableau.dense.any(axis=1)).tolist(), like.dtype
        self.dense = tableau.dense  # shape (stages, degree), in double precision, on the device of the states
        # Weights are arrays without axes, which ufuncs process fastest and without promoting float32. Zero weights are
        # omitted, since zero times a stage that isn't finite would be NaN.
        rows = (), *tableau.sums
        self._rows: list = [[(j, np.array(w, self.real)) for j, w in enumerate(row) if w] for row in rows]
        self._c = np.array(tableau.c)[:, None]

    def stages(self, shape: Shape, like: Array) -> StageArrays:
        """Return buffers of a shape for all stages."""
        return [np.empty_like(like, order="C", shape=shape) for _ in range(self.last + 1)]

    def row(self, i: int, k: StageArrays, out: Array, term: Array) -> Array:
        """Return the weighted sum in the argument of stage i (the last: in the new state), or in the error if i is -1."""
        (first, weight), *others = self._rows[i]
        multiply, add = np.multiply, np.add
        multiply(k[first], weight, out)
        for j, weight in others:
            multiply(k[j], weight, term)
            add(out, term, out)
        return out

    def add_row(self, total: Array, i: int, k: StageArrays, mass: Mass, out: Array, term: Array) -> None:
        """Add the mass matrix times the weighted sum of row i (see `row`) to `total`."""
        total += mass.times(self.row(i, k, out, term))

    def powers(self, k: StageArrays) -> list[Array] | Array:
        """Return the interpolant's coefficients of x, x², …, divided by h; x is the fraction of the step."""
        weights = zip(*self.dense.tolist())
        return [sum(weight * stage for weight, stage in zip(row, k) if weight) for row in weights]  # type: ignore[misc]

    def times(self, t: Array, h: Array) -> StageArrays:
        """Return the times of all stages."""
        times = self._c * h
        times += t
        return times if times.dtype == self.real else times.astype(self.real)

    def weights(self, x: Array) -> Array:
        """Return the interpolant's weights of the stages at the fractions x of the step, each of the shape of x."""
        # Horner's scheme for all stages at once.
        dense = self.dense.reshape(*self.dense.shape, *(1,) * np.ndim(x))
        weights = dense[:, -1] * x
        for j in range(dense.shape[1] - 2, -1, -1):
            weights += dense[:, j]
            weights *= x
        return weights

    def placed(self, x: np.ndarray) -> Array:
        """Return a host array on the device of the states."""
        return x

    def weights_inside(self, x: np.ndarray) -> Array:
        """Return the weights of the stages, and of the state before the step, in states at fractions x of the step."""
        weights = self.weights(self.placed(x))[self._dense_stages]
        return np.concatenate([weights, np.ones_like(weights[:1])]).T.astype(self._dtype)

    def write_inside(self, out: Array, u: Array, h: Array, k: StageArrays, rows: slice, weights: Array) -> None:
        """Write components `rows` of the states inside a step to `out`, (rows, points, n), given `weights_inside`."""
        # BLAS isn't used elsewhere, since its order of summation may depend on the number of columns. It takes one thread
        # for products of this size.
        stages, h = np.empty((len(out), weights.shape[1], len(h)), u.dtype), h.astype(self.real, copy=False)
        for i, j in enumerate(self._dense_stages):
            np.multiply(k[j][rows], h, stages[:, i])
        stages[:, -1] = u[rows]
        width = max(1, _ONE_THREAD // max(1, weights.size))
        for first in range(0, len(h), width):
            np.matmul(weights, stages[..., first : first + width], out[..., first : first + width])


class DeviceCoefficients(Coefficients):
    """`Coefficients` for states on a device."""

    def __init__(self, tableau: Tableau, like: Array):
        self.tableau, self.last, self.real = tableau, tableau.stages - 1, np.zeros(0, like.dtype).real.dtype
        parts = [*tableau.sums, tableau.dense.reshape(-1)]
        self._dense_stages, self._dtype = np.flatnonzero(tableau.dense.any(axis=1)).tolist(), like.dtype
        offsets = np.cumsum([0, *[len(part) for part in parts]]).tolist()
        # One copy for all numbers, since each copy costs as much as computing a thousand numbers.
        xp: Any = arrays_of(like)
        exact = xp.to_device(np.concatenate(parts))
        weights = [exact.astype(like.dtype)[a:b] for a, b in zip(offsets, offsets[1:])]
        self._rows: Any = [None, *weights[:-1]]
        self.dense = exact[offsets[-2] :].reshape(tableau.dense.shape)
        self._powers = weights[-1].reshape(tableau.dense.shape).T

    def stages(self, shape: Shape, like: Array) -> Array:
        """Return one buffer for all stages."""
        return np.empty_like(like, shape=(self.last + 1, *shape))

    def row(self, i: int, k: Array, out: Array, term: Array) -> Array:
        """Return the weighted sum of stages in row i - 1 of `Tableau.sums`, in a new array."""
        return np.tensordot(self._rows[i], k[: len(self._rows[i])], 1)

    def add_row(self, total: Array, i: int, k: Array, mass: Mass, out: Array, term: Array) -> None:
        """Add the weighted sum of row i to `total`; on a device the mass matrix is the identity."""
        for j, weight in enumerate(self.tableau.sums[i - 1]):
            if weight:
                total += self.real.type(weight) * k[j]

    def powers(self, k: Array) -> Array:
        """Return the interpolant's coefficients of x, x², …, divided by h."""
        return np.tensordot(self._powers, k, 1)

    def placed(self, x: np.ndarray) -> Array:
        """Return a host array on the device of the states."""
        xp: Any = arrays_of(self.dense)
        return xp.to_device(x)

    def write_inside(self, out: Array, u: Array, h: Array, k: Array, rows: slice, weights: Array) -> None:
        """Write components of the states inside a step: see `Coefficients.write_inside`."""
        stages = np.concatenate([k[self._dense_stages][:, rows] * h.astype(self.real), u[None, rows]])
        out[...] = np.moveaxis(np.tensordot(weights, stages, 1), 0, 1)

    def times(self, t: Array, h: Array) -> StageArrays:
        """Return the times of all stages."""
        return [(t + c * h).astype(self.real) for c in self.tableau.c]


def coefficients_of(tableau: Tableau, like: Array) -> Coefficients:
    """Return the table of a method for states on the host or on a device."""
    return (Coefficients if arrays_of(like) is None else DeviceCoefficients)(tableau, like)


def interpolate(coefficients: Coefficients, u: Array, h: Array, k: StageArrays, x: Array) -> Array:
    """Return the states at the fractions x (n,) of steps of signed sizes h (n,) from u, as an array of shape (d, n)."""
    h, weights = (x.astype(coefficients.real, copy=False) for x in (h, coefficients.weights(x)))
    return advanced.fun(u, h, weights, *k)


def polynomials(coefficients: Coefficients, u: Array, h: Array, k: StageArrays) -> list[Array]:
    """Return the interpolant as a polynomial in the fraction of the step: degree + 1 coefficients, each of shape (d, n)."""
    # For columns integrated backwards in time, the caller has changed the sign either of h or of the stages.
    powers = coefficients.powers(k)
    return [u, *[h * powers[j] for j in range(len(powers))]]


def states_at(terms: Sequence[Array], x: Array | float) -> Array:
    """Return the states at the fractions x, (n,) or one number, given the coefficients that `polynomials` returns."""
    total = terms[-1]
    for power in range(len(terms) - 2, -1, -1):
        total = total * x + terms[power]
    return total
