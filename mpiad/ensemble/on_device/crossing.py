"""The adjoint of an event on the device: its time moves with the trajectory, as in `mpiad.ensemble.crossing`.

What the results gain with the event's time becomes a cotangent of the state there, inside the step, and of the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.differentiation.backward import run_backward
from mpiad.differentiation.trace import Variables, trace_backwards
from mpiad.ensemble.on_device.events import Met
from mpiad.ensemble.on_device.record import Block, Record
from mpiad.ensemble.on_device.stages import interpolation, polynomials, states_at
from mpiad.primitives.cotangents import conform, spec_like

__all__ = ["Crossing", "crossing"]


class Crossing(NamedTuple):
    """Cotangents of an event in one round.

    Parameters
    ----------
    value : array, shape (d, m)
        Of the states there, at fixed times.
    weights : list of array, shape (m,)
        Of the stages in these states.
    leaves : list
        Of the leaves of the parameters of these columns, None where one is zero.
    """

    value: Array
    weights: list[Array]
    leaves: list[Any]


def crossing(
    record: Record, block: Block, met: Met, u: Array, h: Array, k: Array, end: Array | None, time: Array,
    places: Sequence[int],
) -> Crossing:  # fmt: skip
    """Return what an event hands to the step in which it lies.

    Parameters
    ----------
    record : Record
    block : Block
    met : Met
    u : array, shape (d, n)
        Before the step.
    h : array, shape (n,)
        Signed, in the precision of the states.
    k : array, shape (stages, d, n)
    end : array, shape (d, m), or None
        Cotangents of the states at terminal events; None for events on the way.
    time : array, shape (m,)
        Cotangents of the times.
    places : sequence of int
        Of the leaves to differentiate by.
    """
    table, c = record.table, met.columns
    h, x = h[c], met.x.astype(table.real)
    terms = polynomials(table, u[:, c], h, np.take(k, c, axis=-1))
    rate = _slope(terms, x)
    condition = _Condition(record, block, met, states_at(terms, x), places)
    g_u, *_, g_t = condition.pull(np.ones_like(time))
    slope = np.sum((g_u * rate).real, axis=0) + g_t * h
    moving = time * h  # what the results gain with x: by the time, and by the state
    if end is not None:
        moving = moving + np.sum((end * rate).real, axis=0)
    value, *leaves, _ = condition.pull(-moving / slope)
    value = value if end is None else end + value
    return Crossing(value.astype(u.dtype), interpolation(table, met.x), leaves)


def _slope(terms: Array, x: Array) -> Array:
    """Return how fast states move with the part of the step, by its polynomials."""
    total = (len(terms) - 1) * terms[-1]
    for power in range(len(terms) - 2, 0, -1):
        total = total * x + power * terms[power]
    return total


class _Condition:
    """An event's condition where it vanished, traced by states, parameters and times."""

    def __init__(self, record: Record, block: Block, met: Met, states: Array, places: Sequence[int]):
        batch, asked = record.batch, record.events.asked  # type: ignore[union-attr]
        leaves = [np.take(x, met.columns, axis=-1) if own else x for x, own in zip(block.leaves, batch.p.varies)]

        def called(variables: list[Any]) -> Any:
            filled = list(leaves)
            for place, variable in zip(places, variables[1:-1]):
                filled[place] = variable
            return asked[met.event].condition(variables[0], batch.p.build(filled), variables[-1])

        self._given = [states, *[leaves[place] for place in places], met.time]
        self._traced = trace_backwards(called, Variables(self._given, list(range(len(self._given))), list))

    def pull(self, g: Array) -> list[Any]:
        """Return the cotangents of the states, of the leaves (None where zero), and of the times."""
        traced = self._traced
        seeds = [(at, conform(g, *spec_like(value))) for at, value in zip(traced.places, traced.values) if at >= 0]
        found = run_backward(traced.recording, seeds, len(self._given), keep=True)  # it is pulled twice
        for at in (0, -1):
            if found[at] is None:
                found[at] = np.zeros_like(self._given[at])
        return found
