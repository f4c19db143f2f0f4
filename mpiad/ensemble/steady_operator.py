"""Steady states as one differentiable function of the parameters, by the implicit function theorem.

Where f(u, p) = 0 and J = ∂f/∂u isn't singular, du = -J⁻¹ ∂f/∂p dp. So a tangent takes one solve for each trajectory, and a
cotangent one with the transposed matrix. Trajectories without a steady state have no derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from autograd.extend import defjvp_argnums, defvjp_argnums, primitive
from autograd.tracer import isbox

from mpiad._typing import Array
from mpiad.differentiation.bundles import Bundle
from mpiad.ensemble.batch import Batch, two_at_least
from mpiad.ensemble.damped_newton import Roots, solved_each
from mpiad.ensemble.linearization import Field, Tracing
from mpiad.primitives.cotangents import conform, spec_like


class SteadyStates:
    """The steady states of a batch of plain arrays that were found.

    `u`, of shape (N, d): NaN where there is none.
    """

    def __init__(self, batch: Batch, roots: Roots):
        self._batch, self._jacobian, self.u = batch, roots.jacobian, np.ascontiguousarray(roots.u.T)
        self._ids = np.flatnonzero(np.isfinite(self.u).all(axis=1))
        # Two columns at least, wherever f is called.
        self._columns = two_at_least(len(self._ids))

    def pull(self, places: Sequence[int], g: Array) -> list[Array]:
        """Return the cotangents of leaves of the parameters by those of the states, shape (N, d)."""
        leaves, varies, ids = self._batch.p.leaves, self._batch.p.varies, self._ids
        found = [np.zeros_like(leaves[place]) for place in places]
        if not ids.size:
            return found
        # The implicit function theorem: f(u, p) = 0 gives du/dp = -J⁻¹ ∂f/∂p, so p̄ = (∂f/∂p)ᵀ (-J⁻ᵀ ū).
        bars = -solved_each(np.swapaxes(self._jacobian[ids], 1, 2), g[ids]).T
        # f is called with two columns at least; the one that only fills up gives nothing.
        seeds = np.zeros((g.shape[1], len(self._columns)), g.dtype)
        seeds[:, : len(ids)] = bars
        u, own, t = self._given()
        pull = Tracing(Field(self._batch), places, False).transposed(np.empty_like(u), u, own, t)
        for k, (place, bar) in enumerate(zip(places, pull(seeds)[1:])):
            if bar is None:
                continue
            if varies[place]:
                found[k][..., ids] = bar[..., : len(ids)]
            else:
                found[k] = found[k] + bar
        return found

    def push(self, tangents: dict[int, Array]) -> Array:
        """Return the tangents of the states by those of leaves of the parameters."""
        found, ids, varies = np.zeros_like(self.u), self._ids, self._batch.p.varies
        if not ids.size:
            return found
        u, own, t = self._given()
        columns = ids[self._columns]
        along = [[np.take(g, columns, axis=-1) if varies[place] else g] for place, g in tangents.items()]
        given = np.stack([u, np.zeros_like(u)])
        out = np.empty_like(given)
        with Bundle() as bundle:
            Tracing(Field(self._batch), tuple(tangents), False).along(bundle, own, along)(out, given, t)
        found[ids] = -solved_each(self._jacobian[ids], out[1].T[: len(ids)])
        return found

    def _given(self) -> tuple[Array, list[Any], Array]:
        """Return states, leaves and times of those that were found, by columns."""
        ids, p = self._ids[self._columns], self._batch.p
        leaves = [np.take(leaf, ids, axis=-1) if own else leaf for leaf, own in zip(p.leaves, p.varies)]
        return np.ascontiguousarray(self.u[ids].T), leaves, self._batch.end[ids].astype(self.u.dtype)


@primitive
def steady_operator(*leaves: Any, found: SteadyStates) -> Array:
    """Return steady states, shape (N, d), which have been found before."""
    return found.u


def _vjp(argnums: tuple[int, ...], ans: Array, args: tuple, kwargs: dict) -> Callable:
    def vjp(g: Array) -> list[Array]:
        _check_first((*args, g))
        bars = kwargs["found"].pull(argnums, conform(g, *spec_like(ans)))
        return [conform(bar, *spec_like(args[k])) for k, bar in zip(argnums, bars)]

    return vjp


def _jvp(argnums: tuple[int, ...], gs: Sequence[Any], ans: Array, args: tuple, kwargs: dict) -> Array:
    _check_first((*args, *gs))
    return kwargs["found"].push({k: conform(g, *spec_like(args[k])) for k, g in zip(argnums, gs)})


def _check_first(values: Sequence[Any]) -> None:
    if any(map(isbox, values)):
        raise NotImplementedError(
            "steady_state: second derivatives of steady states aren't supported. Differentiate f at sol.u yourself, or "
            "take the state at the end of a long solve, which can be differentiated as often as you like."
        )


defvjp_argnums(steady_operator, _vjp)
defjvp_argnums(steady_operator, _jvp)
