"""Conserved totals: linear combinations of the components that no trajectory changes, such as an enzyme, free and bound.

A vector l with lᵀ f(u, p, t) = 0 for all u and t also has lᵀ J = 0, where J = ∂f/∂u. So J is singular at every state,
and f = 0 has a family of solutions, one for each value of lᵀu. Let the columns of L be a basis of such vectors. In reduced
form, L is the identity in some rows, one for each vector. These equations of f = 0 follow from the others, and are replaced
by Lᵀ M (u - u0) = 0, where M is the mass matrix.

L is the left null space of the matrix that consists of J and f at several random states, and at several times.

L depends on the parameters if a trajectory's compartments have parameters as volumes. Lᵀ J(x) = 0 holds for all p, so
dLᵀ J(x) = -Lᵀ dJ(x). Where J(x) v = M (u - u0), the derivative of the replaced equations with respect to p is
dLᵀ M (u - u0) = -Lᵀ d(J(x) v).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy

from mpiad._typing import Array

# The number of random states, and the range of factors by which they differ from a given one.
STATES = 2
_LEAST, _MOST = 0.5, 2.0
# Singular values of matrices with scaled rows are zero up to this ratio to the largest one, and entries of L up to another.
_SINGULAR, _ZERO = 1e-13, 1e-12


class Totals(NamedTuple):
    """The c conserved totals of a trajectory."""

    vectors: Array  # the matrix L, shape (d, c)
    equations: Array  # the rows, int of shape (c,), in which L is the identity


def random_states(u: Array) -> Array:
    """Return states of the same signs and sizes as u, shape (d, n), without zeros: shape (STATES, d, n)."""
    # Random numbers don't depend on the other trajectories.
    factors = np.random.default_rng(0).uniform(np.log(_LEAST), np.log(_MOST), (STATES, len(u), 1))
    size = np.abs(u)
    largest = size.max(axis=0, initial=0.0)
    size = np.where(size == 0, np.where(largest == 0, 1.0, largest), size)
    return (np.exp(factors) * np.where(u < 0, -size, size)).astype(u.dtype)


def totals_of(matrix: Array) -> Totals | None:
    """Return the conserved totals, given a matrix of shape (d, m) with columns of J, scaled by sizes, and f; or None."""
    if not np.isfinite(matrix).all():
        return None
    rows = np.abs(matrix).max(axis=1)
    rows[rows == 0] = 1.0
    left, values, _ = np.linalg.svd(matrix / rows[:, None], full_matrices=False)
    basis = left[:, values <= _SINGULAR * values.max(initial=0.0)]
    if not basis.shape[1]:
        return None
    *_, pivots = scipy.linalg.qr(basis.T, mode="economic", pivoting=True)
    equations = np.sort(pivots[: basis.shape[1]])
    vectors = np.linalg.solve(basis[equations].T, basis.T).T
    vectors[np.abs(vectors) < _ZERO * np.abs(vectors).max(axis=0)] = 0.0
    return Totals(vectors * rows[equations] / rows[:, None], equations)
