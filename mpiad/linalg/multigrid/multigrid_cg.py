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
from mpiad.linalg.multigrid.level import Level
from mpiad.linalg.vectors import inner, on_host
from mpiad.transport import SUM, Channel
from mpiad.transport.agreement import agreed, raise_together
from mpiad.transport.collectives import allreduce
from mpiad.transport.user_failures import DeferredFailures

__all__ = ["Tolerance", "conjugate"]


_CALL = "linalg.Multigrid.solve"
_RIGHT = "the right-hand side"
_LEAST = 1e-260  # of the square of its norm: that of a residual 1e-20 times as large is still a normal number


class Tolerance(NamedTuple):
    """When to stop.

    Parameters
    ----------
    rtol, atol : float
        The residual's norm is to fall to ``max(rtol * norm(b), atol)``.
    reported : bool
        Whether any rank has one, which may raise.
    remark : callable
        Returns what may have made the iteration long, for the message of an error; all ranks call it.
    """

    rtol: float
    atol: float
    maxiter: int
    callback: Callable[[float], Any] | None
    reported: bool
    remark: Callable[[], str]


def conjugate(
    level: Level, r: LocalArray, used: Channel, tolerance: Tolerance, b: LocalArray | None = None
) -> tuple[LocalArray, list[float]]:
    """Solve the system of the finest level.

    Parameters
    ----------
    r : array of shape (colours, size)
        The right-hand side, or the residual of what is to be improved. Overwritten.
    b : array, optional
        What the relative tolerance refers to, where it isn't `r`.

    Returns
    -------
    array of shape (colours, size)
    list of float
        The norm of the residual at the start and after each iteration.

    Raises
    ------
    ValueError
        On all ranks, where `r` or `b` isn't finite.
    Exception
        On all ranks, what the callback raises on one.
    ConvergenceError
        On all ranks, where the iterations are used up, or the operator isn't positive definite.

    Ranks
    -----
    All ranks of the channel call it.
    """
    x, p, s, step = np.zeros_like(r), np.zeros_like(r), np.zeros_like(r), np.empty_like(r)
    history = [_norm(used, r, _RIGHT if b is None else "the residual of x0")]
    target = max(tolerance.rtol * (history[0] if b is None else _norm(used, b, _RIGHT)), tolerance.atol)
    before, curvature, failures = 1.0, 0.0, DeferredFailures(used.user, _CALL)
    while history[-1] > target:
        if len(history) > tolerance.maxiter:
            if tolerance.reported:
                failures.raise_together()
            found = f"the residual didn't fall to {target:.3e} within maxiter={tolerance.maxiter} iterations"
            _fail(used, f"{found}; {tolerance.remark()}", history)
        # Both belong to the level, and are overwritten by its next cycle.
        z = level.cycle(r)
        w = level.product_after(r)
        rz, wz = _sums(used, *(_products((r, z), (w, z)) if failures.error is None else [math.nan] * 2))
        # As in `conjugate_gradients`: p·Ap by the recurrence of p, so that one reduction is enough.
        beta = rz / before if len(history) > 1 else 0.0
        curvature = wz - beta * beta * curvature
        if not (rz > 0.0 and curvature > 0.0):
            failures.raise_together()
            found = f"r·z = {rz:.3e} and p·Ap = {curvature:.3e} should be positive"
            _fail(used, f"{found}: rounding has taken over. Ask for less by rtol; {tolerance.remark()}", history)
        for direction, new in ((p, z), (s, w)):
            direction *= beta
            direction += new
        x += np.multiply(p, rz / curvature, out=step)
        r -= np.multiply(s, rz / curvature, out=step)
        before = rz
        history.append(_norm(used, r, "the residual"))
        if tolerance.callback is not None:
            failures.attempt("callback", tolerance.callback, history[-1])
    if tolerance.reported and len(history) > 1:
        failures.raise_together()  # of the last callback, after which there is no sum
    return x, history


def _products(*pairs: tuple[LocalArray, LocalArray]) -> list[float]:
    """Return this rank's share of inner products, on the host: one copy for all of them, of arrays on a device."""
    return inner(*[(x.reshape(1, -1), y.reshape(1, -1)) for x, y in pairs])[:, 0].tolist()


def _sums(used: Channel, *local: float) -> list[float]:
    return allreduce(used, np.array(local, np.float64), SUM, "linalg.Multigrid.solve").tolist()


def _norm(used: Channel, r: LocalArray, name: str) -> float:
    # NaN on one rank makes the sum NaN on all, which so agree that something is wrong.
    square = _sums(used, *_products((r, r)))[0]
    if not math.isfinite(square):
        bad = int(on_host(np.sum(~np.isfinite(r))))
        text = f"linalg.Multigrid.solve: {name} is not finite: {bad} entries on rank {used.rank} are NaN or infinite."
        raise_together(used, NotFiniteError(text) if bad else None)
        raise agreed(used, ValueError(f"linalg.Multigrid.solve: the norm of {name} overflows. Scale the system."))
    if name == _RIGHT and square < _LEAST and _sums(used, float(on_host(np.sum(r != 0.0))))[0]:
        raise agreed(used, ValueError(
            f"linalg.Multigrid.solve: the norm of {name}, {math.sqrt(square):.3e}, is so small that squares of residuals "
            "vanish. Scale the system."
        ))  # fmt: skip
    return math.sqrt(square)


def _fail(used: Channel, what: str, history: list[float]) -> NoReturn:
    raise agreed(used, ConvergenceError(
        f"linalg.Multigrid.solve: {what}. After {len(history) - 1} iterations the norm of the residual is "
        f"{history[-1]:.3e}, from {history[0]:.3e} at the start (the history of this error has them all).",
        history,
    ))  # fmt: skip
