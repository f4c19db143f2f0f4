"""Conjugate gradients preconditioned by multigrid V-cycles.

A is applied to the preconditioned residual z. After the V-cycle that computes z, half of the equations A z = r are
satisfied, so this takes half a product. A p, for the search direction p, follows from A z by the recurrence of p, as in
`linalg.krylov.conjugate_gradients`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NoReturn

import numpy as np

from mpiad._typing import LocalArray
from mpiad.errors import ConvergenceError, NotFiniteError
from mpiad.linalg.multigrid.hierarchy import Level
from mpiad.linalg.system import Settings
from mpiad.linalg.vectors import column, inner, on_host
from mpiad.transport import SUM, Channel
from mpiad.transport.core.agreement import agreed, raise_together
from mpiad.transport.core.collectives import allreduce
from mpiad.transport.exits.user_failures import DeferredFailures

_CALL = "linalg.Multigrid.solve"
_RIGHT = "the right-hand side"
_SMALLEST_SQUARE = 1e-260  # bound for |b|², so that squares of residuals of size 1e-20 |b| don't underflow


def preconditioned_cg(
    level: Level, r: LocalArray, group: Channel, settings: Settings, slowness_reason: Callable[[], str],
    b: LocalArray | None = None,
) -> tuple[LocalArray, list[float]]:  # fmt: skip
    """Return the solutions and norms; `r` is overwritten. ``slowness_reason()``, collective, explains slow convergence."""
    # `r`, of shape (systems, colors, size), contains the right-hand sides or, if `b` is passed, the residuals of x0.
    norms = _norms(group, r, _RIGHT if b is None else "the residual of x0")
    targets = np.maximum(settings.rtol * (norms if b is None else _norms(group, b, _RIGHT)), settings.atol)
    # The solutions, the directions p, and the products A p.
    x, p, s = np.zeros_like(r), np.zeros_like(r), np.zeros_like(r)
    before, curvature, failures = np.full(len(r), np.inf), np.zeros(len(r)), DeferredFailures(group.user, _CALL)
    history = [math.hypot(*norms)]
    while (active := norms > targets).any():
        if len(history) > int(settings.maxiter or 0):
            if settings.reported:
                failures.raise_together()
            text = f"the residual didn't fall to {math.hypot(*targets):.3e} within maxiter={settings.maxiter} iterations"
            _fail(group, f"{text}; {slowness_reason()}", history)
        # Both arrays are memory of the level, which its next cycle overwrites.
        z = level.cycle(r)
        w = level.product_after(r)
        local = _products((r, z), (w, z)) if failures.error is None else np.full((2, len(r)), np.nan)
        rz, wz = allreduce(group, local, SUM, _CALL)
        # Converged systems don't change. As in `conjugate_gradients`, p·Ap follows from a recurrence.
        beta = np.where(active, rz / before, 0.0)
        curvature = wz - beta * beta * curvature
        invalid = active & ~((rz > 0.0) & (curvature > 0.0))
        if invalid.any():
            failures.raise_together()
            text = f"r·z = {rz[invalid][0]:.3e} and p·Ap = {curvature[invalid][0]:.3e} should be positive"
            _fail(group, f"{text}: rounding errors dominate. Increase rtol; {slowness_reason()}", history)
        for direction, change in ((p, z), (s, w)):
            direction *= column(direction, beta)
            direction += change
        alpha = column(x, np.where(active, rz, 0.0) / np.where(active, curvature, 1.0))
        x += alpha * p
        r -= alpha * s
        before, curvature = np.where(active, rz, np.inf), np.where(active, curvature, 0.0)
        norms = _norms(group, r, "the residual")
        history.append(math.hypot(*norms))
        if settings.callback is not None:
            failures.attempt("callback", settings.callback, history[-1])
    if settings.reported and len(history) > 1:
        failures.raise_together()  # no reduction follows the last call of the callback
    return x, history


def _products(*pairs: tuple[LocalArray, LocalArray]) -> np.ndarray:
    """Return this rank's part of the inner products of pairs of arrays (systems, ...), shape (pairs, systems)."""
    return inner(*[(x.reshape(len(x), -1), y.reshape(len(y), -1)) for x, y in pairs])


def _norms(group: Channel, r: LocalArray, name: str) -> np.ndarray:
    """Return the norm of each system's part of r over all ranks."""
    # NaN on one rank makes the sum NaN on all ranks, so that all ranks raise.
    total = allreduce(group, _products((r, r))[0], SUM, _CALL)
    if not np.isfinite(total).all():
        bad = int(on_host(np.sum(~np.isfinite(r))))
        text = f"{_CALL}: {name} is not finite: {bad} entries on rank {group.rank} are NaN or infinite."
        raise_together(group, NotFiniteError(text) if bad else None)
        raise agreed(group, ValueError(f"{_CALL}: the norm of {name} overflows. Scale the system."))
    if name == _RIGHT and (small := total < _SMALLEST_SQUARE).any():
        nonzero = on_host(np.sum(r != 0.0, axis=tuple(range(1, r.ndim)))).astype(np.float64)
        count = allreduce(group, nonzero, SUM, _CALL)
        if (small & (count > 0.0)).any():
            norm = math.sqrt(total[small & (count > 0.0)][0])
            small = f"the norm of {name}, {norm:.3e}, is so small that squares of residuals vanish"
            raise agreed(group, ValueError(f"{_CALL}: {small}. Scale the system."))
    return np.sqrt(total)


def _fail(group: Channel, problem: str, history: list[float]) -> NoReturn:
    norms = f"{history[-1]:.3e}, from {history[0]:.3e} at the start (`history` of this error contains all norms)"
    text = f"{_CALL}: {problem}. After {len(history) - 1} iterations the norm of the residual is {norms}."
    raise agreed(group, ConvergenceError(text, history))
