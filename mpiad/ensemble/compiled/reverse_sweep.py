"""Derivatives of a solve by CPU kernels: cotangents from the reverse kernel, and tangents from the forward kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.arguments import argument, from_row_parts, parts, row_parts
from mpiad.ensemble.adjoint import Cotangents, cotangents_at_ends, pull_run, to_start
from mpiad.ensemble.compiled.kernel_solver import Solver, Tape
from mpiad.ensemble.compiled.reverse_kernel import layout_of
from mpiad.ensemble.compiled.trace import PackedLeaf, ParameterPacking
from mpiad.ensemble.compiled.work_shares import each
from mpiad.ensemble.jumps import FOUND
from mpiad.ensemble.outcome import INITIAL
from mpiad.ensemble.run import Run, Seeds


def kernel_events(run: Run, seeds: Seeds, time_bar: Array) -> tuple[Array, Array]:
    """Return the index of each trajectory's first event in a table for the reverse kernel, (N + 1,), and the table."""
    # The table has the events that end steps, and others whose times have cotangents, sorted by trajectory and time. A row
    # has the trajectory, the index of the condition, the step, the fraction of the step, the time, and its cotangent.
    # `time_bar`, (N,): the cotangents of the times at which trajectories end at events.
    table, stops, others = run.outcome.event_table, run.stop_rows, run.crossing_rows
    if not run.settings.events or table is None:
        return event_rows(run, others)
    # `crossed_row` is -1 for times that aren't in `crossed`.
    bar = np.zeros(table.shape[1]) if seeds.crossed is None else np.append(seeds.crossed, 0.0)[run.crossed_row]
    ids = table[0, stops].astype(int)
    last = np.append(ids[1:] != ids[:-1], True)[: len(ids)]
    bar[stops[last]] += time_bar[ids[last]]
    return event_rows(run, np.sort(np.append(stops, others[bar[others] != 0])), bar)


def event_rows(run: Run, rows: Array, *columns: Array) -> tuple[Array, Array]:
    """Return the index of each trajectory's first event, (N + 1,), and some rows of the table of events, with `columns`."""
    if not run.settings.events or run.outcome.event_table is None:
        return np.zeros(run.batch.size + 1, int), np.empty((0, 7))
    conditions = [e for e, event in enumerate(run.settings.events) if event.condition is not None]
    ids, event, *others = run.outcome.event_table
    events = np.ascontiguousarray(np.vstack([ids, np.searchsorted(conditions, event), *others, *columns])[:, rows].T)
    return np.searchsorted(events[:, 0], np.arange(run.batch.size + 1)), events


def jump_rows(run: Run, dtype: np.dtype) -> tuple[Array, ...]:
    """Return the events that acted, as arguments of kernels."""
    jumps, integer = run.jumps, np.dtype(np.int64)
    if jumps is None:
        none = np.empty(0, np.int64)
        return none, none, none, none, np.empty(0), np.empty((0, 0), dtype)
    first = np.searchsorted(jumps.ids, np.arange(run.batch.size + 1))
    numbers = (argument(x, integer) for x in (jumps.number, jumps.event, jumps.slot))
    return first, *numbers, argument(jumps.time), argument(np.ascontiguousarray(jumps.before.T), dtype)


def due_cotangents(run: Run, time_bar: Array) -> Array:
    """Return the cotangents of the times of the events that acted: those in `time_bar`, (N,), which are set to zero."""
    jumps = run.jumps
    if jumps is None:
        return np.empty(0)
    due, ids = np.zeros(len(jumps.ids)), np.flatnonzero(time_bar)
    last = np.searchsorted(jumps.ids, ids, side="right") - 1
    jumped = last >= np.searchsorted(jumps.ids, ids)
    number = jumps.number[last[jumped]]
    # Only of jumps that no step follows; `to_start` handles the jumps before the first step.
    jumped[jumped] = (jumps.slot[last[jumped]] != FOUND) & (number == run.counts[ids[jumped]]) & (number > 0)
    due[last[jumped]] = time_bar[ids[jumped]]
    time_bar[ids[jumped]] = 0.0
    return due


def differentiated_parts(solver: Solver, run: Run, places: Collection[int], timed: bool) -> list[PackedLeaf] | None:
    """Return the leaves with the indices `places`; None if the kernels of derivatives don't support the solve."""
    if timed and run.settings.mass is not None and run.jumps is not None and (run.jumps.turn > 0).any():
        return None  # the kernel would need u' between events at the same time
    return solver.differentiated_parts(places)


def recorded_groups(solver: Solver, solve: Run) -> Iterator[tuple[slice, Array, Solver, Run]]:
    """Solve one group of trajectories after the other again, to limit the memory of recorded steps.

    Yield the trajectories, the mask of their times in `solve.event_times`, their solver and their run.
    """
    ids = solve.event_times.ids
    for rows, part in solver.parts():
        run = Run(solve.batch.share(rows), solve.settings.share(rows), part.record())
        yield rows, (ids >= rows.start) & (ids < rows.stop), part, run


def pull_compiled(solver: Solver, run: Run, seeds: Seeds, places: Sequence[int], timed: bool) -> Cotangents:
    """Return the cotangents of a run's inputs by a reverse kernel; arguments as for `pull_run`."""
    if run.settings.events and solver.saves_every_step:
        return pull_run(run, seeds, places, timed)  # the saved times aren't known in advance
    if solver.settings.checkpoints is not None and run.outcome.last is None:
        return _in_parts(solver, run, seeds, places, timed)
    if (chosen := differentiated_parts(solver, run, places, timed)) is None:
        return pull_run(run, seeds, places, timed)
    timed = timed or (run.jumps is not None and len(run.stops.ids) > 0)
    batch, count = run.batch, run.batch.size
    outcome, real = solver.recorded(run.outcome), solver.spec.dtype
    bars_at_ends = cotangents_at_ends(run, seeds, places, timed)
    due, time_bar = due_cotangents(run, bars_at_ends.start), bars_at_ends.start
    if run.jumps is None and seeds.reached is not None:
        time_bar = np.where(run.live & run.terminated, seeds.reached, 0.0)
    first_event, events = kernel_events(run, seeds, time_bar)
    inside = solver.spec.inside and (seeds.saved is not None or len(events) > 0)
    spec, wanted = solver.derivative_spec(chosen, timed, inside, run.jumps is not None, len(events) > 0)
    function = solver.function("reverse", spec, wanted)
    saved, save_step = np.empty((0, 0, 0)), np.empty((count, 0), np.int32)
    if seeds.saved is not None:
        saved, save_step = parts(np.ascontiguousarray(seeds.saved.conj())), argument(run.save_step, np.dtype(np.int32))
    end_bar = argument(row_parts(bars_at_ends.u0.conj()), real)
    # The kernel writes nothing for trajectories without steps, whose final state is the initial state.
    u0_bar, p_bar = end_bar.copy(), np.zeros((spec.wanted_varying, count))
    ends = outcome.last, outcome.naccept, argument(run.outcome.t_reached), run.live, end_bar
    start_bar, stop_bar = np.zeros(count), np.zeros(count)
    before = solver.p, solver.s, solver.times, *ends, argument(saved, real), save_step, u0_bar, p_bar
    after = start_bar, stop_bar, *jump_rows(run, real), due, first_event, events

    def pull_tape(tape: Tape, pause: Callable[[], None]) -> Array:
        s_bar = np.zeros(spec.wanted_shared)
        tape.visit(function, layout_of(spec), real, (*before, s_bar, *after), pause)
        return s_bar

    s_bar = np.sum(each(pull_tape, outcome.tapes, solver.threads), axis=0)
    initial = from_row_parts(u0_bar, batch.u0.dtype).conj()
    if seeds.saved is not None:
        # The saved states of trajectories without steps are initial states.
        unstepped = np.flatnonzero(run.live & (run.outcome.naccept == 0))
        at_start = run.save_step[unstepped] == INITIAL
        initial[:, unstepped] += np.where(at_start[..., None], seeds.saved[unstepped], 0).sum(axis=1).T
    if timed and seeds.reached is not None:
        stop_bar += np.where(run.live & ~run.terminated, seeds.reached, 0.0)
    joined = ParameterPacking(tuple(chosen)).joined(p_bar, s_bar, count)
    batch.p.add_cotangents(bars_at_ends.leaves, {place: leaf.conj() for place, leaf in joined.items()}, slice(None))
    unstepped = outcome.naccept == 0
    start_bar[unstepped] += bars_at_ends.start[unstepped]
    bars_at_ends = dataclasses.replace(bars_at_ends, u0=initial, start=start_bar, end=stop_bar + bars_at_ends.end)
    if run.jumps is not None:
        to_start(run, bars_at_ends, timed)
        if timed:
            at_times = run.jumps.slot != FOUND
            bars_at_ends.due[run.jumps.slot[at_times], run.jumps.ids[at_times]] += due[at_times]
    return bars_at_ends


def _in_parts(solver: Solver, solve: Run, seeds: Seeds, places: Sequence[int], timed: bool) -> Cotangents:
    """Compute cotangents for one group of trajectories after the other."""
    batch = solver.batch
    leaves = {place: np.zeros_like(batch.p.leaves[place]) for place in places}
    due = np.empty((0, batch.size))
    cotangents = Cotangents(np.empty_like(batch.u0), np.empty(batch.size), np.empty(batch.size), leaves, due)
    for rows, of_group, part, run in recorded_groups(solver, solve):
        share = seeds.share(rows)
        if seeds.crossed is not None:
            share = share._replace(crossed=seeds.crossed[of_group])
        bars = pull_compiled(part, run, share, places, timed)
        if len(bars.due) > len(cotangents.due):
            cotangents.due = np.concatenate([cotangents.due, np.zeros((len(bars.due) - len(cotangents.due), batch.size))])
        if bars.due.size:
            cotangents.due[: len(bars.due), rows] = bars.due
        cotangents.u0[:, rows], cotangents.start[rows], cotangents.end[rows] = bars.u0, bars.start, bars.end
        batch.p.add_cotangents(leaves, bars.leaves, rows)
    return cotangents


def carried_tangents(solver: Solver, run: Run, by_u0: bool, places: Sequence[int]) -> tuple[Array, Array] | None:
    """Return the kernel's tangents of final, (m, d, N), and saved states, (m, N, n_saved, d); None if some are missing."""
    # The m directions are the components of initial states, if `by_u0`, and the entries of the leaves at `places`.
    if run.outcome.carried is None:
        return None
    carried, wanted = solver.directions, solver.traced.directions(by_u0, places)
    if not set(wanted) <= set(carried):
        return None
    end, saved = run.outcome.carried
    if wanted != carried:
        chosen = [carried.index(direction) for direction in wanted]
        end, saved = end[chosen], saved[chosen]
    return end, saved
