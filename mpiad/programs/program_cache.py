"""`ProgramCache`: the compiled programs of one function, by the signature of the arguments, and the reasons against them.

A signature gets an entry at its first call. It is interpreted if its entry is None. An entry is replaced if an object has
changed that the function reads besides its arguments.

The first call traces the function, and runs the program. If the trace needs something that only a run can tell, the
function is interpreted instead, and traced again with the notes of this run (see `interpretation`).
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array, Function, Tree
from mpiad.compiling.closure import HoldsTraced, Unknown, watch_of
from mpiad.compiling.watch import Watch
from mpiad.differentiation.in_place import CHANGED_ARGUMENT, leaves_of, refuse_changes
from mpiad.programs.device_replay import replays_of
from mpiad.programs.interpretation import Interpretation, Note
from mpiad.programs.number_conditions import admits_of
from mpiad.programs.recorder import Recorder
from mpiad.programs.replay import Changed
from mpiad.programs.signature import Arguments
from mpiad.programs.trace_translation import checked_indices, program_of
from mpiad.programs.traced_array import (
    Abandoned,
    KnownInRun,
    TracedArray,
    added_at,
    cast,
    take,
    with_entries,
)
from mpiad.programs.transforms import Program, recorded
from mpiad.pytrees import flatten
from mpiad.transport.core import calls
from mpiad.transport.core.channels import Channel, Counts, communications
from mpiad.transport.devices.device_arrays import equal_on_device, is_device_array
from mpiad.transport.world import level_of_repeats

Retrace: TypeAlias = Callable[[Watch, Sequence[Note]], object]
MAX_TRACES = 32  # maximum number of traces of one function
_MOST_CHANGES = 4  # of the closure by traces for one signature
UNKNOWN: Any = object()  # placeholder for the entry of a new signature


# Functions for which the shapes of the arguments determine that of the result (for `take`, unless the index is a mask).
_FIXED = frozenset({np.dot, take, added_at, with_entries, cast, checked_indices})


class Entry:
    """A compiled program for one signature; `parts`: the leaves that each part returns, traced values or constants."""

    def __init__(
        self, recorder: Recorder, parts: Sequence[Sequence[Any]], build: Callable[[list[Any]], Tree], watch: Watch,
        kept: Iterable[int] = (),
    ):  # fmt: skip
        self.inside = in_program(parts[0])  # whether each leaf of the result is an output of the program
        outputs = [[x for x, is_in in zip(parts[0], self.inside) if is_in], *parts[1:]]
        kept = [sum(self.inside[:place]) for place in kept if self.inside[place]]  # see `ArrayProgram`
        self.replays = replays_of(program_of(recorder, outputs, kept))
        self.device = recorder.device
        self.constants = [None if is_in else x for x, is_in in zip(parts[0], self.inside)]  # the values of other leaves
        self.build, self.watch = build, watch  # `build` assembles the result from the first part's leaves
        # The number of communications in all parts together: a run of any part advances the counter by this number.
        self.communications = recorder.communications
        # Whether the program communicates, possibly in an untraced function, and the channels of the communications.
        self.communicates, self.channels = recorder.communicates, recorder.channels
        self.admits = admits_of(recorder)
        self.scheduled: dict[Any, Any] = {}  # of a loop whose steps the program runs; see `scheduled_calls`

    def is_current(self) -> bool:
        """Return whether the closure is unchanged, and no exception has left messages in flight on the channels."""
        return not any(channel.fault for channel, _ in self.channels) and self.watch.is_the_same()

    @functools.cached_property
    def may_change(self) -> bool:
        """Whether shapes or dtypes may differ in a run from those in the trace (see `Changed`)."""
        nodes = self.replays.schedule.program.nodes
        calls_of_numpy = [node for node in nodes if node.kind == "call"]
        masked = any(nodes[x].dtype == bool for node in calls_of_numpy if node.data.fun is take for x in node.inputs)
        is_fixed = all(node.data.fun in _FIXED or type(node.data.fun) is np.ufunc for node in calls_of_numpy)
        return self.replays.last_check >= 0 or masked or not is_fixed

    def called(self, values: Sequence[Array]) -> Tree:
        """Run the program, and return the function's result."""
        replay = self.replays.take()
        count(self.communications)
        made = replay.first(*values)
        self.replays.give_back(replay)
        return self.build(made if len(made) == len(self.inside) else self.leaves(made))

    def leaves(self, outputs: Sequence[Array]) -> list[Any]:
        """Return the leaves of the function's result, given the outputs of the program."""
        if len(outputs) == len(self.inside):
            return list(outputs)
        found = iter(outputs)
        return [next(found) if is_in else own(constant) for is_in, constant in zip(self.inside, self.constants)]


# Returns `parts` and `build` of `Entry`.
Traced: TypeAlias = Callable[[Recorder, Watch], "tuple[Sequence[Sequence[Any]], Callable[[list[Any]], Any]]"]


class FailedTrace(Exception):
    """Raised if a function can't be traced or compiled; `watch`: that of the function's closure before the trace."""

    def __init__(self, recorder: Recorder, watch: Watch, error: BaseException):
        self.recorder, self.watch, self.error = recorder, watch, error
        self.is_undone = False  # whether the trace's changes of the closure were undone

    @property
    def needs_run(self) -> bool:
        """Whether the trace has ended at a call whose result only a run can tell."""
        return isinstance(self.error, KnownInRun)

    @property
    def is_raised_by_user(self) -> bool:
        """Whether the exception is the function's own, and not due to traced arrays."""
        has_traced = any(isinstance(getval(part), TracedArray) for part in self.error.args)
        return not has_traced and calls.is_raised_by_user(self.error)


class ChangedClosure(Abandoned):
    """The reason that a function isn't compiled which changes an object from outside, such as a list of its results."""

    def __init__(self, what: str):
        BaseException.__init__(self, f"it changes {what}, which it hasn't created: return the values instead")


@contextmanager
def raising_failures(recorder: Recorder, watch: Watch, after_run: bool = False) -> Iterator[Recorder]:
    """Raise a FailedTrace for exceptions in a trace, or changes of the closure; return the trace's recorder.

    The changes are undone, since the function makes them again when it is interpreted. `after_run`: whether the function
    has run since the watch was made.
    """
    failure, recorder.readable = None, watch.device_arrays
    before = [x.copy() for x in watch.device_arrays]
    if after_run and not watch.is_the_same() and (changed := watch.changed(restore=False)):
        raise FailedTrace(recorder, watch, ChangedClosure(changed))
    try:
        with np.errstate(all="ignore"):  # the numbers in a trace are arbitrary
            yield recorder
    except FailedTrace:
        raise
    except (Abandoned, Exception) as error:  # noqa: BLE001
        failure = FailedTrace(recorder, watch, error)
    changed = "" if watch.is_the_same() else watch.changed(restore=True)
    for x, copy in zip(watch.device_arrays, before):
        if not equal_on_device(x, copy):
            x[...], changed = copy, "an array on a device"
    if changed:
        failure = failure or FailedTrace(recorder, watch, ChangedClosure(changed))
        failure.is_undone = not calls.is_raised_by_handler(failure.error)
    if failure is not None:
        raise failure from None


def entry_of_trace(
    recorder: Recorder, watch: Watch, traced: Traced, kept: Iterable[int] = (), after_run: bool = False
) -> Entry:
    """Compile the trace made by ``traced(recorder, watch)``; raise a FailedTrace if that fails."""
    with raising_failures(recorder, watch, after_run):
        made = traced(recorder, watch)
    try:
        return Entry(recorder, *made, watch, kept)
    except Exception as error:  # noqa: BLE001
        raise FailedTrace(recorder, watch, error) from None


def optional_program(
    fun: Function, arguments: Arguments, objects: Sequence[object], notes: Sequence[Note] | None = None
) -> Entry | None:
    """Return a function's program without running it; None if it can't or needn't be compiled, or changes `objects`.

    Without `notes`, those of a run, raise a FailedTrace if the trace needs them. Only results of communications are checked
    in a run of the program, so that all ranks raise the same errors.
    """
    try:
        watch = watch_of(lambda: None, (), objects)
        recorder = Recorder(notes=notes)
        entry = entry_of_trace(recorder, watch, lambda recorder, _: traced_parts(fun, arguments, recorder))
    except FailedTrace as failure:
        if failure.needs_run and notes is None:
            raise
        return None
    except Exception:  # noqa: BLE001
        return None
    schedule = entry.replays.schedule
    checked = {schedule.nodes[schedule.steps[at].node].data.kind for at in entry.replays.checked}  # type: ignore[union-attr]
    if entry.admits is not None or not checked <= {"communicate", "settle"}:
        return None
    return entry if all(entry.inside) and entry.is_current() else None


def traced_parts(fun: Function, arguments: Arguments, recorder: Recorder) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Trace a function, and return the arguments `parts` and `build` of `Entry`."""
    with recorder:
        args, kwargs = arguments.build(recorder.arguments(arguments))
        given = leaves_of([*args, *kwargs.values()])
        made = fun(*args, **kwargs)
        refuse_changes(given, made)
        leaves, build = flatten(made)
        recorder.check_results(leaves)
    return [leaves], build


def in_program(leaves: Sequence[Any]) -> list[bool]:
    """Return for each leaf whether it is a traced value."""
    return [isinstance(x, TracedArray) for x in leaves]


def own(leaf: Any) -> Any:
    """Return a leaf; for an array, a copy of it."""
    return leaf.copy() if isinstance(leaf, np.ndarray) or is_device_array(leaf) else leaf


def fresh(result: Tree) -> Tree:
    """Return an interpreted function's result with copies of the arrays, which may be arguments, variables, or views."""
    leaves, build = flatten(result)
    return build([x if isinstance(x, TracedArray) else own(x) for x in leaves])


def count(number: int) -> None:
    """Advance the library's counter of communications by `number`."""
    next(islice(communications, number, number), None)


_log = logging.getLogger("mpiad")


class Recorded(NamedTuple):
    """A program for derivatives; `build` assembles the function's result."""

    program: Program
    build: Callable[[list[Any]], Tree]
    watch: Watch
    admits: Callable[[Sequence[Array]], bool] | None  # see `admits_of`
    operations: list[Any]  # the program as a `CompiledOperation`, after its first use

    def is_current(self) -> bool:
        """Return whether the closure is unchanged."""
        return self.watch.is_the_same()


def is_admitted(program: Entry | Recorded, arguments: Arguments) -> bool:
    """Return whether Python computes with the numbers among the arguments of a call as the program does."""
    return program.admits is None or program.admits([getval(arguments.leaves[k]) for k in arguments.traced])


@dataclass
class Attempts:
    """The number of traces of functions that are alike, and whether a warning was logged that one isn't compiled."""

    traces: int = 0
    warned: bool = False
    reason: str = ""  # why the functions aren't traced again, if it isn't only the number of traces


class ProgramCache:
    """The programs of one function; `strict`: whether a TypeError is raised if it can't be compiled; `exact`: see `jit`."""

    def __init__(self, fun: Function, name: str, strict: bool, exact: bool, attempts: Attempts):
        self.fun, self.name, self.strict, self.exact, self.attempts = fun, name, strict, exact, attempts
        self.entries: dict[Any, Entry | None] = {}  # programs by signature; None for signatures that are interpreted
        # For a signature that is interpreted, the watch of what was read before the reason was found; none if it's final.
        self._refusals: dict[Hashable, Watch] = {}
        self.programs: dict[Hashable, Recorded] = {}  # programs for derivatives
        # For signatures whose programs depend on decisions (see `number_conditions`), all programs, the latest first.
        self.variants: dict[Any, list[Any]] = {}
        self.reasons: dict[Any, str] = {}
        self._changes_arguments, self._changes = False, Counter[Hashable]()  # `_changes`: of the closure, by signature
        self.most_operations: int | None = None  # of programs; None for no limit
        self.most_variants, self.instead = MAX_TRACES + 1, fun  # `instead`: what is called if a call isn't compiled
        # Integer arguments on which the function branches, as pairs (structure of the arguments, position of the leaf).
        self.asked: set[Any] = set()
        self.asking = ""  # the line at which the function has branched on one, or used it as an index of a plain array
        self.pending: WeakValueDictionary[Any, Interpretation] = WeakValueDictionary()  # runs before their reverse pass
        self._plain_closure: Watch | None = None  # the watch of calls with tangents; None if the closure had traced values

    def entry(self, key: Hashable, arguments: Arguments, *ways: Traced) -> Entry | FailedTrace | None:
        """Return the program of a signature, compiled at its first call, or the failure of its trace.

        None if the function must be interpreted. Failures, which occur once per signature, are passed to `interpreted`.
        `ways`: functions that trace; the later ones are tried if the earlier ones fail.
        """
        known = None if self.is_refused(key) else self.known(self.entries, key, arguments)
        if known is not UNKNOWN:
            return known
        # If an earlier call waits for its reverse pass, this pass will compile the program.
        watch = None if key in self.pending else self._watch(key, arguments)
        if watch is None:
            return None
        failure: FailedTrace | None = None
        for traced in ways:
            try:
                entry = self.compiled(key, watch, traced)
            except FailedTrace as error:
                failure = error
                if error.is_raised_by_user or error.is_undone:
                    break
            else:
                return entry if is_admitted(entry, arguments) else None
        return failure

    def known(self, programs: dict[Any, Any], key: Hashable, arguments: Arguments) -> Any:
        """Return the program of a call, None if the function must be interpreted, UNKNOWN if it must be traced.

        `programs`: `entries` or `programs`, whose program for the key becomes the one that is returned.
        """
        latest = programs.get(key, UNKNOWN)
        if latest is None or latest is UNKNOWN:
            return latest
        variants = self.variants.get(key, ())
        for program in variants or (latest,):
            if program.is_current() and is_admitted(program, arguments):
                programs[key] = program
                return program
        return UNKNOWN if 0 < len(variants) < self.most_variants or not latest.is_current() else None

    def _store(self, programs: dict[Any, Any], key: Hashable, made: Any) -> Any:
        if made.admits is not None and made.admits.decides:
            self.variants[key] = [made, *[each for each in self.variants.get(key, ()) if each.is_current()]]
        else:
            self.variants.pop(key, None)
        programs[key] = made
        return made

    def compiled(self, key: Hashable, watch: Watch, traced: Traced, notes: Sequence[Note] | None = None) -> Entry:
        """Trace and compile a program, and store it; `notes`: those of a run."""
        recorder = Recorder(self.exact, notes, self.most_operations)
        entry = entry_of_trace(recorder, watch, traced, after_run=notes is not None)
        return self._store(self.entries, key, entry)

    def program(
        self,
        arguments: Arguments,
        variables: Sequence[int],
        watch: Watch | None = None,
        notes: Sequence[Note] | None = None,
    ) -> Recorded | None:
        """Return the function's program, recorded once for each signature and choice of `variables`.

        `variables` are positions of leaves; `watch`: that of this call, if there is one; `notes`: those of a run. Return
        None if the closure can't be watched; raise a FailedTrace if the trace fails.
        """
        key = "program", tuple(sorted(set(variables))), arguments.key
        known = self.known(self.programs, key, arguments)
        if known is not UNKNOWN:
            return known
        watch = watch or self._watch(key, arguments, optional=True)
        if watch is None:
            return None
        recorder = Recorder(self.exact, notes, self.most_operations)
        with raising_failures(recorder, watch, after_run=notes is not None):
            made = Recorded(*recorded(self.fun, arguments, variables, recorder), watch, admits_of(recorder), [])
        return self._store(self.programs, key, made)

    @property
    def is_exhausted(self) -> bool:
        """Whether the function isn't traced again."""
        return self.attempts.traces >= MAX_TRACES

    @property
    def is_used_up(self) -> bool:
        """Whether the function isn't traced again, but was compiled for all calls: others that are alike may be."""
        return self.is_exhausted and None not in self.entries.values()

    def is_refused(self, key: Hashable) -> bool:
        """Return whether calls with a signature are interpreted, and forget this if an object has changed that was read."""
        if self.entries.get(key, UNKNOWN) is not None:
            return False
        watch = self._refusals.get(key)
        if watch is None or self.is_exhausted or watch.is_the_same():
            return True
        for known in (self.entries, self.reasons, self._refusals):
            known.pop(key, None)
        return False

    def _watch(self, key: Hashable, arguments: Arguments, optional: bool = False) -> Watch | None:
        if not self.is_exhausted:
            watch = self._read(key, arguments, arguments.constants(), optional)
            self.attempts.traces += watch is not None
            return watch
        repeated = f"it was traced {MAX_TRACES} times: shapes, integers or variables of its closure change"
        reason = self.attempts.reason or repeated
        if self.asking and reason is repeated:
            reason += f". {self.asking} branches on an integer, or indexes by it an array that should be an argument"
        self.give_up(None, reason, optional)  # for all signatures, whose number may grow with each call
        return None

    def _read(
        self, key: Hashable, arguments: Arguments, objects: Sequence[Any] = (), optional: bool = False
    ) -> Watch | None:
        try:
            return watch_of(self.fun, arguments.args, objects)
        except HoldsTraced:  # other calls may be compiled
            return None
        except Unknown as error:
            self.attempts.traces += 1
            reason = f"the objects that it reads besides its arguments can't be followed: {error}"
            self.give_up(key, reason, optional, error.watch)
            return None

    def asks(self, arguments: Arguments, failure: FailedTrace) -> bool:
        """Return whether a trace has failed since the function branches on an integer argument: then it is a constant."""
        recorder = failure.recorder
        integers = [k for k in arguments.traced if isinstance(arguments.leaves[k], (int, np.integer))]
        if recorder.asked is None or not integers:
            return False
        # If the integer isn't an argument, it may depend on any integer argument.
        asked = [k for k, number in zip(arguments.traced, recorder.inputs) if number == recorder.asked]
        self.asked.update((arguments.form, k) for k in asked or integers)
        self.asking = str(failure.error).partition(": ")[0]
        return True

    def changed(self, key: Hashable, change: Changed, counts: Sequence[tuple[Channel, Counts]] | None) -> Interpretation:
        """Return a context in which the function is interpreted after a run of its program has raised `Changed`."""
        if change.log is None:
            raise change
        # Shapes or dtypes of messages differ from those in the trace, so the next call is traced again.
        for known in (self.entries, self.programs):
            known.pop(key, None)
        return Interpretation(change.log, counts)

    def give_up(
        self, key: Hashable, error: BaseException | str, optional: bool = False, watch: Watch | None = None
    ) -> None:
        """Interpret later calls with a signature, without a warning or an error if the program is `optional`.

        `watch`: that of the objects on which the reason depends; None if it holds for all calls.
        """
        self.entries[key] = None
        if watch is not None:
            self._refusals[key] = watch.without_arrays()
        if optional:
            return
        if isinstance(error, (str, Abandoned)):
            reason = str(error)
        else:
            site = calls.site_of_trace(error.__traceback__)
            reason = f"{site.text}: " * bool(site.file) + f"{type(error).__name__}: {error}"
        reason = reason.removesuffix(".")  # that of an exception's text; a sentence with the reason ends with its own
        cause = error if isinstance(error, Exception) else None
        self.reasons[key] = reason
        _log.debug("jit: why %s isn't compiled", self.name, exc_info=cause)
        if self.strict:
            raise TypeError(f"jit: {self.name} can't be compiled: {reason}.") from cause
        self.warn("%s isn't compiled, and falls back to interpreted execution: %s.", reason)

    def warn(self, text: str, reason: str) -> None:
        """Log a warning, the first time only."""
        if not self.attempts.warned:
            self.attempts.warned = True
            _log.log(level_of_repeats(), f"jit: {text}", self.name, reason)

    def run(self, arguments: Arguments) -> Tree:
        """Call the function itself, and return new arrays, unless it changes its arguments, which may be its results."""
        made = self.instead(*arguments.args, **arguments.kwargs)
        return made if self._changes_arguments else fresh(made)

    def interpreted(
        self, key: Hashable, arguments: Arguments, failure: FailedTrace | None = None, retrace: Retrace | None = None,
        optional: bool = False,
    ) -> Tree:  # fmt: skip
        """Interpret the function; with `strict`, raise an error after the call, since other ranks wait for its messages.

        `failure`: that of the trace in this call. If the trace needs a run, ``retrace(watch, notes)`` traces again.
        """
        if failure is None:
            made = self.run(arguments)
            if self.strict and key in self.reasons:
                raise TypeError(f"jit: {self.name} can't be compiled: {self.reasons[key]}.")
            return made
        if failure.is_raised_by_user and not failure.recorder.communicates and not failure.is_undone:
            raise failure.error
        self._changes_arguments |= CHANGED_ARGUMENT in str(failure.error)
        interpretation = Interpretation()
        with interpretation if failure.needs_run else nullcontext():
            made = self.run(arguments)
        if not failure.needs_run or retrace is None:
            self.fail(key, arguments, failure, optional)
        else:
            self.traced_again(key, arguments, partial(retrace, failure.watch, interpretation.notes), optional)
        return made

    def traced_again(
        self, key: Hashable, arguments: Arguments, trace: Callable[[], object], optional: bool = False
    ) -> None:
        """Trace the function after a run."""
        try:
            trace()
        except FailedTrace as error:
            failure = error
        else:
            return
        self.fail(key, arguments, failure, optional)

    def fail(self, key: Hashable, arguments: Arguments, failure: FailedTrace, optional: bool = False) -> None:
        """Handle the failure of a trace after the function has run: later calls are interpreted, or traced otherwise."""
        if failure.is_raised_by_user:
            if failure.is_undone:  # the function, or its adjoint, raises again
                return
            raise failure.error
        if not self.asks(arguments, failure):
            self.refuse(key, failure, optional)

    def refuse(self, key: Hashable, failure: FailedTrace, optional: bool = False) -> None:
        """Interpret later calls with a signature, but not after the first changes of its closure: they may fill a cache."""
        if not isinstance(failure.error, ChangedClosure):
            self.give_up(key, failure.error, optional, failure.watch)
            return
        self.attempts.reason = str(failure.error)
        self._changes[key] += 1
        if self._changes[key] >= _MOST_CHANGES:
            self.give_up(key, failure.error, optional)

    def is_followed(self, key: Hashable, arguments: Arguments) -> bool:
        """Return whether changes of the closure can be detected, and it contains no traced values of a derivative."""
        if self._plain_closure is None or not self._plain_closure.is_the_same():
            self._plain_closure = self._read(key, arguments)
        return self._plain_closure is not None
