"""The gradient of a solve by tangents: one per number with respect to which a trajectory is differentiated.

With d initial values and m parameters per trajectory there are d + m directions, whatever the number of trajectories. If
d + m is small, tangents in a kernel cost less than an adjoint, whose cost doesn't depend on the number of directions. By
arrays, tangents cost at least as much as the adjoint, and are computed on request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.differentiation.forward import Bundle
from mpiad.ensemble.replay import replayed
from mpiad.ensemble.run import Run, Seeds
from mpiad.transport.core.tracing import restoring_state
from mpiad.transport.devices.device_arrays import arrays_of, is_device_array

# Number of directions propagated together. Each direction needs as much memory as the states and stages of all columns.
_GROUP = 8


# Positions of arguments: initial states, start and end of tspan, given times of events, and first leaf of the parameters.
U0, START, END, DUE, LEAVES = range(5)
NO_TIMES = np.empty((0, 0))


def arguments_of(run: Run) -> list[Any]:
    """Return the arguments of a run, in the order of their positions."""
    batch = run.batch
    return [batch.u0, batch.start, batch.end, NO_TIMES, *batch.p.leaves]


def push_run(run: Run, args: Sequence[Any], tangents: Mapping[int, Sequence[Any]]) -> list[list[Array]]:
    """Return the results of `replayed`, each as a list of tangents in m directions; in `tangents` None stands for zeros."""
    given = list(args)
    with restoring_state(), Bundle() as bundle:
        for k, gs in tangents.items():
            given[k] = bundle.variable(args[k], list(gs))
        u0, start, end, due, *leaves = given
        found = [bundle.parts(x) for x in replayed(run, u0, start, end, leaves, due)]
    zeros = [None] * len(next(iter(tangents.values())))
    return [[np.zeros_like(value) if g is None else g for g in gs or zeros] for value, gs in found]


class Number(NamedTuple):
    """One of the real numbers with respect to which a trajectory is differentiated."""

    argnum: int  # position of an argument
    index: Any  # index of an entry, without the axis of trajectories
    unit: complex  # 1 for the real part of the entry, 1j for its imaginary part


def numbers_of(run: Run, argnums: Sequence[int], args: Sequence[Any]) -> list[Number]:
    """Return the real numbers of one trajectory with respect to which a run is differentiated."""
    found = []
    for k in argnums:
        shape = np.shape(args[k])[:-1] if _varies(run, k) else np.shape(args[k])
        units = (1.0, 1j) if np.iscomplexobj(args[k]) else (1.0,)
        found += [Number(k, index, unit) for index in np.ndindex(*shape) for unit in units]
    return found


def _varies(run: Run, k: int) -> bool:
    return k < LEAVES or run.batch.p.varies[k - LEAVES]


def pushed(run: Run, seeds: Seeds, argnums: Sequence[int], args: Sequence[Any]) -> Iterator[tuple[Number, Array]]:
    """Yield each number, and per trajectory the sum of products of the cotangents and the tangents of all results."""
    found, saved = numbers_of(run, argnums, args), None if seeds.saved is None else seeds.saved[:, : run.n_saved]
    reached = None if seeds.reached is None else run.masked(seeds.reached)
    seeds = seeds._replace(end=run.masked(seeds.end), saved=saved, reached=reached)
    for first in range(0, len(found), _GROUP):
        group = found[first : first + _GROUP]
        tangents: dict[int, list[Any]] = {number.argnum: [None] * len(group) for number in group}
        for j, (k, index, unit) in enumerate(group):
            total = np.zeros_like(args[k])
            total[index] = unit
            # A number may be on the host even if the states are on a device.
            tangents[k][j] = total if np.ndim(args[k]) or is_device_array(args[k]) else total[()]
        for number, *results in zip(group, *push_run(run, args, tangents)):
            yield number, product_per_trajectory(run, seeds, *results)


def contracted(
    run: Run, argnums: Sequence[int], args: Sequence[Any], parts: Iterable[tuple[Number, Array]]
) -> dict[int, Array]:
    """Return the cotangents of the arguments, given the results of `pushed`."""
    found: dict[int, Any] = {k: np.zeros_like(args[k]) for k in argnums}
    for (k, index, unit), part in parts:
        # In autograd's convention the gradient with respect to a + ib is ∂/∂a - i ∂/∂b.
        value = part if unit == 1.0 else -1j * part
        value = value if _varies(run, k) else value.sum()
        found[k][index] += value if is_device_array(args[k]) else run.on_host(value)
    return found


def product_per_trajectory(
    run: Run, seeds: Seeds, saved: Array | None, end: Array, times: Array = None, crossed: Array = None
) -> Array:
    """Return the sum of products of cotangents and tangents of all results of each trajectory, shape (N,)."""
    # Only results with cotangents need tangents: `saved`, (N, n_saved, d), `end`, (N, d), `times`, (N,), `crossed`, (m,).
    part = _sum_of_products(seeds.end, np.swapaxes(end, 0, 1))
    if seeds.saved is not None and saved is not None:
        part = part + _sum_of_products(*(np.swapaxes(x.reshape(len(part), -1), 0, 1) for x in (seeds.saved, saved)))
    if seeds.reached is not None:
        part = part + seeds.reached * times
    if seeds.crossed is not None:
        part = part + _by_trajectory(run.event_times.ids, seeds.crossed * crossed, part)
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
    """Return the real part of the sum of products over the second to last axis."""
    # Added row by row, so that a column's sum doesn't depend on other columns, and temporary arrays fit in the cache.
    if type(b) is not np.ndarray:  # on a device each operation has a large overhead
        return np.sum((a * b).real, axis=-2)
    total = np.zeros(a.shape[1], a.real.dtype)
    for x, y in zip(a, b):
        total += (x * y).real
    return total
