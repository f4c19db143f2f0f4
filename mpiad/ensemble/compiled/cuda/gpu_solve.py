"""`solved_on_gpu`: the solve of an ensemble by a kernel on a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.core import JVPNode
from autograd.tracer import isbox

from mpiad._typing import Array, Shape
from mpiad.device import to_host
from mpiad.device.transfer import array_to_device
from mpiad.ensemble.backends import device_for
from mpiad.ensemble.batch import Batch, is_on_device, with_states_on_device
from mpiad.ensemble.compiled.cuda.gpu_derivatives import Solved, results_of
from mpiad.ensemble.compiled.cuda.gpu_inputs import sample_batch
from mpiad.ensemble.compiled.cuda.gpu_solver import Solver
from mpiad.ensemble.compiled.kernel_choice import Compiler, refuse_mass_on_device
from mpiad.ensemble.compiled.trace import packing_of
from mpiad.ensemble.compiled.traced_problem import FEW, TracedProblem, problem_of, remembered
from mpiad.ensemble.event import Event
from mpiad.ensemble.events import by_trajectory, in_order, traced_times
from mpiad.ensemble.outcome import ReturnCode, came_through, evaluations
from mpiad.ensemble.settings import Settings
from mpiad.ensemble.solution import EnsembleSolution
from mpiad.ensemble.trial import try_once
from mpiad.transport.devices.device_arrays import ArrayModule, DeviceKernel

# Maximum local memory per thread. With more, spilled registers cause about as much memory traffic as array operations.
MOST_LOCAL_BYTES = 8192


class DeviceSolution(EnsembleSolution):
    """`EnsembleSolution` whose return codes, times, counts and events are copied to the host on first access."""

    failed: int  # number of failed trajectories, the only number that each solve copies to the host

    @property
    def all_succeeded(self) -> bool:
        """Whether all trajectories are known to have reached their ends, without copies to the host."""
        return self.__dict__.get("failed") == 0

    def _surviving(self) -> Array:
        return self.u if self.all_succeeded else super()._surviving()


def solved_on_gpu(
    compiler: Compiler, given: Batch, batch: Batch, settings: Settings, by_arrays: Callable[..., EnsembleSolution]
) -> EnsembleSolution:
    """Solve a batch by a kernel if possible, otherwise by ``by_arrays(given, batch, settings)``.

    `given` is the batch with traced values, `batch` the same batch with plain values, on a device or on the host. Raises
    ImportError or RuntimeError without CuPy or a GPU; NotImplementedError for a mass matrix and arrays on a device.
    """
    on_host = not is_on_device(batch)
    if not on_host:
        refuse_mass_on_device(settings)
    arrays = device_for(batch, compiler.together)
    with arrays.current():
        sol = _by_kernel(compiler, given, batch, settings, arrays)
    if sol is not None:
        return sol
    compiler.compile = False  # CPU kernels aren't used, either
    if not on_host:
        return by_arrays(given, with_states_on_device(batch), settings)
    on_device = _on_device(given, arrays)
    sol = by_arrays(on_device, on_device.plain(), settings)
    return dataclasses.replace(sol, u=to_host(sol.u), u_end=to_host(sol.u_end))


def _on_device(given: Batch, arrays: ArrayModule) -> Batch:
    """Return a batch, traced or not, with its arrays on a device."""
    leaves = [array_to_device(leaf, arrays) if anp.ndim(leaf) else leaf for leaf in given.p.leaves]
    return given._replace(u0=array_to_device(given.u0, arrays), p=given.p._replace(leaves=leaves))


def _by_kernel(
    compiler: Compiler, given: Batch, batch: Batch, settings: Settings, arrays: ArrayModule
) -> DeviceSolution | None:
    on_host = not is_on_device(batch)
    traced = problem_for_gpu(compiler, given, batch, settings)
    if traced is None:
        return None
    solver = Solver(compiler, arrays, traced, batch, settings)
    by_tangents = given.traced and not settings.events and not settings.alg.tableau.implicit
    directions = traced.carried(given, settings.gradient) if by_tangents else ()
    carried = directions if len(directions) <= FEW else ()  # otherwise tangents are propagated later, a few at a time
    if carried and settings.gradient is None and solver.kernel(carried).local_bytes > MOST_LOCAL_BYTES:
        directions = carried = ()  # the kernels of an adjoint are smaller
    if not fits(solver.kernel(carried), batch, compiler):
        return None
    solved = Solved(solver, solver.solved(carried), carried, bool(directions), on_host)
    u, u_end, *times = results_of(solved, given)
    if settings.progress is not None:
        settings.progress(batch.size)
    u, u_end, failed = _shaped(u, batch.shape), _shaped(u_end, batch.shape), arrays.to_host(solved.results.failed)
    deferred, saveat = _deferred(solved, settings, times), settings.saveat
    sol = DeviceSolution.lazy(deferred, u=u, t=saveat, u_end=u_end, failed=int(failed[0]), alg=settings.alg)
    if times:
        sol.t_reached = times[0]
    return sol


def _deferred(solved: Solved, settings: Settings, times: Sequence[Array]) -> dict[str, Callable[[], Any]]:
    """Return functions for the fields of a solution that are copied to the host on first access."""
    # The functions don't refer to states, so that the memory of the states can be released.
    results, arrays, alg, has_dt = solved.results, solved.solver.arrays, settings.alg, settings.dt is not None
    codes, reached, counts = results.codes, results.t_reached, (results.naccept, results.nreject)
    rows = None if results.rows is None else results.rows[:5, : results.found_events]
    naccept, nreject = (lambda x=x: arrays.to_host(x).astype(np.int64) for x in counts)
    return {
        "retcode": lambda: ReturnCode.names_of(arrays.to_host(codes)),
        "t_reached": lambda: arrays.to_host(reached),
        "naccept": naccept,
        "nreject": nreject,
        "nf": lambda: evaluations(naccept(), nreject(), alg, has_dt),
        "events": dict if rows is None else partial(_events, arrays, codes, rows, settings.events, times),
    }


def _events(arrays: ArrayModule, codes: Array, rows: Array, events: Sequence[Event], times: Sequence[Array]) -> dict:
    """Return the events of all trajectories; `times`: traced end times and event times, or empty."""
    if not rows.size:
        return {}
    table = arrays.to_host(arrays.contiguous(rows))
    order = in_order(table)
    (ids, event), when = table[:2, order].astype(int), table[4, order]
    if times:
        indices = np.where(np.array([each.stops for each in events])[event], -1, order)
        when = traced_times(ids, when, indices, came_through(arrays.to_host(codes)), *times)
    return by_trajectory(ids, event, when)


def _shaped(x: Array, shape: Shape) -> Array:
    """Reshape the last axis, the components of states, to `shape`."""
    return x if len(shape) == 1 else anp.reshape(x, (*x.shape[:-1], *shape))


def problem_for_gpu(compiler: Compiler, given: Batch, batch: Batch, settings: Settings) -> TracedProblem | None:
    """Return the problem to compile; if that is impossible, warn and return None, or raise with ``compile=True``."""
    if compiler.compile is False:
        return None
    must = compiler.compile is True
    reason = _unsupported(given, batch, settings)
    if reason is None:

        def make(known: bool) -> TracedProblem | None:
            host = sample_batch(batch) if is_on_device(batch) or not batch.size else batch
            traced = problem_of(host, settings.events, must, compiler.warn)
            if traced is not None and not known:
                try_once(host, settings.events, given.traced)
            return traced

        return remembered(make, batch, settings.events, given.traced, must, "gpu")
    if must:
        raise ValueError(f"solve: compile=True, but {reason}. Leave compile out, or pass compile=False.")
    compiler.warn(given.f, f"EnsembleGPU: {reason}, so EnsembleVectorized solves the problem by array operations")
    return None


def _unsupported(given: Batch, batch: Batch, settings: Settings) -> str | None:
    if batch.u0.dtype not in (np.float64, np.float32):
        return f"u0 has dtype {batch.u0.dtype}, and kernels on GPUs support only float64 and float32"
    if any(part.complex for part in packing_of(batch.p).parts):
        return "p has complex numbers, and kernels on GPUs support only real numbers"
    if settings.saveat is None:
        return "kernels don't support save_everystep=True"
    if isbox(given.start) or isbox(given.end):
        return "the solve is differentiated with respect to tspan, which kernels don't support"
    if len(_traces(given)) > 1:
        return "the solve is differentiated twice, and kernels support only first derivatives"
    adjoint_only = "with events=" if settings.events else "of Rosenbrock methods" if settings.alg.tableau.implicit else ""
    by_jvp = any(isbox(x) and isinstance(x._node, JVPNode) for x in (given.u0, *given.p.leaves))
    if adjoint_only and given.traced and (settings.gradient == "tangent" or by_jvp):
        return f"the solve is differentiated by tangents, and kernels {adjoint_only} support only adjoints"
    return None


def _traces(given: Batch) -> set[int]:
    found = set()
    for x in (given.u0, *given.p.leaves):
        while isbox(x):
            found.add(x._trace)
            x = x._value
    return found


def fits(kernel: DeviceKernel, batch: Batch, compiler: Compiler) -> bool:
    """Return whether a kernel is small enough, or required by ``compile=True``; if it is too large, log a warning."""
    must = compiler.compile is True
    if kernel.local_bytes <= MOST_LOCAL_BYTES:
        return True
    text = (
        f"EnsembleGPU: each thread of the kernel takes {kernel.local_bytes} bytes of local memory besides its "
        f"{kernel.registers} registers, more than {MOST_LOCAL_BYTES}"
    )
    compiler.warn(batch.f, text if must else f"{text}, so EnsembleVectorized solves the problem by array operations")
    return must
