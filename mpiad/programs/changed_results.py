"""Results of a replay that aren't what the program was made for: how that is seen, and what it raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpiad.primitives.catalogue import BCAST
from mpiad.primitives.operation import Operation
from mpiad.programs.array_program import Node
from mpiad.programs.schedule import Loop, Schedule


class Changed(TypeError):
    """Report a call whose result isn't what the program was made for."""

    # What was communicated in this run until then, that call's result the last; None where that isn't known.
    log: list[Any] | None = None


def raise_changed(made: Any, node: Node, log: list[Any] | None = None) -> None:
    """Raise what says of which call the result has changed."""
    name = getattr(node.data.fun, "__name__", repr(node.data.fun))
    line = "" if node.site is None else f"{node.site.text}: "
    error = Changed(
        f"{line}{name} returns an array of shape {np.shape(made)}, and returned one of shape {node.shape} for the same "
        "arguments when the function was compiled. Leave it out of the jitted function"
    )
    if log is not None:
        error.log = list(log)
        log.clear()
    raise error


def is_looked_at(schedule: Schedule, at: int) -> bool:
    """Tell whether a communication may give something else than in the trace."""
    step = schedule.steps[at]
    if isinstance(step, Loop) or step.in_place:
        return False
    node = schedule.program.nodes[step.node]
    if node.kind != "communicate" or node.data.kind in ("settle", "opaque"):
        return node.kind == "communicate"
    fun = node.data.fun
    if isinstance(fun, Operation):  # of what is copied to all, ranks may know nothing before
        known = fun is not BCAST or node.data.args[1].spec is not None
    else:
        known = fun.in_place is not None or fun.alike
    return not known and node.dtype != object


def condition_of(node: Node, made: str, bound: Callable[[Any], str]) -> str:
    """Return the text of the condition under which a result is no longer that of the trace.

    The result is called `made`; `bound` gives a value a name.
    """
    if node.data.kind == "settle":
        return f"{made} != {bound(node.data.kwargs['expected'])}"
    if node.data.kind == "opaque":
        return f"[(x.shape, x.dtype) for x in {made}[:-1]] != {bound(node.data.kwargs['expected'])}"
    return f"{made}.shape != {node.shape} or {made}.dtype != {bound(node.dtype)}"
