"""Which communications of a program are prepared: those from one buffer into another, both small ones that stay."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from mpiad.programs.message_numbers import is_numbered
from mpiad.programs.schedule import Loop, Schedule

__all__ = ["prepared_steps"]

_NOTHING = np.empty(0)


def prepared_steps(
    schedule: Schedule, made: Callable[[int], Sequence[int]], is_large: Callable[[int], bool], in_kernels: Collection[int]
) -> tuple[set[int], set[int]]:
    """Return the steps that can be prepared, and those whose messages have numbers.

    `made` tells which buffers a step returns, and `is_large` of a buffer whether it may lie somewhere else in each run;
    kernels read or write those of `in_kernels`.
    """
    found: set[int] = set()
    numbered: set[int] = set()
    staying: set[int] = set()  # results
    for at, step in enumerate(schedule.steps):
        if isinstance(step, Loop) or step.in_place:
            continue
        node = schedule.program.nodes[step.node]
        if node.kind != "communicate" or node.data.kind != "communicate":
            continue
        call, results = node.data, made(at)
        if is_numbered(call.args[1]):
            numbered.add(at)
        if call.fun.prepared is None or len(results) != 1 or is_large(results[0]) or len(step.inputs) != 1:
            continue
        x = step.inputs[0]
        kind = schedule.buffers[x].kind
        if is_large(x) or kind == "alias" or kind == "result" and x not in staying and x not in in_kernels:
            continue
        if call.fun.prepared(call.args[1], _NOTHING, _NOTHING) is not None:
            found.add(at)
            staying.add(results[0])
    # Messages are counted in one way by all of them.
    return (found if numbered <= found else found - numbered), numbered
