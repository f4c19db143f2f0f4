"""Steady states as one differentiable function of the parameters, by the implicit function theorem.

Where f(u, p) = 0 and J = ∂f/∂u isn't singular, du = -J⁻¹ ∂f/∂p dp. So a tangent takes one solve for each trajectory, and a
cotangent one with the transposed matrix. Trajectories without a steady state have no derivative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from mpiad._typing import Array
from mpiad.differentiation.bundles import Bundle
from mpiad.ensemble.batch import Batch, two_at_least
from mpiad.ensemble.damped_newton import Equations, Roots, solved_each
from mpiad.ensemble.linearization import Field, Tracing
from mpiad.transport.tracing import restoring_state


class SteadyStates:
    """The steady states of a batch of plain arrays that were found, by the leaves of its parameters: see `solve_operator`.

    `vector`, of shape (N, d): NaN where there is none.
    """

    def __init__(self, batch: Batch, roots: Roots):
        self._batch, self._jacobian, self.vector = batch, roots.jacobian, np.ascontiguousarray(roots.u.T)
        self._ids = np.flatnonzero(np.isfinite(self.vector).all(axis=1))
        # Two columns at least, wherever f is called.
        self._columns = two_at_least(len(self._ids))

    def pull(self, argnums: Sequence[int], args: Sequence[Any], g: Array) -> dict[int, Array]:
        """Return the cotangents of leaves of the parameters by those of the states, shape (N, d)."""
        varies, ids = self._batch.p.varies, self._ids
        found = {place: np.zeros_like(args[place]) for place in argnums}
        if not ids.size:
            return found
        # The implicit function theorem: f(u, p) = 0 gives du/dp = -J⁻¹ ∂f/∂p, so p̄ = (∂f/∂p)ᵀ (-J⁻ᵀ ū).
        bars = -solved_each(np.swapaxes(self._jacobian[ids], 1, 2), g[ids]).T
        # f is called with two columns at least; the one that only fills up gives nothing.
        seeds = np.zeros((g.shape[1], len(self._columns)), g.dtype)
        seeds[:, : len(ids)] = bars
        u, own, t = self._given()
        pull = Tracing(Field(self._batch), argnums, False).transposed(np.empty_like(u), u, own, t)
        for place, bar in zip(argnums, pull(seeds)[1:]):
            if bar is None:
                continue
            if varies[place]:
                found[place][..., ids] = bar[..., : len(ids)]
            else:
                found[place] = found[place] + bar
        return found

    def push(self, args: Sequence[Any], tangents: Mapping[int, Any]) -> Array:
        """Return the tangents of the states by those of leaves of the parameters."""
        found, ids, varies = np.zeros_like(self.vector), self._ids, self._batch.p.varies
        if not ids.size:
            return found
        u, own, t = self._given()
        columns = ids[self._columns]
        along = [[np.take(g, columns, axis=-1) if varies[place] else g] for place, g in tangents.items()]
        given = np.stack([u, np.zeros_like(u)])
        out = np.empty_like(given)
        with restoring_state(), Bundle() as bundle:
            Tracing(Field(self._batch), tuple(tangents), False).along(bundle, own, along)(out, given, t)
        found[ids] = -solved_each(self._jacobian[ids], out[1].T[: len(ids)])
        return found

    def _given(self) -> tuple[Array, list[Any], Array]:
        """Return states, leaves and times of those that were found, by columns."""
        ids = self._ids[self._columns]
        return np.ascontiguousarray(self.vector[ids].T), *Equations(self._batch).columns(ids)

    def pull_traced(self, *_: Any) -> NoReturn:
        """Refuse what is traced in a further trace."""
        raise NotImplementedError(
            "steady_state: second derivatives of steady states aren't supported. Differentiate f at sol.u yourself, or "
            "take the state at the end of a long solve, which can be differentiated as often as you like."
        )

    push_traced = pull_traced
