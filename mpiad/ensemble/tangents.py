"""Forward mode of a solve: tangents are propagated along its accepted steps, from the first to the last.

Arrays of shape (1 + directions, d, n) contain values and tangents of n trajectories, so sums over stages include both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.differentiation.forward import Bundle
from mpiad.ensemble.coefficients import Coefficients
from mpiad.ensemble.linearization import Tracing
from mpiad.ensemble.run import Run
from mpiad.ensemble.stage_systems import StageSystems
from mpiad.ensemble.step_sweep import Saved, StepSweep, Visit
from mpiad.transport.core.tracing import restoring_state


class TangentStep:
    """The states u before a step and its stages k, with their m tangents, in arrays of `shape` (1 + m, d, n).

    `write` writes f and its tangents (see `Tracing.along`); `like` is an array with the dtype and device of the states.
    """

    def __init__(self, coefficients: Coefficients, write: Callable, shape: tuple[int, int, int], like: Array):
        self._coefficients, self._write, self.last = coefficients, write, coefficients.last
        # C order is fastest; `like` may have another order.
        self.u, self._argument, self._end, self._term = (np.empty_like(like, shape=shape, order="C") for _ in range(4))
        self._stages = coefficients.stages(shape, self.u)
        self.k: list[Array] = []
        self._new: Array | None = None

    def compute(self, visit: Visit, tangents: Array) -> None:
        """Compute the stages of a visit, except the last."""
        u, h = self.u, visit.h
        u[0], u[1:] = visit.u, tangents
        self._times = self._coefficients.times(visit.t, h)
        self._h = h.astype(self._coefficients.real, copy=False)
        self._new, self.k = None, []
        for i in range(self.last):
            self._evaluate(self._sum(i, self._argument) if i else u)

    def new(self) -> Array:
        """Return the new state, which is the argument of the last stage."""
        if self._new is None:
            self._new = self._sum(self.last, self._end)
        return self._new

    def add_last_stage(self) -> None:
        """Compute the stage at the new state, unless it has been computed."""
        if len(self.k) == self.last:
            self._evaluate(self.new())

    def _sum(self, i: int, y: Array) -> Array:
        y = self._coefficients.row(i, self._stages, y, self._term)
        np.multiply(y, self._h, y)
        return np.add(y, self.u, y)

    def _evaluate(self, y: Array) -> None:
        i = len(self.k)
        self._write(self._stages[i], y, self._times[i])
        self.k.append(self._stages[i])


class TangentRosenbrockStep(TangentStep):
    """`TangentStep` for Rosenbrock methods, which doesn't compute f at the ends of the step.

    In W k_i = r_i, the tangent of k_i is W⁻¹ times the sum of the tangent of r_i and terms from the derivatives of W and
    ∂f/∂t: see `stage_systems`. `along`: for each differentiated leaf m tangents, or None for zeros.
    """

    def __init__(self, systems: StageSystems, leaves: Sequence[Any], along: Sequence[Sequence[Any]], *of_step: Any):
        super().__init__(*of_step)
        self._systems, self._leaves = systems, leaves
        self._rows = systems.tangent_rows(leaves, along, self.u[0])

    def compute(self, visit: Visit, tangents: Array) -> None:
        """Compute the stages of a visit."""
        real = self._coefficients.real
        self._size, self._time = (x.astype(real, copy=False) for x in (visit.h, visit.t))
        _, self._time_derivative, self._lu = self._systems.at(visit.u, self._leaves, self._time, self._size)
        super().compute(visit, tangents)

    def _sum(self, i: int, y: Array) -> Array:
        return self.u if i == 1 else super()._sum(i, y)

    def _evaluate(self, y: Array) -> None:
        i = len(self.k)
        k = self._stages[i]
        self.k.append(k)
        if i in (0, self.last):
            k[...] = 0
            return
        self._write(k, y, self._times[i])
        self._systems.add_stages(k, i, self.k)
        slope = self._systems.table.slopes[i - 1]
        if self._time_derivative is not None and slope:
            k[0] += slope * self._size * self._time_derivative
        self._lu.solve(k[0])
        moved = self._systems.push(
            self.u[0], self._leaves, self._time, k[0] * self._size, slope * self._size, self.u[1:], self._rows
        )
        for j in range(1, len(k)):
            k[j] += moved[:, j - 1]
            self._lu.solve(k[j])


class Directions(NamedTuple):
    """The m directions along which to differentiate."""

    u0: Array  # shape (m, d, N)
    leaves: dict[int, list[Any]]  # maps the index of a leaf to m arrays of its shape, or None for zeros


class SavedTangents:
    """Stores the tangents of all saved states: `saved`, shape (m, N, slots, d)."""

    def __init__(self, run: Run, directions: Directions):
        m, d, count = directions.u0.shape
        self._run, self.saved = run, np.zeros_like(directions.u0, shape=(m, count, run.slots, d))

    def take(self, part: Saved, states: Array) -> None:
        """Store the tangents `states` of values saved in a step, (m, d, n), or (m, s, d, n) for s values per column."""
        self.saved[:, part.ids, part.place] = np.swapaxes(states, -1, -2)

    def add(self, part: Saved, states: Array) -> None:
        """Add the contribution `states` of the next step to stored tangents."""
        self.saved[:, part.ids, part.place] += np.swapaxes(states, -1, -2)

    def close(self, start: Array, end: Array) -> None:
        """Store the tangents of saved values that are initial or final states, (m, d, N)."""
        self._run.write_saved(self.saved, start, at_start=True)
        self._run.write_saved(self.saved, end, at_start=False)


def push_run(run: Run, directions: Directions, stored: SavedTangents | None = None) -> Array:
    """Return the tangents of the final states, shape (m, d, N), and store those of saved states in `stored`, if given."""
    begin = run.masked(directions.u0)
    end = begin.copy()
    with np.errstate(all="ignore"), restoring_state(), Bundle() as bundle:
        along = partial(Tracing(run.field, tuple(directions.leaves), False).along, bundle)
        for sweep in run.sweeps():
            _Block(run, along, directions, sweep, stored).sweep(end)
    if stored is not None:
        stored.close(begin, end)
    return end


class _Block:
    """The tangents of one block of columns (trajectories) in the forward sweep."""

    def __init__(self, run: Run, along: Callable, directions: Directions, sweep: StepSweep, stored: SavedTangents | None):
        self._run, self._f_along, self._sweep, self._stored = run, along, sweep, stored
        self._leaves, varies = sweep.leaves, run.batch.p.varies
        self._along = [
            [None if g is None else g[..., sweep.ids] if varies[place] else g for g in gs]
            for place, gs in directions.leaves.items()
        ]
        self._varies = [varies[place] for place in directions.leaves]
        # The step object is created again only when the number of columns changes.
        self._width, self._columns = 0, slice(0, 0)
        self._step: Any = None
        self._systems = StageSystems(run, tuple(directions.leaves)) if run.tableau.implicit else None

    def sweep(self, end: Array) -> None:
        # A copy, with active trajectories in the first columns.
        tangents = end[:, :, self._sweep.ids]
        for visit in self._sweep.forwards():
            self._push(visit, tangents)
        end[:, :, self._sweep.ids] = tangents

    def _push(self, visit: Visit, tangents: Array) -> None:
        width = len(visit.t)
        if width != self._width:
            self._step = self._step_of(width, tangents)
        step, columns = self._step, self._columns
        step.compute(visit if type(columns) is slice else visit.of(columns), tangents[:, :, columns])
        new = step.new()[1:]
        if self._stored is not None:
            self._save(self._stored, visit, step, new)
        tangents[:, :, :width] = new[:, :, :width]

    def _step_of(self, width: int, tangents: Array) -> TangentStep:
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
        return TangentStep(*made) if self._systems is None else TangentRosenbrockStep(self._systems, leaves, along, *made)

    def _save(self, stored: SavedTangents, visit: Visit, step: TangentStep, new: Array) -> None:
        saved = self._sweep.saved(visit)
        for part in saved.at_end:
            stored.take(part, part.of(new))
        last = step.last
        # The last stage of a step is the first stage of the next step, which computes its tangents.
        for part in saved.handed_on:
            stored.add(part, part.of(step.k[0][1:]) * (part.h * part.weights[-1]))
        for part in saved.inside:
            value = sum(part.of(k[1:]) * weight for k, weight in zip(step.k[:last], part.weights))
            if part.whole is None or part.whole.any():
                step.add_last_stage()
                weight = part.weights[last] if part.whole is None else part.weights[last] * part.whole
                value = value + part.of(step.k[last][1:]) * weight
            stored.take(part, part.of(step.u[1:]) + value * part.h)
