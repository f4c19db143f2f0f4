"""Repeated calls of a compiled function, each with results of the call before: the time steps of a loop, for example.

The program has one length, and loops have any. A loop that runs a program many times is one node of the tape, and each run
costs a call of a replay: the arguments are compared with the program's signature once. The reverse pass runs the second
part of the program from the last run to the first, each in the buffers of its replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from autograd.tracer import Box, getval

from mpiad._typing import Array, Tree
from mpiad.differentiation.tape import OrderedTape
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.programs.calls_on_tape import is_simple, require_plain
from mpiad.programs.program_cache import Entry, ProgramCache, count, is_admitted
from mpiad.programs.signature import arguments_of
from mpiad.transport.core.tracing import note_channels, tracing

_boxes = Box.types


class Repetition(NamedTuple):
    """Repeated calls of a function of leaves: the number of the first step, and arrays.

    The first results of a call are the arguments at the positions `state` of the next one. Each call gets the next `steps`
    entries of the arguments at the positions `entries`, along their first axis, and a number that is larger by `steps`.
    """

    calls: int
    steps: int
    state: range
    entries: range

    def arguments(self, call: int, leaves: Sequence[Any], state: Sequence[Any]) -> list[Any]:
        """Return the arguments of a call, given those of all calls."""
        made = list(leaves)
        made[0] += call * self.steps
        made[self.state.start : self.state.stop] = state
        for k in self.entries:
            made[k] = leaves[k][call * self.steps : (call + 1) * self.steps]
        return made


def called_repeatedly(cache: ProgramCache, repetition: Repetition, leaves: Sequence[Any]) -> list[Tree] | None:
    """Return the results of all calls; None if they must be made one by one, since there is no program, for example.

    Of the states, only that of the last result is valid.
    """
    tape: Any = tracing.tape
    first = repetition.arguments(0, leaves, [leaves[k] for k in repetition.state])
    arguments = arguments_of(tuple(first), {}, cache.asked)
    boxed = [k for k in arguments.traced if type(arguments.leaves[k]) in _boxes]
    if tracing.recorder is not None or len(arguments.traced) < len(first):
        return None
    if tape is None:
        key: Any = arguments.key
    else:
        # The variables of all calls are the same if the whole state is.
        key = "reverse", tuple(boxed), arguments.key
        is_reverse = type(tape) is OrderedTape and tape.passes in ("one", "several")
        if not is_reverse or not is_simple(tape, [first[k] for k in boxed]):
            return None
    if boxed and (tape is None or not set(repetition.state) <= set(boxed)):
        return None
    entry = cache.entries.get(key)
    if entry is None or entry.may_change or not all(entry.inside) or not entry.is_current():
        return None
    last = arguments._replace(
        leaves=repetition.arguments(repetition.calls - 1, first, [first[k] for k in repetition.state])
    )
    if not is_admitted(entry, arguments) or not is_admitted(entry, last):
        return None
    return _run(entry, repetition, leaves) if tape is None else _run_on_tape(cache, entry, repetition, leaves, boxed)


def _run(entry: Entry, repetition: Repetition, leaves: Sequence[Any]) -> list[Tree]:
    note_channels(entry.channels)
    replay, state, made = entry.replays.take(), [leaves[k] for k in repetition.state], []
    for call in range(repetition.calls):
        count(entry.communications)
        made.append(replay.first(*repetition.arguments(call, leaves, state)))
        state = made[-1][: len(state)]
    entry.replays.give_back(replay)
    return list(map(entry.build, made))


def _run_on_tape(
    cache: ProgramCache, entry: Entry, repetition: Repetition, leaves: Sequence[Any], boxed: list[int]
) -> list[Tree]:
    """Run the first part of the program for each call, and record one node that runs the second parts."""
    plain, calls, n = list(map(getval, leaves)), repetition.calls, len(repetition.state)
    state, leases, kept, observed = [plain[k] for k in repetition.state], [], [], []
    note_channels(entry.channels)
    for call in range(calls):
        inputs, lease = repetition.arguments(call, plain, state), entry.replays.lease()
        count(entry.communications)
        values = lease.replay.first(*inputs)
        leases.append(lease)
        kept.append([x if k in entry.replays.read_later else None for k, x in enumerate(inputs)])
        state = values[:n]
        observed += values[n:]
    values = [*state, *observed]
    per_call = len(observed) // calls
    specs = {k: spec_like(plain[k]) for k in boxed}

    def pull(gs: list[Array]) -> list[Array]:
        require_plain(gs, cache.name)
        totals: dict[int, Any] = {k: specs[k].zeros() for k in boxed if k in repetition.entries}
        for call in reversed(range(calls)):
            count(entry.communications)
            place = n + call * per_call
            made = leases[call].replay.later[0](*kept[call], *gs[:n], *gs[place : place + per_call])
            cotangents = dict(zip(boxed, made))
            gs[:n] = [conform(cotangents.pop(k), *specs[k]) for k in repetition.state]
            for k, g in cotangents.items():
                if k in repetition.entries:
                    totals[k][call * repetition.steps : (call + 1) * repetition.steps] = g
                else:
                    g = conform(g, *specs[k])
                    totals[k] = np.add(totals[k], g, out=totals[k]) if k in totals and np.shape(g) else totals.get(k, 0) + g
        return [gs[k - repetition.state.start] if k in repetition.state else totals[k] for k in boxed]

    places = [leaves[k]._node.index for k in boxed]
    tape: Any = tracing.tape
    recorded = tape.record_call(entry.channels, values, [True] * len(values), places, pull, entry.communicates)
    last = recorded[:n]
    rows = [recorded[k : k + per_call] for k in range(n, len(recorded), per_call)] if per_call else [[]] * calls
    return [entry.build([*last, *row]) for row in rows]
