"""The gradient of a solve from tangents: one for each number that a trajectory is differentiated by.

With d initial values and m parameters of a trajectory there are d + m directions, whatever the number of trajectories: for
a few of them that costs less than an adjoint, whose cost doesn't depend on their number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.run import Run
from mpiad.ensemble.seeds import Seeds
from mpiad.ensemble.tangents import Directions

__all__ = ["FEW", "contracted", "directions_of", "numbers_of"]

# Up to so many directions tangents cost less than the adjoint, or as much. (A choice by the number of trajectories as well
# would make a trajectory's last bits depend on it.)
FEW = 2


def numbers_of(run: Run, by_u0: bool, places: Sequence[int]) -> int:
    """Return how many real numbers of one trajectory a run is differentiated by."""
    return len(_parts(run, by_u0, places))


def _parts(run: Run, by_u0: bool, places: Sequence[int]) -> list[tuple[int | None, Any, complex]]:
    """Return the directions: a leaf's place (None: the initial state), which of its numbers, and 1 or 1j."""
    batch = run.batch
    found: list[tuple[int | None, Any, complex]] = []
    if by_u0:
        found += [(None, (i,), unit) for i in range(len(batch.u0)) for unit in _units(batch.u0)]
    for place in places:
        leaf = batch.p.leaves[place]
        shape = np.shape(leaf)[:-1] if batch.p.varies[place] else np.shape(leaf)
        found += [(place, index, unit) for index in np.ndindex(*shape) for unit in _units(leaf)]
    return found


def _units(x: Array) -> tuple[complex, ...]:
    return (1.0, 1j) if np.iscomplexobj(x) else (1.0,)


def directions_of(run: Run, by_u0: bool, places: Sequence[int]) -> Directions:
    """Return the directions of all numbers that a run is differentiated by."""
    batch, parts = run.batch, _parts(run, by_u0, places)
    u0 = np.zeros((len(parts), *batch.u0.shape), batch.u0.dtype)
    leaves: dict[int, list[Any]] = {place: [None] * len(parts) for place in places}
    for j, (place, index, unit) in enumerate(parts):
        if place is None:
            u0[j][index] = unit
        else:
            leaves[place][j] = np.zeros_like(batch.p.leaves[place])
            leaves[place][j][index] = unit
    return Directions(u0, leaves)


def contracted(
    run: Run, by_u0: bool, places: Sequence[int], seeds: Seeds, tangents: Callable
) -> tuple[Array, dict[int, Array]]:
    """Return the cotangents of the initial states and of the leaves: what the tangents have in common with the seeds."""
    batch, parts = run.batch, _parts(run, by_u0, places)
    end, saved = tangents(directions_of(run, by_u0, places), seeds.saved is not None)
    u0 = np.zeros_like(batch.u0)
    leaves = {place: np.zeros_like(batch.p.leaves[place]) for place in places}
    live_end = np.where(run.live, seeds.end, 0)
    for j, (place, index, unit) in enumerate(parts):
        part = _sum_of_rows((live_end * end[j]).real)
        if saved is not None:
            count = len(part)
            part = part + _sum_of_rows((seeds.saved * saved[j]).real.reshape(count, -1).T)
        # Of a real function of a + ib the derivative is ∂/∂a - i ∂/∂b: see autograd's convention.
        part = part if unit == 1.0 else -1j * part
        if place is None:
            u0[index] += part
        elif batch.p.varies[place]:
            leaves[place][index] += part
        else:
            leaves[place][index] += part.sum()
    return u0, leaves


def _sum_of_rows(rows: Array) -> Array:
    """Return the sum over the first axis, row after row: a column's sum doesn't depend on those beside it."""
    total = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total
