"""Derivatives of a solve by CPU kernels: cotangents by the reverse kernel, tangents that the forward one has carried."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.arguments import argument, from_parts, from_row_parts, parts, row_parts
from mpiad.ensemble.adjoint import Cotangents, note_ends, pull_run, to_start
from mpiad.ensemble.compiled.kernel_rows import Tape
from mpiad.ensemble.compiled.kernel_seeds import KernelJumps, KernelStops, kernel_seeds
from mpiad.ensemble.compiled.kernel_solver import Solver
from mpiad.ensemble.compiled.parameter_packing import ParameterPacking
from mpiad.ensemble.compiled.reverse_kernel import fields_of
from mpiad.ensemble.compiled.work_shares import Paced, each
from mpiad.ensemble.linear_jumps import LinearJumps
from mpiad.ensemble.run import INITIAL, NOWHERE, Run
from mpiad.ensemble.seeds import Seeds


def pull_compiled(solver: Solver, run: Run, seeds: Seeds, places: Sequence[int], timed: bool) -> Cotangents:
    """Return the cotangents of a run's inputs, by a reverse kernel; the arguments are those of `pull_run`."""
    if run.settings.events and solver.every:
        return pull_run(run, seeds, places, timed)  # saved times aren't known
    if solver.settings.checkpoints is not None and run.outcome.last is None:
        return _in_parts(solver, run, seeds, places, timed)
    if timed and run.settings.mass is not None and run.jumps is not None and (run.jumps.turn > 0).any():
        return pull_run(run, seeds, places, timed)  # between events at one time the kernel has f, and not u'
    stopped = run.jumps is not None and len(run.stops.ids) > 0
    timed = timed or stopped
    batch, chosen = run.batch, [part for part in solver.traced.packing.parts if part.place in places]
    own = [part for part in chosen if part.varies]
    common = [part for part in chosen if not part.varies]
    count = batch.size
    outcome, real = solver.recorded(run.outcome), solver.form.dtype
    start = kernel_seeds(run, seeds, places, solver.times)
    leaves = {place: np.zeros_like(batch.p.leaves[place]) for place in places}
    found = Cotangents(start.end, np.zeros(count), np.zeros(count), leaves)
    acted, jumping = run.jumps, ()
    if acted is not None:
        note_ends(run, seeds, found, timed)
        jumps, stops = KernelJumps(run, acted, found.start, real), _stops(run, seeds, places, found.start)
        jumping = *jumps.arguments, stops.first, stops.number, stops.rows, stops.bar, stops.moved
    inside = solver.form.inside and (seeds.saved is not None or bool(solver.form.events) or stopped)
    wanted = [j for part in own + common for j in part.scalars]
    function, form = solver.reverse(wanted, timed, inside, acted is not None, stopped)
    saved = np.empty((0, 0, 0)) if start.saved is None else parts(np.ascontiguousarray(start.saved.conj()))
    end_bar = argument(row_parts(start.end.conj()), real)
    # Of a trajectory that takes no step the kernel writes nothing, and its end is its start.
    u0_bar = end_bar.copy()
    given = (
        solver.p,
        solver.s,
        argument(start.times),
        (outcome.last, outcome.naccept, argument(start.stop)),
        (run.live, end_bar, argument(saved, real), argument(start.save_step, np.int32)),
    )
    p_bar = np.zeros((form.wanted_varying, count))
    start_bar, stop_bar = np.zeros(count), np.zeros(count)

    def back(tape: Tape, pause: Callable[[], None]) -> Array:
        s_bar = np.zeros(form.wanted_shared)
        p, s, times, counts, ends = given
        numbers = (np.zeros(form.lanes, np.int64) for _ in range(3))
        state = np.array([tape.first, tape.stop - 1, form.lanes, 0])
        lane, call = (*fields_of(form).room(form.dtype), np.full(form.lanes, -1), *numbers, state), Paced(function, state)
        more = (np.empty(5 * form.lanes, np.int64), *jumping) if jumping else ()
        while True:
            call(
                *lane, p, s, times, tape.rows, tape.before, *counts, *ends, u0_bar, p_bar, s_bar, start_bar, stop_bar, *more
            )
            if state[2] == form.lanes:  # no lane has a trajectory left
                return s_bar
            pause()

    s_bar = np.sum(each(back, outcome.tapes, solver.threads), axis=0)
    initial = from_row_parts(u0_bar, batch.u0.dtype).conj()
    _add_still(run, seeds, initial)
    if timed and run.settings.events:
        _move_ends(run, seeds, start_bar, stop_bar)
        start_bar += start.start
    leaves |= {
        place: leaf.conj() for place, leaf in ParameterPacking(tuple(chosen)).joined(p_bar, s_bar, p_bar.shape[1]).items()
    }
    for place, more in start.leaves.items():
        leaves[place] = leaves[place] + more
    # Where there is no step to go back over, the start is the end.
    still = outcome.naccept == 0
    start_bar[still] += found.start[still]
    found = Cotangents(initial, start_bar, stop_bar + found.end, leaves)
    if acted is not None:
        stops.add_leaves(found.leaves)
        to_start(found, LinearJumps(run, acted.before_steps(), places, timed))
        if timed:
            jumps.add_due(found.due)
    return found


def _stops(run: Run, seeds: Seeds, places: Sequence[int], since: Array) -> KernelStops:
    """Return the conditions that ended steps; `since` are cotangents of the times of the last ones."""
    rows, bar = run.acting_row, np.zeros(len(run.stops.ids))
    acting = rows >= 0
    if seeds.crossed is not None:
        bar[acting] = seeds.crossed[rows[acting]]
    stops = KernelStops(run, tuple(places), bar)
    ids = np.flatnonzero(since)
    last = stops.first[ids + 1] - 1
    mine = last >= stops.first[ids]
    bar[last[mine]] += since[ids[mine]]
    return stops


def _in_parts(solver: Solver, whole: Run, seeds: Seeds, places: Sequence[int], timed: bool) -> Cotangents:
    """Record the steps of some trajectories, go back over them and forget them, before those of the next."""
    batch = solver.batch
    leaves = {place: np.zeros_like(batch.p.leaves[place]) for place in places}
    nothing = np.empty((0, batch.size))
    found = Cotangents(np.empty_like(batch.u0), np.empty(batch.size), np.empty(batch.size), leaves, nothing)
    for rows, part in solver.parts():
        run = Run(whole.batch.share(rows), whole.settings.share(rows), part.record())
        share = seeds.share(rows)
        if seeds.crossed is not None:
            ids = whole.crossed_ids
            share = share._replace(crossed=seeds.crossed[(ids >= rows.start) & (ids < rows.stop)])
        own = pull_compiled(part, run, share, places, timed)
        if len(own.due) > len(found.due):
            found.due = np.concatenate([found.due, np.zeros((len(own.due) - len(found.due), batch.size))])
        if own.due.size:
            found.due[: len(own.due), rows] = own.due
        found.u0[:, rows], found.start[rows], found.end[rows] = own.u0, own.start, own.end
        for place, leaf in own.leaves.items():
            if batch.p.varies[place]:
                leaves[place][..., rows] = leaf
            else:
                leaves[place] += leaf
    return found


def _add_still(run: Run, seeds: Seeds, u0_bar: Array) -> None:
    """Add what is saved of trajectories that take no step."""
    if seeds.saved is not None:
        still = np.flatnonzero(run.live & (run.outcome.naccept == 0))
        chosen = run.save_step[still] == INITIAL
        u0_bar[:, still] += np.where(chosen[..., None], seeds.saved[still], 0).sum(axis=1).T


def _move_ends(run: Run, seeds: Seeds, start_bar: Array, stop_bar: Array) -> None:
    """Take it into account that the last step of what an event ended keeps its size, and else ends when tspan does."""
    ended = run.live & run.terminated
    start_bar[ended] += stop_bar[ended]
    stop_bar[ended] = 0.0
    if seeds.reached is not None:
        stop_bar += np.where(run.live & ~run.terminated, seeds.reached, 0.0)


def carried_tangents(
    solver: Solver, run: Run, by_u0: bool, places: Sequence[int], saving: bool
) -> tuple[Array, Array | None] | None:
    """Return the tangents of final and saved states along the numbers that a run is differentiated by.

    They are of shapes (m, d, N) and, where `saving`, (m, N, n_saved, d); None instead of both, where others were carried.
    The numbers of the initial states, `by_u0`, come first, those of the leaves at `places` follow.
    """
    if run.outcome.carried is None:
        return None
    known = list(solver.directions)
    wanted = [("u", c) for c in range(solver.form.d)] if by_u0 else []
    wanted += [direction for place in places for direction in solver.traced.directions_of(place)]
    if not set(wanted) <= set(known):
        return None
    end, saved = run.outcome.carried
    if wanted != known:
        chosen = [known.index(direction) for direction in wanted]
        end, saved = end[chosen], saved[chosen] if len(saved) else saved
    if not saving:
        return end, None
    return end, saved if solver.form.inside else _at_ends(solver, run, wanted, end)


def _at_ends(solver: Solver, run: Run, directions: list[tuple[str, int]], end: Array) -> Array:
    """Return the tangents of states that were all saved at the start or at the end."""
    final = np.transpose(end, (0, 2, 1))[:, :, None]
    unit = np.array([[float(kind == "u" and place == c) for c in range(solver.form.d)] for kind, place in directions])
    unit = from_parts(unit, run.batch.u0.dtype)
    where = run.save_step[None, :, :, None]
    return np.where(where == NOWHERE, 0.0, np.where(where == INITIAL, unit[:, None, None], final))
