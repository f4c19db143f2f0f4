"""The first derivatives of a solve by a kernel on a GPU, for `solve_operator`.

If the arguments are on the host, the results and their cotangents are on the host, too; each array is copied once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import autograd.numpy as anp
import numpy as np

from mpiad._typing import Array
from mpiad.device import to_host
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.compiled.cuda.gpu_inputs import device_rows
from mpiad.ensemble.compiled.cuda.gpu_solver import DeviceResults, Directions, Solver
from mpiad.ensemble.compiled.trace import PackedLeaf
from mpiad.ensemble.compiled.traced_problem import FEW
from mpiad.ensemble.differentiable import solve_operator
from mpiad.ensemble.directions import LEAVES, NO_TIMES, U0
from mpiad.ensemble.outcome import came_through
from mpiad.transport.devices.device_arrays import is_device_array


class Solved:
    """A solve on a device.

    `carried`: the directions of tangents in the results. `by_tangent`: whether a gradient is computed by tangents.
    `on_host`: whether the caller's arrays are on the host.
    """

    def __init__(self, solver: Solver, results: DeviceResults, carried: Directions, by_tangent: bool, on_host: bool):
        self.solver, self.results, self.carried = solver, results, carried
        self.by_tangent, self.on_host = by_tangent, on_host
        self.timed = results.rows is not None  # whether times have derivatives

    @property
    def vector(self) -> Array:
        """All results as one vector: states, end times of trajectories, times of events."""
        results = self.results
        if not self.timed:
            return self._to_caller(results.vector)
        events = results.rows[4, : results.found_events]
        return self._to_caller(np.concatenate([results.vector.astype(float), results.t_reached, events]))

    def _to_caller(self, x: Array) -> Array:
        return self.solver.arrays.to_host(x) if self.on_host else x

    def _to_device(self, x: Array) -> Array:
        return device_rows(self.solver.arrays, x, self.solver.real)

    def _directions(self, argnums: Sequence[int]) -> Directions:
        found = [("u", c) for c in range(self.solver.d)] if U0 in argnums else []
        return tuple(found + [self.solver.traced.direction(j) for part in self._parts(argnums) for j in part.scalars])

    def _parts(self, argnums: Sequence[int]) -> list[PackedLeaf]:
        return [part for part in self.solver.traced.packing.parts if part.place + LEAVES in argnums]

    def _tangents(self, wanted: Directions) -> list[tuple[Directions, DeviceResults]]:
        """Return results with tangents in the wanted directions: of this solve, or of one solve per `FEW` directions."""
        if wanted and set(wanted) <= set(self.carried):
            return [(self.carried, self.results)]
        groups = [wanted[i : i + FEW] for i in range(0, len(wanted), FEW)]
        return [(group, self.solver.solved(group)) for group in groups]

    # ---- reverse mode

    def pull(self, argnums: Sequence[int], args: Sequence[Any], g: Array) -> dict[int, Array]:
        """Return the cotangents of arguments; `g`: the cotangent of `vector`."""
        solver = self.solver
        with solver.arrays.current():
            bar, times = self._split(g)
            bar = self._to_device(bar)
            rows = self._contracted(argnums, bar) if self.by_tangent else self._adjoint(argnums, bar, times)
            bars = {k: rows[k] if is_device_array(args[k]) else solver.arrays.to_host(rows[k]) for k in argnums}
            return {k: row.reshape(np.shape(args[k])) for k, row in bars.items()}

    def _split(self, bar: Array) -> tuple[Array, list[Array]]:
        """Split the cotangent of all results into those of the states and of the times; the latter are on the device."""
        if not self.timed:
            return bar, []
        count, arrays = self.solver.count, self.solver.arrays
        end = bar.size - count - self.results.found_events
        return bar[:end], [device_rows(arrays, part, float) for part in (bar[end : end + count], bar[end + count :])]

    def _adjoint(self, argnums: Sequence[int], bar: Array, times: Sequence[Array]) -> dict[int, Array]:
        """Return the cotangents of the arguments, as rows, by the reverse kernel."""
        parts = self._parts(argnums)
        found = self.solver.pulled(self.results, bar, tuple(j for part in parts for j in part.scalars), times)
        rows, stops = {U0: found.u0}, {True: 0, False: 0}
        for part in parts:
            first, source = stops[part.varies], found.p if part.varies else found.s
            stops[part.varies] = first + len(part.scalars)
            rows[part.place + LEAVES] = source[first : stops[part.varies]]
        return rows

    def _contracted(self, argnums: Sequence[int], bar: Array) -> dict[int, Array]:
        """Return the cotangents of the arguments, as rows, by tangents."""
        saved_bar, end_bar = self.solver.parts(bar)
        found = {}
        for directions, results in self._tangents(self._directions(argnums)):
            for k, direction in enumerate(directions):
                row = np.sum(results.du_end[k] * end_bar, axis=0)
                if saved_bar.size:
                    row = row + np.sum(results.dsaved[k] * saved_bar, axis=(0, 1))
                # Tangents of failed trajectories may be NaN, which a factor of zero wouldn't remove.
                found[direction] = np.where(came_through(results.codes), row, 0)
        rows = {U0: [found["u", c] for c in range(self.solver.d)]} if U0 in argnums else {}
        for part in self._parts(argnums):
            scalars = [found[self.solver.traced.direction(j)] for j in part.scalars]
            rows[part.place + LEAVES] = scalars if part.varies else [np.sum(row) for row in scalars]
        return {k: np.stack(row) for k, row in rows.items() if row}

    # ---- forward mode

    def push(self, args: Sequence[Any], tangents: Mapping[int, Any]) -> Array:
        """Return the tangent of `vector`."""
        solver = self.solver
        with solver.arrays.current():
            coefficients = self._coefficients(tangents)
            total = solver.arrays.full(self.results.vector.shape, 0, solver.real)
            saved, end = solver.parts(total)
            for group, results in self._tangents(self._directions(tuple(tangents))):
                alive = came_through(results.codes)
                for k, direction in enumerate(group):
                    if direction in coefficients:
                        saved += np.where(alive, results.dsaved[k] * coefficients[direction], 0)
                        end += np.where(alive, results.du_end[k] * coefficients[direction], 0)
            return self._to_caller(total)

    def _coefficients(self, tangents: Mapping[int, Any]) -> dict[tuple[str, int], Array]:
        """Return the factor of the tangents in each direction: an array of one number, or of one per trajectory."""
        rows = {k: self._to_device(g) for k, g in tangents.items()}
        found = {("u", c): rows[U0][c] for c in range(self.solver.d)} if U0 in rows else {}
        for part in self._parts(tuple(rows)):
            flat = rows[part.place + LEAVES].reshape(len(part.scalars), -1)
            found.update({self.solver.traced.direction(j): flat[i] for i, j in enumerate(part.scalars)})
        return found

    def pull_traced(self, argnums: Sequence[int], args: Sequence[Any], g: Array) -> NoReturn:
        """Refuse derivatives of derivatives."""
        raise NotImplementedError(
            "solve: EnsembleGPU supports only first derivatives, but a derivative of a derivative was requested. Use "
            "EnsembleVectorized() instead."
        )

    push_traced = pull_traced


def results_of(solved: Solved, given: Batch) -> list[Array]:
    """Return saved states, (N, n_saved, d), and final states, (N, d), with derivatives with respect to `given`.

    If times have derivatives, also return end times, (N,), and the times in the table of events, (m,), on the host.
    """
    # Without derivatives, appending times to the vector would needlessly copy all states.
    solved.timed = solved.timed and given.traced
    vector = solve_operator(given.u0, given.start, given.end, NO_TIMES, *given.p.leaves, solved=solved)
    solver, n_saved = solved.solver, solved.solver.inputs.n_saved
    count, d = solver.count, solver.d
    start = n_saved * d * count
    end = start + d * count
    saved, last = anp.reshape(vector[:start], (n_saved, d, count)), anp.reshape(vector[start:end], (d, count))
    states = [anp.transpose(saved, (2, 0, 1)), anp.transpose(last)]
    if not solved.timed:
        return states
    # In a vector with times, states are double.
    states = [x if x.dtype == solver.real else x.astype(solver.real) for x in states]
    return [*states, to_host(vector[end : end + count]), to_host(vector[end + count :])]
