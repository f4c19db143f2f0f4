"""`newton`: a distributed nonlinear system, differentiated by the implicit function theorem.

From F(u, p) = 0 follows J u̇ = -∂F/∂p ṗ with the Jacobian J by u: a tangent takes one linear solve, and so does a cotangent,
with Jᵀ λ = ū and p̄ = -(∂F/∂p)ᵀ λ. Both are made of the operator of linear solves, with J's products as its operator and u
among its parameters, so they can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array, Comm, Function, LocalArray, Tree
from mpiad.differentiation import make_jvp, make_vjp
from mpiad.extend import custom_operator, defjvp_together, defvjp_together
from mpiad.linalg.implicit import METHODS, Problem, direction_of, pulled_back, solution, solution_of_adjoint
from mpiad.linalg.newton_iteration import find_root
from mpiad.linalg.solver_settings import Settings, agree_on, mistake_in, unfit_preconditioner
from mpiad.primitives import stop_gradient
from mpiad.primitives.cotangents import spec_like
from mpiad.pytrees import flatten
from mpiad.transport.buffers import conversion
from mpiad.transport.device_arrays import is_device_array
from mpiad.transport.recovery import recoverable
from mpiad.transport.tracing import opaque

_CALL = "linalg.newton"
_OF_DERIVATIVES = 1e-10  # the relative tolerance of their linear systems, where the user gave an absolute one alone


@opaque
@recoverable(_CALL)
def newton(
    residual: Function,
    u0: LocalArray,
    *params: Tree,
    method: str = "gmres",
    preconditioner: Function | None = None,
    preconditioner_transpose: Function | str | None = None,
    side: str | None = None,
    rtol: float = 1e-10,
    atol: float = 0.0,
    maxiter: int = 50,
    restart: int = 30,
    linear_maxiter: int | None = None,
    comm: Comm = None,
    callback: Callable[[float], Any] | None = None,
) -> LocalArray:
    """Solve residual(u, params) = 0 by Newton's method, each rank holding a block of u.

    The linear systems are solved as exactly as the last step makes it worth while (Eisenstat and Walker's second choice),
    with products with the Jacobian by forward mode, and each step is shortened until the residual falls.

    Parameters
    ----------
    residual : callable
        ``residual(u, *params)`` returns this rank's block of the residual. It may communicate, and is written with
        autograd.numpy and this library's functions. What is to be differentiated by must be among the params.
    u0 : array of float32, float64, complex64 or complex128
        This rank's block of the start. No derivative flows through it.
    *params : pytree of arrays
        What the residual depends on; derivatives flow to all of them.
    method : {"gmres", "bicgstab", "cg"}
        Of the linear systems, those of derivatives too; "cg" where the Jacobian is symmetric positive definite.
    preconditioner : callable, optional
        ``preconditioner(r, u, *params)`` or ``preconditioner(r)``, by the number of arguments that it requires, returns an
        approximation of this rank's block of J(u)⁻¹ r.
    preconditioner_transpose, side, restart
        As in `solve`.
    rtol, atol : float
        The 2-norm of the residual, over all ranks, must fall to ``max(rtol * norm(residual at u0), atol)``, or to what
        rounding allows; those of the linear systems of derivatives to ``rtol`` times the norm of their right-hand sides.
    maxiter : int
        Steps at most.
    linear_maxiter : int, optional
        Iterations of each linear system at most.
    comm : mpi4py intracommunicator, optional
    callback : callable, optional
        ``callback(norm)`` is called on every rank after each step, with the norm of the residual.

    Returns
    -------
    array of the shape and dtype of `u0`
        This rank's block of u.

    Raises
    ------
    TypeError, ValueError
        On all ranks, where an argument can't be used, `residual` returns something else than an array like `u0`, or isn't
        finite at `u0`.
    Exception
        On all ranks, what a function of the user's raises on one: its own there, one of the same kind and text elsewhere.
        Where it leaves other ranks waiting for its messages, the job ends: see the chapter on faults.
    ConvergenceError
        On all ranks, with the residual after each step, where no step along Newton's direction makes the residual fall, a
        linear system isn't solved, or the steps are used up.

    Ranks
    -----
    All ranks of `comm` call it.

    Adjoint
    -------
    One linear solve with the transposed Jacobian at the solution, on all ranks; the params get -(∂F/∂params)ᵀ λ.

    References
    ----------
    S. C. Eisenstat and H. F. Walker, Choosing the forcing terms in an inexact Newton method, SIAM Journal on Scientific
    Computing 17 (1996), choice 2.

    Examples
    --------
    >>> print(np.round(mpiad.linalg.newton(lambda u, p: u**2 - p, np.ones(2), 4.0), 6))
    [2. 2.]
    """
    settings = Settings(method, rtol, atol, maxiter, comm, callback, restart, side, call=_CALL, probe=False)
    # The tolerance is that of derivatives; steps bring their own (see `Problem.step`).
    linear = settings._replace(rtol=rtol or _OF_DERIVATIVES, atol=0.0, maxiter=linear_maxiter, callback=None)
    settings = agree_on(settings, _mistake(residual, stop_gradient(u0), preconditioner, linear, settings), preconditioner)
    linear = linear._replace(preconditioned=settings.preconditioned)
    leaves, build = flatten(params)
    jacobian = Problem(
        lambda v, u, *params: make_jvp(lambda w: residual(w, *params))(u)(v)[1], preconditioner,
        lambda all_leaves: (all_leaves[0], *build(all_leaves[1:])),
        linear, preconditioner_transpose=preconditioner_transpose, talkers=set(),
    )  # fmt: skip
    return root(*leaves, problem=NonlinearProblem(residual, build, settings, stop_gradient(u0), jacobian))


class NonlinearProblem(NamedTuple):
    """A nonlinear system but for the values of its parameters."""

    residual: Function
    build: Callable[[Any], Any]  # from the leaves of the parameters to the parameters
    settings: Settings
    start: LocalArray
    jacobian: Problem  # the linear system with the Jacobian, whose leaves are u and those of the parameters

    def at(self, all_leaves: Tree) -> LocalArray:
        """Return the residual of u and the leaves, as part of the program around it."""
        return self.residual(all_leaves[0], *self.build(all_leaves[1:]))


@custom_operator
def root(*leaves: Any, problem: NonlinearProblem) -> LocalArray:
    """Return u with residual zero: `newton` as one operator of the leaves of its parameters; its adjoint as there."""
    failures = problem.jacobian.new_failures()
    return find_root(
        lambda u: problem.at([u, *leaves]), lambda u, rtol: problem.jacobian.step(rtol, failures).system([u, *leaves], u),
        problem.start, problem.settings, METHODS[problem.settings.method], failures,
    )  # fmt: skip


def _adjoint(ans: LocalArray, *leaves: Any, problem: NonlinearProblem) -> Callable:
    """Return the transpose of the root's derivative: of -J⁻¹ ∂F/∂p."""

    def vjp(g: LocalArray) -> list:
        failures = problem.jacobian.new_failures()
        pull = failures.attempt(
            "residual", lambda u: make_vjp(problem.at)([u, *leaves])[0], ans, again=lambda: problem.start
        )
        multiplier = solution_of_adjoint(g, [ans, *leaves], problem.jacobian, failures)
        # The part of u is Jᵀ λ, which is g again; it is looked at where J was taken for symmetric.
        of_leaves = pulled_back(pull, multiplier, g, problem.jacobian, failures)
        return [None if part is None else -part for part in of_leaves]

    return vjp


def _tangent(gs: list, ans: LocalArray, *leaves: Any, problem: NonlinearProblem) -> LocalArray:
    """Return the derivative of the root along tangents of the leaves."""
    along = [spec_like(stop_gradient(ans)).zeros(), *[direction_of(leaf, g) for leaf, g in zip(leaves, gs)]]
    failures = problem.jacobian.new_failures()
    moved = failures.attempt(
        "residual", lambda u: make_jvp(problem.at)([u, *leaves])(along)[1], ans, again=lambda: problem.start
    )
    right = along[0] if moved is None else -moved
    return solution(right, ans, *leaves, problem=problem.jacobian._replace(failures=failures))


defvjp_together(root, _adjoint)
defjvp_together(root, _tangent)


def _mistake(
    residual: object, u0: Array, preconditioner: Function | None, linear: Settings, settings: Settings
) -> Exception | None:
    for name, fun in (("residual", residual), ("preconditioner", preconditioner), ("callback", settings.callback)):
        if not callable(fun) and (fun is not None or name == "residual"):
            return TypeError(f"{_CALL}: {name} must be a function, but got {type(fun).__name__} {fun!r}.")
    known = isinstance(u0, np.ndarray) or is_device_array(u0)
    if not known or u0.dtype.char not in "fdFD" or not u0.dtype.isnative:
        kind = f"an array of dtype {u0.dtype}. {conversion(u0.dtype, 'u0')}".rstrip() if known else f"{type(u0).__name__}."
        return TypeError(f"{_CALL}: u0 must be an array of float32, float64, complex64 or complex128, but got {kind}")
    if settings.maxiter is None:
        return ValueError(f"{_CALL}: maxiter must be an integer above zero, but got None.")
    return (
        mistake_in(settings, METHODS, u0.ndim)
        or mistake_in(linear, METHODS, u0.ndim)
        or unfit_preconditioner([preconditioner], u0)
    )
