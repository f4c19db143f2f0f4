"""`minimize`: the root drives one of SciPy's methods, and all ranks evaluate; `mpi_optimize`, with two functions.

Every decision (another trial, stop, a limit, an error) is made on the root and sent to all, so that no two ranks can
disagree on whether another evaluation follows. The files: `root_driven` begins and ends a solve,
`root_protocol` sends the root's instructions, `objective_evaluation` executes them, `transport.user_failures` makes a
failure on one rank known to all, `evaluated_points` stores evaluated points, `scipy_methods` runs the method and corrects
its result. The package `sharded` holds the methods that leave the variables on their ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from os import PathLike
from typing import Any

import numpy as np
import scipy

from mpiad._typing import Comm, Function, Rank, Tree
from mpiad.optimize.checkpoint import CheckpointFile, as_checkpoint
from mpiad.optimize.history import Progress
from mpiad.optimize.objective_evaluation import Program, check_program
from mpiad.optimize.packing import as_variables, sendable_variables
from mpiad.optimize.root_driven import RootDriven, shared_start
from mpiad.optimize.scipy_methods import MethodArguments, drive, is_sharded, method_named
from mpiad.optimize.sharded import Piece, Sharded, piece_of
from mpiad.primitives.operation import suspended
from mpiad.transport import Channel, channel
from mpiad.transport.agreement import raising_together, require_same
from mpiad.transport.recovery import recoverable
from mpiad.transport.tracing import restoring_state
from mpiad.transport.user_failures import verdict


@recoverable("minimize", verdict=verdict)
def minimize(
    fun: Function,
    x0: Tree = None,
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
) -> scipy.optimize.OptimizeResult:
    """Minimize the objective of all ranks, with the variables on the root or distributed over the ranks.

    The root updates the variables by one of SciPy's methods; the other ranks wait for its instruction to evaluate. With
    "L-BFGS-sharded" and "Newton-CG-sharded" each rank has its own variables, and nothing is gathered.

    Parameters
    ----------
    fun : callable
        ``fun(x, *args)`` is called on every rank with the root's x and returns this rank's L_r, one real number.
    x0 : pytree of arrays
        The starting point. Only the root's counts: other ranks give None or the same. With a sharded method it is this
        rank's own part of the variables, of any form and size; for blocks of a `Domain` there is `Domain.minimize`. A list
        of numbers is treated as an array.
    method : str
        "L-BFGS" (SciPy's L-BFGS-B), "BFGS", "CG", "TNC", "SLSQP", "Newton-CG", "trust-ncg", "trust-krylov",
        "trust-constr", "L-BFGS-sharded" or "Newton-CG-sharded".
    jac : callable or True, optional
        ``jac(x, *args)`` returns the gradient of L_r, in the form of x; True: `fun` returns ``(L_r, gradient)``. By
        default `value_and_grad` computes it as the gradient with respect to one variable that all ranks share. With
        sharded methods it is the gradient of J with respect to this rank's variables.
    hessp : callable, optional
        ``hessp(x, v, *args)`` returns the Hessian of L_r times v. By default `make_hvp` computes it, for methods that use
        it. With "Newton-CG-sharded" it is this rank's part of the product with the Hessian of J.
    bounds : sequence of (low, high) or scipy.optimize.Bounds, optional
        Bounds of the variables in the order of the flattened pytree, for "L-BFGS", "TNC", "SLSQP" and "trust-constr". Only
        the root's count, as for `constraints`, `tol`, `options` and `callback`. With sharded methods: of this rank's own
        variables; `tol` and `options` are the same on all ranks.
    constraints : LinearConstraint, NonlinearConstraint, dict, or a list of them, optional
        SciPy's, for "SLSQP" and "trust-constr". Their functions are called with the variables in the form of x0, on the
        root only: they mustn't communicate. By default their Jacobians with respect to the flattened variables, shape
        (k, n), are found by differentiation. A LinearConstraint applies to the flattened variables.
    root : int
    comm : mpi4py intracommunicator, optional
    tol : float, optional
    options : dict, optional
        Both are passed on to SciPy. Every method also has the option `maxfun`: the maximum number of evaluations of the
        objective, including line searches (x0 is always evaluated). "L-BFGS-sharded" has the options `m` (or
        `maxcor`), `gtol`, `ftol`, `maxiter`, `maxfun` and `maxls`, by default those of SciPy's L-BFGS-B; `gtol` is for
        the largest entry on any rank. "Newton-CG-sharded" has `product` ("full", or "gauss-newton", if `fun` returns
        this rank's residuals and the objective is half the sum of their squares), `regularizer` (added to that, as a
        function of x), `globalization` ("line search" or "trust region"), `preconditioner` and `inner_product` (functions
        that return the product of an approximate inverse Hessian, or of the inverse of the inner product, with a vector; or
        objects with such a method `solve`), `gtol` and `grtol` (of the gradient's norm in the inner product, absolute and
        relative to the first one), `ftol`, `maxiter`, `maxfun`, `maxls`, `maxcg` and `radius`.
    callback : callable, optional
        Called on the root after each iteration, as in SciPy: ``callback(x)``, or with an OptimizeResult if its only
        parameter is named `intermediate_result`. It mustn't communicate. If it raises StopIteration, the solve ends. With
        sharded methods each rank's own callback is called with its variables.
    objective : {"root", "sum", "mean"}
        The objective: L_root, the sum of all L_r, or their mean.
    args : tuple
        Further arguments of `fun`, `jac` and `hessp`: this rank's own.
    checkpoint : path or CheckpointFile, optional
        File for the state of the solve, written every 10 iterations (or as set by `mpiad.optimize.CheckpointFile`) and at
        the end, atomically. If it exists, the solve resumes from it. Sharded methods, whose ranks write files of their own
        next to this name, resume bit for bit on the same number of ranks, and up to rounding on another; other methods
        resume from the last iterate. After SIGTERM on any rank the state is written, and all ranks return with status
        143.
    progress : bool
        Whether the root shows its progress on standard error: each iterate, and the maximum remaining time if `maxiter` or
        `maxfun` is among the options. A bar on terminals and in notebooks if tqdm is installed, otherwise lines.

    Returns
    -------
    scipy.optimize.OptimizeResult
        SciPy's fields, with `x` and `jac` in the form of x0, and

        - `history`: the iterates' `loss`, `gradient_norm` (largest entry), `step` (its length), `evaluations` and
          `seconds` since the start, the starting point first;
        - `evaluations`: numbers of evaluations: "value", "gradient" (alone), "both", "product".

        At a limit the result is ``success=False`` and the best point found; likewise if a method ends at a point at which
        the objective isn't finite, or is higher than at an earlier point, unless the gradient at the latter is as small.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if an argument on any of them is invalid, `fun` doesn't return a real number, or the checkpoint is
        damaged or belongs to another problem.
    ReplicationError
        A ValueError, on all ranks, if one gives another x0 than the root to a method that takes the root's.
    WorkerError
        On all ranks, if an evaluation raises on any, with that rank's traceback; the communicator is usable afterwards. If
        other ranks wait for that rank inside a communication, and the MPI library can't interrupt them, the job ends with
        its traceback.

    Ranks
    -----
    All ranks of `comm` call it, with the same method, objective, root and kinds of `jac` and `hessp`. The result is
    bitwise the same on all ranks; with sharded methods except for `x` and `jac`, which hold this rank's own part, and the
    times.

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
    jac = None if jac is False else jac  # SciPy takes False for "not given"
    program = Program(fun, jac, hessp, args if isinstance(args, tuple) else (args,), objective, root)
    with restoring_state(), suspended():
        arguments = MethodArguments(bounds, constraints, tol, options, callback, checkpoint)
        start, arguments = _agree_on_arguments(used, program, method, x0, arguments)
        solve = Sharded(used, program, start) if isinstance(start, Piece) else RootDriven(used, program, start)
        shown = Progress(options) if progress else None
        with solve.ending(arguments.checkpoint, shown):
            if isinstance(solve, Sharded):
                return solve.run(callback, shown)
            return solve.run(partial(drive, method_named(method), arguments, program), shown)


def _agree_on_arguments(
    used: Channel, program: Program, method: object, x0: Tree, arguments: MethodArguments
) -> tuple[Tree | Piece, MethodArguments]:
    """Check the arguments on all ranks; return the root's x0 as a pytree of variables, or this rank's own `Piece`."""
    settings = ""
    # Invalid arguments first, whose errors are clearer, then differences: an invalid argument often differs too.
    with raising_together(used, Exception):
        sharded = is_sharded(method)
        writes = sharded or used.rank == program.root
        arguments = arguments._replace(checkpoint=as_checkpoint(arguments.checkpoint, "minimize", writes))
        check_program(program, used, "minimize")
        start = sendable_variables(x0, "minimize") if writes and not sharded else None
        if sharded:
            if arguments.constraints is not None and np.size(arguments.constraints):
                raise ValueError(
                    f"minimize: method {method!r} takes no constraints; 'SLSQP' and 'trust-constr' do. But got "
                    f"{arguments.constraints!r:.60}."
                )
            start = piece_of(
                str(method), as_variables(x0), arguments.bounds, arguments.tol, arguments.options, arguments.checkpoint
            )
            settings = f", {start.settings}"
            if arguments.callback is not None and not callable(arguments.callback):
                kind = type(arguments.callback).__name__
                raise TypeError(f"minimize: callback must be callable, but got {kind} {arguments.callback!r:.60}.")
    jac = "a function" if callable(program.jac) else program.jac
    described = f"method={method!r}, objective={program.objective!r}, root={program.root}, jac={jac}, "
    described += f"hessp={'none' if program.hessp is None else 'a function'}{settings}"
    described += "" if arguments.checkpoint is None else f", a checkpoint every {arguments.checkpoint.every} iterations"
    require_same(used, described, "minimize")
    if isinstance(start, Piece):
        return start, arguments
    return shared_start(used, program, start, x0), arguments


def mpi_optimize(
    f: Function,
    g: Function,
    x0: Tree = None,
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
) -> scipy.optimize.OptimizeResult:
    """Minimize f with its gradient g, evaluated by all ranks when the root asks for one or the other.

    Parameters
    ----------
    f : callable
        ``f(x, *args)`` returns this rank's L_r, one real number.
    g : callable
        ``g(x, *args)`` returns the gradient of this rank's L_r, in the form of x. With ``objective="root"`` only the
        root's counts: `mpiad.grad(f, shared=True)`, which all ranks call, returns there the gradient of the objective that
        the root has assembled.
    x0 : pytree of arrays
        The starting point. Only the root's counts: other ranks give None or the same.
    method, bounds, constraints, root, comm, tol, options, callback, objective, checkpoint, progress
        As in `minimize`.
    args : tuple
        Further arguments of f and g: this rank's own.

    Returns
    -------
    scipy.optimize.OptimizeResult
        That of `minimize`.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if an argument on any of them is invalid, or x0 isn't the root's.
    WorkerError
        On all ranks, if f or g raises on any.

    Ranks
    -----
    All ranks of `comm` call it, and then f or g whenever the root's method needs one: together, in the same order. The
    result is bitwise the same on all ranks.

    Adjoint
    -------
    None: the result is a constant in every trace.

    Examples
    --------
    >>> result = mpiad.mpi_optimize(lambda x: np.sum((x - 3.0) ** 2), lambda x: 2 * (x - 3.0), np.zeros(2))
    >>> print(np.round(result.x, 4))
    [3. 3.]
    """
    # None and True have another meaning for `minimize`, which rejects a string on all ranks alike.
    jac: Any = repr(g) if g is None or isinstance(g, bool) else g
    solver = {"method": method, "bounds": bounds, "constraints": constraints, "tol": tol, "options": options}
    output = {"callback": callback, "checkpoint": checkpoint, "progress": progress}
    return minimize(f, x0, jac=jac, root=root, comm=comm, objective=objective, args=args, **solver, **output)
