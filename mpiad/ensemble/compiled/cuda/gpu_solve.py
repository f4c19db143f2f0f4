"""`solved_on_gpu`: the solve of an ensemble by a kernel on a GPU."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple, NoReturn

import autograd.numpy as anp
import numpy as np
from autograd.core import JVPNode
from autograd.tracer import isbox
from numpy.typing import DTypeLike

from mpiad._typing import Array, Shape
from mpiad.compiling.arguments import is_complex
from mpiad.device import to_host
from mpiad.device.transfer import array_to_device
from mpiad.ensemble.backends import EnsembleGPU, device_for
from mpiad.ensemble.batch import Batch, is_on_device
from mpiad.ensemble.compiled.cuda.cuda_kernels import ROWS
from mpiad.ensemble.compiled.kernel_choice import Compiler, refuse_mass_on_device
from mpiad.ensemble.compiled.kernel_spec import KernelSpec, interpolates, kernel_spec_of
from mpiad.ensemble.compiled.kernel_texts import cuda_text
from mpiad.ensemble.compiled.trace import PackedLeaf, ParameterPacking
from mpiad.ensemble.compiled.traced_problem import FEW, LARGE, MOST_OPERATIONS, TracedProblem, remembered
from mpiad.ensemble.differentiable import solve_operator
from mpiad.ensemble.directions import LEAVES, NO_TIMES, U0
from mpiad.ensemble.event import Event
from mpiad.ensemble.events import NO_EVENTS, EventRows, in_order, traced_times
from mpiad.ensemble.jumps_in_time import warn_of_jumps_in_time
from mpiad.ensemble.outcome import ReturnCode, came_through, evaluations
from mpiad.ensemble.settings import Settings
from mpiad.ensemble.solution import EnsembleSolution, at_ends
from mpiad.ensemble.trial import try_once
from mpiad.transport.devices.device_arrays import (
    ArrayModule,
    DeviceKernel,
    Launcher,
    arrays_of,
    is_device_array,
    launcher_of,
)

# Maximum local memory per thread. With more, spilled registers cause about as much memory traffic as array operations.
MOST_LOCAL_BYTES = 8192


class DeviceSolution(EnsembleSolution):
    """`EnsembleSolution` whose return codes, times, counts and events are copied to the host on first access."""

    @property
    def _all_survived(self) -> bool:
        # At most one number is copied to the host to find out. Solutions that weren't gathered have this deferred field.
        return getattr(self, "failed", None) == 0 or super()._all_survived


def solved_on_gpu(
    compiler: Compiler, inputs: Batch, batch: Batch, settings: Settings, by_arrays: Callable[..., EnsembleSolution]
) -> EnsembleSolution:
    """Solve a batch, `given` with traced, `batch` with plain values, by a kernel if possible, otherwise by `by_arrays`."""
    on_host = not is_on_device(batch)
    if not on_host:
        refuse_mass_on_device(settings)
    arrays = device_for(batch, compiler.together)
    with arrays.current():
        sol = _by_kernel(compiler, inputs, batch, settings, arrays)
    if sol is not None:
        return sol
    compiler.compile = False  # CPU kernels aren't used, either
    if settings.ends:
        settings = settings._replace(ends=False, saveat=batch.both_ends())
    if not on_host:
        return by_arrays(inputs, batch, settings)
    leaves = [array_to_device(leaf, arrays) if anp.ndim(leaf) else leaf for leaf in inputs.p.leaves]
    on_device = inputs._replace(u0=array_to_device(inputs.u0, arrays), p=inputs.p._replace(leaves=leaves))
    sol = by_arrays(on_device, on_device.plain(), settings)
    return dataclasses.replace(sol, u=to_host(sol.u), u_end=to_host(sol.u_end))


def _by_kernel(
    compiler: Compiler, inputs: Batch, batch: Batch, settings: Settings, arrays: ArrayModule
) -> EnsembleSolution | None:
    on_host = not is_on_device(batch)
    traced = problem_for_gpu(compiler, inputs, batch, settings)
    if traced is None:
        return None
    warn_of_jumps_in_time(compiler.warn, traced, inputs, settings.events)
    solver = Solver(compiler, arrays, traced, batch, settings)
    is_traced = inputs.traced
    by_tangents = is_traced and not settings.events and not settings.alg.tableau.implicit
    directions = traced.carried(inputs, settings.gradient) if by_tangents else ()
    carried = directions if len(directions) <= FEW else ()  # otherwise tangents are propagated later, a few at a time
    if carried and settings.gradient is None and solver.kernel(carried).local_bytes > MOST_LOCAL_BYTES:
        directions = carried = ()  # the kernels of an adjoint are smaller
    if not fits(solver.kernel(carried), batch, compiler):
        return None
    solved, times = Solved(solver, solver.solved(carried), carried, bool(directions), on_host, is_traced), []
    arguments = inputs.u0, inputs.start, inputs.end, NO_TIMES, *inputs.p.leaves
    vector = solve_operator(*arguments, solved=solved) if is_traced else solved.vector
    if solved.timed:
        # In a vector with times, states are double.
        end = solved.results.vector.size
        times = [to_host(vector[end : end + solver.count]), to_host(vector[end + solver.count :])]
        vector = vector[:end] if vector.dtype == solver.real else vector[:end].astype(solver.real)
    if settings.progress is not None:
        settings.progress(batch.size)
    saved, last = (None, None) if settings.ends else solver.parts(vector)
    # The transposed final states; if nothing else is saved, by one traced operation instead of two.
    ends = vector.reshape((solver.count, solver.d), order="F") if last is None else last.T
    u_end = _shaped(ends, batch.shape)
    sol = DeviceSolution.lazy(_deferred(solved, settings, times), t=settings.saveat, u_end=u_end, alg=settings.alg)
    if settings.ends:
        sol.t = batch.both_ends()
        return at_ends(sol, lambda: inputs.u0, u_end)
    sol.u = _shaped(saved.transpose((2, 0, 1)), batch.shape)  # type: ignore[union-attr]  # None if only ends are saved
    if times:
        sol.t_reached = times[0]
    return sol


def _deferred(solved: Solved, settings: Settings, times: Sequence[Array]) -> dict[str, Callable[[], object]]:
    """Return functions for the fields of a solution that are copied to the host on first access."""
    # The functions don't refer to states, so that the memory of the states can be released.
    results, arrays, alg, has_dt = solved.results, solved.solver.arrays, settings.alg, settings.dt is not None
    codes, reached, counts = results.codes, results.t_reached, (results.naccept, results.nreject)
    rows = None if results.rows is None else results.rows[:5, : results.event_count]
    naccept, nreject = (lambda x=x: arrays.to_host(x).astype(np.int64) for x in counts)
    summary = solved.summary
    return {
        "failed": lambda: summary.values[0],  # the only number that each solve copies to the host
        "retcode": lambda: ReturnCode.names_of(arrays.to_host(codes)),
        "t_reached": lambda: arrays.to_host(reached),
        "naccept": naccept,
        "nreject": nreject,
        "nf": lambda: evaluations(naccept(), nreject(), alg, has_dt),
        "_event_rows": partial(_events, arrays, codes, rows, settings.events, times),
    }


def _events(
    arrays: ArrayModule, codes: Array, rows: Array | None, events: Sequence[Event], times: Sequence[Array]
) -> EventRows:
    """Return the events of all trajectories; `times`: traced end times and event times, or empty."""
    if rows is None or not rows.size:
        return NO_EVENTS
    table = arrays.to_host(arrays.contiguous(rows))
    order = in_order(table)
    (ids, event), when = table[:2, order].astype(int), table[4, order]
    if times:
        indices = np.where(np.array([each.stops for each in events])[event], -1, order)
        when = traced_times(ids, when, indices, came_through(arrays.to_host(codes)), *times)
    return EventRows(ids, event, when)


def _shaped(x: Array, shape: Shape) -> Array:
    """Reshape the last axis, the components of states, to `shape`."""
    return x if len(shape) == 1 else x.reshape((*x.shape[:-1], *shape))


def problem_for_gpu(compiler: Compiler, inputs: Batch, batch: Batch, settings: Settings) -> TracedProblem | None:
    """Return the problem to compile; if that is impossible, warn and return None, or raise with ``compile=True``."""
    if compiler.compile is False:
        return None
    must = compiler.compile is True
    reason = _unsupported(inputs, batch, settings)
    if reason is None:

        def make(known: bool) -> TracedProblem | None:
            host = sample_batch(batch) if is_on_device(batch) or not batch.size else batch
            traced = compiler.problem_of(host, settings, LARGE)
            programs = [] if traced is None or must else [traced.program, *traced.conditions]
            for name, cost in zip(("f", *["a condition of the events"] * len(programs)), (g.cost for g in programs)):
                if cost > MOST_OPERATIONS:
                    text = f"{name} has {cost} operations; up to {MOST_OPERATIONS} fit into a CUDA kernel"
                    return compiler.warn(inputs.f, f"EnsembleGPU: {text}, so EnsembleVectorized solves the problem")
            if traced is not None and not known:
                try_once(host, settings.events, inputs.traced)
            return traced

        return remembered(make, batch, settings.events, inputs.traced, must, settings.alg.tableau.implicit, "gpu")
    if must:
        raise ValueError(f"solve: compile=True, but {reason}. Leave compile out, or pass compile=False.")
    compiler.warn(inputs.f, f"EnsembleGPU: {reason}, so EnsembleVectorized solves the problem by array operations")
    return None


def _unsupported(inputs: Batch, batch: Batch, settings: Settings) -> str | None:
    if batch.u0.dtype not in (np.float64, np.float32):
        return f"u0 has dtype {batch.u0.dtype}, and kernels on GPUs support only float64 and float32"
    if any(map(is_complex, batch.p.leaves)):
        return "p has complex numbers, and kernels on GPUs support only real numbers"
    if settings.saveat is None:
        return "kernels don't support save_everystep=True"
    if isbox(inputs.start) or isbox(inputs.end):
        return "the solve is differentiated with respect to tspan, which kernels don't support"
    if len(_traces(inputs)) > 1:
        return "the solve is differentiated twice, and kernels support only first derivatives"
    adjoint_only = "with events=" if settings.events else "of Rosenbrock methods" if settings.alg.tableau.implicit else ""
    by_jvp = any(isbox(x) and isinstance(x._node, JVPNode) for x in (inputs.u0, *inputs.p.leaves))
    if adjoint_only and inputs.traced and (settings.gradient == "tangent" or by_jvp):
        return f"the solve is differentiated by tangents, and kernels {adjoint_only} support only adjoints"
    return None


def _traces(inputs: Batch) -> set[int]:
    traces = set()
    for x in (inputs.u0, *inputs.p.leaves):
        while isbox(x):
            traces.add(x._trace)
            x = x._value
    return traces


def fits(kernel: DeviceKernel, batch: Batch, compiler: Compiler) -> bool:
    """Return whether a kernel is small enough, or required by ``compile=True``; if it is too large, log a warning."""
    must = compiler.compile is True
    if kernel.local_bytes <= MOST_LOCAL_BYTES:
        return True
    text = (
        f"EnsembleGPU: each thread of the kernel takes {kernel.local_bytes} bytes of local memory, more than "
        f"{MOST_LOCAL_BYTES}, and {kernel.registers} registers"
    )
    compiler.warn(batch.f, text if must else f"{text}, so EnsembleVectorized solves the problem by array operations")
    return must


# The first derivatives of a solve by a kernel on a GPU, for `solve_operator`.
#
# If the arguments are on the host, the results and their cotangents are on the host, too; each array is copied once.


class _Summary:
    """The number of failed trajectories, and the largest number of steps."""

    def __init__(self, arrays: ArrayModule, x: Array):
        self._arrays, self._x = arrays, x

    @cached_property
    def values(self) -> list[int]:
        """The two numbers; the copy to the host, which waits for the kernel, is deferred until they are needed."""
        return self._arrays.to_host(self._x).tolist()


class Solved:
    """A solve on a device, with tangents in the directions `carried`; `by_tangent`: whether tangents give its gradient."""

    def __init__(
        self, solver: Solver, results: DeviceResults, carried: Directions, by_tangent: bool, on_host: bool, traced: bool
    ):
        self.solver, self.results, self.carried = solver, results, carried
        self.by_tangent, self.on_host = by_tangent, on_host
        # Whether times have derivatives. Otherwise, appending them to the vector would needlessly copy all states.
        self.timed = traced and results.rows is not None
        self.summary = _Summary(solver.arrays, results.summary)

    @property
    def vector(self) -> Array:
        """All results as one vector: states, end times of trajectories, times of events."""
        results = self.results
        if not self.timed:
            return self._to_caller(results.vector)
        events = results.rows[4, : results.event_count]
        return self._to_caller(np.concatenate([results.vector.astype(float), results.t_reached, events]))

    def _to_caller(self, x: Array) -> Array:
        return self.solver.arrays.to_host(x) if self.on_host else x

    def _to_device(self, x: Array) -> Array:
        return device_rows(self.solver.arrays, x, self.solver.real)

    def _directions(self, argnums: Sequence[int]) -> Directions:
        return self.solver.traced.directions(U0 in argnums, [k - LEAVES for k in argnums])

    def _parts(self, argnums: Sequence[int]) -> list[PackedLeaf]:
        return [part for part in self.solver.traced.packing.parts if part.place + LEAVES in argnums]

    def _tangents(self, wanted: Directions) -> list[tuple[Directions, DeviceResults]]:
        """Return results with tangents in the wanted directions: of this solve, or of one solve per `FEW` directions."""
        if wanted and set(wanted) <= set(self.carried):
            return [(self.carried, self.results)]
        groups = [wanted[i : i + FEW] for i in range(0, len(wanted), FEW)]
        return [(group, self.solver.solved(group)) for group in groups]

    # ---- reverse mode

    def pull(self, argnums: Sequence[int], args: Sequence[Array], g: Array) -> dict[int, Array]:
        """Return the cotangents of arguments; `g`: the cotangent of `vector`."""
        solver = self.solver
        with solver.arrays.current():
            times: list[Array] = []
            if self.timed:
                end = g.size - solver.count - self.results.event_count
                g, *parts = g[:end], g[end : end + solver.count], g[end + solver.count :]
                times = [device_rows(solver.arrays, part, float) for part in parts]
            bar = self._to_device(g)
            rows = self._contracted(argnums, bar) if self.by_tangent else self._adjoint(argnums, bar, times)
            bars = {k: rows[k] if is_device_array(args[k]) else solver.arrays.to_host(rows[k]) for k in argnums}
            return {k: row.reshape(getattr(args[k], "shape", ())) for k, row in bars.items()}

    def _adjoint(self, argnums: Sequence[int], bar: Array, times: Sequence[Array]) -> dict[int, Array]:
        """Return the cotangents of the arguments, as rows, by the reverse kernel."""
        parts = self._parts(argnums)
        wanted, longest = tuple(j for part in parts for j in part.scalars), self.summary.values[1]
        u0, varying, shared = self.solver.pulled(self.results, longest, bar, wanted, times)
        leaves = ParameterPacking(tuple(parts)).joined(varying, shared, self.solver.count)
        return {U0: u0} | {place + LEAVES: leaf for place, leaf in leaves.items()}

    def _contracted(self, argnums: Sequence[int], bar: Array) -> dict[int, Array]:
        """Return the cotangents of the arguments, as rows, by tangents."""
        saved_bar, end_bar = self.solver.parts(bar)
        cotangents = {}
        for directions, results in self._tangents(self._directions(argnums)):
            by_direction = np.sum(results.du_end * end_bar, axis=1)
            if saved_bar is not None:
                sums = [np.sum(results.dsaved[k] * saved_bar, axis=(0, 1)) for k in range(len(directions))]
                by_direction = by_direction + np.stack(sums)
            # Tangents of failed trajectories may be NaN, which a factor of zero wouldn't remove.
            by_direction = np.where(came_through(results.codes), by_direction, 0)
            cotangents |= {direction: by_direction[k] for k, direction in enumerate(directions)}
        rows = {U0: [cotangents["u", c] for c in range(self.solver.d)]} if U0 in argnums else {}
        for part in self._parts(argnums):
            scalars = [cotangents[self.solver.traced.direction(j)] for j in part.scalars]
            rows[part.place + LEAVES] = scalars if part.varies else [np.sum(row) for row in scalars]
        return {k: np.stack(row) for k, row in rows.items() if row}

    # ---- forward mode

    def push(self, args: Sequence[Array], tangents: Mapping[int, Array]) -> Array:
        """Return the tangent of `vector`."""
        solver = self.solver
        with solver.arrays.current():
            coefficients = self._coefficients(tangents)
            total = solver.arrays.full(self.results.vector.shape, 0, solver.real)
            saved, end = solver.parts(total)
            for group, results in self._tangents(self._directions(tuple(tangents))):
                alive = came_through(results.codes)
                for k, direction in enumerate(group):
                    if direction in coefficients:
                        if saved is not None:
                            saved += np.where(alive, results.dsaved[k] * coefficients[direction], 0)
                        end += np.where(alive, results.du_end[k] * coefficients[direction], 0)
            return self._to_caller(total)

    def _coefficients(self, tangents: Mapping[int, Array]) -> dict[tuple[str, int], Array]:
        """Return the factor of the tangents in each direction: an array of one number, or of one per trajectory."""
        rows = {k: self._to_device(g) for k, g in tangents.items()}
        factors = {("u", c): rows[U0][c] for c in range(self.solver.d)} if U0 in rows else {}
        for part in self._parts(tuple(rows)):
            flat = rows[part.place + LEAVES].reshape(len(part.scalars), -1)
            factors.update({self.solver.traced.direction(j): flat[i] for i, j in enumerate(part.scalars)})
        return factors

    def pull_traced(self, argnums: Sequence[int], args: Sequence[Array], g: Array) -> NoReturn:
        """Refuse derivatives of derivatives."""
        raise NotImplementedError(
            "solve: EnsembleGPU supports only first derivatives, but a derivative of a derivative was requested. Use "
            "EnsembleVectorized() instead."
        )

    push_traced = pull_traced


# Solves of a batch by kernels on a device, with tangents if needed, and the reverse sweep.
#
# A solve records no steps. For an adjoint, the forward kernel runs again for one share of the trajectories after the other,
# and records the steps, whose number the first run has determined; then the reverse kernel processes this share. Both runs
# of the forward kernel use the same machine code, so they take the same steps.

# Size in bytes up to which the steps of a gradient are stored without asking for the free memory.
_MOST_UNASKED = 1 << 28
# The number of transfers from the host whose copies are used again, and the largest number of bytes of one of them.
_MOST_COPIES, _MOST_COPIED = 64, 4096


_ROWS = 1024  # number of columns of the first table of events, in addition to the expected number of events
Directions = tuple[tuple[str, int], ...]
_log = logging.getLogger("mpiad")

_lock = threading.RLock()
_loaded_kernels: dict[tuple[Any, ...], DeviceKernel] = {}


class DeviceResults(NamedTuple):
    """The results of a solve on the device."""

    vector: Array  # shape ((n_saved + 1) * d * n,); saved states, of shape (n_saved, d, n), and final ones, (d, n)
    t_reached: Array  # shape (n,), like the next three
    codes: Array
    naccept: Array
    nreject: Array
    du_end: Array  # shape (m, d, n); tangents in m directions
    dsaved: Array  # shape (m, n_saved, d, n)
    summary: Array  # shape (2,); the number of failed trajectories, and the largest number of steps
    rows: Any = None  # shape (6, event_capacity); the table of events, see `cuda_kernels`; None without events
    heads: Any = None  # shape (n,); per trajectory the column of its last event in the table, or -1
    event_count: int = 0  # the number of used columns of the table


class Solver:
    """A batch of plain arrays, and its kernels, whose texts are stored in `compiler.kernels`."""

    def __init__(self, compiler: Compiler, arrays: ArrayModule, traced: TracedProblem, batch: Batch, settings: Settings):
        self._gpu: EnsembleGPU = compiler.backend  # type: ignore[assignment]
        self.arrays, self.settings, self._kernels = arrays, settings, compiler.kernels
        self._launcher = launcher_of(arrays)
        self._prepared = prepared(self._launcher, self._gpu.options, traced, batch, settings)
        self.traced, self.spec = self._prepared.traced, self._prepared.spec
        self.d, self.real = self.spec.d, batch.u0.dtype
        self.inputs = inputs_of(arrays, batch, settings, traced)
        self.count = batch.size

    # ---- forward

    def kernel(self, directions: Directions = ()) -> DeviceKernel:
        """Return the forward kernel with tangents in these directions."""
        return self._loaded("forward", directions=directions)

    def solved(self, directions: Directions = ()) -> DeviceResults:
        """Solve all trajectories."""
        # The first capacity per trajectory is one occurrence of each event that stops a step, and two of each other event.
        event_capacity = _ROWS + self.count * sum(1 if stops else 2 for stops, _ in self.spec.events)
        empty, d, n, n_saved, m = self.arrays.empty, self.d, self.count, self.inputs.n_saved, len(directions)
        while True:
            codes, naccept, nreject = [empty((n,), np.int32) for _ in range(3)]
            vector = empty(((n_saved + 1) * d * n,), self.real)
            du_end, dsaved = (empty((m, *shape), self.real) if m else None for shape in ((d, n), (n_saved, d, n)))
            summary = self.arrays.full((2,), 0, np.int64)
            results = DeviceResults(vector, empty((n,), float), codes, naccept, nreject, du_end, dsaved, summary)
            saved, end = self.parts(results.vector)
            table, counter = self._table(event_capacity)
            self._forward(directions, 0, self.count, (end, saved, *results[1:8]), (None, None, 0), table)
            if not table:
                return results
            event_count = int(self.arrays.to_host(counter)[0])
            if event_count <= event_capacity:
                return results._replace(rows=table[0], heads=table[3], event_count=event_count)
            event_capacity = event_count  # the solve is repeated, with columns for all events

    def _table(self, event_capacity: int) -> tuple[tuple[Any, ...], Any]:
        """Return the forward kernel's arguments for events, and the counter of events, which is one of them."""
        if not self.spec.events:
            return (), None
        counter, heads = (self.arrays.full((n,), value, np.int64) for n, value in ((1, 0), (self.count, -1)))
        return (self.arrays.empty((ROWS, event_capacity), float), event_capacity, counter, heads), counter

    def parts(self, vector: Array) -> tuple[Array | None, Array]:
        """Return views of any saved states, (n_saved, d, n), and final states, (d, n), in a vector, traced or not."""
        shape, n_saved = (self.d, self.count), self.inputs.n_saved
        if self.settings.ends:
            return None, vector.reshape(shape)
        cut = n_saved * self.d * self.count
        return vector[:cut].reshape((n_saved, *shape)), vector[cut:].reshape(shape)

    def _forward(self, directions: Directions, first: int, count: int, results: tuple, steps: tuple, table: tuple) -> None:
        settings, rtol = self.settings, self.settings.rtol
        rtol = self.real.type(rtol if type(rtol) is float else np.max(rtol))
        scalars = (0.0 if settings.dt is None else float(settings.dt), float(settings.dtmax), int(settings.max_steps))
        # The second run, without arrays for results, saves no states.
        inputs = self.inputs if results[0] is not None else self.inputs._replace(n_saved=0)
        self._launch(self.kernel(directions), first, count, *inputs, rtol, *scalars, *results, *steps, *table)

    # ---- reverse

    def pulled(
        self, results: DeviceResults, longest: int, vector_bar: Array, wanted: tuple[int, ...], times: Sequence[Array] = ()
    ) -> tuple[Array, Array, Array | None]:
        """Return the cotangents of u0, (d, n), of parameters per trajectory, (rows, n), and of shared ones, (rows,)."""
        # `longest`: the largest number of steps of a trajectory. `times`: the cotangents of end times, (n,), and of the
        # times of all events. If the steps exceed the memory, they are recorded for some trajectories at a time.
        empty = self.arrays.empty
        varying = [j for j in self.traced.packing.varying if j in wanted]
        shared = [j for j in self.traced.packing.shared if j in wanted]
        u0_bar, p_bar = [empty((rows, self.count), self.real) for rows in (self.d, len(varying))]
        kernel, sums = self._loaded("reverse", varying, shared), []
        size = min(self.count, self._most_recorded(longest))
        steps = empty((size * longest * self.d,), self.real), empty((size * longest * 2,), float)
        saved_bar, end_bar = self.parts(vector_bar)
        inputs = *self.inputs[:8], *steps, results.naccept, results.t_reached, results.codes, end_bar, saved_bar
        events = (results.rows, results.rows.shape[1], results.heads, *times) if self.spec.events else ()
        for first in range(0, self.count, size or 1):
            count, table = min(size, self.count - first), (None, 0, None, None) if self.spec.events else ()
            self._forward((), first, count, (None,) * 9, (*steps, longest), table)
            s_bar = empty((len(shared), count), self.real)
            self._launch(kernel, first, count, *inputs, u0_bar, p_bar, s_bar, *events)
            sums += [np.sum(s_bar, axis=1)] if shared else []
        s_bar = sum(sums[1:], sums[0]) if sums else self.arrays.full((len(shared),), 0, self.real)
        return u0_bar, p_bar, s_bar

    def _most_recorded(self, longest: int) -> int:
        """Return the number of trajectories whose steps fit into the memory for them."""
        needed = max(1, longest) * (self.d * self.real.itemsize + 16)  # the state, and two doubles: time and step size
        budget = self._gpu.tape_bytes
        if budget is None:
            # The driver takes a while to find the free memory.
            budget = _MOST_UNASKED if needed * self.count <= _MOST_UNASKED else self._launcher.free_bytes() // 2
        if needed > budget:
            raise MemoryError(
                f"solve: the steps of one trajectory take {needed} bytes of device memory for its gradient, but the limit "
                f"is {budget}. Raise tape_bytes= of EnsembleGPU if more memory is free, or loosen rtol."
            )
        return budget // needed

    # ---- kernels

    def _loaded(
        self, name: str, varying: Sequence[int] = (), shared: Sequence[int] = (), directions: Directions = ()
    ) -> DeviceKernel:
        self._kernels[name], kernel = self._prepared.kernel(name, (*varying,), (*shared,), directions)
        return kernel

    def _launch(self, kernel: DeviceKernel, first: int, count: int, *arguments: Any) -> None:
        """Run a kernel for the trajectories `first`, ..., `first + count - 1`."""
        if count:
            threads = self._gpu.block or threads_per_block(count, self._launcher.multiprocessors)
            self._launcher.launch(kernel, -(-count // threads), threads, (self.count, first, count, *arguments))


class Prepared:
    """All that solves with one signature share: the spec, and per kernel its text and the loaded kernel."""

    def __init__(self, launcher: Launcher, options: tuple[str, ...], traced: TracedProblem, spec: KernelSpec):
        self.traced, self.spec = traced, spec
        self._launcher, self._options = launcher, options
        self._found: dict[tuple[Any, ...], tuple[str, DeviceKernel]] = {}

    def kernel(
        self, name: str, varying: tuple[int, ...], shared: tuple[int, ...], directions: Directions
    ) -> tuple[str, DeviceKernel]:
        """Return the text and the kernel for derivatives with respect to parameters, or in directions."""
        key = name, varying, shared, directions
        if key not in self._found:
            sizes = {"wanted_varying": len(varying), "wanted_shared": len(shared)}
            spec = self.spec._replace(directions=directions, **sizes)
            text = cuda_text(name, self.traced, spec, (*varying, *shared))
            self._found[key] = text, loaded(self._launcher, text, name, self._options)
        return self._found[key]


_prepared: dict[tuple[Any, ...], Prepared] = {}
_MOST_PREPARED = 32


def prepared(
    launcher: Launcher, options: tuple[str, ...], traced: TracedProblem, batch: Batch, settings: Settings
) -> Prepared:
    """Return what earlier solves with the same signature have prepared."""
    # The signature contains all that `kernel_spec_of` reads. `traced` stands for f, the events and the parameters; texts
    # depend on the problem without its numbers. Mass matrices and patterns are arrays of the user, and aren't compared.
    problem, alg = traced.origin or traced, settings.alg
    events = tuple([(event.stops, event.direction, event.interior_points) for event in settings.events])
    inside, relative = interpolates(batch, settings), np.ndim(settings.rtol) > 0
    key = launcher, options, problem, alg.tableau, alg.controller, batch.u0.dtype, events, inside, relative
    found = _prepared.get(key) if settings.mass is None and batch.sparsity is None else None
    if found is None:
        spec = kernel_spec_of(traced, batch, settings)._replace(record=True, tolerances=True)
        found = Prepared(launcher, options, problem, spec)
        if settings.mass is None and batch.sparsity is None:
            _prepared[key] = found
            if len(_prepared) > _MOST_PREPARED:
                _prepared.pop(next(iter(_prepared)), None)
    return found


def loaded(launcher: Launcher, text: str, name: str, options: tuple[str, ...]) -> DeviceKernel:
    """Return the kernel "forward" or "reverse" of a CUDA source, compiled once per device."""
    key = launcher, name, options, text
    # The lock prevents two threads from compiling the same kernel.
    with _lock:
        if key not in _loaded_kernels:
            started = time.perf_counter()
            kernel = launcher.compiled(text, name, options)
            seconds = time.perf_counter() - started
            _log.info(
                "solve: the %s kernel was compiled for the GPU in %.2f s; each thread takes %d registers and %d bytes of "
                "local memory.",
                *(name, seconds, kernel.registers, kernel.local_bytes),
            )
            _loaded_kernels[key] = kernel
        return _loaded_kernels[key]


def threads_per_block(count: int, multiprocessors: int) -> int:
    """Return the number of threads in a block: 128, or fewer if there would be fewer than two blocks per multiprocessor."""
    # A block occupies its resources until its longest trajectory has ended, so larger blocks would be slower.
    return next((threads for threads in (128, 64) if count >= 2 * threads * multiprocessors), 32)


# The arguments of GPU kernels for a batch, as arrays on the device, and a small sample of the batch on the host.

_COLUMNS = 5  # number of trajectories in a sample


class Inputs(NamedTuple):
    """The arguments of kernels, in order; the reverse kernel takes only the arguments before `u0`."""

    # Parameters per trajectory, shape (varying, n), and shared parameters, shape (shared,).
    p: Array
    s: Array
    # Start and end of tspan: shape (n,), or (1,) if `by_span` is zero.
    start: Array
    stop: Array
    by_span: int  # stride of `start` and `stop`: 1, or 0 if all trajectories share one tspan
    times: Array  # shape (n_saved,) or (n, n_saved)
    n_saved: int
    by_row: int  # whether `times` has one row per trajectory: 1 or 0
    u0: Array  # shape (d, n) or (d, 1)
    # Strides of `u0` along components and along trajectories.
    u0_row: int
    u0_column: int
    atol: Array  # shape (d,), or with a relative tolerance per component (2 d,): absolute and relative ones


def inputs_of(arrays: ArrayModule, batch: Batch, settings: Settings, traced: TracedProblem) -> Inputs:
    """Return the arguments on a device; small host arrays are copied in one transfer, once for several solves."""
    count, real, d, leaves = batch.size, batch.u0.dtype, len(batch.u0), batch.p.leaves
    parts, one_span = traced.packing.parts, batch.one_span
    one_start = not is_device_array(batch.u0) and batch.u0.size > 0 and batch.u0.strides[-1] == 0
    varying = [
        device_rows(arrays, leaves[part.place], real).reshape(len(part.scalars), count) for part in parts if part.varies
    ]
    shared = [leaves[part.place] for part in parts if not part.varies]
    shared += [np.array(traced.numbers)] if traced.numbers else []
    # Doubles come first, so that all numbers are aligned.
    times = np.asarray(settings.saveat, float)
    on_host = {"times": times}
    if one_span:
        on_host |= {"start": batch.start[:1], "stop": batch.end[:1]}
    on_host["atol"] = _tolerances(settings, d, real)
    if not any(map(is_device_array, shared)):
        on_host["s"] = np.concatenate([np.ravel(leaf) for leaf in shared]).astype(real) if shared else np.empty(0, real)
    if one_start:
        on_host["u0"] = batch.u0[:, :1]
    content = b"".join([x.tobytes() for x in on_host.values()])
    copied = _copied_together if len(content) <= _MOST_COPIED else _copied_together.__wrapped__
    on_device = dict(zip(on_host, copied(arrays, content, tuple([(x.dtype, x.shape) for x in on_host.values()]))))
    if "s" not in on_host:
        on_device["s"] = _concatenated(arrays, [device_rows(arrays, leaf, real).reshape(-1) for leaf in shared], (0,), real)
    if not one_span:
        on_device |= {name: device_rows(arrays, x, float) for name, x in (("start", batch.start), ("stop", batch.end))}
    if not one_start:
        on_device["u0"] = device_rows(arrays, batch.u0, real)
    return Inputs(
        p=_concatenated(arrays, varying, (0, count), real), by_span=int(not one_span), n_saved=times.shape[-1],
        by_row=int(times.ndim > 1), u0_row=1 if one_start else count, u0_column=int(not one_start), **on_device,
    )  # fmt: skip


def _tolerances(settings: Settings, d: int, real: np.dtype) -> Array:
    """Return the absolute tolerances per component, with a relative tolerance per component followed by these."""
    if type(settings.atol) is float and type(settings.rtol) is float:
        return _repeated(settings.atol, d, real)
    absolute = np.full(d, np.ravel(settings.atol), real)
    return np.append(absolute, np.ravel(settings.rtol).astype(real)) if np.ndim(settings.rtol) else absolute


@lru_cache(_MOST_COPIES)
def _repeated(value: float, d: int, real: np.dtype) -> Array:
    return np.full(d, value, real)


@lru_cache(_MOST_COPIES)
def _copied_together(
    arrays: ArrayModule, content: bytes, kinds: tuple[tuple[np.dtype, tuple[int, ...]], ...]
) -> list[Array]:
    """Return device arrays of these dtypes and shapes; kernels don't write to them."""
    copy, stop, parts = arrays.to_device(np.ndarray(len(content), np.uint8, content)), 0, []
    for dtype, shape in kinds:
        start, stop = stop, stop + dtype.itemsize * math.prod(shape)
        parts.append(copy[start:stop].view(dtype).reshape(shape))
    return parts


def device_rows(arrays: ArrayModule, x: Array, dtype: DTypeLike) -> Array:
    """Return a contiguous array of a dtype on the device, without a copy if possible."""
    if not is_device_array(x):
        return arrays.to_device(np.ascontiguousarray(x, dtype))
    return arrays.contiguous(x if x.dtype == dtype else x.astype(dtype))


def _concatenated(arrays: ArrayModule, parts: list[Array], empty: tuple[int, ...], dtype: DTypeLike) -> Array:
    parts = [part for part in parts if part.size]
    if not parts:
        return arrays.empty(empty, dtype)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def sample_batch(batch: Batch) -> Batch:
    """Return a small batch on the host; states, and floats that vary or are on a device, are replaced by other numbers."""
    leaves = [_leaf(leaf, varies) for leaf, varies in zip(batch.p.leaves, batch.p.varies)]
    times = [np.full(_COLUMNS, x[0] if len(x) else value) for x, value in ((batch.start, 0.0), (batch.end, 1.0))]
    u0 = _arbitrary((len(batch.u0), _COLUMNS), batch.u0.dtype)
    return Batch(batch.f, batch.shape, u0, batch.p._replace(leaves=leaves), *times)


def _leaf(leaf: Array, varies: bool) -> Array:
    arrays = arrays_of(leaf)
    if not varies and arrays is None:
        return leaf
    shape = (*leaf.shape[:-1], _COLUMNS) if varies else leaf.shape
    if leaf.dtype.kind in "fc":
        return _arbitrary(shape, leaf.dtype)
    # f may branch on integers, so those of the first trajectories are used.
    return np.resize((leaf if arrays is None else arrays.to_host(leaf)).T, shape[::-1]).T


def _arbitrary(shape: Shape, dtype: DTypeLike) -> Array:
    """Return distinct numbers between 0.5 and 1.5."""
    return (1 + 0.5 * np.sin(1 + 2.3 * np.arange(math.prod(shape)))).reshape(shape).astype(dtype)
