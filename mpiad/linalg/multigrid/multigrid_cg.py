"""Conjugate gradients with V-cycles, which return the operator's product with their result at half its price.

A is applied to the preconditioned residual z, and A p follows by the recurrence of p, as in `conjugate_gradients` of this
room; the norm of the residual is known before the cycle that it may save.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np

from mpiad._typing import LocalArray
from mpiad.errors import ConvergenceError, NotFiniteError
from mpiad.linalg.multigrid.cg_vectors import FusedVectors, Vectors, squares_of
from mpiad.linalg.multigrid.level import Level
from mpiad.linalg.vectors import on_host
from mpiad.transport import SUM, Channel
from mpiad.transport.agreement import agreed, raise_together
from mpiad.transport.collectives import allreduce
from mpiad.transport.user_failures import DeferredFailures

__all__ = ["Tolerance", "conjugate"]


_CALL = "linalg.Multigrid.solve"
_RIGHT = "the right-hand side"
_LEAST = 1e-260  # of the square of its norm: that of a residual 1e-20 times as large is still a normal number


class Tolerance(NamedTuple):
    """When to stop."""

    # `rtol`, `atol`: the residual's norm is to fall to ``max(rtol * norm(b), atol)``.
    rtol: float
    atol: float
    maxiter: int
    callback: Callable[[float], Any] | None
    reported: bool  # whether any rank has one, which may raise
    # Returns what may have made the iteration long, for the message of an error; all ranks call it.
    remark: Callable[[], str]


def conjugate(
    level: Level, r: LocalArray, used: Channel, tolerance: Tolerance, b: LocalArray | None = None
) -> tuple[LocalArray, list[float]]:
    """Solve systems of the finest level, each by an iteration of its own; collective.

    `r`, shape (systems, colours, size), are the right-hand sides, or the residuals of what is to be improved, and is
    overwritten; `b` is what the relative tolerance refers to, where that isn't `r`. Returned are the solutions, and the
    norm of the residual at the start and after each iteration, of all systems together.

    On all ranks it raises a ValueError where `r` or `b` isn't finite, what the callback raises on one, and a
    ConvergenceError where the iterations are used up or the operator isn't positive definite.
    """
    vectors = (FusedVectors if level.is_compiled else Vectors)(r)
    norms = _norms(used, r, squares_of(r), _RIGHT if b is None else "the residual of x0")
    targets = np.maximum(tolerance.rtol * (norms if b is None else _norms(used, b, squares_of(b), _RIGHT)), tolerance.atol)
    before, curvature, failures = np.full(len(r), np.inf), np.zeros(len(r)), DeferredFailures(used.user, _CALL)
    history = [math.hypot(*norms)]
    while (active := norms > targets).any():
        if len(history) > tolerance.maxiter:
            if tolerance.reported:
                failures.raise_together()
            found = f"the residual didn't fall to {math.hypot(*targets):.3e} within maxiter={tolerance.maxiter} iterations"
            _fail(used, f"{found}; {tolerance.remark()}", history)
        # Both belong to the level, and are overwritten by its next cycle.
        z = level.cycle(r)
        w = level.product_after(r)
        mine = vectors.products(z, w) if failures.error is None else np.full((2, len(r)), np.nan)
        rz, wz = _sums(used, mine)
        # Those that have arrived stand still. As in `conjugate_gradients`: p·Ap by the recurrence of p, so that one
        # reduction is enough.
        beta = np.where(active, rz / before, 0.0)
        curvature = wz - beta * beta * curvature
        wrong = active & ~((rz > 0.0) & (curvature > 0.0))
        if wrong.any():
            failures.raise_together()
            found = f"r·z = {rz[wrong][0]:.3e} and p·Ap = {curvature[wrong][0]:.3e} should be positive"
            _fail(used, f"{found}: rounding has taken over. Ask for less by rtol; {tolerance.remark()}", history)
        squares = vectors.advance(z, w, beta, np.where(active, rz, 0.0) / np.where(active, curvature, 1.0))
        before, curvature = np.where(active, rz, np.inf), np.where(active, curvature, 0.0)
        norms = _norms(used, r, squares, "the residual")
        history.append(math.hypot(*norms))
        if tolerance.callback is not None:
            failures.attempt("callback", tolerance.callback, history[-1])
    if tolerance.reported and len(history) > 1:
        failures.raise_together()  # of the last callback, after which there is no sum
    return vectors.x, history


def _sums(used: Channel, local: np.ndarray) -> np.ndarray:
    return allreduce(used, local, SUM, _CALL)


def _norms(used: Channel, r: LocalArray, mine: np.ndarray, name: str) -> np.ndarray:
    """Return the norms of r over all ranks, of this rank's squares of them."""
    # NaN on one rank makes the sum NaN on all, which so agree that something is wrong.
    total = _sums(used, mine)
    if not np.isfinite(total).all():
        bad = int(on_host(np.sum(~np.isfinite(r))))
        text = f"linalg.Multigrid.solve: {name} is not finite: {bad} entries on rank {used.rank} are NaN or infinite."
        raise_together(used, NotFiniteError(text) if bad else None)
        raise agreed(used, ValueError(f"linalg.Multigrid.solve: the norm of {name} overflows. Scale the system."))
    if name == _RIGHT and (small := total < _LEAST).any():
        count = _sums(used, on_host(np.sum(r != 0.0, axis=tuple(range(1, r.ndim)))).astype(np.float64))
        if (small & (count > 0.0)).any():
            norm = math.sqrt(total[small & (count > 0.0)][0])
            raise agreed(used, ValueError(
                f"linalg.Multigrid.solve: the norm of {name}, {norm:.3e}, is so small that squares of residuals vanish. "
                "Scale the system."
            ))  # fmt: skip
    return np.sqrt(total)


def _fail(used: Channel, what: str, history: list[float]) -> NoReturn:
    raise agreed(used, ConvergenceError(
        f"linalg.Multigrid.solve: {what}. After {len(history) - 1} iterations the norm of the residual is "
        f"{history[-1]:.3e}, from {history[0]:.3e} at the start (the history of this error has them all).",
        history,
    ))  # fmt: skip
