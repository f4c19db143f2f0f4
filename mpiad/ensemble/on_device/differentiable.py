"""A solve on the device as one differentiable function, from initial states and parameters to saved and final states."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.extend import defjvp_argnums, defvjp_argnums, primitive
from autograd.tracer import getval, isbox

from mpiad._typing import Array
from mpiad.device.numpy import concatenate
from mpiad.differentiation.gradient import cotangents_of_variables
from mpiad.differentiation.trace import Variables, trace_backwards, trace_forwards
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.on_device.adjoint import pull
from mpiad.ensemble.on_device.record import Record
from mpiad.ensemble.on_device.replay import replayed
from mpiad.ensemble.on_device.tangents import push
from mpiad.ensemble.solution import EnsembleSolution
from mpiad.primitives.cotangents import conform, spec_like

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
    if gradient == "tangent" or adjoint == "continuous":
        asked = "gradient='tangent'" if gradient == "tangent" else "adjoint='continuous'"
        raise NotImplementedError(
            f"solve: {asked} isn't computed on devices, where gradients are those of the discrete adjoint. Leave it out, "
            "or bring u0 and p to the host with mpiad.device.to_host."
        )
    count, d = batch.size, len(batch.u0)
    cut = sol.u.size
    plain = np.concatenate([sol.u.reshape(-1), sol.u_end.reshape(-1)])
    shape = count, cut // max(1, count * d), d
    vector = _solved(batch.u0, batch.start, batch.end, *batch.p.leaves, record=record, plain=plain, shape=shape)
    return dataclasses.replace(
        sol, u=anp.reshape(vector[:cut], sol.u.shape), u_end=anp.reshape(vector[cut:], sol.u_end.shape)
    )


@primitive
def _solved(
    u0: Array, start: Array, end: Array, *leaves: Any, record: Record, plain: Array, shape: tuple[int, int, int]
) -> Array:
    """Return the results of a solve, which has run before."""
    return plain


def _adjoint(argnums: tuple[int, ...], ans: Array, args: tuple, kwargs: dict) -> Callable:
    record, shape = kwargs["record"], kwargs["shape"]
    plain = not any(map(isbox, args)) and _START not in argnums and _END not in argnums

    def vjp(g: Array) -> list[Array]:
        if not plain or isbox(g):
            return _replayed_adjoint(record, argnums, args, g)
        cut = shape[0] * shape[1] * shape[2]
        g = conform(g, *spec_like(ans))
        places = [k - _LEAVES for k in argnums if k >= _LEAVES]
        u0, leaves = pull(record, g[:cut].reshape(shape), g[cut:].reshape(shape[0], shape[2]), places)
        return [conform(leaves[k - _LEAVES] if k else u0, *spec_like(args[k])) for k in argnums]

    return vjp


def _tangent(argnums: tuple[int, ...], gs: Sequence[Any], ans: Array, args: tuple, kwargs: dict) -> Array:
    record = kwargs["record"]
    if any(map(isbox, (*args, *gs))) or _START in argnums or _END in argnums:
        return _replayed_tangent(record, argnums, gs, args)
    along = {k: conform(g, *spec_like(args[k])) for k, g in zip(argnums, gs)}
    u0 = along.pop(_U0) if _U0 in along else np.zeros_like(args[_U0])
    saved, end = push(record, u0, {k - _LEAVES: g for k, g in along.items()})
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


defvjp_argnums(_solved, _adjoint)
defjvp_argnums(_solved, _tangent)
