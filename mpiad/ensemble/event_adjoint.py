"""The adjoint of an event: its time moves with the trajectory.

The event lies where the condition g vanishes on the step's interpolant U(x), at the part x of the step. By the implicit
function theorem a change of anything else by δ moves x by -(δg + g_u δU) / (g_u U' + g_t h). A terminal event moves the end
of the trajectory with it; one on the way has a time, and nothing else moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.differentiation.backward import run_backward
from mpiad.differentiation.trace import Variables, trace_backwards
from mpiad.ensemble.coefficients import interpolate, stage_rates
from mpiad.ensemble.run import Run
from mpiad.ensemble.step_sweep import LocatedEvent
from mpiad.ensemble.transposed_step import Inside, StepCotangents, TransposedStep
from mpiad.primitives.cotangents import conform, spec_like


def pull_event(
    run: Run, located: LocatedEvent, step: TransposedStep, totals: StepCotangents, leaves: Sequence[Any],
    places: tuple[int, ...], end: Array | None, time: Array | float, timed: bool,
) -> Inside:  # fmt: skip
    """Return the cotangent of the states at an event: of a terminal one at its part of the step, else at a fixed time.

    - `step`: with its last stage.
    - `totals`: is told the cotangents of parameters and, of terminal events, of times.
    - `leaves`: of the parameters of the step's columns; `places`: of those to differentiate by.
    - `end`, of shape (d, m): cotangents of the states at a terminal event; None for one on the way.
    - `time`, of shape (m,): cotangents of the event's times.
    """
    columns, x, h = located.columns, located.x, step.h[located.columns]
    stages = [k[:, columns] for k in step.k]
    rate = h * sum(r * k for r, k in zip(stage_rates(run.tableau, x), stages))
    moving = time * h  # what the results gain with x: by the event's time, and by the state
    if end is not None:
        moving = (end * rate).real.sum(axis=0) + moving
    states = interpolate(run.coefficients, step.y[0][:, columns], h, stages, x)
    condition = Condition(run, located, places, leaves, states)
    g_u, *_, g_t = condition.pull(np.ones_like(x))
    slope = (g_u * rate).real.sum(axis=0) + g_t * h
    value, *parts, t_bar = condition.pull(-moving / slope)
    totals.note_leaves(parts, columns, len(x))
    if end is not None:
        value = end + value
        if timed:
            totals.t_bar[columns] += t_bar + time
    weights = run.coefficients.weights(x)
    return Inside(columns, value.astype(step.y[0].dtype, copy=False), x, [weights[i] for i in range(len(weights))])


class Condition:
    """An event's condition where it vanished, traced by states, parameters and times."""

    def __init__(self, run: Run, located: LocatedEvent, places: tuple[int, ...], leaves: Sequence[Any], states: Array):
        self._count = len(located.x)
        twice = run.doubled(self._count)  # two columns at least, wherever it is called
        event, build = run.settings.events[located.event], run.batch.p.build
        own = run.columns(leaves, located.columns[twice])

        def called(variables: list[Any]) -> Any:
            filled = list(own)
            for place, variable in zip(places, variables[1:-1]):
                filled[place] = variable
            return event.condition(variables[0], build(filled), variables[-1])

        self._given = [states[:, twice], *[own[place] for place in places], located.time[twice]]
        self._traced = trace_backwards(called, Variables(self._given, list(range(len(self._given))), list))

    def pull(self, g: Array) -> list[Any]:
        """Return the cotangents of the states, of the leaves (None where one is zero), and of the times."""
        count, traced = self._count, self._traced
        # The double of a single column gets nothing.
        seed = np.zeros_like(g, shape=self._given[-1].shape)
        seed[:count] = g
        seeds = [(at, conform(seed, *spec_like(value))) for at, value in zip(traced.places, traced.values) if at >= 0]
        found = run_backward(traced.recording, seeds, len(self._given), keep=True)  # it is pulled twice
        for at in (0, -1):
            if found[at] is None:
                found[at] = np.zeros_like(self._given[at])
        return [found[0][:, :count], *found[1:-1], found[-1][:count]]
