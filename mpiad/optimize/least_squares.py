"""`least_squares`: the root drives SciPy's trust region, and the residuals stay on their ranks.

What each file does: `residuals.residual_evaluation` carries out the root's instructions, `residuals.trust_region` makes the
small problem that SciPy solves in place of the large one, and runs it, `residuals.loss` weighs outliers. The rest is that
of `minimize`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from os import PathLike

import numpy as np
import scipy

from mpiad._typing import Comm, Function, Rank, Tree
from mpiad.optimize.checkpoint import CheckpointFile, as_checkpoint
from mpiad.optimize.history import Progress
from mpiad.optimize.objective_evaluation import Program, check_program
from mpiad.optimize.packing import tellable_variables
from mpiad.optimize.residuals.loss import Loss, loss_of
from mpiad.optimize.residuals.residual_evaluation import ResidualEvaluation
from mpiad.optimize.residuals.trust_region import Aims, descend
from mpiad.optimize.root_driven import RootDriven
from mpiad.optimize.root_start import shared_start
from mpiad.primitives.operation import suspended
from mpiad.transport import Channel, channel
from mpiad.transport.agreement import raising_together, require_same
from mpiad.transport.recovery import recoverable
from mpiad.transport.tracing import restoring_state
from mpiad.transport.user_failures import verdict

_CALL = "least_squares"
# So many variables are a matrix for the root; each takes a pass of the function for every new iterate.
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
    """Minimise half the sum of the squares of all ranks' residuals, by Gauss-Newton steps in a trust region.

    The root holds and updates the variables by SciPy's `least_squares`; the other ranks wait for its instructions. The
    residuals and the Jacobian stay on their ranks.

    Parameters
    ----------
    fun : callable
        ``fun(x, *args)`` is called on every rank with the root's x and returns this rank's residuals: an array of any
        shape, or None for none.
    x0 : nest of arrays
        The starting point. Counts on the root only: other ranks give None or the same.
    jac : callable, optional
        ``jac(x, *args)`` returns the derivatives of this rank's residuals, shape (m_r, n), by the variables in the order
        of the flattened nest. By default they are found by differentiation of the whole program.
    bounds : pair (low, high) or scipy.optimize.Bounds, optional
        As in SciPy: numbers, or arrays of shape (n,). Counts on the root only, as do tolerances, scales, limits and the
        callback.
    method : {"trf", "dogbox"}
    ftol, xtol, gtol : float or None
    x_scale : float, array of shape (n,), or "jac"
        "jac" needs the "exact" solver.
    max_nfev : int, optional
        A hard cap; 100 n by default.
    tr_options : dict, optional
    loss : {"linear", "soft_l1", "huber", "cauchy", "arctan"} or callable
        How much outliers count. A function is called with squared residuals z, shape (m,), and returns ρ(z) and its first
        two derivatives, shape (3, m).
    f_scale : float
        Residuals beyond it are outliers. Same on all ranks.
    tr_solver : {"exact", "lsmr"}, optional
        "exact" (by default for up to 100 variables): each rank factorises its own rows of the Jacobian, and the root holds
        (n + 1)² numbers for each rank. "lsmr" (by default for more): products with the Jacobian, by `make_jvp` and
        `make_vjp`, for two variables or more; the root holds some vectors as long as all residuals together.
    callback : callable, optional
        As in `minimize`; `fun` of its OptimizeResult is the cost.
    root : int
    comm : mpi4py intracommunicator, optional
    args : tuple
        Further arguments of `fun` and `jac`: this rank's own.
    checkpoint : path or CheckpointFile, optional
        As in `minimize`: the root writes the last iterate, and the same call starts anew from there. `max_nfev` counts the
        evaluations of all runs.
    progress : bool
        As in `minimize`, with `max_nfev` for the limit.

    Returns
    -------
    scipy.optimize.OptimizeResult
        SciPy's `x`, `cost`, `grad`, `optimality`, `active_mask`, `nfev`, `njev`, `status`, `message` and `success`, with
        `x` and `grad` in the form of x0; without `fun` and `jac`, which are as long as the residuals. And `nit`, and

        - `history`: as in `minimize`; its `loss` is the cost;
        - `evaluations`: how often each was evaluated: "residuals", "factor" (the Jacobian), "product".

    Raises
    ------
    TypeError, ValueError
        On all ranks, where an argument on any of them is wrong, `fun` returns anything but real numbers or None, or the
        residuals aren't finite at x0, or the checkpoint is damaged or belongs to another problem, or x0 isn't the root's.
    WorkerError
        On all ranks, where an evaluation raises on any, as in `minimize`.

    Ranks
    -----
    All ranks of `comm` call it, with the same loss, f_scale, method, tr_solver and root. The result is the same on all,
    bit for bit.

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
    """Check the arguments on all ranks; return the root's x0 as a nest of variables, the loss and the checkpoint."""
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
    # Whether there is one must be the same everywhere: columns found by differentiation run the function's messages.
    jac = None if program.jac is None else "a function"
    # As the number that it is: 1 and 1.0 are the same scale, and a 0.1 of single precision isn't one of double.
    described = f"loss={named}, f_scale={float(scale)!r}, tr_solver={solver!r}, method={method!r}, root={program.root}"
    described += f", jac={jac}"
    described += "" if kept is None else f", a checkpoint every {kept.every} iterations"
    require_same(used, described, _CALL)
    return shared_start(used, program, start, x0, _CALL), weigh, kept
