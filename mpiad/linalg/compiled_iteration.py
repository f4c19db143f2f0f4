"""Programs of the iterations of Krylov methods: each contains a method's vector updates, the operator and the sums.

A method is written as array code of one iteration, ``iteration(system, *state)``. An interpreted solve passes the
`System`, whose calls of the user's functions are checked. A trace passes a `TracedSystem`, and runs the user's functions
once, on traced arrays. The program is the same for all solves with an operator that reads the same objects, at any values
of its params.

If only a run can tell the shape of a message, as for a gather, an iteration is interpreted and traced with its notes. The
program checks the shapes; if one differs, since other ranks have other numbers of rows, the iteration is interpreted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import FunctionType, MethodType
from typing import Any, NamedTuple, cast

import autograd.numpy as anp
import numpy as np

from mpiad._typing import Array, Comm, Function, LocalArray, Tree
from mpiad.linalg.vectors import on_device_of, on_host
from mpiad.primitives import mpi_allreduce
from mpiad.programs.device_replay import DeviceCycle, DeviceReplays
from mpiad.programs.function import Jitted
from mpiad.programs.interpretation import Interpretation, Note, message_counts
from mpiad.programs.message_numbers import Numbers, envelopes_of, numbers_of
from mpiad.programs.program_cache import Entry, FailedTrace, count, optional_program
from mpiad.programs.recorder import Recorder
from mpiad.programs.replay import Changed
from mpiad.programs.signature import Arguments, arguments_of
from mpiad.transport import Channel, channel
from mpiad.transport.core import calls
from mpiad.transport.core.channels import Counts, is_watched
from mpiad.transport.core.fault_tolerance import FAULT_TOLERANT
from mpiad.transport.core.tracing import note_channels, tracing
from mpiad.transport.devices.device_arrays import ArrayModule, arrays_of

Iteration = Callable[..., tuple]


class TracedSystem:
    """The system in a trace of an iteration."""

    def __init__(self, operator: Operator, params: tuple, is_alone: bool):
        self.counts = dict(message_counts())
        self._apply, self._precondition = operator.bound(params)
        # A transposed operator is derived from a trace of the operator, which communicates. This has taken place when the
        # system was set up, and isn't repeated in each iteration.
        self.messages = tracing.recorder.drop_communications() if isinstance(tracing.recorder, Recorder) else []
        if any(min(envelope.asked) < 0 for envelope in envelopes_of(self.messages)):
            raise TypeError  # only the message itself tells from which rank it is
        self._shape, self._comm, self.side = operator.shape, operator.comm, operator.side
        self._is_alone = is_alone  # whether it is a device's program on one rank, which has no communication for sums

    def apply(self, u: LocalArray) -> LocalArray:
        """Return the operator's product with rows."""
        return self._called(self._apply, u)

    def precondition(self, r: LocalArray) -> LocalArray:
        """Return the preconditioned rows."""
        return r if self._precondition is None else self._called(self._precondition, r)

    def _called(self, fun: Function, rows: LocalArray) -> LocalArray:
        out = fun(anp.reshape(rows, self._shape))
        if out.shape != self._shape or out.dtype.kind not in ("f", rows.dtype.kind):
            raise TypeError  # an interpreted iteration raises the error
        return anp.reshape(out.astype(rows.dtype), rows.shape)

    def dots(self, *pairs: tuple[LocalArray, LocalArray]) -> Array:
        """Return inner products x* y over all ranks, in double precision, of pairs (x, y) of rows, shape (pairs, k)."""
        # For one system, in the shape of the operator's results, so that the loop that computes these adds the sums.
        shape = (1, *self._shape) if len(pairs[0][0]) == 1 else pairs[0][0].shape
        axes, blocks = tuple(range(1, len(shape))), [[anp.reshape(x, shape) for x in pair] for pair in pairs]
        wide = np.result_type(pairs[0][0].dtype, float)
        conjugates = [anp.conj(x) if wide.kind == "c" else x for x, _ in blocks]
        local = anp.stack([anp.sum(x.astype(wide) * y, axis=axes) for x, (_, y) in zip(conjugates, blocks)])
        return local if self._is_alone else mpi_allreduce(local, comm=self._comm)

    def updated(self, update: Jitted, vectors: tuple[LocalArray, ...], numbers: tuple[Array, ...]) -> Sequence[LocalArray]:
        """Return ``update(*vectors, *numbers)`` for rows and one number per row."""
        return update.fun(*vectors, *[anp.reshape(a.astype(vectors[0].dtype), (-1, 1)) for a in numbers])


# On a device, iterations run ahead of the host, which looks at their numbers from time to time. A flag becomes zero in the
# last iteration. Later ones change nothing, so the result doesn't depend on when the host looks.

RECORDED = 32  # maximum number of iterations between two looks
# Length of the last result of an iteration: the numbers of invalid systems, of those to go on with, and another one.
COUNTS = 3


@cache
def ahead(iteration: Iteration, count: int) -> Iteration:
    """Return an iteration that runs ahead, with `count` arrays of state besides the flag and the record.

    The record contains the numbers, sums and counts of the last iterations. The array of the flag also contains ones and
    zeros: the next iteration is recorded in the row of the one. Constants are the last arguments.
    """

    def masked(system: TracedSystem, *given: LocalArray) -> tuple[LocalArray, ...]:
        before, (flag, record), constants = given[:count], given[count : count + 2], given[count + 2 :]
        *after, sums, counts = iteration(system, *before, *constants)
        goes_on, rows = (flag[0] > 0.0) & (counts[0] == 0.0), flag[1:]
        recorded = anp.concatenate([anp.ravel(x) for x in (after[-1], sums, counts)])
        record = anp.where(rows[:, None] > 0.0, recorded, record)
        flag = anp.concatenate([1.0 * (goes_on & (counts[1:2] > 0.0)), anp.roll(rows, 1)])
        return *[anp.where(goes_on, x, y) for x, y in zip(after, before)], flag, record

    return masked


class _Program(NamedTuple):
    entry: Entry
    # The messages of the operator that aren't repeated, the message counts before them in the trace, and their notes.
    messages: list[Any]
    counts: Mapping[Channel, Counts]
    notes: list[Note]


@dataclass(eq=False)
class _Known:
    """The objects that an operator reads, and its programs; `compiled`: similar operators whose programs ran rarely."""

    key: tuple
    read: tuple
    compiled: list[_Known]
    # By iteration, shape and dtype; None if the iteration can't be compiled.
    programs: dict[tuple, _Program | None] = field(default_factory=dict)
    runs: int = 0  # the number of iterations, except those that can't be compiled
    needs_notes: bool = False  # whether only a run can tell some shapes; see `mpiad.programs.interpretation`

    def is_current(self) -> bool:
        compiled = [program.entry for program in self.programs.values() if program is not None]
        return not compiled or compiled[0].is_current()  # all of them read the same objects

    def is_due(self, runs: int) -> bool:
        """Return whether to compile an iteration: after some runs, unless similar operators were compiled in vain."""
        self.compiled[:] = [known for known in self.compiled if known.runs < _RUNS_TO_PAY]
        return runs > _FIRST_RUNS and (any(self.programs.values()) or len(self.compiled) < _MOST_UNPAID)


_FIRST_RUNS = 200  # iterations with an operator that are interpreted, since compilation takes as long as several hundred
_MOST_KNOWN = 16
# Of operators with the same code and shapes, but other objects, few are compiled before one of them has run so often that
# its compilation has saved time: each solve may have a new one.
_MOST_UNPAID, _RUNS_TO_PAY = 4, 800
_known: list[_Known] = []  # the latest first
_NO_PARAMS = arguments_of((), {})


@dataclass(eq=False)
class Operator:
    """The functions of one solve, `bound` to params, determined by the objects `_read`; with their compiled iterations."""

    _read: tuple
    _params: tuple
    bound: Callable[[tuple], tuple[Function, Function | None]]
    shape: tuple[int, ...]
    comm: Comm
    side: str | None
    _counts: Mapping[Channel, Counts]  # the message counts before the functions of this solve were made
    transposed: bool  # whether they are derived from those of the user, whose messages take place when they are made
    _is_noted: bool = False  # whether `_notes` are those of these messages
    _notes: list[Note] = field(default_factory=list)
    _before: Any = None  # the message counts before the last run of a program that may raise `Changed`

    def noting(self) -> AbstractContextManager:
        """Return the context in which the functions of this solve are made."""
        if not self.transposed or self._known is None or not self._known.needs_notes:
            return nullcontext()
        made = Interpretation()
        self._is_noted, self._notes = True, made.notes
        return made

    def program(self, iteration: Iteration, state: tuple) -> Function | None:
        """Return the program of an iteration, a function of the state; None if this time it must be interpreted."""
        known = self._known
        if known is None:
            return None
        key = _key(iteration, state)
        known.runs += key not in known.programs
        program = self._compiled(known, key, state, known.runs)
        if program is None:
            return None
        entry, numbers = program.entry, numbers_of(program.messages, program.counts, self._counts)
        note_channels(entry.channels)
        params = self._leaves()
        replays, free, is_checked = entry.replays, entry.replays.free[not FAULT_TOLERANT], bool(entry.replays.checked)

        def run(*state: LocalArray) -> list[Array]:
            if is_checked:
                self._before = message_counts()
            given = _on_device(entry.device, state)
            replay = free.pop() if free else replays.take()
            count(entry.communications)
            known.runs += 1
            replay.numbers.known = numbers
            made = replay.first(*params, *given)
            replays.give_back(replay)
            return made if entry.device is None else [x if x.shape == state[0].shape else on_host(x) for x in made]

        return run

    def cycle(self, iteration: Iteration, state: tuple, constants: tuple) -> Cycle | None:
        """Return repeated runs of an iteration on a device, from a state; None if this time it has no program."""
        known = self._known
        if known is None:
            return None
        given = *state, *constants
        program = self._compiled(known, _key(iteration, given), given, known.runs + 1)
        if program is None or program.entry.replays.checked:  # one that raises `Changed` might leave other ranks alone
            return None
        note_channels(program.entry.channels)
        arrays, replays = _on_device(program.entry.device, given), program.entry.replays
        runs = DeviceCycle(cast(DeviceReplays, replays), self._leaves(), arrays[: len(state)], arrays[len(state) :])
        return Cycle(known, program.entry, runs, numbers_of(program.messages, program.counts, self._counts))

    def _compiled(self, known: _Known, key: tuple, state: tuple, runs: int) -> _Program | None:
        if key not in known.programs and not known.needs_notes and known.is_due(runs):
            self._trace(known, key, state)
        program = known.programs.get(key)
        return None if program is None or program.notes != self._notes else program

    def _leaves(self) -> list[Array]:
        return [self._arguments.leaves[k] for k in self._arguments.traced]

    def _trace(self, known: _Known, key: tuple, state: tuple, notes: Sequence[Note] | None = None) -> None:
        """Compile an iteration; `notes`: those of its interpretation, without which the trace may turn out to need them."""
        system: Any = None  # in the last trace
        is_alone = arrays_of(state[0]) is not None and channel(self.comm, "linalg.solve").size == 1

        def traced(params: Tree, *state: LocalArray) -> tuple:
            nonlocal system
            system = TracedSystem(self, params, is_alone)
            return key[0](system, *state)

        notes = None if notes is None else [*self._notes, *notes]
        try:
            given = _on_device(arrays_of(state[0]), state)
            entry = optional_program(traced, arguments_of((self._params, *given), {}), self._read, notes)
        except FailedTrace:  # without notes
            known.needs_notes = True
            return
        known.needs_notes &= entry is not None  # notes cost time
        known.programs[key] = None if entry is None else _Program(entry, system.messages, system.counts, self._notes)
        if entry is not None and known not in known.compiled:
            known.compiled.append(known)

    def interpreted(self, iteration: Iteration, system: Any, state: tuple) -> tuple:
        """Return ``iteration(system, *state)``; if its trace needs notes, compile it with those of this run."""
        known, key = self._known, _key(iteration, state)
        is_unknown = self.transposed and not self._is_noted
        if known is None or not known.needs_notes or key in known.programs or is_unknown:
            return iteration(system, *state)
        noted = Interpretation()
        with noted:
            made = iteration(system, *state)
        self._trace(known, key, state, noted.notes)
        return made

    def continued(self, iteration: Iteration, system: Any, state: tuple, change: Changed) -> tuple:
        """Interpret an iteration whose program has raised `Changed`, and such iterations from now on."""
        if change.log is None or self._known is None:
            raise change
        self._known.programs[_key(iteration, state)] = None
        with Interpretation(change.log, self._before):
            return iteration(system, *state)

    @cached_property
    def _arguments(self) -> Arguments:
        return arguments_of(self._params, {}) if self._params else _NO_PARAMS

    @cached_property
    def _known(self) -> _Known | None:
        """The programs of operators like this one; None if the user's calls must be interpreted."""
        if calls.is_noting() or is_watched():  # reports contain the user's calls
            return None
        try:
            key = self._arguments.key, self.shape, self.comm, self.side, self.transposed
        except TypeError:  # a param can't be compared
            return None
        # Jitted functions have the code of the user's function.
        key = *key, *[getattr(getattr(fun, "fun", fun), "__code__", type(fun)) for fun in self._read]
        same = [known for known in _known if known.key == key]
        found = next((known for known in same if _are_alike(known.read, self._read) and known.is_current()), None)
        if found is None:
            found = _Known(key, self._read, same[0].compiled if same else [])
        else:
            _known.remove(found)
        _known[:] = [found, *_known[: _MOST_KNOWN - 1]]
        return found


@dataclass(eq=False)
class Cycle:
    """Runs of an iteration on a device, whose results are the state of the next one; nothing is copied to the host."""

    _known: _Known
    _entry: Entry
    _runs: DeviceCycle
    _numbers: Numbers

    @property
    def state(self) -> list[LocalArray]:
        """The arrays of the state on the device, which the next but one run overwrites."""
        return self._runs.state

    def run(self) -> None:
        """Replace the state by the results of an iteration."""
        count(self._entry.communications)
        self._known.runs += 1
        self._runs.run(self._numbers)

    def close(self) -> None:
        """End the runs."""
        self._runs.close()


def _key(iteration: Iteration, state: tuple) -> tuple:
    return iteration, state[0].shape, state[0].dtype, arrays_of(state[0])


def _on_device(arrays: ArrayModule | None, state: tuple) -> Sequence[Array]:
    """Return the state of an iteration with numbers on the device of the rows; they are on the host between iterations."""
    return state if arrays is None else [on_device_of(state[0], x) if type(x) is np.ndarray else x for x in state]


def _are_alike(one: Any, other: Any) -> bool:
    """Return whether two objects are the same, or functions with the same code that read the same objects."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_are_alike, one, other))
    if isinstance(one, MethodType):
        return one.__self__ is other.__self__ and one.__func__ is other.__func__
    if isinstance(one, FunctionType):
        same = one.__code__ is other.__code__ and one.__globals__ is other.__globals__ and not one.__dict__ | other.__dict__
        return same and _are_alike(_parts(one), _parts(other))
    return isinstance(one, (int, float, str, bool)) and one == other


def _parts(fun: FunctionType) -> tuple:
    return fun.__defaults__, fun.__kwdefaults__, tuple(cell.cell_contents for cell in fun.__closure__ or ())
