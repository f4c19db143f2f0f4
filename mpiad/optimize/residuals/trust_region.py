"""SciPy's trust region on the root, with the residuals of all ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy

from mpiad._typing import Function
from mpiad.optimize.iterates import Iterates
from mpiad.optimize.protocol import COTANGENT, FACTOR, RESIDUALS, TANGENT
from mpiad.optimize.residuals import surrogate
from mpiad.optimize.residuals.evaluation import ResidualEvaluation
from mpiad.optimize.root_driven import Leader

__all__ = ["Aims", "descend"]

_STOPPED = -2  # as in SciPy


class Aims(NamedTuple):
    """What else the root was given.

    Attributes
    ----------
    keywords : dict
        For SciPy: bounds, tolerances and the like.
    robust : dict
        For SciPy too, where the residuals are gathered: the loss and its scale.
    callback : callable or None
    """

    keywords: dict[str, Any]
    robust: dict[str, Any]
    callback: Function | None


class _Place:
    """An iterate: where SciPy wants the Jacobian."""

    def __init__(self, x: np.ndarray, cost: float):
        self.x, self.value = x.copy(), cost
        self.gradient: np.ndarray | None = None

    @property
    def gradient_norm(self) -> float:
        """Return the gradient's largest absolute entry; NaN where it isn't known."""
        return np.nan if self.gradient is None else float(np.max(np.abs(self.gradient), initial=0.0))


class _Problem:
    """What SciPy calls on the root; each thing is evaluated once for each point."""

    def __init__(self, leader: Leader, evaluation: ResidualEvaluation, callback: Function | None):
        self._instructions, self._evaluation, self._size = leader.instructions, evaluation, leader.packing.size
        self._iterates = Iterates(callback, leader)
        self._robust = evaluation.loss is not None
        self.seen, self._cost = np.zeros(0), np.nan
        self.place: _Place | None = None
        self.counts = {"residuals": 0, "factor": 0, "product": 0}
        self.record = self._iterates.record

    def _ask(self, kind: int, name: str, x: np.ndarray, direction: np.ndarray | None = None) -> None:
        self._evaluation.raise_if_ended()
        self.counts[name] += 1
        self._instructions.give(kind, x, direction)

    def residuals(self, x: np.ndarray) -> np.ndarray:
        """Return what SciPy takes for residuals at x."""
        self._ask(RESIDUALS, "residuals", x)
        if self._evaluation.gathers:
            found: np.ndarray = self._evaluation.gathered(x)  # type: ignore[assignment]
            loss = self._evaluation.loss
            self._cost, self.seen = 0.5 * float(found @ found if loss is None else loss.weighed(found)[0]), found
        else:
            sums: np.ndarray = self._evaluation.cost(x)  # type: ignore[assignment]
            self._cost, self.seen = 0.5 * float(sums[0]), surrogate.residuals(sums, x.size, self._robust)
        return self.seen

    def jacobian(self, x: np.ndarray) -> Any:
        """Return what SciPy takes for the Jacobian at x: at x0, and at each new iterate, where it has the residuals."""
        if self.place is None and not np.all(np.isfinite(self.seen)):
            raise ValueError("least_squares: the residuals aren't finite at x0. Start where they are.")
        self.place = _Place(x, self._cost)
        found = self._operator(self.place) if self._evaluation.gathers else self._matrix(self.place)
        row = self._iterates.note(self.place, self.counts["residuals"])
        if row.iteration > 0:
            self._iterates.tell(x, row)
        return found

    def _matrix(self, place: _Place) -> np.ndarray:
        self._ask(FACTOR, "factor", place.x)
        triangle, place.gradient = self._evaluation.factor(place.x)  # type: ignore[misc]
        return surrogate.jacobian(triangle, place.gradient, float(self.seen[0]), self._robust)

    def _operator(self, place: _Place) -> Any:
        def transposed(weights: np.ndarray) -> np.ndarray:
            self._ask(COTANGENT, "product", place.x)
            found = self._evaluation.cotangent(place.x, np.array(weights, dtype=float).reshape(-1))
            if place.gradient is None:
                place.gradient = found  # the first that SciPy asks for
            return found  # type: ignore[return-value]

        def forward(direction: np.ndarray) -> np.ndarray:
            direction = np.array(direction, dtype=float).reshape(-1)
            self._ask(TANGENT, "product", place.x, direction)
            return self._evaluation.tangent(place.x, direction)  # type: ignore[return-value]

        shape = self.seen.size, self._size
        return scipy.sparse.linalg.LinearOperator(shape, matvec=forward, rmatvec=transposed, dtype=float)  # type: ignore[call-arg]

    def stopped(self) -> scipy.optimize.OptimizeResult:
        """Return the result after a callback's StopIteration."""
        place: _Place = self.place  # type: ignore[assignment]
        gradient = np.full_like(place.x, np.nan) if place.gradient is None else place.gradient
        return scipy.optimize.OptimizeResult(
            x=place.x, cost=place.value, grad=gradient, optimality=place.gradient_norm,
            active_mask=np.zeros(place.x.size, int), nfev=self.counts["residuals"], njev=len(self.record.rows),
            status=_STOPPED, success=False, message="`callback` raised `StopIteration`.",
        )


def descend(aims: Aims, leader: Leader) -> dict[str, Any]:
    """Run SciPy's method on the root; return its result, without what is as long as the residuals."""
    evaluation: ResidualEvaluation = leader.evaluation  # type: ignore[assignment]
    problem = _Problem(leader, evaluation, aims.callback)
    if evaluation.gathers:
        solver = {"tr_solver": "lsmr", **aims.robust}
    else:
        solver = {"tr_solver": "exact", "loss": "linear" if evaluation.loss is None else surrogate.carried}
    start = leader.packing.pack(leader.start)
    try:
        result = scipy.optimize.least_squares(
            problem.residuals, start, jac=problem.jacobian, **aims.keywords, **solver
        )
    except StopIteration:
        result = problem.stopped()
    outcome = {name: value for name, value in result.items() if name not in ("fun", "jac")}
    outcome["cost"] = problem.place.value  # type: ignore[union-attr]  # SciPy squares a root of it
    history = problem.record.history()
    return {**outcome, "nit": len(history.loss) - 1, "history": history, "evaluations": problem.counts}
