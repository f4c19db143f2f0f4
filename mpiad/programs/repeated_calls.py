"""Repeated calls of a compiled function, each with results of the call before: the time steps of a loop, for example.

The program has one length, and loops have any. A loop that runs a program many times is one node of the tape, and each run
costs a call of a replay: the arguments are compared with the program's signature once per loop, by `prepared`. The reverse
pass runs the second part of the program from the last run to the first, each in the buffers of its replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from autograd.tracer import Box, getval, new_box

from mpiad._typing import Array, Tree
from mpiad.device.transfer import beside
from mpiad.differentiation.tape import OrderedNode, OrderedTape
from mpiad.primitives.cotangents import spec_like
from mpiad.programs.calls_on_tape import entry_on_tape, is_simple, require_plain
from mpiad.programs.number_conditions import admits_all
from mpiad.programs.program_cache import UNKNOWN, Entry, FailedTrace, ProgramCache, count
from mpiad.programs.replay import Replay
from mpiad.programs.signature import arguments_of
from mpiad.transport import Spec
from mpiad.transport.core.tracing import note_channels, tracing
from mpiad.transport.devices.device_arrays import is_device_array, zeros_like

_boxes = Box.types


class Layout(NamedTuple):
    """The arguments of a function of leaves that repeated calls change: the first one, which is a number, and arrays.

    The first results of a call are the arguments at the positions `state` of the next one. Each call gets the next `steps`
    entries of the arguments at the positions `entries`, which follow, along their first axis, and a number that is larger
    by `steps`. The further results have one entry per step, and are joined along their first axis.
    """

    steps: int
    state: range
    entries: range


class RepeatedProgram:
    """A program for repeated calls, with the arguments that are the same in all of them; created by `prepared`."""

    def __init__(
        self, entry: Entry, layout: Layout, arguments: Sequence[Array], traced: list[int], variables: Sequence[int] | None
    ):
        # `traced`: the positions of the program's arguments. The others, which follow `entries`, are constants.
        leaves = [arguments[k] for k in traced]
        self.entry, self.layout, self.leaves, self.steps, self.traced = entry, layout, len(leaves), layout.steps, traced
        self._numbers = {k: leaves[k] for k in getattr(entry.admits, "places", ())}
        self._head, self._tail = leaves[1 : layout.state.start], leaves[layout.entries.stop :]
        self._is_read_later = [k in entry.replays.read_later for k in range(len(leaves))]
        # The number of arrays in the state; the place of its cotangents among those of the variables; and for each of the
        # other variables whether it is among the entries.
        self.states, self.place = len(layout.state), 0
        self.is_entry: list[bool] = []
        self.specs: list[Spec] = []  # of the variables, on a device
        if variables is not None:
            self.specs = [spec_like(arguments[k]) for k in variables] if entry.device is not None else []
            self.place = variables.index(layout.state.start)
            self.is_entry = [k in layout.entries for k in variables if k not in layout.state]

    def admits(self, first: int) -> bool:
        """Return whether a call that begins with this number may run the program."""
        admits = self.entry.admits
        return admits is None or not admits.decides or admits_all(admits, (first,), self._numbers)

    def called(self, first: int, calls: int, state: list[Array], entries: list[Array]) -> list[Array] | None:
        """Return the last state and the joined results; None if a program can't compute with these numbers."""
        inputs = self._first_arguments(first, calls, state, entries)
        if inputs is None:
            return None
        replay, rows = self.entry.replays.take(), []
        for call in range(calls):
            inputs = self._arguments(first, call, rows[-1], entries) if call else inputs
            count(self.entry.communications)
            rows.append(replay.first(*inputs))
        self.entry.replays.give_back(replay)
        return self._joined(rows)

    def recorded(self, first: int, calls: int, state: list[Array], entries: list[Array]) -> Recording | None:
        """Run the first part of the program for each call; None if a program can't compute with these numbers."""
        inputs = self._first_arguments(first, calls, state, entries)
        if inputs is None:
            return None
        rows, recording = [], Recording(self)
        for call in range(calls):
            inputs, replay = self._arguments(first, call, rows[-1], entries) if call else inputs, self.entry.replays.take()
            recording.replays.append(replay)
            count(self.entry.communications)
            rows.append(replay.first(*inputs))
            recording.kept.append([x if is_read else None for x, is_read in zip(inputs, self._is_read_later)])
        recording.values = self._joined(rows)
        return recording

    def _first_arguments(self, first: int, calls: int, state: list[Array], entries: list[Array]) -> list[Any] | None:
        """Return the arguments of the first call; None if the program can't compute with one of the numbers."""
        inputs, admits = self._arguments(first, 0, state, entries), self.entry.admits
        numbers = range(first, first + calls * self.steps, self.steps)
        if admits is not None and not admits_all(admits, numbers, inputs):
            return None
        note_channels(self.entry.channels)
        return inputs

    def _arguments(self, first: int, call: int, state: list[Array], entries: list[Array]) -> list[Any]:
        start = call * self.steps
        rows = [leaf[start : start + self.steps] for leaf in entries] if entries else entries
        return [first + start, *self._head, *state[: self.states], *rows, *self._tail]

    def _joined(self, rows: list[list[Array]]) -> list[Array]:
        if len(rows) == 1 or len(rows[0]) == self.states:
            return rows[-1]
        return rows[-1][: self.states] + [np.concatenate(column) for column in list(zip(*rows))[self.states :]]


class Recording:
    """Repeated calls whose reverse pass can run; the replays are in use as long as it exists."""

    def __init__(self, program: RepeatedProgram):
        self.program = program
        self.values: list[Array] = []  # the state after the last call, and the further results for the steps of all calls
        self.replays: list[Replay] = []
        self.kept: list[list[Any]] = []  # the arguments that the second parts of the replays read

    def __del__(self) -> None:
        for replay in self.replays:
            self.program.entry.replays.give_back(replay)

    def pull(self, gs: list[Array]) -> list[Array]:
        """Return the cotangents of the variables, given those of the values."""
        program, calls, totals = self.program, len(self.replays), list[Any]()
        steps, start, end = program.steps, program.place, program.place + program.states
        state, columns = gs[: program.states], gs[program.states :]
        for call in reversed(range(calls)):
            count(program.entry.communications)
            block = slice(call * steps, (call + 1) * steps)
            rows = columns if calls == 1 else [g[block] for g in columns]
            made = self.replays[call].later[0](*self.kept[call], *state, *rows)
            if calls == 1:
                return beside(made, program.specs) if program.specs else made
            state, others = made[start:end], made[:start] + made[end:]
            if not totals:
                pairs = zip(others, program.is_entry)
                shapes = [(calls * steps, *g.shape[1:]) if is_entry else g.shape for g, is_entry in pairs]
                totals = [zeros_like(g, shape) for shape, g in zip(shapes, others)]
            for total, g, is_entry in zip(totals, others, program.is_entry):
                total[block if is_entry else ...] += g
        totals = [total[()] for total in totals]
        totals = totals[:start] + state + totals[start:]
        return beside(totals, program.specs) if program.specs else totals


def prepared(
    cache: ProgramCache, layout: Layout, leaves: Sequence[Any], variables: Sequence[int] | None
) -> RepeatedProgram | None:
    """Prepare repeated calls with plain arguments, or return None: there is no program, say.

    The caller may keep the result as long as neither the arguments' shapes change nor Python runs between the calls.

    Parameters
    ----------
    leaves : the arguments of all calls.
    variables : the positions of those whose cotangents `Recording.pull` returns; None without a reverse pass.
    """
    if any(type(x) in _boxes for x in leaves):
        return None
    given = list(leaves)
    for k in layout.entries:
        given[k] = given[k][: layout.steps]
    for k in variables or ():
        given[k] = given[k] if is_device_array(given[k]) else np.asarray(given[k])
    arguments = arguments_of(tuple(given), {}, cache.asked)
    end = layout.entries.stop
    if tracing.recorder is not None or arguments.traced[:end] != [*range(end)]:
        return None
    key = arguments.key if variables is None else ("reverse", tuple(variables), arguments.key)
    entry = cache.known(cache.entries, key, arguments)
    if entry is None or entry is UNKNOWN or entry.may_change or not all(entry.inside):
        return None
    return RepeatedProgram(entry, layout, leaves, arguments.traced, variables)


def with_traced_state(cache: ProgramCache, layout: Layout, leaves: Sequence[Array]) -> Sequence[Array]:
    """Return the arguments of the first call on the tape: if some of them are traced, so is the whole state.

    The results of this call, which are the state in the next one, are traced, too: one program serves all calls. If it
    can't be compiled, Python gets the arguments as they are: it may write into constants, or call plain NumPy.
    """
    given = _traced_state(layout, leaves)
    if given is None or given is leaves:
        return leaves
    arguments = arguments_of(tuple(given), {}, cache.asked)
    key, entry = entry_on_tape(cache, arguments, [k for k in arguments.traced if type(given[k]) in _boxes])
    if isinstance(entry, FailedTrace) and not entry.needs_run:  # else the call is interpreted, and traced again
        cache.refuse(key, entry, optional=True)
        return leaves
    return leaves if entry is None else given


def _traced_state(layout: Layout, leaves: Sequence[Array]) -> Sequence[Array] | None:
    """Return the arguments with traced values in the whole state; None if the calls can't be one node of the tape."""
    tape: Any = tracing.tape
    boxes = [x for x in leaves if type(x) in _boxes]
    if not boxes or type(tape) is not OrderedTape or tape.passes not in ("one", "several") or not is_simple(tape, boxes):
        return None
    constants = [k for k in layout.state if type(leaves[k]) not in _boxes]
    given: Any = list(leaves) if constants else leaves
    for k in constants:  # variables whose cotangents aren't used
        given[k] = new_box(given[k], tape.number, OrderedNode.on_tape(tape, (), lambda g: ()))
    return given


def repeated_on_tape(
    cache: ProgramCache, layout: Layout, calls: int, leaves: Sequence[Any], known: dict[tuple[int, ...], RepeatedProgram]
) -> Tree | None:
    """Call a function repeatedly as one node of the current tape; None if the calls must be made one by one.

    `known`: the programs that were prepared for the loop, by the positions of the traced arguments.
    """
    tape, given = tracing.tape, _traced_state(layout, leaves)
    if given is None:
        return None
    boxed, plain = tuple([k for k, x in enumerate(given) if type(x) in _boxes]), list(map(getval, leaves))
    program = known.get(boxed) or prepared(cache, layout, plain, boxed)
    state, entries = ([plain[k] for k in places] for places in (layout.state, layout.entries))
    recording = program and program.recorded(plain[0], calls, state, entries)
    if program is None or recording is None:
        return None
    known[boxed], entry, values = program, program.entry, recording.values

    def pull(gs: list[Array]) -> list[Array]:
        require_plain(gs, cache.name)
        return recording.pull(gs)

    places = [given[k]._node.index for k in boxed]
    return entry.build(tape.record_call(entry.channels, values, [True] * len(values), places, pull, entry.communicates))
