"""Repeated calls of compiled functions in the order of a checkpoint schedule, forwards and backwards, run by commands.

A small step takes less time than Python takes to call it, and after a large step Python's objects aren't in the caches any
more. So all calls between two calls of Python, and the sums of cotangents, are one list of commands (see
`mpiad.compiling.commands`), which is made once for a loop, and runs in each gradient. States aren't copied: before each
call, commands store the addresses at which it reads and writes them. A stored state is memory that no call overwrites.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from itertools import count as counter
from pathlib import Path
from types import CodeType
from typing import Any, TypeAlias

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.arguments import address_of
from mpiad.compiling.commands import Commands
from mpiad.programs.fusion import Run, root_of
from mpiad.programs.memory_plan import SMALL
from mpiad.programs.number_conditions import admits_all
from mpiad.programs.program_cache import Entry, count
from mpiad.programs.repeated_calls import RepeatedProgram
from mpiad.transport import Channel, Envelope
from mpiad.transport.core import calls
from mpiad.transport.core.channels import Used, is_watched
from mpiad.transport.core.fault_tolerance import FAULT_TOLERANT
from mpiad.transport.core.tracing import note_channels

# The maximum number of bytes that a loop keeps between gradients, in stored states and arguments. The Python code between
# the calls takes little of the time of larger steps.
_MOST = 1 << 26
_MOST_COMMANDS = 1 << 16  # which are made in some tenths of a second
# Commands return to Python after about so many seconds, so that interrupts arrive.
_UNINTERRUPTED = 1e-3
_FIRST = 2  # the number of gradients before the commands are made, which takes as long as some gradients
# The number of schedules of a loop that are known, and the bytes of those with commands. A schedule that no gradient has
# used for some time gives way to others.
_KNOWN, _BYTES, _LONG = 64, 2 * _MOST, 256
# Of a large array of a state, one of so many parts is compared after each recorded segment, with at least so many entries.
_PARTS, _ENTRIES = 16, 1 << 12
_requests = counter()
_ZERO, _NO_LIMIT = np.zeros(1, np.int64), 1 << 62
# Returns the program for some steps from a first one, None if it isn't known: ``find(first, steps, with_reverse_pass)``.
Find: TypeAlias = Callable[[int, int, bool], "RepeatedProgram | None"]
# A step, the values of all leaves, those of the forward run, and whether they are observed.
Compared: TypeAlias = tuple[int, Sequence[Array], Sequence[Array], bool]


class Pool:
    """The calls for one schedule of one loop that no gradient uses at present."""

    def __init__(self) -> None:
        self.free: list[ScheduledCalls] = []
        self.runs = self.bytes = 0  # the number of gradients, and the memory of all calls
        self.last = 0  # when a gradient last asked for calls, in the number of requests
        self.is_unsuitable = False


class ScheduledCalls:
    """The calls of a loop of some steps, of which one gradient at a time makes use.

    `lengths`: the numbers of steps of the programs, the largest first; where steps branch on their numbers, calls of the
    same number of steps run several programs. The methods for the actions of a schedule append commands.
    """

    def __init__(self, find: Find, lengths: Sequence[int], some: RepeatedProgram, steps: int, pool: Pool):
        self._lengths, self.pool, self.bytes = lengths, pool, 0
        self.find: Find | None = find  # only while commands are appended: it refers to the arguments
        self._commands, self._counts, self._later_counts = Commands(), MessageCounts(), MessageCounts()
        # By program, and by place in a reversed block; -1: forward.
        self._replays: dict[tuple[RepeatedProgram, int], FixedReplay] = {}
        self._calls: dict[int, FixedReplay] = {}  # by command
        self._compared: dict[int, Compared] = {}  # by command
        self._arrays: list[Array] = []
        # States, as lists of arrays: unused ones, the stored ones by step, those that recorded steps read, the last one.
        self._free: list[list[Array]] = []
        self._stored: dict[int, list[Array]] = {}
        self._read: list[list[Array]] = []
        self._last: list[Array] | None = None
        self._middle = 0  # the first command of the reverse pass
        self._reversed = 0  # the number of reversed segments
        self._ends: list[int] = []  # the numbers of commands after each call of a program
        self._together = 1  # the number of calls between two calls of Python
        self._communications = {False: 0, True: 0}  # those of the reverse pass at True
        # Arguments with an entry per step, in the current gradient, and their addresses, by place.
        self._entries: dict[int, Array] = {}
        self._addresses = {k: np.zeros(1, np.int64) for k in some.layout.entries}
        self._shared: dict[int, Array] = {}  # arguments that all calls read, by place
        self._starts: dict[Any, set[int]] = {}  # the first steps of the calls of programs with a test, by the test
        self._entries_of_programs = set[Entry]()
        self.channels, self.communicates, self._scratch = set[Used](), False, np.zeros(0, np.uint8)
        self._program, self.traced = some, some.traced  # see `RepeatedProgram`
        schedule = some.entry.replays.schedule
        results = [[schedule.buffers[b] for b in part] for part in schedule.outputs_of_parts()]
        first, later = [[np.broadcast_to(np.zeros((), x.dtype), x.shape) for x in part] for part in results]
        self._like = first[: some.states]
        # The first state and its successors; the cotangents of the state after some steps, and memory for those before.
        self._first, self._seeds, self._seeds_before = [self._new(self._like) for _ in range(3)]
        self._state, self._last_seeds = self._first, self._seeds
        self._results = self._first  # the last state of the forward run
        self._samples = self._new([x.reshape(-1)[: _length_of_part(x)] for x in self._like])
        observed = [np.broadcast_to(x[:1], (steps, *x.shape[1:])) for x in first[some.states :]]
        self._observed, self._observed_seeds = self._new(observed), self._new(observed)
        others = zip(later[: some.place] + later[some.place + some.states :], some.is_entry)
        self._sums = self._new([np.broadcast_to(x[:1], (steps, *x.shape[1:])) if entry else x for x, entry in others])

    def _new(self, like: Sequence[Any]) -> list[Array]:
        """Return new arrays, which stay alive as long as the commands that contain their addresses."""
        self._count(like)
        made = [np.zeros(x.shape, x.dtype) for x in like]
        self._arrays += made
        return made

    def _count(self, arrays: Iterable[Any]) -> None:
        self.bytes += sum(x.nbytes for x in arrays)
        if self.bytes > _MOST:
            raise Unsuitable

    def _replay(self, program: RepeatedProgram, place: int) -> FixedReplay:
        """Return the replay for a forward call (-1) of a program, or for a call at a place in a reversed block."""
        key, entry = (program, place), program.entry
        if key not in self._replays:
            self._entries_of_programs.add(entry)
            self.channels |= entry.channels
            self.communicates |= entry.communicates
            if entry.replays.scratch.size > self._scratch.size:
                self._scratch = self._new([np.broadcast_to(np.uint8(0), entry.replays.scratch.size)])[0]
            made = FixedReplay(program, self._shared, self._scratch)
            self._shared |= {k: x for k, x in made.arguments.items() if k in made.shared}
            self._count([*made.arguments.values(), *made.arrays])
            self._replays[key] = made
        return self._replays[key]

    def is_current(self) -> bool:
        """Return whether the closures of those programs are unchanged that don't begin with the first step."""
        return all(entry.is_current() for entry in self._entries_of_programs)

    def keep(self, number: int) -> None:
        """Store the state before a step."""
        self._stored[number] = self._state

    def restore(self, number: int, last: bool) -> None:
        """Restore the state before a step; `last`: whether it isn't needed any more."""
        self._continue_from(self._stored.pop(number) if last else self._stored[number])

    def _continue_from(self, state: list[Array]) -> None:
        """Make a state the current one; calls may overwrite the one before unless it is needed again."""
        before, self._state = self._state, state
        self._release(before)

    def _release(self, state: list[Array]) -> None:
        needed = [self._state, self._last, *self._read, *self._stored.values(), *self._free]
        if all(state is not other for other in needed):
            self._free.append(state)

    def advance(self, first: int, stop: int) -> None:
        """Run the steps first, ..., stop - 1."""
        for start, program in self._blocks(first, stop, is_recorded=False):
            self._append_run(self._replay(program, -1), program, start, observes=not self._middle)

    def reverse(self, first: int, stop: int) -> None:
        """Run and record the steps first, ..., stop - 1, and run their adjoints.

        The last steps of the loop run twice, too: the forward run ends before they are recorded. All ways of running a loop
        make the same communications in the same order, since other ranks may not have commands.
        """
        expected = self._samples
        if not self._middle:
            self.keep(first)
            self.advance(first, stop)
            self._last = self._results = expected = self._state
            self._middle = len(self._commands)
            self.restore(first, last=True)
        blocks, before = [], self._state
        for place, (start, program) in enumerate(self._blocks(first, stop, is_recorded=True)):
            replay = self._replay(program, place)
            blocks.append((replay, program, start))
            self._read.append(self._state)
            self._append_run(replay, program, start, observes=True)
        values = self._state
        if expected is self._samples:
            values = self._parts(self._state)
            expected = [y[: x.size] for x, y in zip(values, expected)]
        self._compare(stop - 1, False, values, expected)
        last, self._last, self._reversed = self._last, None, self._reversed + 1
        if last is not None:
            self._release(last)
        parts = self._parts(before)
        self._copy([y[: x.size] for x, y in zip(parts, self._samples)], parts)
        for replay, program, start in reversed(blocks):
            self._append_adjoint(replay, program, start)
        read, self._read = self._read, []
        for state in read:
            self._release(state)

    def _parts(self, state: list[Array]) -> list[Array]:
        """Return the part of each array that is compared next: another one after each segment."""
        parts = []
        for x in state:
            n = _length_of_part(x)
            start = self._reversed % max(-(-x.size // n), 1) * n
            parts.append(x.reshape(-1)[start : start + n])
        return parts

    def _blocks(self, first: int, stop: int, is_recorded: bool) -> Iterator[tuple[int, RepeatedProgram]]:
        """Yield the first step and the program of each call."""
        kinds = (True,) if is_recorded else (False, True)
        find: Any = self.find
        while first < stop:
            choices = [(steps, kind) for steps in self._lengths if steps <= stop - first for kind in kinds]
            program = next(filter(None, (find(first, steps, kind) for steps, kind in choices)), None)
            if program is None:
                raise Unsuitable
            yield first, program
            first += program.steps

    def _copy(self, out: Sequence[Array], given: Sequence[Array]) -> None:
        for x, y in zip(out, given):
            if (x.shape, x.dtype) != (y.shape, y.dtype):  # of programs for other numbers
                raise Unsuitable
            self._commands.copy(x, y)

    def _append_run(self, replay: FixedReplay, program: RepeatedProgram, start: int, observes: bool) -> None:
        commands, layout = self._commands, program.layout
        made = self._free.pop() if self._free else self._new(self._like)
        for k, x in zip(layout.state, self._state):
            replay.read(commands, k, x)
        for k in layout.entries:
            replay.read_entries(commands, k, self._addresses[k], start)
        copies = replay.write(commands, 0, range(program.states), made)
        self._append_call(replay, program, 0, start)
        self._copy(*copies)
        if observes:
            self._observe(replay.results[0][program.states :], start)
        self._continue_from(made)

    def _append_call(self, replay: FixedReplay, program: RepeatedProgram, part: int, start: int) -> None:
        before, is_later = len(self._commands), self._middle > 0
        replay.append_call(self._commands, self._later_counts if is_later else self._counts, part, start)
        self._calls |= dict.fromkeys(range(before, len(self._commands)), replay)
        if program.entry.admits is not None:
            self._starts.setdefault(program.entry.admits, set()).add(start)
        self._communications[is_later] += program.entry.communications
        self._ends.append(len(self._commands))
        if len(self._commands) > _MOST_COMMANDS:
            raise Unsuitable

    def _observe(self, columns: Sequence[Array], start: int) -> None:
        """Append the storing of observed values, or in the reverse pass a comparison with those of the forward run."""
        if not self._middle:
            self._copy([x[start : start + len(column)] for x, column in zip(self._observed, columns)], columns)
        for k in range(len(columns[0]) if columns and self._middle else 0):
            values, expected = [x[k : k + 1] for x in columns], [x[start + k : start + k + 1] for x in self._observed]
            self._compare(start + k, True, values, expected)

    def _compare(self, step: int, is_observed: bool, values: Sequence[Array], expected: Sequence[Array]) -> None:
        for x, y in zip(values, expected):
            if x.nbytes:
                self._compared[len(self._commands)] = step, values, expected, is_observed
                self._commands.compare(x, y)

    def _append_adjoint(self, replay: FixedReplay, program: RepeatedProgram, start: int) -> None:
        rows, made, end = slice(start, start + program.steps), replay.results[1], program.place + program.states
        for k, x in enumerate(self._last_seeds, program.leaves):
            replay.read(self._commands, k, x)
        for k, x in enumerate(self._observed_seeds, program.leaves + program.states):
            if k in replay.arguments:
                self._commands.copy(replay.arguments[k], x[rows])
        copies = replay.write(self._commands, 1, range(program.place, end), self._seeds_before)
        self._append_call(replay, program, 1, start)
        self._copy(*copies)
        for total, g, is_entry in zip(self._sums, made[: program.place] + made[end:], program.is_entry):
            if is_entry:
                self._commands.copy(total[rows], g)
            else:
                self._commands.add(total, g)
        self._last_seeds, self._seeds_before = self._seeds_before, self._last_seeds

    def admits(self, leaves: Sequence[Any]) -> bool:
        """Return whether the programs can compute with these arguments, and with the number of each step."""
        return all(admits_all(admits, starts, leaves) for admits, starts in self._tests)

    @cached_property
    def _tests(self) -> list[tuple[Any, tuple[int, ...]]]:
        return [(admits, tuple(starts)) for admits, starts in self._starts.items()]

    def forward(self, leaves: Sequence[Any]) -> list[Array]:
        """Run the loop with these arguments; return the last state, followed by the observed values of all steps."""
        for k, x in self._shared.items():
            x[...] = leaves[k]
        for replay in self._replays.values():
            replay.compute_once()
        for k, x in zip(self._program.layout.state, self._first):
            x[...] = leaves[k]
        for k, address in self._addresses.items():
            self._entries[k] = x = np.require(leaves[k], None, ["C", "A"])
            address[0] = address_of(x)
        self._run(0, self._middle, self._counts, lambda *_: None)
        return [x.copy()[()] for x in (*self._results, *self._observed)]

    def backward(self, gs: Sequence[Array], differs: Callable[..., object]) -> list[Array]:
        """Return the cotangents of the variables, the state first, given those of the results of `forward`.

        ``differs(step, values, expected, is_observed)`` is called if a repeated step has another result.
        """
        for x, g in zip((*self._seeds, *self._observed_seeds), gs):
            x[...] = g
        for x in self._sums:
            x[...] = 0
        self._run(self._middle, len(self._commands), self._later_counts, differs)
        self._entries.clear()
        return [x.copy()[()] for x in (*self._last_seeds, *self._sums)]

    def _run(self, start: int, stop: int, counts: MessageCounts, differs: Callable[..., object]) -> None:
        for replay in self._replays.values():
            replay.begin()
        note_channels(self.channels)
        counts.begin()
        count(self._communications[start > 0])
        while start < stop:
            number = bisect_right(self._ends, start) + self._together
            end, began = min([*self._ends[number - 1 : number], stop]), time.perf_counter()
            at = start = self._commands.run(start, end)
            seconds = time.perf_counter() - began
            if seconds > 2 * _UNINTERRUPTED:
                self._together = max(self._together // 2, 1)
            elif seconds < _UNINTERRUPTED / 2 and end < stop:
                self._together *= 2
            if at < end:
                if at in self._calls:
                    self._calls[at].fail()
                differs(*self._compared[at])
                start += 1


def _length_of_part(x: Array) -> int:
    """Return the number of entries in a part of an array that is compared."""
    return max(-(-x.size // _PARTS), _ENTRIES)


def scheduled(
    find: Find, lengths: Sequence[int], steps: int, schedule: Any, append: Callable[[ScheduledCalls], object]
) -> ScheduledCalls | None:
    """Return the calls of a loop that no gradient uses; None if commands can't make them, or the loop has hardly run.

    ``append(calls)`` appends the actions of a `schedule`.
    """
    if calls.is_noting() or is_watched() or FAULT_TOLERANT:
        return None
    pairs = [(find(0, length, False), find(0, length, True)) for length in lengths]
    reverse = next((program for _, program in pairs if program is not None), None)
    if reverse is None or reverse.entry.device is not None:
        return None
    known = reverse.entry.scheduled
    key = steps, schedule, *[program and program.entry for pair in pairs for program in pair]
    pool = known[key] = known.pop(key, None) or Pool()  # the latest request is the last
    pool.runs, pool.last = pool.runs + 1, next(_requests)
    if len(known) > _KNOWN:
        del known[next(iter(known))]
    if pool.is_unsuitable or pool.runs <= _FIRST:
        return None
    while pool.free:
        made = pool.free.pop()
        if made.is_current():
            return made
        pool.bytes -= made.bytes
    for each, other in [*known.items()]:
        if pool.last - other.last > _LONG:
            del known[each]
    if sum(other.bytes for other in known.values()) > _BYTES:
        return None
    try:
        made = ScheduledCalls(find, lengths, reverse, steps, pool)
        append(made)
        made.find = None
        made._entries_of_programs.difference_update(key)  # `find` returns current ones
    except Unsuitable:
        pool.is_unsuitable = True
        return None
    pool.bytes += made.bytes
    return made


# A replay whose arguments and results stay at the same addresses, so that commands can run it without Python.


class Unsuitable(Exception):
    """Raised if commands can't run a program: it has calls of Python, or results that aren't contiguous."""


class MessageCounts:
    """The counts of messages on channels, which commands advance together, before they run."""

    def __init__(self) -> None:
        self._totals: dict[tuple[Channel, str, tuple[int, int]], int] = {}
        self._bases: dict[tuple[Channel, str, tuple[int, int]], Array] = {}

    def advance(self, channel: Channel, name: str, key: tuple[int, int], by: int = 1) -> tuple[Array, int]:
        """Count messages; return an array that will contain the count before the commands, and the number since then."""
        place = channel, name, key
        before = self._totals.get(place, 0)
        self._totals[place] = before + by
        return self._bases.setdefault(place, np.zeros(1, np.int64)), before

    def begin(self) -> None:
        """Add all messages to the counts of their channels."""
        for place, total in self._totals.items():
            channel, name, key = place
            counts = getattr(channel, name)
            self._bases[place][0] = counts.get(key, 0)
            counts[key] = counts.get(key, 0) + total


class FixedReplay:
    """A replay that nothing but commands runs.

    Parameters
    ----------
    program : RepeatedProgram
        Calls read its state, its entries and the cotangents of the state at other addresses each, and write the state and
        its cotangents at other addresses each; see `read` and `write`.
    arguments : dict
        The arrays that it reads, by place, of the other arguments of all parts; it allocates the missing ones. They are
        added.
    scratch : array
        Memory that replays may use one after another.
    """

    def __init__(self, program: RepeatedProgram, arguments: Mapping[int, Array], scratch: Array):
        replays, layout, states = program.entry.replays, program.layout, program.states
        self._replay = replay = replays.take()
        # The places of the arguments that are the same in all calls of a loop, and of those that vary.
        varying = {*layout.state, *layout.entries, *range(program.leaves, program.leaves + states)}
        self.shared = {*range(1, program.leaves)} - varying
        try:
            self._once = self._calls_of_shared(self.shared)
        except Unsuitable:
            replays.give_back(replay)
            raise
        self.arguments = dict(arguments)
        self._renewed: dict[Envelope, tuple[Array, int]] = {}  # see `MessageCounts.advance`
        self._channels = list(replay.blocks.channels().values())
        self._comms = [call.comm for call in self._channels]
        buffers, names = replays.schedule.buffers, replay.names
        if replays.scratch.size:
            names["take"](scratch)
        outputs = replays.schedule.outputs_of_parts()
        roots = Counter(root_of(buffers, b) for b in replays.schedule.outputs)
        # The buffers at other addresses in each call: of arguments by place, and of results by part and place.
        self._inputs: dict[int, int] = {}
        self._outputs = {
            (part, k): outputs[part][k]
            for part, first in zip(range(len(outputs)), (0, program.place))
            for k in range(first, first + states)
            if buffers[outputs[part][k]].kind == "output" and roots[outputs[part][k]] == 1
        }
        self._bound: dict[int, tuple[int, int]] = {}  # the addresses that the last commands have stored
        self._places = places = {**names}
        self.arrays: list[Array] = []  # the results at fixed addresses
        for b in {root_of(buffers, b) for b in (*replays.uses, *replays.schedule.outputs)}:
            found = buffers[b]
            if found.kind not in ("input", "output") or b in self._outputs.values():
                continue
            if found.kind == "input" and found.data in varying:
                self._inputs[found.data] = b
                continue
            array = np.zeros(found.shape, found.dtype)
            if found.kind == "input":
                array = self.arguments.setdefault(found.data, array)
            else:
                self.arrays.append(array)
            if (array.shape, array.dtype) != (found.shape, found.dtype):
                raise Unsuitable
            replay.blocks.bind(b, address_of(array))
            places[replay.name_of(b)] = array
        try:
            self.results = [
                [None if (part, k) in self._outputs else eval(replay.place_of(b), places) for k, b in enumerate(of_part)]
                for part, of_part in enumerate(outputs)
            ]
        except NameError:  # the result of a call of Python, or an argument
            raise Unsuitable from None
        fixed = [x for part in self.results for x in part if x is not None]
        if not all(type(x) is np.ndarray and x.flags.c_contiguous for x in fixed):
            raise Unsuitable
        if any(buffers[root_of(buffers, b)].kind == "input" for b in replays.schedule.outputs):  # changed by the next call
            raise Unsuitable

    def read(self, commands: Commands, place: int, x: Array) -> None:
        """Append commands with which the next calls read a varying argument from an array, which stays alive."""
        if place in self._inputs:
            self._bind(commands, self._inputs[place], _ZERO, x)

    def read_entries(self, commands: Commands, place: int, address: Array, start: int) -> None:
        """Append commands with which the next call reads the entries from `start` on of an array at a later address."""
        if place in self._inputs:
            found = self._replay.schedule.buffers[self._inputs[place]]
            self._bind(commands, self._inputs[place], address, start * (found.nbytes // found.shape[0]))

    def write(
        self, commands: Commands, part: int, places: Iterable[int], arrays: Sequence[Array]
    ) -> tuple[list[Array], list[Array]]:
        """Append commands with which the next call writes results into arrays; return what must be copied after it."""
        out, made = [], []
        for k, x in zip(places, arrays):
            if (part, k) in self._outputs:
                self._bind(commands, self._outputs[part, k], _ZERO, x)
            else:
                out.append(x)
                made.append(self.results[part][k])
        return out, made

    def _bind(self, commands: Commands, b: int, base: Array, offset: int | Array) -> None:
        """Append the storing of a buffer's address: `offset`, an array or a number of bytes, added to base[0]."""
        found = self._replay.schedule.buffers[b]
        if isinstance(offset, np.ndarray):
            if (offset.shape, offset.dtype) != (found.shape, found.dtype):  # of programs for other numbers
                raise Unsuitable
            offset = address_of(offset)
        if self._bound.get(b) != (id(base), offset):
            self._bound[b] = id(base), offset
            for word in self._replay.blocks.addresses_of(b):
                commands.number(word, base, offset, _NO_LIMIT)

    def _calls_of_shared(self, shared: Set[int]) -> dict[int, CodeType]:
        """Return the calls of Python that depend on `shared` arguments, by step, as code that runs once in each gradient.

        Raise an exception unless the results of all others depend on the first argument, a number, alone.
        """
        if not self._replay.is_linked or self._replay.schedule.program.kept:
            raise Unsuitable
        schedule, once = self._replay.schedule, dict[int, CodeType]()
        buffers = schedule.buffers
        fixed = {b for b, found in enumerate(buffers) if found.kind == "constant"}
        inputs = {b: found.data for b, found in enumerate(buffers) if found.kind == "input"}
        of_number, same = (fixed | {b for b, k in inputs.items() if k in places} for places in ({0}, shared))
        for at, lines in self._replay.by_python:
            step = schedule.steps[at]
            is_call = isinstance(step, Run) and not step.in_place and schedule.nodes[step.node].kind == "call"
            given = {root_of(buffers, b) for b in step.inputs} if is_call else {-1}
            if given <= same:
                once[at] = compile("\n".join(lines), str(Path(__file__).with_name("<once>")), "exec")
                same.update(step.results)
            elif given <= of_number and all(buffers[b].nbytes <= SMALL for b in step.results):
                of_number.update(step.results)
            else:
                raise Unsuitable
        return once

    def compute_once(self) -> None:
        """Make the calls of Python whose results are the same in all calls."""
        for code in self._once.values():
            exec(code, self._places)

    def append_call(self, commands: Commands, counts: MessageCounts, part: int, number: int) -> None:
        """Append the call of a part; `number`: the first argument, with which the calls of Python are made now."""
        replay, schedule = self._replay, self._replay.schedule
        if 0 in self.arguments:
            if self.arguments[0].dtype != np.int64:
                raise Unsuitable
            self.arguments[0][...] = number
            commands.copy(self.arguments[0], self.arguments[0].copy())
        for at, lines in replay.by_python:
            if schedule.part(at) == part and at not in self._once:
                exec("\n".join(lines), self._places)
                for array in [self._places[f"b{b}"] for b in schedule.steps[at].results if f"b{b}" in self._places]:
                    commands.copy(array, array.copy())
        for envelope in replay.renewed.get(part, ()):
            if envelope.answers is not None:
                self._renewed[envelope] = self._renewed[envelope.answers]
            elif envelope.is_fixed:
                name = "sent" if envelope.outgoing else "received"
                self._renewed[envelope] = counts.advance(envelope.channel, name, (envelope.peer, envelope.tag))
            else:
                raise Unsuitable
        for word, envelope in replay.tagged.get(part, ()):
            (base, number), channel = self._renewed[envelope], envelope.channel
            offset = envelope.tag * channel.tag_stride + number
            commands.number(replay.blocks.address_of(word), base, offset, channel.tag_limit)
        for (channel, (name, key)), number in replay.blocks.counts(part).items():
            counts.advance(channel, name, key, number)
        for function, block in replay.heads.get(part, ()):
            commands.call(function, block, replay.blocks.address_of(0))

    def begin(self) -> None:
        """Store the handles of the communicators of channels that have been renewed."""
        comms = [call.comm for call in self._channels]
        if any(comm is not before for comm, before in zip(comms, self._comms)):
            self._comms = comms
            self._replay.blocks.bind_communicators()

    def fail(self) -> None:
        """Raise the error with which a call has ended."""
        self._replay.fail(self._replay.blocks.words[0])
