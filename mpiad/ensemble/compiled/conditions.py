"""The conditions of events as programs, traced and compared as f is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpiad.compiling.complex_parts import real_dtype
from mpiad.compiling.program import Program
from mpiad.compiling.refusals import Untraceable, place_of
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.compiled.choice import MOST_OPERATIONS, Tell, changes
from mpiad.ensemble.compiled.trace import trace
from mpiad.ensemble.compiled.verification import verify_condition
from mpiad.ensemble.events import Event

__all__ = ["conditions_of"]


def conditions_of(batch: Batch, events: Sequence[Event], must: bool, tell: Tell) -> tuple[Program, ...] | None:
    """Return what the conditions compute, each a program of one output; None where one of them can't be compiled.

    Parameters
    ----------
    batch : Batch
        Of plain arrays on the host.
    events : sequence of Event
    must : bool
        Whether to raise instead.
    tell : callable
        See `choice.traced_program`.

    Raises
    ------
    TypeError
    """
    programs = []
    for event in events:
        program = _condition_of(batch, event, must, tell)
        if program is None:
            return None
        programs.append(program)
    return tuple(programs)


def _condition_of(batch: Batch, event: Event, must: bool, tell: Tell) -> Program | None:
    try:
        program = trace(event.written, batch.shape, batch.p, batch.u0.dtype, result=())
        _check_precision(program, batch, event)
        verify_condition(program, batch, event)
    except Untraceable as error:
        if must:
            raise TypeError(f"solve: compile=True, but a condition of the events can't be compiled: {error}.") from error
        tell(event.written, f"a condition of the events can't be compiled ({error}), so f is called with arrays instead")
        return None
    if program.cost > MOST_OPERATIONS and not must:
        tell(
            event.written, f"a condition of the events has {program.cost} operations; up to {MOST_OPERATIONS} fit into a "
            "kernel that is fast and soon compiled, so f is called with arrays instead"
        )  # fmt: skip
        return None
    return None if not must and changes(event.written, program, tell, "a condition of the events") else program


def _check_precision(program: Program, batch: Batch, event: Event) -> None:
    # Conditions see time in double precision whatever the states are, and a program has one precision throughout.
    if program.reads("time") and real_dtype(batch.u0.dtype) != np.float64:
        raise Untraceable(f"it looks at time, which is double, and u0 is {batch.u0.dtype}", place_of(event.written))
