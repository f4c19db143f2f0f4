"""The way over the steps of trajectories on the host, which were put into order when the solve had ended.

The columns of a block are ordered by their numbers of steps, the most first, and visit v is the (v+1)-th step from the end
of the first few. Where only some states were kept, visits are about steps of one number, counted from the start, so that
all columns begin their stretches together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.record import Steps
from mpiad.ensemble.seeds import Schedule
from mpiad.ensemble.step_sweep import LocatedEvent, Saved, StepSweep, Visit

if TYPE_CHECKING:  # a run makes its sweeps, and so imports this file
    from mpiad.ensemble.run import Run

__all__ = ["Crossings", "SortedSweep"]


class Crossings(NamedTuple):
    """Events on the way of trajectories.

    Parameters
    ----------
    ids, order, event, number : array of int, shape (m,)
        The trajectories, which of the events of each this is, which event, and in which step, from 0.
    x, time : array, shape (m,)
        The part of the step that is gone there, and when.
    """

    ids: Array
    order: Array
    event: Array
    number: Array
    x: Array
    time: Array

    def by_visits(self, sweep: SortedSweep) -> dict[int, list[tuple[Array, Array]]]:
        """Return by the visits of a sweep the crossings and their columns, event by event."""
        found: dict[int, list[tuple[Array, Array]]] = {}
        ids = sweep.ids
        order = np.argsort(ids)
        place = np.minimum(np.searchsorted(ids, self.ids, sorter=order), max(0, len(ids) - 1))
        mine = np.flatnonzero(ids[order[place]] == self.ids) if len(ids) else np.empty(0, int)
        columns = order[place[mine]]
        visits = sweep.visit_of(columns, self.number[mine])
        for v, event in sorted(set(zip(visits.tolist(), self.event[mine].tolist()))):
            chosen = (visits == v) & (self.event[mine] == event)
            found.setdefault(v, []).append((mine[chosen], columns[chosen]))
        return found


class SortedSweep(StepSweep):
    """The visits of a block of trajectories on the host.

    Parameters
    ----------
    start, stop : int
        The block: which places in the order of the steps.
    first : int
        The trajectory that the steps count from.
    every : int or None
        Of every so many states one was kept, and the others are computed again; None: all were, or they aren't wanted.
    """

    def __init__(self, run: Run, steps: Steps, start: int, stop: int, first: int, every: int | None):
        self._run, self._steps, self._start, self._stop = run, steps, start, stop
        self._own = steps.order[start:stop]
        self.counts, self.ids = steps.counts[self._own], self._own + first
        self._every = every
        # What is looked at in each visit, or never.
        self._terminated = run.terminated[self.ids] if run.settings.events else None

    @cached_property
    def leaves(self) -> list[Any]:  # type: ignore[override]
        """The leaves of the parameters of these columns."""
        return self._run.columns(self._run.batch.p.leaves, self.ids)

    def __len__(self) -> int:
        return int(self.counts[0])

    def backwards(self) -> Iterator[Visit]:
        """Return the visits from the last step to the first."""
        return super().backwards() if self._every else (self._visit(s) for s in range(len(self)))

    def forwards(self) -> Iterator[Visit]:
        """Return the visits from the first step to the last."""
        return super().forwards() if self._every else (self._visit(s) for s in range(len(self) - 1, -1, -1))

    def visit_of(self, column: Array, number: Array) -> Array:
        """Return in which visit, counted backwards, the steps of these numbers lie."""
        # Stretches begin together, so their visits are about steps of one number.
        return (len(self) if self._every else self.counts[column]) - 1 - number

    def _visit(self, s: int) -> Visit:
        sweep = self._steps.sweep(s)
        stop = min(self._stop, int(self._steps.widths[s]))
        cut = slice(self._start, stop)
        last = slice(0, stop - self._start) if s == 0 else slice(0, 0)
        return Visit(s, sweep.t[cut], sweep.h[cut], sweep.u[:, cut], last)

    # ---- from kept states

    def _starts(self) -> range:
        return range(0, len(self), self._every or 1)

    def _stretch(self, begin: int) -> Iterator[Visit]:
        stop = min(begin + (self._every or 1), len(self))
        width = self._width(begin)
        kept: Any = self._steps.kept
        u = kept.states(self._own[:width], np.full(width, begin // (self._every or 1)))
        for number in range(begin, stop):
            width, following = self._width(number), self._width(number + 1)
            u = u[:, :width]
            t, h = self._steps.times(self._own[:width], np.full(width, number))
            visit = Visit(len(self) - 1 - number, t, h, u, slice(following, width))
            yield visit
            if number + 1 < stop:  # the next stretch begins at a kept state
                u = self._run.stages_again(self, visit)[1]

    def _width(self, number: int) -> int:
        return int(np.count_nonzero(self.counts > number))

    # ---- what lies in a step

    @cached_property
    def _schedule(self) -> Schedule:
        return self._run.entries.scheduled(self, self._run.coefficients)

    def at_end(self, visit: Visit) -> Sequence[Saved]:
        """Return the values saved at the end of the step."""
        return self._schedule.at_end(visit.number)

    def inside(self, visit: Visit) -> Sequence[Saved]:
        """Return those saved inside the step."""
        return self._schedule.inside(visit.number)

    def handed_on(self, visit: Visit) -> Sequence[Saved]:
        """Return those saved inside the step before."""
        return self._schedule.handed_on(visit.number)

    @cached_property
    def _passings(self) -> dict[int, list[tuple[Array, Array]]]:
        return self._run.crossings.by_visits(self)

    def located(self, visit: Visit) -> Sequence[LocatedEvent]:
        """Return the events in the step."""
        if self._terminated is None:
            return ()
        crossings, found = self._run.crossings, []
        for chosen, columns in self._passings.get(visit.number, ()):
            x, time = crossings.x[chosen], crossings.time[chosen]
            found.append(LocatedEvent(int(crossings.event[chosen[0]]), False, columns, x, time, chosen))
        columns = np.flatnonzero(self._terminated[visit.about]) + visit.about.start
        events = self._run.ending_events[self.ids[columns]]
        for event in np.unique(events).tolist():
            own = columns[events == event]
            ids, outcome = self.ids[own], self._run.outcome
            found.append(LocatedEvent(event, True, own, outcome.end_part[ids], outcome.t_reached[ids], ids))
        return found

    def moves(self, visit: Visit) -> Array:
        """Tell in which columns the step ends where tspan does."""
        found = np.zeros(len(visit.t), bool)
        found[visit.about] = True if self._terminated is None else ~self._terminated[visit.about]
        return found
