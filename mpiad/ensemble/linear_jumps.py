"""The adjoint of events that change the state: of what their affects do, and of when.

The affect A makes u⁺ = A(u⁻, p, τ) of the state that a step has ended in, or that the event before has left. Backwards its
Jacobian's transpose makes λ⁻ of λ⁺; what of it isn't zero is computed for all events of a run at once, before the sweep.

τ moves, too, and with it what comes after, which tells what the result gains by that, σ⁺. Of a given time this is its
cotangent, σ⁺ + A_τ·λ⁺, with what the step gains that ends there. Of the time at which a condition vanished it goes on to
what moves the root (`event_adjoint`). Where no step lies between a given time and what was before it at the same time, the
state would move by f between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.derivative import derivative_of
from mpiad.ensemble.event_affects import affect_field
from mpiad.ensemble.jumps import FOUND, Jumps
from mpiad.ensemble.linearization import Tracing
from mpiad.ensemble.run import Run

__all__ = ["LinearJumps"]


class LinearJumps:
    """All jumps of a run on the way back.

    Parameters
    ----------
    places : sequence of int
        Of the leaves to differentiate by.
    jumps : Jumps
        Those of the run.
    timed : bool
        Whether times move.

    Attributes
    ----------
    due : array, shape (slots, N)
        Cotangents of the given times, as many as were met.
    at_start : list
        Which jumps come before the first steps, in their order, and of which trajectories.
    """

    def __init__(self, run: Run, jumps: Jumps, places: Sequence[int], timed: bool):
        self._run, self._jumps, self._places, self._timed = run, jumps, places, timed
        self.at_start = [(rows, jumps.ids[rows]) for rows in jumps.at_start()]
        # One row more than given times, for what isn't at one.
        self.due = np.zeros((int(jumps.slot.max()) + 2, run.batch.size))
        self._after = np.zeros_like(jumps.before)
        # Which component of what is after gives what to which before: only what isn't zero.
        self._terms: list[tuple[int, int, int, Array]] = []
        self._by_time: list[tuple[int, int, Array]] = []
        # Derivatives are linear in real and imaginary parts.
        for part, unit in enumerate((1.0, 1j) if np.iscomplexobj(jumps.before) else (1.0,)):
            for c in range(len(jumps.before)):
                self._linearize(part, c, unit)
        self._rates = self._drifts() if timed else None

    def _linearize(self, part: int, c: int, unit: complex) -> None:
        before, by_time = np.zeros_like(self._after), np.zeros(len(self._jumps.ids))
        for rows in self._kinds():
            seed = np.zeros_like(before[:, rows])
            seed[c] = unit
            bar, *_, time = self._pulled(rows, seed, (), self._timed)
            before[:, rows] = 0 if bar is None else bar
            if self._timed and time is not None:
                by_time[rows] = time
        self._terms += [(part, c, i, before[i]) for i in np.flatnonzero(before.any(axis=1)).tolist()]
        if by_time.any():
            self._by_time.append((part, c, by_time))

    def _kinds(self) -> list[Array]:
        """Return which jumps are of one event, event by event."""
        return [np.flatnonzero(self._jumps.event == e) for e in np.unique(self._jumps.event).tolist()]

    def _pulled(self, rows: Array, cotangent: Array, places: Sequence[int], timed: bool) -> list:
        """Return the cotangents of states, leaves and times at the jumps of one event by those of the states after."""
        run, jumps, count = self._run, self._jumps, len(rows)
        twice = np.arange(max(2, count)) % count  # two columns at least, wherever functions of the user's are called
        seed = np.zeros_like(cotangent, shape=(len(cotangent), len(twice)))
        seed[:, :count] = cotangent
        rows = rows[twice]
        field = affect_field(run.settings.events[jumps.event[rows[0]]], run.batch)
        u = np.ascontiguousarray(jumps.before[:, rows])
        leaves = run.columns(run.batch.p.leaves, jumps.ids[rows])
        pull = Tracing(field, places, timed).transposed(np.empty_like(u), u, leaves, jumps.time[rows])
        bar, *parts = pull(seed)
        ends = (bar, parts.pop() if timed else None)
        bar, time = (None if x is None else x[..., :count] for x in ends)
        varies = [run.batch.p.varies[place] for place in places]
        parts = [x[..., :count] if x is not None and own else x for x, own in zip(parts, varies)]
        return [bar, *parts, time]

    def _drifts(self) -> Array:
        """Return f before jumps at given times with no step before."""
        run, jumps = self._run, self._jumps
        found, rows = np.zeros_like(jumps.before), np.flatnonzero(jumps.still & (jumps.slot != FOUND))
        if rows.size:
            found[:, rows] = rates(run, jumps.ids[rows], jumps.before[:, rows], jumps.time[rows])
        return found

    def pull(self, rows: Array, cotangent: Array, since: Array) -> tuple[Array, Array]:
        """Go back over some jumps, of as many trajectories.

        Parameters
        ----------
        cotangent : array, shape (d, n)
            Of the states after.
        since : array, shape (n,)
            Of the time at which what follows begins.

        Returns
        -------
        array, shape (d, n)
            Of the states before.
        array, shape (n,)
            Of the time at which what was before them ended, or where it began: given times have got their share.
        """
        self._after[:, rows] = cotangent
        before, parts = np.zeros_like(cotangent), (cotangent.real, cotangent.imag)
        for part, c, i, factor in self._terms:
            before[i] += factor[rows] * parts[part][c]
        if self._rates is None:
            return before, since
        for part, c, factor in self._by_time:
            since = since + factor[rows] * parts[part][c]
        jumps, drift = self._jumps, (before * self._rates[:, rows]).real.sum(axis=0)
        given = jumps.slot[rows] != FOUND
        self.due[jumps.slot[rows], jumps.ids[rows]] += np.where(given, since + drift, 0.0)
        return before, np.where(given, -drift, since)

    def lengthened(self, rows: Array, by_size: Array) -> Array:
        """Give the given times at which steps end what those gain with their sizes, and return it; zero for others."""
        jumps = self._jumps
        gained = np.where(jumps.lengthens[rows], by_size, 0.0)
        self.due[jumps.slot[rows], jumps.ids[rows]] += gained
        return gained

    def add_leaves(self, leaves: dict[int, Array]) -> None:
        """Add to the cotangents of the leaves, when all jumps have been gone back over."""
        varies = self._run.batch.p.varies
        for rows in self._kinds() if self._places else ():
            _, *parts, _ = self._pulled(rows, self._after[:, rows], self._places, self._timed)
            for place, part in zip(self._places, parts):
                if part is None:
                    continue
                if varies[place]:  # a trajectory may meet an event more than once
                    np.add.at(np.moveaxis(leaves[place], -1, 0), self._jumps.ids[rows], np.moveaxis(part, -1, 0))
                else:
                    leaves[place] = leaves[place] + part


def rates(run: Run, ids: Array, u: Array, t: Array) -> Array:
    """Return f for some trajectories at given states and times, shape (d, n)."""
    batch, count = run.batch, len(ids)
    twice = np.arange(max(2, count)) % count
    found = np.empty_like(u, shape=(len(u), len(twice)))
    derivative = derivative_of(batch.f, batch.shape)
    p = batch.p.columns(ids[twice], run.field.one_by_one)
    derivative.write(found, np.ascontiguousarray(u[:, twice]), p, t[twice].astype(run.coefficients.real))
    return found[:, :count]
