"""Derivatives of a solve by CPU kernels: cotangents from the reverse kernel, tangents from the forward or tangent kernel.

Both derivative kernels visit the recorded steps of the solve, for the shares of several threads (see `Tape.visit`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.compiling.arguments import argument, from_parts, from_row_parts, parts, row_parts
from mpiad.differentiation.forward import Bundle
from mpiad.ensemble.adjoint import Cotangents, cotangents_at_ends, pull_run, to_start
from mpiad.ensemble.compiled.kernel_solver import Solver, Tape
from mpiad.ensemble.compiled.reverse_kernel import layout_of as reverse_layout
from mpiad.ensemble.compiled.tangent_kernel import layout_of as tangent_layouts
from mpiad.ensemble.compiled.trace import PackedLeaf, ParameterPacking
from mpiad.ensemble.compiled.work_shares import each
from mpiad.ensemble.jumps import FOUND
from mpiad.ensemble.outcome import FINAL, INITIAL
from mpiad.ensemble.replay import Inputs, Replay
from mpiad.ensemble.run import Run, Seeds
from mpiad.transport.core.tracing import restoring_state


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


# ---- cotangents


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


def pull_compiled(solver: Solver, run: Run, seeds: Seeds, places: Sequence[int], timed: bool) -> Cotangents:
    """Return the cotangents of a run's inputs by a reverse kernel; arguments as for `pull_run`."""
    if run.settings.events and solver.saves_every_step:
        return pull_run(run, seeds, places, timed)  # the saved times aren't known in advance
    if solver.settings.checkpoints is not None and run.outcome.last is None:
        return _pull_parts(solver, run, seeds, places, timed)
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
        tape.visit(function, reverse_layout(spec), real, (*before, s_bar, *after), pause)
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


def _pull_parts(solver: Solver, solve: Run, seeds: Seeds, places: Sequence[int], timed: bool) -> Cotangents:
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


# ---- tangents


class InputTangents(NamedTuple):
    """Tangents of the inputs of a solve in m directions."""

    u0: Array  # shape (m, d, N)
    leaves: dict[int, Array]  # of the leaves of the parameters that have tangents, by their indices
    # Of the start and end of tspan, (m, N), and of the given times of events, (m, times, N); None if all are zero.
    start: Array | None = None
    end: Array | None = None
    due: Array | None = None

    def share(self, rows: slice, varies: Sequence[bool]) -> InputTangents:
        """Return the tangents of some of the trajectories; `varies`: as in `Parameters`."""
        leaves = {place: leaf[..., rows] if varies[place] else leaf for place, leaf in self.leaves.items()}
        times = [None if x is None else x[..., rows] for x in self[2:]]
        return InputTangents(self.u0[..., rows], leaves, *times)


class ResultTangents(NamedTuple):
    """Tangents of the results of a solve, as `replayed` returns the results, in m directions."""

    saved: Array  # shape (m, N, n_saved, d)
    end: Array  # shape (m, N, d)
    reached: Array  # shape (m, N)
    crossed: Array  # shape (m, number of events)


class _KernelTangents(NamedTuple):
    """The results of the kernel, see `TangentArrays`."""

    du_end: Array
    dsaved: Array
    dreached: Array
    dcrossed: Array
    dt_end: Array


def push_compiled(solver: Solver, run: Run, inputs: InputTangents) -> ResultTangents | None:
    """Return the tangents of the results; None if the kernel doesn't support the solve."""
    timed = run.times_move or any(x is not None for x in inputs[2:])
    chosen = differentiated_parts(solver, run, inputs.leaves, timed)
    if chosen is None or (run.jumps is not None and np.iscomplexobj(run.batch.u0)):
        return None
    if solver.settings.checkpoints is not None and run.outcome.last is None:
        return _push_parts(solver, run, inputs)
    return _Push(solver, run, inputs, timed).results(ParameterPacking(tuple(chosen)))


def _push_parts(solver: Solver, solve: Run, inputs: InputTangents) -> ResultTangents | None:
    """Compute tangents for one group of trajectories after the other."""
    crossed = np.zeros((len(inputs.u0), len(solve.event_times.ids)))
    parts: list[ResultTangents] = []
    for rows, of_group, part, run in recorded_groups(solver, solve):
        results = push_compiled(part, run, inputs.share(rows, solve.batch.p.varies))
        if results is None:
            return None
        crossed[:, of_group] = results.crossed
        parts.append(results)
    saved, end, reached, _ = (np.concatenate(tangents, axis=1) for tangents in zip(*parts))
    return ResultTangents(saved, end, reached, crossed)


class _Push:
    """The tangents of a run, in directions that are the first axis of all arrays."""

    def __init__(self, solver: Solver, run: Run, inputs: InputTangents, timed: bool):
        self._solver, self._run, self._leaves, self._timed = solver, run, inputs.leaves, timed
        zeros = np.zeros((len(inputs.u0), run.batch.size if timed else 0))
        start, self._end = (zeros if x is None else x for x in (inputs.start, inputs.end))
        slots = 0 if run.jumps is None else int(run.jumps.slot.max()) + 1
        self._due: Array = np.repeat(zeros[:, None], slots, axis=1) if inputs.due is None else inputs.due
        # The tangents of the states and times of failed trajectories are zero.
        self._u0 = np.where(run.live, inputs.u0, 0.0)
        self._start = np.where(run.live, start, 0.0) if timed else zeros
        if run.jumps is not None and run.jumps.at_start():
            begun = self._traced(lambda replay, u, inputs: replay.begun(u, inputs), run.batch.u0, self._u0, slice(None))
            self._u0, self._start = begun[0], begun[1] if timed else self._start

    def _traced(self, fun: Callable[..., tuple], u: Array, du: Array, ids: Array | slice) -> list[Array]:
        """Return the tangents of the results of a part of the replay; `ids`: the trajectories, with states u."""
        run, timed = self._run, self._timed
        with restoring_state(), Bundle() as bundle:
            leaves = list(run.batch.p.leaves)
            for place, tangent in self._leaves.items():
                leaves[place] = bundle.variable(leaves[place], list(tangent))
            given = Inputs(leaves)
            if timed:
                times = self._start, self._end, self._due
                given = Inputs(leaves, *(bundle.variable(np.zeros_like(x[0]), list(x)) for x in times))
            values = fun(Replay(run, timed), bundle.variable(u, list(du)), given.of(run, ids))
            plain = [(getval(value), bundle.parts(value)[1]) for value in values if value is not None]
        m = len(du)
        return [np.zeros((m, *value.shape), value.dtype) if gs is None else stacked(value, gs) for value, gs in plain]

    def results(self, packing: ParameterPacking) -> ResultTangents:
        """Return the tangents of the results; `packing`: of the parameters that have tangents."""
        run, timed = self._run, self._timed
        kernel = self._swept(packing)
        du_end, saved = (convert(x, run.batch.u0.dtype) for convert, x in zip((from_row_parts, from_parts), kernel))
        ids = run.without_last_step
        if timed and ids.size:
            self._start = kernel.dt_end
            ended = lambda replay, u, inputs: (replay.ended(ids, u, inputs),)  # noqa: E731
            du_end[..., ids] = self._traced(ended, run.outcome.u_end[:, ids], du_end[..., ids], ids)[0]
        for code, states in ((INITIAL, self._u0), (FINAL, du_end)):
            mask = run.save_step == code
            if mask.any():
                saved = np.where(mask[..., None], np.swapaxes(states, 1, 2)[:, :, None], saved)
        at_events = kernel.dt_end if timed and run.jumps is not None else kernel.dreached
        reached = np.where(run.live, np.where(run.terminated, at_events, self._end if timed else 0.0), 0.0)
        return ResultTangents(saved, np.swapaxes(du_end, 1, 2), reached, kernel.dcrossed)

    def _swept(self, packing: ParameterPacking) -> _KernelTangents:
        """Run the kernel over all recorded steps."""
        run, solver, timed = self._run, self._solver, self._timed
        m, count, outcome, real = len(self._u0), run.batch.size, solver.recorded(run.outcome), solver.spec.dtype
        stops = np.zeros(0 if run.outcome.event_table is None else run.outcome.event_table.shape[1])
        stops[run.stop_rows] = 1.0
        events = event_rows(run, np.sort(np.append(run.stop_rows, run.crossing_rows)), run.crossed_row, stops)
        has_events = len(events[1]) > 0
        inside = solver.spec.inside and (run.n_saved > 0 or has_events)
        spec, wanted = solver.derivative_spec(packing.parts, timed, inside, run.jumps is not None, has_events)
        function, layouts = solver.function("tangent", spec, wanted), tangent_layouts(spec)
        split = [packing.split({k: x[j] for k, x in self._leaves.items()}, count, real) for j in range(m)]
        dp, ds = np.stack([varying for varying, _ in split]), np.concatenate([shared for _, shared in split])
        du0, times = argument(row_parts(self._u0), real), (self._start, self._end, self._due)
        crossed = len(run.event_times.ids) if run.settings.events else 0
        zeros = np.zeros((m, count, run.n_saved, spec.d), real), np.zeros((m, count)), np.zeros((m, crossed))
        results = _KernelTangents(du0.copy(), *zeros, np.array(self._start) if timed else np.zeros((m, count)))
        ends = outcome.last, argument(run.outcome.t_reached), run.live, argument(run.save_step, np.dtype(np.int32))
        inputs = solver.p, solver.s, solver.times, *ends, du0, dp, ds, *map(argument, times)
        shared = *inputs, *results, *jump_rows(run, real), *events

        def push_tape(tape: Tape, pause: Callable[[], None]) -> None:
            along = *layouts.direction.buffers(real, m), np.empty_like(tape.previous)
            tape.visit(function, layouts.lane, real, (*along, *shared), pause)

        each(push_tape, outcome.tapes, solver.threads)
        return results


def stacked(x: Array, tangents: Sequence[Array]) -> Array:
    """Return the tangents of x, which may be None for zeros, as one array."""
    return np.stack([np.zeros_like(x) if g is None else np.broadcast_to(g, x.shape) for g in tangents])


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
