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
from mpiad.device.numpy import concatenate
from mpiad.differentiation.gradient import cotangents_of_variables
from mpiad.differentiation.trace import Variables, trace_backwards, trace_forwards
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.directions import numbers
from mpiad.ensemble.on_device.adjoint import pull
from mpiad.ensemble.on_device.directions import contracted
from mpiad.ensemble.on_device.record import Record
from mpiad.ensemble.on_device.replay import replayed
from mpiad.ensemble.on_device.tangents import kept
from mpiad.ensemble.solution import EnsembleSolution
from mpiad.ensemble.tangents import Directions
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.transport.device_arrays import arrays_of, is_device_array

__all__ = ["differentiable"]

# The first arguments of the function; the leaves of the parameters follow.
_U0, _START, _END, _LEAVES = range(4)


def differentiable(
    sol: EnsembleSolution, record: Record, batch: Batch, gradient: str | None, adjoint: str
) -> EnsembleSolution:
    """Return a solution whose states are functions of the traced batch that it was made of.

    Parameters
    ----------
    sol : EnsembleSolution
        Of plain arrays.
    record : Record
    batch : Batch
        With traced values in it.
    gradient : {"tangent", "adjoint"} or None
    adjoint : {"discrete", "continuous"}

    Raises
    ------
    NotImplementedError
        Where another gradient is asked for than that of the discrete adjoint.
    """
    if adjoint == "continuous":
        raise NotImplementedError(
            "solve: adjoint='continuous' isn't computed on devices, where gradients are those of the discrete solution. "
            "Leave it out, or bring u0 and p to the host with mpiad.device.to_host."
        )
    count, d = batch.size, len(batch.u0)
    plain = np.concatenate([sol.u.reshape(-1), sol.u_end.reshape(-1)])
    results = _Results(record, plain, (count, sol.u.size // max(1, count * d), d), gradient == "tangent")
    u, u_end = results.parts(_solved(batch.u0, batch.start, batch.end, *batch.p.leaves, results=results))
    return dataclasses.replace(sol, u=anp.reshape(u, sol.u.shape), u_end=anp.reshape(u_end, sol.u_end.shape))


class _Results(NamedTuple):
    """The results of a solve as one vector.

    Parameters
    ----------
    record : Record
    vector : array
        Saved states, of `shape` (N, n_saved, d), and final ones, (N, d).
    shape : tuple of int
    by_tangent : bool
        Whether gradients are computed by tangents.
    """

    record: Record
    vector: Array
    shape: tuple[int, int, int]
    by_tangent: bool

    def parts(self, vector: Array) -> tuple[Array, Array]:
        """Return saved and final states of such a vector."""
        cut = self.shape[0] * self.shape[1] * self.shape[2]
        return anp.reshape(vector[:cut], self.shape), anp.reshape(vector[cut:], (self.shape[0], self.shape[2]))


@primitive
def _solved(u0: Array, start: Array, end: Array, *leaves: Any, results: _Results) -> Array:
    """Return the results of a solve, which has run before."""
    return results.vector


def _adjoint(argnums: tuple[int, ...], ans: Array, args: tuple, kwargs: dict) -> Callable:
    results = kwargs["results"]
    plain = not any(map(isbox, args))
    timed = _START in argnums or _END in argnums

    def vjp(g: Array) -> list[Array]:
        if not plain or isbox(g) or (timed and not results.by_tangent):
            return _replayed_adjoint(results.record, argnums, args, g)
        g = conform(g, *spec_like(ans))
        if timed:
            return _replayed_tangents(results, argnums, args, g)
        places = [k - _LEAVES for k in argnums if k >= _LEAVES]
        saved, end = results.parts(g)
        if results.by_tangent:
            u0, leaves = contracted(results.record, saved, end, _U0 in argnums, places)
        else:
            u0, leaves = pull(results.record, saved, end, places)
        return [conform(leaves[k - _LEAVES] if k else u0, *spec_like(args[k])) for k in argnums]

    return vjp


def _tangent(argnums: tuple[int, ...], gs: Sequence[Any], ans: Array, args: tuple, kwargs: dict) -> Array:
    record = kwargs["results"].record
    if any(map(isbox, (*args, *gs))) or _START in argnums or _END in argnums:
        return _replayed_tangent(record, argnums, gs, args)
    along = {k: conform(g, *spec_like(args[k])) for k, g in zip(argnums, gs)}
    u0 = along.pop(_U0) if _U0 in along else np.zeros_like(args[_U0])
    saved, end = kept(record, Directions(u0[None], {k - _LEAVES: [g] for k, g in along.items()}))
    return np.concatenate([part.reshape(-1) for part in (saved, end) if part is not None])


def _replayed(record: Record, argnums: tuple[int, ...], args: tuple) -> tuple[Callable, Variables]:
    """Return the results as a function of some arguments, which traces see, and these arguments."""
    def results(chosen: Sequence[Any]) -> Array:
        filled = list(args)
        for k, value in zip(argnums, chosen):
            filled[k] = value
        u0, start, end, *leaves = filled
        parts = replayed(record, u0, start, end, leaves)
        return concatenate([anp.reshape(part, (-1,)) for part in parts if part is not None])

    return results, Variables([args[k] for k in argnums], list(range(len(argnums))), list)


def _replayed_adjoint(record: Record, argnums: tuple[int, ...], args: tuple, g: Array) -> list[Array]:
    fun, variables = _replayed(record, argnums, args)
    traced = trace_backwards(fun, variables)
    # Of what wasn't reached the states are NaN, and so may their cotangents be.
    g = anp.where(anp.isnan(getval(g)), 0.0, g)
    seeds = [(place, conform(g, *spec_like(value))) for place, value in zip(traced.places, traced.values) if place >= 0]
    return cotangents_of_variables(traced, seeds, variables)


def _replayed_tangent(record: Record, argnums: tuple[int, ...], gs: Sequence[Any], args: tuple) -> Array:
    fun, variables = _replayed(record, argnums, args)
    return trace_forwards(fun, variables, [conform(g, *spec_like(args[k])) for k, g in zip(argnums, gs)], "solve")[1]


def _replayed_tangents(results: _Results, argnums: tuple[int, ...], args: tuple, g: Array) -> list[Array]:
    """Return a gradient by tangents of the replay, one number of a trajectory after the other."""
    # Of what wasn't reached cotangents may be NaN.
    found, (saved, end) = [], results.parts(np.where(np.isnan(g), 0, g))
    for k in argnums:
        varies = k < _LEAVES or results.record.batch.p.varies[k - _LEAVES]
        total = np.zeros_like(args[k])
        for index, unit in numbers(args[k], varies):
            direction = np.zeros_like(args[k])
            direction[index] = unit
            of_saved, of_end = results.parts(_replayed_tangent(results.record, (k,), [direction], args))
            part = np.sum((saved * of_saved).real, axis=(1, 2)) + np.sum((end * of_end).real, axis=1)
            part = part if unit == 1.0 else -1j * part
            part = part if varies else np.sum(part)
            total[index] += part if is_device_array(args[k]) else arrays_of(part).to_host(part)  # type: ignore[union-attr]
        found.append(conform(total, *spec_like(args[k])))
    return found


defvjp_argnums(_solved, _adjoint)
defjvp_argnums(_solved, _tangent)
