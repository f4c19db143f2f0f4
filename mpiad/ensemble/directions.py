"""The gradient of a solve by tangents: one per number with respect to which a trajectory is differentiated.

With d initial values and m parameters per trajectory there are d + m directions, whatever the number of trajectories. If
d + m is small, tangents cost less than an adjoint, whose cost doesn't depend on the number of directions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.run import Run, Seeds
from mpiad.ensemble.tangents import Directions, SavedTangents, push_run
from mpiad.transport.devices.device_arrays import arrays_of, is_device_array

# Number of directions propagated together. Each direction needs as much memory as the states and stages of all columns.
_GROUP = 8


class Number(NamedTuple):
    """One of the real numbers with respect to which a trajectory is differentiated."""

    place: int | None  # index of a leaf of the parameters; None for the initial state
    index: Any  # index of an entry of the leaf or the state
    unit: complex  # 1 for the real part of the entry, 1j for its imaginary part


def numbers_of(run: Run, by_u0: bool, places: Sequence[int]) -> list[Number]:
    """Return the real numbers of one trajectory with respect to which a run is differentiated."""
    batch = run.batch
    found = [Number(None, *number) for number in numbers(batch.u0, True)] if by_u0 else []
    for place in places:
        found += [Number(place, *number) for number in numbers(batch.p.leaves[place], batch.p.varies[place])]
    return found


def numbers(x: Array, varies: bool) -> list[tuple[Any, complex]]:
    """Return index and unit of each `Number` in an array; `varies`: whether its last axis counts trajectories."""
    shape = np.shape(x)[:-1] if varies else np.shape(x)
    units = (1.0, 1j) if np.iscomplexobj(x) else (1.0,)
    return [(index, unit) for index in np.ndindex(*shape) for unit in units]


def _zeros_like(leaf: Array) -> Any:
    """Return zeros like a leaf; the leaf may be a number on the host even if the states are on a device."""
    return np.zeros_like(leaf) if np.ndim(leaf) or is_device_array(leaf) else np.result_type(leaf).type(0)


def _directions(run: Run, group: Sequence[Number], places: Sequence[int]) -> Directions:
    batch = run.batch
    u0 = np.zeros_like(batch.u0, shape=(len(group), *batch.u0.shape))
    leaves: dict[int, list[Any]] = {place: [None] * len(group) for place in places}
    for j, (place, index, unit) in enumerate(group):
        if place is None:
            u0[j][index] = unit
        elif np.ndim(batch.p.leaves[place]):
            leaves[place][j] = np.zeros_like(batch.p.leaves[place])
            leaves[place][j][index] = unit
        else:
            leaf = batch.p.leaves[place]
            leaves[place][j] = _zeros_like(leaf) + np.result_type(leaf).type(unit)
    return Directions(u0, leaves)


def pushed(run: Run, seeds: Seeds, by_u0: bool, places: Sequence[int]) -> Iterator[tuple[Number, Array]]:
    """Yield each number, and per trajectory the sum of products of the cotangents and the tangents of all results."""
    found, saved = numbers_of(run, by_u0, places), None if seeds.saved is None else seeds.saved[:, : run.n_saved]
    seeds = seeds._replace(end=run.masked(seeds.end), saved=saved)
    for first in range(0, len(found), _GROUP):
        group = found[first : first + _GROUP]
        directions = _directions(run, group, places)
        tangents = None if saved is None else SavedTangents(run, directions)
        end = push_run(run, directions, tangents)
        for j, number in enumerate(group):
            saved_tangent = None if tangents is None else tangents.saved[j, :, : run.n_saved]
            yield number, product_per_trajectory(seeds, end[j], saved_tangent)


def contracted(
    run: Run, by_u0: bool, places: Sequence[int], parts: Iterable[tuple[Number, Array]]
) -> tuple[Array | None, dict[int, Array]]:
    """Return the cotangents of the initial states, if `by_u0`, and of the leaves, given the results of `pushed`."""
    batch = run.batch
    u0 = np.zeros_like(batch.u0) if by_u0 else None
    leaves: dict[int, Any] = {place: _zeros_like(batch.p.leaves[place]) for place in places}
    for (place, index, unit), part in parts:
        # In autograd's convention the gradient with respect to a + ib is ∂/∂a - i ∂/∂b.
        value = part if unit == 1.0 else -1j * part
        value = value if place is None or batch.p.varies[place] else value.sum()
        if place is None:
            u0[index] += value  # type: ignore[index]
        elif np.ndim(leaves[place]):
            leaves[place][index] += value
        else:
            leaves[place] = leaves[place] + value
    return u0, leaves


def product_per_trajectory(
    seeds: Seeds, end: Array, saved: Array, times: Array = None, crossed: Array = None, run: Run | None = None
) -> Array:
    """Return the sum of products of cotangents and tangents of all results of each trajectory, shape (N,).

    Only results that have cotangents need tangents: `end`, shape (d, N), of the final states; `saved`, (N, n_saved, d), of
    the saved states; `times`, (N,), of the final times; `crossed`, (m,), of the times of events (which also needs `run`).
    """
    part = _sum_of_products(seeds.end, end)
    if seeds.saved is not None:
        part = part + _sum_of_products(*(np.swapaxes(x.reshape(len(part), -1), 0, 1) for x in (seeds.saved, saved)))
    if seeds.reached is not None:
        part = part + seeds.reached * times
    if seeds.crossed is not None:
        part = part + _by_trajectory(run.crossed_ids, seeds.crossed * crossed, part)  # type: ignore[union-attr]
    return part


def _by_trajectory(ids: Array, values: Array, like: Array) -> Array:
    """Return the sum of the values of each trajectory; `ids` are the trajectories of the values."""
    xp = arrays_of(like)
    if xp is None:
        return np.bincount(ids, values, len(like))
    total = np.zeros_like(like)
    xp.add_at(total, ids, values)
    return total


def _sum_of_products(a: Array, b: Array) -> Array:
    """Return the real part of the sum of products over the second to last axis.

    Rows are added one after the other, so that a column's sum doesn't depend on other columns, and temporary arrays fit in
    the cache.
    """
    if type(b) is not np.ndarray:  # on a device each operation has a large overhead
        return np.sum((a * b).real, axis=-2)
    total = np.zeros(a.shape[1], a.real.dtype)
    for x, y in zip(a, b):
        total += (x * y).real
    return total
