"""A solve on a device as one differentiable function: from initial states and parameters to saved and last states.

All results make one vector, as in `mpiad.ensemble.differentiable`. Where the arguments live on the host, so do the results
and their cotangents: each travels once. Derivatives are taken once; those of a gradient need `EnsembleVectorized`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.extend import defjvp_argnums, defvjp_argnums, primitive
from autograd.tracer import isbox

from mpiad._typing import Array
from mpiad.device import to_host
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.compiled.cuda.gpu_inputs import placed
from mpiad.ensemble.compiled.cuda.gpu_solver import Directions, Flight, Solver
from mpiad.ensemble.compiled.parameter_layout import Part
from mpiad.ensemble.retcodes import came_through
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.transport.device_arrays import is_device_array

__all__ = ["FEW", "Solved", "results_of"]

# Up to so many directions tangents cost less than the three runs of an adjoint.
FEW = 4
_U0, _LEAVES = 0, 1


class Solved:
    """A solve and where its results live.

    Parameters
    ----------
    solver : Solver
    flight : Flight
    carried : tuple of tuple of (str, int)
        Along which the flight carried tangents.
    by_tangent : bool
        Whether a gradient is computed by tangents.
    on_host : bool
        Whether results live on the host.
    """

    def __init__(self, solver: Solver, flight: Flight, carried: Directions, by_tangent: bool, on_host: bool):
        self.solver, self.flight, self.carried, self.by_tangent, self.on_host = solver, flight, carried, by_tangent, on_host
        # Whether times have derivatives, too.
        self.timed = flight.rows is not None

    def out(self, x: Array) -> Array:
        """Return an array where results live."""
        return self.solver.arrays.to_host(x) if self.on_host else x

    def parted(self, bar: Array) -> tuple[Array, list[Array]]:
        """Return the cotangents of the states, and on the device those of times, of one of all results."""
        if not self.timed:
            return bar, []
        count, arrays = self.solver.count, self.solver.arrays
        end = bar.size - count - self.flight.happened
        # Of what wasn't reached states are NaN, and so may their cotangents be.
        times = (bar[end : end + count], bar[end + count :])
        return bar[:end], [placed(arrays, part, float) for part in times]

    def place(self, x: Array) -> Array:
        """Return an array of states on the device."""
        return placed(self.solver.arrays, x, self.solver.real)

    def directions_of(self, argnums: Sequence[int]) -> Directions:
        """Return the directions of all numbers of some arguments."""
        found = [("u", c) for c in range(self.solver.d)] if _U0 in argnums else []
        return tuple(found + [self.solver.direction(j) for part in self.parts(argnums) for j in part.scalars])

    def parts(self, argnums: Sequence[int]) -> list[Part]:
        """Return the parts of the layout that are among the arguments."""
        return [part for part in self.solver.layout.parts if part.place + _LEAVES in argnums]

    def tangents(self, wanted: Directions) -> list[tuple[Directions, Flight]]:
        """Return flights that carry tangents, with the directions of each; more than a few take several."""
        if wanted and set(wanted) <= set(self.carried):
            return [(self.carried, self.flight)]
        groups = [wanted[i : i + FEW] for i in range(0, len(wanted), FEW)]
        return [(group, self.solver.solved(group)) for group in groups]


def results_of(solved: Solved, given: Batch) -> list[Array]:
    """Return the results as functions of what is traced.

    Parameters
    ----------
    solved : Solved
    given : Batch
        With traced values in it.

    Returns
    -------
    list of array
        Saved states, of shape (N, n_saved, d), and last ones, (N, d); with events and where something is traced when
        trajectories ended, (N,), and when all events were, in the order of the flight's rows, on the host.
    """
    # Nobody differentiates by what isn't traced, and times would make a second array of all states.
    solved.timed = solved.timed and given.traced
    vector = _solved(given.u0, *given.p.leaves, solved=solved)
    solver, n_saved = solved.solver, solved.solver.inputs.n_saved
    count, d = solver.count, solver.d
    cut = n_saved * d * count
    end = cut + d * count
    saved, last = anp.reshape(vector[:cut], (n_saved, d, count)), anp.reshape(vector[cut:end], (d, count))
    states = [anp.transpose(saved, (2, 0, 1)), anp.transpose(last)]
    if not solved.timed:
        return states
    # In one array with times, states have become double.
    states = [x if x.dtype == solver.real else x.astype(solver.real) for x in states]
    return [*states, to_host(vector[end : end + count]), to_host(vector[end + count :])]


@primitive
def _solved(u0: Array, *leaves: Any, solved: Solved) -> Array:
    """Return the results of a solve, which has run before."""
    flight = solved.flight
    if not solved.timed:
        return solved.out(flight.vector)
    return solved.out(np.concatenate([flight.vector.astype(float), flight.t_reached, flight.rows[4, : flight.happened]]))


def _solved_vjp(argnums: tuple[int, ...], ans: Array, args: tuple, kwargs: dict) -> Callable:
    solved = kwargs["solved"]
    _require_plain(args)

    def vjp(g: Array) -> list[Array]:
        _require_plain([g])
        with solved.solver.arrays.current():
            g, times = solved.parted(conform(g, *spec_like(ans)))
            bar = solved.place(g)
            rows = _contracted(solved, argnums, bar) if solved.by_tangent else _pulled(solved, argnums, bar, times)
            return [_as_argument(solved, rows[k], args[k]) for k in argnums]

    return vjp


def _require_plain(values: Sequence[Any]) -> None:
    if any(map(isbox, values)):
        raise NotImplementedError(
            "solve: EnsembleGPU has first derivatives only, but a derivative of one was asked for. Solve by "
            "EnsembleVectorized() where that is needed."
        )


def _pulled(solved: Solved, argnums: tuple[int, ...], bar: Array, times: Sequence[Array]) -> dict[int, Array]:
    """Return the cotangents of the arguments by the reverse kernel, as rows."""
    parts = solved.parts(argnums)
    found = solved.solver.pulled(solved.flight, bar, tuple(j for part in parts for j in part.scalars), times)
    rows, taken = {_U0: found.u0}, {True: 0, False: 0}
    for part in parts:
        first, source = taken[part.varies], found.p if part.varies else found.s
        taken[part.varies] = first + len(part.scalars)
        rows[part.place + _LEAVES] = source[first : taken[part.varies]]
    return rows


def _contracted(solved: Solved, argnums: tuple[int, ...], bar: Array) -> dict[int, Array]:
    """Return the cotangents of the arguments by tangents, as rows."""
    saved_bar, end_bar = solved.solver.parts(bar)
    found = {}
    for directions, flight in solved.tangents(solved.directions_of(argnums)):
        for k, direction in enumerate(directions):
            row = np.sum(flight.du_end[k] * end_bar, axis=0)
            if saved_bar.size:
                row = row + np.sum(flight.dsaved[k] * saved_bar, axis=(0, 1))
            # By a choice, not by a factor of zero: a tangent of what failed may be NaN.
            found[direction] = np.where(_alive(flight), row, 0)
    rows = {_U0: [found["u", c] for c in range(solved.solver.d)]} if _U0 in argnums else {}
    for part in solved.parts(argnums):
        mine = [found[solved.solver.direction(j)] for j in part.scalars]
        rows[part.place + _LEAVES] = mine if part.varies else [np.sum(row) for row in mine]
    return {k: np.stack(row) for k, row in rows.items() if row}


def _alive(flight: Flight) -> Array:
    return came_through(flight.codes)


def _as_argument(solved: Solved, rows: Array, arg: Any) -> Any:
    """Return rows in the shape and dtype of an argument, and where it lives."""
    rows = rows if is_device_array(arg) else solved.solver.arrays.to_host(rows)
    return conform(rows.reshape(np.shape(arg)), *spec_like(arg))


def _solved_jvp(argnums: tuple[int, ...], gs: Sequence[Any], ans: Array, args: tuple, kwargs: dict) -> Array:
    solved = kwargs["solved"]
    _require_plain([*args, *gs])
    with solved.solver.arrays.current():
        along = _along(solved, dict(zip(argnums, gs)), args)
        return solved.out(_pushed(solved, solved.directions_of(argnums), along))


def _pushed(solved: Solved, directions: Directions, along: dict[tuple[str, int], Array]) -> Array:
    """Return the tangent of the results, from how far each direction is gone."""
    solver = solved.solver
    flights = solved.tangents(directions)
    total = solver.arrays.full(solved.flight.vector.shape, 0, solver.real)
    saved, end = solver.parts(total)
    for group, flight in flights:
        for k, direction in enumerate(group):
            if direction in along:
                saved += np.where(_alive(flight), flight.dsaved[k] * along[direction], 0)
                end += np.where(_alive(flight), flight.du_end[k] * along[direction], 0)
    return total


def _along(solved: Solved, tangents: dict[int, Any], args: tuple) -> dict[tuple[str, int], Array]:
    """Return by how much each direction is gone: one number for all trajectories, or a row."""
    rows = {k: solved.place(conform(g, *spec_like(args[k]))) for k, g in tangents.items()}
    found = {("u", c): rows[_U0][c] for c in range(solved.solver.d)} if _U0 in rows else {}
    for part in solved.parts(tuple(rows)):
        flat = rows[part.place + _LEAVES].reshape(len(part.scalars), -1)
        found.update({solved.solver.direction(j): flat[i] for i, j in enumerate(part.scalars)})
    return found


defvjp_argnums(_solved, _solved_vjp)
defjvp_argnums(_solved, _solved_jvp)
