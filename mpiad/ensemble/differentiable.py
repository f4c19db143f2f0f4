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
from mpiad.differentiation.concatenation import Concatenation
from mpiad.ensemble.adjoint import pull_run
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.compiled.forward_tangents import carried_tangents
from mpiad.ensemble.compiled.reverse_sweep import pull_compiled
from mpiad.ensemble.continuous import pull_continuous
from mpiad.ensemble.directions import FEW, contracted, directions_of, in_common, numbers, numbers_of
from mpiad.ensemble.replay import replayed
from mpiad.ensemble.replayed_products import replayed_jvp, replayed_vjp
from mpiad.ensemble.run import NOWHERE, Run
from mpiad.ensemble.seeds import Seeds
from mpiad.ensemble.solution import EnsembleSolution, at_ends
from mpiad.ensemble.tangents import Directions, push_run
from mpiad.ensemble.ways import Ways
from mpiad.primitives.cotangents import conform, spec_like

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
    traced = results.parts(_solved(batch.u0, batch.start, batch.end, *batch.p.leaves, results=results))
    u, u_end, times, crossed = traced
    if ends:
        return at_ends(sol, lambda: batch.u0, anp.reshape(u_end, sol.u_end.shape))
    changes = {"u": anp.reshape(u, sol.u.shape), "u_end": anp.reshape(u_end, sol.u_end.shape)}
    if times.size:
        changes.update(t_reached=times, events=_traced_events(sol, run, times, crossed))
    return dataclasses.replace(sol, **changes)


def _traced_events(sol: EnsembleSolution, run: Run, reached: Array, crossed: Array) -> dict[int, list[tuple[int, Any]]]:
    """Return the events with traced times, but for those of trajectories that failed."""
    events = {i: list(found) for i, found in sol.events.items()}
    for m, (i, order) in enumerate(zip(run.crossings.ids.tolist(), run.crossings.order.tolist())):
        events[i][order] = events[i][order][0], crossed[m]
    for i in np.flatnonzero(run.terminated).tolist():
        events[i][-1] = events[i][-1][0], reached[i]
    return events


class _Results:
    """The results of a run as one vector, and back."""

    def __init__(self, run: Run, u: Array, u_end: Array, ways: Ways):
        self.run, self.ways = run, ways
        times = run.outcome.t_reached if run.settings.events else np.empty(0)
        values = (u, u_end, times, run.crossings.time)
        self._layout = Concatenation([spec_like(value) for value in values])
        filled = [value.reshape(-1) for value in values if value.size]
        self.vector = filled[0] if len(filled) == 1 else np.concatenate(filled or [np.empty(0)])

    def parts(self, vector: Array) -> list[Array]:
        """Return saved states, final states, their times and those of events on the way, empty without events."""
        return self._layout.parts(vector)

    def together(self, parts: Sequence[Array]) -> Array:
        """Return the vector of such parts."""
        filled = [anp.reshape(part, (-1,)) for part in parts if part.size]
        # Where ranks are more than trajectories, some have none.
        return anp.concatenate(filled) if filled else self.vector

    def seeds(self, vector: Array) -> Seeds:
        """Return a plain cotangent of the vector as that of the results."""
        saved, end, times, crossed = self.parts(vector)
        if saved.size:
            # What wasn't reached is NaN, and so may be its cotangent.
            saved = np.where((self.run.save_step == NOWHERE)[..., None], 0, saved)
        return Seeds(
            end.T, saved if saved.any() else None, times if times.size else None, crossed if crossed.any() else None
        )

    def replayed(self, args: Sequence[Any]) -> Array:
        """Return the vector as a function that traces see."""
        u0, start, end, *leaves = args
        final, saved, *times = replayed(self.run, u0, start, end, leaves)
        return self.together([saved, final, *times] if self.run.settings.events else [saved, final])


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
        if _by_tangent(results, timed, argnums, places):
            seeds = results.seeds(conform(g, *spec_like(ans)))
            if timed or results.run.settings.events:
                return _replayed_tangent_vjp(results, argnums, args, seeds)
            return _tangent_vjp(results, argnums, args, places, seeds)
        found = _pull(results)(results.run, results.seeds(conform(g, *spec_like(ans))), places, timed)
        ends = {_U0: found.u0, _START: found.start, _END: found.end}
        return [conform(ends[k] if k < _LEAVES else found.leaves[k - _LEAVES], *spec_like(args[k])) for k in argnums]

    return vjp


def _pull(results: _Results) -> Callable:
    if results.ways.adjoint == "continuous":
        return pull_continuous
    solver = results.run.outcome.solver
    return pull_run if solver is None else partial(pull_compiled, solver)


def _by_tangent(results: _Results, timed: bool, argnums: tuple[int, ...], places: Sequence[int]) -> bool:
    ways = results.ways
    if ways.gradient is not None or ways.adjoint != "discrete":
        return ways.gradient == "tangent"
    # Whether an event came or not: a trajectory's last bits don't depend on what becomes of others.
    if timed or results.run.settings.events:
        return False  # where times move, tangents are those of a replay, one direction after the other
    if results.run.outcome.solver is not None:
        return results.run.outcome.carried is not None
    return numbers_of(results.run, _U0 in argnums, places) <= FEW


def _tangent_vjp(
    results: _Results, argnums: tuple[int, ...], args: tuple, places: Sequence[int], seeds: Seeds
) -> list[Array]:
    run, by_u0 = results.run, _U0 in argnums

    def tangents(saving: bool) -> Any:
        solver = run.outcome.solver
        found = None if solver is None else carried_tangents(solver, run, by_u0, places, saving)
        return found or push_run(run, directions_of(run, by_u0, places), saving)

    u0, leaves = contracted(run, by_u0, places, seeds, tangents)
    return [conform(u0 if k == _U0 else leaves[k - _LEAVES], *spec_like(args[k])) for k in argnums]


def _replayed_tangent_vjp(results: _Results, argnums: tuple[int, ...], args: tuple, seeds: Seeds) -> list[Array]:
    found, live = [], results.run.live
    reached = None if seeds.reached is None else np.where(live, seeds.reached, 0)
    seeds = seeds._replace(end=np.where(live, seeds.end, 0), reached=reached)
    for k in argnums:
        varies = k < _LEAVES or results.run.batch.p.varies[k - _LEAVES]
        total = np.zeros_like(args[k])
        for index, unit in numbers(args[k], varies):
            direction = np.zeros_like(args[k])
            direction[index] = unit
            saved, end, times, crossed = results.parts(replayed_jvp(results.replayed, (k,), args, [direction]))
            part = in_common(seeds, end.T, saved, times, (results.run.crossings.ids, crossed))
            part = part if unit == 1.0 else -1j * part
            total[index] += part if varies else part.sum()
        found.append(conform(total, *spec_like(args[k])))
    return found


def _solved_jvp(argnums: tuple[int, ...], gs: Sequence[Any], ans: Array, args: tuple, kwargs: dict) -> Array:
    results = kwargs["results"]
    run = results.run
    timed = _START in argnums or _END in argnums
    if timed or run.settings.events or any(map(isbox, (*args, *gs))):
        return replayed_jvp(results.replayed, argnums, args, gs)
    tangents = dict(zip(argnums, gs))
    leaves = {k - _LEAVES: [conform(g, *spec_like(args[k]))] for k, g in tangents.items() if k >= _LEAVES}
    u0 = conform(tangents[_U0], *spec_like(args[_U0])) if _U0 in tangents else np.zeros_like(args[_U0])
    end, saved = push_run(run, Directions(u0[None], leaves))
    return results.together([saved[0], end[0].T])


defvjp_argnums(_solved, _solved_vjp)
defjvp_argnums(_solved, _solved_jvp)
