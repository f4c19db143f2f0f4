"""`solved_on_gpu`: the solve of an ensemble by a kernel on a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import NoReturn

import autograd.numpy as anp
import numpy as np
from autograd.core import JVPNode
from autograd.tracer import isbox

from mpiad._typing import Array, Shape
from mpiad.compiling.arguments import is_complex
from mpiad.device import to_host
from mpiad.device.transfer import array_to_device
from mpiad.ensemble.backends import device_for
from mpiad.ensemble.batch import Batch, is_on_device
from mpiad.ensemble.compiled.cuda.gpu_solver import DeviceResults, Directions, Solver, device_rows, sample_batch
from mpiad.ensemble.compiled.kernel_choice import Compiler, refuse_mass_on_device
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
from mpiad.transport.devices.device_arrays import ArrayModule, DeviceKernel, is_device_array

# Maximum local memory per thread. With more, spilled registers cause about as much memory traffic as array operations.
MOST_LOCAL_BYTES = 8192


class DeviceSolution(EnsembleSolution):
    """`EnsembleSolution` whose return codes, times, counts and events are copied to the host on first access."""

    @property
    def all_succeeded(self) -> bool:
        """Whether all trajectories are known to have succeeded; at most one number is copied to the host to find out."""
        return getattr(self, "failed", None) == 0  # a deferred field of solutions that weren't gathered

    def _surviving(self) -> Array:
        return self.u if self.all_succeeded else super()._surviving()


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
    by_tangents = inputs.traced and not settings.events and not settings.alg.tableau.implicit
    directions = traced.carried(inputs, settings.gradient) if by_tangents else ()
    carried = directions if len(directions) <= FEW else ()  # otherwise tangents are propagated later, a few at a time
    if carried and settings.gradient is None and solver.kernel(carried).local_bytes > MOST_LOCAL_BYTES:
        directions = carried = ()  # the kernels of an adjoint are smaller
    if not fits(solver.kernel(carried), batch, compiler):
        return None
    solved, times = Solved(solver, solver.solved(carried), carried, bool(directions), on_host, inputs.traced), []
    arguments = inputs.u0, inputs.start, inputs.end, NO_TIMES, *inputs.p.leaves
    vector = solve_operator(*arguments, solved=solved) if inputs.traced else solved.vector
    if solved.timed:
        # In a vector with times, states are double.
        end = solved.results.vector.size
        times = [to_host(vector[end : end + solver.count]), to_host(vector[end + solver.count :])]
        vector = vector[:end] if vector.dtype == solver.real else vector[:end].astype(solver.real)
    saved, last = solver.parts(vector)
    if settings.progress is not None:
        settings.progress(batch.size)
    u_end = _shaped(last.T, batch.shape)
    sol = DeviceSolution.lazy(_deferred(solved, settings, times), t=settings.saveat, u_end=u_end, alg=settings.alg)
    if settings.ends:
        sol.t = batch.both_ends()
        return at_ends(sol, lambda: inputs.u0, u_end)
    sol.u = _shaped((last[None][:0] if saved is None else saved).transpose((2, 0, 1)), batch.shape)
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
            for k, direction in enumerate(directions):
                row = np.sum(results.du_end[k] * end_bar, axis=0)
                if saved_bar is not None:
                    row = row + np.sum(results.dsaved[k] * saved_bar, axis=(0, 1))
                # Tangents of failed trajectories may be NaN, which a factor of zero wouldn't remove.
                cotangents[direction] = np.where(came_through(results.codes), row, 0)
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
