"""Sweeps over the steps of trajectories on the host, which were sorted at the end of the solve.

The columns of a block are sorted by their numbers of steps, in descending order, and visit v is the (v+1)-th step from the
end of the first few. If only some states were kept, all steps of a visit have the same number, counted from the start, so
that all columns begin their segments together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.record import Steps
from mpiad.ensemble.seeds import Schedule, grouped
from mpiad.ensemble.step_sweep import LocatedEvent, SavedInStep, StepSweep, Visit

if TYPE_CHECKING:  # a run creates its sweeps, and so imports this file
    from mpiad.ensemble.run import Run


def columns_of(sweep: SortedSweep, ids: Array) -> tuple[Array, Array]:
    """Return which of the trajectories `ids` belong to a sweep, and their columns."""
    order = np.argsort(sweep.ids)
    place = np.minimum(np.searchsorted(sweep.ids, ids, sorter=order), max(0, len(order) - 1))
    mine = np.flatnonzero(sweep.ids[order[place]] == ids) if len(order) else np.empty(0, int)
    return mine, order[place[mine]]


class Crossings(NamedTuple):
    """Events of trajectories."""

    # `ids`, `order`, `event`, `number`: int, shape (m,). The trajectories, the index among the events of each trajectory,
    # the index of the event in the solve, and that of the step, from 0.
    ids: Array
    order: Array
    event: Array
    number: Array
    # `x`, `time`: shape (m,). The fraction of the step at which it lies, and its time.
    x: Array
    time: Array

    def by_visits(self, sweep: SortedSweep) -> dict[int, list[tuple[Array, Array]]]:
        """Return, by visit of a sweep, the crossings and their columns, event by event."""
        mine, columns = columns_of(sweep, self.ids)
        return grouped(sweep.visit_of(columns, self.number[mine]), self.event[mine], mine, columns)


class SortedSweep(StepSweep):
    """The visits of a block of trajectories on the host.

    - `start`, `stop`: the bounds of the block in the order of the steps.
    - `first`: the trajectory from which the steps count.
    - `every`: one of this number of states was kept, and the others are computed again; None if all were, or aren't needed.
    """

    def __init__(self, run: Run, steps: Steps, start: int, stop: int, first: int, every: int | None):
        self._run, self._steps, self._start, self._stop = run, steps, start, stop
        self._own = steps.order[start:stop]
        self.counts, self.ids = steps.counts[self._own], self._own + first
        self._every = every
        # Read in each visit if there are events.
        self._cut = run.cut[self.ids] if run.settings.events else None

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
        """Return the visits, counted backwards, that contain the steps of these numbers."""
        # With kept states segments begin together, so all steps of a visit have the same number.
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
            if number + 1 < stop:  # the next segment begins at a kept state
                u = self._run.stages_again(self, visit)[1]
                for rows, columns in self.jumps(visit):
                    u[:, columns] = self._run.jumps.after[:, rows]  # type: ignore[union-attr]

    def _width(self, number: int) -> int:
        return int(np.count_nonzero(self.counts > number))

    # ---- values and events in a step

    def is_last(self, column: Array, number: Array) -> Array:
        """Return for which steps the last stage isn't the first of a next one: there is none, or its state differs."""
        last, jumps = number == self.counts[column] - 1, self._run.jumps
        if jumps:
            most = int(self._run.counts.max()) + 1
            last |= np.isin(self.ids[column] * most + number + 1, jumps.ids * most + jumps.number)
        return last

    @cached_property
    def _schedule(self) -> Schedule:
        return self._run.entries.scheduled(self, self._run.coefficients)

    def saved(self, visit: Visit) -> SavedInStep:
        """Return the values saved in the step."""
        return self._schedule.at_visit(visit.number)

    @cached_property
    def _passings(self) -> dict[int, list[tuple[Array, Array]]]:
        return self._run.crossings.by_visits(self)

    def located(self, visit: Visit) -> Sequence[LocatedEvent]:
        """Return the events in the step."""
        if self._cut is None:
            return ()
        run, found = self._run, []
        for crossings, visits, ends in ((run.crossings, self._passings, False), (run.stops, self._stops, True)):
            for chosen, columns in visits.get(visit.number, ()):
                x, time, event = crossings.x[chosen], crossings.time[chosen], int(crossings.event[chosen[0]])
                # Times of events that act come after those of other events; that of an end is its trajectory's.
                row = run.acting_row[chosen] if ends and run.jumps else self.ids[columns] if ends else chosen
                found.append(LocatedEvent(event, ends, columns, x, time, row))
        return found

    @cached_property
    def _stops(self) -> dict[int, list[tuple[Array, Array]]]:
        return self._run.stops.by_visits(self)

    @cached_property
    def _jumps(self) -> dict[int, list[tuple[Array, Array]]]:
        return self._run.jumps.by_visits(self) if self._run.jumps else {}

    def jumps(self, visit: Visit) -> Sequence[tuple[Array, Array]]:
        """Return the jumps that follow the step, in order, and their columns."""
        return self._jumps.get(visit.number, ())

    def moves(self, visit: Visit) -> Array:
        """Return in which columns the step ends at the end of tspan."""
        found = np.zeros(len(visit.t), bool)
        found[visit.about] = True if self._cut is None else ~self._cut[visit.about]
        return found
