"""Preconditioned conjugate gradients on blocks, with one reduction in each iteration.

The inner products of an iteration are brought to one place: A is applied to the preconditioned residual z, and A p follows
by the recurrence of p. On many ranks a reduction costs more than the two vector updates that this adds.

References
----------
A. T. Chronopoulos and C. W. Gear, s-step iterative methods for symmetric linear systems, Journal of Computational and
Applied Mathematics 25 (1989), algorithm 2.2 with s = 1.
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
        Gets the norm of the residual at the start and after each iteration as its history.
    b : array
        This rank's block of the right-hand side.
    x0 : array of the shape of `b`, or None
        Where to start; zero by default.

    Returns
    -------
    array of the shape and dtype of `b`

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
    x = np.zeros(b.shape, b.dtype) if x0 is None else np.array(x0, b.dtype)
    r = b.copy() if x0 is None else np.asarray(b - system.apply(x), b.dtype)
    target, limit = system.start(b)
    if target == 0.0:
        return np.zeros(b.shape, b.dtype)
    p, s, step = np.zeros_like(r), np.zeros_like(r), np.empty_like(r)
    rz_before, curvature_before = 1.0, 1.0
    for _ in range(limit + 1):
        z = system.precondition(r)
        w = system.apply(z)
        rr, rz, wz = system.dots((r, r), (r, z), (w, z))
        _check(system, r, rr, z, rz, w, wz)
        if system.note(math.sqrt(rr)) <= target:
            return x
        beta = rz / rz_before if len(system.history) > 1 else 0.0
        curvature = _positive(system, wz - beta * beta * curvature_before)
        for direction, new in ((p, z), (s, w)):
            direction *= beta
            direction += new
        alpha = rz / curvature
        x += np.multiply(p, alpha, out=step)
        r -= np.multiply(s, alpha, out=step)
        rz_before, curvature_before = rz, curvature
    return system.fail(f"the residual didn't fall to {target:.3e} within maxiter={limit} iterations")


def _check(
    system: System, r: LocalArray, rr: float, z: LocalArray, rz: float, w: LocalArray, wz: float
) -> None:
    if not math.isfinite(rr + rz + wz):
        system.require_finite(rr, r, "the residual")
        system.require_finite(rz, z, "what preconditioner returned")
        system.require_finite(wz, w, "what matvec returned")
    if rz <= 0.0 < rr:
        system.note(math.sqrt(rr))
        system.fail(f"it needs a symmetric positive definite preconditioner, but r·z = {rz:.3e} for a residual r not zero")


def _positive(system: System, curvature: float) -> float:
    """Return p·Ap, which is positive for every p of a positive definite operator."""
    if curvature > 0.0:
        return curvature
    why = "it is indefinite or not symmetric. Is its sign right?"
    if curvature == 0.0:
        why = "it is singular. Is this a pure Neumann problem? Fix the value of one cell, or add a small multiple of u."
    return system.fail(
        f"it needs a symmetric positive definite operator, but p·Ap = {curvature:.3e} for a p that isn't zero: {why}"
    )
