"""A solve on the device as one differentiable function, from initial states and parameters to saved and final states."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.extend import defjvp_argnums, defvjp_argnums, primitive
from autograd.tracer import isbox

from mpiad._typing import Array
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.on_device.adjoint import pull
from mpiad.ensemble.on_device.record import Record
from mpiad.ensemble.on_device.tangents import push
from mpiad.ensemble.solution import EnsembleSolution
from mpiad.primitives.cotangents import conform, spec_like

__all__ = ["differentiable"]


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
        Where tspan is traced, or another gradient is asked for than that of the discrete adjoint.
    """
    if gradient == "tangent" or adjoint == "continuous":
        asked = "gradient='tangent'" if gradient == "tangent" else "adjoint='continuous'"
        raise NotImplementedError(
            f"solve: {asked} isn't computed on devices, where gradients are those of the discrete adjoint. Leave it out, "
            "or bring u0 and p to the host with mpiad.device.to_host."
        )
    if isbox(batch.start) or isbox(batch.end):
        raise NotImplementedError(
            "solve: derivatives by tspan aren't computed on devices. Bring u0 and p to the host with mpiad.device.to_host."
        )
    count, d = batch.size, len(batch.u0)
    cut = sol.u.size
    plain = np.concatenate([sol.u.reshape(-1), sol.u_end.reshape(-1)])
    vector = _solved(batch.u0, *batch.p.leaves, record=record, plain=plain, shape=(count, cut // max(1, count * d), d))
    return dataclasses.replace(
        sol, u=anp.reshape(vector[:cut], sol.u.shape), u_end=anp.reshape(vector[cut:], sol.u_end.shape)
    )


@primitive
def _solved(u0: Array, *leaves: Any, record: Record, plain: Array, shape: tuple[int, int, int]) -> Array:
    """Return the results of a solve, which has run before."""
    return plain


def _refuse_more(args: Sequence[Any]) -> None:
    if any(map(isbox, args)):
        raise NotImplementedError(
            "solve: second derivatives of a solve aren't computed on devices. Bring u0 and p to the host with "
            "mpiad.device.to_host."
        )


def _adjoint(argnums: tuple[int, ...], ans: Array, args: tuple, kwargs: dict) -> Callable:
    record, shape = kwargs["record"], kwargs["shape"]
    _refuse_more(args)

    def vjp(g: Array) -> list[Array]:
        _refuse_more([g])
        cut = shape[0] * shape[1] * shape[2]
        g = conform(g, *spec_like(ans))
        places = [k - 1 for k in argnums if k]
        u0, leaves = pull(record, g[:cut].reshape(shape), g[cut:].reshape(shape[0], shape[2]), places)
        return [conform(leaves[k - 1] if k else u0, *spec_like(args[k])) for k in argnums]

    return vjp


def _tangent(argnums: tuple[int, ...], gs: Sequence[Any], ans: Array, args: tuple, kwargs: dict) -> Array:
    _refuse_more((*args, *gs))
    along = {k: conform(g, *spec_like(args[k])) for k, g in zip(argnums, gs)}
    u0 = along.pop(0) if 0 in along else np.zeros_like(args[0])
    saved, end = push(kwargs["record"], u0, {k - 1: g for k, g in along.items()})
    return np.concatenate([part.reshape(-1) for part in (saved, end) if part is not None])


defvjp_argnums(_solved, _adjoint)
defjvp_argnums(_solved, _tangent)
