"""A solve as one differentiable operator, `solve_operator`, and its derivatives for solves by NumPy or a CPU kernel.

For plain arrays the derivatives are computed by an adjoint or by tangents, in a kernel if possible. If these derivatives
are differentiated again, traceable functions repeat ("replay") the steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import autograd.numpy as anp
import numpy as np
from autograd.extend import defjvp_argnums, defvjp_argnums, primitive
from autograd.tracer import isbox

from mpiad._typing import Array
from mpiad.device import to_host
from mpiad.differentiation.concatenation import Concatenation
from mpiad.ensemble.adjoint import Cotangents, pull_run
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.compiled.reverse_sweep import carried_tangents, pull_compiled
from mpiad.ensemble.directions import Number, contracted, numbers, numbers_of, product_per_trajectory, pushed
from mpiad.ensemble.events import by_trajectory, traced_times
from mpiad.ensemble.field_jacobian import derived, second_adjoint_program
from mpiad.ensemble.replay import replayed, replayed_jvp, replayed_vjp
from mpiad.ensemble.run import Run, Seeds
from mpiad.ensemble.solution import EnsembleSolution, at_ends
from mpiad.ensemble.tangents import Directions, SavedTangents, push_run
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.transport.devices.device_arrays import is_device_array

# All results form one vector, so the backward sweep begins with the cotangents of all results. The solve is computed with
# plain arrays; afterwards the trace records `solve_operator` with the computed value. The derivatives are implemented in
# this file for solves by NumPy or a CPU kernel, in `compiled.cuda.gpu_solve` for kernels on GPUs, and in
# `steady_state` for searches for steady states.


# Positions of arguments: initial states, start and end of tspan, given times of events, and first leaf of the parameters.
U0, START, END, DUE, LEAVES = range(5)
NO_TIMES = np.empty((0, 0))


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

    def vjp(g: Array) -> list[Array]:
        if traced or isbox(g):
            return solved.pull_traced(argnums, args, g)
        found = solved.pull(argnums, args, conform(g, *spec_like(ans)))
        return [conform(found[k], *spec_like(args[k])) for k in argnums]

    return vjp


def _jvp(argnums: tuple[int, ...], gs: Sequence[Array], ans: Array, args: tuple, kwargs: dict) -> Array:
    solved: DifferentiableSolve = kwargs["solved"]
    if any(map(isbox, (*args, *gs))):
        return solved.push_traced(argnums, args, gs)
    return solved.push(args, {k: conform(g, *spec_like(args[k])) for k, g in zip(argnums, gs)})


defvjp_argnums(solve_operator, _vjp)
defjvp_argnums(solve_operator, _jvp)


def differentiable(sol: EnsembleSolution, run: Run, batch: Batch) -> EnsembleSolution:
    """Return a solution whose states and times are functions of the traced `batch`, given the plain solution `sol`."""
    count, d, ends = run.batch.size, len(run.batch.u0), run.settings.ends
    saved = np.empty((count, 0, d), run.batch.u0.dtype) if ends else sol.u.reshape(count, sol.u.shape[1], d)
    u, u_end, *times = traced_results(run, saved, sol.u_end.reshape(count, d), batch)
    if ends:
        return at_ends(sol, lambda: batch.u0, anp.reshape(u_end, sol.u_end.shape))
    changes = {"u": anp.reshape(u, sol.u.shape), "u_end": anp.reshape(u_end, sol.u_end.shape)}
    if times:
        reached, crossed = map(to_host, times)
        changes["t_reached"] = reached
        if run.outcome.event_table is not None:
            ids, event, _, _, when = run.outcome.event_table
            when = traced_times(ids.astype(int), when, run.crossed_row, run.live, reached, crossed)
            changes["events"] = by_trajectory(ids, event, when)
    return dataclasses.replace(sol, **changes)


def traced_results(run: Run, saved: Array, u_end: Array, batch: Batch, due: Array = NO_TIMES) -> list[Array]:
    """Return the results of a run as functions of a traced batch.

    The results are `saved` of shape (N, n_saved, d), `u_end` of shape (N, d), and with events the final times of shape (N,)
    and the times of events of shape (m,). `due` of shape (times, N) are the given times of events.
    """
    solved = _SolvedRun(run, saved, u_end)
    return solved.layout.parts(solve_operator(batch.u0, batch.start, batch.end, due, *batch.p.leaves, solved=solved))


class _SolvedRun:
    """A run, and its results as one vector: saved states, final states, and with events the final times and event times."""

    def __init__(self, run: Run, u: Array, u_end: Array):
        self._run, self._settings = run, run.settings
        values = [u, u_end, *((run.reached, run.crossed) if run.settings.events else ())]
        self.layout = Concatenation([spec_like(value) for value in values])
        self.vector = self.layout.vector(values)

    @property
    def _needs_replay(self) -> bool:
        """Whether only a replay can differentiate the steps: for a Rosenbrock method if f can't be traced to a program."""
        return self._run.tableau.implicit and isinstance(derived(second_adjoint_program, self._run.batch), str)

    # ---- reverse mode

    def pull(self, argnums: Sequence[int], args: Sequence[Array], g: Array) -> dict[int, Array]:
        saved, end, *times = self.layout.parts(g)
        run, seeds = self._run, self._run.seeds(saved, end, times)
        if self._needs_replay and self._settings.gradient != "tangent":
            return dict(zip(argnums, self.pull_traced(argnums, args, g)))
        places = [k - LEAVES for k in argnums if k >= LEAVES]
        timed = not {START, END, DUE}.isdisjoint(argnums)
        if self._uses_tangents(U0 in argnums, timed, places):
            if timed or run.settings.events or self._needs_replay:
                return self._replayed_tangents(argnums, args, seeds)
            parts = self._carried(U0 in argnums, places, seeds) or pushed(run, seeds, U0 in argnums, places)
            u0, leaves = contracted(run, U0 in argnums, places, parts)
            return {k: u0 if k == U0 else leaves[k - LEAVES] for k in argnums}
        bars = self._adjoint(seeds, places, timed)
        getters = {U0: lambda: bars.u0, START: lambda: run.on_host(bars.start), END: lambda: run.on_host(bars.end)}
        getters[DUE] = lambda: _padded(bars.due, args[DUE])
        return {k: getters[k]() if k < LEAVES else bars.leaves[k - LEAVES] for k in argnums}

    def _adjoint(self, seeds: Seeds, places: Sequence[int], timed: bool) -> Cotangents:
        solver = self._run.outcome.solver
        if solver is None or (self._run.jumps is not None and np.iscomplexobj(self._run.batch.u0)):
            return pull_run(self._run, seeds, places, timed)
        return pull_compiled(solver, self._run, seeds, places, timed)

    def _uses_tangents(self, by_u0: bool, timed: bool, places: Sequence[int]) -> bool:
        settings, run = self._settings, self._run
        if settings.gradient is not None:
            return settings.gradient == "tangent"
        # If the times of steps depend on the inputs, tangents need a replay per direction, which is slow. The choice must
        # not depend on whether events have occurred, since then a trajectory's results would depend on other trajectories.
        if timed or run.settings.events:
            return False
        if run.outcome.solver is not None:
            return run.outcome.carried is not None
        return len(numbers_of(run, by_u0, places)) <= run.few

    def _carried(self, by_u0: bool, places: Sequence[int], seeds: Seeds) -> list[tuple[Number, Array]] | None:
        """Return the same as `pushed`, from tangents that a kernel has propagated; None if no kernel did this."""
        run, solver = self._run, self._run.outcome.solver
        found = None if solver is None else carried_tangents(solver, run, by_u0, places, seeds.saved is not None)
        if found is None:
            return None
        end, saved = found
        seeds = seeds._replace(end=run.masked(seeds.end))
        parts = [product_per_trajectory(seeds, end[j], None if saved is None else saved[j]) for j in range(len(end))]
        return list(zip(numbers_of(run, by_u0, places), parts))

    def _replayed_tangents(self, argnums: Sequence[int], args: Sequence[Array], seeds: Seeds) -> dict[int, Array]:
        found, run = {}, self._run
        reached = None if seeds.reached is None else run.masked(seeds.reached)
        saved = None if seeds.saved is None else seeds.saved[:, : run.n_saved]
        seeds = seeds._replace(end=run.masked(seeds.end), reached=reached, saved=saved)
        for k in argnums:
            varies = k < LEAVES or run.batch.p.varies[k - LEAVES]
            total = np.zeros_like(args[k])
            for index, unit in numbers(args[k], varies):
                direction = np.zeros_like(args[k])
                direction[index] = unit
                u, end, *times = self.layout.parts(self.push_traced((k,), args, [direction]))
                final, crossed = times or (None, None)
                part = product_per_trajectory(seeds, np.swapaxes(end, 0, 1), u, final, crossed, run)
                part = part if unit == 1.0 else -1j * part
                part = part if varies else part.sum()
                total[index] += part if is_device_array(args[k]) else run.on_host(part)
            found[k] = total
        return found

    # ---- forward mode

    def push(self, args: Sequence[Array], tangents: Mapping[int, Array]) -> Array:
        run, given = self._run, dict(tangents)
        if not given.keys().isdisjoint({START, END, DUE}) or run.settings.events or self._needs_replay:
            return self.push_traced(tuple(given), args, list(given.values()))
        u0 = given.pop(U0) if U0 in given else np.zeros_like(args[U0])
        directions = Directions(u0[None], {k - LEAVES: [g] for k, g in given.items()})
        to_save = SavedTangents(run, directions) if run.n_saved else None
        end = push_run(run, directions, to_save)
        saved = self.layout.specs[0].zeros() if to_save is None else to_save.saved[0, :, : run.n_saved]
        return self.layout.vector([saved, np.swapaxes(end[0], 0, 1)])

    # ---- by traceable functions

    def pull_traced(self, argnums: Sequence[int], args: Sequence[Array], g: Array) -> list[Array]:
        return replayed_vjp(self._replayed, argnums, args, g)

    def push_traced(self, argnums: Sequence[int], args: Sequence[Array], gs: Sequence[Array]) -> Array:
        return replayed_jvp(self._replayed, argnums, args, gs)

    def _replayed(self, args: Sequence[Array]) -> Array:
        u0, start, end, due, *leaves = args
        return self.layout.vector(replayed(self._run, u0, start, end, leaves, due))


def _padded(cotangents: Array, due: Array) -> Array:
    """Return `cotangents` in the shape of `due`, without the last row, which is zero."""
    found = np.zeros_like(due)
    if len(cotangents):
        found[: len(cotangents) - 1] = cotangents[:-1]
    return found
