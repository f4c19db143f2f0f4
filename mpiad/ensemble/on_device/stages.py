"""One step of a Runge-Kutta pair for all columns on the device: each sum over stages is one product."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.ensemble.on_device.rates import Rates
from mpiad.ensemble.tableaus import Tableau
from mpiad.transport.device_arrays import arrays_of

__all__ = ["Stages", "Table", "interpolation", "polynomials", "states_at"]


class Table:
    """A pair's coefficients on the device, in the precision of the states.

    Parameters
    ----------
    tableau : Tableau
    like : array
        A state.

    Attributes
    ----------
    rows : list of array
        Row i: the weights of the stages in the argument of stage i + 1; the last gives the new state.
    columns : list of array
        Column j: the weights of stage j in the arguments of the stages behind it.
    error : array or None
    dense : array, shape (degree, stages)
        The interpolant's weights of the stages, by powers of the part of the step.
    real : dtype
        Of times and steps as f sees them.
    """

    def __init__(self, tableau: Tableau, like: Array):
        self.tableau, self.real = tableau, np.zeros(0, like.dtype).real.dtype
        last = tableau.stages - 1
        columns = [tuple(tableau.a[i - 1][j] for i in range(j + 1, last + 1)) for j in range(last)]
        pieces = [*tableau.a, *columns, tableau.error or (), tableau.dense.T.reshape(-1)]
        cuts = np.cumsum([len(piece) for piece in pieces])[:-1].tolist()
        # In one copy: each costs as much as a thousand times as many numbers would.
        home: Any = arrays_of(like)
        whole = home.to_device(np.concatenate(pieces).astype(like.dtype))
        found = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)])]
        self.rows, self.columns = found[:last], found[last : 2 * last]
        self.error: Any = None if tableau.error is None else found[-2]
        self.dense = found[-1].reshape(tableau.dense.T.shape)

    def time(self, i: int, t: Array, h: Array, t_new: Array, sign: Array | None) -> Array:
        """Return the times of stage i as f sees them."""
        times = t_new if self.tableau.c[i] == 1 else t + self.tableau.c[i] * h
        return (times if sign is None else times * sign).astype(self.real)


class Stages:
    """The stages of one step.

    Parameters
    ----------
    table : Table
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
        self, table: Table, rates: Rates, u: Array, k0: Array, p: Tree, t: Array, h: Array, t_new: Array,
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
        for i, weight in enumerate(interpolation(self._table, x)):
            total += weight[:, None] * self.k[i]
        return u + self.h * total


def polynomials(table: Table, u: Array, h: Array, k: Array) -> Array:
    """Return the states inside of a step as polynomials in the part of it that is gone, shape (degree + 1, d, n).

    Parameters
    ----------
    table : Table
    u : array, shape (d, n)
        Before the step.
    h : array, shape (n,)
        As in `Stages`: signed where its stages aren't.
    k : array, shape (stages, d, n)
    """
    return np.concatenate([u[None], h * np.tensordot(table.dense, k, 1)])


def states_at(terms: Array, x: Array) -> Array:
    """Return the states at the parts x of such polynomials, x of shape (n,) and real."""
    total = terms[-1]
    for power in range(len(terms) - 2, -1, -1):
        total = total * x + terms[power]
    return total


def interpolation(table: Table, x: Array) -> list[Array]:
    """Return the weights of the stages at parts of the step, each of the shape of x."""
    found = []
    for row in table.tableau.dense.tolist():
        weight = row[-1] * x
        for coefficient in row[-2::-1]:
            weight = (weight + coefficient) * x
        found.append(weight.astype(table.real))
    return found
