"""Calls of a compiled function within a gradient that carries tangents along, as in `hvp(jit(f))`.

The gradient's tape records one node, and its outer tape carries the tangents. The program is that of f and its reverse
pass, both with their tangents, traced under two tapes of its own that are nested as those around the call: so its
communications are those of the interpreted function, in the same order. As in `calls_on_tape`, the part before the
program's cut is run by the call, and the rest when the node is reached in the reverse pass.

Such a program is traced by shapes alone. A function that needs values is interpreted here, without a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from autograd.tracer import Box, getval, new_box

from mpiad._typing import Function
from mpiad.differentiation.nodes import TangentNode
from mpiad.differentiation.tape import TangentTape
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.primitives.operation import suspended
from mpiad.programs.closure import HoldsTraced, Unfollowed, watch_of
from mpiad.programs.entry import (
    MOST_TRACES,
    UNKNOWN,
    Entry,
    count,
    entry_by_shapes,
    in_program,
    is_shown,
)
from mpiad.programs.signature import Arguments
from mpiad.programs.steps import Traced
from mpiad.programs.tape_node import Lease, apart, backwards, placed, require_of
from mpiad.programs.trace_run import TraceRun, as_value
from mpiad.pytrees import is_variable
from mpiad.transport.tracing import tracing

if TYPE_CHECKING:
    from mpiad.programs.function import Jitted

_boxes = Box.types


def called_with_tangents_of_gradients(
    jitted: Jitted, given: Arguments, boxed: Sequence[int], args: tuple, kwargs: dict
) -> Any:
    """Call a compiled function on the tape of a gradient within one that carries tangents."""
    tape: Any = tracing.tape
    variables, leaves, along = apart(given, boxed)
    key = "tangents of gradients", tuple(variables), tuple(along), given.key
    entry = entry_by_shapes_alone(jitted, key, given, args, partial(_noted, jitted.fun, variables, along, leaves))
    if entry is None:
        return jitted.fun(*args, **kwargs)
    places = [given.leaves[k]._node.index for k in variables]
    inputs = [getval(leaves[k]) for k in given.traced] + [_parted(leaves[k], tape.outer)[1] for k in along]
    return entry.build(_run(jitted.__name__, entry, places, [getval(leaves[k]) for k in variables], inputs))


def entry_by_shapes_alone(
    jitted: Jitted, key: Any, given: Arguments, args: tuple, noted: Callable[[TraceRun], tuple]
) -> Entry | None:
    """Return the entry of a program; None if the function is interpreted."""
    entry = jitted._entries.get(key, UNKNOWN)
    if entry is None or entry is not UNKNOWN and entry.is_current():
        return entry
    if is_shown():
        return None
    try:
        watch = watch_of(jitted.fun, args, given.constants())
    except HoldsTraced:  # in this call; others may be compiled
        return None
    except Unfollowed:
        watch = None
    jitted._traces += 1
    entry = entry_by_shapes(given, noted, watch, True) if watch is not None and jitted._traces <= MOST_TRACES else None
    # If a run could differ from the trace, it would have to be continued by interpreting, amid the messages of four passes.
    jitted._entries[key] = None if entry is None or entry.replays.last_look >= 0 else entry
    return jitted._entries[key]


def _run(name: str, entry: Entry, places: Sequence[int], variables: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Run a program up to its cut, and return its results with the node that runs the rest.

    `places` and `variables` are positions and values of the gradient's variables; `inputs` those of the program before the
    cotangents.
    """
    tape: Any = tracing.tape
    outer, lease = tape.outer, Lease(entry.replays)
    half = len(entry.inside) // 2
    inside = entry.inside[:half]
    count(entry.communications)
    made = entry.leaves(lease.replay.first(*inputs, *[None] * (2 * sum(inside))))
    tape.channels |= entry.channels
    specs = [spec_like(x) for x in variables]

    def pull(gs: list[Any]) -> list[Any]:
        require_of(outer, gs, name)
        seeds = [_parted(g, outer) for g in gs]
        count(entry.communications)
        found = lease.replay.later[0](*inputs, *[g for g, _ in seeds], *[g for _, g in seeds])
        return [
            _joined(outer, conform(g, *spec), conform(tangent, *spec))
            for g, tangent, spec in zip(found, found[len(specs) :], specs)
        ]

    values = [
        _joined(outer, x, tangent) if is_in and is_variable(x) else x
        for x, tangent, is_in in zip(made, made[half:], inside)
    ]
    return placed(tape, values, inside, places, pull, entry.communicates)


def _noted(fun: Function, variables: Sequence[int], along: Sequence[int], leaves: Sequence[Any], trace: TraceRun) -> tuple:
    """Trace a function and its reverse pass with tangents carried along, and return the leaves of both."""
    recorder = trace.recorder
    with suspended(body=False), trace.noting(), TangentTape() as tape:
        given = trace.leaves()
        for k in along:
            tangent = conform(leaves[k]._node.g, *spec_like(leaves[k]._value))
            given[k] = _joined(tape, given[k], recorder.input(as_value(tangent)))
        run = trace.run_backwards(fun, variables, given)
        values = [_parted(x, tape) for x in run.values]
        recorder.part = 1
        likes = [spec_like(x.value).zeros() for x, _ in values if isinstance(x, Traced)]
        seeds, tangents = ([recorder.input(as_value(g)) for g in likes] for _ in range(2))
        seeds = [_joined(tape, *pair) for pair in zip(seeds, tangents)]
        specs = [spec_like(getval(given[k])) for k in variables]
        found = [_parted(g, tape) for g in backwards(run, in_program([x for x, _ in values]), seeds, specs)]
    tape.close()
    return [[x for x, _ in part] + [tangent for _, tangent in part] for part in (values, found)], run.build


def _parted(x: Any, tape: TangentTape) -> tuple[Any, Any]:
    """Return a value and its tangent on a tape."""
    if type(x) in _boxes and x._trace == tape.number:
        spec = spec_like(x._value)
        return x._value, conform(x._node.g, *spec)
    return x, spec_like(x).zeros() if is_variable(x) else x


def _joined(tape: Any, value: Any, tangent: Any) -> Any:
    return new_box(value, tape.number, TangentNode.placed(tape, tangent))
