"""The user's residuals, called with columns: from saved states and their tangents to the triangular factor of [J r]."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiad._typing import Array, Function, Shape, Tree
from mpiad.differentiation.bundles import Bundle
from mpiad.ensemble.batch import two_at_least
from mpiad.ensemble.levenberg_marquardt import Evaluation
from mpiad.ensemble.sensitivity import States, unit_tangents
from mpiad.pytrees import flatten
from mpiad.transport.tracing import restoring_state

_CALLED = (
    "They are called with columns, u of shape (n_saved, d, n), p of shape (m, n), and data with the trajectories along the "
    "last axis; a constant array needs an axis for them (c[:, None]), and a sum an axis to go over (np.sum(u, axis=0))."
)


class Residuals:
    """The residuals of some trajectories.

    - `fun`: ``fun(u, p, data)``.
    - `data`: of one row for each trajectory.
    - `shape`: of one state.
    - `count`: how many residuals a trajectory has; 0 before the first call.
    """

    def __init__(self, fun: Function, data: Tree, shape: Shape):
        self._fun, self._shape, self.count = fun, shape, 0
        leaves, self._build = flatten(data)
        self._data = [None if leaf is None else np.ascontiguousarray(np.moveaxis(leaf, 0, -1)) for leaf in leaves]

    def evaluated(self, x: Array, states: States, ids: Array) -> Evaluation:
        """Return half the sums of squares and the factors at variables of shape (n, m), for trajectories of these numbers.

        A TypeError or ValueError where the residuals can't be used.
        """
        count, m = x.shape
        # Two columns at least, wherever the user's functions are called: sums over others are then taken alike.
        columns = two_at_least(count)
        u = self._by_columns(states.u[columns])
        tangents = [self._by_columns(tangent[columns]) for tangent in states.tangents]
        with np.errstate(all="ignore"):
            # Once, at the first call: it costs two more.
            if not self.count:
                self._check(x, u, ids, columns)
            r, jacobian = self._linearised(np.ascontiguousarray(x[columns].T), u, tangents, ids[columns])
            cost = 0.5 * np.add.reduce(r * r, axis=0)[:count]
        table = np.empty((count, len(r), m + 1))
        table[:, :, m] = r.T[:count]
        for j, column in enumerate(jacobian):
            table[:, :, j] = column.T[:count]
        # Of a point where the solve failed the cost is infinite, so that the step to it is refused; LAPACK needs finite
        # numbers.
        good = np.isfinite(cost) & np.isfinite(table).all(axis=(1, 2))
        table[~good] = 0.0
        factor = np.zeros((count, m + 1, m + 1))
        # By a QR factorisation of [J r], and not by JᵀJ, whose condition is that of J squared.
        factor[:, : min(len(r), m + 1)] = np.linalg.qr(table, mode="r")
        return Evaluation(np.where(good, cost, np.inf), factor)

    def _by_columns(self, u: Array) -> Array:
        """Return saved states, shape (n, n_saved, d), with the axes of f and the trajectories last."""
        return np.ascontiguousarray(np.moveaxis(u.reshape(*u.shape[:2], *self._shape), 0, -1))

    def _called(self, u: Array, x: Array, ids: Array) -> list[Any]:
        data = [None if leaf is None else np.take(leaf, ids, axis=-1) for leaf in self._data]
        value = self._fun(u, x, self._build(data))
        return list(value) if isinstance(value, (list, tuple)) else [value]

    def _linearised(self, x: Array, u: Array, tangents: list[Array], ids: Array) -> tuple[Array, list[Array]]:
        """Return the residuals, shape (k, n), and their derivatives by each variable."""
        with restoring_state(), Bundle() as bundle:
            try:
                parts = self._called(bundle.variable(u, tangents), bundle.variable(x, unit_tangents(x)), ids)
            except TypeError as error:
                raise TypeError(
                    f"fit: the residuals can't be differentiated ({error}). Write them with the functions of "
                    "autograd.numpy instead of numpy."
                ) from error
            found = [bundle.parts(part) for part in parts]
        values = [_rows(value) for value, _ in found]
        along = [
            np.concatenate([
                np.zeros_like(value) if gs is None or gs[j] is None else _rows(gs[j])
                for value, (_, gs) in zip(values, found)
            ])
            for j in range(len(x))
        ]  # fmt: skip
        return np.concatenate(values), along

    def _check(self, x: Array, u: Array, ids: Array, columns: Array) -> None:
        """Call the residuals with all columns, and with the first one some times: neither may depend on the others."""
        # Not as many times as there are columns, which may all be alike.
        alone = np.zeros(3 if len(columns) == 2 else 2, int)
        some = [self._plain(x[of], u[..., turn], ids[of]) for of, turn in (
            (columns, slice(None)), (columns[alone], alone),
        )]  # fmt: skip
        first, again = some[0][:, 0], some[1][:, 0]
        if len(first) != len(again) or not np.allclose(first, again, rtol=1e-9, atol=1e-12, equal_nan=True):
            raise ValueError(
                f"fit: the residuals of a trajectory depend on the others: the first has {first[:4]} among {len(columns)} "
                f"columns, but {again[:4]} by itself. {_CALLED}"
            )
        self.count = len(first)

    def _plain(self, x: Array, u: Array, ids: Array) -> Array:
        try:
            parts = self._called(u, np.ascontiguousarray(x.T), ids)
        except ValueError as error:
            if "broadcast" not in str(error):
                raise
            raise ValueError(
                f"fit: the residuals can't compute with columns ({str(error).strip()}): u has shape {u.shape} here. "
                f"{_CALLED}"
            ) from error
        for part in parts:
            if np.shape(part)[-1:] != (len(x),):
                raise ValueError(
                    f"fit: the residuals have shape {np.shape(part)}, but (..., {len(x)}) was expected, one column for "
                    f"each trajectory. {_CALLED}"
                )
            if np.asarray(part).dtype.kind not in "fiub":
                raise TypeError(
                    f"fit: the residuals must be real numbers, but are {np.asarray(part).dtype}. Return both parts of "
                    "complex ones: [np.real(r), np.imag(r)]."
                )
        return np.concatenate([_rows(part) for part in parts])


def _rows(value: Array) -> Array:
    """Return residuals as rows of columns, shape (k, n)."""
    return np.asarray(value, float).reshape(-1, np.shape(value)[-1])
