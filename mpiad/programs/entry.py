"""A compiled program for one signature: its replays, and the structure of its result."""

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
from mpiad.programs.trace_run import TraceRun
from mpiad.programs.trace_translation import program_of
from mpiad.transport import calls
from mpiad.transport.channels import Used, communications, is_watched

MAX_TRACES = 32
"""Maximum number of traces of one function."""

UNKNOWN: Any = object()
"""Placeholder for the entry of a new signature."""


class Entry(NamedTuple):
    """A compiled program for one signature."""

    replays: Replays
    inside: list[bool]  # whether each leaf of the result is an output of the program
    constants: list[Any]  # the values of the other leaves
    build: Callable[[list[Any]], Any]  # assembles the result from its leaves
    watch: Watch
    communications: int  # the number of communicating steps; the reverse pass has the same number
    communicates: bool  # whether it communicates, untraced functions included
    channels: set[Used]  # the channels of the communications

    def is_current(self) -> bool:
        """Return whether the program is valid: its closure is unchanged, and no exception has left messages in flight."""
        return not any(channel.fault for channel, _ in self.channels) and self.watch.is_the_same()

    @property
    def may_change(self) -> bool:
        """Whether a run may differ from the trace (see `Changed`)."""
        replays = self.replays
        return replays.last_check >= 0 or any(node.kind == "call" for node in replays.schedule.program.nodes)

    def called(self, values: Sequence[Any]) -> Any:
        """Run the program, and return the function's result."""
        replay = self.replays.take()
        count(self.communications)
        made = replay.first(*values)
        self.replays.give_back(replay)
        return self.build(made if len(made) == len(self.inside) else self.leaves(made))

    def leaves(self, made: Sequence[Any]) -> list[Any]:
        """Return the leaves of the result."""
        found = iter(made)
        return [next(found) if is_in else own(constant) for is_in, constant in zip(self.inside, self.constants)]


def entry_of(recorder: Recorder, parts: Sequence[Sequence[Any]], build: Any, watch: Watch) -> Entry:
    """Compile a trace.

    `parts`: per part of the program the leaves that it returns, each a traced value or a constant; those of the first part
    are the function's result.
    """
    inside = in_program(parts[0])
    wanted = [[x for x, is_in in zip(parts[0], inside) if is_in], *parts[1:]]
    schedule = Fusion(program_of(recorder, wanted)).schedule()
    constants = [None if is_in else x for x, is_in in zip(parts[0], inside)]
    communication = recorder.communications, recorder.communicates, recorder.channels
    return Entry(Replays(schedule), inside, constants, build, watch, *communication)


def entry_by_shapes(
    given: Arguments, noted: Callable[[TraceRun], tuple[Any, ...]], watch: Watch, small: bool = False
) -> Entry | None:
    """Compile a function from the shapes of its arguments, without running it; None if that isn't possible or useful.

    It isn't useful if no argument is large, unless `small` is true. `noted(trace)` runs the trace, and returns the leaves
    of its parts, and the function that assembles the result.
    """
    if is_shown() or not small and not any(is_large(getval(given.leaves[k])) for k in given.traced):
        return None
    trace = TraceRun(given, ShapeRecorder)
    try:
        with np.errstate(all="ignore"):  # results are replaced by uninitialized memory
            parts, build = noted(trace)
            # The trace that runs the function will warn of complex numbers.
            if trace.recorder.complex_line():
                return None
            return entry_of(trace.recorder, parts, build, watch)
    except (Abandoned, Exception) as error:  # noqa: BLE001
        trace.raise_own(error)
        return None


def is_shown() -> bool:
    """Return whether calls are being recorded or observed."""
    return calls.is_noting() or is_watched()


def in_program(leaves: Sequence[Any]) -> list[bool]:
    """Return which leaves are traced values."""
    return [isinstance(x, Traced) for x in leaves]


def own(leaf: Any) -> Any:
    """Return the value of a leaf, copied if it is an array."""
    value = leaf.value if isinstance(leaf, Traced) else leaf
    return value.copy() if isinstance(value, np.ndarray) else value


def count(number: int) -> None:
    """Advance the counter of communications."""
    next(islice(communications, number, number), None)
