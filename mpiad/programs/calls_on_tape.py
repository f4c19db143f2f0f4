"""Calls of compiled functions in a derivative: each call is one node of the tape.

The program has two parts. The first part computes the function in the forward pass. The second part runs when the reverse
pass reaches the node. It is a transformation of the function's program (see `transforms`). If the function can't be traced
from the shapes of its arguments alone, it is traced while it runs, and its reverse pass is traced while it first runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autograd.tracer import Box, getval

from mpiad._typing import Function
from mpiad.differentiation.forward import TangentTape
from mpiad.differentiation.tape import OrderedTape
from mpiad.differentiation.trace import Variables, trace_forwards
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.primitives.operation import suspended
from mpiad.programs.closure import Watch
from mpiad.programs.entry import count, in_program, is_shown, own
from mpiad.programs.message_numbers import message_counts
from mpiad.programs.program_cache import ProgramCache
from mpiad.programs.replay import Changed
from mpiad.programs.second_derivatives import called_with_reverse_differentiated, called_with_tangents_of_gradients
from mpiad.programs.signature import Arguments
from mpiad.programs.steps import Abandoned
from mpiad.programs.tape_node import (
    Lease,
    backwards,
    is_above,
    is_gradient_within,
    is_simple,
    put_on_tape,
    require_of,
    with_tangent,
)
from mpiad.programs.trace_run import Noting, PlayingBack, TraceRun, as_value, raise_own
from mpiad.programs.transforms import vjp
from mpiad.pytrees import flatten
from mpiad.transport.core.tracing import tracing

_boxes = Box.types


def called_on_tape(
    cache: ProgramCache, given: Arguments, args: tuple, kwargs: dict, derived: Callable[[Any, Callable], Function]
) -> Any:
    """Call a compiled function within a derivative; `derived`: the method of `Jitted`."""
    tape: Any = tracing.tape
    boxed = [k for k in given.traced if type(given.leaves[k]) in _boxes]
    boxes = [given.leaves[k] for k in boxed]
    simple = is_simple(tape, boxes)
    twice = not simple and is_gradient_within(OrderedTape, tape, boxes) and tape.passes == "one"
    if simple and tape.passes in ("kept", "recorded") or twice:
        made = called_with_reverse_differentiated(cache, given, boxed, args)
        if made is not None:
            return made[0]
        if tape.passes != "kept" or is_shown():
            return cache.fun(*args, **kwargs)
    if not simple and is_gradient_within(TangentTape, tape, boxes):
        return called_with_tangents_of_gradients(cache, given, boxed, args, kwargs)
    if type(tape) is TangentTape and (simple or is_above(tape, boxes)):
        key = "tangent", given.key
        if key in cache.entries:
            return cache.interpreted(key, args, kwargs)
        if not cache.is_followed(key, args):  # values in the function's closure may have tangents, too
            return cache.fun(*args, **kwargs)
        return _called_with_tangents(cache, tape, given, boxed, derived)
    if not simple:
        return cache.fun(*args, **kwargs)
    key = ("reverse", tuple(boxed), given.key)
    of = [given.traced.index(k) for k in boxed]
    entry, watch = cache.entry_or_watch(
        key, given, args,
        lambda watch: cache.derived_entry(given, watch, boxed, lambda program, recorder: vjp(program, recorder, of)),
    )  # fmt: skip
    if entry is None:
        if watch is None:
            return cache.interpreted(key, args, kwargs)
        return _traced_on_tape(cache, key, given, boxed, args, kwargs, watch)
    values = [getval(given.leaves[k]) for k in given.traced]
    lease = Lease(entry.replays)
    count(entry.communications)
    counts = message_counts() if entry.replays.last_check >= 0 else None
    try:
        made = lease.replay.first(*values, *[None] * sum(entry.inside))
    except Changed as change:
        with cache.changed(key, change, counts):
            return cache.fun(*args, **kwargs)
    tape.channels |= entry.channels
    specs = [spec_like(getval(given.leaves[k])) for k in boxed]
    # The reverse pass keeps the arguments that it needs, and all of them if the function may have to run again.
    kept_values = [x if k in entry.replays.read_later else None for k, x in enumerate(values)]
    all_arguments = given if entry.may_change else None

    def pull(gs: list[Any]) -> list[Any]:
        require_of(None, gs, cache.name)
        count(entry.communications)
        try:
            cotangents = lease.replay.later[0](*kept_values, *gs)
        except Changed as change:
            if all_arguments is None:
                raise
            with suspended(body=False), cache.changed(key, change, counts):
                second_run = TraceRun(all_arguments).run_backwards(cache.fun, boxed, all_arguments.values())
                return backwards(second_run, entry.inside, gs, specs)
        return [conform(g, *spec) for g, spec in zip(cotangents, specs, strict=True)]

    places = [given.leaves[k]._node.index for k in boxed]
    return entry.build(put_on_tape(tape, entry.leaves(made), entry.inside, places, pull, entry.communicates))


def _called_with_tangents(
    cache: ProgramCache, tape: TangentTape, given: Arguments, boxed: list[int], derived: Callable[[Any, Callable], Function]
) -> Any:
    """Call a separate compiled function, which computes the value and its tangent."""
    boxed = [k for k in boxed if given.leaves[k]._trace == tape.number]
    form = given.form, tuple(boxed)
    both = derived(form, lambda: _value_and_tangent_of(cache.fun, given.build, boxed))
    leaves = [x._value if k in boxed else x for k, x in enumerate(given.leaves)]
    # An enclosing derivative differentiates both the value and the tangent.
    with suspended(tape.outer, body=False):
        made = both(leaves, [given.leaves[k]._node.g for k in boxed])
    (values, build), (tangents, _) = map(flatten, made)
    return build([with_tangent(tape, x, tangent) for x, tangent in zip(values, tangents, strict=True)])


def _value_and_tangent_of(fun: Function, build: Callable, places: Sequence[int]) -> Function:
    """Return a function of the leaves and of tangents of some of them, which returns the value and tangent of `fun`."""

    def both(leaves: list[Any], tangents: list[Any]) -> tuple[Any, Any]:
        variables = Variables(leaves, list(places), build)
        return trace_forwards(lambda given: fun(*given[0], **given[1]), variables, tangents)

    both.__name__ = getattr(fun, "__name__", "function")
    return both


def _traced_on_tape(
    cache: ProgramCache, key: Any, given: Arguments, boxed: list[int], args: tuple, kwargs: dict, watch: Watch
) -> Any:
    """Run the function on traced arrays on a separate tape; the reverse pass completes and compiles the program."""
    tape, trace = tracing.tape, TraceRun(given)
    try:
        with suspended(body=False), Noting(trace.recorder):
            run = trace.run_backwards(cache.fun, boxed)
    except (Abandoned, Exception) as error:  # noqa: BLE001 (the second run raises the function's own exceptions)
        return cache.run_again(trace, key, error, args, kwargs)
    tape.channels |= run.recording.channels  # type: ignore[union-attr]
    cache.pending[key] = trace
    inside = in_program(run.values)
    specs = [spec_like(getval(given.leaves[k])) for k in boxed]
    done = False

    def pull(gs: list[Any]) -> list[Any]:
        nonlocal done
        require_of(None, gs, cache.name)
        with suspended(body=False):
            if done or key in cache.entries:  # another reverse pass, in which the traced arrays are constants
                with PlayingBack([], reread=trace.recorder):
                    return backwards(run, inside, gs, specs)
            done = True
            cache.pending.pop(key, None)
            try:
                with Noting(trace.recorder, 1):
                    seeds = [trace.recorder.input(as_value(g)) for g in gs]
                    cotangents = backwards(run, inside, seeds, specs)
            except (Abandoned, Exception) as error:  # noqa: BLE001 (the second run raises the function's own exceptions)
                raise_own(trace.recorder, error)
                cache.give_up(key, error)
                with trace.playing_back():
                    second_run = trace.run_backwards(cache.fun, boxed, given.values())
                    return backwards(second_run, inside, gs, specs)
        cache.compile(key, trace.recorder, [run.values, cotangents], run.build, watch)
        return [own(g) for g in cotangents]

    out = [own(value) for value in run.values]
    places = [given.leaves[k]._node.index for k in boxed]
    return run.build(put_on_tape(tape, out, inside, places, pull, trace.recorder.communicates))
