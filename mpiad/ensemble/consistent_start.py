"""Initial states that satisfy the algebraic equations of M u' = f with a singular M.

Let the columns of N and L be bases of the null spaces of M and Mᵀ, and let J = ∂f/∂u. The algebraic equations are
Lᵀ f(u, p, t) = 0. The initial state is u0 + N z with unknown z, which leaves M u0 unchanged. If the system has index 1,
A = Lᵀ J N is invertible, and Newton's method finds z for each trajectory independently.

Afterwards, two steps u - N A⁻¹ Lᵀ f(u, p, t) with the last A are computed in traced arithmetic, for the derivatives. The
first step gives correct first derivatives, as the implicit function theorem does; the second step gives correct second
derivatives.
"""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.batch import Batch, two_at_least
from mpiad.ensemble.column_lu import ColumnLU, products
from mpiad.ensemble.derivative import derivative_of, locked
from mpiad.ensemble.field_jacobian import jacobian_of
from mpiad.ensemble.linearization import Field

_MOST_STEPS, _TRACED_STEPS = 30, 2
# The iteration ends when a correction is at most this fraction of the tolerance; the next correction would be much smaller.
_CLOSE = 1e-3


def consistent_start(batch: Batch, mass: Array | None, rtol: Array | float, atol: Array | float) -> tuple[Batch, Array]:
    """Return a batch on the host with consistent initial states, NaN if there are none, and the mask of failures, (N,)."""
    free = None if mass is None or not batch.size else null_vectors(mass)
    if free is None or mass is None or not free.shape[1]:
        return batch, np.zeros(batch.size, bool)
    equations = null_vectors(mass.T)
    plain = batch.plain()
    ids = two_at_least(batch.size)
    with np.errstate(all="ignore"):
        u, gain, converged = _newton(plain, ids, free, equations, rtol, atol)
    # NaN of failed trajectories would otherwise enter the derivatives with respect to shared parameters.
    gain, shift = np.where(converged, gain, 0), np.where(converged, u - plain.u0[:, ids], 0)
    converged = converged[: batch.size]
    # The Newton steps in traced arithmetic.
    real, field, leaves = plain.u0.real.dtype, Field(batch), batch.p.chosen(ids)
    u, t = batch.u0[:, ids] + shift, (batch.start * np.ones(batch.size))[ids].astype(real)
    with np.errstate(all="ignore"):
        for _ in range(_TRACED_STEPS):
            u = u - applied(gain, field.array(u, leaves, t))
    u0 = anp.where(converged, u[:, : batch.size], np.nan)
    return batch._replace(u0=u0), ~converged


def null_vectors(matrix: Array) -> Array:
    """Return a basis of the null space of a matrix, shape (d, m); unit vectors if it has m columns of zeros."""
    nullity = len(matrix) - int(np.linalg.matrix_rank(matrix))
    zero = np.flatnonzero(~matrix.any(axis=0))
    if len(zero) == nullity:
        return np.eye(len(matrix))[:, zero]
    return np.linalg.svd(matrix)[2][len(matrix) - nullity :].T


def _newton(
    batch: Batch, ids: Array, free: Array, equations: Array, rtol: Array | float, atol: Array | float
) -> tuple[Array, Array, Array]:
    """Return the states by Newton's method, N A⁻¹ Lᵀ, (d, d, n), and a mask of convergence; `free`, `equations`: N, L."""
    u, p = batch.u0[:, ids].copy(), batch.parameters(ids)
    t, k = batch.start[ids].astype(u.real.dtype), np.empty_like(u)
    derivative = derivative_of(batch.f, batch.shape)
    derivative.check(locked(u), p, locked(t))
    jacobian = jacobian_of(batch)
    gain = np.zeros((len(u), *u.shape), u.dtype)
    converged = np.zeros(len(ids), bool)
    for _ in range(_MOST_STEPS):
        derivative.write(k, u, p, t)
        new = gains(jacobian.matrices(u, p, t), free, equations)
        # If all equations hold, the state is consistent for any index of the system.
        holds = np.all(products(equations.T, k) == 0, axis=0)
        change = np.where(holds, 0, applied(new, k))
        gain[:, :, ~converged] = np.where(holds & ~np.isfinite(new).all(axis=(0, 1)), 0, new)[:, :, ~converged]
        u = np.where(converged, u, u - change)
        # The relative size of a change of zero is zero, even if the tolerance is zero.
        size = np.where(change == 0, 0, np.abs(change) / (atol + rtol * np.abs(u))).max(axis=0)
        converged |= size <= _CLOSE
        if converged.all():
            break
    return u, gain, converged


def gains(jacobian: Array, free: Array, equations: Array) -> Array:
    """Return the matrices N A⁻¹ Lᵀ of n columns, shape (d, d, n), given their Jacobians and the bases N and L."""
    inner = products(equations.T, np.swapaxes(products(free.T, np.swapaxes(jacobian, 0, 1)), 0, 1))
    lu, d, n = ColumnLU(inner), len(jacobian), jacobian.shape[-1]
    gain = np.empty((d, d, n), jacobian.dtype)
    for j in range(d):
        right = equations[j][:, None] + np.zeros((1, n), jacobian.dtype)
        lu.solve(right)
        gain[:, j] = products(free, right)
    return gain


def applied(gain: Array, k: Array) -> Array:
    """Return the matrix-vector product of each column; k may be traced."""
    total = gain[:, 0] * k[0]
    for j in range(1, len(gain)):
        total = total + gain[:, j] * k[j]
    return total
