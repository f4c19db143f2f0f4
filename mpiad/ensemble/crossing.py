"""The adjoint of an event: its time moves with the trajectory.

The event lies where the condition g vanishes on the step's interpolant U(x), at the part x of the step. By the implicit
function theorem a change of anything else by δ moves x by -(δg + g_u δU) / (g_u U' + g_t h). A terminal event moves the end
of the trajectory with it; one on the way has a time, and nothing else moves.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.differentiation.backward import run_backward
from mpiad.differentiation.trace import Variables, trace_backwards
from mpiad.ensemble.interpolant import interpolate, stage_rates, stage_weights
from mpiad.ensemble.ledger import Inside, Ledger
from mpiad.ensemble.run import Run
from mpiad.ensemble.transposed_step import TransposedStep

__all__ = ["pull_crossing", "pull_passing"]


def pull_crossing(
    run: Run, places: tuple[int, ...], step: TransposedStep, ledger: Ledger, columns: Array, ids: Array, end: Array,
    reached: Array | float, timed: bool,
) -> Inside:  # fmt: skip
    """Return the cotangent of the states at terminal events, for fixed times.

    Parameters
    ----------
    run : Run
    places : tuple of int
        Of the leaves to differentiate by.
    step : TransposedStep
        With its last stage.
    ledger : Ledger
        Is told the cotangents of parameters and times.
    columns, ids : array of int, shape (m,)
        The columns of the step that end there, and their trajectories.
    end : array, shape (d, m)
        Cotangents of the states.
    reached : array, shape (m,)
        Cotangents of the times.
    timed : bool
    """
    x, h, value = run.outcome.end_part[ids], step.h[columns], end.copy()
    rate = h * sum(r * k[:, columns] for r, k in zip(stage_rates(run.tableau, x), step.k))
    moving = (end * rate).real.sum(axis=0) + reached * h  # what the results gain with x: by the state, and by its time
    for number in np.unique(run.ending_events[ids]):
        mine = np.flatnonzero(run.ending_events[ids] == number)
        at = run.outcome.u_end[:, ids[mine]], run.outcome.t_reached[ids[mine]]
        condition = _Condition(run, number, places, ids[mine], *at)
        g_u, *_, g_t = condition.pull(np.ones(len(mine)))
        slope = (g_u * rate[:, mine]).real.sum(axis=0) + g_t * h[mine]
        u_bar, *parts, t_bar = condition.pull(-moving[mine] / slope)
        value[:, mine] += u_bar
        ledger.note_leaves(parts, columns[mine], len(mine))
        if timed:
            ledger.t_bar[columns[mine]] += t_bar
    if timed:
        ledger.t_bar[columns] += reached
    return Inside(columns, value, x, stage_weights(run.tableau, x), np.ones(len(x), bool))


def pull_passing(
    run: Run, places: tuple[int, ...], step: TransposedStep, ledger: Ledger, columns: Array, chosen: Array, time: Array
) -> Inside:
    """Return the cotangent of the states at events on the way, at fixed times.

    Parameters
    ----------
    run : Run
    places : tuple of int
        Of the leaves to differentiate by.
    step : TransposedStep
        With its last stage.
    ledger : Ledger
        Is told the cotangents of parameters.
    columns : array of int, shape (m,)
        The columns of the step.
    chosen : array of int, shape (m,)
        Which of the run's crossings, all of one event.
    time : array, shape (m,)
        Cotangents of the times.
    """
    crossings = run.crossings
    x, h, ids = crossings.x[chosen], step.h[columns], crossings.ids[chosen]
    stages = [k[:, columns] for k in step.k]
    rate = h * sum(r * k for r, k in zip(stage_rates(run.tableau, x), stages))
    states = interpolate(run.tableau, step.y[0][:, columns], h, stages, x)
    condition = _Condition(run, int(crossings.event[chosen[0]]), places, ids, states, crossings.time[chosen])
    g_u, *_, g_t = condition.pull(np.ones(len(ids)))
    slope = (g_u * rate).real.sum(axis=0) + g_t * h
    value, *parts, _ = condition.pull(-time * h / slope)
    ledger.note_leaves(parts, columns, len(ids))
    return Inside(columns, value, x, list(stage_weights(run.tableau, x)), np.ones(len(x), bool))


class _Condition:
    """An event's condition where it vanished, traced by states, parameters and times."""

    def __init__(self, run: Run, number: int, places: tuple[int, ...], ids: Array, states: Array, times: Array):
        twice = np.zeros(2, int) if len(ids) == 1 else np.arange(len(ids))  # two columns at least, wherever it is called
        self._count, self._width = len(ids), len(twice)
        event, batch = run.settings.events[number], run.batch
        leaves = run.columns(batch.p.leaves, ids[twice])

        def called(variables: list[Any]) -> Any:
            filled = list(leaves)
            for place, variable in zip(places, variables[1:-1]):
                filled[place] = variable
            return event.condition(variables[0], batch.p.build(filled), variables[-1])

        given = [states[:, twice], *[leaves[place] for place in places], times[twice]]
        self._given = given
        self._traced = trace_backwards(called, Variables(given, list(range(len(given))), list))

    def pull(self, g: Array) -> list[Array]:
        """Return the cotangents of the states, the leaves, and the times."""
        seed = np.zeros(self._width)
        seed[: self._count] = g
        traced = self._traced
        seeds = [(place, seed) for place in traced.places if place >= 0]
        found = run_backward(traced.recording, seeds, len(self._given), keep=True)  # it is pulled twice
        n = self._count
        u_bar, *parts, t_bar = found
        u_bar = np.zeros_like(self._given[0]) if u_bar is None else u_bar
        return [u_bar[:, :n], *parts, np.zeros(n) if t_bar is None else t_bar[:n]]
