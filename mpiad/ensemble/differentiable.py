"""A solve as one differentiable function: from initial states, tspan and parameters to final and saved states.

All results make one vector, so that its cotangent comes back whole: reverse mode is one sweep over the steps. The solve
itself has run before, on plain arrays; what a trace records is this function of its inputs, whose value is known.

Plain arrays are differentiated by `adjoint` and `tangents`. Where something is traced in a further trace around, the steps
are replayed in functions that this trace sees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.extend import defjvp_argnums, defvjp_argnums, primitive
from autograd.tracer import isbox

from mpiad._typing import Array
from mpiad.device import to_host
from mpiad.differentiation.concatenation import Concatenation
from mpiad.ensemble.adjoint import pull_run
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.compiled.forward_tangents import carried_tangents
from mpiad.ensemble.compiled.reverse_sweep import pull_compiled
from mpiad.ensemble.continuous import pull_continuous
from mpiad.ensemble.directions import Number, contracted, in_common, numbers, numbers_of, pushed
from mpiad.ensemble.happened import traced_events
from mpiad.ensemble.replay import replayed, replayed_jvp, replayed_vjp
from mpiad.ensemble.run import Run
from mpiad.ensemble.seeds import Seeds
from mpiad.ensemble.settings import Ways
from mpiad.ensemble.solution import EnsembleSolution, at_ends
from mpiad.ensemble.tangents import Directions, Kept, push_run
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.transport.device_arrays import is_device_array

__all__ = ["differentiable"]

# The first arguments of the function; the leaves of the parameters follow.
_U0, _START, _END, _LEAVES = range(4)


def differentiable(sol: EnsembleSolution, run: Run, batch: Batch, ways: Ways) -> EnsembleSolution:
    """Return a solution whose states are functions of the traced batch that it was made of.

    Parameters
    ----------
    sol : EnsembleSolution
        Of plain arrays.
    run : Run
    batch : Batch
        With traced values in it.
    ways : Ways
    """
    count, d, ends = run.batch.size, len(run.batch.u0), run.settings.ends
    saved = np.empty((count, 0, d), run.batch.u0.dtype) if ends else sol.u.reshape(count, sol.u.shape[1], d)
    results = _Results(run, saved, sol.u_end.reshape(count, d), ways)
    traced = _solved(batch.u0, batch.start, batch.end, *batch.p.leaves, results=results)
    u, u_end, *times = results.layout.parts(traced)
    if ends:
        return at_ends(sol, lambda: batch.u0, anp.reshape(u_end, sol.u_end.shape))
    changes = {"u": anp.reshape(u, sol.u.shape), "u_end": anp.reshape(u_end, sol.u_end.shape)}
    if times:
        reached, crossed = map(to_host, times)
        events = traced_events(sol.events, run.passed, run.terminated & run.live, reached, crossed)
        changes.update(t_reached=reached, events=events)
    return dataclasses.replace(sol, **changes)


class _Results:
    """The results of a run as one vector, and back: saved and final states, and with events their times."""

    def __init__(self, run: Run, u: Array, u_end: Array, ways: Ways):
        self.run, self.ways = run, ways
        values = [u, u_end, *((run.reached, run.crossed) if run.settings.events else ())]
        self.layout = Concatenation([spec_like(value) for value in values])
        self.vector = self.layout.vector(values)

    def seeds(self, g: Array) -> Seeds:
        """Return a plain cotangent of the vector as that of the results."""
        saved, end, *times = self.layout.parts(conform(g, *spec_like(self.vector)))
        return self.run.seeds(saved, end, times)

    def replayed(self, args: Sequence[Any]) -> Array:
        """Return the vector as a function that traces see."""
        u0, start, end, *leaves = args
        return self.layout.vector(replayed(self.run, u0, start, end, leaves))


@primitive
def _solved(u0: Array, start: Array, end: Array, *leaves: Any, results: _Results) -> Array:
    """Return the results of a solve, which has run before."""
    return results.vector


def _solved_vjp(argnums: tuple[int, ...], ans: Array, args: tuple, kwargs: dict) -> Callable:
    results = kwargs["results"]
    plain = not any(map(isbox, args))

    def vjp(g: Array) -> list[Array]:
        if not plain or isbox(g):
            return replayed_vjp(results.replayed, argnums, args, g)
        places = [k - _LEAVES for k in argnums if k >= _LEAVES]
        timed = _START in argnums or _END in argnums
        seeds, run = results.seeds(g), results.run
        if _by_tangent(results, timed, argnums, places):
            if timed or run.settings.events:
                return _replayed_tangent_vjp(results, argnums, args, seeds)
            return _tangent_vjp(run, argnums, args, places, seeds)
        found = _pull(results)(run, seeds, places, timed)
        ends = {_U0: lambda: found.u0, _START: lambda: run.on_host(found.start), _END: lambda: run.on_host(found.end)}
        bars = [ends[k]() if k < _LEAVES else found.leaves[k - _LEAVES] for k in argnums]
        return [conform(bar, *spec_like(args[k])) for k, bar in zip(argnums, bars)]

    return vjp


def _pull(results: _Results) -> Callable:
    if results.ways.adjoint == "continuous":
        return pull_continuous
    solver = results.run.outcome.solver
    return pull_run if solver is None else partial(pull_compiled, solver)


def _by_tangent(results: _Results, timed: bool, argnums: tuple[int, ...], places: Sequence[int]) -> bool:
    ways, run = results.ways, results.run
    if ways.gradient is not None or ways.adjoint != "discrete":
        return ways.gradient == "tangent"
    # Whether an event came or not: a trajectory's last bits don't depend on what becomes of others.
    if timed or run.settings.events:
        return False  # where times move, tangents are those of a replay, one direction after the other
    if run.outcome.solver is not None:
        return run.outcome.carried is not None
    return len(numbers_of(run, _U0 in argnums, places)) <= run.few


def _tangent_vjp(run: Run, argnums: tuple[int, ...], args: tuple, places: Sequence[int], seeds: Seeds) -> list[Array]:
    by_u0 = _U0 in argnums
    parts = _carried(run, by_u0, places, seeds) or pushed(run, seeds, by_u0, places)
    u0, leaves = contracted(run, by_u0, places, parts)
    return [conform(u0 if k == _U0 else leaves[k - _LEAVES], *spec_like(args[k])) for k in argnums]


def _carried(run: Run, by_u0: bool, places: Sequence[int], seeds: Seeds) -> list[tuple[Number, Array]] | None:
    """Return for each number what cotangents and the tangents that a kernel carried have in common."""
    solver = run.outcome.solver
    found = None if solver is None else carried_tangents(solver, run, by_u0, places, seeds.saved is not None)
    if found is None:
        return None
    end, saved = found
    seeds = seeds._replace(end=run.masked(seeds.end))
    parts = [in_common(seeds, end[j], None if saved is None else saved[j]) for j in range(len(end))]
    return list(zip(numbers_of(run, by_u0, places), parts))


def _replayed_tangent_vjp(results: _Results, argnums: tuple[int, ...], args: tuple, seeds: Seeds) -> list[Array]:
    found, run = [], results.run
    reached = None if seeds.reached is None else run.masked(seeds.reached)
    saved = None if seeds.saved is None else seeds.saved[:, : run.n_saved]
    seeds = seeds._replace(end=run.masked(seeds.end), reached=reached, saved=saved)
    for k in argnums:
        varies = k < _LEAVES or run.batch.p.varies[k - _LEAVES]
        total = np.zeros_like(args[k])
        for index, unit in numbers(args[k], varies):
            direction = np.zeros_like(args[k])
            direction[index] = unit
            u, end, *times = results.layout.parts(replayed_jvp(results.replayed, (k,), args, [direction]))
            moved, crossed = times or (None, None)
            part = in_common(seeds, np.swapaxes(end, 0, 1), u, moved, crossed, run)
            part = part if unit == 1.0 else -1j * part
            part = part if varies else part.sum()
            total[index] += part if is_device_array(args[k]) else run.on_host(part)
        found.append(conform(total, *spec_like(args[k])))
    return found


def _solved_jvp(argnums: tuple[int, ...], gs: Sequence[Any], ans: Array, args: tuple, kwargs: dict) -> Array:
    results = kwargs["results"]
    run = results.run
    timed = _START in argnums or _END in argnums
    if timed or run.settings.events or any(map(isbox, (*args, *gs))):
        return replayed_jvp(results.replayed, argnums, args, gs)
    tangents = {k: conform(g, *spec_like(args[k])) for k, g in zip(argnums, gs)}
    u0 = tangents.pop(_U0) if _U0 in tangents else np.zeros_like(args[_U0])
    directions = Directions(u0[None], {k - _LEAVES: [g] for k, g in tangents.items()})
    kept = Kept(run, directions) if run.n_saved else None
    end = push_run(run, directions, kept)
    saved = results.layout.specs[0].zeros() if kept is None else kept.saved[0, :, : run.n_saved]
    return results.layout.vector([saved, np.swapaxes(end[0], 0, 1)])


defvjp_argnums(_solved, _solved_vjp)
defjvp_argnums(_solved, _solved_jvp)
