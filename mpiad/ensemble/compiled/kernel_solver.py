"""The solution of a batch by CPU kernels: calls of the forward kernel, results, and the record of steps for derivatives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array
from mpiad.compiling.arguments import argument, from_parts, from_row_parts, is_complex, parts, row_parts
from mpiad.compiling.cache import kernels_of
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.compiled.event_kernel import stops
from mpiad.ensemble.compiled.forward_kernel import layout_of
from mpiad.ensemble.compiled.kernel_fields import Layout
from mpiad.ensemble.compiled.kernel_spec import EVENT_COLUMNS, MOST_SCALARS, KernelSpec, kernel_spec_of
from mpiad.ensemble.compiled.kernel_texts import KernelCode, kernel_code
from mpiad.ensemble.compiled.trace import PackedLeaf, ParameterPacking
from mpiad.ensemble.compiled.traced_problem import TracedProblem
from mpiad.ensemble.compiled.work_shares import Paced, each, shares_of
from mpiad.ensemble.events import in_order
from mpiad.ensemble.jumps import FOUND, Jump
from mpiad.ensemble.outcome import Outcome, complete
from mpiad.ensemble.record import Steps
from mpiad.ensemble.settings import Acting, Settings

# The numbers of directions for which the forward kernel is compiled with tangents that are arguments, and the maximum
# number of numbers of all tangents. Others are computed from the record.
_WIDTHS, _MOST_NUMBERS = (1, 4), 64
# The position of the first leaf of the parameters among the inputs, see `Batch.tangents`.
FIRST_LEAF = 3
# Initial capacity of the record, in steps per trajectory.
_STEPS = 48
# Initial number of rows for events, in addition to those of one turn.
_EVENT_ROWS = 1024
# Number of trajectories that a thread takes at a time from the shared counter. It is small, since threads wait for the last
# block, but large enough that they seldom write to the same cache lines.
_BLOCK = 64
# Maximum number of differentiated parameters in a reverse kernel if f reads tables. For an entry of a table, the kernel
# has a few operations per evaluation of f; the adjoint by arrays adds only to the two entries that were read.
_MOST_ENTRIES = 64


class Solver:
    """A batch of plain arrays, and its kernels, whose codes are stored in `kernels`, by name."""

    def __init__(
        self, kernels: dict[str, KernelCode], traced: TracedProblem, batch: Batch, settings: Settings, threads: int
    ):
        # Kernel texts don't depend on the numbers in f.
        self._kernels, self._problem, self.traced = kernels, traced, traced.origin or traced
        self.batch, self.settings, self.threads = batch, settings, threads
        self.saves_every_step = settings.saveat is None
        self.times = argument(np.atleast_2d(np.empty(0) if settings.saveat is None else settings.saveat))
        self.spec = kernel_spec_of(traced, batch, settings)
        self.p, shared = traced.packing.split(batch.p.leaves, batch.size, self.spec.dtype)
        self.s = argument(np.append(shared, traced.numbers), self.spec.dtype) if traced.numbers else shared
        self.directions: tuple[tuple[str, int], ...] = ()  # in which the forward kernel propagates unit tangents
        # The tangents of the inputs in which it propagates others, as `Batch.tangents`, and their parameters.
        self.seeds: dict[int, Array] = {}
        self._seed_parts: tuple[PackedLeaf, ...] = ()
        self._wanted: tuple[int, ...] = ()
        self._recorded: Outcome | None = None

    def _spec_for(self, inputs: Batch) -> KernelSpec:
        """Return the spec of the forward kernel, which propagates tangents of the traced parts of `given` or records."""
        # If steps begin at roots of conditions, their times depend on all inputs.
        spec, acting = self.spec, self.settings.acting
        times_vary = isbox(inputs.start) or isbox(inputs.end) or (spec.limited and stops(spec))
        times_vary = times_vary or (acting is not None and (acting.varies or spec.in_pairs))
        if inputs.traced and not (self.saves_every_step or times_vary):
            if inputs.forward and self.settings.gradient != "adjoint":
                spec = self._with_seeds(inputs)
            elif not spec.tableau.implicit and not spec.events:
                self.directions = self.traced.carried(inputs, self.settings.gradient)  # otherwise an adjoint
                spec = spec._replace(directions=self.directions)
        # One kernel of large states, which takes long to compile, solves with and without a record.
        return spec._replace(record=(self.settings.record or spec.rolled) and not spec.directions)

    def _with_seeds(self, inputs: Batch) -> KernelSpec:
        """Return the spec of the forward kernel with the tangents of the inputs, if they are few."""
        seeds = inputs.tangents() or {}
        count = max(map(len, seeds.values()), default=0)
        width = next((width for width in _WIDTHS if 0 < count <= width), 0)
        seed_parts = tuple(part for part in self.traced.packing.parts if part.place + FIRST_LEAF in seeds)
        number = sum(len(part.scalars) for part in seed_parts)
        if not width or width * self.spec.d > _MOST_NUMBERS or number > MOST_SCALARS:
            return self.spec
        self.seeds, self._seed_parts = seeds, seed_parts
        spec, self._wanted = self.derivative_spec(seed_parts, False, self.spec.inside, False, False)
        sizes = {"wanted_varying": spec.wanted_varying, "wanted_shared": spec.wanted_shared}
        return self.spec._replace(directions=tuple(("seed", j) for j in range(width)), **sizes)

    def with_seeds(self, spec: KernelSpec) -> tuple[Array, Array, Array]:
        """Return the tangents of initial states, (m, d, N), and the parameters p and s, followed by their tangents."""
        count, m = self.batch.size, len(spec.directions)
        if not self.seeds or not m:
            return np.empty((m, spec.d, count), spec.dtype), self.p, self.s
        du = np.zeros((m, spec.d, count), spec.dtype)
        if 0 in self.seeds:
            du[: len(self.seeds[0])] = row_parts(self.seeds[0])
        packing, rows = ParameterPacking(self._seed_parts), []
        for j in range(m):
            leaves = {k - FIRST_LEAF: x[j] if j < len(x) else np.zeros_like(x[0]) for k, x in self.seeds.items()}
            rows.append(packing.split(leaves, count, spec.dtype))
        dp, ds = zip(*rows)
        return du, np.concatenate([self.p, *dp]), np.concatenate([self.s, *ds])

    def forward_code(self, inputs: Batch) -> KernelCode:
        """Return the forward kernel."""
        spec = self._spec_for(inputs)
        return kernel_code("forward", self.traced, spec, self._wanted)  # as in `function`: one code in its cache

    def codes(self, inputs: Batch) -> list[KernelCode]:
        """Return the kernels of a solve and, as far as it is known before the solve, of its gradient."""
        codes = [self.forward_code(inputs)]
        if inputs.traced and not self.directions and not self.seeds:
            wanted = self.differentiated_parts([place for place, leaf in enumerate(inputs.p.leaves) if isbox(leaf)])
            if wanted is None:
                return codes  # the adjoint will be computed by arrays
            timed, acts = isbox(inputs.start) or isbox(inputs.end), self.settings.acting is not None
            spec, places = self.derivative_spec(wanted, timed, self.spec.inside, acts, bool(self.spec.events))
            codes.append(kernel_code("tangent" if inputs.forward else "reverse", self.traced, spec, places))
        return codes

    def solved(self, inputs: Batch) -> Outcome:
        """Solve, and record the data for derivatives with respect to the traced parts of `given`."""
        # With checkpoints, the backward pass solves groups of trajectories again, and records their steps.
        outcome = self._run(self._spec_for(inputs), self.settings.record and self.settings.checkpoints is None)
        if self.settings.record:
            outcome.solver = self
        return outcome

    def _run(self, spec: KernelSpec, record: bool) -> Outcome:
        """Run the forward kernel over all trajectories; `record`: whether all steps are recorded, if `spec` allows it."""
        record = record and spec.record
        batch, settings = self.batch, self.settings
        outcome = Outcome.empty(batch, settings)
        outcome.u_end = np.array(batch.u0.T, order="C").T  # the components of a trajectory are contiguous in memory
        if outcome.saved is None:
            outcome.saved = np.empty((batch.size, 0, len(batch.u0)), batch.u0.dtype)
        if settings.progress is not None and (without_steps := np.count_nonzero(batch.start == batch.end)):
            settings.progress(int(without_steps))
        run = _Launch(self.function("forward", spec, self._wanted if spec.directions else ()), spec, self, outcome, record)
        tapes = run.run_all()
        if record:
            outcome.tapes, outcome.last = tapes, run.last
        at_conditions = np.empty((0, 0))
        if spec.events:
            rows = np.concatenate(run.crossings)
            rows = rows[in_order(rows.T)]
            outcome.event_table = rows[:, :EVENT_COLUMNS].T
            at_conditions = rows[:, EVENT_COLUMNS:]  # the states at events, if recorded
            outcome.event_tangents = at_conditions.T if spec.directions else None
        if settings.acting is not None:
            if record:
                outcome.jumps = jumps_of(outcome, settings.acting, *run.at_given_times, at_conditions, batch.u0.dtype)
            complete(outcome, settings.acting)
        if spec.directions:
            outcome.carried = run.carried(batch.start == batch.end)
        return outcome

    def function(self, name: str, spec: KernelSpec, wanted: tuple[int, ...] = ()) -> Callable[..., None]:
        """Return a kernel; `wanted`: the parameters in the order of a reverse kernel's arguments."""
        code = self._kernels[name] = kernel_code(name, self.traced, spec, wanted)
        return kernels_of([code.source], call="solve")[0].function

    # ---- derivatives

    def differentiated_parts(self, places: Collection[int]) -> list[PackedLeaf] | None:
        """Return the leaves with these indices; None if f reads tables, and the leaves have too many entries."""
        parts = [part for part in self.traced.packing.parts if part.place in places]
        return None if self.spec.tables and sum(len(part.scalars) for part in parts) > _MOST_ENTRIES else parts

    def recorded(self, outcome: Outcome) -> Outcome:
        """Return an outcome with a record of all steps: `outcome` if it has a record, or the outcome of another solve."""
        # The given outcome isn't stored, since a reference cycle would delay the release of its memory.
        if outcome.last is not None:
            return outcome
        if self._recorded is None:
            self._recorded = self.record()
        return self._recorded

    def record(self) -> Outcome:
        """Solve again, and record all steps."""
        return self._run(self.spec._replace(record=True), True)

    def parts(self) -> Iterator[tuple[slice, Solver]]:
        """Divide the trajectories into `checkpoints` groups, and yield the slice and the solver of each group."""
        count = self.batch.size
        # Each group has at least as many trajectories as a kernel has lanes.
        parts = max(1, min(self.settings.checkpoints or 1, count // self.spec.lanes))
        for first, stop in pairwise(count * i // parts for i in range(parts + 1)):
            rows = slice(first, stop)
            batch, settings = self.batch.share(rows), self.settings.share(rows)
            part = Solver(self._kernels, self._problem, batch, settings, self.threads)
            part.spec = self.spec
            yield rows, part

    def derivative_spec(
        self, wanted: Sequence[PackedLeaf], timed: bool, inside: bool, jumps: bool, events: bool
    ) -> tuple[KernelSpec, tuple[int, ...]]:
        """Return the spec of a reverse or a tangent kernel, and its parameters in the order of the kernel's arguments."""
        varying, shared = (
            [j for part in wanted if part.varies == varies for j in part.scalars] for varies in (True, False)
        )
        acts = [e for e, affect in enumerate(self.traced.affects) if affect is not None]
        spec = self.spec._replace(
            wanted_varying=len(varying),
            wanted_shared=len(shared),
            timed=timed,
            inside=inside,
            tolerances=False,
            relative=False,
            affects=None,
            acting=(),
            jumps=tuple(acts) if jumps else None,
            events=self.spec.events if events else (),
        )
        return spec, (*varying, *shared)


class _Launch:
    def __init__(self, function: Callable[..., None], spec: KernelSpec, solver: Solver, outcome: Outcome, record: bool):
        self._function, self._spec, self._solver, self._outcome, self._record = function, spec, solver, outcome, record
        batch, settings = solver.batch, solver.settings
        d, count = spec.d, batch.size
        m, n_saved = len(spec.directions), solver.times.shape[1]
        self.crossings: list[Array] = []
        # The counter that threads share: the number of trajectories that have been started, the total, and the block size.
        self.counter = np.array([0, 0, _BLOCK])
        self.last = np.full(count if record else 0, -1)  # row of the last step, or -1
        real = spec.dtype
        self._du, p, s = solver.with_seeds(spec)
        self._first = self._du.copy() if solver.seeds else None
        self._dsaved = np.zeros((m, count, n_saved, d), real)
        save_step = np.empty((0, n_saved), np.int32) if outcome.save_step is None else outcome.save_step
        self._event_arrays = [np.empty((0, 0)), *(np.empty(shape, np.int64) for shape in ((0, 0), 0, 0, (0, 0)))]
        self._event_arrays.append(np.empty((0, 0, 0), real))
        if settings.acting is not None:
            times, kinds = (x[:, :1] if x.strides[1] == 0 else x for x in settings.acting[1:3])
            slots = len(times) - 1 if spec.record else 0
            # For given times of events: the numbers of steps before them, and the states before the events act.
            self.at_given_times = np.full((count, slots), -1), np.empty((count, slots, d), real)
            self._event_arrays[:4] = argument(times), argument(kinds, np.dtype(np.int64)), outcome.slots, outcome.resumed
            self._event_arrays[4:] = self.at_given_times
        atol = np.concatenate([settings.atol, settings.rtol][: 1 + spec.relative], axis=None, dtype=real)
        # Initial states and tspan are passed as one column if all trajectories share them.
        u0 = batch.u0[:, :1] if batch.u0.strides[1] == 0 else batch.u0
        start, end = (x[:1] if batch.one_span else x for x in (batch.start, batch.end))
        inputs = (argument(row_parts(u0), real), p, s, argument(start), argument(end))
        dt = -1.0 if settings.dt is None else float(settings.dt)
        rtol = settings.rtol if type(settings.rtol) is float else float(np.max(settings.rtol))
        options = (rtol, atol, dt, float(settings.dtmax), float(settings.max_steps))
        self._inputs = (*inputs, solver.times, *options)
        ends = parts(outcome.u_end.T), outcome.t_reached, outcome.codes, outcome.naccept, outcome.nreject
        self._outputs = *ends, parts(outcome.saved), save_step, self._du, self._dsaved, self.last

    def run_all(self) -> list[Tape]:
        """Solve all trajectories, and return their recorded steps."""
        count, threads = self._solver.batch.size, self._solver.threads
        if self._record or self._solver.settings.progress is not None:
            # With shares, each record is small, and the progress bar is updated often.
            return each(self._share, shares_of(count, threads), threads)
        if threads == 1:
            return each(self._share, [(0, count)], 1)
        threads = max(1, min(threads, count // _BLOCK))
        self.counter[:2] = 0, count
        return each(self._share, [(0, 0)] * threads, threads)

    def _share(self, bounds: tuple[int, int], pause: Callable[[], None]) -> Tape:
        """Solve a share's trajectories, or those of the shared counter if `bounds` are empty; return the recorded steps."""
        (first, stop), spec = bounds, self._spec
        batch, progress = self._solver.batch, self._solver.settings.progress
        lanes, size = spec.lanes, (stop - first) * _STEPS if self._record else 0
        rows, previous = np.empty((size, spec.d + 2)), np.empty(size, np.int64)
        state, most_events = np.array([first, lanes, 0, 0, stop, 0]), lanes * len(spec.events) * (spec.points + 1)
        columns = EVENT_COLUMNS + (spec.d if spec.record and spec.acting else len(spec.directions))
        crossings = np.empty((_EVENT_ROWS + most_events, columns))
        layout = layout_of(spec)
        lane = *layout.buffers(spec.dtype), *layout.integers(), state, self.counter
        call, reported = Paced(self._function, state), 0
        while True:
            call(*lane, *self._inputs, *self._outputs, rows, previous, *self._event_arrays, crossings)
            next_id, vacant_lanes, row, event_count, end, _ = state
            if progress is not None:
                started = np.count_nonzero(batch.start[first:next_id] != batch.end[first:next_id])
                ended = int(started) - (lanes - vacant_lanes)
                progress(ended - reported)
                reported = ended
            if vacant_lanes == lanes and next_id == end:
                break
            pause()
            # Enlarge arrays that may be too small for the events or the steps of another turn.
            if event_count + most_events > len(crossings):
                crossings = _enlarged(crossings, most_events)
            elif self._record and row + lanes > len(rows):
                rows, previous = _enlarged(rows, 1024), _enlarged(previous, 1024)
        self.crossings.append(crossings[:event_count])
        return Tape(first, stop, rows[:row], previous[:row])

    def carried(self, empty_span: Array) -> tuple[Array, Array]:
        """Return the tangents of final and saved states; those of failed trajectories are zero."""
        du, dsaved, spec = self._du, self._dsaved, self._spec
        if empty_span.any():
            unit = np.array([[kind == "u" and i == c for c in range(spec.d)] for kind, i in spec.directions])
            first = self._first[..., empty_span] if self._first is not None else unit[:, :, None]
            du[:, :, empty_span] = first
            dsaved[:, empty_span] = np.swapaxes(first, 1, 2)[:, :, None]
        failed, dtype = self._outcome.failed, self._outcome.u_end.dtype
        du[:, :, failed] = 0
        dsaved[:, failed] = 0
        return from_row_parts(du, dtype), from_parts(dsaved, dtype)


def _enlarged(rows: Array, more: int) -> Array:
    """Return an array with the given rows, and at least as many uninitialized rows and `more`."""
    longer = np.empty((2 * len(rows) + more, *rows.shape[1:]), rows.dtype)
    longer[: len(rows)] = rows
    return longer


# The tables of accepted steps and events that CPU kernels write, with one row each, in the order of computation.
#
# The memory of a record is reused by the next solve: a training loop records the same ensemble repeatedly, and the
# operating system provides new memory page by page, which takes longer than the solve.


class Tape(NamedTuple):
    """The steps of some trajectories; each row refers to the previous row of the same trajectory."""

    # `first`, `stop`: the range of trajectories.
    first: int
    stop: int
    rows: Array  # shape (m, 2 + d); time before the step, signed size, and real components of the state before the step
    previous: Array  # int, shape (m,); the row of the trajectory's previous step, or -1

    def visit(
        self, function: Callable[..., None], layout: Layout, dtype: np.dtype, arguments: tuple, pause: Callable[[], None]
    ) -> None:
        """Run a kernel that visits recorded steps; `arguments`: those after `previous`."""
        state = np.array([self.first, self.stop - 1, layout.lanes, 0])
        lanes, call = (*layout.buffers(dtype), *layout.integers(), state), Paced(function, state)
        while True:
            call(*lanes, self.rows, self.previous, *arguments)
            if state[2] == layout.lanes:  # all lanes have finished
                return
            pause()

    def steps(self, last: Array, counts: Array, dtype: np.dtype) -> Steps:
        """Return the steps, sorted into sweeps; `last`, `counts`, shape (N,): rows of the last steps, numbers of steps."""
        d = (self.rows.shape[1] - 2) // (2 if is_complex(dtype) else 1)
        steps = Steps(counts[self.first : self.stop], d, dtype)
        row = last[self.first : self.stop][steps.order]
        for s, width in enumerate(steps.widths):
            row = row[:width]  # trajectories with this many steps come first in the order
            ids, values = steps.order[:width], self.rows[row]
            steps.fill(ids, steps.counts[ids] - 1 - s, values[:, 0], values[:, 1], from_parts(values[:, 2:], dtype).T)
            row = self.previous[row]
        return steps


def jumps_of(
    outcome: Outcome, acting: Acting, numbers: Array, before: Array, at_conditions: Array, dtype: np.dtype
) -> list[Jump]:
    """Return the jumps of a recorded solve. The record contains the states after jumps, so `Jump.after` isn't needed."""
    # `numbers`: the numbers of steps before the given times, shape (N, slots), -1 for a time that wasn't reached.
    # `before`, shape (N, slots, d), and `at_conditions`, shape (m, d): the states before events acted.
    (count, slots), numbers = numbers.shape, numbers.ravel()
    rows = slice(None) if (numbers >= 0).all() else np.flatnonzero(numbers >= 0)
    ids, slot = np.repeat(np.arange(count), slots)[rows], np.tile(np.arange(slots), count)[rows]
    states = from_parts(before.reshape(-1, before.shape[2])[rows], dtype).T
    kinds, times = (table[:slots].T.ravel()[rows] for table in (acting.kinds, acting.times))
    jumps = [Jump(ids, numbers[rows], kinds, slot, times, states, states)]
    if outcome.event_table is not None:  # jumps at roots of conditions come before those at given times of the same step
        acts = np.array([acting.events[e].acts for e in acting.conditions])[outcome.event_table[1].astype(int)]
        ids, event, number = outcome.event_table[:3, acts].astype(int)
        states = from_parts(at_conditions[acts], dtype).T
        slots, time = np.full(len(ids), FOUND), outcome.event_table[4, acts]
        jumps.insert(0, Jump(ids, number + 1, np.array(acting.conditions)[event], slots, time, states, states))
    return jumps
