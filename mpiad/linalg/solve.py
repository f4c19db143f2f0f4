"""`solve`: a distributed linear system whose operator is a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpiad._typing import Array, Comm, Function, LocalArray, Tree
from mpiad.linalg.implicit import DERIVED, METHODS, Problem, solution
from mpiad.linalg.solver_settings import Settings, agree_on, mistake_in, unfit_preconditioner
from mpiad.primitives import stop_gradient
from mpiad.pytrees import flatten
from mpiad.transport.buffers import conversion
from mpiad.transport.device_arrays import is_device_array
from mpiad.transport.recovery import recoverable
from mpiad.transport.tracing import opaque


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
    callback: Callable[[float], Any] | None = None,
) -> LocalArray:
    """Solve A(params) u = b, each rank holding a block of u and b; derivatives by the implicit function theorem.

    Parameters
    ----------
    matvec : callable
        ``matvec(u, *params)`` returns this rank's block of A u, linear in u, from this rank's block of u. It may
        communicate, as by `Domain.exchange`, and is written with autograd.numpy and this library's functions. What is
        to be differentiated by must be among the params, not taken from around the function. Products with its transpose
        are derived from it, unless it has a method ``transpose(u, *params)``.
    b : array of float32, float64, complex64 or complex128
        This rank's block of the right-hand side.
    *params : pytree of arrays
        What the operator depends on; derivatives flow to all of them.
    method : {"cg", "gmres", "bicgstab"}
        Conjugate gradients, for a symmetric (complex: Hermitian) positive definite operator; the others for any that
        isn't singular. Reductions over all ranks: one in each iteration, with "bicgstab" two, for two products.
    preconditioner : callable, optional
        ``preconditioner(r, *params)`` or ``preconditioner(r)``, by the number of arguments that it requires, returns an
        approximation of this rank's block of A⁻¹ r, linear in r: for "cg" symmetric positive definite. No derivative
        flows through it.
    preconditioner_transpose : callable or "derived", optional
        The transpose of the preconditioner (without conjugation), for the adjoint systems of "gmres" and "bicgstab";
        "derived" takes it from a trace of the preconditioner. By default its attribute ``T``, what its method
        ``transpose()`` returns, or else itself.
    side : {"right", "left"}, optional
        Of the preconditioner, for "gmres" and "bicgstab"; "right" by default.
    rtol, atol : float
        The 2-norm of the residual, over all ranks, must fall to ``max(rtol * norm(b), atol)``; also in the solves that
        derivatives take, with their own right-hand sides.
    maxiter : int, optional
        10 times the number of unknowns by default, and not more than 10,000.
    restart : int
        Iterations of "gmres" before it starts anew; it keeps as many blocks.
    x0 : array of the shape of `b`, optional
        Where to start; zero by default. No derivative flows through it.
    batch : int
        How many leading axes of `b` count systems with the same operator, each solved to its own tolerance by an
        iteration of its own; all share the reductions, and `matvec` gets all blocks at once. With 0 (the default) leading
        axes are unknowns like others.
    verify : bool
        Whether to look at the true residual at the end, which must be within 10 times the tolerance (or within rounding),
        and whether constants are mapped to zero: one product each.
    comm : mpi4py intracommunicator, optional
        The ranks that hold the system.
    callback : callable, optional
        ``callback(norm)`` is called on every rank after each iteration (not in those of derivatives).

    Returns
    -------
    array of the shape and dtype of `b`
        This rank's block of u.

    Raises
    ------
    TypeError
        On all ranks, where `b` isn't floats; where `matvec` returns something else than an array of floats (complex for a
        real `b`), or uses a traced value from around it.
    ValueError
        On all ranks, where ranks give different settings, there is no such method, a tolerance can't be met, an array has
        another shape than `b`, or `b` or the operator isn't finite; in the derivative, where the operator isn't symmetric
        with "cg".
    Exception
        On all ranks, what a function of the user's raises on one: its own there, one of the same kind and text elsewhere.
        Where it leaves other ranks waiting for its messages, the job ends: see the chapter on faults.
    ConvergenceError
        On all ranks, with the residual after each iteration, where they don't reach the tolerance or break down: for
        "cg" where the operator isn't positive definite, for all where it is singular or not linear.

    Ranks
    -----
    All ranks of `comm` call it.

    Adjoint
    -------
    One solve of Aᵀ λ = ū (without conjugation), on all ranks: b gets λ, and the params get -(∂(A u)/∂params)ᵀ λ. Forward
    mode and higher orders take one solve for each derivative.

    Examples
    --------
    >>> print(mpiad.linalg.solve(lambda u, k: k * u, np.ones(2), 4.0))
    [0.25 0.25]
    """
    settings = Settings(method, rtol, atol, maxiter, comm, callback, restart, side, batch, verify, with_x0=x0 is not None)
    functions = {
        "matvec": matvec, "preconditioner": preconditioner, "preconditioner_transpose": preconditioner_transpose,
        "callback": callback,
    }  # fmt: skip
    settings = agree_on(settings, _mistake(functions, b, x0, settings), preconditioner)
    leaves, build = flatten(params)
    start = None if x0 is None else stop_gradient(x0)
    problem = Problem(matvec, preconditioner, build, settings, start, preconditioner_transpose, talkers=set())
    return solution(b, *leaves, problem=problem)


def _mistake(functions: dict[str, Any], b: Array, x0: Array, settings: Settings) -> Exception | None:
    for name, fun in functions.items():
        if name == "preconditioner_transpose" and isinstance(fun, str) and fun == DERIVED:
            continue
        if not callable(fun) and (fun is not None or name == "matvec"):
            return TypeError(f"linalg.solve: {name} must be a function, but got {type(fun).__name__} {fun!r}.")
    plain = stop_gradient(b)
    return (
        _wrong_array(plain, stop_gradient(x0))
        or mistake_in(settings, METHODS, np.ndim(plain))
        or unfit_preconditioner(functions.values(), plain)
    )


def _wrong_array(b: Array, x0: Array) -> Exception | None:
    allowed = "an array of dtype float32, float64, complex64 or complex128, this rank's block"
    if not isinstance(b, np.ndarray) and not is_device_array(b):
        return TypeError(f"linalg.solve: b must be {allowed}, but got {type(b).__name__}.")
    if b.dtype.char not in "fdFD" or not b.dtype.isnative:
        cure = conversion(b.dtype, "b") or "Convert it."
        return TypeError(f"linalg.solve: b must be {allowed}, but got dtype {b.dtype}. {cure}")
    if x0 is not None and is_device_array(x0) != is_device_array(b):
        return TypeError("linalg.solve: x0 must be where b is, but one is on the host and the other on a device.")
    if x0 is not None and np.shape(x0) != b.shape:
        return ValueError(f"linalg.solve: x0 must have the shape of b, {b.shape}, but has {np.shape(x0)}.")
    return None
