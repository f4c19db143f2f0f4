"""Preconditioned conjugate gradients on blocks, with two reductions in each iteration.

References
----------
Y. Saad, Iterative Methods for Sparse Linear Systems, 2nd ed., algorithm 9.1.
"""

from __future__ import annotations

import math

import numpy as np

from mpiad._typing import LocalArray
from mpiad.linalg.system import System

__all__ = ["conjugate_gradients"]


def conjugate_gradients(system: System, b: LocalArray, x0: LocalArray | None) -> LocalArray:
    """Solve a symmetric positive definite system.

    Parameters
    ----------
    system : System
        Gets the norm of the residual after each iteration as its history.
    b : array
        This rank's block of the right-hand side.
    x0 : array of the shape of `b`, or None
        Where to start; zero by default.

    Returns
    -------
    array of the shape of `b`

    Raises
    ------
    ValueError
        On all ranks, where `b` or a product with the operator isn't finite.
    ConvergenceError
        On all ranks, where operator or preconditioner isn't positive definite, or the iterations are used up.

    Ranks
    -----
    All ranks call it.
    """
    x = np.zeros(b.shape, b.dtype) if x0 is None else x0.astype(b.dtype)
    r = b.copy() if x0 is None else np.asarray(b - system.apply(x), b.dtype)
    z = system.precondition(r)
    bb, rr, rz = system.dots((b, b), (r, r), (r, z))
    system.require_finite(bb, b, "b")
    if bb == 0.0:
        return np.zeros(b.shape, b.dtype)
    target = max(system.settings.rtol * math.sqrt(bb), system.settings.atol)
    _note(system, rr, rz)
    if system.history[0] <= target:
        return x
    p, step = z.astype(b.dtype), np.empty_like(r)
    for _ in range(_limit(system, b)):
        q = system.apply(p)
        alpha = rz / _curvature(system, p, q)
        np.multiply(p, alpha, out=step)
        x += step
        np.multiply(q, alpha, out=step, casting="same_kind")
        r -= step
        z = system.precondition(r)
        before = rz
        rr, rz = system.dots((r, r), (r, z)) if z is not r else system.dots((r, r)) * 2
        _note(system, rr, rz)
        if system.history[-1] <= target:
            return x
        p *= rz / before
        p += z
    return system.fail(f"the residual didn't fall to {target:.3e} within maxiter={len(system.history) - 1} iterations")


def _limit(system: System, b: LocalArray) -> int:
    if system.settings.maxiter is not None:
        return system.settings.maxiter
    unknowns = system.dots((np.array([b.size], float), np.ones(1)))[0]
    return int(min(10 * unknowns, 10_000))


def _curvature(system: System, p: LocalArray, q: LocalArray) -> float:
    """Return p·Ap, which is positive for every p of a positive definite operator."""
    (curvature,) = system.dots((p, q))
    if curvature > 0.0 and curvature < math.inf:
        return curvature
    system.require_finite(curvature, q, "the product with the operator (what matvec returned)")
    kind = "singular (a pure Neumann problem? Fix the value of one cell, or add a small multiple of u)"
    return system.fail(
        f"it needs a symmetric positive definite operator, but p·Ap = {curvature:.3e} for a p that isn't zero: "
        + (f"the operator is {kind}" if curvature == 0.0 else "it is indefinite; is its sign right?")
    )


def _note(system: System, rr: float, rz: float) -> None:
    if not math.isfinite(rr + rz):
        system.fail("the residual is no longer finite")
    system.history.append(math.sqrt(rr))
    if system.settings.callback is not None and len(system.history) > 1:
        system.settings.callback(system.history[-1])
    if rz <= 0.0 < rr:
        system.fail(f"it needs a symmetric positive definite preconditioner, but r·z = {rz:.3e} for a residual r not zero")
