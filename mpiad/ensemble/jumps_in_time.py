"""The warning about an f that jumps at a time in p, if no event occurs at this time.

The derivative of ``np.where(t < p[0], 1.0, 3.0)`` with respect to ``p[0]`` is zero wherever it exists, so without an event
at ``t = p[0]`` the derivative of a solution doesn't contain the effect of this time. The comparison of t is found in the
program of f. For a few trajectories the time is located at which the comparison changes, and f is evaluated on both sides:
there is no warning if f is continuous, as is ``np.where(t < p[0], 0.0, t - p[0])``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array
from mpiad.compiling.arguments import real_dtype, row_parts
from mpiad.compiling.program import Program, evaluated, place_of, simplify
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.compiled.trace import packing_of
from mpiad.ensemble.compiled.traced_problem import TracedProblem, Warn
from mpiad.ensemble.event import Event
from mpiad.ensemble.field_jacobian import field_program

_COMPARISONS = frozenset("less less_equal greater greater_equal".split())
_TRAJECTORIES, _TIMES = 3, 64  # numbers of examined trajectories, and of times among which changes are searched
_JUMP = 1e-6  # the least jump, relative to the largest value of f
_NEAR = 1e-9  # the distance of an event from the jump up to which it counts as an event at the jump, relative to tspan


def warn_of_jumps_in_time(warn: Warn, plan: TracedProblem | None, inputs: Batch, events: Sequence[Event]) -> None:
    """Warn if f jumps at a time that depends on differentiated parameters, and no event occurs at this time.

    `plan`: the traced problem of a kernel; None for a solve by arrays.
    """
    boxed = [place for place, leaf in enumerate(inputs.p.leaves) if isbox(leaf)]
    if not boxed or not inputs.size:
        return
    program = field_program(inputs.plain()) if plan is None else plan.program
    if program is None or not _comparisons(program, None):
        return
    batch, packing = inputs.plain(), packing_of(inputs.p)
    comparisons = _comparisons(program, frozenset(j for part in packing.parts if part.place in boxed for j in part.scalars))
    for k in range(min(batch.size, _TRAJECTORIES)):
        one = batch.share(np.array([k])).on_host()
        rows = packing.numbers(one.p.leaves, 1, real_dtype(one.u0.dtype))
        values = [*(np.ravel(rows[j])[0] for j in range(packing.size)), *(plan.numbers if plan else ())]
        for comparison in comparisons:
            for before, after in _changes(program, comparison, values, one):
                if _jumps(program, values, one, before, after) and not _has_event(events, one, before, after):
                    warn(
                        batch.f,
                        f"f ({place_of(batch.f)}) compares t with differentiated parameters and jumps where the comparison "
                        "changes, but no event occurs there, so derivatives don't contain the effect of this time. Pass an "
                        "event at the time of the jump, for example events=Event(times=lambda p: [p[0]], affect=lambda u, "
                        "p, t: u), whose affect may leave the state unchanged",
                    )
                    return


@lru_cache(256)
def _comparisons(program: Program, parameters: frozenset[int] | None) -> tuple[Program, ...]:
    """Return the programs of the comparisons of the time with parameters of these indices, by default with any of them."""
    reads, result = list[set[str]](), []
    for i, (operation, arguments, value) in enumerate(program.instructions):
        groups = set[str]().union(*(reads[k] for k in arguments))
        if isinstance(value, tuple):
            group, first, *count = value
            places = range(first, first + (count[0] if count else 1))
            differentiated = parameters is None or not parameters.isdisjoint(places)
            if group != "parameter" or differentiated:
                groups.add(group)
        elif operation == "stop_gradient":
            groups.discard("parameter")
        reads.append(groups)
        if operation in _COMPARISONS and groups == {"time", "parameter"}:
            result.append(simplify(Program(program.groups, program.instructions, [i])))
    return tuple(result)


def _changes(program: Program, comparison: Program, values: list[float], one: Batch) -> Iterator[tuple[float, float]]:
    """Yield the neighboring times before and after which a comparison has different values, in ascending order."""

    def value(times: Array) -> Array:
        state = [0.0] * program.groups["state"]
        return np.broadcast_to(evaluated(comparison, state, values, [times])[0], times.shape)

    times = np.linspace(min(one.start[0], one.end[0]), max(one.start[0], one.end[0]), _TIMES)
    known = value(times)
    for j in np.flatnonzero(known[1:] != known[:-1]):
        low, high = times[j], times[j + 1]
        while low < (middle := 0.5 * (low + high)) < high:
            low, high = (middle, high) if value(np.array([middle]))[0] == known[j] else (low, middle)
        yield low, high


def _jumps(program: Program, values: list[float], one: Batch, before: float, after: float) -> bool:
    """Return whether f has different values at two neighboring times, at the initial state or near it."""
    times = np.append(np.linspace(one.start[0], one.end[0], _TIMES), [before, after])
    state = row_parts(one.u0)[:, 0] if np.iscomplexobj(one.u0) else one.u0[:, 0]
    for u in (state, state + 0.01 * (1 + np.abs(state))):
        f = np.stack([np.broadcast_to(x, times.shape) for x in evaluated(program, u, values, [times])])
        largest = np.max(np.abs(f), axis=1, initial=0.0, where=np.isfinite(f))
        if (np.abs(f[:, -1] - f[:, -2]) > _JUMP * largest).any():
            return True
    return False


def _has_event(events: Sequence[Event], one: Batch, before: float, after: float) -> bool:
    """Return whether a step ends at an event between two neighboring times, or at most `_NEAR` apart from them."""
    near = _NEAR * abs(one.end[0] - one.start[0])
    ids, times = np.zeros(2, int), np.array([before - near, after + near])
    p = one.parameters(ids)
    for event in events:
        if event.times is not None:
            due = np.array([np.ravel(time)[0] for time in event.due(p)])
            if ((times[0] <= due) & (due <= times[1])).any():
                return True
        elif event.stops and np.prod(np.sign(event.value(one.u0[:, ids], p, times))) <= 0:
            return True
    return False
