"""`solve`: a distributed linear system whose operator is a function."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral
from typing import Any

import numpy as np

from mpiad._typing import Comm, Function, LocalArray, Tree
from mpiad.differentiation.trees import flatten
from mpiad.linalg.implicit import METHODS, Problem, solution
from mpiad.linalg.system import Settings
from mpiad.primitives import stop
from mpiad.transport import channel
from mpiad.transport.agreement import raise_together
from mpiad.transport.recovery import recoverable

__all__ = ["solve"]


@recoverable("linalg.solve")
def solve(
    matvec: Function,
    b: LocalArray,
    *params: Tree,
    method: str = "cg",
    preconditioner: Function | None = None,
    rtol: float = 1e-8,
    atol: float = 0.0,
    maxiter: int | None = None,
    x0: LocalArray | None = None,
    comm: Comm = None,
    callback: Callable[[float], Any] | None = None,
) -> LocalArray:
    """Solve A(params) u = b, each rank holding a block of u and b; derivatives by the implicit function theorem.

    Parameters
    ----------
    matvec : callable
        ``matvec(u, *params)`` returns this rank's block of A u, linear in u, from this rank's block of u. It may
        communicate, as by `Domain.exchange`, and is written with autograd.numpy and this library's functions. What is
        to be differentiated by must be among the params, not taken from around the function.
    b : array of float32 or float64
        This rank's block of the right-hand side.
    *params : nest of arrays
        What the operator depends on; derivatives flow to all of them.
    method : {"cg"}
        Conjugate gradients, for a symmetric positive definite operator.
    preconditioner : callable, optional
        ``preconditioner(r, *params)`` or ``preconditioner(r)``, by the number of arguments that it requires, returns an
        approximation of this rank's block of A⁻¹ r: for "cg" symmetric positive definite. No derivative flows through it.
    rtol, atol : float
        The 2-norm of the residual, over all ranks, must fall to ``max(rtol * norm(b), atol)``; also in the solves that
        derivatives take, with their own right-hand sides.
    maxiter : int, optional
        10 times the number of unknowns by default, and not more than 10,000.
    x0 : array of the shape of `b`, optional
        Where to start; zero by default. No derivative flows through it.
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
        On all ranks, where `b` isn't real floats; where `matvec` returns something else than an array of real floats, or
        uses a traced value from around it.
    ValueError
        On all ranks, where there is no such method, a tolerance can't be met, an array has another shape than `b`, or `b`
        or the operator isn't finite; in the derivative, where the operator isn't symmetric.
    ConvergenceError
        On all ranks, with the residual after each iteration, where they don't reach the tolerance or break down: for
        "cg" where the operator isn't positive definite.

    Ranks
    -----
    All ranks of `comm` call it.

    Adjoint
    -------
    One solve of Aᵀ λ = ū, on all ranks: b gets λ, and the params get -(∂(A u)/∂params)ᵀ λ. Forward mode and higher
    orders take one solve for each derivative.
    """
    settings = Settings(method, rtol, atol, maxiter, comm, callback)
    error = _mistake(matvec, b, x0, preconditioner, settings)
    raise_together(channel(comm, "linalg.solve"), error)
    leaves, build = flatten(params)
    start = None if x0 is None else stop(x0)
    return solution(b, *leaves, problem=Problem(matvec, preconditioner, build, settings, start))


def _mistake(matvec: Any, b: Any, x0: Any, preconditioner: Any, settings: Settings) -> Exception | None:
    for name, fun in (("matvec", matvec), ("preconditioner", preconditioner), ("callback", settings.callback)):
        if not callable(fun) and (fun is not None or name == "matvec"):
            return TypeError(f"linalg.solve: {name} must be a function, but got {type(fun).__name__} {fun!r}.")
    return _wrong_array(stop(b), stop(x0)) or _wrong_setting(settings)


def _wrong_array(b: Any, x0: Any) -> Exception | None:
    allowed = "an array of dtype float32 or float64, this rank's block"
    if not isinstance(b, np.ndarray):
        return TypeError(f"linalg.solve: b must be {allowed}, but got {type(b).__name__}.")
    if b.dtype not in (np.float32, np.float64):
        advice = "Solve for real and imaginary part apart." if b.dtype.kind == "c" else "Convert it."
        return TypeError(f"linalg.solve: b must be {allowed}, but got dtype {b.dtype}. {advice}")
    if x0 is not None and np.shape(x0) != b.shape:
        return ValueError(f"linalg.solve: x0 must have the shape of b, {b.shape}, but has {np.shape(x0)}.")
    return None


def _wrong_setting(s: Settings) -> Exception | None:
    if s.method not in METHODS:
        listed = ", ".join(map(repr, METHODS))
        return ValueError(f"linalg.solve: method must be one of {listed}, but got {s.method!r}.")
    if not (0 <= s.rtol < math.inf and 0 <= s.atol < math.inf and s.rtol + s.atol > 0):
        return ValueError(
            f"linalg.solve: rtol and atol must be zero or more, and one above zero, but got {s.rtol!r} and {s.atol!r}."
        )
    if s.maxiter is not None and (not isinstance(s.maxiter, Integral) or s.maxiter < 1):
        return ValueError(f"linalg.solve: maxiter must be None or an integer above zero, but got {s.maxiter!r}.")
    return None
