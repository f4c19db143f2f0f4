"""Events on the device: which conditions changed their signs in a round, where, and what is noted of it.

Whether any did comes to the host with the round's one look. Where one did, the part of the step is found by bisection for
the columns that it concerns, all at once; how many these are is one more look for each event.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.coefficients import DeviceCoefficients
from mpiad.ensemble.events import BISECTIONS, Event, require_numbers
from mpiad.ensemble.interpolant import polynomials, states_at
from mpiad.ensemble.on_device.stages import Stages
from mpiad.ensemble.on_device.working_set import WorkingSet
from mpiad.ensemble.trial import MOVED, require_uncoupled
from mpiad.ensemble.walk import Met
from mpiad.transport.device_arrays import arrays_of

__all__ = ["EventWatch", "Happened"]


class Happened(NamedTuple):
    """The events of one round.

    Parameters
    ----------
    met : list of Met
    ended : array of bool, shape (n,), or None
        Which columns a terminal event ended; None where none did.
    part : array, shape (n,)
        At which part of the step.
    states : array, shape (d, n)
        There.
    """

    met: list[Met]
    ended: Array | None
    part: Array
    states: Array


class EventWatch:
    """The events of a solve on a device.

    Parameters
    ----------
    events : tuple of Event
    batch : Batch
    table : DeviceCoefficients
    """

    def __init__(self, events: tuple[Event, ...], batch: Batch, table: DeviceCoefficients):
        self._events, self._batch, self._table = events, batch, table
        self._home: Any = arrays_of(batch.u0)
        self._rows: list[Array] = []
        self._count = 0

    # ---- conditions

    def values(self, u: Array, p: Tree, t: Array) -> Array:
        """Return the values of all conditions, shape (events, n), at actual times."""
        return np.stack([self._value(event, u, p, t) for event in self._events])

    @staticmethod
    def _value(event: Event, u: Array, p: Tree, t: Array) -> Array:
        value = event.condition(u, p, t)
        require_numbers(value, t.shape)
        return value.astype(float)

    def check(self, u: Array, p: Tree, t: Array) -> None:
        """Call the conditions once, and a second time with all columns moved but the first.

        Raises
        ------
        NotImplementedError, ValueError
            See `require_numbers`, and where a condition couples columns.
        """
        alone = self.values(u, p, t)
        moved = u + MOVED * (1 + np.abs(u))
        moved[:, 0] = u[:, 0]
        try:
            beside = self.values(moved.astype(u.dtype), p, t)
        except Exception:  # noqa: BLE001 the moved states may lie where it isn't defined
            return
        found = self._home.to_host(np.stack([alone[:, 0], beside[:, 0], np.max(np.abs(alone), axis=1)]))
        largest, eps = float(found[np.isfinite(found)].max(initial=0.0)), float(np.finfo(u.dtype).eps)
        require_uncoupled(found[0], found[1], largest, eps, "a condition of the events")

    def crossed(self, before: Array, after: Array, accepted: Array) -> Array:
        """Tell which conditions changed their signs as asked for in steps that were accepted, shape (events, n)."""
        return np.stack([accepted & event.crossed(before[e], after[e]) for e, event in enumerate(self._events)])

    # ---- where they lie

    def happened(self, now: WorkingSet, stages: Stages, h: Array, crossed: Array, counts: list[int]) -> Happened:
        """Find the events of a round, and note them.

        Parameters
        ----------
        now : WorkingSet
            Before the round.
        stages : Stages
        h : array, shape (n,)
            The steps, in double precision.
        crossed : array of bool, shape (events, n)
        counts : list of int
            How many columns each event concerns.
        """
        never = np.full_like(h, np.inf)
        several, found, last, ender = sum(map(bool, counts)) > 1, [], never, np.full_like(now.ids, -1)
        for e, event in enumerate(self._events):
            if counts[e]:
                columns = np.flatnonzero(crossed[e])
                x = self._located(event, now, stages, h, columns, now.values[e][columns])  # type: ignore[index]
                found.append((e, columns, x))
                if event.terminal:
                    mine = never.copy()
                    mine[columns] = x
                    # Of two at once the one that was given later counts.
                    ender = np.where((mine <= last) & (mine < np.inf), e, ender)
                    last = np.minimum(last, mine)
        met = [part for e, columns, x in found for part in self._met(now, h, e, columns, x, last, ender, several)]
        if not any(self._events[e].terminal for e, *_ in found):
            return Happened(met, None, last, now.u)
        ended = last < np.inf
        # Where none ended the part is of no matter.
        x = np.where(ended, last, 1.0).astype(self._table.real)
        states = states_at(polynomials(self._table, now.u, stages.h, stages.k), x)
        return Happened(met, ended, last, states)

    def _located(self, event: Event, now: WorkingSet, stages: Stages, h: Array, columns: Array, before: Array) -> Array:
        """Return at which parts of the step a condition vanishes, by bisection down to the resolution of time."""
        batch, real = self._batch, self._table.real
        leaves = [np.take(leaf, columns, axis=-1) if own else leaf for leaf, own in zip(now.leaves, batch.p.varies)]
        p, t, h = batch.p.build(leaves), now.t[columns], h[columns]
        sign = None if now.sign is None else now.sign[columns]
        k = np.take(stages.k, columns, axis=-1)
        terms, before = polynomials(self._table, now.u[:, columns], stages.h[columns], k), np.sign(before)
        low, high = np.zeros_like(h), np.ones_like(h)
        for _ in range(BISECTIONS):
            x = 0.5 * (low + high)
            time = t + x * h
            state = states_at(terms, x.astype(real))
            value = self._value(event, state, p, time if sign is None else time * sign)
            same = np.sign(value) == before
            low, high = np.where(same, x, low), np.where(same, high, x)
        return high

    def _met(
        self, now: WorkingSet, h: Array, e: int, columns: Array, x: Array, last: Array, ender: Array, several: bool
    ) -> list[Met]:
        """Write an event into the table, and return it without the columns that had ended before."""
        time = now.t[columns] + x * h[columns]
        time = time if now.sign is None else time * now.sign[columns]
        known, terminal = x <= last[columns], self._events[e].terminal
        rows = now.ids[columns], np.full_like(columns, e), now.number[columns], np.where(known, x, np.inf), time
        self._rows.append(np.stack([row.astype(float) for row in rows]))
        row = self._count + self._home.arange(len(columns))
        self._count += len(columns)
        if not several:
            return [Met(e, terminal, columns, x, time, row)]
        kept = np.flatnonzero((ender[columns] == e) if terminal else known)
        return [Met(e, terminal, columns[kept], x[kept], time[kept], row[kept])] if len(kept) else []

    # ---- the table

    def rows(self) -> Array:
        """Return all that happened: trajectory, event, number of the step, part of it (infinite where none was), time."""
        return np.concatenate(self._rows, axis=1) if self._rows else self._home.empty((5, 0), float)
