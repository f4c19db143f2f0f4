"""The adjoint of the differential equation itself on the device, as in `mpiad.ensemble.continuous`.

λ' = -f_uᵀ λ is an ensemble like any other: its rounds go back from one saved time to the one before, beside states that are
looked up, and p̄ = ∫ f_pᵀ λ dt is taken over its steps by Gauss's rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.adjoint import Cotangents
from mpiad.ensemble.batch import Batch, Parameters
from mpiad.ensemble.continuous import NODES, WEIGHTS, require_no_events, require_solved
from mpiad.ensemble.field import Field
from mpiad.ensemble.linearization import Tracing
from mpiad.ensemble.on_device.adjoint import of_slots
from mpiad.ensemble.on_device.dense import DenseStates, round_polynomials
from mpiad.ensemble.on_device.record import Record
from mpiad.ensemble.on_device.rounds import integrate
from mpiad.ensemble.on_device.stages import states_at
from mpiad.ensemble.settings import Settings
from mpiad.transport.device_arrays import arrays_of

__all__ = ["pull_continuous"]


def pull_continuous(
    record: Record, settings: Settings, bars: Sequence[Array], times: np.ndarray, places: Sequence[int], timed: bool
) -> Cotangents:
    """Return the cotangents of a solve's inputs by the continuous adjoint; those of tspan are on the host.

    Parameters
    ----------
    record : Record
    settings : Settings
    bars : sequence of array
        Cotangents of saved states, (N, n_saved, d), of final ones, (N, d), and with events of their times.
    times : array, shape (n_saved,) or (N, n_saved)
        At which states were saved, NaN behind what was reached; on the host.
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
    home: Any = arrays_of(record.batch.u0)
    if record.events is not None:
        crossed = len(bars[3]) > 0 and bool(home.to_host(np.any(bars[3] != 0)))
        require_no_events(record.events.ended, crossed)
    with np.errstate(all="ignore"):
        found = _Adjoint(record, settings, bars[0], bars[1], times, places).solved(timed)
    if timed and record.events is not None:
        # Where no event came first, the time that was reached is the end of tspan itself.
        found.end += np.where(record.survived, home.to_host(bars[2]), 0)
    return found


class _Adjoint:
    """The adjoint equation of all trajectories that moved."""

    def __init__(
        self, record: Record, settings: Settings, saved: Array, end: Array, times: np.ndarray, places: Sequence[int]
    ):
        self._record, self._settings, batch = record, settings, record.batch
        self._home: Any = arrays_of(batch.u0)
        self._saved = np.where(np.isnan(saved), 0, saved)  # of what wasn't reached
        self._times = np.broadcast_to(times, saved.shape[:2])
        self._dense, field = DenseStates(record), Field(batch)
        self._by_state, self._by_leaves = Tracing(field, (), False), Tracing(field, places, False)
        self._sign = self._home.to_device(record.signs) if (record.signs < 0).any() else None
        self._moving = record.survived & (batch.start != batch.end)
        leaves: dict[int, Any] = {place: np.zeros_like(batch.p.leaves[place]) for place in places}
        self._found = Cotangents(record.masked(end.T), np.zeros(batch.size), np.zeros(batch.size), leaves)

    def solved(self, timed: bool) -> Cotangents:
        """Return the cotangents."""
        found, batch, moving = self._found, self._record.batch, self._moving
        now = batch.end.copy()
        if timed:
            # By the end of tspan the derivative is λ·f there; by its start -λ·f, since the same u0 is met later.
            found.end += self._along_flow(moving, found.u0, batch.end)
        for place in range(self._saved.shape[1] - 1, -1, -1):
            due = self._times[:, place]
            here = moving & np.isfinite(due) & (due != batch.start)
            self._go(here, now, np.where(here, due, now))
            value = self._saved[:, place].T
            found.u0 = found.u0 + (value if here.all() else np.where(self._home.to_device(here), value, 0))
            at_end = here & (due == batch.end)
            if timed and at_end.any():
                found.end += self._along_flow(at_end, value, batch.end)
        self._go(moving, now, batch.start)
        if timed:
            found.start -= self._along_flow(moving, found.u0, batch.start)
        if self._record.saves is not None:
            found.u0 = found.u0 + self._record.masked(of_slots(self._saved, self._record.saves.initial))
        return found

    def _chosen(self, mask: np.ndarray) -> Array:
        """Return the numbers of some trajectories on the device, without a copy where these are all."""
        return self._home.arange(len(mask)) if mask.all() else self._home.to_device(np.flatnonzero(mask))

    def _go(self, mask: np.ndarray, now: np.ndarray, end: np.ndarray) -> None:
        """Solve the adjoint equation of some trajectories back to another time, which then is `now`."""
        mask = mask & (now != end)
        if not mask.any():
            return
        found, ids = self._found, self._chosen(mask)
        p = Parameters([ids], [True], lambda leaves: leaves[0])
        batch = Batch(self._rate, (len(found.u0),), found.u0[:, ids], p, now[mask], end[mask])
        settings = self._settings._replace(
            saveat=np.empty(0), record=bool(found.leaves), checkpoints=None, events=(), progress=None
        )
        outcome = integrate(batch, settings)
        require_solved(outcome, np.flatnonzero(mask))
        found.u0[:, ids] = outcome.u_end
        now[mask] = end[mask]
        if found.leaves:
            self._integrate(outcome.record, ids)

    def _rate(self, cotangent: Array, ids: Array, t: Array) -> Array:
        """Return λ' = -f_uᵀ λ."""
        u = self._dense.at(ids, t, self._sign)
        (u_bar,) = self._by_state.transposed(np.empty_like(u), u, self._leaves(ids), t)(cotangent)
        return np.zeros_like(u) if u_bar is None else -u_bar

    def _leaves(self, ids: Array) -> list[Any]:
        p = self._record.batch.p
        return [np.take(leaf, ids, axis=-1) if varies else leaf for leaf, varies in zip(p.leaves, p.varies)]

    def _integrate(self, solved: Record, ids: Array) -> None:
        """Add ∫ f_pᵀ λ dt over all steps of λ."""
        real = solved.table.real
        for block in solved.blocks:
            own = ids[block.ids]
            for done in block.rounds:
                terms = round_polynomials(solved, block, done)
                t, h = done.t, done.steps()
                if block.sign is not None:
                    t, h = t * block.sign, h * block.sign
                for node, weight in zip(NODES, WEIGHTS):
                    value = states_at(terms, node) * (-weight * h).astype(real)  # λ may go backwards: h is signed
                    self._note(own, t + node * h, value)

    def _note(self, ids: Array, t: Array, value: Array) -> None:
        leaves, u = self._found.leaves, self._dense.at(ids, t, self._sign)
        time = t.astype(self._record.table.real)
        _, *parts = self._by_leaves.transposed(np.empty_like(u), u, self._leaves(ids), time)(value)
        for place, part in zip(list(leaves), parts):
            if part is not None and self._record.batch.p.varies[place]:
                leaves[place][..., ids] += part
            elif part is not None:
                leaves[place] = leaves[place] + part

    def _along_flow(self, mask: np.ndarray, value: Array, times: np.ndarray) -> np.ndarray:
        """Return the products of cotangents with the derivatives of the states, on the host; zero for others."""
        found = np.zeros(len(mask))
        if mask.any():
            ids, t = self._chosen(mask), self._home.to_device(times[mask])
            u = self._dense.at(ids, t, self._sign)
            k = np.empty_like(u)
            self._by_state.transposed(k, u, self._leaves(ids), t.astype(self._record.table.real))
            found[mask] = self._home.to_host(np.sum((value[:, ids] * k).real, axis=0))
        return found
