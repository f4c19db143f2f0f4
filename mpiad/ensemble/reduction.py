"""The concatenation of separately solved batches of trajectories, and their reduction to outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array, Shape, Tree
from mpiad.device.numpy import concatenate
from mpiad.ensemble.dense_output import JoinedOutput
from mpiad.ensemble.events import EventRows
from mpiad.ensemble.problem import EnsembleProblem
from mpiad.ensemble.solution import EnsembleSolution

_MOST_REPEATS = 1000


def reduced(problem: EnsembleProblem, batches: list[range], solved: Callable[..., EnsembleSolution]) -> EnsembleSolution:
    """Solve batch by batch until the reduction stops the solve; return the solution, whose `u` contains its outputs."""
    value: Any = [] if problem.u_init is None else problem.u_init
    parts, converged = [], False
    for numbers in batches:
        sol = solved(numbers)
        outputs = [_output(problem, sol, i, number, solved) for i, number in enumerate(numbers)]
        # The saved states of the batch aren't stored.
        parts.append(dataclasses.replace(sol, u=sol.u[:, :0], dense=None))
        if problem.reduction is None or not outputs:
            value = value + outputs if outputs else value
        else:
            value, converged = _pair(problem.reduction(value, outputs, numbers), "reduction", "(u, converged)")
        if converged:
            break
    return dataclasses.replace(joined(parts), u=value, converged=bool(converged))


def combined(problem: EnsembleProblem, parts: list[Tree], count: int) -> Tree:
    """Return the combined outputs of ranks: lists are concatenated, and results of a reduction are reduced as one batch."""
    if problem.reduction is None or all(isinstance(part, list) for part in parts):
        return [output for part in parts for output in part]
    start = [] if problem.u_init is None else problem.u_init
    value, _ = _pair(problem.reduction(start, parts, range(1, count + 1)), "reduction", "(u, converged)")
    return value


def _output(problem: EnsembleProblem, sol: EnsembleSolution, i: int, number: int, solved: Callable) -> Any:
    if problem.output_func is None:
        return sol[i]
    for repeat in range(1, _MOST_REPEATS + 1):
        one = sol[i] if repeat == 1 else solved(range(number, number + 1), repeat)[0]
        output, again = _pair(problem.output_func(one, number), "output_func", "(output, rerun)")
        if not again:
            return output
    raise ValueError(f"solve: output_func asked to solve trajectory {number} again {_MOST_REPEATS} times.")


def _pair(value: object, name: str, expected: str) -> tuple[Any, Any]:
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError(f"solve: {name} must return {expected}, but returned {type(value).__name__} {value!r}.")
    return value


def joined(parts: list[EnsembleSolution]) -> EnsembleSolution:
    """Return the concatenated solution of several batches."""
    if len(parts) == 1:
        return parts[0]
    # Batches without trajectories don't determine the states' shape.
    check_alike([(part.u_end.shape[1:], part.u_end.dtype) for part in parts if len(part)], "batches")
    events = EventRows.joined([part._event_rows for part in parts], [len(part) for part in parts])
    # If every step is saved, the batches have different numbers of saved times; reduced batches have no saved states.
    width, n_saved = (max(n) for n in zip(*((part.u.shape[1], part.t.shape[-1]) for part in parts)))
    times = joined_times([part.t for part in parts], [len(part) for part in parts], n_saved)
    names = ("u_end", "retcode", "t_reached", "naccept", "nreject", "nf")
    rest: Any = {name: concatenate([getattr(part, name) for part in parts]) for name in names}
    u = concatenate([widened(part.u, width) for part in parts])
    dense = JoinedOutput([(part.dense, len(part)) for part in parts]) if all(part.dense for part in parts) else None
    codes = np.concatenate([part.codes for part in parts])
    return EnsembleSolution(u, times, dense=dense, _event_rows=events, _codes=codes, **rest)


def check_alike(kinds: Sequence[tuple[Shape, np.dtype]], groups: str) -> None:
    """Raise a ValueError if the `kinds` of groups of trajectories (shape and dtype of a state) differ."""
    for shape, dtype in kinds[1:]:
        if (shape, dtype) != kinds[0]:
            different = f"{kinds[0][1]} of shape {kinds[0][0]} and {dtype} of shape {shape}"
            raise ValueError(f"solve: u0 of all trajectories must have one shape and dtype, but {groups} have {different}.")


def joined_times(times: list[Array], counts: list[int], width: int) -> Array:
    """Return the saved times of several groups of trajectories, without an axis of trajectories if all are equal."""
    if all(t.ndim == 1 and np.array_equal(t, times[0]) for t in times):
        return times[0]
    rows = [t if t.ndim == 2 else np.broadcast_to(t, (count, len(t))) for t, count in zip(times, counts)]
    return np.concatenate([widened(row, width) for row in rows])


def widened(array: Array, width: int) -> Array:
    """Pad the second axis of an array, shape (N, n, …), with NaN to a width."""
    missing = width - array.shape[1]
    if not missing:
        return array
    shape = (len(array), missing, *array.shape[2:])
    return concatenate([array, np.full_like(getval(array), np.nan, shape=shape)], axis=1)
