"""Calls of compiled functions in a derivative: each call is one node of the tape.

The rule of all derivatives is that of `operation`. In a first derivative, the forward and the backward program are compiled
as two parts of one program, so that the backward part reads the buffers of the forward part. If the function can't be
traced from the shapes of its arguments alone, it is traced while it runs, and its reverse pass is traced while it first
runs; in second derivatives such a function is interpreted, without a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from autograd.tracer import Box, getval

from mpiad._typing import Array, Function, Tree
from mpiad.compiling.closure import Watch
from mpiad.differentiation.backward import cotangents_of
from mpiad.differentiation.forward import TangentTape
from mpiad.differentiation.in_place import assign, keeping_arguments
from mpiad.differentiation.tape import OrderedTape
from mpiad.differentiation.trace import Traced as TracedRun
from mpiad.differentiation.trace import Variables, trace_backwards, trace_forwards
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.primitives.operation import Tape, suspended
from mpiad.programs.operation import CompiledOperation
from mpiad.programs.playback import PlayingBack, message_counts
from mpiad.programs.program_cache import Entry, ProgramCache, count, entry_of_trace, in_program, own
from mpiad.programs.recorder import Recorder
from mpiad.programs.replay import Changed, Replays
from mpiad.programs.signature import Arguments
from mpiad.programs.traced_array import Abandoned, TracedArray
from mpiad.programs.transforms import vjp
from mpiad.pytrees import flatten
from mpiad.transport.core.tracing import note_channels, tracing

_boxes = Box.types
_Derived: TypeAlias = Callable[[Hashable, Callable[[], Function]], Function]  # the method `Jitted.derived`


def called_on_tape(cache: ProgramCache, given: Arguments, derived: _Derived) -> Any:
    """Call a compiled function within a derivative; `derived`: the method of `Jitted`."""
    tape: Any = tracing.tape
    boxed = [k for k in given.traced if type(given.leaves[k]) in _boxes]
    boxes = [given.leaves[k] for k in boxed]
    simple = is_simple(tape, boxes)
    if type(tape) is TangentTape and (simple or is_above(tape, boxes)):
        key = "tangent", given.key
        if key in cache.entries:
            return cache.interpreted(key, given)
        if not cache.is_followed(key, given):  # values in the function's closure may have tangents, too
            return cache.run(given)
        return _called_with_tangents(cache, given, boxed, derived)
    if not simple or tape.passes not in ("one", "several"):
        return _called_as_operation(cache, given, boxed)
    key = ("reverse", tuple(boxed), given.key)
    entry, watch = cache.entry_or_watch(key, given, partial(_with_two_parts, cache, given, boxed))
    if entry is not None:
        return _run(cache, key, entry, given, boxed)
    if watch is None:
        return cache.interpreted(key, given)
    return _traced_on_tape(cache, key, given, boxed, watch)


def _called_as_operation(cache: ProgramCache, given: Arguments, boxed: Sequence[int]) -> Tree:
    """Call a function as a `CompiledOperation`; interpret it if that is impossible."""
    is_on_host = all(isinstance(getval(given.leaves[k]), (np.ndarray, np.generic)) for k in boxed)
    found = cache.program(given, boxed) if is_on_host else None
    # An exception has left messages in flight on a channel with a fault.
    if (
        found is None
        or not found.program.is_derivable
        or any(channel.fault for channel, _ in found.program.recorder.channels)
    ):
        return cache.run(given)
    if found.admits is not None and not found.admits([getval(given.leaves[k]) for k in given.traced]):
        return cache.run(given)
    if not found.operations:
        found.operations.append(CompiledOperation(found.program))
    return found.build(found.operations[0]([given.leaves[k] for k in given.traced]).values)


def _with_two_parts(cache: ProgramCache, given: Arguments, boxed: Sequence[int], watch: Watch) -> Entry | None:
    """Return the compiled function and its reverse pass, as two parts of a program; None if the trace fails."""

    def traced(recorder: Recorder) -> tuple[list[list[Array]], Any] | None:
        found = cache.program(given, boxed, watch)
        return found and (vjp(found.program, recorder, [given.traced.index(k) for k in boxed]), found.build)

    return entry_of_trace(watch, traced, cache.exact)


class Lease:
    """Keeps a replay in use as long as its reverse pass may run."""

    def __init__(self, replays: Replays):
        self.replays, self.replay = replays, replays.take()

    def __del__(self) -> None:
        if hasattr(self, "replay"):  # an interrupt may have prevented the assignment
            self.replays.give_back(self.replay)


def is_simple(tape: Any, boxes: Sequence[Box]) -> bool:
    """Return whether exactly one derivative encloses a call, and this library computes it; `boxes`: its variables."""
    if type(tape) not in (OrderedTape, TangentTape) or not tape.is_only_trace_of(boxes):
        return False
    return all(isinstance(box._value, (np.ndarray, np.generic, TracedArray)) for box in boxes)


def is_above(tape: Tape, boxes: Sequence[Box]) -> bool:
    """Return whether the tape has an outer tape, and all boxes belong to this tape or to traces around it."""
    return tape.outer is not None and all(
        getattr(box._node, "tape", None) is tape if box._trace == tape.number else box._trace < tape.number for box in boxes
    )


def require_plain(gs: Sequence[Array], name: str) -> None:
    """Raise a TypeError for traced cotangents: the two parts of a program take plain arrays."""
    if any(type(g) in _boxes for g in gs):
        raise TypeError(
            f"jit: the reverse pass of {name} is differentiated with respect to its cotangent, in a derivative that began "
            "after the call of the compiled function; its program takes plain numbers only. Call make_vjp inside of this "
            "derivative, or use linearize instead."
        )


def _seeds(run: TracedRun, inside: Sequence[bool], gs: Sequence[Array]) -> Iterable[tuple[int, Array]]:
    """Return the seeds of a reverse pass: `gs` are the cotangents of those results that are `inside` of the program."""
    return zip([place for place, is_in in zip(run.places, inside) if is_in], gs)


def _run_on_tape(fun: Function, given: Arguments, leaves: list[Any], variables: Sequence[int]) -> TracedRun:
    """Call a function on a tape of its own; `variables`: their positions among the leaves."""
    return trace_backwards(lambda call: fun(*call[0], **call[1]), Variables(leaves, list(variables), given.build))


def _run(cache: ProgramCache, key: Hashable, entry: Entry, given: Arguments, variables: list[int]) -> Tree:
    """Run the first part of a program, record a node that runs the second part, and return the function's result."""
    inside = entry.inside
    lease, inputs = Lease(entry.replays), [getval(given.leaves[k]) for k in given.traced]
    counts = message_counts() if entry.replays.last_check >= 0 else None
    count(entry.communications)
    note_channels(entry.channels)
    try:
        values = entry.leaves(lease.replay.first(*inputs))
    except Changed as change:
        with cache.changed(key, change, counts):
            return cache.run(given)
    specs = [spec_like(getval(given.leaves[k])) for k in variables]
    # The reverse pass keeps the arguments that it needs, and all of them if the function may have to run again.
    kept_inputs = [x if k in entry.replays.read_later else None for k, x in enumerate(inputs)]
    all_arguments = given if entry.may_change else None

    def pull(gs: list[Array]) -> list[Array]:
        require_plain(gs, cache.name)
        count(entry.communications)
        try:
            cotangents = lease.replay.later[0](*kept_inputs, *gs)
        except Changed as change:
            if all_arguments is None:
                raise
            with suspended(body=False), cache.changed(key, change, counts):
                second_run = _run_on_tape(cache.fun, all_arguments, all_arguments.values(), variables)
                return cotangents_of(second_run.recording, _seeds(second_run, inside, gs), specs)
        return [conform(g, *spec) for g, spec in zip(cotangents, specs)]

    places = [given.leaves[k]._node.index for k in variables]
    tape: Any = tracing.tape
    return entry.build(tape.record_call(entry.channels, values, inside, places, pull, entry.communicates))


def _called_with_tangents(cache: ProgramCache, given: Arguments, boxed: list[int], derived: _Derived) -> Tree:
    """Call a separate compiled function, which computes the value and its tangent."""
    tape: Any = tracing.tape
    boxed = [k for k in boxed if given.leaves[k]._trace == tape.number]
    both = derived((given.form, tuple(boxed)), lambda: _value_and_tangent_of(cache.fun, given.build, boxed))
    leaves = [x._value if k in boxed else x for k, x in enumerate(given.leaves)]
    # An enclosing derivative differentiates both the value and the tangent.
    with suspended(tape.outer, body=False):
        made = both(leaves, [given.leaves[k]._node.g for k in boxed])
    (values, build), (tangents, _) = map(flatten, made)
    result, changes = build([tape.variable(x, tangent) for x, tangent in zip(values, tangents, strict=True)])
    for k, new in changes.items():
        assign(given.leaves[k], new)
    return result


def _value_and_tangent_of(fun: Function, build: Callable, places: Sequence[int]) -> Function:
    """Return a function of the leaves and of tangents of some of them, which returns value and tangent of `called`."""
    # `called` returns the result of `fun`, and those arguments that it has changed in place, by the index of the leaf.

    def both(leaves: list[Any], tangents: list[Array]) -> tuple[Tree, Tree]:
        def called(given: tuple) -> tuple[Tree, dict[int, Array]]:
            arguments = flatten(given)[0]
            nodes = {k: arguments[k]._node for k in places}
            made = fun(*given[0], **given[1])
            return made, {k: arguments[k] for k, node in nodes.items() if arguments[k]._node is not node}

        return trace_forwards(called, Variables(leaves, list(places), build), tangents)

    both.__name__ = getattr(fun, "__name__", "function")
    return both


def _traced_on_tape(cache: ProgramCache, key: Hashable, given: Arguments, boxed: list[int], watch: Watch) -> Tree:
    """Run the function on traced arrays on a separate tape; the reverse pass completes and compiles the program."""
    tape, recorder = tracing.tape, Recorder(cache.exact)
    try:
        with suspended(body=False), recorder:
            run = _run_on_tape(keeping_arguments(cache.fun), given, recorder.arguments(given), boxed)
    except (Abandoned, Exception) as error:  # noqa: BLE001 (the second run raises the function's own exceptions)
        return cache.run_again(recorder, key, given, error)
    cache.pending[key] = recorder
    inside = in_program(run.values)
    specs = [spec_like(getval(given.leaves[k])) for k in boxed]
    log_of_run = list(recorder.log)

    def pull(gs: list[Array]) -> list[Array]:
        require_plain(gs, cache.name)
        log = log_of_run
        with suspended(body=False):
            if cache.pending.pop(key, None) is recorder:
                recorder.part = 1
                try:
                    with recorder:
                        inputs = [recorder.input(g) for g in gs]
                        cotangents = cotangents_of(run.recording, _seeds(run, inside, inputs), specs)
                except (Abandoned, Exception) as error:  # noqa: BLE001 (the second run raises the function's own exceptions)
                    recorder.raise_own(error)
                    cache.give_up(key, error)
                    log = recorder.log
                else:
                    cache.compile(key, recorder, [run.values, cotangents], run.build, watch)
                    return [own(g) for g in cotangents]
            # This reverse pass can't be traced, or isn't the first one.
            with PlayingBack(log, recorder.counts):
                second_run = _run_on_tape(cache.fun, given, given.values(), boxed)
                return cotangents_of(second_run.recording, _seeds(second_run, inside, gs), specs)

    out = [own(value) for value in run.values]
    places = [given.leaves[k]._node.index for k in boxed]
    return run.build(tape.record_call(run.recording.channels, out, inside, places, pull, recorder.communicates))
