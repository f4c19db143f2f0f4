"""Calls of compiled functions in a derivative: each call is one node of the tape.

The program has two parts. The first part computes the function in the forward pass. The second part runs when the reverse
pass reaches the node. It is a transformation of the function's program (see `transforms`). If the function can't be traced
from the shapes of its arguments alone, it is traced while it runs, and its reverse pass is traced while it first runs.

In second derivatives, a function that can't be traced from shapes is interpreted, without a warning.

**Tangents of a gradient**, as in `hvp(jit(f))`: the tape of the gradient records one node, and the outer tape carries the
tangents. The program computes f and its reverse pass, both with tangents. It communicates in the same order as the
interpreted function. As in a first derivative, the call runs the first part of the program, and the reverse pass of the
gradient runs the second part.

**Reverse passes of a reverse pass**, as in `grad(grad(f))`, `make_hvp(f)` and `linearize(f)`. In general the program has
four parts: the function, its reverse pass, the reverse pass of the reverse pass, and the reverse pass of the function on
the outer tape, which is around the tape of the gradient. The call runs the first part, and records a node for the fourth
part on the outer tape. The reverse pass of the gradient runs the second part, and records a node for the third part there.
A reverse pass along the outer tape runs the third and the fourth part, so it communicates in the same order as without
compilation.

`linearize` has no outer tape, and its program has three parts. The second part multiplies by the transposed Jacobian. The
third part is the reverse pass of the second with respect to the cotangents, and multiplies by the Jacobian. The program of
`make_vjp` has the first two parts.

Several reverse passes that run together ("lanes") use a program that is derived from the later parts (see `batching`).

In some reverse passes no program can be used: if lanes combine their messages but have no program, or if the cotangents are
traced. In this case, the function runs again on tapes of its own. The program has logged the communications of its first
two parts, and the function doesn't repeat them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from autograd.tracer import Box, getval

from mpiad._typing import Array, Function, Tree
from mpiad.compiling.closure import Watch
from mpiad.differentiation.backward import Lane, cotangents_of, run_backward_together, sweep, sweep_together
from mpiad.differentiation.forward import TangentTape
from mpiad.differentiation.in_place import assign, keeping_arguments
from mpiad.differentiation.tape import OrderedTape
from mpiad.differentiation.trace import Traced as TracedRun
from mpiad.differentiation.trace import Variables, trace_backwards, trace_forwards
from mpiad.primitives.cotangents import conform, conformed, spec_like
from mpiad.primitives.operation import Tape, suspended
from mpiad.programs.playback import PlayingBack, message_counts, result_of
from mpiad.programs.program_cache import Entry, ProgramCache, count, in_program, own
from mpiad.programs.recorder import Recorder
from mpiad.programs.replay import Changed, Replays
from mpiad.programs.signature import Arguments
from mpiad.programs.traced_array import Abandoned, TracedArray
from mpiad.programs.transforms import Program, jvp_of_vjp, vjp, vjp_of_vjp
from mpiad.pytrees import flatten
from mpiad.transport.core.channels import live_channels
from mpiad.transport.core.tracing import note_channels, tracing

_boxes = Box.types
_Derived: TypeAlias = Callable[[Hashable, Callable[[], Function]], Function]  # the method `Jitted.derived`


def called_on_tape(cache: ProgramCache, given: Arguments, derived: _Derived) -> Any:
    """Call a compiled function within a derivative; `derived`: the method of `Jitted`."""
    tape: Any = tracing.tape
    boxed = [k for k in given.traced if type(given.leaves[k]) in _boxes]
    boxes = [given.leaves[k] for k in boxed]
    simple = is_simple(tape, boxes)
    twice = not simple and is_gradient_within(OrderedTape, tape, boxes) and tape.passes == "one"
    if simple and tape.passes in ("together", "kept", "recorded") or twice:
        return called_with_reverse_differentiated(cache, given, boxed)
    if not simple and is_gradient_within(TangentTape, tape, boxes):
        return called_with_tangents_of_gradients(cache, given, boxed)
    if type(tape) is TangentTape and (simple or is_above(tape, boxes)):
        key = "tangent", given.key
        if key in cache.entries:
            return cache.interpreted(key, given)
        if not cache.is_followed(key, given):  # values in the function's closure may have tangents, too
            return cache.run(given)
        return _called_with_tangents(cache, given, boxed, derived)
    if not simple:
        return cache.run(given)
    key = ("reverse", tuple(boxed), given.key)
    derive = partial(vjp, inner=[given.traced.index(k) for k in boxed])
    entry, watch = cache.entry_or_watch(key, given, partial(cache.derived_entry, given, boxed, derive))
    if entry is not None:
        return _run(cache, key, entry, given, boxed)
    if watch is None:
        return cache.interpreted(key, given)
    return _traced_on_tape(cache, key, given, boxed, watch)


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


def is_gradient_within(outer: type, tape: Tape | None, boxes: Sequence[Box]) -> bool:
    """Return whether exactly two tapes enclose a call: the tape of a gradient, and around it a tape of type `outer`."""
    if type(tape) is not OrderedTape or type(tape.outer) is not outer or not is_above(tape, boxes):
        return False
    below = [box._value if box._trace == tape.number else box for box in boxes]
    return is_simple(tape.outer, [x for x in below if type(x) in _boxes])


def require_of(tape: Tape | None, gs: Sequence[Array], name: str) -> None:
    """Raise a TypeError for traced cotangents, except for cotangents on `tape`: programs take plain arrays."""
    if any(type(g) in _boxes and (tape is None or getattr(g._node, "tape", None) is not tape) for g in gs):
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


def _run(
    cache: ProgramCache, key: Hashable, entry: Entry, given: Arguments, variables: list[int], tangents: Sequence[Array] = ()
) -> Tree:
    """Run the first part of a program, record a node that runs the second part, and return the function's result."""
    # If there is an outer tape, `tangents` are those of the arguments on it, and the program also computes its results'.
    tape: Any = tracing.tape
    outer, inside = tape.outer, entry.inside
    lease, inputs = Lease(entry.replays), [*(getval(given.leaves[k]) for k in given.traced), *tangents]
    counts = message_counts() if entry.replays.last_check >= 0 else None
    count(entry.communications)
    note_channels(entry.channels)
    try:
        values = entry.leaves(lease.replay.first(*inputs))
    except Changed as change:
        with cache.changed(key, change, counts):
            return cache.run(given)
    if outer is not None:
        half = len(inside) // 2
        triples, inside = zip(values, values[half:], inside), inside[:half]
        values = [outer.variable(x, tangent) if is_in else x for x, tangent, is_in in triples]
    specs = [spec_like(getval(given.leaves[k])) for k in variables]
    # The reverse pass keeps the arguments that it needs, and all of them if the function may have to run again.
    kept_inputs = [x if k in entry.replays.read_later else None for k, x in enumerate(inputs)]
    all_arguments = given if outer is None and entry.may_change else None

    def pull(gs: list[Array]) -> list[Array]:
        require_of(outer, gs, cache.name)
        count(entry.communications)
        pairs = [] if outer is None else [outer.value_and_tangent(g) for g in gs]
        try:
            found = lease.replay.later[0](*kept_inputs, *([x for part in zip(*pairs) for x in part] if pairs else gs))
        except Changed as change:
            if all_arguments is None:
                raise
            with suspended(body=False), cache.changed(key, change, counts):
                second_run = _run_on_tape(cache.fun, all_arguments, all_arguments.values(), variables)
                return cotangents_of(second_run.recording, _seeds(second_run, inside, gs), specs)
        cotangents = [conform(g, *spec) for g, spec in zip(found, specs)]
        if outer is None:
            return cotangents
        tangents = [conform(g, *spec) for g, spec in zip(found[len(specs) :], specs)]
        return [outer.variable(g, tangent) for g, tangent in zip(cotangents, tangents)]

    places = [given.leaves[k]._node.index for k in variables]
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
        require_of(None, gs, cache.name)
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


# Second derivatives.


def without_tape(given: Arguments, boxed: Sequence[int]) -> tuple[list[int], list[Any], list[int]]:
    """Return the positions of the current tape's variables, all leaves without its boxes, and positions of other boxes."""
    variables = [k for k in boxed if given.leaves[k]._trace == tracing.tape.number]  # type: ignore[union-attr]
    leaves = [x._value if k in variables else x for k, x in enumerate(given.leaves)]
    return variables, leaves, [k for k in boxed if type(leaves[k]) in _boxes]


def called_with_tangents_of_gradients(cache: ProgramCache, given: Arguments, boxed: Sequence[int]) -> Tree:
    """Call a compiled function on the tape of a gradient, around which a tape propagates tangents."""
    tape: Any = tracing.tape
    variables, leaves, outer_leaves = without_tape(given, boxed)
    key = "tangents of gradients", tuple(variables), tuple(outer_leaves), given.key
    inner, outer = ([given.traced.index(k) for k in chosen] for chosen in (variables, outer_leaves))

    derive = partial(jvp_of_vjp, inner=inner, outer=outer)
    entry, _ = cache.entry_or_watch(key, given, partial(cache.derived_entry, given, boxed, derive), optional=True)
    if entry is None:
        return cache.run(given)
    tangents = [tape.outer.value_and_tangent(leaves[k])[1] for k in outer_leaves]
    return _run(cache, key, entry, given, variables, tangents)


# Reverse passes of a reverse pass. A function and its reverse pass are recorded on an outer tape. A reverse pass along this
# tape has two steps: it runs first the nodes of the recorded reverse pass, then the nodes of the function. Programs are
# traced in this way, and a function also runs in this way if its program can't be used.


class _By(NamedTuple):
    """The leaves of the arguments with respect to which a function is differentiated."""

    inner: list[int]  # positions of the variables of the function's reverse pass
    outer: list[int]  # positions of the variables of the outer tape
    # Number of parts of the program: 2 if the reverse pass isn't differentiated, 3 if it is, with respect to the cotangents
    # of the results, 4 if the function and its reverse pass are also differentiated with respect to the leaves `outer`.
    parts: int


class _Record(NamedTuple):
    """The record of a function and its reverse pass on an outer tape."""

    nodes: list[Any]  # list of OrderedNode
    values: list[tuple[Any, int]]  # the results, each with the index of its node, -1 for a constant
    found: list[tuple[Any, int]]  # the cotangents of the variables, each with the index of its node
    end: int  # the nodes before this index are those of the variables and the function
    start: int  # the nodes from `end` to `start` are those of the cotangents of the results; the rest is the reverse pass

    def lane(self, seeds: Iterable[tuple[int, Array]]) -> Lane:
        """Return the state of a new reverse pass along the nodes; `seeds`: indices of nodes, and cotangents."""
        lane = Lane.of(self.nodes)
        lane.add(seeds)
        return lane

    def sweep(self, lanes: Sequence[Lane], places: range, together: bool) -> None:
        """Run the reverse passes through a range of nodes; `together`: whether they combine their messages."""
        if together:
            sweep_together(self.nodes, lanes, places.stop, places.start)
            return
        for lane in lanes:
            sweep(self.nodes, lane.totals, places[::-1], True, lane.owned)


def _with_all_parts(by: _By, given: Arguments, program: Program, recorder: Recorder) -> list[list[Array]]:
    """Return the results of the first `by.parts` of the four parts (see the module's docstring)."""
    # All parts read the arguments; the second also reads the cotangents of the results, the third seeds like the variables,
    # and the fourth seeds like the results.
    recorder.logged = min(by.parts - 1, 2)
    inner, outer = ([given.traced.index(k) for k in places] for places in (by.inner, by.outer))
    if by.parts == 2:
        return vjp(program, recorder, inner)
    return vjp_of_vjp(program, recorder, inner, outer, last=4 - by.parts)


def called_with_reverse_differentiated(cache: ProgramCache, given: Arguments, boxed: Sequence[int]) -> Tree:
    """Call a function whose reverse pass may be differentiated or repeated."""
    tape: Any = tracing.tape
    variables, leaves, outer_leaves = without_tape(given, boxed)
    by = _By(variables, outer_leaves, 4 if tape.outer is not None else 3 if tape.passes == "recorded" else 2)
    key = "reverse over reverse", by.parts, tuple(variables), tuple(outer_leaves), given.key
    derive = partial(_with_all_parts, by, given)
    entry, _ = cache.entry_or_watch(key, given, partial(cache.derived_entry, given, boxed, derive), optional=True)
    if entry is None:
        # Other ranks may run several reverse passes together, which a trace of this call would run one after the other.
        return cache.run(given)
    call = _Call(cache, entry, given, by, tape.outer)
    try:
        values = call.first([leaves[k]._node.index for k in outer_leaves])
    except Changed as change:
        with cache.changed(key, change, call.counts):
            return cache.run(given)
    places = [given.leaves[k]._node.index for k in variables]
    together = call.pull_together if tape.outer is None else None
    return entry.build(call.record_on(tape, values, entry.inside, places, call.pull, together))


class _Played(NamedTuple):
    """The data for the playback of a part of the program: its log, and the message counts before it."""

    log: list[Any]
    counts: list[Any]


class _Pass:
    """A reverse pass of a call; `gs`: the cotangents of the results, without boxes."""

    def __init__(self, gs: list[Array]):
        self.gs = gs
        self.played: _Played
        self.vs: dict[int, list[Any]] = {}  # the seeds of the program's third part, by lane
        self.ran: list[Any] | None = None  # the seeds in the last run of the third part
        self.batch: _Batch | None = None  # after the third part of a program for several lanes
        # The record of a playback, and by lane the reverse passes along it that still have to run the nodes of the
        # function.
        self.record: _Record | None = None
        self.lanes: dict[int, Lane] = {}


class _Batch:
    """A run of a program for several lanes; `given`: the inputs before the seeds; `communications`: see `Entry`."""

    def __init__(self, replays: Replays, given: list[Array], communications: int):
        self._lease, self._given, self._communications = Lease(replays), given, communications

    def part(self, number: int, lanes: Sequence[list[Array]]) -> list[list[Array]]:
        """Run a part, and return the results of each lane; `lanes`: the seeds of each lane."""
        count(self._communications)
        self._given += [np.stack(several) for several in zip(*lanes)]
        made = self._lease.replay.later[number - 1](*self._given)
        return [[x[lane] for x in made] for lane in range(len(lanes))]


class _Call:
    """A call of a program, whose parts run one after the other; `outer`: the tape around the gradient's tape, or None."""

    def __init__(self, cache: ProgramCache, entry: Entry, given: Arguments, by: _By, outer: OrderedTape | None):
        self._cache, self._entry, self._given, self._by, self._outer = cache, entry, given, by, outer
        self._values, self._lease = given.values(), Lease(entry.replays)
        self._inputs = [self._values[k] for k in given.traced]
        self._inside = entry.inside
        self._specs = [spec_like(self._values[k]) for k in by.inner]
        # A single rank may communicate in any order, and needn't combine messages.
        self._meets_others = entry.communicates and any(channel.size > 1 for channel in live_channels())
        self._pass: _Pass | None = None
        self._run: Any = None

    def first(self, places: list[int]) -> list[Array]:
        """Run the function, record it on the outer tape with variables at `places`, and return the result's leaves."""
        made, self._played = self._played_part(0)
        values, outer = self._entry.leaves(made), self._outer
        self._likes = [spec_like(x) for x, is_in in zip(values, self._inside) if is_in]
        if outer is None:
            return values
        self._place = len(outer.record)
        return self.record_on(outer, values, self._inside, places, self._pull_first, self._pull_first_together)

    def record_on(
        self, tape: OrderedTape, values: list[Array], inside: list[bool], places: list[int], *pulls: Callable | None
    ) -> list[Array]:
        """Record values on a tape; `pulls`: the arguments `pull` and `pull_all` of `OrderedTape.record_call`."""
        entry, (pull, together) = self._entry, pulls
        return tape.record_call(entry.channels, values, inside, places, pull, entry.communicates, together)  # type: ignore[arg-type]

    def _part(self, number: int, *given: Sequence[Array]) -> list[Array]:
        """Run a part of the program; `given`: the inputs after the arguments."""
        replay, inputs = self._lease.replay, [*self._inputs, *[g for group in given for g in group]]
        count(self._entry.communications)
        note_channels(self._entry.channels)
        return (replay.later[number - 1] if number else replay.first)(*inputs)

    def _played_part(self, number: int, *given: Sequence[Array]) -> tuple[list[Array], _Played]:
        """Run a part of the program; return its results, and the data for its playback. `counts`: those before it."""
        log, self.counts = self._lease.replay.log, message_counts() if self._entry.communicates else []
        log.clear()
        made = self._part(number, *given)
        return made, _Played(list(log), self.counts)

    def pull(self, gs: list[Array]) -> list[Array]:
        """Run the reverse pass, and record it on the outer tape, or on a tape whose variables are the cotangents."""
        tape: Any = self._outer or tracing.tape
        boxed = [k for k, g in enumerate(gs) if type(g) in _boxes]
        if self._outer is not None:
            require_of(tape, gs, self._cache.name)
        elif boxed or tape is not None:
            of_products = self._by.parts == 3 and type(tape) is OrderedTape and tape.of_cotangents
            if not of_products or not is_simple(tape, [gs[k] for k in boxed]):
                run = self._interpreted()
                return cotangents_of(run.recording, _seeds(run, self._inside, gs), self._specs)
        of = _Pass([g._value if type(g) in _boxes else g for g in gs])
        found = self._run_pass(of)
        if tape is None:
            return found
        places = [gs[k]._node.index for k in boxed]
        if self._outer is not None:
            self._pass = of
            places.append(self._place)  # the function's node, which `_pull_second` activates
        pull, together = partial(self._pull_second, of, boxed), partial(self._pull_second_together, of, boxed)
        return self.record_on(tape, found, [True] * len(found), places, pull, together)

    def _batch(self, first: int, lanes: list[list[Array]], of: _Pass | None = None) -> _Batch | None:
        """Return a run of the program for several lanes, from the part `first` on; None if it can't be used."""
        parts, entry = range(first, self._by.parts if first > 1 else 2), self._entry
        given, log = [*self._inputs, *(of.gs if of else ())], [*self._played.log, *(of.played.log if of else ())]
        found = None if any(map(_is_traced, lanes)) else entry.batched(parts, len(given), len(lanes))
        return found and _Batch(found.replays, given + [result_of(log[k]) for k in found.logged], entry.communications)

    def pull_together(self, lanes: list[list[Array]]) -> list[list[Array]] | None:
        batch = self._batch(1, lanes)
        if batch is not None:
            return [self._conformed(found) for found in batch.part(1, lanes)]
        if not self._meets_others:
            return None
        run = self._interpreted()
        seeds = [_seeds(run, self._inside, gs) for gs in lanes]
        return [self._conformed(found) for found in run_backward_together(run.recording, seeds, len(self._specs))]

    def _run_pass(self, of: _Pass) -> list[Array]:
        found, of.played = self._played_part(1, of.gs)
        return self._conformed(found)

    def _conformed(self, found: Sequence[Array]) -> list[Array]:
        return [conformed(g, spec) for g, spec in zip(found, self._specs)]

    # The reverse pass of the reverse pass ("second", with seeds `vs`), and afterwards the reverse pass of the function
    # ("first", with seeds `cs`). `_second_played` and `_first_played` run them along the record of a playback.

    def _pull_second(self, of: _Pass, boxed: list[int], vs: list[Array]) -> list[Array]:
        """Return the cotangents of the `gs` that are variables, and a 1, which activates the function's node."""
        if _is_traced(vs):
            return self._second_played(of, boxed, [vs])[0]
        of.vs[tracing.lane] = vs
        found = self._second(of, vs)
        return [*(found[k] for k in boxed), 1]

    def _second(self, of: _Pass, vs: list[Array]) -> list[Array]:
        of.ran = vs
        return [conformed(g, like) for g, like in zip(self._part(2, of.gs, vs), self._likes)]

    def _pull_second_together(self, of: _Pass, boxed: list[int], lanes: list[list[Array]]) -> list[list[Array]] | None:
        of.batch = self._batch(2, lanes, of)
        if of.batch is None:
            return self._second_played(of, boxed, lanes, True) if self._meets_others else None
        found = of.batch.part(2, lanes)
        return [[*(conformed(gs[k], self._likes[k]) for k in boxed), 1] for gs in found]

    def _second_played(
        self, of: _Pass, boxed: list[int], lanes: list[list[Array]], together: bool = False
    ) -> list[list[Array]]:
        record = self._record(of)
        passes = [record.lane(zip([place for _, place in record.found], vs)) for vs in lanes]
        record.sweep(passes, range(record.start, len(record.nodes)), together)
        of.lanes.update(enumerate(passes) if together else [(tracing.lane, passes[0])])
        places = [(record.end + k, self._likes[k]) for k in boxed]
        return [[*(conformed(lane.totals[place], like) for place, like in places), 1] for lane in passes]

    def _pull_first(self, cs: list[Array]) -> list[Array]:
        of = self._differentiated()
        if tracing.lane in of.lanes or _is_traced(cs):
            return self._first_played(of, [(tracing.lane, cs)])[0]
        vs = of.vs.pop(tracing.lane, None) or self._conformed([None] * len(self._specs))
        if vs is not of.ran:  # the third part hasn't run for this lane, or has run for another lane afterwards
            self._second(of, vs)
        return self._part(3, of.gs, vs, cs)

    def _pull_first_together(self, lanes: list[list[Array]]) -> list[list[Array]] | None:
        of = self._differentiated()
        if of.batch is None and not of.vs and not of.lanes:  # the third part wasn't needed, but the fourth part reads it
            self._pull_second_together(of, [], [self._conformed([None] * len(self._specs))] * len(lanes))
        batch, of.batch = of.batch, None
        if batch is None:
            return self._first_played(of, list(enumerate(lanes)), True) if self._meets_others else None
        likes = [spec_like(self._values[k]) for k in self._by.outer]
        return [[conformed(g, like) for g, like in zip(found, likes)] for found in batch.part(3, lanes)]

    def _first_played(self, of: _Pass, lanes: list[tuple[int, list[Array]]], together: bool = False) -> list[list[Array]]:
        record, outer = self._record(of), self._by.outer
        passes = [of.lanes.pop(number, None) or record.lane(()) for number, _ in lanes]
        places = [place for (_, place), is_in in zip(record.values, self._inside) if is_in]
        for lane, (_, cs) in zip(passes, lanes):
            lane.add(zip(places, cs))
        record.sweep(passes, range(len(outer), record.end), together)
        likes = [spec_like(self._values[k]) for k in outer]
        return [[conformed(g, like) for g, like in zip(lane.totals, likes)] for lane in passes]

    def _differentiated(self) -> _Pass:
        if self._pass is None:  # the reverse pass of the gradient didn't run the call's node
            self._pass = _Pass([like.zeros() for like in self._likes])
            self._run_pass(self._pass)
        return self._pass

    def _record(self, of: _Pass) -> _Record:
        """Run the function and its reverse pass on an outer tape, without repeating communications."""
        if of.record is None:
            by = self._by
            first, second = self._playing_back(self._played), self._playing_back(of.played)
            with suspended(), OrderedTape() as tape:
                leaves = [tape.variable(x) if k in by.outer else x for k, x in enumerate(self._values)]
                with first:
                    run = _run_on_tape(self._cache.fun, self._given, leaves, by.inner)
                values, end = [tape.value_and_place(x) for x in run.values], len(tape.record)
                gs = [tape.variable(g) for g in of.gs]
                start = len(tape.record)
                with second:
                    found = cotangents_of(run.recording, _seeds(run, self._inside, gs), self._specs)
                    cotangents = [tape.value_and_place(g) for g in found]
            of.record = _Record(tape.close().nodes, values, cotangents, end, start)
        return of.record

    def _interpreted(self) -> TracedRun:
        if self._run is None:
            with suspended(), self._playing_back(self._played):
                self._run = _run_on_tape(self._cache.fun, self._given, self._values, self._by.inner)
        return self._run

    def _playing_back(self, played: _Played) -> PlayingBack:
        if not self._entry.watch.is_the_same():
            raise TypeError(
                f"jit: an object that {self._cache.name} reads besides its arguments has changed since the call, and "
                "the compiled program can't compute this derivative. Pass the object as an argument."
            )
        return PlayingBack(played.log, played.counts)


def _is_traced(gs: Sequence[Array]) -> bool:
    return tracing.tape is not None or any(type(g) in _boxes for g in gs)
