"""Products with the Jacobian of a solve, and with its transpose, by a trace of its replayed steps.

A further trace around sees what is done here: that makes derivatives of derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpiad._typing import Array
from mpiad.differentiation.gradient import cotangents_of_variables
from mpiad.differentiation.trace import Variables, trace_backwards, trace_forwards
from mpiad.primitives.cotangents import conform, spec_like

__all__ = ["replayed_jvp", "replayed_vjp"]

Replay = Callable[[list], Array]


def replayed_jvp(replay: Replay, argnums: Sequence[int], args: Sequence[Any], gs: Sequence[Any]) -> Array:
    """Return the tangent of the results.

    Parameters
    ----------
    replay : callable
        From a list of all arguments to the vector of results.
    argnums : sequence of int
        Which arguments have tangents.
    args : sequence
    gs : sequence
        The tangents.
    """
    tangents = [conform(g, *spec_like(args[k])) for k, g in zip(argnums, gs)]
    return trace_forwards(*_of_some(replay, argnums, args), tangents, "solve")[1]


def replayed_vjp(replay: Replay, argnums: Sequence[int], args: Sequence[Any], g: Array) -> list[Array]:
    """Return the cotangents of some arguments by that of the results, `g`; else as `replayed_jvp`."""
    fun, variables = _of_some(replay, argnums, args)
    traced = trace_backwards(fun, variables)
    seeds = [(place, conform(g, *spec_like(value))) for place, value in zip(traced.places, traced.values) if place >= 0]
    return cotangents_of_variables(traced, seeds, variables)


def _of_some(replay: Replay, argnums: Sequence[int], args: Sequence[Any]) -> tuple[Callable[..., Array], Variables]:
    """Return the results as a function of some arguments, and these."""
    def fun(values: Sequence[Any]) -> Array:
        filled = list(args)
        for k, value in zip(argnums, values):
            filled[k] = value
        return replay(filled)

    return fun, Variables([args[k] for k in argnums], list(range(len(argnums))), list)
