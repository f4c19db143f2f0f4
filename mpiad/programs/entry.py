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

MOST_TRACES = 32
"""So many are made of a function at most."""

UNKNOWN: Any = object()
"""Stands for the entry of a signature that wasn't met before."""


class Entry(NamedTuple):
    """A compiled program for one signature."""

    replays: Replays
    inside: list[bool]  # whether each leaf of the result is an output of the program
    constants: list[Any]  # the other leaves
    build: Callable[[list[Any]], Any]  # from leaves to the result
    watch: Watch
    communications: int  # number of steps of a call that communicate; as many in the reverse pass
    communicates: bool  # whether it communicates, also in untraced functions
    channels: set[Used]  # of the communications

    def is_current(self) -> bool:
        """Return whether it can be run: its closure is unchanged, and no message is left over from an exception."""
        for channel, _ in self.channels:
            if channel.fault:
                return False
        return self.watch.is_the_same()

    @property
    def may_change(self) -> bool:
        """Whether a run may differ from the trace (see `Changed`)."""
        replays = self.replays
        return replays.last_look >= 0 or any(node.kind == "call" for node in replays.schedule.program.nodes)

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

    `parts`: the leaves that each part of the program returns, its values or constants; the first are the function's.
    """
    inside = in_program(parts[0])
    wanted = [[x for x, is_in in zip(parts[0], inside) if is_in], *parts[1:]]
    schedule = Fusion(program_of(recorder, wanted)).schedule()
    constants = [None if is_in else x for x, is_in in zip(parts[0], inside)]
    told = recorder.communications, recorder.communicates, recorder.channels
    return Entry(Replays(schedule), inside, constants, build, watch, *told)


def entry_by_shapes(
    given: Arguments, noted: Callable[[TraceRun], tuple[Any, ...]], watch: Watch, small: bool = False
) -> Entry | None:
    """Compile a function of large arrays before it is run; None if there are none, or if it needs more than shapes.

    `noted` runs the trace, and returns the leaves of its parts, and the function that builds the result. `small`: do this
    for small arrays, too.
    """
    if is_shown() or not small and not any(is_large(getval(given.leaves[k])) for k in given.traced):
        return None
    trace = TraceRun(given, ShapeRecorder)
    try:
        with np.errstate(all="ignore"):  # of uninitialized memory in place of results
            parts, build = noted(trace)
            # Warnings on complex numbers and on obstacles come from the trace that runs the function.
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
    """Return which leaves of a trace are values of the program."""
    return [isinstance(x, Traced) for x in leaves]


def own(leaf: Any) -> Any:
    """Return the value of a leaf in memory of its own."""
    value = leaf.value if isinstance(leaf, Traced) else leaf
    return value.copy() if isinstance(value, np.ndarray) else value


def count(number: int) -> None:
    """Count this number of communications."""
    next(islice(communications, number, number), None)
