"""Calls of compiled functions in a derivative: each call is one node of the tape.

The rule of all derivatives is that of `operation`. In a first derivative, the forward and the backward program are compiled
as two parts of one program, so that the backward part reads the buffers of the forward part. If a trace needs something
that only a run can tell, the first call and its reverse pass are interpreted, and traced afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from autograd.tracer import Box, getval

from mpiad._typing import Array, Function, Tree
from mpiad.compiling.watch import Watch
from mpiad.device.transfer import beside
from mpiad.differentiation.backward import cotangents_of
from mpiad.differentiation.forward import TangentTape
from mpiad.differentiation.in_place import assign, keeping_arguments
from mpiad.differentiation.tape import OrderedTape, copy_if_changeable
from mpiad.differentiation.trace import Traced as TracedRun
from mpiad.differentiation.trace import Variables, trace_backwards, trace_forwards
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.primitives.operation import Tape, suspended
from mpiad.programs.interpretation import Interpretation, message_counts
from mpiad.programs.operation import CompiledOperation
from mpiad.programs.program_cache import Entry, FailedTrace, ProgramCache, Recorded, count, in_program, is_admitted
from mpiad.programs.recorder import Recorder, like
from mpiad.programs.replay import Changed
from mpiad.programs.signature import Arguments, arguments_of
from mpiad.programs.transforms import vjp
from mpiad.pytrees import flatten
from mpiad.transport.core.tracing import note_channels, tracing
from mpiad.transport.devices.device_arrays import is_array, is_device_array

_boxes = Box.types
_Derived: TypeAlias = Callable[[Hashable, Callable[[], Function]], Function]  # the method `Jitted.derived`


def called_on_tape(cache: ProgramCache, arguments: Arguments, derived: _Derived) -> Any:
    """Call a compiled function within a derivative; `derived`: the method of `Jitted`."""
    tape: Any = tracing.tape
    boxed = [k for k in arguments.traced if type(arguments.leaves[k]) in _boxes]
    boxes = [arguments.leaves[k] for k in boxed]
    simple = is_simple(tape, boxes)
    if type(tape) is TangentTape and (simple or is_above(tape, boxes)):
        key = "tangent", arguments.key
        if cache.is_refused(key):
            return cache.interpreted(key, arguments)
        # Values in the function's closure may have tangents, too; an ensemble's arguments may have several ones at a time.
        has_lists = any(type(getattr(arguments.leaves[k]._node, "g", None)) is list for k in boxed)
        if has_lists or not cache.is_followed(key, arguments):
            return cache.run(arguments)
        return _called_with_tangents(cache, arguments, boxed, derived)
    if simple and tape.passes in ("one", "several"):
        key, entry = entry_on_tape(cache, arguments, boxed)
        if isinstance(entry, Entry):
            return _run(cache, key, entry, _unchanging(arguments, tape), boxed)
        failure, retrace = entry, None
        if failure is not None and failure.needs_run:
            return _noted(cache, key, arguments, boxed, failure)
    else:
        key = "program", tuple(boxed), arguments.key
        if not all(isinstance(getval(box), np.generic) or is_array(getval(box)) for box in boxes) or cache.is_refused(key):
            return cache.run(arguments)
        try:
            return _called_as_operation(cache, key, arguments, cache.program(arguments, boxed))
        except FailedTrace as error:
            failure = error
        retrace = partial(cache.program, arguments, boxed)
    if failure is not None and cache.asks(arguments, failure):
        return called_on_tape(cache, arguments_of(arguments.args, arguments.kwargs, cache.asked), derived)
    return cache.interpreted(key, arguments, failure, retrace, optional=key[0] == "program")


def entry_on_tape(
    cache: ProgramCache, arguments: Arguments, boxed: list[int]
) -> tuple[tuple[Any, ...], Entry | FailedTrace | None]:
    """Return the key of a function's program with a reverse pass, and the program; see `ProgramCache.entry`."""
    key = "reverse", tuple(boxed), arguments.key
    # A `Program` can't contain steps that only a run can describe, or objects that hold traced arrays.
    ways = [partial(trace, cache, arguments, boxed) for trace in (_with_two_parts, _traced_on_tape)]
    return key, cache.entry(key, arguments, *ways)


def _called_as_operation(cache: ProgramCache, key: Hashable, arguments: Arguments, recorded: Recorded | None) -> Tree:
    """Call a function as a `CompiledOperation`; interpret it if that is impossible."""
    if recorded is None or not recorded.program.is_derivable or not is_admitted(recorded, arguments):
        return cache.run(arguments)
    # An exception may have left messages in flight on a channel, which has a fault then.
    if any(channel.fault for channel, _ in recorded.program.recorder.channels):
        return cache.run(arguments)
    if not recorded.operations:
        recorded.operations.append(CompiledOperation(recorded.program))
    leaves, operation = _unchanging(arguments, tracing.tape).leaves, recorded.operations[0]
    counts = message_counts() if operation.communicates else None
    try:
        made = operation([leaves[k] for k in arguments.traced])
    except Changed as change:
        with cache.changed(key, change, counts):
            return cache.run(arguments)
    return recorded.build(made.values)


def _unchanging(arguments: Arguments, tape: Any) -> Arguments:
    """Return the arguments, with copies of those arrays that the caller may change before the reverse pass."""
    arrays = getattr(tape, "changeable", ())
    return arguments._replace(leaves=[copy_if_changeable(x, arrays) for x in arguments.leaves]) if arrays else arguments


def _with_two_parts(
    cache: ProgramCache, arguments: Arguments, boxed: list[int], recorder: Recorder, watch: Watch
) -> tuple[list[list[Array]], Any]:
    """Return the function's program and its reverse pass, as two parts of a program."""
    recorded: Any = cache.program(arguments, boxed, watch)
    recorder.device = recorded.program.recorder.device
    recorder.condition = recorded.admits if recorded.admits is not None and recorded.admits.decides else None
    return vjp(recorded.program, recorder, [arguments.traced.index(k) for k in boxed]), recorded.build


def _traced_on_tape(
    cache: ProgramCache, arguments: Arguments, boxed: list[int], recorder: Recorder, watch: Watch
) -> tuple[list[list[Array]], Any]:
    """Trace the function on a tape, and its reverse pass as a second part of the program."""
    specs = [spec_like(getval(arguments.leaves[k])) for k in boxed]
    with recorder, suspended(body=False):
        variables = Variables(recorder.arguments(arguments), boxed, arguments.build)
        run = trace_backwards(lambda call: keeping_arguments(cache.fun)(*call[0], **call[1]), variables)
        if run.problem is not None:
            recorder.refuse(run.problem.text)
        recorder.check_results(run.values)
        recorder.part = 1
        inside = in_program(run.values)
        gs = [recorder.input(like(spec_like(x.value))) for x, is_in in zip(run.values, inside) if is_in]
        cotangents = cotangents_of(run.recording, _seeds(run, inside, gs), specs)
    return [run.values, cotangents], run.build


def is_simple(tape: Any, boxes: Sequence[Box]) -> bool:
    """Return whether exactly one derivative encloses a call, and this library computes it; `boxes`: its variables."""
    if type(tape) not in (OrderedTape, TangentTape) or not tape.is_only_trace_of(boxes):
        return False
    return all(isinstance(box._value, (np.ndarray, np.generic)) or is_device_array(box._value) for box in boxes)


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
            "derivative, or use linearize, and leave loops and solves out of the compiled function."
        )


def _seeds(run: TracedRun, inside: Sequence[bool], gs: Sequence[Array]) -> Iterable[tuple[int, Array]]:
    """Return the seeds of a reverse pass: `gs` are the cotangents of those results that are `inside` of the program."""
    return zip([place for place, is_in in zip(run.places, inside) if is_in], gs)


def _run(cache: ProgramCache, key: Hashable, entry: Entry, arguments: Arguments, variables: list[int]) -> Tree:
    """Run the first part of a program, record a node that runs the second part, and return the function's result."""
    inside = entry.inside
    lease, inputs = entry.replays.lease(), [getval(arguments.leaves[k]) for k in arguments.traced]
    counts = message_counts() if entry.replays.last_check >= 0 else None
    count(entry.communications)
    note_channels(entry.channels)
    try:
        values = entry.leaves(lease.replay.first(*inputs))
    except Changed as change:
        with cache.changed(key, change, counts):
            return cache.run(arguments)
    specs = [spec_like(getval(arguments.leaves[k])) for k in variables]
    # The reverse pass keeps the arguments that it needs, and all of them if the function may have to run again.
    kept_inputs = [x if k in entry.replays.read_later else None for k, x in enumerate(inputs)]
    all_arguments = arguments if entry.may_change else None

    def pull(gs: list[Array]) -> list[Array]:
        require_plain(gs, cache.name)
        count(entry.communications)
        try:
            cotangents = lease.replay.later[0](*kept_inputs, *gs)
        except Changed as change:
            if all_arguments is None:
                raise
            with suspended(body=False), cache.changed(key, change, counts):
                leaves = Variables(all_arguments.values(), variables, all_arguments.build)
                run = trace_backwards(lambda call: cache.fun(*call[0], **call[1]), leaves)
                return cotangents_of(run.recording, _seeds(run, inside, gs), specs)
        cotangents = cotangents if entry.device is None else beside(cotangents, specs)
        return [conform(g, *spec) for g, spec in zip(cotangents, specs)]

    places = [arguments.leaves[k]._node.index for k in variables]
    tape: Any = tracing.tape
    return entry.build(tape.record_call(entry.channels, values, inside, places, pull, entry.communicates))


def _called_with_tangents(cache: ProgramCache, arguments: Arguments, boxed: list[int], derived: _Derived) -> Tree:
    """Call a separate compiled function, which computes the value and its tangent."""
    tape: Any = tracing.tape
    boxed = [k for k in boxed if arguments.leaves[k]._trace == tape.number]
    both = derived((arguments.form, tuple(boxed)), lambda: _value_and_tangent_of(cache.fun, arguments.build, boxed))
    leaves = _Leaves([x._value if k in boxed else x for k, x in enumerate(arguments.leaves)])
    leaves.interpreted = partial(_interpreted_on, tape, cache.fun, arguments)
    # An enclosing derivative differentiates both the value and the tangent.
    with suspended(tape.outer, body=False):
        made = both(leaves, [arguments.leaves[k]._node.g for k in boxed])
    if type(made) is _Interpreted:
        return made.result
    (values, build), (tangents, _) = map(flatten, made)
    result, changes, same = build([tape.variable(x, tangent) for x, tangent in zip(values, tangents, strict=True)])
    for k, new in changes.items():
        assign(arguments.leaves[k], new)
    if not same:
        return result
    leaves, build = flatten(result)
    return build([arguments.leaves[same[i]] if i in same else x for i, x in enumerate(leaves)])


class _Leaves(list):
    """The leaves of a call with tangents; in a trace, without `interpreted`: a function that makes the call on its tape."""

    interpreted: Callable[[], _Interpreted] | None = None


class _Interpreted(NamedTuple):
    """The result of a call that isn't compiled, which was made on the tape of its caller."""

    result: Tree


def _interpreted_on(tape: Tape, fun: Function, arguments: Arguments) -> _Interpreted:
    # Objects in the result may contain values with tangents on this tape.
    with suspended(tape, body=False):
        return _Interpreted(fun(*arguments.args, **arguments.kwargs))


def _value_and_tangent_of(fun: Function, build: Callable, places: Sequence[int]) -> Function:
    """Return a function of the leaves and of tangents of some of them, which returns value and tangent of `called`."""
    # `called` returns the result of `fun`, those arguments that it has changed in place, by the index of the leaf, and the
    # indices of those that are leaves of the result themselves, by the index there.

    def both(leaves: _Leaves, tangents: list[Array]) -> Any:
        if leaves.interpreted is not None:
            return leaves.interpreted()

        def called(call: tuple) -> tuple[Tree, dict[int, Array], dict[int, int]]:
            arguments = flatten(call)[0]
            nodes = {k: arguments[k]._node for k in places}
            made = fun(*call[0], **call[1])
            changed = {k: arguments[k] for k, node in nodes.items() if arguments[k]._node is not node}
            results = enumerate(flatten(made)[0])
            return made, changed, {i: k for i, x in results for k, argument in changed.items() if x is argument}

        return trace_forwards(called, Variables(leaves, list(places), build), tangents)

    both.__name__ = getattr(fun, "__name__", "function")
    return both


def _noted(cache: ProgramCache, key: Hashable, arguments: Arguments, boxed: list[int], failure: FailedTrace) -> Tree:
    """Interpret the function, and trace it with the notes of this run, and if necessary with those of its reverse pass."""
    tape, forward, backward = tracing.tape, Interpretation(), Interpretation()
    trace = partial(cache.compiled, key, failure.watch, partial(_traced_on_tape, cache, arguments, boxed))

    def begin(gs: list[Array]) -> list[Array]:
        if cache.pending.pop(key, None) is backward:
            backward.__enter__()
        return []

    def end(gs: list[Array]) -> list[Array]:
        if tracing.recorder is backward:
            backward.__exit__(None, None, None)
            cache.traced_again(key, arguments, partial(trace, [*forward.notes, *backward.notes]))
        return []

    # The reverse pass runs `end` after the adjoints of the function's operations, and `begin` before them.
    tape.record_call(set(), [], [], (), end, True)
    with forward:
        made = cache.run(arguments)
    try:
        trace(forward.notes)
    except FailedTrace as error:
        failure = error
    else:
        return made
    if failure.needs_run:
        cache.pending[key] = backward
        tape.record_call(set(), [], [], (), begin, True)
    else:
        cache.fail(key, arguments, failure)
    return made
