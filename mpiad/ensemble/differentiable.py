"""A solve as one differentiable operator, `solve_operator`, and its derivatives for solves by NumPy or a CPU kernel.

For plain arrays the derivatives are computed by an adjoint or by tangents, in a kernel if possible. If these derivatives
are differentiated again, traceable functions repeat ("replay") the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Protocol

import autograd.numpy as anp
import numpy as np
from autograd.extend import defjvp, defjvp_argnums, defvjp, defvjp_argnums, primitive
from autograd.tracer import isbox

from mpiad._typing import Array
from mpiad.device import to_host
from mpiad.device.assembly import stack
from mpiad.differentiation.concatenation import Concatenation
from mpiad.differentiation.gradient import cotangents_of_variables
from mpiad.differentiation.trace import Variables, trace_backwards, trace_forwards
from mpiad.ensemble.adjoint import Cotangents, pull_run
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.compiled.kernel_derivatives import pull_compiled
from mpiad.ensemble.directions import (
    LEAVES,
    NO_TIMES,
    TIMES,
    contracted,
    cotangent_of,
    push_directions,
    pushed,
)
from mpiad.ensemble.events import EventRows, traced_times
from mpiad.ensemble.replay import replayed
from mpiad.ensemble.run import Run, Seeds
from mpiad.ensemble.solution import EnsembleSolution, at_ends, changed
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.primitives.operation import StackedVjp
from mpiad.transport.devices.device_arrays import is_device_array

# All results form one vector, so the backward sweep begins with the cotangents of all results. The solve is computed with
# plain arrays; afterwards the trace records `solve_operator` with the computed value. The derivatives are implemented in
# this file for solves by NumPy or a CPU kernel, in `compiled.cuda.gpu_solve` for kernels on GPUs, and in
# `steady_state` for searches for steady states.


class DifferentiableSolve(Protocol):
    """The results of a solve and their derivatives; `argnums` are positions of arguments."""

    @property
    def vector(self) -> Array:
        """All results, concatenated."""
        ...

    def pull(self, argnums: Sequence[int], args: Sequence[Array], g: Array) -> Mapping[int, Array]:
        """Return the cotangents of arguments, given the cotangent g of the vector; for plain arrays."""
        ...

    def push(self, args: Sequence[Array], tangents: Mapping[int, Array]) -> Array:
        """Return the tangent of the vector, given the tangents of arguments; for plain arrays."""
        ...

    def pull_traced(self, argnums: Sequence[int], args: Sequence[Array], g: Array) -> list[Array]:
        """Return the cotangents of arguments, computed by traceable functions."""
        ...

    def push_traced(self, argnums: Sequence[int], args: Sequence[Array], gs: Sequence[Array]) -> Array:
        """Return the tangent of the vector, computed by traceable functions."""
        ...


@primitive
def solve_operator(*args: Any, solved: DifferentiableSolve) -> Array:
    """Return the results of a solve, or of a search for steady states."""
    return solved.vector


def _vjp(argnums: tuple[int, ...], ans: Array, args: tuple, kwargs: dict) -> Callable:
    solved: DifferentiableSolve = kwargs["solved"]
    traced = any(map(isbox, args))

    def vjp(g: Array) -> Sequence[Array]:
        if traced:
            return solved.pull_traced(argnums, args, g)
        g = conform(g, *spec_like(ans))
        if isbox(g):
            linear = _LinearMap(solved, argnums, args)
            return linear.inputs.parts(_pulled(g, linear=linear))
        cotangents = solved.pull(argnums, args, g)
        return [conform(cotangents[k], *spec_like(args[k])) for k in argnums]

    return vjp


def _jvp(argnums: tuple[int, ...], gs: Sequence[Array], ans: Array, args: tuple, kwargs: dict) -> Array:
    solved: DifferentiableSolve = kwargs["solved"]
    if any(map(isbox, args)):
        return solved.push_traced(argnums, args, gs)
    if any(map(isbox, gs)):
        linear = _LinearMap(solved, argnums, args)
        return _pushed(linear.inputs.vector(gs), linear=linear)
    return solved.push(args, {k: conform(g, *spec_like(args[k])) for k, g in zip(argnums, gs)})


defvjp_argnums(solve_operator, _vjp)
defjvp_argnums(solve_operator, _jvp)

# The derivative of `solve_operator` at plain arguments is linear, so its products are operators that are each other's
# transposes. A function that is linearized calls no replay.


class _LinearMap:
    """The derivative with respect to some arguments, whose tangents and cotangents form one vector, `inputs`."""

    def __init__(self, solved: DifferentiableSolve, argnums: Sequence[int], args: Sequence[Array]):
        self.solved, self.argnums, self.args = solved, argnums, args
        self.inputs = Concatenation([spec_like(args[k]) for k in argnums])


@primitive
def _pulled(g: Array, *, linear: _LinearMap) -> Array:
    if not is_device_array(g) and not g.any():
        return linear.inputs.zeros()  # as for the record of the transposed map, whose kernel isn't needed then
    cotangents = linear.solved.pull(linear.argnums, linear.args, g)
    return linear.inputs.vector([cotangents[k] for k in linear.argnums])


@primitive
def _pushed(tangents: Array, *, linear: _LinearMap) -> Array:
    return linear.solved.push(linear.args, dict(zip(linear.argnums, linear.inputs.parts(tangents))))


def _pulled_vjp(argnums: tuple[int, ...], ans: Array, args: tuple, kwargs: dict) -> Callable:
    linear: _LinearMap = kwargs["linear"]

    def push_stacked(tangents: Array) -> Sequence[Array]:
        if type(linear.solved) is not _SolvedRun or type(tangents) is not np.ndarray:
            return [stack([_pushed(tangent, linear=linear) for tangent in tangents])]
        return [linear.solved.push_several(linear.args, dict(zip(linear.argnums, linear.inputs.parts_of_rows(tangents))))]

    return StackedVjp(lambda tangents: [_pushed(tangents, linear=linear)], push_stacked, spec_like(ans))


defvjp_argnums(_pulled, _pulled_vjp)
defvjp(_pushed, lambda ans, tangents, *, linear: lambda g: _pulled(g, linear=linear))
defjvp(_pulled, "same")
defjvp(_pushed, "same")


def differentiable(
    sol: EnsembleSolution,
    run: Run,
    batch: Batch,
    due: Array = NO_TIMES,
    events: Callable[[Array, Array], EventRows] | None = None,
) -> EnsembleSolution:
    """Return a solution whose states and times are functions of the traced `batch`, given the plain solution `sol`.

    If events act: `due`, their given times; ``events(reached, crossed)`` returns the events for traced times.
    """
    count, d, ends = run.batch.size, len(run.batch.u0), run.settings.ends
    saved = np.empty((count, 0, d), run.batch.u0.dtype) if ends else sol.u.reshape(count, sol.u.shape[1], d)
    solved = _SolvedRun(run, saved, sol.u_end.reshape(count, d))
    vector = solve_operator(batch.u0, batch.start, batch.end, due, *batch.p.leaves, solved=solved)
    part = cache(partial(solved.layout.part, vector))
    shape = sol.u_end.shape
    if ends:
        return at_ends(sol, lambda: batch.u0, anp.reshape(part(1), shape))
    # A program reads few of the results, and each one that it reads takes several operations.
    later: dict[str, Callable[[], object]] = {"u_end": lambda: anp.reshape(part(1), shape)}
    # If the kernel has propagated the tangents of states only, events occur at constant times.
    if run.settings.events and (run.outcome.carried is None or run.outcome.event_tangents is not None):

        def of_table() -> EventRows:
            ids, event, _, _, when = run.outcome.event_table  # type: ignore[misc]
            ids = ids.astype(int)
            times = traced_times(ids, when, run.crossed_row, run.live, *map(to_host, (part(2), part(3))))
            return EventRows(ids, event.astype(int), times)

        later["t_reached"] = lambda: to_host(part(2))
        if events is not None:
            later["_event_rows"] = lambda: events(to_host(part(2)), to_host(part(3)))
        elif run.outcome.event_table is not None:
            later["_event_rows"] = of_table
    u = part(0)
    return changed(sol, later, u=u if u.shape == sol.u.shape else anp.reshape(u, sol.u.shape))


class _SolvedRun:
    """A run, and its results as one vector: saved states, final states, and with events the final times and event times."""

    def __init__(self, run: Run, u: Array, u_end: Array):
        self._run = run
        times = (run.event_times.reached, run.event_times.crossed) if run.settings.events else ()
        values = [u, u_end, *times]
        self.layout = Concatenation([spec_like(value) for value in values])
        self.vector = self.layout.vector(values)

    # ---- reverse mode

    def pull(self, argnums: Sequence[int], args: Sequence[Array], g: Array) -> dict[int, Array]:
        saved, end, *times = self.layout.parts(g)
        run, seeds = self._run, self._run.seeds(saved, end, times)
        if run.settings.gradient == "tangent" or run.outcome.carried is not None:
            return contracted(run, argnums, args, pushed(run, seeds, argnums, args))
        bars = self._adjoint(seeds, [k - LEAVES for k in argnums if k >= LEAVES], not TIMES.isdisjoint(argnums))
        return {k: run.on_host(bar) if k in TIMES else bar for k in argnums for bar in [cotangent_of(bars, k, args)]}

    def _adjoint(self, seeds: Seeds, places: Sequence[int], timed: bool) -> Cotangents:
        solver = self._run.outcome.solver
        if solver is None or (self._run.jumps is not None and np.iscomplexobj(self._run.batch.u0)):
            return pull_run(self._run, seeds, places, timed)
        return pull_compiled(solver, self._run, seeds, places, timed)

    # ---- forward mode

    def push(self, args: Sequence[Array], tangents: Mapping[int, Array]) -> Array:
        return self.layout.vector([gs[0] for gs in push_directions(self._run, args, {k: [g] for k, g in tangents.items()})])

    def push_several(self, args: Sequence[Array], tangents: Mapping[int, Array]) -> Array:
        """Return the tangents of the vector in several directions, which are the first axis of all tangents."""
        return self.layout.rows(push_directions(self._run, args, tangents))

    # ---- by traceable functions

    def pull_traced(self, argnums: Sequence[int], args: Sequence[Array], g: Array) -> list[Array]:
        variables = Variables(list(args), list(argnums), list)
        traced = trace_backwards(self._replayed, variables)
        seeds = [(place, conform(g, *spec_like(value))) for place, value in zip(traced.places, traced.values) if place >= 0]
        return cotangents_of_variables(traced, seeds, variables)

    def push_traced(self, argnums: Sequence[int], args: Sequence[Array], gs: Sequence[Array]) -> Array:
        tangents = [conform(g, *spec_like(args[k])) for k, g in zip(argnums, gs)]
        return trace_forwards(self._replayed, Variables(list(args), list(argnums), list), tangents)[1]

    def _replayed(self, args: Sequence[Array]) -> Array:
        u0, start, end, due, *leaves = args
        return self.layout.vector(replayed(self._run, u0, start, end, leaves, due))
