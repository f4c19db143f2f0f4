"""Tangents of a solve, for forward mode and for gradients by tangents.

`push_directions` returns the tangents of the results in several directions: combinations of tangents that the solve's
kernel has propagated, or those of the tangent kernel, or for solves by arrays the tangents of a replay of the steps.

A gradient by tangents takes one direction per number with respect to which a trajectory is differentiated. With d initial
values and m parameters per trajectory there are d + m directions, whatever the number of trajectories. If d + m is small,
tangents in a kernel cost less than an adjoint, whose cost doesn't depend on the number of directions. By arrays, or from
the record of a kernel, tangents cost at least as much as the adjoint, and are computed on request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.differentiation.forward import Bundle
from mpiad.ensemble.adjoint import Cotangents
from mpiad.ensemble.compiled.kernel_derivatives import InputTangents, carried_tangents, push_compiled, stacked
from mpiad.ensemble.compiled.kernel_solver import FIRST_LEAF
from mpiad.ensemble.replay import replayed
from mpiad.ensemble.run import Run, Seeds
from mpiad.transport.core.tracing import restoring_state
from mpiad.transport.devices.device_arrays import arrays_of, is_device_array

# Number of directions propagated together. Each direction needs as much memory as the states and stages of all columns.
_GROUP = 8


# Positions of arguments: initial states, start and end of tspan, given times of events, and first leaf of the parameters.
U0, START, END, DUE, LEAVES = range(5)
TIMES = {START, END, DUE}
NO_TIMES = np.empty((0, 0))


def push_directions(
    run: Run, args: Sequence[Array], tangents: Mapping[int, Sequence[Array]], n_results: int | None = None
) -> list[Sequence[Array]]:
    """Return the first `n_results` results of `replayed`, each as tangents in m directions; in `tangents` None is zero."""
    parts = _by_seeds(run, args, tangents) or _by_carried_tangents(run, args, tangents) or _by_kernel(run, args, tangents)
    return (parts or push_run(run, args, tangents))[:n_results]


def _by_seeds(run: Run, args: Sequence[Array], tangents: Mapping[int, Sequence[Array]]) -> list[Sequence[Array]] | None:
    """Return the result of `push_directions` if the kernel has propagated these tangents."""
    solver = run.outcome.solver
    if solver is None or not solver.seeds or run.outcome.carried is None:
        return None
    seeds = {k if k < FIRST_LEAF else k - FIRST_LEAF + LEAVES: x for k, x in solver.seeds.items()}
    if not all(k in seeds and _are_equal(gs, seeds[k]) for k, gs in tangents.items()):
        return None
    if any(x.any() for k, x in seeds.items() if k not in tangents):
        return None
    m = len(next(iter(tangents.values())))
    end, saved = run.outcome.carried
    return [saved[:m], np.swapaxes(end[:m], 1, 2), *_carried_times(run, m)]


def _are_equal(tangents: Sequence[Array | None], seeds: Array) -> bool:
    pairs = [(np.zeros_like(seed) if g is None else g, seed) for g, seed in zip(tangents, seeds)]
    return len(tangents) == len(seeds) and all(np.array_equal(*pair, equal_nan=True) for pair in pairs)


def _carried_times(run: Run, m: int) -> list[Array]:
    """Return the tangents of the times of events if the forward kernel has propagated those of states."""
    times = (run.event_times.reached, run.event_times.crossed) if run.settings.events else ()
    tangents = [np.zeros((m, *x.shape)) for x in times]
    table = run.outcome.event_tangents
    if times and table is not None:
        tangents[1] = table[:m, run.crossed_rows]
        if run.terminated.any():
            tangents[0][:, run.stops.ids] = table[:m, run.stop_rows]
    return tangents


def _by_carried_tangents(
    run: Run, args: Sequence[Array], tangents: Mapping[int, Sequence[Array]]
) -> list[Sequence[Array]] | None:
    """Return the result of `push_directions` from tangents that a kernel has propagated; None if some are missing."""
    parts = carried_parts(run, tangents)
    if parts is None:
        return None
    end, saved = parts
    results = saved, np.moveaxis(end, 1, 2)
    # The tangent along each number, times the factors of this number in the m directions.
    factors = [row for k in sorted(tangents) for row in _factors(run, k, args[k], tangents[k])]
    m = len(factors[0])
    if m == len(factors) and all((row == unit[:, None]).all() for row, unit in zip(factors, np.eye(m))):
        return [*results, *_carried_times(run, m)]
    totals: list[Sequence[Array]] = []
    for part in results:
        terms = (row.reshape(*row.shape, *[1] * (part.ndim - 2)) * along for row, along in zip(factors, part))
        totals.append(reduce(np.add, terms))
    return [*totals, *_carried_times(run, m)]


def _factors(run: Run, k: int, x: Array, gs: Sequence[Array]) -> Array:
    """Return the real numbers in m tangents of an argument, in the order of `numbers_of`, shape (numbers, m, N or 1)."""
    parts = stacked(x, gs).reshape(len(gs), -1, 1, run.batch.size if _varies(run, k) else 1)
    parts = np.concatenate([parts.real, parts.imag], axis=2) if np.iscomplexobj(x) else parts
    return np.swapaxes(parts.reshape(len(gs), -1, parts.shape[-1]), 0, 1)


def carried_parts(run: Run, argnums: Iterable[int]) -> tuple[Array, Array] | None:
    """Return the result of `carried_tangents` for single numbers of the arguments; None if some are missing."""
    solver, wanted = run.outcome.solver, set(argnums)
    if solver is None or not wanted.isdisjoint(TIMES):
        return None
    return carried_tangents(solver, run, U0 in wanted, [k - LEAVES for k in sorted(wanted - {U0})])


def _by_kernel(run: Run, args: Sequence[Array], tangents: Mapping[int, Sequence[Array]]) -> list[Sequence[Array]] | None:
    """Return the result of `push_directions` by a kernel; None if none supports the solve."""
    if run.outcome.solver is None:
        return None
    along = {k: stacked(args[k], gs) for k, gs in tangents.items()}
    m = len(next(iter(tangents.values())))
    u0 = along.get(U0, np.zeros((m, *run.batch.u0.shape), run.batch.u0.dtype))
    leaves = {k - LEAVES: tangent for k, tangent in along.items() if k >= LEAVES}
    results = push_compiled(run.outcome.solver, run, InputTangents(u0, leaves, *map(along.get, (START, END, DUE))))
    if results is None:
        return None
    return list(results) if run.settings.events else list(results[:2])


def cotangent_of(bars: Cotangents, k: int, args: Sequence[Array]) -> Array:
    """Return the cotangent of an argument, given its position."""
    if k >= LEAVES:
        return bars.leaves[k - LEAVES]
    due = np.pad(bars.due, ((0, len(args[DUE]) - len(bars.due)), (0, 0))) if k == DUE else None  # it has the first rows
    return (bars.u0, bars.start, bars.end, due)[k]


def push_run(run: Run, args: Sequence[Array], tangents: Mapping[int, Sequence[Array]]) -> list[Sequence[Array]]:
    """Return the result of `push_directions` by a replay of the steps."""
    inputs = list(args)
    with restoring_state(), Bundle() as bundle:
        for k, gs in tangents.items():
            inputs[k] = bundle.variable(args[k], list(gs))
        u0, start, end, due, *leaves = inputs
        results = [bundle.parts(x) for x in replayed(run, u0, start, end, leaves, due)]
    zeros = [None] * len(next(iter(tangents.values())))
    return [[np.zeros_like(value) if g is None else g for g in gs or zeros] for value, gs in results]


class Number(NamedTuple):
    """One of the real numbers with respect to which a trajectory is differentiated."""

    argnum: int  # position of an argument
    index: Any  # index of an entry, without the axis of trajectories
    unit: complex  # 1 for the real part of the entry, 1j for its imaginary part


def numbers_of(run: Run, argnums: Sequence[int], args: Sequence[Array]) -> list[Number]:
    """Return the real numbers of one trajectory with respect to which a run is differentiated."""
    numbers = []
    for k in argnums:
        shape = np.shape(args[k])[:-1] if _varies(run, k) else np.shape(args[k])
        units = (1.0, 1j) if np.iscomplexobj(args[k]) else (1.0,)
        numbers += [Number(k, index, unit) for index in np.ndindex(*shape) for unit in units]
    return numbers


def _varies(run: Run, k: int) -> bool:
    return k < LEAVES or run.batch.p.varies[k - LEAVES]


def pushed(run: Run, seeds: Seeds, argnums: Sequence[int], args: Sequence[Array]) -> Iterator[tuple[Number, Array]]:
    """Yield each number, and per trajectory the sum of products of the cotangents and the tangents of all results."""
    numbers, saved = numbers_of(run, sorted(argnums), args), None if seeds.saved is None else seeds.saved[:, : run.n_saved]
    reached = None if seeds.reached is None else run.masked(seeds.reached)
    seeds = seeds._replace(end=run.masked(seeds.end), saved=saved, reached=reached)
    carried = carried_parts(run, argnums)
    if carried is not None:
        for number, end, saved in zip(numbers, *carried):
            yield number, product_per_trajectory(run, seeds, saved, end.T)
        return
    for first in range(0, len(numbers), _GROUP):
        group = numbers[first : first + _GROUP]
        tangents: dict[int, list[Any]] = {number.argnum: [None] * len(group) for number in group}
        for j, (k, index, unit) in enumerate(group):
            total = np.zeros_like(args[k])
            total[index] = unit
            # A number may be on the host even if the states are on a device.
            tangents[k][j] = total if np.ndim(args[k]) or is_device_array(args[k]) else total[()]
        for number, *results in zip(group, *push_directions(run, args, tangents)):
            yield number, product_per_trajectory(run, seeds, *results)


def contracted(
    run: Run, argnums: Sequence[int], args: Sequence[Array], parts: Iterable[tuple[Number, Array]]
) -> dict[int, Array]:
    """Return the cotangents of the arguments, given the results of `pushed`."""
    cotangents: dict[int, Any] = {k: np.zeros_like(args[k]) for k in argnums}
    for (k, index, unit), part in parts:
        # In autograd's convention the gradient with respect to a + ib is ∂/∂a - i ∂/∂b.
        value = part if unit == 1.0 else -1j * part
        value = value if _varies(run, k) else value.sum()
        cotangents[k][index] += value if is_device_array(args[k]) else run.on_host(value)
    return cotangents


def product_per_trajectory(
    run: Run, seeds: Seeds, saved: Array | None, end: Array, times: Array | float = 0.0, crossed: Array | float = 0.0
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
