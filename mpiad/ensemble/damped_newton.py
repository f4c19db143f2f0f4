"""Newton's method for the roots of f of many trajectories at once, each damped by its own time step: pseudo-transients.

A step is one of the linearly implicit Euler method, (1/τ - J) Δ = f, which follows the flow to where it comes to rest; as τ
grows it becomes Newton's. It is taken where the contraction of the implicit Euler equation that it shows is good, a test
for which it doesn't matter how components are scaled, and τ is chosen by that. In each round every trajectory that is under
way tries one step; those that get on have their Jacobians computed anew.

References
----------
Deuflhard, "Newton methods for nonlinear problems" (2004), section 6.4.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.differentiation.bundles import Bundle
from mpiad.ensemble.batch import Batch, two_at_least
from mpiad.ensemble.linearization import Field, Tracing
from mpiad.ensemble.outcome import ConvergenceCode
from mpiad.transport.tracing import restoring_state

# A step is taken up to the first contraction, and the next one aims at the second.
_MOST_CONTRACTION, _AIM = 0.5, 0.25
_MOST_GROWTH = 10.0
# The first step, as a part of the time in which the largest component would change by itself.
_FIRST = 0.1
# Of a matrix whose rows and columns are scaled to one.
_SINGULAR = 1e-13

_UNDER_WAY = -1
_LARGEST = 1e200  # of 1/τ and of τ


class Equations:
    """f of a batch's trajectories at the ends of their tspans, and its Jacobian.

    `batch`: of plain arrays.
    """

    def __init__(self, batch: Batch):
        self._batch, self._field, self._tracing = batch, Field(batch), Tracing(Field(batch), (), False)

    def columns(self, ids: Array) -> tuple[list, Array]:
        """Return the parameters' leaves and the times of some trajectories."""
        p = self._batch.p
        leaves = [np.take(leaf, ids, axis=-1) if varies else leaf for leaf, varies in zip(p.leaves, p.varies)]
        return leaves, self._batch.end[ids].astype(self._batch.u0.dtype)

    def values(self, u: Array, ids: Array) -> Array:
        """Return f, shape (d, n), for states of this shape."""
        both = two_at_least(len(ids))
        return np.asarray(self._field.array(u[:, both], *self.columns(ids[both])), u.dtype)[:, : len(ids)]

    def linearised(self, u: Array, ids: Array) -> tuple[Array, Array]:
        """Return f, shape (d, n), and its Jacobian by the states, shape (n, d, d)."""
        (d, n), both = u.shape, two_at_least(len(ids))
        leaves, t = self.columns(ids[both])
        given = np.zeros((1 + d, d, len(both)), u.dtype)
        given[0] = u[:, both]
        given[1 + np.arange(d), np.arange(d)] = 1.0
        out = np.empty_like(given)
        with restoring_state(), Bundle() as bundle:
            self._tracing.along(bundle, leaves, [])(out, given, t)
        return out[0, :, :n], np.ascontiguousarray(out[1:, :, :n].transpose(2, 1, 0))


class Roots(NamedTuple):
    """Where N trajectories ended."""

    u: Array  # shape (d, N); NaN where no root was found
    jacobian: Array  # shape (N, d, d); at u
    # `codes`, `niter`: int, shape (N,). Return codes, and the steps that were taken.
    codes: Array
    niter: Array


def find_roots(equations: Equations, u0: Array, rtol: float, atol: Array | float, max_iters: int) -> Roots:
    """Find a root for each trajectory, by Newton's method from its state u0, shape (d, N): not finite where none can begin.

    The last of at most `max_iters` steps is at most ``atol + rtol * abs(u)``, in each component.
    """
    search = _Search(equations, u0, rtol, atol)
    for _ in range(max_iters):
        if not search.under_way.size:
            break
        search.try_step()
    return search.roots()


def solved_each(matrices: Array, right: Array) -> Array:
    """Return the solutions of n small systems, shape (n, d); of singular ones the shortest that solve them best."""
    # Rows that differ by powers of ten, as those of reaction rates do, are brought to one size.
    rows = np.abs(matrices).max(axis=2, keepdims=True, initial=0.0)
    rows[rows == 0] = 1.0
    matrices, right = matrices / rows, right[..., None] / rows
    try:
        return np.linalg.solve(matrices, right)[..., 0]
    except np.linalg.LinAlgError:
        # One after the other, so that none is solved otherwise because another is singular.
        return np.array([_solved_best(*system) for system in zip(matrices, right[..., 0])]).reshape(right.shape[:2])


def _solved_best(matrix: Array, right: Array) -> Array:
    try:
        return np.linalg.solve(matrix, right)
    except np.linalg.LinAlgError:
        return np.linalg.pinv(matrix, rcond=_SINGULAR) @ right


class _Search:
    """The trajectories, and how far each has come."""

    def __init__(self, equations: Equations, u0: Array, rtol: float, atol: Array | float):
        (d, count), self._equations = u0.shape, equations
        self._u, self._rtol, self._atol = u0.copy(), rtol, atol
        self._codes, self._niter = np.full(count, _UNDER_WAY), np.zeros(count, int)
        self._jacobian = np.full((count, d, d), np.nan, u0.dtype)
        self._f, self._rate = np.zeros_like(u0), np.zeros(count)
        self._codes[~np.isfinite(u0).all(axis=0)] = ConvergenceCode.InitialFailure.code
        self._linearise(self.under_way, ConvergenceCode.InitialFailure)
        ids = self.under_way
        size, rise = (np.abs(x[:, ids]).max(axis=0, initial=0.0).astype(float) for x in (u0, self._f))
        size[size == 0] = 1.0
        self._rate[ids] = np.minimum(rise / (_FIRST * size), _LARGEST)

    @property
    def under_way(self) -> Array:
        return np.flatnonzero(self._codes == _UNDER_WAY)

    def try_step(self) -> None:
        ids = self.under_way
        u, f, rate = self._u[:, ids], self._f[:, ids], self._rate[ids]
        with np.errstate(all="ignore"):
            # Pseudo-transient continuation: an implicit Euler step of length 1 / rate, Newton's as the rate goes to zero.
            matrix = rate[:, None, None] * np.eye(len(u)) - self._jacobian[ids]
            step = solved_each(matrix, f.T).T
            there = self._equations.values(u + step, ids)
            good = np.isfinite(there).all(axis=0)
            # Natural monotonicity: by how much the next step with the same matrix is shorter says whether this one leads
            # closer, whatever the scales of the equations are.
            following = solved_each(matrix, np.where(good, there - rate * step, 0.0).T).T
            contraction = np.where(good, self._size(following, u) / self._size(step, u), np.inf)
        better = contraction <= _MOST_CONTRACTION
        self._u[:, ids[better]] += step[:, better]
        self._niter[ids[better]] += 1
        with np.errstate(divide="ignore"):
            growth = np.clip(_AIM / contraction, 1 / _MOST_GROWTH, _MOST_GROWTH)
        self._rate[ids] = rate / growth
        # The steps have become so short that no shorter one would be better.
        self._codes[ids[self._rate[ids] > _LARGEST]] = ConvergenceCode.ConvergenceFailure.code
        self._linearise(ids[better], ConvergenceCode.ConvergenceFailure)

    def roots(self) -> Roots:
        """Return where all ended; those that are under way have had their number of steps."""
        codes = np.where(self._codes == _UNDER_WAY, ConvergenceCode.MaxIters.code, self._codes)
        found = np.flatnonzero(codes == ConvergenceCode.Success.code)
        jacobian, u = np.full_like(self._jacobian, np.nan), np.full_like(self._u, np.nan)
        if found.size:
            _, jacobian[found] = self._equations.linearised(self._u[:, found], found)
            codes[found[_singular(jacobian[found], self._weight(self._u[:, found]))]] = ConvergenceCode.Singular.code
            found = found[codes[found] == ConvergenceCode.Success.code]
        u[:, found] = self._u[:, found]
        return Roots(u, jacobian, codes, self._niter)

    def _linearise(self, ids: Array, failure: ConvergenceCode) -> None:
        """Compute f and its Jacobian; where Newton's own step is short enough, it is the last one."""
        if not ids.size:
            return
        with np.errstate(all="ignore"):
            f, jacobian = self._equations.linearised(self._u[:, ids], ids)
            finite = np.isfinite(f).all(axis=0) & np.isfinite(jacobian).all(axis=(1, 2))
            self._codes[ids[~finite]] = failure.code
            ids, f, jacobian = ids[finite], f[:, finite], jacobian[finite]
            step = solved_each(jacobian, -f.T).T
        self._jacobian[ids], self._f[:, ids] = jacobian, f
        last = self._size(step, self._u[:, ids]) <= 1
        self._u[:, ids[last]] += step[:, last]
        self._codes[ids[last]] = ConvergenceCode.Success.code

    def _weight(self, u: Array) -> Array:
        return np.maximum(self._atol + self._rtol * np.abs(u), np.finfo(u.dtype).tiny)

    def _size(self, step: Array, u: Array) -> Array:
        """Return the largest component of steps, by what is allowed for."""
        return (np.abs(step) / self._weight(u)).max(axis=0)


def _singular(jacobian: Array, weight: Array) -> Array:
    """Tell which Jacobians are singular, whatever the units of components and rates: array of bool, shape (n,)."""
    scaled = jacobian * weight.T[:, None]
    rows = np.abs(scaled).max(axis=2, keepdims=True)
    rows[rows == 0] = 1.0
    values = np.linalg.svd(scaled / rows, compute_uv=False)
    return values[:, -1] <= _SINGULAR * values[:, 0]
