"""What f and the conditions of events compute, traced and remembered: training loops solve the same f again and again.

What was traced, compared with f and tried out needn't be so again, where f and the conditions read the same as then (see
`function_fingerprint`) and are given states and parameters of the same kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiad.compiling.complex_parts import real_dtype
from mpiad.compiling.function_fingerprint import Fingerprint, fingerprint_of
from mpiad.compiling.program import Program
from mpiad.compiling.trace_errors import Untraceable, place_of
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.compiled.kernel_choice import MOST_OPERATIONS, Tell, changes
from mpiad.ensemble.compiled.parameter_layout import layout_of
from mpiad.ensemble.compiled.trace import trace
from mpiad.ensemble.compiled.trace_check import verify_condition
from mpiad.ensemble.events import Event

__all__ = ["TracedProblem", "conditions_of", "remembered"]

# So that constants that change from solve to solve don't fill the memory.
_MOST_KNOWN = 64
_known: dict[Fingerprint, TracedProblem] = {}


class TracedProblem(NamedTuple):
    """What f, and the conditions of events, compute.

    Parameters
    ----------
    program : Program
    conditions : tuple of Program
    """

    program: Program
    conditions: tuple[Program, ...]


def remembered(
    make: Callable[[], TracedProblem | None], batch: Batch, events: Sequence[Event], traced: bool, must: bool
) -> TracedProblem | None:
    """Return what a batch computes, as it was traced before for one like it, or else what `make` returns.

    Parameters
    ----------
    make : callable
        Returns it, None where the batch isn't compiled.
    batch : Batch
        Of plain arrays on the host.
    events : sequence of Event
    traced, must : bool
        Whether f will be differentiated, and whether the batch must be compiled.
    """
    parts = {part.place: part for part in layout_of(batch.p).parts}
    forms: list[Any] = [parts.get(place, leaf) for place, leaf in enumerate(batch.p.leaves)]
    conditions = [event.written for event in events]
    kinds = (batch.shape, np.dtype(batch.u0.dtype).str, traced, must)
    key = fingerprint_of(batch.f, conditions, batch.p.build(forms), kinds)
    if key is not None and key in _known:
        return _known[key]
    made = make()
    if made is not None and key is not None:
        if len(_known) >= _MOST_KNOWN:
            _known.pop(next(iter(_known)))
        _known[key] = made
    return made


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
        See `traced_program`.

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
