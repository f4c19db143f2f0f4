"""The adjoint of an event, whose time depends on the trajectory.

The condition g vanishes on the step's interpolant U at the fraction x of the step. By the implicit function theorem a
change δ of all other variables changes x by -(δg + g_u δU) / (g_u U' + g_t h). A terminal event changes the end of the
trajectory with it; another event changes only its own time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.coefficients import interpolate, stage_rates
from mpiad.ensemble.linearization import Field, transposed_columns
from mpiad.ensemble.run import Run
from mpiad.ensemble.step_sweep import LocatedEvent
from mpiad.ensemble.transposed_step import Inside, StepCotangents, TransposedStep


def pull_event(
    run: Run, located: LocatedEvent, step: TransposedStep, totals: StepCotangents, leaves: Sequence[Any],
    places: tuple[int, ...], end: Array | None, time: Array | float, timed: bool,
) -> Inside:  # fmt: skip
    """Return the cotangent of the states at an event: at a fixed fraction of the step if terminal, else at a fixed time.

    - `step`: with its last stage.
    - `totals`: gets the cotangents of parameters and, for terminal events, of times.
    - `leaves`: the parameters of the step's columns; `places`: the indices of those to differentiate with respect to.
    - `end`: shape (d, m); cotangents of the states at a terminal event; None for others.
    - `time`: shape (m,); cotangents of the event's times.
    """
    columns, x, h = located.columns, located.x, step.h[located.columns]
    stages = [k[:, columns] for k in step.k]
    rate = h * sum(r * k for r, k in zip(stage_rates(run.tableau, x), stages))
    moving = time * h  # derivative of the results with respect to x: by the event's time, and by the state
    if end is not None:
        moving = (end * rate).real.sum(axis=0) + moving
    states = interpolate(run.coefficients, step.y[0][:, columns], h, stages, x)
    pull = transposed_condition(run, located, places, leaves, states)
    g_u, *_, g_t = pull(np.ones_like(x))
    slope = (g_u * rate).real.sum(axis=0) + g_t * h
    value, *parts, t_bar = pull(-moving / slope)
    totals.note_leaves(parts, columns, len(x))
    if end is not None:
        value = end + value
        if timed:
            totals.t_bar[columns] += t_bar + time
    weights = run.coefficients.weights(x)
    return Inside(columns, value.astype(step.y[0].dtype, copy=False), x, [weights[i] for i in range(len(weights))])


def transposed_condition(
    run: Run, located: LocatedEvent, places: Sequence[int], leaves: Sequence[Any], states: Array
) -> Callable[[Array], list[Any]]:
    """Return the transposed derivative of an event's condition at its roots, for (n,): see `transposed_columns`."""
    time, condition = located.time, run.settings.events[located.event].written
    own, field = run.columns(leaves, located.columns), Field(run.batch._replace(f=condition))
    pull = transposed_columns(field, places, True, np.empty_like(time)[None], states, own, time)
    return lambda g: pull(g[None])
