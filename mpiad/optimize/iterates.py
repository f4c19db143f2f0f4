"""The iterates of a solve: each is recorded, shown, written to a checkpoint and passed to the user's callback."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
import scipy

from mpiad._typing import Function, Tree
from mpiad.optimize.checkpoint import RootCheckpoint
from mpiad.optimize.evaluated_points import Ending, EndMethod, Point, Points
from mpiad.optimize.history import History, Iterate, Record, Row
from mpiad.optimize.packing import Packing
from mpiad.optimize.root_driven import RootDriven
from mpiad.optimize.totals import Totals
from mpiad.transport.exits.user_failures import StageFailures
from mpiad.transport.resources import vdot

X = TypeVar("X")


class MinimizeResult(scipy.optimize.OptimizeResult, Generic[X]):
    """The result of `minimize`: SciPy's, with the variables in the structure of x0.

    Attributes
    ----------
    x, jac : pytree of arrays
        The variables, and the gradient there.
    fun : float
        The objective.
    success : bool
    status : int
    message : str
    nit, nfev, njev : int
        Numbers of iterations, and of evaluations of the objective and the gradient.
    history : History
        An entry for the starting point and each iterate.
    evaluations : dict
        Numbers of evaluations: "value", "gradient" (alone), "both" and "product".

    Examples
    --------
    >>> result = mpiad.minimize(lambda x: mpiad.mpi_allreduce(np.sum((x - 1.0) ** 2)), np.zeros(2))
    >>> print(type(result).__name__, result.success, result.x.round(4))
    MinimizeResult True [1. 1.]
    """

    x: X
    jac: X
    fun: float
    success: bool
    status: int
    message: str
    nit: int
    nfev: int
    njev: int
    history: History
    evaluations: dict[str, int]


def result_like_x0(solve: RootDriven, method: Callable[[RootDriven], dict[str, Any]]) -> scipy.optimize.OptimizeResult:
    """Run a method on the root; return its result on all ranks, with variables and gradient in the structure of x0."""
    outcome = solve.run(method)
    result = scipy.optimize.OptimizeResult(outcome, x=solve.packing.unpack(outcome["x"]))
    for name in ("jac", "grad"):  # "trust-constr" also calls the gradient grad
        gradient = outcome.get(name)
        if isinstance(gradient, np.ndarray) and gradient.shape == (solve.packing.size,):
            result[name] = solve.packing.unpack_gradient(gradient)
    return result


class Iterates:
    """The iterates of a method that the root drives; `in_callback` is true while the callback runs, and after it raised."""

    def __init__(self, callback: Function | None, solve: RootDriven, checkpoint: RootCheckpoint):
        self._callback, self.checkpoint = _with_row(callback), checkpoint
        self._packing, self._channel = solve.packing, solve.channel
        self.record, self.in_callback = Record(solve.progress), False

    def add_row(self, point: Point, evaluations: int) -> Row:
        """Add a row to the history."""
        last = self.record.last
        with np.errstate(over="ignore", invalid="ignore"):  # an iterate of a diverging method may be infinite
            step = np.zeros(1) if last is None else point.x - last.x
            return self.record.add(point, evaluations, float(np.sqrt(vdot(step, step))))

    def restore(self, counts: dict[str, int]) -> Point | None:
        """Return the last iterate of an earlier run, and continue its history and `counts`; None if there was none."""
        state = self.checkpoint.load()
        if state is None:
            return None
        point = Point(state["x"], float(state["value"]), state["gradient"] if state["gradient"].size else None)
        self.record.restore(state["history"], point)
        counts.update(zip(counts, state["counts"].tolist()))
        return point

    def call_callback(self, x: np.ndarray, row: Row) -> object:
        """Call the user's callback, which may raise StopIteration."""
        if self._callback is None:
            return None
        self.in_callback = True
        # A copy, because SciPy writes into x again, and the callback may keep or overwrite its argument.
        variables = self._packing.unpack(np.array(x, dtype=float))
        with self._channel.refusing("the callback runs on the root alone, and the other ranks take no part"):
            answer = self._callback(variables, row)
        self.in_callback = False
        return answer


class IteratesOfPoints(Iterates):
    """The callback and the objective for SciPy's minimizers; the first point that they evaluate is the first iterate."""

    def __init__(self, points: Points, callback: Function | None, solve: RootDriven, checkpoint: RootCheckpoint):
        super().__init__(callback, solve, checkpoint)
        self._points, self.resumed = points, False

    def resume(self, start: np.ndarray) -> np.ndarray:
        """Return the last iterate of an earlier run, and continue its counts; `start` if there was none."""
        points, found = self._points, self.restore(self._points.counts)
        points.interruptible = self.checkpoint.settings is not None
        if found is None:
            return start
        self.resumed = True
        # If SciPy won't be called, value and gradient are those of the checkpoint.
        points.iterate = found if points.exhausted else points.at(found.x)
        return found.x

    def value(self, x: np.ndarray) -> float:
        """Evaluate the objective; record the starting point."""
        point = self._points.with_value(x)
        if not self.record.rows:
            self._add_row(point)
        return self._points.for_method(point)[0]

    def _add_row(self, point: Point) -> Row:
        self._points.iterate = point
        return self.add_row(self._points.iterate, self._points.count("value"))

    def __call__(self, x: np.ndarray, *state: object) -> object:
        """Record an iterate and call the user's callback."""
        first = self._points.first
        if first is not None and not first.finite:  # "trust-constr" would continue up to `maxiter`
            raise EndMethod(Ending(3, "ABNORMAL: the objective or its gradient isn't finite at x0. Choose another x0."))
        row = self._add_row(self._points.at(np.ascontiguousarray(x, dtype=float)))
        self.checkpoint.write_if_due(self.record, self._points.last_or_best, self._points.counts)
        return self.call_callback(x, row)


class ShardedIterates:
    """History, callbacks (`called` on any rank, `stopped` on this one) and the root's progress of a sharded method."""

    def __init__(
        self, packing: Packing, agreement: StageFailures, callback: Function | None, called: bool, record: Record,
        totals: Totals,
    ):  # fmt: skip
        self._packing, self._agreement, self._called, self._totals = packing, agreement, called, totals
        self._callback, self.record, self.stopped = _with_row(callback), record, False

    def report(self, point: Iterate, evaluations: int, step: float) -> None:
        """Add a row and call the callback; all ranks call this."""
        row = self.record.add(point, evaluations, step)

        def ends() -> bool:
            if self._callback is not None:
                try:
                    self._callback(self._packing.unpack(point.x), row)
                except StopIteration:
                    return True
            return False

        self.stopped = self._called and self._agreement.run(ends)

    def any_stopped(self) -> bool:
        """Return whether the callback of any rank has raised StopIteration; collective if any rank has a callback."""
        return self._called and bool(self._totals.sums(np.array([self.stopped], float))[0])


def _with_row(callback: Function | None) -> Callable[[Tree, Row], object] | None:
    """Return a function that calls the callback with variables, or with an OptimizeResult made from variables and row."""
    if callback is None:
        return None
    try:
        parameters = set(inspect.signature(callback).parameters)
    except ValueError:  # some builtins have no signature
        parameters = set()
    if parameters != {"intermediate_result"}:
        return lambda x, row: callback(x)

    def with_result(x: Tree, row: Row) -> object:
        counts = {"nit": row.iteration, "nfev": row.evaluations, "gradient_norm": row.gradient_norm}
        return callback(intermediate_result=scipy.optimize.OptimizeResult(x=x, fun=row.loss, **counts))

    return with_result
