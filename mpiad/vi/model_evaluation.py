"""The evaluation of the model at draws, distributed over the ranks: values, gradients and exceptions."""

from __future__ import annotations

import traceback
from typing import NamedTuple

import numpy as np

from mpiad._typing import Array, Comm, Function, Rank, Tree
from mpiad.device import to_device, to_host
from mpiad.differentiation.gradient import cotangents_of_variables, seeds_of_term
from mpiad.differentiation.objective import problem_with
from mpiad.differentiation.trace import Variables, trace_backwards
from mpiad.errors import CommunicatorError
from mpiad.primitives import mpi_gather, mpi_rank, mpi_scatter
from mpiad.primitives.operation import suspended
from mpiad.pytrees import leaf_on_device
from mpiad.tasks import mpi_map
from mpiad.transport import channel
from mpiad.transport.core.tracing import restoring_state

_SUCCEEDED, _RAISED, _NOT_FINITE, _COMMUNICATED = 0.0, 1.0, 2.0, 3.0


class Evaluations(NamedTuple):
    """The results of the model at a number of draws, such as those of one epoch."""

    values: Array  # shape (S,)
    gradients: Array  # shape (S, dim)
    valid: Array  # bool, shape (S,); False for draws that failed
    raised: int  # number of draws at which the model raised
    not_finite: int  # number of draws at which the value or the gradient wasn't finite


class Model:
    """The user's loss per draw; `trace`: this rank's first traceback; `device`: of the draws, by default of `data`."""

    def __init__(self, loss: Function, data: Tree, differentiated: bool, device: int | None = None):
        self._loss, self._data, self._differentiated, self.device = loss, data, differentiated, device
        self._like = None if device is not None else leaf_on_device(data)
        self.trace: str | None = None

    def to_device(self, *trees: Tree) -> tuple[Tree, ...]:
        """Copy pytrees from the host to the model's device; return them unchanged if it has none."""
        if self.device is None and self._like is None:
            return trees
        return tuple(to_device(tree, self.device, like=self._like) for tree in trees)

    def row(self, theta: Array) -> Array:
        """Return value, status and gradient at one draw, as one array."""
        row = np.zeros(2 + len(theta))
        if not np.isfinite(theta).all():  # then the root ends the run
            row[1] = _NOT_FINITE
            return row
        try:
            with restoring_state(), suspended():
                # A copy, because the loss might overwrite the draws, which the update needs.
                row[0], row[2:] = self._evaluated(np.array(theta))
        except Exception as error:  # noqa: BLE001  the draw is discarded
            self.trace = self.trace or "".join(traceback.format_exception(error))
            row[1] = _COMMUNICATED if isinstance(error, CommunicatorError) else _RAISED
            return row
        if not np.isfinite(row).all():
            row[:] = 0.0
            row[1] = _NOT_FINITE
        return row

    def _evaluated(self, theta: Array) -> tuple[float, Array | float]:
        (theta,) = self.to_device(theta)
        if not self._differentiated:
            return _number(self._loss(theta, self._data)), 0.0
        variables = Variables([theta], [0], lambda leaves: leaves[0])
        traced = trace_backwards(lambda x: self._loss(x, self._data), variables)
        value = _number(traced.build(traced.values))
        (gradient,) = cotangents_of_variables(traced, seeds_of_term(traced, 1.0), variables)
        return value, to_host(gradient)

    def evenly(self, theta: Array | None, dim: int, root: Rank, comm: Comm) -> Array | None:
        """Evaluate equal shares of the root's draws on all ranks, including the root; return all rows on the root."""
        local_draws = mpi_scatter(theta, root, axis=0, comm=comm)
        with channel(comm, "VI.run").evaluating("a draw of VI"):
            found = [self.row(point) for point in local_draws]
        rows = np.array(found).reshape(len(local_draws), 2 + dim)
        gathered = mpi_gather(rows, root, axis=0, comm=comm)
        return gathered if mpi_rank(comm) == root else None

    def dynamically(self, theta: Array | None, root: Rank, comm: Comm) -> Array | None:
        """Evaluate the draws on free ranks other than the root; return all rows on the root."""
        rows = mpi_map(self.row, None if theta is None else list(theta), root=root, comm=comm)
        return None if rows is None else np.array(rows)


def _number(value: object) -> float:
    problem = problem_with(value, 1.0, "VI", "loss must return one real number")
    if problem is not None:
        raise problem.kind(problem.text)
    return float(np.reshape(to_host(value), ()))


def evaluations_of(rows: Array) -> Evaluations:
    """Return the evaluations, given the rows that `Model.row` returned for all draws."""
    status = rows[:, 1]
    # Communication in the model is an error of the program: all draws are discarded.
    if (status == _COMMUNICATED).any():
        status = np.full(len(rows), _RAISED)
    return Evaluations(
        rows[:, 0], rows[:, 2:], status == _SUCCEEDED, int((status == _RAISED).sum()), int((status == _NOT_FINITE).sum())
    )
