"""Reverse mode of a solve: the adjoints of its accepted steps and events, from the last to the first.

Trajectories are columns, which are processed in blocks that fit into the cache. Each visit (a step of several columns, see
`step_sweep`) is traced again from the states before it (see `replay`), and transposed at once, so that only the record of
one visit is in memory. Only the cotangents of shared parameters are summed over the trajectories.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.linearization import pulled, with_leaves
from mpiad.ensemble.replay import Inputs, Replay
from mpiad.ensemble.run import Run, Seeds
from mpiad.ensemble.step_sweep import Columns, StepSweep, Visit

Pair: TypeAlias = tuple[Array, Array]  # a result and its cotangent, None for zero


@dataclasses.dataclass
class Cotangents:
    """Cotangents of the inputs of a solve."""

    u0: Array  # shape (d, N)
    start: Array  # shape (N,); of the start of tspan
    end: Array  # shape (N,); of the end of tspan
    leaves: dict[int, Array]  # cotangents of the leaves of the parameters, by the indices of the leaves
    due: Array  # shape (times, N); of the given times of events, or of the first of them


def pull_columns(
    run: Run,
    bars: Cotangents,
    fun: Callable[[Array, Inputs], Iterable[Pair]],
    u: Array,
    leaves: Sequence[Any],
    columns: Columns,
    timed: bool,
) -> None:
    """Propagate `bars` in some columns back through a part of a solve; `fun` returns its results and their cotangents."""
    # `bars.start` has the cotangents of `Inputs.shift`. Cotangents of other inputs are added to those from later parts.
    places, variables = tuple(bars.leaves), [u, *[leaves[place] for place in bars.leaves]]
    if timed:
        variables += [np.zeros_like(x) for x in (bars.start[columns], bars.end[columns], bars.due[:, columns])]

    def results(traced: list[Array]) -> Iterable[Pair]:
        return fun(traced[0], Inputs(with_leaves(leaves, places, traced[1:]), *traced[1 + len(places) :]))

    by_u, *parts = pulled(results, variables)
    bars.u0[:, columns] = 0 if by_u is None else by_u
    run.batch.p.add_cotangents(bars.leaves, dict(zip(places, parts)), columns)
    if timed:
        shift, lengthening, due = parts[-3:]
        bars.start[columns] = 0 if shift is None else shift
        bars.end[columns] += 0 if lengthening is None else lengthening
        bars.due[:, columns] += 0 if due is None else due


def pull_run(run: Run, seeds: Seeds, places: Sequence[int], timed: bool) -> Cotangents:
    """Return the cotangents of initial states, of the leaves `places` and, if `timed`, of tspan and given event times."""
    timed = timed or run.times_move
    totals = cotangents_at_ends(run, seeds, places, timed)
    replay = Replay(run, timed, seeds)
    with np.errstate(all="ignore"):
        for sweep in run.sweeps(backwards=True):
            _pull_sweep(run, replay, sweep, seeds, totals, timed)
    if timed and seeds.reached is not None:
        # The final time of a trajectory is the end of tspan, unless an event ended the trajectory.
        totals.end += np.where(run.placed(run.live & ~run.terminated), seeds.reached, 0)
    if seeds.saved is not None:
        run.add_saved(totals.u0, seeds.saved, at_start=True)
    to_start(run, totals, timed)
    return totals


def cotangents_at_ends(run: Run, seeds: Seeds, places: Sequence[int], timed: bool) -> Cotangents:
    """Return the cotangents at the ends of the last steps, with those of saved copies; zero for failed trajectories."""
    batch, u0, start, end = run.batch, run.masked(seeds.end), *(run.zeros(run.batch.size) for _ in range(2))
    if seeds.saved is not None:
        run.add_saved(u0, seeds.saved, at_start=False)
    slots = 0 if run.jumps is None else int(run.jumps.slot.max()) + 1
    leaves = {place: np.zeros_like(batch.p.leaves[place]) for place in places}
    totals, ids = Cotangents(u0, start, end, leaves, run.zeros(slots, batch.size)), run.without_last_step
    if run.jumps is not None and seeds.reached is not None:
        totals.start += np.where(run.terminated & run.live, seeds.reached, 0)
    if timed and ids.size:
        replay, u_bar, start_bar = Replay(run, timed), u0[:, ids], start[ids]
        chosen, bars = run.batch.p.chosen(ids, batch.p.leaves), [u_bar, start_bar]
        at_end = lambda u, inputs: zip([replay.ended(ids, u, inputs), inputs.shift], bars)  # noqa: E731
        pull_columns(run, totals, at_end, run.outcome.u_end[:, ids], chosen, ids, timed)
    return totals


def to_start(run: Run, totals: Cotangents, timed: bool) -> None:
    """Propagate cotangents back over the events at the start of tspan."""
    if run.jumps is None or not run.jumps.at_start():
        return
    replay, batch = Replay(run, timed), run.batch
    bars = totals.u0.copy(), totals.start.copy() if timed else None
    pull_columns(
        run, totals, lambda u, inputs: zip(replay.begun(u, inputs), bars), batch.u0, batch.p.leaves, slice(None), timed
    )


def _pull_sweep(run: Run, replay: Replay, sweep: StepSweep, seeds: Seeds, totals: Cotangents, timed: bool) -> None:
    """Sweep over a block from the last step to the first."""
    ids, leaves = sweep.ids, sweep.leaves
    zeros = {place: np.zeros_like(leaves[place]) for place in totals.leaves}
    times = np.zeros_like(totals.end[ids]), zeros, np.zeros_like(totals.due[:, ids])
    bars = Cotangents(totals.u0[:, ids], totals.start[ids], *times)
    for visit in sweep.backwards():
        columns = slice(0, len(visit.t))

        def results(u: Array, inputs: Inputs, visit: Visit = visit, columns: slice = columns) -> Iterator[Pair]:
            visited = replay.visited(sweep, visit, u, inputs)
            yield visited.u, bars.u0[:, columns]
            if timed:
                yield visited.shift, bars.start[columns]
            for part, value in visited.saved:
                bar = part.seeds(seeds.saved)
                # On a device, the state at the end of a step may be saved in several slots.
                yield value, bar if bar.shape == value.shape else np.sum(bar, axis=0, keepdims=True)
            for located, time in visited.times:
                final = located.stops and not run.settings.events[located.event].acts
                bar = None if final and run.jumps else seeds.reached if final else seeds.crossed
                yield time, None if bar is None else bar[located.row]

        pull_columns(run, bars, results, visit.u, run.batch.p.chosen(columns, leaves), columns, timed)
    totals.u0[:, ids], totals.start[ids] = bars.u0, bars.start
    totals.end[ids] += bars.end
    totals.due[:, ids] += bars.due
    run.batch.p.add_cotangents(totals.leaves, bars.leaves, ids)
