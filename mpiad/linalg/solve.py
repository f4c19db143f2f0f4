"""`solve`: the solution of a distributed linear system A u = b, whose operator A is a function."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import autograd.numpy as anp
import numpy as np

from mpiad._typing import Array, Comm, Function, LocalArray, Tree
from mpiad.device.assembly import concatenate, stack
from mpiad.differentiation import make_jvp, make_vjp
from mpiad.extend import custom_operator, defjvp_together, defvjp_together
from mpiad.linalg.compiled_iteration import Operator
from mpiad.linalg.iteration import Method, iterate
from mpiad.linalg.krylov import bicgstab, conjugate_gradients, gmres
from mpiad.linalg.system import ADVICE_FOR_COPIES, Settings, System, agree_on, check_settings
from mpiad.linalg.vectors import column, inner, require_block
from mpiad.primitives import mpi_allreduce, stop_gradient
from mpiad.primitives.cotangents import spec_like, tangent_of
from mpiad.primitives.operation import suspended
from mpiad.programs.function import shared
from mpiad.programs.interpretation import message_counts
from mpiad.pytrees import flatten
from mpiad.transport import channel
from mpiad.transport.core.agreement import agreed
from mpiad.transport.core.tracing import opaque, restoring_state
from mpiad.transport.devices.device_arrays import is_device_array
from mpiad.transport.exits.recovery import recoverable
from mpiad.transport.exits.user_failures import DeferredFailures

# A(p) u = b implies A u̇ = ḃ - (∂A/∂p ṗ) u, so a tangent takes one solve. The transpose of this map follows from Aᵀ λ = ū:
# the cotangent of b is λ, and the cotangent of p is -(∂(A(p) u)/∂p)ᵀ λ, one reverse pass through the user's operator at
# the solution. The iteration is never traced. Both rules use only `solution`, itself a differentiable function, and the
# user's operator, so they can be differentiated again.
#
# The adjoint of a system with Aᵀ is a system with A, and both cotangents of p are derivatives of λᵀ A u. So the
# cotangent of p in the transposed system also comes from a reverse pass through A, with u and λ interchanged.
#
# The operator is linear in u, so one trace is enough for all products with its transpose in a solve. The transpose of a
# preconditioner is the argument `preconditioner_transpose`, its attribute `T`, or the result of its method `transpose()`.
# Otherwise the preconditioner is used for both systems; if it isn't symmetric, the adjoint takes more iterations.
#
# Several reverse passes that run together ("lanes") solve for a block of right-hand sides: the iterations share the
# reductions, and the user's functions are called for one right-hand side after the other.

_MOST_LANES = 8  # right-hand sides of a block; a compiled iteration contains the operator once for each

METHODS: dict[str, Method] = {"cg": conjugate_gradients, "gmres": gmres, "bicgstab": bicgstab}


class Problem(NamedTuple):
    """A linear system without its right-hand side and the values of its parameters."""

    matvec: Function
    preconditioner: Function | None
    build: Callable[[list], Tree]  # assembles the parameters from their leaves
    settings: Settings
    start: LocalArray | None = None  # initial guess
    preconditioner_transpose: Any = None  # callable, "derived" or None
    transposed: bool = False  # whether the operator of the system is the transposed one
    # ``solver(params, transposed)`` returns the method of another library; if it is None, the method is in `METHODS`.
    solver: Callable[..., Method] | None = None
    failures: Any = None  # `DeferredFailures`: this rank's failures in the enclosing call; None: no enclosing call
    communicated: set[str] | None = None  # names of user functions that have communicated; see `DeferredFailures`
    lanes: int = 0  # number of additional first axes of b, for right-hand sides of simultaneous reverse passes

    def derived(self) -> Problem:
        """Return the problem for a tangent: the same operator, with zero as the initial guess."""
        return self._replace(start=None, settings=self.settings._replace(callback=None, reported=False, probe=False))

    def with_rtol(self, rtol: float) -> Problem:
        """Return the problem with at most this tolerance, without `atol`, and with the method's own limit of iterations."""
        return self._replace(settings=self.settings._replace(rtol=min(rtol, self.settings.rtol), atol=0.0, maxiter=None))

    @property
    def hermitian(self) -> bool:
        """Whether the method requires a symmetric or Hermitian operator."""
        return self.settings.method == "cg"

    def product(self, all_leaves: Tree, transposed: bool = False) -> LocalArray:
        """Return the product of `matvec`, or its transpose, with u, the first leaf; an enclosing trace records it."""
        return operator_product(self.matvec, tuple(self.build(all_leaves[1:])), all_leaves[0], self.lanes, transposed)

    def system(self, leaves: Tree, b: LocalArray) -> System:
        """Return the system that the iterative methods solve, for untraced blocks."""
        params, failures = tuple(self.build(leaves)), self.failures or self.with_failures().failures
        counts = dict(message_counts()) if self.transposed else {}
        read = self.matvec, self.preconditioner, self.transposed, self.lanes, self.preconditioner_transpose
        comm, side = self.settings.comm, self.settings.side
        called = lambda name, fun, *args, again=None: fun(*args)  # noqa: E731 (`attempt` in a trace)
        bound = lambda params: self._functions(params, b, called)  # noqa: E731
        operator = Operator(read, params, bound, b.shape, comm, side, counts, self.transposed)
        with operator.noting():
            apply, precondition = self._functions(params, b, failures.attempt)
        is_updated = getattr(self.preconditioner, "is_updated", False)  # iterations with it aren't compiled
        return System(apply, precondition, b, self.settings, failures=failures, operator=None if is_updated else operator)

    def _functions(self, params: tuple, b: LocalArray, attempt: Function) -> tuple[Function, Function | None]:
        """Return the product and the preconditioner; `attempt`: of the failures."""
        if self.lanes:
            apply, precondition = self._replace(lanes=self.lanes - 1)._functions(params, b[0], attempt)
            # This library's preconditioners, and their transposes, take blocks.
            takes_blocks = getattr(self.preconditioner, "takes_blocks", False) and self.preconditioner_transpose is None
            return over_lanes(apply), precondition if takes_blocks or precondition is None else over_lanes(precondition)
        apply, precondition = (lambda u: self.matvec(u, *params)), None
        if self.transposed:
            # The operator is traced here, so that an exception of the user's function is raised before a reverse pass.
            apply = attempt("matvec", lambda like: transposed_matvec(self.matvec, params, like), b, again=lambda: b)
        if self.preconditioner is not None and self.transposed:
            given = self.preconditioner, self.preconditioner_transpose, params, b
            precondition = attempt("transpose", transposed_preconditioner, *given)
        elif self.preconditioner is not None:
            precondition = bind_params(self.preconditioner, params)
        return apply, precondition

    def with_failures(self) -> Problem:
        """Return the problem with a new collector of the failures of this rank's user functions in one call."""
        return self._replace(failures=DeferredFailures(self.settings.comm, self.settings.call, self.communicated))


def operator_product(matvec: Function, params: tuple, u: Array, lanes: int, transposed: bool) -> Array:
    """Return ``matvec(u, *params)``, or the product with the transpose, for u with `lanes` additional first axes."""
    if transposed:
        return over_lanes(lambda u: transposed_matvec(matvec, params, u)(u), lanes)(u)
    return over_lanes(lambda u: matvec(u, *params), lanes)(u)


def over_lanes(fun: Function, lanes: int = 1) -> Function:
    """Return a function that applies `fun` to one right-hand side after the other."""
    for _ in range(lanes):
        fun = partial(lambda one, u: stack([one(u[k]) for k in range(len(u))]), fun)
    return fun


@custom_operator
def solution(b: LocalArray, *leaves: Array, problem: Problem) -> LocalArray:
    """Return this rank's block of the solution, given the parameters' `leaves`; for errors see `solve`."""
    system = problem.system(leaves, b)
    if problem.solver is None:
        method = METHODS[problem.settings.method]
    else:
        method = problem.solver(tuple(problem.build(list(leaves))), problem.transposed)
    u = iterate(method, system, b, problem.start)
    system.settle()
    return u


def _adjoint(ans: LocalArray, b: LocalArray, *leaves: Array, problem: Problem) -> Callable:

    def vjp(g: LocalArray) -> list:
        lanes = len(spec_like(g).shape) > len(spec_like(ans).shape)
        if lanes and problem.solver is not None:
            return _stacked([vjp(g[k]) for k in range(len(g))])
        used = problem.with_failures()

        def vjp_at(u: LocalArray) -> Function:
            zero = spec_like(stop_gradient(u)).zeros()
            traced = lambda u: make_vjp(problem.product)([u, *leaves])[0]  # noqa: E731
            return used.failures.attempt("matvec", traced, u, again=lambda: zero)

        # In both cases, λᵀ A u is differentiated with respect to the parameters; A is the user's operator.
        if not problem.transposed:
            # The operator is traced before the solve, since the solve's first reduction reports exceptions to all ranks.
            pull = vjp_at(ans)
            near = start_of_adjoint(g, ans, b, problem.settings) if problem.hermitian and not lanes else None
            multiplier = solution_of_adjoint(g, leaves, used, lanes, near)
            return [multiplier, *param_cotangents(pull, multiplier, g, used, lanes)]
        multiplier = solution_of_adjoint(g, leaves, used, lanes)
        # A u is differentiated at u = λ, which differs between lanes.
        pulls = [vjp_at(multiplier[k]) for k in range(len(g))] if lanes else [vjp_at(multiplier)]
        used.failures.raise_together()
        parts = [param_cotangents(pull, ans, g, used) for pull in pulls]
        return [multiplier, *(_stacked(parts) if lanes else parts[0])]

    return vjp


def _stacked(cotangents: list[list]) -> list:
    """Return the cotangents of all lanes, given the list of each lane, with an axis for the lanes."""
    return [None if parts[0] is None else stack(parts) for parts in zip(*cotangents)]


def param_cotangents(pull: Function, left: LocalArray, g: LocalArray, problem: Problem, lanes: bool = False) -> list:
    """Return the cotangents of a user function's arguments but the first; minus `left` is the cotangent of its result."""
    cotangents = problem.failures.attempt("adjoint", partial(pull, batch=lanes), left) or [None]
    if problem.hermitian:
        require_transpose(stop_gradient(cotangents[0]), stop_gradient(g), problem)
    else:
        problem.failures.raise_together()  # no reduction follows that would report failures
    return [None if part is None else -part for part in cotangents[1:]]


def start_of_adjoint(g: LocalArray, u: LocalArray, b: LocalArray, settings: Settings) -> LocalArray | None:
    """Return the multiple of u that nearly solves A λ = g, as for a compliance b·u; None, on all ranks, if none does."""
    g, u, b = stop_gradient(g), stop_gradient(u), stop_gradient(b)
    if g.dtype.kind == "c":
        return None
    shape = math.prod(g.shape[: settings.batch]), math.prod(g.shape[settings.batch :])
    g_rows, b_rows = g.reshape(shape), b.reshape(shape)
    with restoring_state(), suspended():
        pairs = inner((g_rows, g_rows), (g_rows, b_rows), (b_rows, b_rows)).astype(np.float64)
        gg, gb, bb = mpi_allreduce(pairs, comm=settings.comm)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        scale = gb / bb
        is_near = (gg - scale * gb <= 0.01 * gg).all()  # squares of residuals; false if a sum isn't finite
    return (column(g_rows, scale.astype(g.dtype)) * u.reshape(shape)).reshape(g.shape) if is_near else None


def solution_of_adjoint(
    g: LocalArray, leaves: Tree, problem: Problem, lanes: bool = False, start: LocalArray | None = None
) -> LocalArray:
    """Return the solution λ of Aᵀ λ = g, differentiably; `lanes`: g has a first axis for several systems; collective."""
    if lanes:
        blocks = [g[k : k + _MOST_LANES] for k in range(0, len(g), _MOST_LANES)]
        settings = problem.settings._replace(batch=problem.settings.batch + 1)
        of_block = problem._replace(lanes=problem.lanes + 1, settings=settings)
        return concatenate([solution_of_adjoint(block, leaves, of_block) for block in blocks])
    derived = problem.derived()
    if not problem.hermitian:
        return solution(g, *leaves, problem=derived._replace(transposed=not problem.transposed))
    # For Hermitian A, Aᵀ λ = g is equivalent to A λ* = g*.
    if g.dtype.kind == "c":
        return anp.conj(solution(anp.conj(g), *leaves, problem=derived))
    return solution(g, *leaves, problem=derived._replace(start=start))


def _tangent(gs: list, ans: LocalArray, b: LocalArray, *leaves: Array, problem: Problem) -> LocalArray:
    """Return the derivative of the solution along tangents of b and of the leaves."""
    residual, derived = tangent_of(b, gs[0]), problem.with_failures().derived()
    if leaves:
        of_system = partial(problem.product, transposed=problem.transposed)
        along = lambda u: change_along(of_system, u, leaves, gs[1:])  # noqa: E731
        change = derived.failures.attempt("matvec", along, ans, again=spec_like(stop_gradient(ans)).zeros)
        residual = residual if change is None else residual - change
    return solution(residual, *leaves, problem=derived)


def change_along(fun: Function, u: LocalArray, leaves: Sequence[Array], gs: Sequence[Array]) -> LocalArray:
    """Return the derivative of ``fun([u, *leaves])`` along tangents of the leaves of the parameters, None for zeros."""
    # Python numbers have no dtype, so their zero tangents are Python numbers, too.
    given = [(x, g, np.ndim(stop_gradient(x)) or g is not None) for x, g in zip(leaves, gs)]
    tangents = [spec_like(stop_gradient(u)).zeros(), *[tangent_of(x, g) if has_dtype else 0.0 for x, g, has_dtype in given]]
    return make_jvp(fun)([u, *leaves])(tangents)[1]


defvjp_together(solution, _adjoint)
defjvp_together(solution, _tangent)
solution.batched_adjoint = True


def require_transpose(transposed: LocalArray | None, g: LocalArray, problem: Problem) -> None:
    """Raise a ValueError on all ranks if Aᵀ λ, `transposed`, differs from g = A λ: A isn't symmetric."""
    settings = problem.settings
    gap = (np.nan if transposed is None else transposed) - g
    with restoring_state(), suspended():
        local = inner(*[(v.reshape(1, -1), v.reshape(1, -1)) for v in (gap, g)])
        squares = mpi_allreduce(np.real(local).ravel().astype(np.float64), comm=settings.comm)
    if not np.isfinite(squares).all():
        problem.failures.raise_together()
    error, norm = np.sqrt(squares).tolist()
    # For ill-conditioned systems rounding errors may exceed the tolerance.
    if error > 10 * max(settings.rtol * norm, settings.atol) + np.finfo(g.dtype).eps ** 0.25 * norm:
        text = (
            f"{settings.call}: {settings.method} needs a symmetric operator, but in the derivative A λ = g was solved and "
            f"Aᵀ λ - g has norm {error:.3e}, whereas g has {norm:.3e}: A isn't its own transpose, and the derivative would "
            f"be wrong. Take method='gmres' or 'bicgstab', whose derivatives use the transpose. {ADVICE_FOR_COPIES}"
        )
        raise agreed(channel(settings.comm, settings.call), ValueError(text))


def transposed_matvec(matvec: Function, params: tuple, like: LocalArray) -> Function:
    """Return the product with the transpose: the operator's method `transpose`, or a product derived by a trace."""
    transpose = getattr(matvec, "transpose", None)
    if callable(transpose):
        return lambda u: transpose(u, *params)
    return transposed_function(lambda u: matvec(u, *params), like)


def transposed_function(fun: Function, like: LocalArray) -> Function:
    """Return the transpose of a linear function, from a trace; argument and result have the shape and dtype of `like`."""
    # Since the function is linear, its derivative at zero is the function itself.
    return make_vjp(fun)(spec_like(like).zeros())[0]


def transposed_preconditioner(preconditioner: Function, transpose: Any, params: tuple, like: LocalArray) -> Function:
    """Return the transpose of a preconditioner; `transpose` is the user's argument: a function, "derived", or None."""
    if transpose is None:
        transpose = getattr(preconditioner, "T", None)
    if transpose is None and callable(getattr(preconditioner, "transpose", None)):
        transpose = preconditioner.transpose()
    if isinstance(transpose, str):
        return transposed_function(bind_params(preconditioner, params), like)
    return bind_params(preconditioner if transpose is None else transpose, params)


def bind_params(fun: Function, params: tuple) -> Function:
    """Return `fun` as a function of its first argument only, with bound params if `fun` requires them."""
    if getattr(fun, "takes_blocks", False):  # this library's preconditioners take no params
        return fun
    try:
        kinds = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # some built-in functions have no signature
        kinds = []
    required = [p for p in kinds if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty]
    # Arguments with a default aren't counted.
    takes_params = len(required) == 1 + len(params) or any(p.kind is p.VAR_POSITIONAL for p in kinds)
    return lambda r: fun(r, *(params if takes_params else ()))


@recoverable("linalg.solve")
@opaque
def solve(
    matvec: Function,
    b: LocalArray,
    *params: Tree,
    method: str = "cg",
    preconditioner: Function | None = None,
    preconditioner_transpose: Function | str | None = None,
    side: str | None = None,
    rtol: float = 1e-8,
    atol: float = 0.0,
    maxiter: int | None = None,
    restart: int = 30,
    x0: LocalArray | None = None,
    batch: int = 0,
    verify: bool = True,
    comm: Comm = None,
    callback: Callable[[float], object] | None = None,
) -> LocalArray:
    """Solve A(params) u = b, with blocks of u and b on each rank; differentiable by the implicit function theorem.

    Parameters
    ----------
    matvec : callable
        ``matvec(u, *params)`` returns this rank's block of A u, linear in u, from this rank's block of u. It may
        communicate, for example by `Domain.exchange`, and is written with autograd.numpy and this library's functions.
        Arrays to differentiate with respect to must be among the params, not in the function's closure. Products with the
        transpose are derived from `matvec`, unless it has a method ``transpose(u, *params)``.
    b : array of float32, float64, complex64 or complex128
        This rank's block of the right-hand side.
    *params : pytree of arrays
        The arguments of the operator; derivatives flow to all of them.
    method : {"cg", "gmres", "bicgstab"}
        "cg" (conjugate gradients) requires a symmetric (complex: Hermitian) positive definite operator, the others any
        nonsingular operator. An iteration takes one product and one reduction over all ranks, or two of each ("bicgstab").
    preconditioner : callable, optional
        ``preconditioner(r, *params)`` returns an approximation of this rank's block of A⁻¹ r, linear in r. A function with
        one required argument is called as ``preconditioner(r)``. For "cg" the preconditioner must be symmetric positive
        definite. It isn't differentiated.
    preconditioner_transpose : callable or "derived", optional
        The transpose of the preconditioner (without conjugation), for the adjoint systems of "gmres" and "bicgstab".
        If it is "derived", it is computed from a trace of the preconditioner. By default, it is the preconditioner's
        attribute ``T``, the result of its method ``transpose()``, or, without these, the preconditioner itself.
    side : {"right", "left"}, optional
        Side of the preconditioner, for "gmres" and "bicgstab"; "right" by default.
    rtol, atol : float
        The 2-norm of the residual, over all ranks, must fall to ``max(rtol * norm(b), atol)``. In the solves of
        derivatives, b is replaced by their right-hand sides.
    maxiter : int, optional
        Maximum number of iterations; by default 10 times the number of unknowns, at most 10,000.
    restart : int
        Number of iterations of "gmres" between restarts; "gmres" stores this number of blocks plus one.
    x0 : array of the shape of `b`, optional
        Initial guess; zero by default. No derivative flows through it.
    batch : int
        Number of leading axes of `b` that index systems with the same operator; by default, `b` is one system. Each system
        has its own iteration and tolerance. The reductions are shared, and `matvec` gets the blocks of all systems at once.
    verify : bool
        Whether to check at the end that the true residual is at most 10 times the tolerance, or due to rounding, and that
        the operator doesn't map constants to zero. Each check takes one product.
    comm : mpi4py intracommunicator, optional
        The ranks over which the system is distributed; `matvec` and the preconditioner communicate among them only.
    callback : callable, optional
        ``callback(norm)`` is called on every rank after each iteration (except in the solves of derivatives).

    Returns
    -------
    array of the shape and dtype of `b`
        This rank's block of u.

    Raises
    ------
    TypeError
        On all ranks, if `b` or the result of `matvec` isn't an array of floats, if the result is complex but `b` is real,
        or if `matvec` uses a traced value from its closure.
    ValueError
        On all ranks, if ranks give different settings, `method` is unknown, a tolerance can't be met, an array has another
        shape than `b`, or `b` or the operator isn't finite; in the derivative, if the operator isn't symmetric with "cg".
    Exception
        On all ranks, if a user function raises it on any rank; the other ranks raise an exception with the same type and
        text. If other ranks wait for messages of the failed rank, the job ends: see the chapter on faults.
    ConvergenceError
        On all ranks, if the tolerance isn't reached, or if the iteration breaks down because the operator is singular, not
        linear, or (with "cg") not positive definite. Its `history` contains the norms of the residual.

    Ranks
    -----
    All ranks of `comm` call it.

    Adjoint
    -------
    One solve of Aᵀ λ = ū (without conjugation), on all ranks: b gets λ, and the params get -(∂(A u)/∂params)ᵀ λ. Forward
    mode and higher orders take one solve per derivative. With "cg", the adjoint solve starts from a multiple of u if this
    is nearly its solution.

    Examples
    --------
    >>> print(mpiad.linalg.solve(lambda u, k: k * u, np.ones(2), 4.0))
    [0.25 0.25]
    """
    settings = Settings(method, rtol, atol, maxiter, comm, callback, restart, side, batch, verify)
    leaves, build = flatten(params)
    start = None if x0 is None else stop_gradient(x0)
    problem = Problem(
        shared(matvec), shared(preconditioner), build, settings, start, preconditioner_transpose, communicated=set()
    )
    settings = agree_on(settings, lambda: _checked(problem, stop_gradient(b)), preconditioner)
    return solution(b, *leaves, problem=problem._replace(settings=settings))


def _checked(problem: Problem, b: Array) -> dict[str, object]:
    """Return further arguments that must be the same on all ranks; raise an error if an argument is invalid."""
    functions = {
        "matvec": problem.matvec,
        "preconditioner": problem.preconditioner,
        "preconditioner_transpose": problem.preconditioner_transpose,
        "callback": problem.settings.callback,
    }
    x0 = problem.start
    check_arguments(problem.settings, functions, "b", b)
    if x0 is not None and is_device_array(x0) != is_device_array(b):
        raise TypeError("linalg.solve: x0 and b must be on one device, but only one of them is on a device.")
    if x0 is not None and np.shape(x0) != b.shape:
        raise ValueError(f"linalg.solve: x0 must have the shape of b, {b.shape}, but has {np.shape(x0)}.")
    return {"with_x0": x0 is not None, "leading axes of b": b.shape[: problem.settings.batch]}


def check_arguments(settings: Settings, functions: dict[str, Any], name: str, block: Array) -> None:
    """Raise an error if a setting, one of the functions or the array called `name` is invalid."""
    require_functions(settings.call, functions)
    require_block(settings.call, name, block)
    check_settings(settings, METHODS, block.ndim)
    # If a preconditioner of this library raised during a product, the other ranks would wait for its messages.
    for fun in functions.values():
        if hasattr(fun, "require_fit"):
            fun.require_fit(block)


def require_functions(call: str, functions: dict[str, Any]) -> None:
    """Raise a TypeError if one of the functions isn't callable; all but the first may be None, a transpose "derived"."""
    for number, (name, fun) in enumerate(functions.items()):
        is_derived = name == "preconditioner_transpose" and isinstance(fun, str) and fun == "derived"
        if not callable(fun) and not is_derived and (fun is not None or number == 0):
            raise TypeError(f"{call}: {name} must be a function, but got {type(fun).__name__} {fun!r}.")
