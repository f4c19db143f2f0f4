"""`least_squares`: the root drives SciPy's trust region, and the residuals stay on their ranks.

This file builds the small problem that SciPy gets in place of the large one, and runs SciPy.
`residuals.residual_evaluation` executes the root's instructions and weights outliers. The rest is shared with `minimize`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import scipy

from mpiad._typing import Comm, Function, Rank, Tree
from mpiad.optimize.checkpoint import CheckpointFile, RootCheckpoint, as_checkpoint, fingerprint, problem_of
from mpiad.optimize.conclusion import STOPPED
from mpiad.optimize.evaluated_points import INTERRUPTED, Ending, Left, Point
from mpiad.optimize.history import Progress
from mpiad.optimize.iterates import Iterates
from mpiad.optimize.objective_evaluation import Program, check_program
from mpiad.optimize.packing import tellable_variables
from mpiad.optimize.residuals.residual_evaluation import Loss, ResidualEvaluation, loss_of
from mpiad.optimize.root_driven import Leader, RootDriven
from mpiad.optimize.root_instructions import COTANGENT, FACTOR, NOT_FINITE, RESIDUALS, TANGENT
from mpiad.optimize.root_start import shared_start
from mpiad.primitives.operation import suspended
from mpiad.transport import Channel, channel
from mpiad.transport.agreement import raising_together, require_same
from mpiad.transport.recovery import recoverable
from mpiad.transport.tracing import restoring_state
from mpiad.transport.user_failures import verdict

# SciPy's trust region on the root, with the residuals of all ranks.
#
# With the triangle R of [f, J], whose first column is (‖f‖, 0, ..., 0) up to a sign, ‖f + J p‖ = ‖R e₁ + R[:, 1:] p‖ for
# all p. So SciPy may use the first column as residuals, which is known before J is (a trial point needs only its norm), and
# the others as Jacobian: n + 1 rows, whatever the number of residuals. With a robust loss a second row carries the cost,
# which isn't the norm then; SciPy reads it through its `loss` function.


# With SciPy's statuses.
_STOPPED = Ending(-2, STOPPED.message)
_LIMIT = Ending(0, "The maximum number of function evaluations is exceeded. Raise max_nfev.")


class Aims(NamedTuple):
    """The root's further arguments."""

    keywords: dict[str, Any]  # for SciPy: bounds, tolerances and the like
    robust: dict[str, Any]  # also for SciPy, if the residuals are gathered: the loss and its scale
    callback: Function | None
    checkpoint: CheckpointFile | None
    program: Program
    solver: str | None

    def problem(self, leader: Leader, start: np.ndarray) -> dict[str, Any]:
        """Return the description of the problem to which the iterates of this solve belong."""
        bounds, loss = self.keywords["bounds"], self.robust["loss"]
        low, high = (bounds.lb, bounds.ub) if isinstance(bounds, scipy.optimize.Bounds) else bounds
        limits = (np.broadcast_to(np.asarray(limit, dtype=float), start.shape) for limit in (low, high))
        return {
            "method": f"least_squares, {self.keywords['method']}",
            **problem_of(self.program, leader.packing, start, leader.used.size),
            "loss": loss if isinstance(loss, str) else "a function",
            "f_scale": float(self.robust["f_scale"]),
            "tr_solver": self.solver,
            "bounds (checksum)": fingerprint(*limits),
        }


class _Problem:
    """The functions that SciPy calls on the root; each quantity is evaluated once per point."""

    def __init__(self, leader: Leader, evaluation: ResidualEvaluation, callback: Function | None, keeper: RootCheckpoint):
        self._instructions, self._evaluation, self._size = leader.instructions, evaluation, leader.packing.size
        self.iterates = Iterates(callback, leader, keeper)
        self._robust = evaluation.loss is not None
        self.seen, self._cost = np.zeros(0), np.nan
        self.place: Point | None = None  # the iterate, at which SciPy needs the Jacobian
        self.counts = {"residuals": 0, "factor": 0, "product": 0}
        self.record, self._active = self.iterates.record, keeper.active
        self.resumed = self._again = False

    def resume(self, start: np.ndarray) -> np.ndarray:
        """Return the last point of an earlier run, and continue its counts; `start` if there was none."""
        found = self.iterates.found(self.counts)
        if found is None:
            return start
        self.place = Point(found["x"], float(found["value"]))
        self.place.gradient = found["gradient"] if found["gradient"].size else None
        self.resumed = self._again = True
        return self.place.x

    def _ask(self, kind: int, name: str, x: np.ndarray, direction: np.ndarray | None = None) -> None:
        self._evaluation.agreement.raise_if_failed()
        self.counts[name] += 1
        self._instructions.give(kind, x, direction)

    def residuals(self, x: np.ndarray) -> np.ndarray:
        """Return the residuals at x for SciPy."""
        # Only here, between two iterations: the last iterate is recorded, and its gradient known.
        if self._active and self.place is not None and self._evaluation.agreement.end_requested:
            raise Left(INTERRUPTED)
        self._ask(RESIDUALS, "residuals", x)
        if self._evaluation.gathers:
            found: np.ndarray = self._evaluation.gathered(x)  # type: ignore[assignment]
            loss = self._evaluation.loss
            with np.errstate(over="ignore", invalid="ignore"):  # a trial point may lie anywhere
                square = float(found @ found)
            self._cost, self.seen = 0.5 * (square if loss is None else loss.weighed(found)[0]), found
        else:
            sums: np.ndarray = self._evaluation.cost(x)  # type: ignore[assignment]
            self._cost, self.seen = 0.5 * float(sums[0]), _surrogate_residuals(sums, x.size, self._robust)
        return self.seen

    def jacobian(self, x: np.ndarray) -> Any:
        """Return the Jacobian at x for SciPy: at x0, and at each new iterate, whose residuals it has."""
        first, self._again = self._again, False  # of a resumed run: recorded already
        if (self.place is None or first) and not np.all(np.isfinite(self.seen)):
            self._instructions.give(NOT_FINITE, x)
            found = self._evaluation.carry_out(NOT_FINITE, x, None)
            raise ValueError(f"least_squares: the residuals aren't finite at x0. Start where they are.{found}")
        self.place = Point(x, self._cost)
        found = self._operator(self.place) if self._evaluation.gathers else self._matrix(self.place)
        if not first:
            row = self.iterates.note(self.place, self.counts["residuals"])
            if row.iteration > 0:
                self.iterates.write(self.place, self.counts, ended=False)
                self.iterates.tell(x, row)
        return found

    def _matrix(self, place: Point) -> np.ndarray:
        self._ask(FACTOR, "factor", place.x)
        triangle, place.gradient = self._evaluation.factor(place.x)  # type: ignore[misc]
        return _surrogate_jacobian(triangle, place.gradient, float(self.seen[0]), self._robust)

    def _operator(self, place: Point) -> Any:
        def transposed(weights: np.ndarray) -> np.ndarray:
            self._ask(COTANGENT, "product", place.x)
            found = self._evaluation.cotangent(place.x, np.array(weights, dtype=float).reshape(-1))
            # Each point's first product is with its residuals, and gives the gradient.
            if place.gradient is None:
                place.gradient = found  # the first product that SciPy requests
            return found  # type: ignore[return-value]

        def forward(direction: np.ndarray) -> np.ndarray:
            direction = np.array(direction, dtype=float).reshape(-1)
            self._ask(TANGENT, "product", place.x, direction)
            return self._evaluation.tangent(place.x, direction)  # type: ignore[return-value]

        shape = self.seen.size, self._size
        return scipy.sparse.linalg.LinearOperator(shape, matvec=forward, rmatvec=transposed, dtype=float)  # type: ignore[call-arg]

    def ended(self, status: int, message: str) -> scipy.optimize.OptimizeResult:
        """Return the result of a solve that ends at the last iterate."""
        place: Point = self.place  # type: ignore[assignment]
        gradient = np.full_like(place.x, np.nan) if place.gradient is None else place.gradient
        return scipy.optimize.OptimizeResult(
            x=place.x, cost=place.value, grad=gradient, optimality=place.norm,
            active_mask=np.zeros(place.x.size, int), nfev=self.counts["residuals"], njev=len(self.record.rows),
            status=status, success=False, message=message,
        )  # fmt: skip


def descend(aims: Aims, leader: Leader) -> dict[str, Any]:
    """Run SciPy's method on the root; return its result, without the fields as long as the residuals."""
    evaluation: ResidualEvaluation = leader.evaluation  # type: ignore[assignment]
    start = leader.packing.pack(leader.start)
    keeper = RootCheckpoint(aims.checkpoint, aims.problem(leader, start) if aims.checkpoint else {}, "least_squares")
    problem = _Problem(leader, evaluation, aims.callback, keeper)
    if evaluation.gathers:
        solver = {"tr_solver": "lsmr", **aims.robust}
    else:
        solver = {"tr_solver": "exact", "loss": "linear" if evaluation.loss is None else _carried_cost}
    start = problem.resume(start)
    try:
        keywords = {**aims.keywords, "max_nfev": _remaining(aims.keywords["max_nfev"], problem, start.size)}
        result = scipy.optimize.least_squares(problem.residuals, start, jac=problem.jacobian, **keywords, **solver)
    except StopIteration:
        result = problem.ended(*_STOPPED)
    except Left as left:
        result = problem.ended(*left.ending)
    problem.iterates.write(problem.place, problem.counts, ended=True)
    return _outcome(result, problem)


def _remaining(limit: int | None, problem: _Problem, size: int) -> int | None:
    """Return the number of evaluations that earlier runs have left."""
    if not problem.resumed:
        return limit
    # SciPy's default, which counts the evaluations of one run alone.
    left = (100 * size if limit is None else limit) - problem.counts["residuals"]
    if left <= 0:
        raise Left(_LIMIT)
    return left


def _outcome(result: scipy.optimize.OptimizeResult, problem: _Problem) -> dict[str, Any]:
    outcome = {name: value for name, value in result.items() if name not in ("fun", "jac")}
    outcome["cost"] = problem.place.value  # type: ignore[union-attr]  # SciPy squares a root of it
    history = problem.record.history()
    if problem.resumed:  # SciPy has counted since then
        outcome["nfev"], outcome["njev"] = problem.counts["residuals"], len(history.loss)
    return {**outcome, "nit": len(history.loss) - 1, "history": history, "evaluations": problem.counts}


def _surrogate_residuals(sums: np.ndarray, size: int, robust: bool) -> np.ndarray:
    """Return substitutes for the residuals, shape (n + 1,), or (n + 2,) with a robust loss.

    The sums are twice the cost, and the squared norm of the residuals in its model; n is `size`, the number of variables.
    """
    out = np.zeros(size + 1 + robust)
    if np.all(np.isfinite(sums)):
        out[0] = np.sqrt(sums[1])
        if robust:
            out[1] = np.sqrt(sums[0])
    else:
        # SciPy's trust region shrinks if a cost isn't finite, whether NaN or infinite.
        out[0] = np.nan
    return out


def _surrogate_jacobian(triangle: np.ndarray, gradient: np.ndarray, norm: float, robust: bool) -> np.ndarray:
    """Return a substitute for the Jacobian, shape (n + 1, n), or (n + 2, n) with a robust loss; `norm` is that of f."""
    rows = triangle[:, 1:].copy()
    if norm > 0.0:
        # With residuals (norm, 0, ...), J'f is then the summed gradient, not its approximation from R.
        rows[0] = gradient / norm
    return np.insert(rows, 1, 0.0, axis=0) if robust else rows


def _carried_cost(z: np.ndarray) -> np.ndarray:
    """Return the loss passed to SciPy for a robust one: the second entry is the cost, the others are weighted already."""
    rho = np.zeros((3, z.size))
    rho[0, 1] = z[1]
    rho[1] = 1.0
    return rho


_CALL = "least_squares"
# Up to this number of variables the root gets a matrix; each variable takes a pass of the function per new iterate.
_FEW = 100


@recoverable(_CALL, verdict=partial(verdict, call=_CALL))
def least_squares(
    fun: Function,
    x0: Tree = None,
    *,
    jac: Function | None = None,
    bounds: Sequence | scipy.optimize.Bounds = (-np.inf, np.inf),
    method: str = "trf",
    ftol: float | None = 1e-8,
    xtol: float | None = 1e-8,
    gtol: float | None = 1e-8,
    x_scale: float | str | np.ndarray = 1.0,
    loss: str | Function = "linear",
    f_scale: float = 1.0,
    max_nfev: int | None = None,
    tr_solver: str | None = None,
    tr_options: dict | None = None,
    callback: Function | None = None,
    root: Rank = 0,
    comm: Comm = None,
    args: tuple = (),
    checkpoint: str | PathLike[str] | CheckpointFile | None = None,
    progress: bool = False,
) -> scipy.optimize.OptimizeResult:
    """Minimize half the sum of the squares of all ranks' residuals, by Gauss-Newton steps in a trust region.

    The root holds and updates the variables by SciPy's `least_squares`; the other ranks wait for its instructions. The
    residuals and the Jacobian stay on their ranks.

    Parameters
    ----------
    fun : callable
        ``fun(x, *args)`` is called on every rank with the root's x and returns this rank's residuals: an array of any
        shape, or None for none.
    x0 : pytree of arrays
        The starting point. Only the root's counts: other ranks give None or the same.
    jac : callable, optional
        ``jac(x, *args)`` returns the derivatives of this rank's residuals, shape (m_r, n), with respect to the variables in
        the order of the flattened pytree. By default they are found by differentiation of the whole program.
    bounds : pair (low, high) or scipy.optimize.Bounds, optional
        As in SciPy: numbers, or arrays of shape (n,). Only the root's count, as for tolerances, scales, limits and the
        callback.
    method : {"trf", "dogbox"}
    ftol, xtol, gtol : float or None
    x_scale : float, array of shape (n,), or "jac"
        "jac" needs the "exact" solver.
    max_nfev : int, optional
        Maximum number of evaluations; 100 n by default.
    tr_options : dict, optional
    loss : {"linear", "soft_l1", "huber", "cauchy", "arctan"} or callable
        Weighting of outliers. A function is called with squared residuals z, shape (m,), and returns ρ(z) and its first two
        derivatives, shape (3, m).
    f_scale : float
        Residuals beyond it are outliers. The same on all ranks.
    tr_solver : {"exact", "lsmr"}, optional
        "exact" (by default for up to 100 variables): each rank factorizes its own rows of the Jacobian, and the root stores
        (n + 1)² numbers per rank. "lsmr" (by default for more): products with the Jacobian, by `make_jvp` and `make_vjp`,
        for two variables or more; the root stores some vectors as long as all residuals together.
    callback : callable, optional
        As in `minimize`; `fun` of its OptimizeResult is the cost.
    root : int
    comm : mpi4py intracommunicator, optional
    args : tuple
        Further arguments of `fun` and `jac`: this rank's own.
    checkpoint : path or CheckpointFile, optional
        As in `minimize`: the root writes the last iterate, and the same call restarts from it. `max_nfev` counts the
        evaluations of all runs.
    progress : bool
        As in `minimize`, with `max_nfev` as the limit.

    Returns
    -------
    scipy.optimize.OptimizeResult
        SciPy's `x`, `cost`, `grad`, `optimality`, `active_mask`, `nfev`, `njev`, `status`, `message` and `success`, with
        `x` and `grad` in the form of x0; without `fun` and `jac`, which are as long as the residuals. Also `nit`, and

        - `history`: as in `minimize`; its `loss` is the cost;
        - `evaluations`: numbers of evaluations: "residuals", "factor" (the Jacobian), "product".

    Raises
    ------
    TypeError, ValueError
        On all ranks, if an argument on any of them is invalid, `fun` doesn't return real numbers or None, the residuals
        aren't finite at x0, the checkpoint is damaged or belongs to another problem, or x0 isn't the root's.
    WorkerError
        On all ranks, if an evaluation raises on any, as in `minimize`.

    Ranks
    -----
    All ranks of `comm` call it, with the same loss, f_scale, method, tr_solver and root. The result is bitwise the same on
    all ranks.

    Adjoint
    -------
    None: the result is a constant in every trace.

    Examples
    --------
    >>> result = mpiad.optimize.least_squares(lambda x: (rank + 1) * (x - np.array([1.0, 2.0])), np.zeros(2))
    >>> print(np.round(result.x, 4))
    [1. 2.]
    """
    used = channel(comm, _CALL)
    program = Program(fun, jac, None, args if isinstance(args, tuple) else (args,), "sum", root)
    keywords = {
        "bounds": bounds, "method": method, "ftol": ftol, "xtol": xtol, "gtol": gtol, "x_scale": x_scale,
        "max_nfev": max_nfev, "tr_options": {} if tr_options is None else tr_options,
    }  # fmt: skip
    with restoring_state(), suspended():
        start, weigh, kept = _agree_on_arguments(used, program, x0, (loss, f_scale, tr_solver, method), checkpoint)
        kind = partial(ResidualEvaluation, loss=weigh, solver=tr_solver, few=_FEW)
        solve = RootDriven(used, program, start, kind, _CALL)
        aims = Aims(keywords, {"loss": loss, "f_scale": f_scale}, callback, kept, program, tr_solver)
        shown = Progress(keywords) if progress else None
        with solve.ending(kept, shown):
            return solve.run(partial(descend, aims), shown)


def _agree_on_arguments(
    used: Channel, program: Program, x0: Tree, shared: tuple, checkpoint: object
) -> tuple[Tree, Loss | None, CheckpointFile | None]:
    """Check the arguments on all ranks; return the root's x0 as a pytree of variables, the loss and the checkpoint."""
    loss, scale, solver, method = shared
    with raising_together(used, Exception):
        kept = as_checkpoint(checkpoint, _CALL, used.rank == program.root)
        check_program(program, used, _CALL)
        if program.jac is True:
            raise TypeError("least_squares: jac must be a function that returns this rank's rows, or None, but got True.")
        if method not in ("trf", "dogbox"):
            raise ValueError(f"least_squares: method must be 'trf' or 'dogbox', but got {method!r}.")
        if solver not in (None, "exact", "lsmr"):
            raise ValueError(f"least_squares: tr_solver must be 'exact', 'lsmr' or None, but got {solver!r}.")
        weigh = loss_of(loss, scale)
        start = tellable_variables(x0, _CALL) if used.rank == program.root else None
    named = loss if isinstance(loss, str) else "a function"
    # Its presence must be the same everywhere: columns found by differentiation run the function's messages.
    jac = None if program.jac is None else "a function"
    # As a number: 1 and 1.0 are the same scale, and 0.1 in single precision isn't 0.1 in double precision.
    described = f"loss={named}, f_scale={float(scale)!r}, tr_solver={solver!r}, method={method!r}, root={program.root}"
    described += f", jac={jac}"
    described += "" if kept is None else f", a checkpoint every {kept.every} iterations"
    require_same(used, described, _CALL)
    return shared_start(used, program, start, x0, _CALL), weigh, kept
