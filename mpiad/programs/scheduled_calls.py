"""Repeated calls of compiled functions in the order of a checkpoint schedule, forwards and backwards, run by commands.

A small step takes less time than Python takes to call it. So all calls between two calls of Python, the copies of states
that are stored and restored, and the sums of cotangents are one list of commands (see `mpiad.compiling.commands`), which is
made once for a loop, and runs in each gradient.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import count as counter
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.commands import Commands
from mpiad.programs.fixed_replay import FixedReplay, MessageCounts, Unsuitable
from mpiad.programs.program_cache import Entry, admits_all, count
from mpiad.programs.repeated_calls import RepeatedProgram
from mpiad.transport.core import calls
from mpiad.transport.core.channels import is_watched
from mpiad.transport.core.fault_tolerance import FAULT_TOLERANT
from mpiad.transport.core.tracing import note_channels

# The maximum number of bytes that a loop keeps between gradients, in stored states and arguments. The Python code between
# the calls takes little of the time of larger steps.
_MOST = 1 << 23
_MOST_COMMANDS = 1 << 16  # which are made in some tenths of a second
# Commands return to Python after about so many seconds, so that interrupts arrive.
_UNINTERRUPTED = 1e-3
_FIRST = 2  # the number of gradients before the commands are made, which takes as long as some gradients
# The number of schedules of a loop that are known, and the bytes of those with commands. A schedule that no gradient has
# used for some time gives way to others.
_KNOWN, _BYTES, _LONG = 64, 4 * _MOST, 256
_requests = counter()
# A step, the values of all leaves, those of the forward run, and whether they are observed.
Compared: TypeAlias = tuple[int, Sequence[Array], Sequence[Array], bool]


class Pool:
    """The calls for one schedule of one loop that no gradient uses at present."""

    def __init__(self) -> None:
        self.free: list[ScheduledCalls] = []
        self.runs = self.bytes = 0  # the number of gradients, and the memory of all calls
        self.last = 0  # when a gradient last asked for calls, in the number of requests
        self.is_unsuitable = False


class Programs(NamedTuple):
    """The programs for some number of steps, without and with a reverse pass; None for one that isn't known."""

    forward: RepeatedProgram | None
    reverse: RepeatedProgram | None


class ScheduledCalls:
    """The calls of a loop of some steps, of which one gradient at a time makes use.

    `programs`: by the number of steps that a call makes. The methods for the actions of a schedule append commands.
    """

    def __init__(self, programs: Mapping[int, Programs], steps: int, pool: Pool):
        self._programs, self.pool, self.bytes = programs, pool, 0
        self._commands, self._counts, self._later_counts = Commands(), MessageCounts(), MessageCounts()
        self._replays: dict[tuple[int, int], FixedReplay] = {}  # by steps, and by place in a reversed block; -1: forward
        self._calls: dict[int, FixedReplay] = {}  # by command
        self._compared: dict[int, Compared] = {}  # by command
        self._stored: dict[int, list[Array]] = {}
        self._free: list[list[Array]] = []  # memory for states
        self._middle = 0  # the first command of the reverse pass
        self._together = 8  # the number of commands between two calls of Python
        self._communications = {False: 0, True: 0}  # those of the reverse pass at True
        self._entries: dict[int, Array] = {}  # arguments with an entry per step, in the current gradient, by place
        self._shared: dict[int, Array] = {}  # arguments that all calls read, by place
        entries = entries_of(programs)
        self._starts: dict[Any, set[int]] = {}  # the first steps of the calls of programs with a test, by the test
        self.channels = {used for entry in entries for used in entry.channels}
        self.communicates = any(entry.communicates for entry in entries)
        scratch = max(entry.replays.scratch.size for entry in entries)
        self._scratch = self._new([np.broadcast_to(np.uint8(0), scratch)])[0]
        self._program = some = next(program for _, program in programs.values() if program is not None)
        schedule = some.entry.replays.schedule
        results = [[schedule.buffers[b] for b in part] for part in schedule.outputs_of_parts()]
        first, later = [[np.broadcast_to(np.zeros((), x.dtype), x.shape) for x in part] for part in results]
        observed = [np.broadcast_to(x[:1], (steps, *x.shape[1:])) for x in first[some.states :]]
        self._state, self._seeds, self._after = [self._new(first[: some.states]) for _ in range(3)]
        self._observed, self._observed_seeds = self._new(observed), self._new(observed)
        others = zip(later[: some.place] + later[some.place + some.states :], some.is_entry)
        self._sums = self._new([np.broadcast_to(x[:1], (steps, *x.shape[1:])) if entry else x for x, entry in others])

    def _new(self, like: Sequence[Any]) -> list[Array]:
        self.bytes += sum(x.nbytes for x in like)
        if self.bytes > _MOST:
            raise Unsuitable
        return [np.zeros(x.shape, x.dtype) for x in like]

    def _replay(self, steps: int, place: int) -> tuple[FixedReplay, RepeatedProgram]:
        """Return the replay for a forward call (-1), or for a call at a place in a reversed block, and its program."""
        key, program = (steps, place), self._program_of(steps, place >= 0)
        if program is None:
            raise Unsuitable
        if key not in self._replays:
            states = program.layout.state if place < 0 else range(program.leaves, program.leaves + program.states)
            known = dict(zip(states, self._state if place < 0 else self._seeds))
            made = FixedReplay(program.entry.replays, {**self._shared, **known}, self._scratch)
            own = {0, *program.layout.state, *program.layout.entries, *range(program.leaves, max(made.arguments) + 1)}
            self._shared |= {k: x for k, x in made.arguments.items() if k not in own}
            self._new([*made.arguments.values(), *made.results[0]])  # counts their bytes
            self._replays[key] = made
        return self._replays[key], program

    def keep(self, number: int) -> None:
        """Store the state before a step."""
        self._stored[number] = self._free.pop() if self._free else self._new(self._state)
        self._copy(self._stored[number], self._state)

    def restore(self, number: int, last: bool) -> None:
        """Restore the state before a step; `last`: whether it isn't needed any more."""
        self._copy(self._state, self._stored[number])
        if last:
            self._free.append(self._stored.pop(number))

    def advance(self, first: int, stop: int) -> None:
        """Run the steps first, ..., stop - 1."""
        for start, steps in self._blocks(first, stop, is_recorded=False):
            self._append_run(*self._replay(steps, -1), start, observes=not self._middle)

    def reverse(self, first: int, stop: int) -> None:
        """Run and record the steps first, ..., stop - 1, and run their adjoints.

        The last steps of the loop run twice, too: the forward run ends before they are recorded. All ways of running a loop
        make the same communications in the same order, since other ranks may not have commands.
        """
        if not self._middle:
            self.keep(first)
            self.advance(first, stop)
            self._copy(self._after, self._state)
            self._middle = len(self._commands)
            self.restore(first, last=True)
        blocks = [
            (*self._replay(steps, place), start)
            for place, (start, steps) in enumerate(self._blocks(first, stop, is_recorded=True))
        ]
        for replay, program, start in blocks:
            self._append_run(replay, program, start, observes=True)
        self._compare(stop - 1, False, self._state, self._after)
        self._copy(self._after, [blocks[0][0].arguments[k] for k in self._program.layout.state])
        for replay, program, start in reversed(blocks):
            self._append_adjoint(replay, program, start)

    def _program_of(self, steps: int, is_recorded: bool) -> RepeatedProgram | None:
        forward, reverse = self._programs[steps]
        return reverse if is_recorded or forward is None else forward

    def _blocks(self, first: int, stop: int, is_recorded: bool) -> Iterator[tuple[int, int]]:
        """Yield the first step, and the number of steps, of each call."""
        for steps in sorted(self._programs, reverse=True):
            while stop - first >= steps and self._program_of(steps, is_recorded) is not None:
                yield first, steps
                first += steps
        if first < stop:
            raise Unsuitable

    def _copy(self, out: Sequence[Array], given: Sequence[Array]) -> None:
        for x, y in zip(out, given):
            self._commands.copy(x, y)

    def _append_run(self, replay: FixedReplay, program: RepeatedProgram, start: int, observes: bool) -> None:
        commands, arguments, layout = self._commands, replay.arguments, program.layout
        self._copy([arguments.setdefault(k, np.zeros_like(x)) for k, x in zip(layout.state, self._state)], self._state)
        for k in layout.entries:
            if k in arguments:
                commands.copy_entries(arguments[k], k, start * arguments[k][0].nbytes)
        self._append_call(replay, program, 0, start)
        if observes:
            self._observe(replay.results[0][program.states :], start)
        self._copy(self._state, replay.results[0][: program.states])

    def _append_call(self, replay: FixedReplay, program: RepeatedProgram, part: int, start: int) -> None:
        before, is_later = len(self._commands), self._middle > 0
        replay.append_call(self._commands, self._later_counts if is_later else self._counts, part, start)
        self._calls |= dict.fromkeys(range(before, len(self._commands)), replay)
        if program.entry.admits is not None:
            self._starts.setdefault(program.entry.admits, set()).add(start)
        self._communications[is_later] += program.entry.communications
        if len(self._commands) > _MOST_COMMANDS:
            raise Unsuitable

    def _observe(self, columns: Sequence[Array], start: int) -> None:
        """Append the storing of observed values, or in the reverse pass a comparison with those of the forward run."""
        for x, column in zip(self._observed, columns):
            if not self._middle:
                self._commands.copy(x[start : start + len(column)], column)
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
        for k, x in enumerate(self._observed_seeds, program.leaves + program.states):
            if k in replay.arguments:
                self._commands.copy(replay.arguments[k], x[rows])
        self._append_call(replay, program, 1, start)
        for total, g, is_entry in zip(self._sums, made[: program.place] + made[end:], program.is_entry):
            if is_entry:
                self._commands.copy(total[rows], g)
            else:
                self._commands.add(total, g)
        self._copy(self._seeds, made[program.place : end])

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
        for k, x in zip(self._program.layout.state, self._state):
            x[...] = leaves[k]
        for k in self._program.layout.entries:
            self._entries[k] = x = np.require(leaves[k], None, ["C", "A"])
            self._commands.read_from(k, x)
        self._run(0, self._middle, self._counts, lambda *_: None)
        return [x.copy()[()] for x in (*self._state, *self._observed)]

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
        return [x.copy()[()] for x in (*self._seeds, *self._sums)]

    def _run(self, start: int, stop: int, counts: MessageCounts, differs: Callable[..., object]) -> None:
        for replay in self._replays.values():
            replay.begin()
        note_channels(self.channels)
        counts.begin()
        count(self._communications[start > 0])
        while start < stop:
            end, began = min(start + self._together, stop), time.perf_counter()
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


def entries_of(programs: Mapping[int, Programs]) -> list[Entry]:
    """Return the compiled functions of programs."""
    return [program.entry for pair in programs.values() for program in pair if program is not None]


def scheduled(
    programs: Mapping[int, Programs], steps: int, schedule: Any, append: Callable[[ScheduledCalls], object]
) -> ScheduledCalls | None:
    """Return the calls of a loop that no gradient uses; None if commands can't make them, or the loop has hardly run.

    ``append(calls)`` appends the actions of a `schedule`.
    """
    if calls.is_noting() or is_watched() or FAULT_TOLERANT:
        return None
    reverse = next((program for _, program in programs.values() if program is not None), None)
    if reverse is None:
        return None
    known = reverse.entry.scheduled
    key = steps, schedule, *entries_of(programs)
    pool = known[key] = known.pop(key, None) or Pool()  # the latest request is the last
    pool.runs, pool.last = pool.runs + 1, next(_requests)
    if len(known) > _KNOWN:
        del known[next(iter(known))]
    if pool.is_unsuitable or pool.runs <= _FIRST:
        return None
    if pool.free:
        return pool.free.pop()
    for each, other in [*known.items()]:
        if pool.last - other.last > _LONG:
            del known[each]
    if sum(other.bytes for other in known.values()) > _BYTES:
        return None
    try:
        made = ScheduledCalls(programs, steps, pool)
        append(made)
    except Unsuitable:
        pool.is_unsuitable = True
        return None
    pool.bytes += made.bytes
    return made
