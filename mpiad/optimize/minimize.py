"""`minimize`, `mpi_optimize` and `Domain.minimize`: the root runs SciPy's methods, and all ranks evaluate the objective.

The root makes every decision (another trial, stop, a limit, an error) and sends it to all ranks. `root_driven` begins and
ends a solve, and sends the root's instructions, `objective_evaluation` executes them,
`transport.exits.user_failures` raises a failure on one rank on all ranks, `evaluated_points` stores evaluated points, and
`scipy_methods` runs the method and corrects its result. The package `sharded` contains the methods for distributed
variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from os import PathLike
from typing import Any

import scipy

from mpiad._typing import Comm, Function, Rank
from mpiad.domain.decomposition import Decomposition, checked_block
from mpiad.optimize.checkpoint import CheckpointFile, as_checkpoint, without_on_signal
from mpiad.optimize.history import Progress
from mpiad.optimize.iterates import MinimizeResult, X, result_like_x0
from mpiad.optimize.objective_evaluation import Evaluation, Program, check_program
from mpiad.optimize.packing import as_variables, sendable_variables
from mpiad.optimize.root_driven import RootDriven, shared_start
from mpiad.optimize.scipy_methods import MethodArguments, method_named, run_method
from mpiad.optimize.sharded import Sharded, check_local_arguments
from mpiad.optimize.sharded.convergence import compared_settings
from mpiad.primitives.operation import suspended
from mpiad.pytrees import flatten, is_variable
from mpiad.transport import channel
from mpiad.transport.core.agreement import raising_together, require_same
from mpiad.transport.core.tracing import restoring_state
from mpiad.transport.devices.device_arrays import is_array
from mpiad.transport.exits.recovery import recoverable
from mpiad.transport.exits.user_failures import common_error


@recoverable("minimize", make_error=common_error)
def minimize(
    fun: Function,
    x0: X | None = None,
    *,
    method: str = "L-BFGS",
    jac: Function | bool | None = None,
    hessp: Function | None = None,
    bounds: Sequence | scipy.optimize.Bounds | None = None,
    constraints: Sequence | dict | scipy.optimize.LinearConstraint | scipy.optimize.NonlinearConstraint = (),
    root: Rank = 0,
    comm: Comm = None,
    tol: float | None = None,
    options: dict | None = None,
    callback: Function | None = None,
    objective: str = "root",
    args: tuple = (),
    checkpoint: str | PathLike[str] | CheckpointFile | None = None,
    progress: bool = False,
) -> MinimizeResult[X]:
    """Minimize the objective of all ranks, with the variables on the root or distributed over the ranks.

    The root updates the variables by one of SciPy's methods, and all ranks evaluate the objective at its request. With
    "L-BFGS-sharded", "Newton-CG-sharded" and "MMA-sharded" each rank holds and updates its own variables.

    Parameters
    ----------
    fun : callable
        ``fun(x, *args)`` is called on every rank with the root's x and returns this rank's term L_r of the objective,
        one real number.
    x0 : pytree of arrays
        The starting point. It is used on the root; other ranks pass None or the same pytree. With a sharded method it is
        this rank's own part of the variables, of any structure and size (for blocks of a `Domain` use `Domain.minimize`). A
        list of numbers is treated as an array. The variables of the method are the real and imaginary parts of complex
        numbers: a + ib is the two variables a, b in the flattened pytree.
    method : str
        "L-BFGS" (SciPy's L-BFGS-B), "BFGS", "CG", "TNC", "SLSQP", "Newton-CG", "trust-ncg", "trust-krylov",
        "trust-constr", "L-BFGS-sharded", "Newton-CG-sharded" or "MMA-sharded" (method of moving asymptotes).
    jac : callable or True, optional
        ``jac(x, *args)`` returns the gradient of L_r, in the structure of x. If it is True, `fun` returns
        ``(L_r, gradient)``. By default `value_and_grad` computes it, with ``shared=True``. With sharded methods it is the
        gradient of the objective with respect to this rank's variables. For a complex variable a + ib it is ∂/∂a - i ∂/∂b,
        as in `value_and_grad`.
    hessp : callable, optional
        ``hessp(x, v, *args)`` returns the Hessian of L_r times v, for methods that use it. By default `make_hvp` computes
        it. With "Newton-CG-sharded" it is this rank's part of the product with the Hessian of the objective.
    bounds : (low, high), sequence of (low, high) or scipy.optimize.Bounds, optional
        One pair of bounds for all variables, or one for each variable in the order of the flattened pytree; for "L-BFGS",
        "TNC", "SLSQP" and "trust-constr". They are used on the root only, as are `constraints`, `tol`, `options` and
        `callback`. With sharded methods the bounds are those of this rank's own variables; `tol` and `options` must then be
        the same on all ranks. "MMA-sharded" needs finite bounds for all variables.
    constraints : LinearConstraint, NonlinearConstraint, dict, or a list of them, optional
        SciPy's constraints, for "SLSQP" and "trust-constr". Their functions are called on the root only, with the variables
        in the structure of x0, and must not communicate. Their Jacobians are those with respect to the flattened variables,
        shape (k, n); by default they are computed by differentiation. A LinearConstraint applies to the flattened
        variables. With sharded methods, all ranks call the functions with their own variables, and `objective` applies to
        the values. Jacobians and the matrix of a LinearConstraint have this rank's columns; limits are the same on all
        ranks. "MMA-sharded" takes inequality constraints, "L-BFGS-sharded" LinearConstraint(A, b, b).
    root : int
    comm : mpi4py intracommunicator, optional
    tol : float, optional
        Passed to SciPy.
    options : dict, optional
        Passed to SciPy. Every method also has the options `maxfun`: the maximum number of evaluations of the objective,
        including line searches (x0 is always evaluated); and `on_signal`: with "return", after a signal all ranks return
        a result with status 143 instead of ending the job. "L-BFGS-sharded" has the options `m` (or `maxcor`), `gtol`,
        `ftol`, `maxiter`, `maxfun` and `maxls`, with the defaults of SciPy's L-BFGS-B; `gtol` is a tolerance of the largest
        entry of the gradient on any rank. "Newton-CG-sharded" has the following options. `product`: "full"; or
        "gauss-newton", for a `fun` that returns this rank's residuals; the objective is then half the sum of their
        squares. `regularizer`: with "gauss-newton", a function of x that is added to the objective. `globalization`: "line
        search" or "trust region". `preconditioner` and `inner_product`: functions that return the product of a vector with
        an approximate inverse Hessian, and with R⁻¹ for the inner product uᵀ R v; or objects with such a method `solve`.
        `gtol` and `grtol`: tolerances of the gradient's norm in the inner product, absolute and relative to that at x0.
        `loss` and `f_scale`: with "gauss-newton", a robust loss, as in `least_squares`. `noise_precision`: with
        "gauss-newton", a function that returns the product of residuals with the inverse covariance of the observation
        error, or an object with such a method `apply`. `forcing`: tolerance of the relative residual of each Newton system;
        by default it decreases with the gradient, and is that of the solve for linear problems. The other options are
        `ftol`, `maxiter`, `maxfun`, `maxls`, `maxcg` and `radius`. "MMA-sharded" has the options `gtol`, `catol` (tolerance
        of the violation of constraints), `xtol` (tolerance of the largest change of a variable, relative to the distance of
        its bounds), `conservative` (whether the objective must fall in each iteration from a feasible point: GCMMA),
        `maxiter`, `maxfun`, `maxls`, `move`, `asyinit`, `asymin`, `asyincr` and `asydecr`.
    callback : callable, optional
        Called on the root after each iteration, as in SciPy: ``callback(x)``, or with an OptimizeResult if its only
        parameter is named `intermediate_result`. It must not communicate. If it raises StopIteration, the solve ends. With
        sharded methods the callback of each rank is called with its variables.
    objective : {"root", "sum", "mean"}
        The objective: L_root, the sum of all L_r, or their mean.
    args : tuple
        Further arguments of `fun`, `jac` and `hessp`, which may differ between ranks.
    checkpoint : path or CheckpointFile, optional
        File for the state of the solve, written atomically every 10 iterations (or as set by
        `mpiad.optimize.CheckpointFile`) and at the end. If it exists, the solve resumes from it. With sharded methods each
        rank writes its own files next to this path; a solve then resumes bit for bit on the same number of ranks, and up to
        rounding on another. Other methods resume from the last iterate. If the solve has converged, its result is returned.
        After SIGTERM on any rank the solve ends after the current iteration, the state is written, and the job ends.
    progress : bool
        Whether the root shows its progress on standard error: each iterate, and an estimate of the remaining time if
        `maxiter` or `maxfun` is among the options.

    Returns
    -------
    MinimizeResult
        SciPy's fields, with `x`, `fun` and `jac`, the value and the gradient at `x`, in the structure of x0, and

        - `history`: its attributes are arrays with an entry for the starting point and each iterate: `history.loss`,
          `gradient_norm` (largest entry), `step` (length of the step), `evaluations` and `seconds` since the start;
        - `evaluations`: numbers of evaluations: "value", "gradient" (alone), "both", "product";
        - `constr_jac`: with "trust-constr", the Jacobians of the constraints, which SciPy calls `jac`.

        If a limit is reached, the result is the best point found, with ``success=False``. The same holds if a method ends
        at a point at which the objective isn't finite, or is higher than at an earlier point. In the latter case `success`
        is True if the method succeeded and the gradient at the earlier point isn't larger. "MMA-sharded" returns the last
        iterate, with `constr` and `v` (values and multipliers of each constraint) and `constr_violation`.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if an argument on any of them is invalid, `fun` doesn't return a real number, or the checkpoint is
        damaged or belongs to another problem. A ValueError is raised also if the constraints of a sharded method can't be
        met.
    ReplicationError
        A ValueError, on all ranks, if the x0 of any rank differs from the root's. It isn't raised with sharded methods.
    WorkerError
        On all ranks, if an evaluation raises on any rank; it contains the traceback of the failed rank. The communicator is
        usable afterwards. If other ranks wait for the failed rank inside a communication, and the MPI library can't
        interrupt them, the job is aborted with this traceback.
    SystemExit
        On all ranks, if any rank has received SIGTERM (code 143), or another signal of the checkpoint (128 + its number),
        unless the option `on_signal` is "return".

    Ranks
    -----
    All ranks of `comm` call it, with the same method, objective, root and types of `jac` and `hessp`. The result is bitwise
    the same on all ranks. With sharded methods `x` and `jac` are this rank's own part, and times differ.

    Adjoint
    -------
    None: the result is a constant in every trace.

    Examples
    --------
    >>> result = mpiad.minimize(lambda x: mpiad.mpi_allreduce(np.sum((x - 3.0) ** 2)), np.zeros(2))
    >>> print(np.round(result.x, 4))
    [3. 3.]
    """
    used = channel(comm, "minimize")
    jac = None if jac is False else jac  # as in SciPy, False means "not given"
    program = Program(fun, jac, hessp, args if isinstance(args, tuple) else (args,), objective, root)
    with restoring_state(), suspended():
        start, local, settings = None, None, ""
        # Invalid arguments are reported before differences between ranks, since invalid arguments often differ, too.
        with raising_together(used, Exception):
            chosen = method_named(method)
            file = as_checkpoint(checkpoint, "minimize", writes=chosen is None or used.rank == root)
            options, on_signal = without_on_signal(options, "minimize")
            arguments = MethodArguments(bounds, constraints, tol, options, callback, file)
            check_program(program, used, "minimize")
            if chosen is None:
                local = check_local_arguments(method, as_variables(x0), arguments)
                limits = [(each.low.tolist(), each.high.tolist()) for each in local.constraints]
                settings = f", {compared_settings(local.settings)}" + (f", constraints={limits}" if limits else "")
                if callback is not None and not callable(callback):
                    got = f"{type(callback).__name__} {callback!r:.60}"
                    raise TypeError(f"minimize: callback must be callable, but got {got}.")
            elif used.rank == root:
                start = sendable_variables(x0, "minimize")
        functions = f"jac={'a function' if callable(jac) else jac}, hessp={'none' if hessp is None else 'a function'}"
        described = f"method={method!r}, objective={objective!r}, root={root}, {functions}{settings}"
        described += "" if file is None else f", a checkpoint every {file.every} iterations"
        require_same(used, described, "minimize")
        bar = Progress(options) if progress else None
        if chosen is None:
            solve = Sharded(used, program, local)  # type: ignore[arg-type]
            with solve.ending(file, bar, on_signal):
                return MinimizeResult(solve.run(callback, bar))
        start = shared_start(used, root, start, x0, program.args, "minimize")
        solve = RootDriven(used, root, [program], Evaluation, "minimize", progress=bar)
        solve.define(0, start)
        with solve.ending(file, bar, on_signal):
            return MinimizeResult(result_like_x0(solve, partial(run_method, chosen, arguments, program, start)))


def mpi_optimize(
    f: Function,
    g: Function,
    x0: X | None = None,
    method: str = "L-BFGS",
    *,
    bounds: Sequence | scipy.optimize.Bounds | None = None,
    constraints: Sequence | dict | scipy.optimize.LinearConstraint | scipy.optimize.NonlinearConstraint = (),
    root: Rank = 0,
    comm: Comm = None,
    tol: float | None = None,
    options: dict | None = None,
    callback: Function | None = None,
    objective: str = "root",
    args: tuple = (),
    checkpoint: str | PathLike[str] | CheckpointFile | None = None,
    progress: bool = False,
) -> MinimizeResult[X]:
    """Minimize f with its gradient g; all ranks evaluate f and g at the request of the root.

    Parameters
    ----------
    f : callable
        ``f(x, *args)`` returns this rank's term L_r of the objective, one real number.
    g : callable
        ``g(x, *args)`` returns the gradient of this rank's L_r, in the structure of x. With ``objective="root"`` only the
        root's result is used. For an `f` that communicates, pass ``mpiad.grad(f, shared=True)``.
    x0 : pytree of arrays
        The starting point. It is used on the root; other ranks pass None or the same pytree.
    method, bounds, constraints, root, comm, tol, options, callback, objective, checkpoint, progress
        As in `minimize`.
    args : tuple
        Further arguments of f and g, which may differ between ranks.

    Returns
    -------
    MinimizeResult
        As in `minimize`, also for exceptions and the adjoint.

    Ranks
    -----
    All ranks of `comm` call it. They then call f and g together, in the same order. The result is bitwise the same on all
    ranks.

    Examples
    --------
    >>> result = mpiad.mpi_optimize(lambda x: np.sum((x - 3.0) ** 2), lambda x: 2 * (x - 3.0), np.zeros(2))
    >>> print(np.round(result.x, 4))
    [3. 3.]
    """
    # None and booleans have other meanings in `minimize`; it raises a TypeError for the string that replaces them.
    jac: Any = repr(g) if g is None or isinstance(g, bool) else g
    solver = {"method": method, "bounds": bounds, "constraints": constraints, "tol": tol, "options": options}
    output = {"callback": callback, "checkpoint": checkpoint, "progress": progress}
    return minimize(f, x0, jac=jac, root=root, comm=comm, objective=objective, args=args, **solver, **output)


def minimize_field(
    domain: Decomposition, fun: Function, x0: X, method: str,
    checkpoint: str | PathLike[str] | CheckpointFile | None, **keywords: Any,
) -> MinimizeResult[X]:  # fmt: skip
    """See `Domain.minimize`."""
    call = "Domain.minimize"
    with raising_together(domain._channel):
        if not (isinstance(method, str) and method.lower().endswith("-sharded")):
            raise ValueError(
                f"{call}: method must be 'L-BFGS-sharded', 'Newton-CG-sharded' or 'MMA-sharded', for which each rank has "
                f"its own block, but got {method!r}. Use mpiad.minimize for methods that need all variables on the root."
            )
        for leaf in [x0] if is_array(x0) else filter(is_variable, flatten(x0)[0]):
            checked_block(domain, leaf, call)
    file = CheckpointFile(checkpoint) if isinstance(checkpoint, (str, PathLike)) else checkpoint
    # The files contain the positions of blocks, so that any number of ranks can read them.
    if isinstance(file, CheckpointFile) and file.blocks is None:
        file = file._replace(blocks=domain.owned)
    return minimize(fun, x0, method=method, comm=domain.comm, checkpoint=file, **keywords)
