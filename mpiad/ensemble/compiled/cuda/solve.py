"""`solved_on_gpu`: an ensemble by a kernel on a device, from its batch to its solution."""

from __future__ import annotations

import autograd.numpy as anp
from autograd.tracer import isbox

from mpiad._typing import Array, Shape
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.compiled.cuda.choice import fits, program_for_gpu
from mpiad.ensemble.compiled.cuda.differentiable import FEW, Solved, states_of
from mpiad.ensemble.compiled.cuda.solver import Directions, Solver
from mpiad.ensemble.compiled.cuda.specimen import lives_on_device, specimen
from mpiad.ensemble.compiled.layout import Layout, layout_of
from mpiad.ensemble.compiled.solver import Compiler
from mpiad.ensemble.device_solution import DeviceSolution, Statistics, count_failed
from mpiad.ensemble.gpu import EnsembleGPU
from mpiad.ensemble.settings import Settings
from mpiad.ensemble.trial import try_once
from mpiad.transport.device_arrays import ArrayModule, arrays_of
from mpiad.transport.device_kernels import selected_arrays

__all__ = ["device_for", "solved_on_gpu"]


def device_for(batch: Batch) -> ArrayModule:
    """Return the device that solves a batch of plain arrays: where they live, else this rank's.

    Raises
    ------
    ImportError, RuntimeError
        Without CuPy, or without a GPU.
    """
    for x in (batch.u0, *batch.p.leaves):
        arrays = arrays_of(x)
        if arrays is not None:
            return arrays
    try:
        return selected_arrays()
    except (ImportError, RuntimeError) as error:
        raise type(error)(
            f"EnsembleGPU: {error}. On the CPU EnsembleVectorized() with compile=True runs the same solve as a kernel."
        ) from error


def solved_on_gpu(
    gpu: EnsembleGPU, compiler: Compiler, given: Batch, batch: Batch, settings: Settings
) -> DeviceSolution | None:
    """Solve all trajectories of a batch by a kernel; None where EnsembleVectorized must.

    Parameters
    ----------
    gpu : EnsembleGPU
    compiler : Compiler
    given : Batch
        With traced values in it.
    batch : Batch
        The same as plain arrays, on a device or on the host.
    settings : Settings

    Raises
    ------
    ImportError, RuntimeError
        Without CuPy, or without a GPU.
    """
    arrays, on_host = device_for(batch), not lives_on_device(batch)
    host = batch if on_host and batch.size else specimen(batch)
    program = program_for_gpu(compiler.compile, given, host, settings, compiler.adjoint)
    if program is None:
        return None
    try_once(host, (), given.traced)
    layout = layout_of(host.p)
    solver = Solver(gpu, arrays, program, batch, settings, layout, compiler.told)
    directions = _directions(compiler, solver, given, layout) if given.traced else ()
    carried = directions if len(directions) <= FEW else ()
    if not fits(solver.kernel(carried), batch, compiler.compile is True):
        return None
    flight = solver.solved(carried)
    solved = Solved(solver, flight, carried, bool(directions), on_host)
    u, u_end = states_of(solved, given)
    if settings.progress is not None:
        settings.progress(batch.size)
    alg, at_start = settings.alg, 1 if settings.dt is not None else 2
    statistics = Statistics(
        arrays, flight.codes, flight.t_reached, flight.naccept, flight.nreject, count_failed(arrays, flight.codes),
        (at_start, alg.tableau.stages - 1),
    )  # fmt: skip
    return DeviceSolution.of(_shaped(u, batch.shape), settings.saveat, _shaped(u_end, batch.shape), statistics)


def _directions(compiler: Compiler, solver: Solver, given: Batch, layout: Layout) -> Directions:
    """Return along which numbers of a trajectory a gradient takes tangents: none where it takes the adjoint."""
    if compiler.gradient == "adjoint":
        return ()
    found = [("state", c) for c in range(solver.d)] if isbox(given.u0) else []
    for part in layout.parts:
        if isbox(given.p.leaves[part.place]):
            found += [("parameter", j) for j in part.scalars]
    return tuple(found) if len(found) <= FEW or compiler.gradient == "tangent" else ()


def _shaped(x: Array, shape: Shape) -> Array:
    """Return states, along the last axis, in their shape; what is one row stays the view that it is."""
    return x if len(shape) == 1 else anp.reshape(x, (*x.shape[:-1], *shape))
