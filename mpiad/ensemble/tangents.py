"""Forward mode of a solve: tangents carried along its accepted steps, from the first to the last.

Values and tangents of a block make one array of shape (1 + directions, d, n), so a sum over stages is one for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.differentiation.bundles import Bundle
from mpiad.ensemble.linearization import Tracing
from mpiad.ensemble.run import Run
from mpiad.ensemble.stage_systems import StageSystems
from mpiad.ensemble.step_sweep import Saved, StepSweep, Visit
from mpiad.ensemble.tangent_step import TangentRosenbrockStep, TangentStep
from mpiad.transport.tracing import restoring_state


class Directions(NamedTuple):
    """Along what to differentiate, in m directions."""

    u0: Array  # shape (m, d, N)
    # From places of leaves of the parameters to lists of m arrays in their shapes, None where one is zero.
    leaves: dict[int, list[Any]]


class SavedTangents:
    """The tangents of all saved states, kept as they come: `saved`, shape (m, N, slots, d)."""

    def __init__(self, run: Run, directions: Directions):
        m, d, count = directions.u0.shape
        self._run, self.saved = run, np.zeros_like(directions.u0, shape=(m, count, run.slots, d))

    def take(self, part: Saved, states: Array) -> None:
        """Take those of one step, shape (m, d, n); (m, s, d, n) where each column has several."""
        self.saved[:, part.ids, part.place] = np.swapaxes(states, -1, -2)

    def add(self, part: Saved, states: Array) -> None:
        """Add what values taken before gain in the step after."""
        self.saved[:, part.ids, part.place] += np.swapaxes(states, -1, -2)

    def close(self, start: Array, end: Array) -> None:
        """Take initial and final states, (m, d, N), which some of the saved ones are."""
        self._run.put_down(self.saved, start, at_start=True)
        self._run.put_down(self.saved, end, at_start=False)


def push_run(run: Run, directions: Directions, taker: SavedTangents | None = None) -> Array:
    """Return the tangents of the final states, shape (m, d, N), and hand those of saved ones over to `taker`, if any."""
    begin = run.masked(directions.u0)
    end = begin.copy()
    with np.errstate(all="ignore"), restoring_state(), Bundle() as bundle:
        along = partial(Tracing(run.field, tuple(directions.leaves), False).along, bundle)
        for sweep in run.sweeps():
            _Block(run, along, directions, sweep, taker).sweep(end)
    if taker is not None:
        taker.close(begin, end)
    return end


class _Block:
    """One block of columns on the way forwards."""

    def __init__(self, run: Run, along: Callable, directions: Directions, sweep: StepSweep, taker: SavedTangents | None):
        self._run, self._f_along, self._sweep, self._taker = run, along, sweep, taker
        self._leaves, varies = sweep.leaves, run.batch.p.varies
        self._along = [
            [None if g is None else g[..., sweep.ids] if varies[place] else g for g in gs]
            for place, gs in directions.leaves.items()
        ]
        self._varies = [varies[place] for place in directions.leaves]
        # What steps of one width share is made again where some trajectories have ended, and not in each step.
        self._width, self._columns = 0, slice(0, 0)
        self._step: Any = None
        self._systems = StageSystems(run, tuple(directions.leaves)) if run.tableau.implicit else None

    def sweep(self, end: Array) -> None:
        """Go from the first step to the last."""
        # A copy in the order of the sweep, in which those that still go on are the first columns.
        tangents = end[:, :, self._sweep.ids]
        for visit in self._sweep.forwards():
            self._push(visit, tangents)
        end[:, :, self._sweep.ids] = tangents

    def _push(self, visit: Visit, tangents: Array) -> None:
        width = len(visit.t)
        if width != self._width:
            self._step = self._step_of(width, tangents)
        step, columns = self._step, self._columns
        step.take(visit if type(columns) is slice else visit.of(columns), tangents[:, :, columns])
        new = step.new()[1:]
        if self._taker is not None:
            self._save(self._taker, visit, step, new)
        tangents[:, :, :width] = new[:, :, :width]

    def _step_of(self, width: int, tangents: Array) -> TangentStep:
        """Return what steps of so many columns have in common."""
        self._width = width
        columns = self._columns = self._run.doubled(width)
        leaves = self._run.columns(self._leaves, columns)
        along = [
            [None if g is None else g[..., columns] if varies else g for g in gs]
            for gs, varies in zip(self._along, self._varies)
        ]
        m, d = tangents.shape[:2]
        shape = 1 + m, d, width if type(columns) is slice else len(columns)
        made = self._run.coefficients, self._f_along(leaves, along), shape, tangents
        return TangentStep(*made) if self._systems is None else TangentRosenbrockStep(*made, self._systems, leaves, along)

    def _save(self, taker: SavedTangents, visit: Visit, step: TangentStep, new: Array) -> None:
        saved = self._sweep.saved(visit)
        for part in saved.at_end:
            taker.take(part, part.of(new))
        last = step.last
        # The last stage of a step is the first of the next, where its tangents are computed once for both.
        for part in saved.handed_on:
            taker.add(part, part.of(step.k[0][1:]) * (part.h * part.weights[-1]))
        for part in saved.inside:
            # At a fixed part of a fixed step a saved value is linear in the state and the stages, and so are the tangents.
            value = sum(part.of(k[1:]) * weight for k, weight in zip(step.k[:last], part.weights))
            if part.whole is None or part.whole.any():
                step.add_last_stage()
                weight = part.weights[last] if part.whole is None else part.weights[last] * part.whole
                value = value + part.of(step.k[last][1:]) * weight
            taker.take(part, part.of(step.u[1:]) + value * part.h)
