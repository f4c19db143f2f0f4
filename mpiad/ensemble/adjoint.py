"""Reverse mode of a solve: the adjoint of its accepted steps, from the last to the first.

The columns are swept in blocks that fit the cache. Every number of a trajectory's cotangents depends on that trajectory
alone; only parameters that all share are summed over columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.checkpoints import walks
from mpiad.ensemble.coefficients import Coefficients
from mpiad.ensemble.crossing import pull_crossing, pull_passing
from mpiad.ensemble.ledger import Inside, Ledger
from mpiad.ensemble.linearization import Tracing
from mpiad.ensemble.run import FINAL, INITIAL, Run
from mpiad.ensemble.seeds import Entries, Schedule, Seeds, entries_of, scheduled
from mpiad.ensemble.transposed_step import Arrival, TransposedStep
from mpiad.ensemble.walk import Visit, Walk

__all__ = ["Cotangents", "of_ends", "pull_run"]

@dataclass
class Cotangents:
    """Cotangents of what a solve started from.

    Parameters
    ----------
    u0 : array, shape (d, N)
    start, end : array, shape (N,)
    leaves : dict
        From places of leaves of the parameters to arrays in their shapes.
    """

    u0: Array
    start: Array
    end: Array
    leaves: dict[int, Array]


def pull_run(run: Run, seeds: Seeds, places: Sequence[int], timed: bool) -> Cotangents:
    """Return the cotangents of a run's inputs.

    Parameters
    ----------
    run : Run
    seeds : Seeds
    places : sequence of int
        Of the leaves of the parameters to differentiate by.
    timed : bool
        Whether to differentiate by the ends of tspan, too.
    """
    batch = run.batch
    leaves = {place: np.zeros_like(batch.p.leaves[place]) for place in places}
    found = Cotangents(of_ends(run, seeds), np.zeros(batch.size), np.zeros(batch.size), leaves)
    tracing = Tracing(run.field, places, timed)
    entries = None if seeds.saved is None else entries_of(run)
    with np.errstate(all="ignore"):
        for first, walk in walks(run):
            _Block(run, tracing, seeds, found, walk, first, timed).sweep(entries)
    if seeds.reached is not None:
        # Where no event came first, the time that was reached is the end of tspan itself.
        found.end += np.where(run.live & ~run.terminated, seeds.reached, 0)
    if seeds.saved is not None:
        ids, place = np.nonzero(run.save_step == INITIAL)
        # Not by +=, which would take one of several saved times at the start.
        np.add.at(found.u0.T, ids, seeds.saved[ids, place])
    return found


def of_ends(run: Run, seeds: Seeds) -> Array:
    """Return the cotangents of the final states; none of those that failed."""
    end = np.where(run.live, seeds.end, 0)
    if seeds.saved is not None:
        ids, place = np.nonzero(run.save_step == FINAL)
        # Only where every step is saved is one of them FINAL, so no trajectory comes twice.
        end[:, ids] += seeds.saved[ids, place].T
    return end


class _Block:
    """One block of columns on the way back."""

    def __init__(
        self, run: Run, tracing: Tracing, seeds: Seeds, found: Cotangents, walk: Walk, first: int, timed: bool
    ):
        self._run, self._tracing, self._seeds, self._found, self._walk = run, tracing, seeds, found, walk
        self._timed, self._ids = timed, walk.ids + first
        batch = run.batch
        self._leaves = run.columns(batch.p.leaves, self._ids)
        self._parts = {place: np.zeros_like(self._leaves[place]) for place in found.leaves}
        self._coefficients = Coefficients(run.tableau, batch.u0.real.dtype)
        self._start, self._end = np.zeros(len(self._ids)), np.zeros(len(self._ids))
        self._crossed = run.terminated[self._ids]

    def sweep(self, entries: Entries | None) -> None:
        """Go from the last step to the first, and put what is found to its place."""
        found, ids, varies = self._found, self._ids, self._run.batch.p.varies
        self._cotangent = found.u0[:, ids]
        self._schedule = None if entries is None else scheduled(self._run, entries, self._walk, ids)
        passed = self._seeds.crossed is not None
        self._passings = self._run.crossings.by_visits(self._walk, ids) if passed else {}
        for v, visit in enumerate(self._walk.backwards()):
            self._pull(v, visit)
        found.u0[:, ids] = self._cotangent
        found.start[ids], found.end[ids] = self._start, self._end
        for place, part in self._parts.items():
            if varies[place]:
                found.leaves[place][..., ids] = part
            else:
                found.leaves[place] = found.leaves[place] + part

    def _pull(self, v: int, visit: Visit) -> None:
        width = len(visit.t)
        step = self._step(visit)
        # The double of a single column gets nothing, or its parameters would count twice.
        cotangent = np.zeros_like(step.y[0])
        cotangent[:, :width] = self._cotangent[:, :width]
        ledger = Ledger(step, self._parts, self._run.batch.p.varies, width, self._timed)
        inside, arrivals = self._met(v, step, cotangent)
        inside += self._passed(v, step, ledger)
        if self._timed:
            ledger.note_saved(inside, self._run.tableau)
        if self._crossed[visit.last].any():
            inside.append(self._crossing(visit.last, step, cotangent, ledger))
        if self._timed:
            ledger.note_new(cotangent)
        arrivals += [part.arrival(step) for part in inside]
        cotangent = step.pull(cotangent, arrivals, ledger.note_stage)
        for part in inside:
            cotangent[:, part.columns] += part.value
        self._cotangent[:, :width] = cotangent[:, :width]
        if self._timed:
            self._note_times(visit, ledger)

    def _step(self, visit: Visit) -> TransposedStep:
        run = self._run
        columns = run.doubled(len(visit.t))
        leaves, visit = run.columns(self._leaves, columns), visit.of(columns)
        return TransposedStep(self._coefficients, run.tableau.c, self._tracing, visit.u, visit.t, visit.h, leaves)

    def _met(self, v: int, step: TransposedStep, cotangent: Array) -> tuple[list[Inside], list[Arrival]]:
        """Add cotangents of values saved at the step's end, and return those of values saved inside it or before."""
        schedule, inside, arrivals = self._schedule, [], []
        if schedule is None:
            return inside, arrivals
        last = self._run.tableau.stages - 1
        for chosen in schedule.at_end.get(v, ()):
            cotangent[:, schedule.column[chosen]] += self._seed(schedule, chosen)
        for chosen in schedule.handed_on.get(v, ()):
            value = self._seed(schedule, chosen) * schedule.h[chosen]
            arrivals.append(Arrival(schedule.column[chosen], value, {0: schedule.weights[last][chosen]}))
        for chosen in schedule.inside.get(v, ()):
            final = schedule.final[chosen]
            # Elsewhere that stage is the first of the next step, and has got its share there.
            if final.any() or self._timed:
                step.add_last_stage()
            weights = [weight[chosen] for weight in schedule.weights]
            inside.append(Inside(schedule.column[chosen], self._seed(schedule, chosen), schedule.x[chosen], weights, final))
        return inside, arrivals

    def _seed(self, schedule: Schedule, chosen: Array) -> Array:
        saved: Any = self._seeds.saved
        return saved[schedule.ids[chosen], schedule.place[chosen]].T

    def _passed(self, v: int, step: TransposedStep, ledger: Ledger) -> list[Inside]:
        """Return cotangents of the states at events inside the step that didn't end their trajectory."""
        found, crossed, places = [], self._seeds.crossed, tuple(self._parts)
        for chosen, columns in self._passings.get(v, ()):
            if crossed is not None and crossed[chosen].any():
                step.add_last_stage()
                found.append(pull_passing(self._run, places, step, ledger, columns, chosen, crossed[chosen]))
        return found

    def _crossing(self, last: slice, step: TransposedStep, cotangent: Array, ledger: Ledger) -> Inside:
        """Hand the cotangent of states at terminal events to the steps inside which they lie."""
        columns = np.flatnonzero(self._crossed[last]) + last.start
        ids = self._ids[columns]
        step.add_last_stage()
        reached = 0.0 if self._seeds.reached is None else self._seeds.reached[ids]
        end = cotangent[:, columns]
        cotangent[:, columns] = 0
        places = tuple(self._parts)
        return pull_crossing(self._run, places, step, ledger, columns, ids, end, reached, self._timed)

    def _note_times(self, visit: Visit, ledger: Ledger) -> None:
        width, last = len(visit.t), visit.last
        self._start[:width] += ledger.t_bar[:width]
        # All steps but the last keep their sizes. The last one ends where tspan does, but not before an event.
        moves = np.where(self._crossed[last], 0.0, ledger.h_bar[last])
        self._start[last] -= moves
        self._end[last] += moves
