"""Reverse mode of a solve: the adjoint of its accepted steps, from the last step to the first.

Trajectories are columns, which are processed in blocks that fit into the cache. Cotangents are computed separately for each
trajectory; only the cotangents of shared parameters are summed over the trajectories.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.coefficients import interpolate, stage_rates
from mpiad.ensemble.linear_jumps import LinearJumps, rates
from mpiad.ensemble.linearization import Field, Tracing, transposed_columns
from mpiad.ensemble.run import Run, Seeds
from mpiad.ensemble.step_sweep import LocatedEvent, StepSweep, Visit
from mpiad.ensemble.transposed_step import Arrival, Inside, StepCotangents, TransposedStep, over_slots, transposed_steps

# The adjoint of an event.
#
# Let U(x) be the interpolant of a step of size h. The condition g(u, p, t) vanishes at the fraction x of the step. By the
# implicit function theorem, a change δ of all other variables changes x by -(δg + g_u δU) / (g_u U' + g_t h). If the step
# ends at the event, the state after the step changes with x; otherwise only the time of the event changes.


def pull_event(
    run: Run, located: LocatedEvent, totals: StepCotangents, leaves: list[Any], u_bar: Array | None, time_bar: Array | float
) -> Inside:
    """Return the cotangents of the interpolated states at an event in m columns of a step.

    - `totals`: accumulates the cotangents of parameters and, if the step ends at the event, of times.
    - `u_bar`: shape (d, m); the cotangents of the states after the step if it ends at the event, else None.
    - `time_bar`: shape (m,), or zero; the cotangents of the times of the event.
    """
    step, columns, x = totals.step, located.columns, located.x
    condition = linearized_condition(run, step, located, tuple(totals.parts), leaves)
    # The cotangent of x, from the time of the event and from the state after the step.
    x_bar = time_bar * step.h[columns]
    if u_bar is not None:
        x_bar = (u_bar * condition.rate).real.sum(axis=0) + x_bar
    value, *parts, t_bar = condition.pull(-x_bar / condition.slope)
    totals.note_leaves(parts, columns, len(x))
    if u_bar is not None:
        value = u_bar + value
        if totals.timed:
            totals.t_bar[columns] += t_bar + time_bar
    weights = run.coefficients.weights(x)
    return Inside(columns, value.astype(step.y[0].dtype, copy=False), x, [weights[i] for i in range(len(weights))])


class LinearizedCondition(NamedTuple):
    """The derivatives of an event's condition g at its roots in n columns."""

    pull: Callable[[Array], list[Any]]  # maps cotangents of g, (n,), to those of states, leaves and times
    rate: Array  # shape (d, n); the derivative of the interpolated state with respect to the fraction x of the step
    g_u: Array  # shape (d, n)
    g_t: Array  # shape (n,)
    slope: Array  # shape (n,); the derivative of g with respect to x


def linearized_condition(
    run: Run, step: TransposedStep, located: LocatedEvent, places: Sequence[int], leaves: Sequence[Any]
) -> LinearizedCondition:
    """Return the derivatives of a condition at its roots in a step; `places`: the differentiated leaves."""
    x, columns, time = located.x, located.columns, located.time
    h, stages = step.h[columns], [k[:, columns] for k in step.k]
    rate = h * sum(r * k for r, k in zip(stage_rates(run.tableau, x), stages))
    states = interpolate(run.coefficients, step.y[0][:, columns], h, stages, x)
    field = Field(run.batch._replace(f=run.settings.events[located.event].written))
    chosen = run.columns(leaves, columns)
    transposed = transposed_columns(field, places, True, np.empty_like(time)[None], states, chosen, time)
    g_u, *_, g_t = transposed(np.ones_like(x)[None])
    slope = (g_u * rate).real.sum(axis=0) + g_t * h
    return LinearizedCondition(lambda g: transposed(g[None]), rate, g_u, g_t, slope)


@dataclasses.dataclass
class Cotangents:
    """Cotangents of the inputs of a solve."""

    u0: Array  # shape (d, N)
    start: Array  # shape (N,); of the start of tspan
    end: Array  # shape (N,); of the end of tspan
    leaves: dict[int, Array]  # cotangents of the leaves of the parameters, by the indices of the leaves
    # Shape (n, N); of the first n - 1 rows of the given times of events, and a row of zeros (see `LinearJumps`).
    due: Array = dataclasses.field(default_factory=lambda: np.empty((0, 0)))


def pull_run(run: Run, seeds: Seeds, places: Sequence[int], timed: bool) -> Cotangents:
    """Return the cotangents of initial states, of the leaves `places` and, if `timed`, of tspan and given event times."""
    batch = run.batch
    leaves = {place: np.zeros_like(batch.p.leaves[place]) for place in places}
    cotangents = Cotangents(of_ends(run, seeds), run.numbers(batch.size), run.numbers(batch.size), leaves)
    timed = timed or run.times_move
    jumps = None
    if run.jumps is not None:
        note_ends(run, seeds, cotangents, timed)
        jumps = LinearJumps(run, run.jumps, places, timed)
    step_of = transposed_steps(run, Tracing(run.field, places, timed), places)
    backward = _BackwardSweep(run, step_of, seeds, cotangents, timed, jumps)
    with np.errstate(all="ignore"):
        for sweep in run.sweeps(backwards=True):
            backward.sweep(sweep)
    if timed and seeds.reached is not None:
        # The final time of a trajectory is the end of tspan, unless an event ended the trajectory.
        cotangents.end += np.where(run.placed(run.live & ~run.terminated), seeds.reached, 0)
    if seeds.saved is not None:
        run.add_saved(cotangents.u0, seeds.saved, at_start=True)
    if jumps is not None:
        to_start(cotangents, jumps)
    return cotangents


def note_ends(run: Run, seeds: Seeds, cotangents: Cotangents, timed: bool) -> None:
    """Add the contributions of final states and final times to the cotangents of tspan, for a run with jumps."""
    if seeds.reached is not None:
        cotangents.start += np.where(run.terminated & run.live, seeds.reached, 0)
    # If an event at the end of tspan has changed the state, the derivative of the final state with respect to the end of
    # tspan is u' at the changed state.
    ids = np.flatnonzero(run.cut & ~run.terminated)
    if timed and ids.size:
        drift = (cotangents.u0[:, ids] * rates(run, ids, run.outcome.u_end[:, ids], run.batch.end[ids])).real.sum(axis=0)
        cotangents.end[ids] += drift
        cotangents.start[ids] -= drift


def to_start(cotangents: Cotangents, jumps: LinearJumps) -> None:
    """Propagate cotangents back over events at the start; add contributions of all events to leaves and given times."""
    for rows, ids in reversed(jumps.at_start):
        cotangents.u0[:, ids], cotangents.start[ids] = jumps.pull(rows, cotangents.u0[:, ids], cotangents.start[ids])
    jumps.add_leaves(cotangents.leaves)
    cotangents.due = jumps.due


def of_ends(run: Run, seeds: Seeds) -> Array:
    """Return the cotangents of the final states, including their saved copies; zero for failed trajectories."""
    end = run.masked(seeds.end)
    if seeds.saved is not None:
        run.add_saved(end, seeds.saved, at_start=False)
    return end


class _BackwardSweep:
    """The backward sweep over the steps of a run, one block of columns after the other."""

    def __init__(
        self, run: Run, step_of: Callable, seeds: Seeds, cotangents: Cotangents, timed: bool, jumps: LinearJumps | None
    ):
        self._run, self._step_of, self._seeds, self._cotangents = run, step_of, seeds, cotangents
        self._timed, self._jumps = timed, jumps

    def sweep(self, sweep: StepSweep) -> None:
        """Sweep over a block from the last step to the first, and store the cotangents."""
        cotangents, ids = self._cotangents, sweep.ids
        self._sweep, self._leaves = sweep, sweep.leaves
        self._parts = {place: np.zeros_like(self._leaves[place]) for place in cotangents.leaves}
        # Cotangents of the start of the earliest step processed so far; a change of this time shifts all processed steps.
        self._start, self._end = cotangents.start[ids], self._run.numbers(len(ids))
        self._u_bar = cotangents.u0[:, ids]
        for visit in sweep.backwards():
            self._pull(visit)
        cotangents.u0[:, ids] = self._u_bar
        if self._timed:
            cotangents.start[ids] = self._start
            cotangents.end[ids] += self._end
        self._run.batch.p.add_cotangents(cotangents.leaves, self._parts, ids)

    def _pull(self, visit: Visit) -> None:
        width = len(visit.t)
        jumps: Any = self._jumps
        jumped = self._sweep.jumps(visit)
        for rows, chosen in reversed(jumped):
            self._u_bar[:, chosen], self._start[chosen] = jumps.pull(rows, self._u_bar[:, chosen], self._start[chosen])
        columns = self._run.doubled(width)
        leaves = self._run.columns(self._leaves, columns)
        step = self._step_of(visit.of(columns), leaves)
        # The copy of a duplicated column has a zero cotangent.
        cotangent = np.zeros_like(step.y[0])
        cotangent[:, :width] = self._u_bar[:, :width]
        totals = StepCotangents(step, self._parts, self._run.batch.p, width, self._timed)
        inside, arrivals = self._saved(visit, step, cotangent)
        located = self._sweep.located(visit)
        crossed = self._seeds.crossed
        passing = [event for event in located if not event.terminal and crossed is not None]
        if type(crossed) is np.ndarray:  # on a device, the host would have to wait for the values
            passing = [event for event in passing if crossed[event.row].any()]
        inside += [self._event(event, totals, leaves) for event in passing]
        if self._timed and self._jumps is None:
            totals.note_saved(inside)
        elif self._timed:
            # A value saved at an event that acts is the state after the event, with x = 0 even if the event's time changes.
            totals.note_saved([part._replace(value=part.value * (part.x != 0)) for part in inside])
        inside += [self._event(event, totals, leaves, cotangent) for event in located if event.terminal]
        if self._timed:
            totals.note_new(cotangent)
        arrivals += [part.arrival(step) for part in inside]
        cotangent = step.pull(cotangent, arrivals, totals.note_stage)
        for part in inside:
            cotangent[:, part.columns] += over_slots(part.value)
        self._u_bar[:, :width] = cotangent[:, :width]
        if self._timed:
            totals.h_bar += step.by_size
            # Step sizes are constants, unless the step ends at the end of tspan or at a given time of an event.
            moves = np.where(self._sweep.moves(visit), totals.h_bar[:width], 0.0)
            self._start[:width] += totals.t_bar[:width]
            self._start[:width] -= moves
            self._end[:width] += moves
            for rows, chosen in jumped[:1]:
                self._start[chosen] -= jumps.lengthened(rows, totals.h_bar[chosen])

    def _saved(self, visit: Visit, step: TransposedStep, cotangent: Array) -> tuple[list[Inside], list[Arrival]]:
        """Add the cotangents of values saved at the end of a step to `cotangent`; return those of values saved inside it.

        Also return the contributions of values saved in the previous step to its last stage, the first stage of this step.
        """
        saved, inside = self._seeds.saved, []
        if saved is None:
            return [], []
        values = self._sweep.saved(visit)
        for part in values.at_end:
            cotangent[:, part.columns] += over_slots(part.seeds(saved))
        earlier = values.handed_on
        arrivals = [Arrival(part.columns, part.seeds(saved) * part.h, {0: part.weights[-1]}) for part in earlier]
        for part in values.inside:
            # If a step follows, it has added the contribution of the last stage, which is its first stage.
            if self._timed or part.whole is None or part.whole.any():
                step.add_last_stage()
            inside.append(Inside(part.columns, part.seeds(saved), part.x, part.weights, part.whole))
        return inside, arrivals

    def _event(
        self, located: LocatedEvent, totals: StepCotangents, leaves: list[Any], cotangent: Array | None = None
    ) -> Inside:
        """Return the cotangents of the interpolated states at an event: see `pull_event`.

        If the step ends at the event, `cotangent` contains the cotangents of the states after the step, shape (d, n); the
        columns with the event are then set to zero.
        """
        totals.step.add_last_stage()
        columns, crossed = located.columns, self._seeds.crossed
        u_bar, time_bars = None, crossed
        if cotangent is not None:
            u_bar, time_bars = cotangent[:, columns], self._seeds.reached
            cotangent[:, columns] = 0
        if self._jumps is not None and u_bar is not None:
            # Later steps begin at the time of the event.
            time_bar = self._start[columns]
            self._start[columns] = 0.0
            if crossed is not None and self._run.settings.events[located.event].acts:
                time_bar = time_bar + crossed[located.row]
        else:
            time_bar = 0.0 if time_bars is None else time_bars[located.row]
        return pull_event(self._run, located, totals, leaves, u_bar, time_bar)
