"""`newton`: the solution of a distributed nonlinear system, differentiated by the implicit function theorem.

F(u, p) = 0 implies J u̇ = -∂F/∂p ṗ, where J is the Jacobian with respect to u. So a tangent takes one linear solve. A
cotangent also takes one: Jᵀ λ = ū and p̄ = -(∂F/∂p)ᵀ λ. Both solves use the operator of `linalg.solve`; `matvec` is the
product with J, and u is one of the parameters, so the solves can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array, Comm, Function, LocalArray, Tree
from mpiad.device.assembly import stack
from mpiad.differentiation import linearize, make_jvp, make_vjp
from mpiad.domain import Domain
from mpiad.errors import ConvergenceError
from mpiad.extend import custom_operator, defjvp_together, defvjp_together
from mpiad.linalg.factorized import KeptFactors
from mpiad.linalg.iteration import diagnosis, forcing_term, iterate, rounding_floor
from mpiad.linalg.probing import kind_of, require_pattern
from mpiad.linalg.solve import (
    METHODS,
    Problem,
    change_along,
    check_arguments,
    param_cotangents,
    solution,
    solution_of_adjoint,
)
from mpiad.linalg.system import Settings, System, agree_on, check_settings
from mpiad.linalg.vectors import require_on_host
from mpiad.primitives import stop_gradient
from mpiad.primitives.checks import positive_count
from mpiad.primitives.cotangents import spec_like
from mpiad.programs.function import Jitted, shared
from mpiad.pytrees import flatten
from mpiad.transport import channel
from mpiad.transport.core.agreement import agreed_among
from mpiad.transport.core.channels import on_any_rank
from mpiad.transport.core.tracing import opaque, tracing
from mpiad.transport.exits.recovery import recoverable
from mpiad.transport.exits.user_failures import DeferredFailures

# Inexact Newton method with a line search.
#
# A step reduces the residual of the linear model to a fraction η. The nonlinear residual must decrease by a small part of
# the predicted decrease; otherwise the step is shortened to the minimum of a parabola that interpolates squared norms. Near
# the root, full steps are taken, and η is proportional to the squared ratio of successive norms: convergence is quadratic.

_FIRST_FORCING, _LARGEST_FORCING = 0.5, 0.9  # η₀ and η_max of Eisenstat and Walker
_SUFFICIENT = 1e-4  # fraction of the decrease that the linear model predicts
_SHORTEST = 1e-8  # fraction of Newton's step below which the search ends
_LONG_STEP = 1e6  # ratio of a step's length to the norms of u and f above which the Jacobian may be singular
_PATIENCE, _SLOW = 5, 0.99  # the iteration fails if `_PATIENCE` steps don't reduce the residual to the fraction `_SLOW`
_SMALL = 1e6  # multiple of the level of rounding below which the residual may be small enough
_ENOUGH = (
    " If a residual of {:.3e} is small enough, pass a larger atol=. The Jacobian is singular if solutions aren't isolated."
)
_ADVICE = (
    "Is the residual zero in some entries for every u, as in boundary cells that the step of a fixed point doesn't change? "
    "Prescribe their values in the residual, as in np.where(boundary, u - prescribed, step(u) - u)."
)

Linear = Callable[[LocalArray, float], System]
"""``linear(u, rtol)`` returns the linear system with the Jacobian at u, which is solved to the tolerance `rtol`."""


def find_root(
    residual: Function, linear: Linear, u0: LocalArray, settings: Settings, failures: DeferredFailures
) -> LocalArray:
    """Return the root of the residual; collective. Linear systems share `failures`. For errors see `newton`."""
    system = System(residual, None, u0, settings._replace(method="newton"), "residual", failures)
    u = system.rows(u0)
    f = system.apply(u)
    norm = float(system.norms(f)[0])
    system.require_finite(np.array(norm), f, "the residual at u0")
    system.note(np.array([norm]))
    # Entries may be missing in a sparse Jacobian. After a step by its factors alone that didn't reduce the residual to a
    # tenth, a product verifies the next solution, until one needs no iteration.
    target, forcing, trusted = max(settings.rtol * norm, settings.atol), _FIRST_FORCING, True
    while norm > target:
        if system.iterations >= int(settings.maxiter or 0):
            system.fail(f"the residual didn't fall to {target:.3e} within maxiter={settings.maxiter} steps")
        # Near the root, the linear system isn't solved more accurately than the target requires.
        tolerance = max(forcing, 0.5 * target / norm)
        system.usable = system.block(u)
        linearized = linear(system.block(u), tolerance)
        is_direct = linearized.has_inverse and trusted
        step = _newton_step(system, linearized, u, f, norm, is_direct)
        if step is None:
            break
        before, accepted = norm, _search(system, u, step, norm, tolerance)
        if linearized.has_inverse:
            trusted = accepted is not None and (accepted[2] <= 0.1 * norm if is_direct else not linearized.iterations)
        if is_direct and accepted is None:
            continue
        if accepted is not None:
            u, f, norm = accepted
            system.note(np.array([norm]))
        reference = system.history[-1 - _PATIENCE :][0]
        stalled = len(system.history) > _PATIENCE and norm > target and norm > _SLOW * reference
        if accepted is None or stalled:
            # A residual above the target is accepted if it is only an effect of rounding u.
            if norm <= rounding_floor(linear(system.block(u), 1.0), u, np.array([target]))[0]:
                break
            if accepted is None:
                system.fail(
                    f"no step along Newton's direction reduces the residual of {norm:.3e} enough (target: {target:.3e}): "
                    "its norm has a minimum but no root, or a kink. Start nearer to the solution, for example from the "
                    "solution of an easier problem, or check that the residual is differentiable"
                )
            system.fail(
                f"it stalled at step {system.iterations - _PATIENCE}, residual {reference:.3e}: {_PATIENCE} more steps led "
                f"to {norm:.3e}, but it must fall to {target:.3e}. mpiad.testing.check_grads(residual, u0) shows whether "
                "the derivative is right; if it is, start nearer to the solution"
            )
        forcing = forcing_term(forcing, norm / before, _LARGEST_FORCING)
    system.settle()
    return system.block(u)


def _newton_step(
    system: System, linear: System, u: LocalArray, f: LocalArray, norm: float, is_direct: bool
) -> LocalArray | None:
    """Return the solution of the linear system J s = -f; `is_direct`: that of the preconditioner.

    None if the system isn't solved, but the residual is only an effect of rounding u. So it is near solutions that aren't
    isolated: there the Jacobian is singular.
    """
    failure, method = f"in step {system.iterations + 1} the linear system wasn't solved", METHODS[linear.settings.method]
    try:
        step = linear.precondition(-f) if is_direct else system.rows(iterate(method, linear, system.block(-f), None))
    except ConvergenceError as error:
        if not agreed_among(error):
            raise
        floor = rounding_floor(linear, u, np.zeros(1))[0]
        if norm <= floor:
            return None
        system.fail(f"{failure} ({error}){_ENOUGH.format(norm) if norm <= _SMALL * floor else ''}")
    lengths = np.sqrt(np.real(system.dots((step, step), (u, u), (f, f))[:, 0]))
    # If a step is very long, one more product shows whether the Jacobian is singular to working precision.
    if lengths[0] > _LONG_STEP * (lengths[1] + lengths[2]):
        if rounding_floor(linear, step, np.zeros(1))[0] > lengths[2]:
            system.fail(f"{failure}: the Jacobian is singular to working precision. {diagnosis(linear) or _ADVICE}")
    return step


def _search(
    system: System, u: LocalArray, step: LocalArray, norm: float, tolerance: float
) -> tuple[LocalArray, LocalArray, float] | None:
    """Return the new point, its residual and norm; None if no step along the direction reduces the residual."""
    length = 1.0
    while length > _SHORTEST:
        new = u + np.zeros(0, u.dtype).real.dtype.type(length) * step
        f = system.apply(new)
        new_norm = float(system.norms(f)[0])
        if new_norm <= (1.0 - _SUFFICIENT * length * (1.0 - tolerance)) * norm:
            return new, f, new_norm
        # The minimum of the parabola through the squared norms at 0 and at this length, with the slope at 0 of the model.
        shorter = 0.1 if not np.isfinite(new_norm) else norm**2 * length / (new_norm**2 + (2.0 * length - 1.0) * norm**2)
        length *= float(np.clip(shorter, 0.1, 0.5))
    return None


_CALL = "linalg.newton"
_DERIVATIVE_RTOL = 1e-10  # relative tolerance of the solves of derivatives if `rtol` is zero


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
    jacobian: str = "products",
    pattern: Any = None,
    reuse: int = 0,
    comm: Comm = None,
    callback: Callable[[float], object] | None = None,
) -> LocalArray:
    """Solve residual(u, params) = 0 by Newton's method, with a block of u on each rank.

    The tolerance of each linear system is Eisenstat and Walker's second choice; products with the Jacobian use forward
    mode. Each step is shortened until the residual decreases. With ``jacobian="sparse"``, the Jacobian is computed as a
    sparse matrix, and its factors precondition these systems and those of derivatives.

    Parameters
    ----------
    residual : callable
        ``residual(u, *params)`` returns this rank's block of the residual. It may communicate, and is written with
        autograd.numpy and this library's functions. Arrays to differentiate with respect to must be among the params.
    u0 : array of float32, float64, complex64 or complex128
        This rank's block of the initial guess. No derivative flows through it.
    *params : pytree of arrays
        Further arguments of the residual; derivatives flow to all of them.
    method : {"gmres", "bicgstab", "cg"}
        Method for all linear systems, also for derivatives; "cg" requires a symmetric positive definite Jacobian.
    preconditioner : callable, optional
        ``preconditioner(r, u, *params)`` returns an approximation of this rank's block of J(u)⁻¹ r. A function with one
        required argument is called as ``preconditioner(r)``.
    preconditioner_transpose, side, restart
        As in `solve`.
    rtol, atol : float
        The 2-norm of the residual, over all ranks, must fall to ``max(rtol * norm(residual at u0), atol)``, or to the
        level of rounding. In the linear systems of derivatives, the norm of the residual must fall to ``rtol`` (1e-10 if
        `rtol` is zero) times the norm of the right-hand side.
    maxiter : int
        Maximum number of steps.
    linear_maxiter : int, optional
        Maximum number of iterations per linear system.
    jacobian : {"products", "sparse"}
        With "sparse", a product with the Jacobian for each color of `pattern` yields the matrix, as in `factorized`; a step
        linearizes the residual once for all colors, unless it is compiled by `jit`. SuperLU factors the matrix, on several
        ranks in overlapping blocks (see `AdditiveSchwarz`). `method` must be "gmres" or "bicgstab", and no preconditioner
        may be given.
    pattern : Domain, SciPy sparse matrix or array, or pair of integer arrays, optional
        The nonzero entries of a sparse Jacobian, as in `factorized`.
    reuse : int
        The number of further steps that use the same factors. Linear systems with older factors take more iterations.
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
        On all ranks, if an argument is invalid or differs between ranks, if `residual` doesn't return finite floats of the
        shape of `u0` at `u0`, if a sparse Jacobian is singular, or if at `u0` it has entries that aren't in `pattern` (the
        message names row and column).
    Exception
        On all ranks, if a user function raises it on any rank; the other ranks raise an exception with the same type and
        text. If other ranks wait for messages of the failed rank, the job ends: see the chapter on faults.
    ConvergenceError
        On all ranks, if no step along Newton's direction reduces the residual, if a linear system isn't solved, or if the
        maximum number of steps is reached. Its `history` contains the norms of the residual.

    Ranks
    -----
    All ranks of `comm` call it.

    Adjoint
    -------
    One linear solve Jᵀ λ = ū with the Jacobian at the solution, on all ranks; the params get -(∂F/∂params)ᵀ λ. With a
    sparse Jacobian, the factors of the last step precondition it.

    References
    ----------
    S. C. Eisenstat and H. F. Walker, Choosing the forcing terms in an inexact Newton method, SIAM Journal on Scientific
    Computing 17 (1996), choice 2.

    Examples
    --------
    >>> print(np.round(mpiad.linalg.newton(lambda u, p: u**2 - p, np.ones(2), 4.0), 6))
    [2. 2.]
    """
    comm = pattern.comm if isinstance(pattern, Domain) and comm is None else comm
    settings = Settings(method, rtol, atol, maxiter, comm, callback, restart, side, call=_CALL, probe=False)
    # These settings are for the solves of derivatives; each Newton step has its own tolerance.
    linear = settings._replace(
        rtol=rtol or _DERIVATIVE_RTOL, atol=0.0, maxiter=linear_maxiter, callback=None, advice=_ADVICE
    )
    start = stop_gradient(u0)

    def check() -> dict[str, object]:
        functions = {"residual": residual, "preconditioner": preconditioner, "callback": callback}
        functions["preconditioner_transpose"] = preconditioner_transpose
        check_arguments(settings, functions, "u0", start)
        if maxiter is None:
            raise ValueError(f"{_CALL}: maxiter must be an integer above zero, but got None.")
        check_settings(linear, METHODS, start.ndim)
        _check_jacobian(start, preconditioner, settings, jacobian, pattern, reuse)
        further = {"jacobian": jacobian, "reuse": reuse, "pattern": kind_of(pattern)}
        return further | ({"dtype of u0": start.dtype.char} if jacobian == "sparse" else {})

    settings = agree_on(settings, check, preconditioner)
    residual, (leaves, build) = shared(residual), flatten(params)

    def one(v: LocalArray, u: LocalArray, *params: Tree) -> LocalArray:
        return make_jvp(lambda w: residual(w, *params))(u)(v)[1]

    compiled: Any = residual.derived(_CALL, lambda: one, True) if isinstance(residual, Jitted) else None
    # The messages of interpreted batches, for sparse Jacobians only, and of compiled products differ; all use one form.
    interprets = jacobian == "sparse" and on_any_rank(channel(comm, _CALL).data, compiled is None or compiled.refused)

    def product(v: LocalArray, u: LocalArray, *params: Tree) -> LocalArray:
        multiply = one if interprets or compiled is None or tracing.tape is not None else compiled
        if len(np.shape(v)) == len(np.shape(u)):
            return multiply(v, u, *params)
        if multiply is compiled:
            return stack([multiply(each, u, *params) for each in v])
        return linearize(lambda w: residual(w, *params))(u).jvp(v, batch=True)

    def arguments(all_leaves: Tree) -> tuple:
        return all_leaves[0], *build(all_leaves[1:])

    if jacobian == "sparse":
        preconditioner = KeptFactors(product, arguments, start.shape, pattern, comm, _CALL, reuse)
    linear = linear._replace(preconditioned=settings.preconditioned or jacobian == "sparse")
    system = Problem(product, preconditioner, arguments, linear, None, preconditioner_transpose, communicated=set())
    return root(*leaves, problem=NonlinearProblem(residual, settings, start, system))


class NonlinearProblem(NamedTuple):
    """A nonlinear system without the values of its parameters."""

    residual: Function
    settings: Settings
    start: LocalArray
    jacobian: Problem  # the linear system with the Jacobian; its leaves are u and the leaves of the parameters

    def with_rtol(self, rtol: float) -> NonlinearProblem:
        """Return the problem, and its linear systems, with at most this tolerance and without `atol`."""
        settings = self.settings._replace(rtol=min(rtol, self.settings.rtol), atol=0.0)
        return self._replace(settings=settings, jacobian=self.jacobian.with_rtol(rtol))

    def at(self, all_leaves: Tree) -> LocalArray:
        """Return the residual, given u and the leaves of the parameters; an enclosing trace records the computation."""
        return self.residual(*self.jacobian.build(all_leaves))


@custom_operator
def root(*leaves: Array, problem: NonlinearProblem) -> LocalArray:
    """Return the root: a differentiable operator, whose arguments are the leaves of the parameters."""
    jacobian, kept = problem.jacobian.with_failures(), problem.jacobian.preconditioner

    def linear(u: LocalArray, rtol: float) -> System:
        if isinstance(kept, KeptFactors):
            kept.update([u, *leaves])
        # The solution isn't verified by a product, since the nonlinear residual is evaluated next.
        settings = jacobian.settings._replace(rtol=rtol, verify=False)
        system = jacobian._replace(settings=settings).system([u, *leaves], u)
        system.has_inverse = isinstance(kept, KeptFactors) and kept.is_accurate
        return system

    u = find_root(lambda u: problem.at([u, *leaves]), linear, problem.start, problem.settings, jacobian.failures)
    if isinstance(kept, KeptFactors) and kept.factors is None:  # no step was taken, but derivatives need factors
        kept.update([u, *leaves])
    return u


def _adjoint(ans: LocalArray, *leaves: Array, problem: NonlinearProblem) -> Callable:
    """Return the transpose of the root's derivative -J⁻¹ ∂F/∂p."""

    def vjp(g: LocalArray) -> list:
        jacobian, lanes = problem.jacobian.with_failures(), len(spec_like(g).shape) > len(spec_like(ans).shape)
        traced = lambda u: make_vjp(problem.at)([u, *leaves])[0]  # noqa: E731
        pull = jacobian.failures.attempt("residual", traced, ans, again=lambda: problem.start)
        multiplier = solution_of_adjoint(g, [ans, *leaves], jacobian, lanes)
        # The cotangent of u is Jᵀ λ, which must be equal to g; this is checked if the method assumes that J is symmetric.
        return param_cotangents(pull, multiplier, g, jacobian, lanes)

    return vjp


def _tangent(gs: list, ans: LocalArray, *leaves: Array, problem: NonlinearProblem) -> LocalArray:
    """Return the derivative of the root along tangents of the leaves."""
    jacobian = problem.jacobian.with_failures()
    along = lambda u: change_along(problem.at, u, leaves, gs)  # noqa: E731
    change = jacobian.failures.attempt("residual", along, ans, again=lambda: problem.start)
    rhs = spec_like(stop_gradient(ans)).zeros() if change is None else -change
    return solution(rhs, ans, *leaves, problem=jacobian)


defvjp_together(root, _adjoint)
defjvp_together(root, _tangent)
root.batched_adjoint = True


def _check_jacobian(
    u0: Array, preconditioner: Function | None, settings: Settings, jacobian: str, pattern: object, reuse: int
) -> None:
    if jacobian not in ("products", "sparse"):
        raise ValueError(f"{_CALL}: jacobian must be 'products' or 'sparse', but got {jacobian!r}.")
    positive_count(reuse, f"{_CALL}: reuse", 0)
    if jacobian == "products":
        if pattern is not None or reuse:
            raise TypeError(f"{_CALL}: pattern and reuse are for jacobian='sparse' only.")
        return
    if preconditioner is not None or settings.method == "cg":
        raise ValueError(
            f"{_CALL}: jacobian='sparse' takes no preconditioner, since the factors precondition, and requires "
            f"method='gmres' or 'bicgstab', but got method={settings.method!r} and preconditioner={preconditioner!r}."
        )
    require_on_host(f"{_CALL}: jacobian='sparse'", "u0", u0)
    require_pattern(_CALL, "u0", u0.shape, pattern, channel(settings.comm, _CALL))
