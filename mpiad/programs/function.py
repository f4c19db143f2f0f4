"""`mpiad.jit`: a function, compiled for the shapes that it meets.

The first call for a signature runs the function on traced arrays (`recorder`), and makes a program of what it did; later
calls replay that. Where the trace has to be given up, the function is run once more on plain arrays, with what it had
communicated until then played back to it, and is interpreted for this signature from then on.

Within a derivative of this library's the function is one node on the tape, or two calls of one program: what comes before
its cut is run forwards, the rest when the node's turn comes in the reverse pass.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from autograd.tracer import Box, getval

from mpiad._typing import Function
from mpiad.differentiation.backward import run_backward
from mpiad.differentiation.tape import TangentTape
from mpiad.differentiation.trace import Variables, trace_forwards
from mpiad.differentiation.trees import flatten
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.primitives.operation import communications, current, suspended
from mpiad.programs.closure import Unfollowed, Watch, watch_of
from mpiad.programs.fusion import Fusion
from mpiad.programs.listing import Listing
from mpiad.programs.recorder import Recorder
from mpiad.programs.replay import Changed, Replays
from mpiad.programs.signature import Arguments, arguments_of
from mpiad.programs.steps import Abandoned, Traced
from mpiad.programs.tape_node import Lease, is_simple, placed, with_tangents
from mpiad.programs.trace_run import PlayingBack, TraceRun, as_value, message_counts
from mpiad.programs.trace_translation import program_of
from mpiad.transport import Channel, Spec, calls
from mpiad.transport.tracing import tracing

__all__ = ["Jitted", "jit"]

_log = logging.getLogger("mpiad")
_boxes = Box.types
_MOST_TRACES = 32
_UNKNOWN: Any = object()


def jit(fun: Function | None = None, *, strict: bool = False) -> Any:
    """Compile a function: what it computes between its communications becomes fused loops, forwards and backwards.

    Parameters
    ----------
    fun : callable
        Written with autograd.numpy, the primitives and `Domain`; its arguments and results are nests of arrays and
        numbers. It is traced once for each form, shape and dtype of them, and for the values of integers, booleans and
        strings among them.
    strict : bool
        Whether a function that can't be compiled raises; by default it runs as it is, after one warning.

    Returns
    -------
    Jitted
        A function of the same arguments, results, derivatives and communications. Results are fresh arrays.

    Raises
    ------
    TypeError
        With `strict`, at a call: the user's line, and what stands in the way there.

    Ranks
    -----
    As `fun`. Each rank compiles for itself; ranks that do and ranks that don't fit together.

    Adjoint
    -------
    As that of `fun`, at any order. In `value_and_grad(jit(f))` and `jit(value_and_grad(f))` the reverse pass is compiled.
    """
    if fun is None:
        return functools.partial(jit, strict=strict)
    return Jitted(fun, strict)


class _Output(NamedTuple):
    """A leaf of the result: an output of the program, or a constant."""

    place: int | None
    constant: Any


class _Entry(NamedTuple):
    """A compiled program for one signature."""

    replays: Replays
    outputs: list[_Output]
    build: Callable[[list[Any]], Any]
    watch: Watch
    communications: int
    channels: set[Channel]

    def is_current(self) -> bool:
        """Tell whether it can be run: what it was made of is the same, and no message is left of an exception."""
        return not any(channel.fault for channel in self.channels) and self.watch.is_the_same()


class Jitted:
    """A compiled function; made by `jit`."""

    def __init__(self, fun: Function, strict: bool = False):
        self.fun, self.strict = fun, strict
        self.__name__ = getattr(fun, "__name__", type(fun).__name__)
        functools.update_wrapper(self, fun, updated=())
        # By signature; None where it is interpreted.
        self._entries: dict[Any, _Entry | None] = {}
        self._reasons: dict[Any, str] = {}
        self._warned = False
        self._traces = 0
        # Integers that the function decides by: where they stand among the arguments, by the form of these.
        self._asked: set[Any] = set()
        # Its value and its tangent as a function of their own, by the form of the arguments and which are variables.
        self._along: dict[Any, Jitted] = {}
        # Traces that their reverse pass has yet to complete, as long as it can come.
        self._under_way: WeakValueDictionary[Any, TraceRun] = WeakValueDictionary()

    def __repr__(self) -> str:
        return f"<jit of {self.__name__}>"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Return the compiled method of an object."""
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        # Inside of another trace its operations are noted like the rest.
        if tracing.recorder is not None or not _can_compile():
            return self.fun(*args, **kwargs)
        try:
            given = arguments_of(args, kwargs, self._asked)
        except TypeError as error:
            self._give_up(None, f"an argument can't be compared with that of another call: {error}")
            return self.fun(*args, **kwargs)
        if current.tape is None and not any(type(given.leaves[k]) in _boxes for k in given.traced):
            return self._called(given, args, kwargs)
        return self._called_on_tape(given, args, kwargs)

    def program(self, *args: Any, **kwargs: Any) -> Listing:
        """Return the program for these arguments, to be printed: its operations, loops and messages.

        Raises
        ------
        TypeError
            Where it can't be compiled.

        Ranks
        -----
        As a call, which it makes where these shapes are met for the first time.
        """
        given = arguments_of(args, kwargs, self._asked)
        if given.key not in self._entries:
            self(*args, **kwargs)
        entry = self._entries.get(given.key)
        if entry is None:
            raise TypeError(f"{self.__name__} isn't compiled for these arguments; the log tells why.")
        return Listing(self.__name__, entry.replays)

    # ---- without a derivative around it

    def _called(self, given: Arguments, args: tuple, kwargs: dict) -> Any:
        entry = self._entries.get(given.key, _UNKNOWN)
        if entry is None:
            return self._as_it_is(given.key, args, kwargs)
        if entry is _UNKNOWN or not entry.is_current():
            return self._traced(given, args, kwargs)
        replay = entry.replays.take()
        _count(entry.communications)
        counts = message_counts() if entry.replays.last_look >= 0 else ()
        try:
            made = replay.first(*[given.leaves[k] for k in given.traced])
        except Changed as change:
            with self._changed(given.key, change, counts):
                return self.fun(*args, **kwargs)
        entry.replays.give_back(replay)
        return entry.build([_own(out.constant) if out.place is None else made[out.place] for out in entry.outputs])

    def _traced(self, given: Arguments, args: tuple, kwargs: dict) -> Any:
        """Run the function on traced arrays, and compile what it did."""
        watch = self._watch(given.key, given, args)
        if watch is None:
            return self.fun(*args, **kwargs)
        trace = TraceRun(given)
        try:
            with trace.noting():
                out, build = flatten(trace.run(self.fun))
        except (Abandoned, Exception) as error:  # noqa: BLE001 (runs once more, and raises there if it is its own)
            return self._run_again(trace, given.key, error, args, kwargs)
        numbers, outputs = _outputs(out)
        try:
            self._entries[given.key] = _entry(trace.recorder, numbers, None, outputs, build, watch)
        except Exception as error:  # noqa: BLE001 (what can't be compiled runs all the same)
            self._give_up(given.key, error)
        # Of their own: what a trace has computed may be views of arguments and of one another.
        return build([_own(leaf) for leaf in out])

    def _watch(self, key: Any, given: Arguments, args: tuple) -> Watch | None:
        self._traces += 1
        if self._traces > _MOST_TRACES:
            said = f"it was traced {_MOST_TRACES} times already: shapes, integers or what it closes over change"
            self._give_up(key, said)
            return None
        try:
            return watch_of(self.fun, args, given.constants())
        except Unfollowed as error:
            self._give_up(key, f"what it reads beside its arguments can't be followed: {error}")
            return None

    def _run_again(self, trace: TraceRun, key: Any, error: BaseException, args: tuple, kwargs: dict) -> Any:
        """Run the function on plain arrays after its trace was given up."""
        trace.raise_own(error)
        with trace.playing_back():
            made = self.fun(*args, **kwargs)
        if not self._is_worth_another(trace):
            self._give_up(key, error)
        return made

    def _is_worth_another(self, trace: TraceRun) -> bool:
        """Tell whether another trace may succeed where this one was given up.

        So it is where the function decides by an integer, which further traces take as a constant.
        """
        if trace.recorder.asked is None:
            return False
        given, recorder = trace.given, trace.recorder
        whole = [k for k in given.traced if isinstance(given.leaves[k], (int, np.integer))]
        # One that was computed of integers may be of any of them.
        mine = [k for k, number in zip(given.traced, recorder.inputs) if number == recorder.asked]
        self._asked.update((given.form, k) for k in mine or whole)
        return bool(whole)

    def _changed(self, key: Any, change: Changed, counts: Any) -> PlayingBack:
        """Return a context in which the function runs as it is, after a run of its program that can't go on."""
        if change.log is None:
            raise change
        # Ranks have told each other something else than in the trace: the next call is traced anew.
        self._entries.pop(key, None)
        return PlayingBack(change.log, counts)

    def _give_up(self, key: Any, error: Any) -> None:
        """Interpret the function for a signature from now on."""
        if isinstance(error, (str, Abandoned)):
            reason = str(error)
        else:
            site = calls.site_of_trace(error.__traceback__)
            reason = f"{site.text}: " * bool(site.file) + f"{type(error).__name__}: {error}"
        self._entries[key], self._reasons[key] = None, reason
        _log.debug("jit: why %s isn't compiled", self.__name__, exc_info=error if isinstance(error, Exception) else None)
        if self.strict:
            raise TypeError(f"jit: {self.__name__} can't be compiled: {reason}.") from (
                error if isinstance(error, Exception) else None
            )
        if not self._warned:
            self._warned = True
            _log.warning("jit: %s isn't compiled, and runs as it is: %s.", self.__name__, reason)

    def _as_it_is(self, key: Any, args: tuple, kwargs: dict) -> Any:
        """Run the function for a signature that was given up; all of it, since other ranks wait for its messages."""
        made = self.fun(*args, **kwargs)
        if self.strict:
            raise TypeError(f"jit: {self.__name__} can't be compiled: {self._reasons[key]}.")
        return made

    # ---- as a node

    def _called_on_tape(self, given: Arguments, args: tuple, kwargs: dict) -> Any:
        tape = current.tape
        boxed = [k for k in given.traced if type(given.leaves[k]) in _boxes]
        if not is_simple(tape, [given.leaves[k] for k in boxed]):
            return self.fun(*args, **kwargs)
        if type(tape) is TangentTape:
            return self._called_with_tangents(tape, given, boxed)
        key = ("reverse", tuple(boxed), given.key)
        entry = self._entries.get(key, _UNKNOWN)
        if entry is None:
            return self._as_it_is(key, args, kwargs)
        if entry is _UNKNOWN or not entry.is_current():
            # A loop calls it again before the reverse pass has made the first call's trace a program.
            if key in self._under_way:
                return self.fun(*args, **kwargs)
            return self._traced_on_tape(key, given, boxed, args, kwargs)
        values = [getval(given.leaves[k]) for k in given.traced]
        lease = Lease(entry.replays)
        _count(entry.communications)
        counts = message_counts() if entry.replays.last_look >= 0 else ()
        try:
            made = lease.replay.first(*values, *[None] * sum(_in_program(entry.outputs)))
        except Changed as change:
            with self._changed(key, change, counts):
                return self.fun(*args, **kwargs)
        tape.channels |= entry.channels  # type: ignore[union-attr]
        specs = [spec_like(getval(given.leaves[k])) for k in boxed]

        def pull(gs: list[Any]) -> list[Any]:
            _count(entry.communications)
            try:
                found = lease.replay.rest(*values, *gs)
            except Changed as change:
                with suspended(body=False), self._changed(key, change, counts):
                    again = TraceRun(given).run_backwards(self.fun, boxed, plain=True)
                    found = _backwards(again, entry.outputs, gs, len(boxed))
                    return [_conformed(g, spec) for g, spec in zip(found, specs)]
            return [conform(g, *spec) for g, spec in zip(found, specs, strict=True)]

        out = [_own(x.constant) if x.place is None else made[x.place] for x in entry.outputs]
        nodes = [given.leaves[k]._node for k in boxed]
        return entry.build(placed(tape, out, _in_program(entry.outputs), nodes, pull, entry.communications))

    def _called_with_tangents(self, tape: TangentTape, given: Arguments, boxed: list[int]) -> Any:
        """Call it with tangents carried along: the value and its tangent are a function of their own, compiled."""
        form = given.form, tuple(boxed)
        if form not in self._along:
            self._along[form] = Jitted(_with_tangents(self.fun, given.build, boxed), self.strict)
        leaves = [getval(x) for x in given.leaves]
        with suspended(body=False):
            made = self._along[form](leaves, [given.leaves[k]._node.g for k in boxed])
        (values, build), (along, _) = map(flatten, made)
        return build(with_tangents(tape, values, along))

    def _traced_on_tape(self, key: Any, given: Arguments, boxed: list[int], args: tuple, kwargs: dict) -> Any:
        """Run the function on traced arrays on a tape of its own; the program is complete when that has run backwards."""
        watch = self._watch(key, given, args)
        if watch is None:
            return self.fun(*args, **kwargs)
        tape, trace = current.tape, TraceRun(given)
        try:
            with suspended(body=False), trace.noting():
                run = trace.run_backwards(self.fun, boxed)
        except (Abandoned, Exception) as error:  # noqa: BLE001 (runs once more, and raises there if it is its own)
            return self._run_again(trace, key, error, args, kwargs)
        tape.channels |= run.recording.channels  # type: ignore[union-attr]
        self._under_way[key] = trace
        numbers, outputs = _outputs(run.values)
        specs = [spec_like(getval(given.leaves[k])) for k in boxed]
        done = False

        def pull(gs: list[Any]) -> list[Any]:
            nonlocal done
            with suspended(body=False):
                if done or key in self._entries:  # once more, on arrays that are constants by now
                    with PlayingBack(()):
                        found = _backwards(run, outputs, gs, len(boxed))
                    return [_conformed(g, spec) for g, spec in zip(found, specs)]
                done = True
                self._under_way.pop(key, None)
                try:
                    with trace.noting(True):
                        seeds = [trace.recorder.input(as_value(g)) for g in gs]
                        found = [_conformed(g, spec) for g, spec in zip(_backwards(run, outputs, seeds, len(boxed)), specs)]
                except (Abandoned, Exception) as error:  # noqa: BLE001 (runs once more, and raises there if it is its own)
                    trace.raise_own(error)
                    self._give_up(key, error)
                    with trace.playing_back():
                        again = trace.run_backwards(self.fun, boxed, plain=True)
                        return [_conformed(g, spec) for g, spec in zip(_backwards(again, outputs, gs, len(boxed)), specs)]
            results, gradients = _outputs(found)
            wanted = [*numbers, *_all(results, gradients)]
            try:
                self._entries[key] = _entry(trace.recorder, wanted, len(numbers), outputs, run.build, watch)
            except Exception as error:  # noqa: BLE001
                self._give_up(key, error)
            return [_own(g) for g in found]

        out = [_own(value) for value in run.values]
        nodes = [given.leaves[k]._node for k in boxed]
        return run.build(placed(tape, out, _in_program(outputs), nodes, pull, trace.recorder.communications))


def _entry(
    recorder: Recorder, numbers: Sequence[Any], ahead: int | None, outputs: list[_Output], build: Any, watch: Watch
) -> _Entry:
    program = program_of(recorder, numbers)
    schedule = Fusion(program, ahead).schedule()
    return _Entry(Replays(schedule), outputs, build, watch, recorder.communications, recorder.channels)


def _with_tangents(fun: Function, build: Callable, places: Sequence[int]) -> Function:
    """Return the function from leaves and tangents of some of them to the value of a function and its tangent."""

    def both(leaves: list[Any], tangents: list[Any]) -> tuple[Any, Any]:
        def called(variables: list[Any]) -> Any:
            filled = list(leaves)
            for place, x in zip(places, variables):
                filled[place] = x
            args, kwargs = build(filled)
            return fun(*args, **kwargs)

        variables = Variables([leaves[k] for k in places], list(range(len(places))), list)
        return trace_forwards(called, variables, tangents, both.__name__)

    both.__name__ = getattr(fun, "__name__", "function")
    return both


def _outputs(leaves: Sequence[Any]) -> tuple[list[int], list[_Output]]:
    """Return the numbers of those leaves that are values of the program, and what each leaf is."""
    numbers: list[int] = []
    outputs = []
    for leaf in leaves:
        if isinstance(leaf, Traced):
            outputs.append(_Output(len(numbers), None))
            numbers.append(leaf.number)
        else:
            outputs.append(_Output(None, leaf))
    return numbers, outputs


def _all(numbers: list[int], outputs: list[_Output]) -> list[Any]:
    """Return numbers or constants of all leaves."""
    return [numbers[x.place] if x.place is not None else np.asarray(x.constant) for x in outputs]


def _in_program(outputs: Sequence[_Output]) -> list[bool]:
    return [x.place is not None for x in outputs]


def _own(leaf: Any) -> Any:
    value = leaf.value if isinstance(leaf, Traced) else leaf
    return value.copy() if isinstance(value, np.ndarray) else value


def _conformed(g: Any, spec: Spec) -> Any:
    return spec.zeros() if g is None else conform(g, *spec)


def _backwards(run: Any, outputs: Sequence[_Output], gs: Sequence[Any], variables: int) -> list[Any]:
    places = [place for place, x in zip(run.places, outputs) if x.place is not None]
    seeds = [(place, g) for place, g in zip(places, gs) if place >= 0]
    return run_backward(run.recording, seeds, variables, True)


def _count(number: int) -> None:
    for _ in range(number):
        next(communications)


@functools.cache
def _can_compile() -> bool:
    if find_spec("llvmlite") is not None:
        return True
    _log.info("jit: llvmlite isn't installed, so functions run as they are: pip install mpiad[fast]")
    return False
