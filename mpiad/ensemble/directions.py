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

__all__ = ["FEW", "contracted", "directions_of", "in_common", "numbers", "numbers_of"]

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
        found += [(None, *number) for number in numbers(batch.u0, True)]
    for place in places:
        found += [(place, *number) for number in numbers(batch.p.leaves[place], batch.p.varies[place])]
    return found


def numbers(x: Array, varies: bool) -> list[tuple[Any, complex]]:
    """Return the places of one trajectory's numbers in an array, with 1, and again with 1j where they are complex.

    Parameters
    ----------
    x : array
    varies : bool
        Whether its last axis counts trajectories.
    """
    shape = np.shape(x)[:-1] if varies else np.shape(x)
    return [(index, unit) for index in np.ndindex(*shape) for unit in _units(x)]


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
) -> tuple[Array | None, dict[int, Array]]:
    """Return the cotangents of the initial states, where `by_u0`, and of the leaves, from tangents and seeds.

    `tangents(saving)` returns those of final and, with `saving`, of saved states along the numbers of `directions_of`.
    """
    batch, parts = run.batch, _parts(run, by_u0, places)
    end, saved = tangents(seeds.saved is not None)
    # Each number has a direction, so nothing of these stays as it is.
    u0 = np.empty_like(batch.u0) if by_u0 else None
    leaves = {place: np.empty_like(batch.p.leaves[place]) for place in places}
    if not run.live.all():
        seeds = seeds._replace(end=np.where(run.live, seeds.end, 0))
    for j, (place, index, unit) in enumerate(parts):
        part = in_common(seeds, end[j], None if saved is None else saved[j])
        into: Any = u0 if place is None else leaves[place]
        if place is not None and not batch.p.varies[place]:
            part = part.sum()
        if unit == 1.0:
            into[index] = part
        else:
            # Of a real function of a + ib the derivative is ∂/∂a - i ∂/∂b: see autograd's convention.
            into[index] -= 1j * part
    return u0, leaves


def in_common(seeds: Seeds, end: Array, saved: Any, times: Any = None, crossed: Any = None) -> Array:
    """Return for each trajectory what the cotangents of its results and their tangents have in common, shape (N,).

    Parameters
    ----------
    seeds : Seeds
    end, saved, times : array, shapes (d, N), (N, n_saved, d), (N,)
        Tangents; `saved` is needed where there are cotangents of saved states, `times` where there are some of times.
    crossed : (array of int, array), of shape (m,)
        The trajectories of events on the way, and the tangents of their times, where there are cotangents of them.
    """
    part = _sum_of_products(seeds.end, end)
    if seeds.saved is not None:
        part = part + _sum_of_products(*(x.reshape(len(part), -1).T for x in (seeds.saved, saved)))
    if seeds.reached is not None:
        part = part + seeds.reached * times
    if seeds.crossed is not None:
        part = part + np.bincount(crossed[0], seeds.crossed * crossed[1], len(part))
    return part


def _sum_of_products(a: Array, b: Array) -> Array:
    """Return the real part of the products' sum over the first axis, row after row.

    So a column's sum doesn't depend on those beside it, and no array is larger than a row, which stays in the cache.
    """
    total = np.zeros(a.shape[1], a.real.dtype)
    for x, y in zip(a, b):
        total += (x * y).real
    return total
