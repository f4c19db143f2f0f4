"""The evaluation of conditions, affects and f for the trajectories that are at events."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.ensemble.batch import Batch, two_at_least
from mpiad.ensemble.derivative import derivative_of
from mpiad.ensemble.event import Event, affected
from mpiad.ensemble.initialization import derivative_at
from mpiad.ensemble.jumps import FOUND, Jump, mass_matrix_rhs
from mpiad.ensemble.outcome import ReturnCode
from mpiad.ensemble.settings import MOVING, Acting


class EventColumns:
    """The n trajectories `ids`, on which events act one after the other.

    - `slots`: int, shape (N,); for all trajectories the index of the next given time; updated.
    - `jumps`: list to which jumps are appended; None if they aren't recorded.
    - `u`: shape (d, n); updated. `t`: shape (n,); actual times.
    - `number`: int, shape (n,); the number of accepted steps of each trajectory.
    - `signs`: shape (n,); -1 for trajectories integrated backwards in time, otherwise 1.
    - `codes`: int, shape (n,); the return codes of ended trajectories, otherwise MOVING.
    - `left`: for each event that acts in both directions, shape (n,); the signs with which its condition leaves the root
      after the affect, or 0 if the condition isn't at its root.
    """

    def __init__(
        self, batch: Batch, acting: Acting, slots: Array, signs: Array, jumps: list[Jump] | None, ids: Array, u: Array,
        t: Array, number: Array,
    ):  # fmt: skip
        self._batch, self._acting, self._slots, self._jumps = batch, acting, slots, jumps
        self.ids, self.u, self.t, self._number = ids, u, t, number
        self.signs = signs[ids]
        self._backward = bool((self.signs < 0).any())
        self.codes = np.full(len(ids), MOVING)
        self.left: defaultdict[int, Array] = defaultdict(lambda: np.zeros(len(ids)))
        self._derivative = derivative_of(batch.f, batch.shape)

    def at(self, rows: Array) -> tuple[Array, Array]:
        """Return the states and times of the columns `rows`, in ascending order; they must not be modified."""
        return (self.u, self.t) if len(rows) == len(self.ids) else (self.u[:, rows], self.t[rows])

    def _arguments(self, rows: Array, at: tuple[Array, Array] | None) -> tuple[Array, Tree, Array]:
        """Return the arguments of the user's functions for the columns `rows`; a single column is duplicated."""
        u, t = at or self.at(rows)
        if len(rows) == 1:
            u, t, rows = u[:, [0, 0]], t[[0, 0]], rows[[0, 0]]
        return u, self._batch.parameters(self.ids[rows]), t

    def condition(self, event: Event, rows: Array, at: tuple[Array, Array] | None = None) -> Array:
        """Return the values of a condition for some columns; `at`: states and times, by default the current ones."""
        return event.value(*self._arguments(rows, at))[: len(rows)] if rows.size else np.empty(0)

    def rate(self, rows: Array, at: tuple[Array, Array] | None = None) -> Array:
        """Return f in the direction of the solve for some columns; `at`: see `condition`."""
        if not rows.size:
            return np.empty_like(self.u[:, :0])
        u, p, t = self._arguments(rows, at)
        sign = self.signs[rows[two_at_least(len(rows))]] if self._backward else None
        return derivative_at(self._derivative, u, p, t if sign is None else t * sign, sign)[:, : len(rows)]

    def moving(self, rows: Array, mass: Array | None, at: tuple[Array, Array]) -> Array:
        """Return u' in the direction of the solve for some columns, at the given states and times."""
        if mass is None:
            return self.rate(rows, at)
        twice, batch = two_at_least(len(rows)), self._batch
        leaves = batch.p.chosen(self.ids[rows[twice]])
        u, t = at[0][:, twice], at[1][twice].astype(at[0].real.dtype)
        return (mass_matrix_rhs(batch, mass, u, leaves, t) * self.signs[rows[twice]].astype(t.dtype))[:, : len(rows)]

    def act(self, e: int, rows: Array, slot: Array | None = None) -> Array:
        """Apply the affect of event e to some columns; return a mask of the columns whose new states are finite.

        `slot`: the indices of the given times; None at roots of the condition. A trajectory ends in the state before the
        event if its new state isn't finite.
        """
        if not rows.size:
            return np.empty(0, bool)
        u, t = self.at(rows)
        after = affected(self._acting.events[e], self._batch, *self._arguments(rows, (u, t)))[:, : len(rows)]
        finite = np.isfinite(after).all(axis=0)
        if not finite.all():
            self.codes[rows[~finite]] = ReturnCode.Unstable.code
            slot = None if slot is None else slot[finite]
            rows, u, t, after = rows[finite], u[:, finite], t[finite], after[:, finite]
        if self._jumps is not None:
            at = np.full(len(rows), FOUND) if slot is None else slot
            self._jumps.append(Jump(self.ids[rows], self._number[rows], e, at, t.copy(), u.copy(), after))
        self.u[:, rows] = after
        return finite

    def meet_given_times(self) -> None:
        """Apply the affects of all events with a given time that equals the current time; update `slots`.

        Several such events of one trajectory act one after the other.
        """
        acting, rows = self._acting, np.arange(len(self.ids))
        while rows.size:
            ids = self.ids[rows]
            rows = rows[(acting.times[self._slots[ids], ids] == self.t[rows]) & (self.codes[rows] == MOVING)]
            slot = self._slots[self.ids[rows]]
            which = acting.kinds[slot, self.ids[rows]]
            for e in np.flatnonzero(np.bincount(which)).tolist():
                mask = which == e
                chosen, at = (rows, slot) if np.count_nonzero(mask) == len(rows) else (rows[mask], slot[mask])
                done = chosen[self.act(e, chosen, at)]
                self._slots[self.ids[done]] += 1
                if acting.events[e].terminal:
                    self.codes[done] = ReturnCode.Terminated.code
