"""Tangents of a solve by the tangent kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.compiling.arguments import argument, from_parts, from_row_parts, row_parts
from mpiad.differentiation.forward import Bundle
from mpiad.ensemble.compiled.kernel_solver import Solver, Tape
from mpiad.ensemble.compiled.reverse_sweep import differentiated_parts, event_rows, jump_rows, recorded_groups
from mpiad.ensemble.compiled.tangent_kernel import layout_of
from mpiad.ensemble.compiled.trace import ParameterPacking
from mpiad.ensemble.compiled.work_shares import each
from mpiad.ensemble.outcome import FINAL, INITIAL
from mpiad.ensemble.replay import Inputs, Replay
from mpiad.ensemble.run import Run
from mpiad.transport.core.tracing import restoring_state


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
        return _in_parts(solver, run, inputs)
    return _Push(solver, run, inputs, timed).results(ParameterPacking(tuple(chosen)))


def _in_parts(solver: Solver, solve: Run, inputs: InputTangents) -> ResultTangents | None:
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
        return [np.zeros((m, *value.shape), value.dtype) if gs is None else _stacked(gs, value) for value, gs in plain]

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
        function, layouts = solver.function("tangent", spec, wanted), layout_of(spec)
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


def _stacked(tangents: Sequence[Array], like: Array) -> Array:
    return np.stack([np.zeros_like(like) if g is None else np.broadcast_to(g, like.shape) for g in tangents])
