"""Programs of the iterations of Krylov methods: each contains a method's vector updates, the operator and the sums.

A method is written as array code of one iteration, ``iteration(system, *state)``. An interpreted solve passes the
`System`, whose calls of the user's functions are checked. A trace passes a `TracedSystem`, and runs the user's functions
once, on traced arrays. The program is the same for all solves with an operator that reads the same objects, at any values
of its params.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from types import FunctionType
from typing import Any, NamedTuple

import autograd.numpy as anp
import numpy as np

from mpiad._typing import Array, Comm, Function, LocalArray, Tree
from mpiad.primitives import mpi_allreduce
from mpiad.programs.function import Jitted
from mpiad.programs.interpretation import message_counts
from mpiad.programs.message_numbers import envelopes_of, numbers_of
from mpiad.programs.program_cache import Entry, optional_program
from mpiad.programs.program_cache import count as count_communications
from mpiad.programs.recorder import Recorder
from mpiad.programs.signature import Arguments, arguments_of
from mpiad.transport import Channel
from mpiad.transport.core import calls
from mpiad.transport.core.channels import Counts, is_watched
from mpiad.transport.core.fault_tolerance import FAULT_TOLERANT
from mpiad.transport.core.tracing import note_channels, tracing

Iteration = Callable[..., tuple]


class TracedSystem:
    """The system in a trace of an iteration."""

    def __init__(self, operator: Operator, params: tuple):
        self.counts = dict(message_counts())
        self._apply, self._precondition = operator.bound(params)
        # A transposed operator is derived from a trace of the operator, which communicates. This has taken place when the
        # system was set up, and isn't repeated in each iteration.
        self.messages = tracing.recorder.drop_communications() if isinstance(tracing.recorder, Recorder) else []
        if any(min(envelope.asked) < 0 for envelope in envelopes_of(self.messages)):
            raise TypeError  # only the message itself tells from which rank it is
        self._shape, self._comm, self.side = operator.shape, operator.comm, operator.side

    def apply(self, u: LocalArray) -> LocalArray:
        """Return the operator's product with rows."""
        return self._called(self._apply, u)

    def precondition(self, r: LocalArray) -> LocalArray:
        """Return the preconditioned rows."""
        return r if self._precondition is None else self._called(self._precondition, r)

    def _called(self, fun: Function, rows: LocalArray) -> LocalArray:
        out = fun(anp.reshape(rows, self._shape))
        if out.shape != self._shape or out.dtype.kind != "f":
            raise TypeError  # an interpreted iteration raises the error
        return anp.reshape(out.astype(rows.dtype), rows.shape)

    def dots(self, *pairs: tuple[LocalArray, LocalArray]) -> Array:
        """Return inner products over all ranks, in double precision, of pairs of rows, shape (pairs, k)."""
        local = anp.stack([anp.sum(x.astype(np.float64) * y, axis=1) for x, y in pairs])
        return mpi_allreduce(local, comm=self._comm)

    def updated(self, update: Jitted, vectors: tuple[LocalArray, ...], numbers: tuple[Array, ...]) -> Sequence[LocalArray]:
        """Return ``update(*vectors, *numbers)`` for rows and one number per row."""
        return update.fun(*vectors, *[anp.reshape(a.astype(vectors[0].dtype), (-1, 1)) for a in numbers])


class _Program(NamedTuple):
    entry: Entry
    # The messages of the operator that aren't repeated, and the message counts before them in the trace.
    messages: list[Any]
    counts: Mapping[Channel, Counts]


class _Known(NamedTuple):
    key: tuple
    read: tuple
    programs: dict[tuple, _Program | None]  # by iteration, shape and dtype; None if the iteration can't be compiled
    runs: count[int]  # counts the interpreted iterations
    is_compiled: bool

    def is_current(self) -> bool:
        compiled = [program.entry for program in self.programs.values() if program is not None]
        return not compiled or compiled[0].is_current()  # all of them read the same objects


_FIRST_RUNS = 200  # iterations with an operator that are interpreted, since compilation takes as long as several hundred
_MOST_KNOWN = 16
_MOST_ALIKE = 4  # operators with the same code and shapes, but other objects, that are compiled; more are interpreted
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

    def program(self, iteration: Iteration, state: tuple) -> Function | None:
        """Return the program of an iteration, a function of the state; None if this time it must be interpreted."""
        known = self._known
        if known is None or not known.is_compiled:
            return None
        key = iteration, state[0].shape, state[0].dtype
        if key not in known.programs:
            if next(known.runs) < _FIRST_RUNS:
                return None
            system: Any = None  # in the last trace

            def traced(params: Tree, *state: LocalArray) -> tuple:
                nonlocal system
                system = TracedSystem(self, params)
                return iteration(system, *state)

            entry = optional_program(traced, arguments_of((self._params, *state), {}), self._read)
            known.programs[key] = None if entry is None else _Program(entry, system.messages, system.counts)
        program = known.programs[key]
        if program is None:
            return None
        entry, numbers = program.entry, numbers_of(program.messages, program.counts, self._counts)
        note_channels(entry.channels)
        params = [self._arguments.leaves[k] for k in self._arguments.traced]
        replays, free = entry.replays, entry.replays.free[not FAULT_TOLERANT]

        def run(*state: LocalArray) -> list[Array]:
            replay = free.pop() if free else replays.take()
            count_communications(entry.communications)
            replay.numbers.known = numbers
            made = replay.first(*params, *state)
            replays.give_back(replay)
            return made

        return run

    @cached_property
    def _arguments(self) -> Arguments:
        return arguments_of(self._params, {}) if self._params else _NO_PARAMS

    @cached_property
    def _known(self) -> _Known | None:
        """The programs of operators like this one; None if the user's calls must be interpreted."""
        if calls.is_noting() or is_watched():  # reports contain the user's calls
            return None
        try:
            key = self._arguments.key, self.shape, self.comm, self.side
        except TypeError:  # a param can't be compared
            return None
        key = *key, *[getattr(fun, "__code__", type(fun)) for fun in self._read]
        same = [known for known in _known if known.key == key]
        found = next((known for known in same if _are_alike(known.read, self._read) and known.is_current()), None)
        if found is None:
            found = _Known(key, self._read, {}, count(), len(same) < _MOST_ALIKE)
        else:
            _known.remove(found)
        _known[:] = [found, *_known[: _MOST_KNOWN - 1]]
        return found


def _are_alike(one: Any, other: Any) -> bool:
    """Return whether two objects are the same, or functions with the same code that read the same objects."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_are_alike, one, other))
    if isinstance(one, FunctionType):
        same = one.__code__ is other.__code__ and one.__globals__ is other.__globals__ and not one.__dict__ | other.__dict__
        return same and _are_alike(_parts(one), _parts(other))
    return isinstance(one, (float, str, bool)) and one == other


def _parts(fun: FunctionType) -> tuple:
    return fun.__defaults__, fun.__kwdefaults__, tuple(cell.cell_contents for cell in fun.__closure__ or ())
