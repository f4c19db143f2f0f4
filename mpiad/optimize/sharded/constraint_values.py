"""Constraints of distributed variables: values and Jacobians, and the projection onto linear equality constraints.

All ranks evaluate a constraint together, each with its own variables, like the objective. Each rank computes its
columns of the Jacobian, which has few rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import autograd.numpy as anp
import numpy as np
import scipy

from mpiad._typing import Array, Tree
from mpiad.device import to_host
from mpiad.differentiation import linearize
from mpiad.optimize.constraints import UserConstraint, as_list
from mpiad.optimize.objective_evaluation import Evaluation
from mpiad.optimize.sharded.vectors import local_dot
from mpiad.optimize.totals import Totals
from mpiad.primitives import stop_gradient
from mpiad.pytrees import put
from mpiad.transport import Channel
from mpiad.transport.core.agreement import agreed
from mpiad.transport.devices.device_arrays import arrays_of
from mpiad.transport.exits.user_failures import WrongValueError

_SUPPORTED = {
    "L-BFGS-sharded": "linear equality constraints only, LinearConstraint(A, b, b) (for inequalities use 'MMA-sharded')",
    "MMA-sharded": "inequality constraints only (for linear equality constraints use 'L-BFGS-sharded')",
    "Newton-CG-sharded": "no constraints (use 'MMA-sharded')",
}


def local_constraints(constraints: object, size: int, method: str) -> list[UserConstraint]:
    """Return a sharded method's constraints on `size` local variables; raise a TypeError or ValueError if invalid."""
    found = list(map(UserConstraint.of, as_list(constraints)))
    for constraint in found:
        equal, linear = constraint.low == constraint.high, constraint.matrix is not None
        supported = {"MMA-sharded": not np.any(equal), "L-BFGS-sharded": linear and bool(np.all(equal))}.get(method, False)
        if not supported:
            raise ValueError(f"minimize: method {method!r} supports {_SUPPORTED[method]}, but got {constraints!r:.80}.")
        if constraint.matrix is not None and constraint.matrix.shape[1] != size:
            raise ValueError(
                f"minimize: with a sharded method the matrix of a LinearConstraint must have a column for each of this "
                f"rank's {size} variables, but got shape {constraint.matrix.shape}."
            )
    return found


class ConstraintValues:
    """Constraints in the form f(x) ≤ 0; `names` describes each f."""

    def __init__(self, constraints: list[UserConstraint], evaluation: Evaluation, totals: Totals, channel: Channel):
        self._constraints, self.evaluation, self.totals, self._channel = constraints, evaluation, totals, channel
        self._packing, self._weight = evaluation.packing, evaluation._weight
        self._counts: list[int] = []
        self._limits: list[tuple[int, float, float]] = []  # index of a value, sign, and limit, for each f
        self._values = np.zeros(0)
        self.names: list[str] = []

    def at(self, x: Array) -> tuple[np.ndarray, list[Array]]:
        """Return the values f, shape (m,), and this rank's part of their gradients; NaN if a solver hasn't converged."""
        if not self._constraints:
            return np.zeros(0), []
        not_finite = np.full(len(self.names), np.nan), [x * np.nan for _ in self.names]
        return self.evaluation.attempted(lambda: self._at(x), lambda: not_finite)

    def _at(self, x: Array) -> tuple[np.ndarray, list[Array]]:
        parts = [self._local(constraint, x) for constraint in self._constraints]
        if not self._counts:
            self._agree_on_counts([len(values) for values, _ in parts])
        local = np.concatenate([values for values, _ in parts])
        self._values = self.totals.sums(local)
        rows = [row for _, rows_of in parts for row in rows_of()]
        signed = [(sign * (self._values[k] - limit), sign * rows[k]) for k, sign, limit in self._limits]
        return np.array([value for value, _ in signed]), [row for _, row in signed]

    def _agree_on_counts(self, counts: list[int]) -> None:
        every = self._channel.data.allgather(counts)
        if any(others != every[0] for others in every):
            text = f"minimize: constraints must return the same numbers of values on all ranks, but returned {every}."
            raise agreed(self._channel, ValueError(text))
        self._counts, start = counts, 0
        for number, (constraint, count) in enumerate(zip(self._constraints, counts)):
            for sign, limits in ((-1.0, constraint.low), (1.0, constraint.high)):
                if len(limits) not in (1, count):
                    text = (
                        f"minimize: constraint {number} has {count} values, but {len(limits)} limits. Pass one or {count}."
                    )
                    raise agreed(self._channel, ValueError(text))
                for k, limit in enumerate(np.broadcast_to(limits, count).tolist()):
                    if np.isfinite(limit):
                        self._limits.append((start + k, sign, limit))
                        self.names.append(f"value {k} of constraint {number}")
            start += count

    def _local(self, constraint: UserConstraint, x: Array) -> tuple[np.ndarray, Callable[[], list[Array]]]:
        """Return this rank's terms of the values, and a function that returns its columns of the Jacobian, by rows."""
        if constraint.matrix is not None:
            columns = put(list(constraint.matrix), [arrays_of(x)] * len(constraint.matrix))
            return np.array([local_dot(row, x) for row in columns]), lambda: columns
        run, tree = self.evaluation.agreement.run, self._packing.unpack(x)

        def values(x: Tree) -> Array:
            found = anp.reshape(anp.array(to_host(constraint.fun(x, *constraint.args))), (-1,))
            if stop_gradient(found).dtype.kind not in "fiub":
                raise WrongValueError("minimize: a constraint must return real numbers on all ranks.")
            return found

        stored = None if callable(constraint.jac) else run(lambda: linearize(lambda x: run(lambda: values(x)))(tree))
        own = run(lambda: values(tree)) if stored is None else stored.value

        def rows() -> list[Array]:
            if stored is not None:
                units = self._weight * np.eye(len(own))
                return [self._packing.pack_gradient(run(partial(stored.vjp, unit))) for unit in units]
            shape = len(own), self._packing.size
            jac = run(lambda: np.reshape(cast(Any, constraint.jac)(tree, *constraint.args), shape))
            return [jac[k].copy() for k in range(len(own))]

        return (np.array(own, float) * self._weight if self._weight else np.zeros(len(own))), rows

    def by_constraint(self, multipliers: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return values and multipliers of each of the user's constraints; the Lagrangian is f + Σ multiplier · value."""
        total = np.zeros(sum(self._counts))
        for (k, sign, _), multiplier in zip(self._limits, multipliers):
            total[k] += sign * multiplier
        ends = np.cumsum(self._counts)
        return np.split(self._values, ends)[:-1], np.split(total, ends)[:-1]


class LinearEquality:
    """The projection onto A x = b, with this rank's columns; the gradients of `both` are in the null space of A."""

    def __init__(self, constraints: list[UserConstraint], evaluation: Evaluation, totals: Totals, like: Array):
        matrices = [cast(np.ndarray, constraint.matrix) for constraint in constraints]
        matrix = np.vstack(matrices)
        self._target = np.concatenate([np.broadcast_to(c.low, len(rows)) for c, rows in zip(constraints, matrices)])
        self._rows, self._evaluation, self._totals = put(list(matrix), [arrays_of(like)] * len(matrix)), evaluation, totals
        gram = totals.sums((matrix @ matrix.T).ravel()).reshape(len(matrix), len(matrix))
        self._inverse = scipy.linalg.pinvh(gram, rtol=1e-12)

    def both(self, x: Array) -> tuple[float, Array]:
        """Return the objective, and its projected gradient."""
        value, gradient = self._evaluation.both(x)
        return value, self._projected(gradient, 0.0)

    def start(self, x: Array) -> Array:
        """Return the closest point to x that meets the constraints; raise a ValueError on all ranks if there is none."""
        x = self._projected(self._projected(x, self._target), self._target)  # the second one corrects rounding errors
        error = np.abs(self._residual(x, self._target))
        if np.any(error > 1e-8 * np.maximum(1.0, np.abs(self._target))):
            raise ValueError(
                "minimize: the constraints can't be met: no x meets all linear equality constraints, and the closest one "
                f"misses constraint {int(np.argmax(error))} by {np.max(error):.3e}. Check A and b of the LinearConstraint."
            )
        return x

    def _residual(self, x: Array, target: Array | float) -> np.ndarray:
        local = np.array([local_dot(row, x) for row in self._rows])
        return self._totals.sums(local) - target

    def _projected(self, x: Array, target: Array | float) -> Array:
        multipliers = self._inverse @ self._residual(x, target)
        return sum((-y * row for y, row in zip(multipliers.tolist(), self._rows)), x)
