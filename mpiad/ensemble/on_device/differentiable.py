"""A solve on the device as one differentiable function, from initial states and parameters to saved and final states."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import autograd.numpy as anp
import numpy as np
from autograd.extend import defjvp_argnums, defvjp_argnums, primitive
from autograd.tracer import getval, isbox

from mpiad._typing import Array
from mpiad.device import to_host
from mpiad.differentiation.concatenation import Concatenation
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.directions import numbers
from mpiad.ensemble.happened import traced_events
from mpiad.ensemble.on_device.adjoint import pull
from mpiad.ensemble.on_device.continuous import pull_continuous
from mpiad.ensemble.on_device.directions import contracted
from mpiad.ensemble.on_device.record import Record
from mpiad.ensemble.on_device.replay import replayed
from mpiad.ensemble.on_device.tangents import kept
from mpiad.ensemble.replayed_products import replayed_jvp, replayed_vjp
from mpiad.ensemble.settings import Settings
from mpiad.ensemble.solution import EnsembleSolution
from mpiad.ensemble.tangents import Directions
from mpiad.ensemble.ways import Ways
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.transport.device_arrays import arrays_of, is_device_array

__all__ = ["differentiable"]

# The first arguments of the function; the leaves of the parameters follow.
_U0, _START, _END, _LEAVES = range(4)


def differentiable(
    sol: EnsembleSolution, record: Record, batch: Batch, settings: Settings, ways: Ways
) -> EnsembleSolution:
    """Return a solution whose states are functions of the traced batch that it was made of.

    Parameters
    ----------
    sol : EnsembleSolution
        Of plain arrays.
    record : Record
    batch : Batch
        With traced values in it.
    settings : Settings
    ways : Ways
    """
    results = _Results.of(sol, record, settings, ways)
    u, u_end, *times = results.parts(_solved(batch.u0, batch.start, batch.end, *batch.p.leaves, results=results))
    changes = {"u": anp.reshape(u, sol.u.shape), "u_end": anp.reshape(u_end, sol.u_end.shape)}
    if times:
        reached, crossed = map(to_host, times)
        happened: Any = record.events
        events = traced_events(sol.events, happened.passed, happened.ended, reached, crossed)
        changes.update(t_reached=reached, events=events)
    return dataclasses.replace(sol, **changes)


class _Results(NamedTuple):
    """The results of a solve as one vector, and back.

    Parameters
    ----------
    record : Record
    layout : Concatenation
        Of saved states, (N, n_saved, d), final ones, (N, d), and with events the times at which trajectories ended, (N,),
        and those of all events.
    vector : array
    settings : Settings
    ways : Ways
    times : array
        At which states were saved; on the host.
    """

    record: Record
    layout: Concatenation
    vector: Array
    settings: Settings
    ways: Ways
    times: np.ndarray

    @classmethod
    def of(cls, sol: EnsembleSolution, record: Record, settings: Settings, ways: Ways) -> _Results:
        """Return those of a solution of plain arrays."""
        count, d = len(sol.u_end), len(record.batch.u0)
        values = [sol.u.reshape(count, -1, d) if sol.u.size else sol.u.reshape(count, 0, d), sol.u_end.reshape(count, d)]
        if record.events is not None:
            values += [record.events.reached, record.events.times]
        layout = Concatenation([spec_like(value) for value in values])
        return cls(record, layout, layout.vector(values), settings, ways, sol.t)

    def parts(self, vector: Array) -> list[Array]:
        """Return the results of such a vector."""
        return self.layout.parts(vector)

    def replayed(self, args: Sequence[Any]) -> Array:
        """Return the vector as a function that traces see."""
        u0, start, end, *leaves = args
        saved, *others = replayed(self.record, u0, start, end, leaves)
        saved = self.layout.specs[0].zeros() if saved is None else saved
        return self.layout.vector([saved, *[part for part in others if part is not None]])


@primitive
def _solved(u0: Array, start: Array, end: Array, *leaves: Any, results: _Results) -> Array:
    """Return the results of a solve, which has run before."""
    return results.vector


def _adjoint(argnums: tuple[int, ...], ans: Array, args: tuple, kwargs: dict) -> Callable:
    results = kwargs["results"]
    plain = not any(map(isbox, args))
    timed = _START in argnums or _END in argnums

    def vjp(g: Array) -> list[Array]:
        continuous, by_tangent = results.ways.adjoint == "continuous", results.ways.gradient == "tangent"
        if not plain or isbox(g) or (timed and not (continuous or by_tangent)):
            # Of what wasn't reached the states are NaN, and so may their cotangents be.
            g = anp.where(anp.isnan(getval(g)), 0.0, g)
            return replayed_vjp(results.replayed, argnums, args, g)
        g = conform(g, *spec_like(ans))
        if by_tangent and (timed or results.record.events is not None):
            return _replayed_tangents(results, argnums, args, g)
        ends = {}
        places = [k - _LEAVES for k in argnums if k >= _LEAVES]
        saved, end, *times = results.parts(g)
        if continuous:
            record, settings = results.record, results.settings
            found = pull_continuous(record, settings, [saved, end, *times], results.times, places, timed)
            u0, leaves, ends = found.u0, found.leaves, {_START: found.start, _END: found.end}
        elif by_tangent:
            u0, leaves = contracted(results.record, saved, end, _U0 in argnums, places)
        else:
            u0, leaves = pull(results.record, saved, end, places, times)
        ends[_U0] = u0
        return [conform(ends[k] if k < _LEAVES else leaves[k - _LEAVES], *spec_like(args[k])) for k in argnums]

    return vjp


def _tangent(argnums: tuple[int, ...], gs: Sequence[Any], ans: Array, args: tuple, kwargs: dict) -> Array:
    results = kwargs["results"]
    record, timed = results.record, _START in argnums or _END in argnums
    if timed or record.events is not None or any(map(isbox, (*args, *gs))):
        return replayed_jvp(results.replayed, argnums, args, gs)
    along = {k: conform(g, *spec_like(args[k])) for k, g in zip(argnums, gs)}
    u0 = along.pop(_U0) if _U0 in along else np.zeros_like(args[_U0])
    saved, end = kept(record, Directions(u0[None], {k - _LEAVES: [g] for k, g in along.items()}))
    return results.layout.vector([results.layout.specs[0].zeros() if saved is None else saved[0], end[0]])


def _replayed_tangents(results: _Results, argnums: tuple[int, ...], args: tuple, g: Array) -> list[Array]:
    """Return a gradient by tangents of the replay, one number of a trajectory after the other."""
    # Of what wasn't reached cotangents may be NaN.
    found, bars = [], results.parts(np.where(np.isnan(g), 0, g))
    for k in argnums:
        varies = k < _LEAVES or results.record.batch.p.varies[k - _LEAVES]
        total = np.zeros_like(args[k])
        for index, unit in numbers(args[k], varies):
            direction = np.zeros_like(args[k])
            direction[index] = unit
            part = _in_common(results, bars, results.parts(replayed_jvp(results.replayed, (k,), args, [direction])))
            part = part if unit == 1.0 else -1j * part
            part = part if varies else np.sum(part)
            total[index] += part if is_device_array(args[k]) else arrays_of(part).to_host(part)  # type: ignore[union-attr]
        found.append(conform(total, *spec_like(args[k])))
    return found


def _in_common(results: _Results, bars: list[Array], tangents: list[Array]) -> Array:
    """Return for each trajectory what cotangents and tangents of its results have in common, shape (N,)."""
    (saved, end, *times), (of_saved, of_end, *of_times) = bars, tangents
    part = np.sum((saved * of_saved).real, axis=(1, 2)) + np.sum((end * of_end).real, axis=1)
    if times:
        part = part + times[0] * of_times[0]
        home: Any = arrays_of(part)
        home.add_at(part, results.record.events.ids, times[1] * of_times[1])  # type: ignore[union-attr]
    return part


defvjp_argnums(_solved, _adjoint)
defjvp_argnums(_solved, _tangent)
