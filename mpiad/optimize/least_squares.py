"""`least_squares`: the root runs SciPy's trust-region method; residuals and Jacobian remain distributed.

At a trial point the root needs the cost. If there are few variables, it also needs, at each iterate, the factor R of
a QR factorization of the matrix [f, J] of residuals and Jacobian. Each rank factorizes its own rows, and the root
factorizes the stacked factors of all ranks, which have (n + 1)² numbers each. With many variables the root needs products
with J and its transpose instead, for which vectors of residuals are gathered on the root and scattered.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from os import PathLike
from typing import Any, NamedTuple

import autograd.numpy as anp
import numpy as np
import scipy
from autograd.tracer import Box

from mpiad._typing import Array, Comm, Function, Rank, Scalar, Tree
from mpiad.device import to_host
from mpiad.device.assembly import stack
from mpiad.differentiation import linearize
from mpiad.optimize.checkpoint import (
    CheckpointFile,
    RootCheckpoint,
    as_checkpoint,
    fingerprint,
    problem_of,
    without_on_signal,
)
from mpiad.optimize.constraints import box_of
from mpiad.optimize.evaluated_points import INTERRUPTED, RTOL_OF_VALUES, STOPPED, Ending, EndMethod, Point
from mpiad.optimize.history import Progress
from mpiad.optimize.iterates import Iterates, result_like_x0
from mpiad.optimize.objective_evaluation import Program, StartValues, check_program
from mpiad.optimize.packing import Packing, sendable_variables
from mpiad.optimize.root_driven import RootDriven, shared_start
from mpiad.optimize.totals import reduced_on_root
from mpiad.primitives.cotangents import spec_like
from mpiad.primitives.operation import suspended
from mpiad.pytrees import flatten, is_variable
from mpiad.transport import Channel, channel
from mpiad.transport.core.agreement import raising_together, require_same
from mpiad.transport.core.tracing import restoring_state
from mpiad.transport.exits.recovery import recoverable
from mpiad.transport.exits.user_failures import StageFailures, WrongValueError, common_error

# Robust losses: functions ρ(z) of the squared residuals z, with less weight for outliers. Names and formulas are SciPy's.
#
# References
# ----------
# .. [1] B. Triggs et al., "Bundle adjustment - a modern synthesis" (2000), section 4.3: residuals and Jacobian are weighted
#    so that their Gauss-Newton model is that of the robust cost.


def _soft_l1(z: np.ndarray) -> list[np.ndarray]:
    t = 1.0 + z
    return [2.0 * (np.sqrt(t) - 1.0), t**-0.5, -0.5 * t**-1.5]


def _huber(z: np.ndarray) -> list[np.ndarray]:
    inlier, root = z <= 1.0, np.sqrt(np.maximum(z, 1.0))
    return [np.where(inlier, z, 2.0 * root - 1.0), np.where(inlier, 1.0, 1 / root), np.where(inlier, 0.0, -0.5 / root**3)]


def _cauchy(z: np.ndarray) -> list[np.ndarray]:
    t = 1.0 + z
    return [np.log1p(z), 1.0 / t, -1.0 / t**2]


def _arctan(z: np.ndarray) -> list[np.ndarray]:
    t = 1.0 + z**2
    return [np.arctan(z), 1.0 / t, -2.0 * z / t**2]


LOSSES: dict[str, Any] = {"linear": None, "soft_l1": _soft_l1, "huber": _huber, "cauchy": _cauchy, "arctan": _arctan}


Loss = Callable[[np.ndarray], tuple[float, np.ndarray, np.ndarray]]


def _weighted(loss: Callable[[np.ndarray], object], scale: float, f: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """Return twice this rank's cost, weighted residuals and row weights; ``loss(z)``: ρ, ρ' and ρ'', shape (3, m)."""
    # No warnings: if residuals aren't finite at a trial point, the trust region shrinks.
    with np.errstate(all="ignore"):
        z = (f / scale) ** 2
    rho = np.asarray(loss(z), dtype=float)
    if rho.shape != (3, f.size):
        raise ValueError(f"least_squares: loss must return shape {(3, f.size)}, but got {rho.shape}.")
    # For a scale of one the second derivative of ρ(f²)/2 with respect to f is ρ' + 2 ρ'' f². It is negative for far
    # outliers, but the model must be convex.
    with np.errstate(all="ignore"):
        factors = np.sqrt(np.maximum(rho[1] + 2.0 * rho[2] * z, sys.float_info.epsilon))
        return float(scale**2 * np.sum(rho[0])), f * rho[1] / factors, factors


def loss_of(loss: object, scale: Scalar) -> Loss | None:
    """Return `_weighted` for a robust loss, None for the sum of squares; raise a ValueError if loss or scale is invalid."""
    if not (callable(loss) or (isinstance(loss, str) and loss in LOSSES)):
        raise ValueError(f"least_squares: loss must be a function or one of {', '.join(LOSSES)}, but got {loss!r}.")
    if not (np.ndim(scale) == 0 and np.isreal(scale) and scale > 0.0):
        raise ValueError(f"least_squares: f_scale must be one positive number, but got {scale!r}.")
    if loss == "linear":
        return None
    return partial(_weighted, np.errstate(all="ignore")(LOSSES[loss]) if isinstance(loss, str) else loss, float(scale))


class ResidualEvaluation:
    """Residuals and derivatives at the root's variables, on all ranks; if it `gathers`, `counts` are the ranks' lengths."""

    def __init__(
        self, program: Program, packing: Packing, agreement: StageFailures, channel: Channel, comm: Comm,
        loss: Loss | None, solver: str | None,
    ):  # fmt: skip
        self._program, self.packing, self.agreement = program, packing, agreement
        self._comm = comm
        self._is_root = channel.rank == program.root
        self.loss = loss
        self.gathers = packing.size > _MAX_DENSE if solver is None else solver == "lsmr"
        self.gathers &= packing.size > 1  # SciPy needs at least two dimensions
        self.counts: list[int] = []
        self.weights = np.zeros(0)  # on the root, for `cotangent`
        self._key = b""  # of the point whose residuals and linearization are stored
        self._f = np.zeros(0)
        self._linearized: Any = None
        self._rows: tuple[bytes, np.ndarray] | None = None  # of the last iterate, for further trials from there
        self._at_start = StartValues()

    def not_finite(self, vector: np.ndarray) -> str:
        """Return a sentence about the ranks whose residuals or `args` aren't finite at x0; collective."""
        return self._at_start.not_finite(self._comm, self._program.args)

    def residuals(self, vector: np.ndarray) -> np.ndarray | None:
        """Return, on the root, all ranks' residuals, in the order of ranks, if it gathers them; otherwise their sums."""
        f = self._residuals(vector)
        if not self.gathers:  # twice the cost and the sum of squares of the weighted residuals, shape (2,)
            local = np.array(self.agreement.run(lambda: self.weighted(f)[:2]))
            return reduced_on_root(self._comm, self._program.root, local)
        if not self.counts:
            self.counts = self._comm.allgather(f.size)
        return self._gathered(self.agreement.run(lambda: self._as_vector(f)))

    def weighted(self, f: np.ndarray) -> tuple[float, float, np.ndarray, np.ndarray | None]:
        """Return twice this rank's cost; the sum of squares of the weighted residuals; these residuals; their factors."""
        twice, model, factors = (0.0, f, None) if self.loss is None else self.loss(f)
        with np.errstate(over="ignore", invalid="ignore"):  # as in the loss: at a trial point, residuals may be huge
            square = float(model @ model)
        return square if factors is None else twice, square, model, factors

    def _as_vector(self, values: object, size: int | None = None) -> np.ndarray:
        """Return residuals or tangents as a vector; raise unless their number is `size`, or that of the first call."""
        values = np.ascontiguousarray(values, dtype=float).reshape(-1)
        size = self.counts[self._comm.rank] if size is None and self.counts else size
        if size is not None and values.size != size:
            got = f"{size} and then {values.size}"
            raise WrongValueError(f"least_squares: fun must return the same number of residuals each time, but got {got}.")
        return values

    def _gathered(self, f: np.ndarray) -> np.ndarray | None:
        whole = np.empty(sum(self.counts)) if self._is_root else None
        self._comm.Gatherv(f, None if whole is None else (whole, self.counts), self._program.root)
        return whole

    def factor(self, vector: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Return, on the root, the QR factor R of [f, J], weighted by the loss, shape (n + 1, n + 1), and the gradient."""
        f = self._residuals(vector)
        rows = self._jacobian(vector)

        def reduced() -> tuple[np.ndarray, np.ndarray]:
            model, factors = self.weighted(f)[2:]
            weighted = rows if factors is None else rows * factors[:, None]
            # With a robust loss and large outliers, a gradient computed from R would have only half of the digits.
            return _qr_factor(np.column_stack([model, weighted])), model @ weighted

        # The factor R of the stacked factors is that of all rows, since RᵀR is the sum of the ranks' products.
        factors = self._comm.gather(self.agreement.run(reduced), self._program.root)
        if factors is None:
            return None
        return _qr_factor(np.concatenate([r for r, _ in factors])), np.sum([gradient for _, gradient in factors], axis=0)

    def _jacobian(self, vector: np.ndarray) -> np.ndarray:
        """Return this rank's rows of the Jacobian, shape (m_r, n)."""
        if self._rows is not None and self._rows[0] == vector.tobytes():
            return self._rows[1]
        size = self._residuals(vector).size
        x, jac, args = self.packing.unpack(vector), self._program.jac, self._program.args
        if callable(jac):

            def checked() -> np.ndarray:
                # A copy, because the user's function may write its next result into the same array.
                rows, expected = np.array(to_host(jac(x, *args)), dtype=float), (size, self.packing.size)
                if rows.shape != expected:
                    raise WrongValueError(f"least_squares: jac must return shape {expected}, but got {rows.shape}.")
                return rows

            found = self.agreement.run(checked)
        else:
            run, units = self.agreement.run, np.eye(self.packing.size)
            linear = run(lambda: linearize(lambda x: run(lambda: self._call_fun(x)))(x))

            def columns(first: int) -> np.ndarray:
                # Each leaf has the directions along its first axis.
                trees = [flatten(self.packing.unpack(unit)) for unit in units[first : first + _DIRECTIONS]]
                along = zip(*(leaves for leaves, _ in trees))
                leaves = [stack(parts) if is_variable(parts[0]) else parts[0] for parts in along]
                found = linear.jvp(trees[0][1](leaves), batch=True)
                return np.stack([self._as_vector(column, size) for column in found], axis=1)

            groups = range(0, self.packing.size, _DIRECTIONS)
            found = np.concatenate([run(partial(columns, first)) for first in groups], axis=1)
        self._rows = vector.tobytes(), found
        return found

    def _products(self, vector: np.ndarray) -> tuple[Function, Function]:
        """Return functions for this rank's products with the Jacobian and with its transpose."""
        if callable(self._program.jac):
            rows = self._jacobian(vector)
            return lambda v: rows @ v, lambda w: rows.T @ w
        self._residuals(vector)
        stored, packing = self._linearized, self.packing
        return lambda v: self._as_vector(stored.jvp(packing.unpack(v))), lambda w: packing.pack_gradient(stored.vjp(w))

    def tangent(self, vector: np.ndarray, direction: np.ndarray) -> np.ndarray | None:
        """Return, on the root, the product of the Jacobian with a direction."""
        forward, _ = self._products(vector)
        return self._gathered(self.agreement.run(lambda: forward(direction)))

    def cotangent(self, vector: np.ndarray) -> np.ndarray | None:
        """Return, on the root, the product of the transposed Jacobian with the root's `weights`."""
        own = np.empty(self.counts[self._comm.rank])
        self._comm.Scatterv((self.weights, self.counts) if self._is_root else None, own, self._program.root)
        _, transposed = self._products(vector)
        return reduced_on_root(self._comm, self._program.root, self.agreement.run(lambda: transposed(own)))

    def _residuals(self, vector: np.ndarray) -> np.ndarray:
        """Return this rank's residuals, shape (m_r,); store them, since SciPy may request the Jacobian at this point."""
        key = vector.tobytes()
        if self._key != key:
            self._key, self._linearized = b"", None  # frees the memory before the next linearization
            x = self.packing.unpack(vector)
            if self.gathers and not callable(self._program.jac):
                run = self.agreement.run
                self._linearized = run(lambda: linearize(lambda x: run(lambda: self._call_fun(x)))(x))
                f = self._linearized.value
            else:
                f = self.agreement.run(lambda: self._call_fun(x))
            self._key, self._f = key, np.ascontiguousarray(f, dtype=float)
            self._at_start.note("residuals", f)
        return self._f

    def _call_fun(self, x: Tree) -> Array:
        out = self._program.fun(x, *self._program.args)
        if out is None:
            return np.zeros(0)
        out = to_host(out)  # residuals and Jacobian are assembled on the host
        array = out if type(out) in Box.types else anp.array(out)
        dtype = spec_like(array).dtype
        if dtype.kind not in "fiu":
            raise WrongValueError(f"least_squares: fun must return real residuals or None, but got {dtype} {out!r:.60}.")
        return anp.reshape(array, (-1,))


def _qr_factor(rows: np.ndarray) -> np.ndarray:
    """Return the factor R of a QR factorization, padded with rows of zeros to a square matrix."""
    found = np.linalg.qr(rows, mode="r")
    return np.vstack([found, np.zeros((rows.shape[1] - len(found), rows.shape[1]))])


# SciPy's trust region on the root, with the residuals of all ranks.
#
# Let R be the triangular factor of [f, J]. Its first column is (‖f‖, 0, ..., 0) up to a sign, and ‖f + J p‖ = ‖R e₁ + R[:,
# 1:] p‖ for all p. So SciPy gets the first column of R as residuals, and the other columns as Jacobian, with n + 1 rows. J
# isn't needed at trial points, since the first column depends only on ‖f‖. With a robust loss, the cost isn't ‖f‖²/2; an
# additional row passes the cost to the `loss` function that SciPy calls.


_STOPPED = Ending(-2, STOPPED.message)
_LIMIT = Ending(0, "The maximum number of function evaluations is exceeded. Raise max_nfev.")


class _Problem(Iterates):
    """The functions that SciPy calls on the root."""

    def __init__(self, solve: RootDriven, callback: Function | None, file: RootCheckpoint):
        super().__init__(callback, solve, file)
        self._request, self._evaluation = solve.request, solve.evaluation
        self._robust = self._evaluation.loss is not None
        self.last_residuals, self._cost = np.zeros(0), np.nan
        self.counts = {"residuals": 0, "factor": 0, "product": 0}
        self.iterate = self.restore(self.counts)  # the last iterate, at first that of an earlier run
        self.resumed = self._restarted = self.iterate is not None

    def _carry_out(self, method: str, name: str, *vectors: np.ndarray) -> Any:
        found = self._request(method, *vectors)
        self.counts[name] += 1
        return found

    def is_still(self, point: Any) -> bool:
        """Return whether the cost has the value of an earlier run, by an evaluation that isn't counted."""
        return math.isclose(self._cost_of(self._request("residuals", point.x)), point.value, rel_tol=RTOL_OF_VALUES)

    def _cost_of(self, found: np.ndarray) -> float:
        return 0.5 * (self._evaluation.weighted(found)[0] if self._evaluation.gathers else float(found[0]))

    def residuals(self, x: np.ndarray) -> np.ndarray:
        """Return the residuals at x for SciPy."""
        if self.checkpoint.settings is not None and self.iterate is not None and self._evaluation.agreement.end_requested:
            raise EndMethod(INTERRUPTED)
        found: np.ndarray = self._carry_out("residuals", "residuals", x)
        self._cost, self.last_residuals = self._cost_of(found), found
        if not self._evaluation.gathers:
            # For n variables, n + 1 residuals (n + 2 with a loss): the norm of all residuals, the root of twice the cost.
            # SciPy's trust region shrinks if a cost isn't finite.
            self.last_residuals = np.zeros(x.size + 1 + self._robust)
            roots = np.sqrt(found[::-1]) if np.all(np.isfinite(found)) else np.full(2, np.nan)
            self.last_residuals[: 1 + self._robust] = roots[: 1 + self._robust]
        if (self.iterate is None or self._restarted) and not np.all(np.isfinite(self.last_residuals)):
            advice = f"Choose an x0 at which they are finite.{self._request('not_finite', x)}"
            raise ValueError(f"least_squares: the residuals aren't finite at x0. {advice}")
        return self.last_residuals

    def jacobian(self, x: np.ndarray) -> np.ndarray | scipy.sparse.linalg.LinearOperator:
        """Return the Jacobian at x for SciPy: at x0, and at each new iterate."""
        first, self._restarted = self._restarted, False  # the first point of a resumed run is already recorded
        self.iterate = Point(x, self._cost)
        found = self._operator(self.iterate) if self._evaluation.gathers else self._matrix(self.iterate)
        if not first:
            row = self.add_row(self.iterate, self.counts["residuals"])
            if row.iteration > 0:
                self.checkpoint.write_if_due(self.record, self.iterate, self.counts)
                self.call_callback(x, row)
        return found

    def _matrix(self, iterate: Point) -> np.ndarray:
        triangle, iterate.gradient = self._carry_out("factor", "factor", iterate.x)
        # A substitute for the Jacobian, shape (n + 1, n), or (n + 2, n) with a robust loss.
        rows, norm = triangle[:, 1:].copy(), float(self.last_residuals[0])
        if norm > 0.0:
            # With this row, Jᵀf in SciPy is the summed gradient, which is more accurate than its value from R.
            rows[0] = iterate.gradient / norm
        return np.insert(rows, 1, 0.0, axis=0) if self._robust else rows

    def _operator(self, iterate: Point) -> scipy.sparse.linalg.LinearOperator:
        def transposed(weights: np.ndarray) -> np.ndarray:
            self._evaluation.weights = np.array(weights, dtype=float).reshape(-1)
            found = self._carry_out("cotangent", "product", iterate.x)
            # The first product that SciPy requests at a point is the gradient.
            if iterate.gradient is None:
                iterate.gradient = found
            return found

        def forward(direction: np.ndarray) -> np.ndarray:
            return self._carry_out("tangent", "product", iterate.x, np.array(direction, dtype=float).reshape(-1))

        shape = self.last_residuals.size, iterate.x.size
        return scipy.sparse.linalg.LinearOperator(shape, matvec=forward, rmatvec=transposed, dtype=float)  # type: ignore[call-arg]

    def result_at_iterate(self, status: int, message: str) -> scipy.optimize.OptimizeResult:
        """Return the result of a solve that ends at the last iterate."""
        iterate: Point = self.iterate  # type: ignore[assignment]
        gradient = np.full_like(iterate.x, np.nan) if iterate.gradient is None else iterate.gradient
        result = scipy.optimize.OptimizeResult(x=iterate.x, cost=iterate.value, grad=gradient, optimality=iterate.norm)
        result.update(active_mask=np.zeros(iterate.x.size, int), status=status, success=False, message=message)
        result.update(nfev=self.counts["residuals"], njev=len(self.record.rows))
        return result


class Arguments(NamedTuple):
    """The root's arguments for the method, besides the residuals and x0."""

    keywords: dict[str, Any]  # of SciPy's function
    loss: str | Function
    f_scale: float
    tr_solver: str | None
    callback: Function | None
    checkpoint: CheckpointFile | None


def _as_bounds(bounds: Any) -> scipy.optimize.Bounds:
    if isinstance(bounds, scipy.optimize.Bounds):
        return bounds
    try:
        low, high = bounds
    except (TypeError, ValueError):
        raise ValueError(
            f"{_CALL}: bounds must be a pair (low, high) of numbers or arrays, but got {bounds!r:.60}."
        ) from None
    return scipy.optimize.Bounds(low, high)


def run_method(arguments: Arguments, program: Program, x0: Tree, solve: RootDriven) -> dict[str, Any]:
    """Run SciPy's method on the root; return its result without `fun` and `jac`."""
    keywords, loss, f_scale, tr_solver, callback, checkpoint = arguments
    start = solve.packing.pack(x0)
    box = box_of(_as_bounds(keywords["bounds"]), solve.packing, _CALL)
    keywords = {**keywords, "bounds": box}
    description: dict[str, object] = {}
    if checkpoint is not None:
        description = {
            "method": f"least_squares, {keywords['method']}",
            **problem_of(program, solve.packing, start, solve.channel.size),
            "loss": loss if isinstance(loss, str) else "a function",
            "f_scale": float(f_scale),
            "tr_solver": tr_solver,
            "bounds (checksum)": fingerprint(*box),  # type: ignore[misc]
        }
    options = {name: value for name, value in keywords.items() if name not in ("bounds", "method")}  # see `description`
    problem = _Problem(solve, callback, RootCheckpoint(checkpoint, description, options, "least_squares"))
    if problem.checkpoint.result is not None and problem.is_still(problem.iterate):
        return {**problem.checkpoint.result, "history": problem.record.history(), "evaluations": problem.counts}
    if solve.evaluation.gathers:
        solver = {"tr_solver": "lsmr", "loss": loss, "f_scale": f_scale}
    else:
        solver = {"tr_solver": "exact", "loss": "linear" if solve.evaluation.loss is None else _loss_with_cost}
    start = start if problem.iterate is None else problem.iterate.x
    try:
        if problem.resumed:
            limit = 100 * start.size if keywords["max_nfev"] is None else keywords["max_nfev"]  # by default as in SciPy
            keywords = {**keywords, "max_nfev": limit - problem.counts["residuals"]}
            if keywords["max_nfev"] <= 0:
                raise EndMethod(_LIMIT)
        result = scipy.optimize.least_squares(problem.residuals, start, jac=problem.jacobian, **keywords, **solver)
    except StopIteration:
        result = problem.result_at_iterate(*_STOPPED)
    except EndMethod as end:
        result = problem.result_at_iterate(*end.ending)
    outcome = {name: value for name, value in result.items() if name not in ("fun", "jac")}
    outcome["cost"] = problem.iterate.value  # type: ignore[union-attr]  # SciPy's cost has the rounding error of a square root
    history = problem.record.history()
    if problem.resumed:  # SciPy counts from the restart
        outcome["nfev"], outcome["njev"] = problem.counts["residuals"], len(history.loss)
    outcome["nit"] = len(history.loss) - 1
    problem.checkpoint.write_if_due(problem.record, problem.iterate, problem.counts, outcome)
    return {**outcome, "history": history, "evaluations": problem.counts}


def _loss_with_cost(z: np.ndarray) -> np.ndarray:
    """Return ρ and its derivatives for SciPy, for a robust loss; z: squared surrogate residuals, z[1]: twice the cost."""
    rho = np.zeros((3, z.size))
    rho[0, 1] = z[1]
    rho[1] = 1.0
    return rho


_CALL = "least_squares"
# Up to this number of variables the Jacobian is computed as a matrix, by products with unit vectors, several at a time.
_MAX_DENSE, _DIRECTIONS = 100, 16


@recoverable(_CALL, make_error=partial(common_error, call=_CALL))
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
    options: dict | None = None,
    progress: bool = False,
) -> scipy.optimize.OptimizeResult:
    """Minimize half the sum of the squares of all ranks' residuals, by Gauss-Newton steps in a trust region.

    The root holds the variables and updates them by SciPy's `least_squares`. Residuals and Jacobian are distributed.

    Parameters
    ----------
    fun : callable
        ``fun(x, *args)`` is called on every rank with the root's x and returns this rank's residuals: an array of any
        shape, or None if it has no residuals.
    x0 : pytree of arrays
        The starting point. It is used on the root; other ranks pass None or the same pytree. A complex number a + ib is
        the two variables a, b in the flattened pytree.
    jac : callable, optional
        ``jac(x, *args)`` returns the derivatives of this rank's residuals, shape (m_r, n), with respect to the variables in
        the order of the flattened pytree. By default they are computed by differentiation of the whole program.
    bounds : pair (low, high) or scipy.optimize.Bounds, optional
        As in SciPy: numbers, or arrays of shape (n,). Bounds are used on the root only, as are tolerances, `x_scale`,
        `max_nfev`, `tr_options` and the callback.
    method : {"trf", "dogbox"}
        SciPy's trust-region reflective or dogleg algorithm.
    ftol, xtol, gtol : float or None
        SciPy's tolerances of the changes of cost and variables, and of the gradient.
    x_scale : float, array of shape (n,), or "jac"
        "jac" needs the "exact" solver.
    max_nfev : int, optional
        Maximum number of evaluations; 100 n by default.
    tr_options : dict, optional
        Further options of the solver, as in SciPy.
    loss : {"linear", "soft_l1", "huber", "cauchy", "arctan"} or callable
        The robust loss, which reduces the weight of outliers. A function is called with squared residuals z, shape (m,),
        and returns ρ(z) and its first two derivatives, shape (3, m).
    f_scale : float
        Residuals with larger absolute values are treated as outliers.
    tr_solver : {"exact", "lsmr"}, optional
        With "exact", the default for up to 100 variables, each rank factorizes its own rows of the Jacobian, which
        `linearize` computes if `jac` isn't given, and the root stores (n + 1)² numbers per rank. "lsmr", the default for
        more variables, needs at least two variables. It uses products with the Jacobian; the root stores several vectors
        of the residuals of all ranks.
    callback : callable, optional
        As in `minimize`; `fun` of its OptimizeResult is the cost.
    root : int
    comm : mpi4py intracommunicator, optional
    args : tuple
        Further arguments of `fun` and `jac`, which may differ between ranks.
    checkpoint : path or CheckpointFile, optional
        As in `minimize`: the root writes the last iterate, and the same call restarts from it, or returns the result if the
        solve has converged. `max_nfev` counts the evaluations of all runs.
    options : dict, optional
        ``{"on_signal": "return"}``, as in `minimize`.
    progress : bool
        As in `minimize`, with `max_nfev` as the limit.

    Returns
    -------
    scipy.optimize.OptimizeResult
        SciPy's `x`, `cost`, `grad`, `optimality`, `active_mask`, `nfev`, `njev`, `status`, `message` and `success`, with
        `x` and `grad` in the structure of x0; `fun` and `jac`, which are distributed, are omitted. Also `nit`, and

        - `history`: as in `minimize`; its `loss` is the cost;
        - `evaluations`: numbers of evaluations: "residuals", "factor" (the Jacobian), "product".

    Raises
    ------
    TypeError, ValueError
        On all ranks, if an argument on any of them is invalid, `fun` doesn't return real numbers or None, the residuals
        aren't finite at x0, the checkpoint is damaged or belongs to another problem, or an x0 differs from the root's.
    WorkerError
        On all ranks, if an evaluation raises on any rank, as in `minimize`.
    SystemExit
        On all ranks, after a signal, as in `minimize`.

    Ranks
    -----
    All ranks of `comm` call it, with the same loss, f_scale, method, tr_solver and root. The result is bitwise the same on
    all ranks.

    Adjoint
    -------
    None: the result is a constant in every trace.

    Examples
    --------
    >>> rank = mpiad.mpi_rank()
    >>> result = mpiad.optimize.least_squares(lambda x: (rank + 1) * (x - np.array([1.0, 2.0])), np.zeros(2))
    >>> print(np.round(result.x, 4))
    [1. 2.]
    """
    used = channel(comm, _CALL)
    program = Program(fun, jac, None, args if isinstance(args, tuple) else (args,), "sum", root)
    keywords = {"bounds": bounds, "method": method, "ftol": ftol, "xtol": xtol, "gtol": gtol, "x_scale": x_scale}
    keywords |= {"max_nfev": max_nfev, "tr_options": {} if tr_options is None else tr_options}
    with restoring_state(), suspended():
        with raising_together(used, Exception):
            file = as_checkpoint(checkpoint, _CALL, used.rank == root)
            others, on_signal = without_on_signal(options, _CALL)
            if others:
                raise ValueError(f"{_CALL}: the only option is 'on_signal', but got options={options!r:.80}.")
            check_program(program, used, _CALL)
            if jac is True:
                raise TypeError(
                    "least_squares: jac must be a function that returns this rank's rows, or None, but got True."
                )
            if method not in ("trf", "dogbox"):
                raise ValueError(f"least_squares: method must be 'trf' or 'dogbox', but got {method!r}.")
            if tr_solver not in (None, "exact", "lsmr"):
                raise ValueError(f"least_squares: tr_solver must be 'exact', 'lsmr' or None, but got {tr_solver!r}.")
            robust = loss_of(loss, f_scale)
            start = sendable_variables(x0, _CALL) if used.rank == root else None
        # Either all ranks or none must pass `jac`, because differentiation of `fun` repeats its communication.
        described = f"loss={loss if isinstance(loss, str) else 'a function'}, f_scale={float(f_scale)!r}, "
        described += f"tr_solver={tr_solver!r}, method={method!r}, root={root}, jac={None if jac is None else 'a function'}"
        described += "" if file is None else f", a checkpoint every {file.every} iterations"
        require_same(used, described, _CALL)
        start = shared_start(used, root, start, x0, program.args, _CALL)
        bar = Progress(keywords) if progress else None
        factory = partial(ResidualEvaluation, loss=robust, solver=tr_solver)
        solve = RootDriven(used, root, [program], factory, _CALL, progress=bar)
        solve.define(0, start)
        with solve.ending(file, bar, on_signal):
            arguments = Arguments(keywords, loss, f_scale, tr_solver, callback, file)
            return result_like_x0(solve, partial(run_method, arguments, program, start))
