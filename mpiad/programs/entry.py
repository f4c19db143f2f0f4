"""`Entry`: the compiled program for one signature of a function, with the structure of the function's result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from autograd.tracer import getval

from mpiad.programs.closure import Watch
from mpiad.programs.fusion import Fusion
from mpiad.programs.recorder import Recorder
from mpiad.programs.replay import Replays
from mpiad.programs.shape_recorder import ShapeRecorder, is_large
from mpiad.programs.signature import Arguments
from mpiad.programs.steps import Abandoned, Traced
from mpiad.programs.trace_run import TraceRun, raise_own
from mpiad.programs.trace_translation import program_of
from mpiad.transport.core import calls
from mpiad.transport.core.channels import Used, communications, is_watched

MAX_TRACES = 32  # maximum number of traces of one function
UNKNOWN: Any = object()  # placeholder for the entry of a new signature


class Entry(NamedTuple):
    """A compiled program for one signature."""

    replays: Replays
    inside: list[bool]  # whether each leaf of the result is an output of the program
    constants: list[Any]  # the values of the other leaves
    build: Callable[[list[Any]], Any]  # assembles the result from its leaves
    watch: Watch
    communications: int  # the number of communications in the function, and also in its reverse pass
    communicates: bool  # whether the program communicates, possibly in an untraced function
    channels: set[Used]  # the channels of the communications

    def is_current(self) -> bool:
        """Return whether the closure is unchanged, and no exception has left messages in flight on the channels."""
        return not any(channel.fault for channel, _ in self.channels) and self.watch.is_the_same()

    @property
    def may_change(self) -> bool:
        """Whether shapes or dtypes may differ in a run from those in the trace (see `Changed`)."""
        nodes = self.replays.schedule.program.nodes
        return self.replays.last_check >= 0 or any(node.kind == "call" for node in nodes)

    def called(self, values: Sequence[Any]) -> Any:
        """Run the program, and return the function's result."""
        replay = self.replays.take()
        count(self.communications)
        made = replay.first(*values)
        self.replays.give_back(replay)
        return self.build(made if len(made) == len(self.inside) else self.leaves(made))

    def leaves(self, made: Sequence[Any]) -> list[Any]:
        """Return the leaves of the function's result, given the outputs of the program."""
        found = iter(made)
        return [next(found) if is_in else own(constant) for is_in, constant in zip(self.inside, self.constants)]


def entry_of(recorder: Recorder, parts: Sequence[Sequence[Any]], build: Any, watch: Watch) -> Entry:
    """Compile a trace.

    `parts`: for each part of the program, the leaves that it returns, traced values or constants. The leaves of the first
    part form the function's result.
    """
    inside = in_program(parts[0])
    wanted = [[x for x, is_in in zip(parts[0], inside) if is_in], *parts[1:]]
    schedule = Fusion(program_of(recorder, wanted)).schedule()
    constants = [None if is_in else x for x, is_in in zip(parts[0], inside)]
    communication = recorder.communications, recorder.communicates, recorder.channels
    return Entry(Replays(schedule), inside, constants, build, watch, *communication)


def entry_by_shapes(given: Arguments, trace_parts: Callable[[TraceRun], tuple[Any, ...]], watch: Watch) -> Entry | None:
    """Compile a function from the shapes of its arguments, without running it; return None if that fails.

    Return None also if all arguments are small. `trace_parts(trace)` traces the function, and returns the arguments `parts`
    and `build` of `entry_of`.
    """
    if is_shown() or not any(is_large(getval(given.leaves[k])) for k in given.traced):
        return None
    trace = TraceRun(given, ShapeRecorder)
    try:
        with np.errstate(all="ignore"):  # the values are those of uninitialized memory
            parts, build = trace_parts(trace)
            # For complex numbers a warning must be logged, which the trace that runs the function does.
            if trace.recorder.complex_line():
                return None
            return entry_of(trace.recorder, parts, build, watch)
    except (Abandoned, Exception) as error:  # noqa: BLE001
        raise_own(trace.recorder, error)
        return None


def is_shown() -> bool:
    """Return whether the library records calls for a report, or watches them for deadlocks."""
    return calls.is_noting() or is_watched()


def in_program(leaves: Sequence[Any]) -> list[bool]:
    """Return for each leaf whether it is a traced value."""
    return [isinstance(x, Traced) for x in leaves]


def own(leaf: Any) -> Any:
    """Return the value of a leaf; for an array, a copy of it."""
    value = leaf.value if isinstance(leaf, Traced) else leaf
    return value.copy() if isinstance(value, np.ndarray) else value


def count(number: int) -> None:
    """Advance the library's counter of communications by `number`."""
    next(islice(communications, number, number), None)
