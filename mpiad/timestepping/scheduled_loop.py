"""Loops with checkpoints of small compiled steps, run by machine code between two calls of Python."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from autograd.tracer import getval, isbox

from mpiad._typing import Array
from mpiad.differentiation.tape import OrderedTape
from mpiad.primitives.cotangents import conformed, spec_like
from mpiad.timestepping.checkpoints import Advance, CheckpointSchedule, Keep, Restore, actions, log_repeated_steps
from mpiad.timestepping.comparison import Comparison
from mpiad.timestepping.stepping import Arguments, UserStepping
from mpiad.transport.core.tracing import restoring_state, tracing


def run_by_commands(
    stepping: UserStepping, steps: int, schedule: CheckpointSchedule, args: Arguments
) -> tuple[list[Array], list[Array]] | None:
    """Run a loop of a gradient as one node of the tape; return the last state and the observed values.

    None if there are no commands; see `mpiad.programs.scheduled_calls`.
    """
    tape, leaves, count = tracing.tape, args.all(), len(args.state)
    active = [k for k, leaf in enumerate(leaves) if isbox(leaf)]
    if type(tape) is not OrderedTape or tape.passes != "one" or not active:
        return None
    if not tape.is_only_trace_of([leaves[k] for k in active]):
        return None
    if schedule.disk or schedule.dtype is not None or schedule.compress or schedule.host:
        return None
    indices = (*range(count), *[k for k in active if k >= count])
    plain = args.like(list(map(getval, leaves)))
    stepping.begin_pass()
    calls = stepping.scheduled(
        (schedule.memory, schedule.recorded), plain, indices, lambda calls: _append_actions(calls, steps, schedule)
    )
    if calls is None:
        return None

    def pull(gs: Sequence[Array]) -> list[Array]:
        comparison = Comparison(schedule, stepping.places, steps)
        cotangents = dict(zip(indices, calls.backward(gs, comparison.add_values)))
        comparison.require_same()
        return [conformed(cotangents[k], spec_like(getval(leaves[k]))) for k in active]

    weakref.finalize(pull, calls.pool.free.append, calls).atexit = False  # no other gradient uses them until then
    arguments = stepping.leaves(0, plain)
    if not calls.admits(arguments):
        return None
    log_repeated_steps(steps, schedule)
    with restoring_state():
        values = calls.forward(arguments)
    places = [leaves[k]._node.index for k in active]
    made = tape.record_call(calls.channels, values, [True] * len(values), places, pull, calls.communicates)
    return made[:count], made[count:]


def _append_actions(calls: Any, steps: int, schedule: CheckpointSchedule) -> None:
    for action in actions(steps, schedule):
        if isinstance(action, Keep):
            calls.keep(action.number)
        elif isinstance(action, Restore):
            calls.restore(action.number, action.last)
        elif isinstance(action, Advance):
            calls.advance(*action)
        else:
            calls.reverse(*action)
