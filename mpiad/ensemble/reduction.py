"""Outputs of single trajectories, and their reduction batch by batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from mpiad.ensemble.joining import joined
from mpiad.ensemble.problem import EnsembleProblem
from mpiad.ensemble.solution import EnsembleSolution

__all__ = ["combined", "reduced"]

# A trajectory that is never good enough would be solved again without end.
_MOST_REPEATS = 1000


def reduced(
    problem: EnsembleProblem, batches: list[range], solved: Callable[..., EnsembleSolution]
) -> EnsembleSolution:
    """Solve batch by batch until all are done or the reduction says to stop.

    Parameters
    ----------
    batches : list of range
        Numbers of trajectories, from 1.
    solved : callable
        ``solved(numbers, repeat)``

    Returns
    -------
    EnsembleSolution
        Of the batches that were solved; its `u` is what the reduction made.
    """
    kept: Any = [] if problem.u_init is None else problem.u_init
    parts, converged = [], False
    for numbers in batches:
        sol = solved(numbers)
        outputs = [_output(problem, sol, i, number, solved) for i, number in enumerate(numbers)]
        # What is kept of the batch is its outputs; the states saved on the way aren't needed any more.
        parts.append(dataclasses.replace(sol, u=sol.u[:, :0], dense=None))
        if problem.reduction is None or not outputs:
            kept = kept + outputs if outputs else kept
        else:
            kept, converged = _pair(problem.reduction(kept, outputs, numbers), "reduction", "(u, converged)")
        if converged:
            break
    return dataclasses.replace(joined(parts), u=kept, t=sol.t, converged=bool(converged))


def combined(problem: EnsembleProblem, parts: list[Any], count: int) -> Any:
    """Return what several ranks have made, as one: lists one after the other, others reduced as a batch of their own."""
    if problem.reduction is None or all(isinstance(part, list) for part in parts):
        return [output for part in parts for output in part]
    start = [] if problem.u_init is None else problem.u_init
    made, _ = _pair(problem.reduction(start, parts, range(1, count + 1)), "reduction", "(u, converged)")
    return made


def _output(problem: EnsembleProblem, sol: EnsembleSolution, i: int, number: int, solved: Callable) -> Any:
    if problem.output_func is None:
        return sol[i]
    output, again = _pair(problem.output_func(sol[i], number), "output_func", "(output, rerun)")
    repeat = 1
    while again:
        repeat += 1
        if repeat > _MOST_REPEATS:
            raise ValueError(f"solve: output_func asked to solve trajectory {number} again {_MOST_REPEATS} times.")
        trial = solved(range(number, number + 1), repeat)[0]
        output, again = _pair(problem.output_func(trial, number), "output_func", "(output, rerun)")
    return output


def _pair(value: Any, name: str, expected: str) -> tuple[Any, Any]:
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError(f"solve: {name} must return {expected}, but returned {type(value).__name__} {value!r}.")
    return value
