"""The adjoint of the differential equation itself, solved backwards beside the interpolated states.

Between saved times λ' = -f_uᵀ λ, at each of them λ jumps by the cotangent of what is saved there, and p̄ = ∫ f_pᵀ λ dt. Each
trajectory's λ has steps of its own. The integral is taken by Gauss's rule over these steps, so that parameters which all
share need no room of their own in each trajectory.

What comes out is an approximation, to the tolerance of the solve, of the derivative of the exact solution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.adjoint import Cotangents, of_ends
from mpiad.ensemble.batch import Batch, Parameters
from mpiad.ensemble.dense import DenseStates
from mpiad.ensemble.linearization import Tracing
from mpiad.ensemble.outcome import Outcome
from mpiad.ensemble.pool import integrate
from mpiad.ensemble.retcodes import names_of
from mpiad.ensemble.run import INITIAL, Run
from mpiad.ensemble.seeds import Seeds
from mpiad.errors import IntegrationError

__all__ = ["NODES", "WEIGHTS", "pull_continuous", "require_no_events", "require_solved"]

# Gauss's rule of order 6 on (0, 1).
NODES, WEIGHTS = (0.5 - np.sqrt(0.15), 0.5, 0.5 + np.sqrt(0.15)), (5 / 18, 8 / 18, 5 / 18)


def pull_continuous(run: Run, seeds: Seeds, places: Sequence[int], timed: bool) -> Cotangents:
    """Return the cotangents of a run's inputs by the continuous adjoint.

    Parameters
    ----------
    run : Run
    seeds : Seeds
    places : sequence of int
        Of the leaves of the parameters to differentiate by.
    timed : bool
        Whether to differentiate by the ends of tspan, too.

    Raises
    ------
    IntegrationError
        Where the adjoint equation can't be solved to the end.
    NotImplementedError
        Where terminal events ended trajectories, or times of events on the way have cotangents.
    """
    require_no_events(run.terminated, seeds.crossed is not None)
    found = _Adjoint(run, seeds, places).solved(timed)
    if seeds.reached is not None:
        # Where no event came first, the time that was reached is the end of tspan itself.
        found.end += np.where(run.live, seeds.reached, 0)
    return found


def require_no_events(terminated: Array, crossed: bool) -> None:
    """Raise where the results moved with the times of events.

    Parameters
    ----------
    terminated : array of bool, shape (N,)
        Which trajectories ended by an event; on the host.
    crossed : bool
        Whether times of events on the way have cotangents.

    Raises
    ------
    NotImplementedError
    """
    if crossed:
        raise NotImplementedError(
            "solve: adjoint='continuous' knows no derivative of the times of events. Use adjoint='discrete', the default."
        )
    if terminated.any():
        raise NotImplementedError(
            f"solve: adjoint='continuous' doesn't go through terminal events, and {np.count_nonzero(terminated)} "
            "trajectories ended by one. Use adjoint='discrete', the default."
        )


def require_solved(outcome: Outcome, ids: Array) -> None:
    """Raise where the adjoint equation of one of the trajectories `ids` wasn't solved to the end.

    Raises
    ------
    IntegrationError
    """
    if outcome.failed.any():
        i, code = int(ids[np.flatnonzero(outcome.failed)[0]]), names_of(outcome.codes)[outcome.failed][0]
        raise IntegrationError(
            f"solve: the adjoint equation of trajectory {i + 1} failed ({code}) on its way back. "
            "adjoint='discrete', the default, needs no such solve."
        )


class _Adjoint:
    """The adjoint equation of all trajectories that moved."""

    def __init__(self, run: Run, seeds: Seeds, places: Sequence[int]):
        self._run, self._seeds, self._dense = run, seeds, DenseStates(run)
        self._by_state, self._by_leaves = Tracing(run.field, (), False), Tracing(run.field, places, False)
        self._ids = np.flatnonzero(run.counts > 0)
        batch = run.batch
        leaves = {place: np.zeros_like(batch.p.leaves[place]) for place in places}
        self._found = Cotangents(of_ends(run, seeds), np.zeros(batch.size), np.zeros(batch.size), leaves)

    def solved(self, timed: bool) -> Cotangents:
        """Return the cotangents."""
        found, batch, ids = self._found, self._run.batch, self._ids
        now, saved = batch.end.copy(), self._seeds.saved
        if timed:
            # By the end of tspan the derivative is λ·f there; by its start -λ·f, since the same u0 is met later.
            found.end[ids] = self._along_flow(ids, found.u0[:, ids], batch.end[ids])
        if saved is not None:
            for place in range(saved.shape[1] - 1, -1, -1):
                self._meet(place, now, timed)
        self._go(ids, now[ids], batch.start[ids])
        if timed:
            found.start[ids] = -self._along_flow(ids, found.u0[:, ids], batch.start[ids])
        if saved is not None:
            still, place = np.nonzero(self._run.save_step == INITIAL)
            np.add.at(found.u0.T, still, saved[still, place])
        return found

    def _meet(self, place: int, now: Array, timed: bool) -> None:
        """Go back to where saved states of this place lie, and take up their cotangents."""
        run, found = self._run, self._found
        ids = np.flatnonzero(run.save_step[:, place] >= 0)
        due = run.due(ids, np.full(len(ids), place))
        times = self._dense.ends(ids, run.save_step[ids, place]) if due is None else due
        self._go(ids, now[ids], times)
        now[ids] = times
        saved: Any = self._seeds.saved
        value = saved[ids, place].T
        found.u0[:, ids] += value
        at_end = np.flatnonzero(times == run.batch.end[ids])
        if timed and len(at_end):
            found.end[ids[at_end]] += self._along_flow(ids[at_end], value[:, at_end], times[at_end])

    def _go(self, ids: Array, start: Array, end: Array) -> None:
        """Solve the adjoint equation of some trajectories from one time back to another."""
        moving = start != end
        ids, start, end = ids[moving], start[moving], end[moving]
        if not len(ids):
            return
        found, d = self._found, len(self._found.u0)
        batch = Batch(self._rate, (d,), found.u0[:, ids], Parameters([ids], [True], lambda leaves: leaves[0]), start, end)
        settings = self._run.settings._replace(saveat=None, record=True, checkpoints=None, events=(), progress=None)
        outcome = integrate(batch, settings)
        solved = Run(batch, settings, outcome)
        require_solved(outcome, ids)
        found.u0[:, ids] = outcome.u_end
        if found.leaves:
            self._integrate(solved, ids)

    def _rate(self, cotangent: Array, ids: Array, t: Array) -> Array:
        """Return λ' = -f_uᵀ λ."""
        run, u = self._run, self._dense.at(ids, t)
        leaves = run.columns(run.batch.p.leaves, ids)
        (u_bar,) = self._by_state.transposed(np.empty_like(u), u, leaves, t)(cotangent)
        return np.zeros_like(u) if u_bar is None else -u_bar

    def _integrate(self, solved: Run, ids: Array) -> None:
        """Add ∫ f_pᵀ λ dt over all steps of λ."""
        cotangents = DenseStates(solved)
        ((_, steps),) = solved.shares
        with np.errstate(all="ignore"):
            for s in range(len(steps)):
                sweep, width = steps.sweep(s), int(steps.widths[s])
                for node, weight in zip(NODES, WEIGHTS):
                    t = sweep.t + node * sweep.h
                    value = -weight * sweep.h * cotangents.at(sweep.ids, t)  # λ goes backwards, and h is negative
                    value[:, width:] = 0  # the double of a single column
                    self._note(ids[sweep.ids], width, t, value)

    def _note(self, ids: Array, width: int, t: Array, value: Array) -> None:
        run, found, u = self._run, self._found, self._dense.at(ids, t)
        leaves = run.columns(run.batch.p.leaves, ids)
        time = t.astype(u.real.dtype, copy=False)
        _, *parts = self._by_leaves.transposed(np.empty_like(u), u, leaves, time)(value.astype(u.dtype, copy=False))
        for place, part in zip(list(found.leaves), parts):
            if part is None:
                continue
            if run.batch.p.varies[place]:
                found.leaves[place][..., ids[:width]] += part[..., :width]
            else:
                found.leaves[place] = found.leaves[place] + part

    def _along_flow(self, ids: Array, value: Array, t: Array) -> Array:
        """Return the products of cotangents with the derivatives of the states."""
        run, width = self._run, len(ids)
        ids, t = (np.resize(array, max(2, width)) for array in (ids, t))
        u = self._dense.at(ids, t)
        k = np.empty_like(u)
        self._by_state.transposed(k, u, run.columns(run.batch.p.leaves, ids), t.astype(u.real.dtype, copy=False))
        return (value * k[:, :width]).real.sum(axis=0)
