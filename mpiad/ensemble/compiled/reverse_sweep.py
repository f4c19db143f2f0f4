"""Derivatives of a solve by CPU kernels: cotangents from the reverse kernel, and tangents from the forward kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.polynomial.polynomial import polyder, polyval

from mpiad._typing import Array
from mpiad.compiling.arguments import argument, from_parts, from_row_parts, parts, row_parts
from mpiad.ensemble.adjoint import Cotangents, cotangents_at_ends, pull_run, to_start
from mpiad.ensemble.batch import two_at_least
from mpiad.ensemble.coefficients import interpolate
from mpiad.ensemble.compiled.kernel_solver import Solver, Tape
from mpiad.ensemble.compiled.kernel_spec import H, T, U
from mpiad.ensemble.compiled.reverse_kernel import fields_of
from mpiad.ensemble.compiled.trace import ParameterPacking
from mpiad.ensemble.compiled.work_shares import Paced, each
from mpiad.ensemble.jumps import FOUND, Jumps
from mpiad.ensemble.linearization import pulled, with_leaves
from mpiad.ensemble.outcome import INITIAL, NOWHERE
from mpiad.ensemble.replay import event_at
from mpiad.ensemble.run import Run, Seeds

# By the implicit function theorem (`event_at`), the cotangent of an event's time gives cotangents of the state at the
# event and of the parameters. This state lies inside a step, so the kernel treats an event like a saved time.


class KernelSeeds(NamedTuple):
    """The cotangents with which a reverse kernel starts."""

    end: Array  # shape (d, N); of the states at the end of the last steps
    saved: Array | None  # shape (N, n_saved, d); of saved states
    save_step: Array  # int, shape (N, n_saved); the step of each saved state, or INITIAL; FINAL and NOWHERE come last
    times: Array  # shape (1, n_saved) or (N, n_saved)
    stop: Array  # shape (N,); end time of the last step, or of the full step if a terminal event cut it short
    start: Array | float = 0.0  # shape (N,), or a number; cotangents of the start of tspan from terminal events


def kernel_seeds(run: Run, seeds: Seeds, found: Cotangents, times: Array) -> KernelSeeds:
    """Return the kernel's seeds, also those of states at events; add the leaves' cotangents from events to `found`."""
    save_step = np.empty((run.batch.size, 0), np.int32) if seeds.saved is None else run.save_step.astype(np.int32)
    plain = KernelSeeds(found.u0, seeds.saved, save_step, times, run.outcome.t_reached)
    if run.outcome.crossings is None:
        return plain
    table = run.outcome.crossings[run.live[run.outcome.crossings[:, 0].astype(int)]]
    ids, event = table[:, 0].astype(int), table[:, 1].astype(int)
    terminal = np.array([event.stops for event in run.settings.events])[event]
    end, value = plain.end.copy(), np.zeros((len(table), len(plain.end)), plain.end.dtype)
    reached = np.zeros(run.batch.size) if seeds.reached is None else seeds.reached
    stop, start = plain.stop.copy(), np.zeros(run.batch.size)
    times_bar = np.zeros(len(table))
    times_bar[~terminal] = 0.0 if seeds.crossed is None else seeds.crossed[: len(run.crossings.ids)]
    if run.jumps is not None:  # `KernelStops` handles the events that ended steps
        terminal[:] = False
    stop[ids[terminal]] = (table[:, T] + table[:, H])[terminal]
    # If two terminal events coincide, only one of them has ended the trajectory.
    ending = np.flatnonzero(terminal & (event == run.ending_events[ids]))
    nonterminal = np.flatnonzero(times_bar)
    with np.errstate(all="ignore"):
        for number in np.unique(event[ending]):
            rows = ending[event[ending] == number]
            value[rows], start[ids[rows]] = _pulled(run, table[rows], found.leaves, end[:, ids[rows]], reached[ids[rows]])
        for number in np.unique(event[nonterminal]):
            rows = nonterminal[event[nonterminal] == number]
            value[rows], _ = _pulled(run, table[rows], found.leaves, None, times_bar[rows])
    end[:, ids[ending]] = 0
    chosen = np.concatenate([ending, nonterminal])
    return _merged(plain._replace(end=end, stop=stop, start=start), table[chosen], value[chosen])


def _pulled(run: Run, rows: Array, leaves: dict[int, Array], end: Array | None, time: Array) -> tuple[Array, Array]:
    """Return the cotangents of states at one event, shape (m, d), and of the start of tspan, (m,); update `leaves`."""
    # The kernel considers the times of states inside steps constant. `end`, shape (d, m), is None for nonterminal events.
    found = _pull_event(run, int(rows[0, 1]), rows, tuple(leaves), end, time)
    add_leaves(run, leaves, found.leaves, rows[:, 0].astype(int))
    by_fraction = (found.u * found.rate).real.sum(axis=0)
    at_end = rows[:, T] + rows[:, H] == rows[:, 4]  # for the kernel, this isn't inside the step
    return found.u.T, found.t + np.where(at_end, 0.0, by_fraction)


class _EventCotangents(NamedTuple):
    """Cotangents at one event in n steps."""

    u: Array  # shape (d, n); of the interpolated states, with the fractions of the steps held constant
    t: Array  # shape (n,); of the times before the steps
    leaves: dict[int, Array]  # by index
    rate: Array  # shape (d, n); the time derivatives of the interpolated states


def _pull_event(
    run: Run, event: int, rows: Array, places: Sequence[int], end: Array | None, time: Array
) -> _EventCotangents:
    """Return cotangents given those of states and times at an event; `rows`: of the table of events."""
    count, p, dtype = len(rows), run.batch.p, run.batch.u0.dtype
    rows = rows[two_at_least(count)]
    ids, t, h, x = rows[:, 0].astype(int), rows[:, T], rows[:, H], rows[:, 3]
    before: Array = np.ascontiguousarray(from_parts(rows[:, U:], dtype).T, dtype)
    k, _ = run.stages_of(ids, before, t, h)
    rates = [polyval(x, polyder([0.0, *row])) for row in run.tableau.dense.tolist()]  # of the weights of the stages
    rate: Array = sum(r * stage for r, stage in zip(rates, k))
    leaves = p.taken(ids)

    def results(variables: list[Any]) -> Iterator[tuple[Array, Array]]:
        (u, t), given = variables[:2], p.build(with_leaves(leaves, places, variables[2:]))
        condition = run.settings.events[event].condition
        state, when = event_at(condition, lambda now: u + (now - x) * h * rate, given, t, h, x, exact=False)
        yield when[:count], time
        if end is not None:
            yield state[:, :count], end

    u = interpolate(run.coefficients, before, h, k, x)
    by_u, by_t, *parts = pulled(results, [u, t, *[leaves[place] for place in places]])
    by_u = np.zeros_like(u) if by_u is None else by_u
    found = {k: x[..., :count] if p.varies[k] and x is not None else x for k, x in zip(places, parts)}
    return _EventCotangents(by_u[:, :count], by_t[:count], found, rate[:, :count])


class KernelJumps:
    """The events that acted, for the reverse kernel; `time_bar`, (N,), of jumps that no step follows is used and zeroed."""

    def __init__(self, run: Run, jumps: Jumps, time_bar: Array, dtype: np.dtype):
        self._jumps, self._due, integer = jumps, np.zeros(len(jumps.ids)), np.dtype(np.int64)
        first = np.searchsorted(jumps.ids, np.arange(run.batch.size + 1))
        ids = np.flatnonzero(time_bar)
        last = first[ids + 1] - 1
        jumped = last >= first[ids]
        number = jumps.number[last[jumped]]
        # `to_start` handles the jumps before the first step.
        jumped[jumped] = (jumps.slot[last[jumped]] != FOUND) & (number == run.counts[ids[jumped]]) & (number > 0)
        self._due[last[jumped]] = time_bar[ids[jumped]]
        time_bar[ids[jumped]] = 0.0
        number, event, time = argument(jumps.number, integer), argument(jumps.event, integer), argument(jumps.time)
        # The kernel's arguments; it updates the last one, the cotangents of the events' times.
        self.arguments = first, number, event, time, argument(np.ascontiguousarray(jumps.before.T), dtype), self._due

    def add_due(self, due: Array) -> None:
        """Add the cotangents of given times to an array of shape (slots, N)."""
        jumps = self._jumps
        given = jumps.slot != FOUND
        due[jumps.slot[given], jumps.ids[given]] += self._due[given]


class KernelStops:
    """The linearized conditions whose roots ended steps, for the reverse kernel.

    Let λ be the cotangent of the state at a root, σ that of the root's time τ, and U' the time derivative of the
    interpolated state. The derivatives of τ, times σ + λ·U', are added to the cotangents of the interpolated state, the
    time before the step, and the parameters.
    `bar`, shape (m,): cotangents of the root times, without contributions of later steps. `rows`, shape (m, 3 + 2 d): the
    fraction of the step, 1, 1 - ∂τ/∂t, U', -∂τ/∂u. `factors`, shape (m,): -(σ + λ·U'), from the kernel. `time_bar`,
    shape (N,): the cotangents of the last root times.
    """

    def __init__(self, run: Run, seeds: Seeds, places: Sequence[int], time_bar: Array):
        self._run, self._places, stops = run, tuple(places), run.stops
        count, d = len(stops.ids), len(run.batch.u0)
        self.rows, self.factors, self.bar = np.zeros((count, 3 + 2 * d)), np.zeros(count), np.zeros(count)
        acting = run.acting_row >= 0
        if seeds.crossed is not None:
            self.bar[acting] = seeds.crossed[run.acting_row[acting]]
        self.first = np.searchsorted(stops.ids, np.arange(run.batch.size + 1))
        ids = np.flatnonzero(time_bar)
        last = self.first[ids + 1] - 1
        stopped = last >= self.first[ids]
        self.bar[last[stopped]] += time_bar[ids[stopped]]
        self.number = stops.number.astype(np.int64)
        for own, found in self._pulled((), np.ones(count)):
            self.rows[own] = np.stack([stops.x[own], found.t**0, 1 - found.t, *found.rate, *-found.u], axis=1)

    def _pulled(self, places: Sequence[int], time: Array) -> Iterator[tuple[Array, _EventCotangents]]:
        """Yield for each event its indices, and the cotangents for cotangents `time` of the roots' times."""
        run = self._run
        for event in np.flatnonzero(np.bincount(run.stops.event)).tolist():
            own = np.flatnonzero(run.stops.event == event)
            with np.errstate(all="ignore"):
                found = _pull_event(run, event, run.outcome.crossings[run.stop_rows[own]], places, None, time[own])
            yield own, found

    def add_leaves(self, leaves: dict[int, Array]) -> None:
        """Add the contributions to the cotangents of the leaves, after the kernel has computed the factors."""
        for own, found in self._pulled(self._places, -self.factors):
            add_leaves(self._run, leaves, found.leaves, self._run.stops.ids[own])


def add_leaves(run: Run, leaves: dict[int, Array], parts: dict[int, Any], ids: Array) -> None:
    """Add the contributions `parts` of the trajectories `ids`, in ascending order, to the cotangents of leaves."""
    p, first = run.batch.p, np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
    # An event may occur more than once in a trajectory.
    sums = {k: np.add.reduceat(x, first, axis=-1) if p.varies[k] and x is not None else x for k, x in parts.items()}
    p.add_cotangents(leaves, sums, ids[first])


def _merged(plain: KernelSeeds, rows: Array, value: Array) -> KernelSeeds:
    """Insert the cotangents of states at events among the cotangents of saved states, in the order of steps."""
    ids, (count, width) = rows[:, 0].astype(int), plain.save_step.shape
    order = np.argsort(ids, kind="stable")
    ids, rows, value = ids[order], rows[order], value[order]
    column = width + np.arange(len(ids)) - np.searchsorted(ids, ids)
    total = int(column.max(initial=width - 1)) + 1
    saved = np.zeros((count, total, len(plain.end)), plain.end.dtype)
    save_step = np.full((count, total), NOWHERE, np.int32)
    times = np.zeros((count, total))
    save_step[:, :width] = plain.save_step
    if plain.saved is not None:
        saved[:, :width], times[:, :width] = plain.saved, plain.times
    saved[ids, column], save_step[ids, column], times[ids, column] = value, rows[:, 2], rows[:, 4]
    order = np.argsort(np.where(save_step < INITIAL, np.iinfo(np.int32).max, save_step), axis=1, kind="stable")
    return plain._replace(
        saved=np.take_along_axis(saved, order[..., None], axis=1),
        save_step=np.take_along_axis(save_step, order, axis=1), times=np.take_along_axis(times, order, axis=1),
    )  # fmt: skip


def pull_compiled(solver: Solver, run: Run, seeds: Seeds, places: Sequence[int], timed: bool) -> Cotangents:
    """Return the cotangents of a run's inputs by a reverse kernel; arguments as for `pull_run`."""
    if run.settings.events and solver.saves_every_step:
        return pull_run(run, seeds, places, timed)  # the saved times aren't known in advance
    if solver.settings.checkpoints is not None and run.outcome.last is None:
        return _in_parts(solver, run, seeds, places, timed)
    if timed and run.settings.mass is not None and run.jumps is not None and (run.jumps.turn > 0).any():
        return pull_run(run, seeds, places, timed)  # the kernel would need u' between events at the same time
    stopped = run.jumps is not None and len(run.stops.ids) > 0
    timed = timed or stopped
    batch, chosen = run.batch, [part for part in solver.traced.packing.parts if part.place in places]
    count = batch.size
    outcome, real = solver.recorded(run.outcome), solver.spec.dtype
    found = cotangents_at_ends(run, seeds, places, timed)
    prepared = kernel_seeds(run, seeds, found, solver.times)
    jump_arguments = ()
    if run.jumps is not None:
        jumps, stops = KernelJumps(run, run.jumps, found.start, real), KernelStops(run, seeds, places, found.start)
        jump_arguments = *jumps.arguments, stops.first, stops.number, stops.rows, stops.bar, stops.factors
    inside = solver.spec.inside and (seeds.saved is not None or bool(solver.spec.events) or stopped)
    wanted = [j for part in chosen for j in part.scalars]
    function, spec = solver.reverse(wanted, timed, inside, run.jumps is not None, stopped)
    saved = np.empty((0, 0, 0)) if prepared.saved is None else parts(np.ascontiguousarray(prepared.saved.conj()))
    end_bar = argument(row_parts(prepared.end.conj()), real)
    # The kernel writes nothing for trajectories without steps, whose final state is the initial state.
    u0_bar, p_bar = end_bar.copy(), np.zeros((spec.wanted_varying, count))
    inputs = solver.p, solver.s, argument(prepared.times)
    ends = outcome.last, outcome.naccept, argument(prepared.stop), run.live, end_bar
    bars = argument(saved, real), argument(prepared.save_step, np.int32), u0_bar, p_bar
    start_bar, stop_bar = np.zeros(count), np.zeros(count)

    def pull_tape(tape: Tape, pause: Callable[[], None]) -> Array:
        s_bar = np.zeros(spec.wanted_shared)
        zeros = (np.zeros(spec.lanes, np.int64) for _ in range(3))
        state = np.array([tape.first, tape.stop - 1, spec.lanes, 0])
        lane = *fields_of(spec).buffers(spec.dtype), np.full(spec.lanes, -1), *zeros, state
        more = (np.empty(5 * spec.lanes, np.int64), *jump_arguments) if jump_arguments else ()
        call = Paced(function, state)
        while True:
            call(*lane, *inputs, tape.rows, tape.previous, *ends, *bars, s_bar, start_bar, stop_bar, *more)
            if state[2] == spec.lanes:  # all lanes have finished
                return s_bar
            pause()

    s_bar = np.sum(each(pull_tape, outcome.tapes, solver.threads), axis=0)
    initial = from_row_parts(u0_bar, batch.u0.dtype).conj()
    if seeds.saved is not None:
        # The saved states of trajectories without steps are initial states.
        unstepped = np.flatnonzero(run.live & (run.outcome.naccept == 0))
        at_start = run.save_step[unstepped] == INITIAL
        initial[:, unstepped] += np.where(at_start[..., None], seeds.saved[unstepped], 0).sum(axis=1).T
    if timed and run.settings.events:
        # If an event ended the last step, the size of this step doesn't depend on tspan.
        ended = run.live & run.terminated
        start_bar[ended] += stop_bar[ended]
        stop_bar[ended] = 0.0
        if seeds.reached is not None:
            stop_bar += np.where(run.live & ~run.terminated, seeds.reached, 0.0)
        start_bar += prepared.start
    joined = ParameterPacking(tuple(chosen)).joined(p_bar, s_bar, count)
    batch.p.add_cotangents(found.leaves, {place: leaf.conj() for place, leaf in joined.items()}, slice(None))
    unstepped = outcome.naccept == 0
    start_bar[unstepped] += found.start[unstepped]
    found = dataclasses.replace(found, u0=initial, start=start_bar, end=stop_bar + found.end)
    if run.jumps is not None:
        stops.add_leaves(found.leaves)
        to_start(run, found, timed)
        if timed:
            jumps.add_due(found.due)
    return found


def _in_parts(solver: Solver, whole: Run, seeds: Seeds, places: Sequence[int], timed: bool) -> Cotangents:
    """Compute cotangents for one group of trajectories after the other, to limit the memory of recorded steps."""
    batch = solver.batch
    leaves = {place: np.zeros_like(batch.p.leaves[place]) for place in places}
    due = np.empty((0, batch.size))
    found = Cotangents(np.empty_like(batch.u0), np.empty(batch.size), np.empty(batch.size), leaves, due)
    for rows, part in solver.parts():
        run = Run(whole.batch.share(rows), whole.settings.share(rows), part.record())
        share = seeds.share(rows)
        if seeds.crossed is not None:
            ids = whole.event_times.ids
            share = share._replace(crossed=seeds.crossed[(ids >= rows.start) & (ids < rows.stop)])
        bars = pull_compiled(part, run, share, places, timed)
        if len(bars.due) > len(found.due):
            found.due = np.concatenate([found.due, np.zeros((len(bars.due) - len(found.due), batch.size))])
        if bars.due.size:
            found.due[: len(bars.due), rows] = bars.due
        found.u0[:, rows], found.start[rows], found.end[rows] = bars.u0, bars.start, bars.end
        batch.p.add_cotangents(leaves, bars.leaves, rows)
    return found


def carried_tangents(solver: Solver, run: Run, by_u0: bool, places: Sequence[int]) -> tuple[Array, Array] | None:
    """Return the kernel's tangents of final, (m, d, N), and saved states, (m, N, n_saved, d); None if some are missing."""
    # The m directions are the components of initial states, if `by_u0`, and the entries of the leaves at `places`.
    if run.outcome.carried is None:
        return None
    carried = list(solver.directions)
    wanted = [("u", c) for c in range(solver.spec.d)] if by_u0 else []
    wanted += [direction for place in places for direction in solver.traced.directions_of(place)]
    if not set(wanted) <= set(carried):
        return None
    end, saved = run.outcome.carried
    if wanted != carried:
        chosen = [carried.index(direction) for direction in wanted]
        end, saved = end[chosen], saved[chosen]
    return end, saved
