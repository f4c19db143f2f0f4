"""Repeated calls of a compiled function, each with results of the call before: the time steps of a loop, for example.

The program has one length, and loops have any. A loop that runs a program many times is one node of the tape, and each run
costs a call of a replay: the arguments are compared with the program's signature once. The reverse pass runs the second
part of the program from the last run to the first, each in the buffers of its replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from autograd.tracer import Box, getval

from mpiad._typing import Array, Tree
from mpiad.differentiation.tape import OrderedTape
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.programs.calls_on_tape import is_simple, require_plain
from mpiad.programs.program_cache import Entry, ProgramCache, count, is_admitted
from mpiad.programs.replay import Lease
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


class Recording(NamedTuple):
    """Repeated calls whose reverse pass can run."""

    entry: Entry
    state: list[Array]  # the state after the last call
    rows: list[list[Array]]  # the further results of each call
    # Returns the cotangents of the variables, given those of the last state and of the further results of all calls.
    pull: Callable[[list[Array]], list[Array]]

    def results(self, state: Sequence[Any], others: Sequence[Any]) -> list[Tree]:
        """Return the results of all calls, given values of the last state and of the further results of all calls."""
        n = len(others) // len(self.rows)
        return [self.entry.build([*state, *others[k * n : (k + 1) * n]]) for k in range(len(self.rows))]


def called_repeatedly(cache: ProgramCache, repetition: Repetition, leaves: Sequence[Any]) -> list[Tree] | None:
    """Return the results of all calls; None if they must be made one by one, since there is no program, for example.

    Of the states, only that of the last result is valid.
    """
    tape: Any = tracing.tape
    boxed = [k for k, x in enumerate(leaves) if type(x) in _boxes]
    if tape is None:
        return None if boxed else _called(cache, repetition, leaves)
    if type(tape) is not OrderedTape or tape.passes not in ("one", "several") or not set(repetition.state) <= set(boxed):
        return None
    if not is_simple(tape, [leaves[k] for k in boxed]):
        return None
    made = recorded(cache, repetition, list(map(getval, leaves)), boxed)
    if made is None:
        return None
    values, places = [*made.state, *chain.from_iterable(made.rows)], [leaves[k]._node.index for k in boxed]
    entry, n = made.entry, len(made.state)
    values = tape.record_call(entry.channels, values, [True] * len(values), places, made.pull, entry.communicates)
    return made.results(values[:n], values[n:])


def _entry(
    cache: ProgramCache, repetition: Repetition, leaves: Sequence[Any], variables: Sequence[int] | None
) -> Entry | None:
    """Return the program of a call, with a reverse pass if there are `variables`; None if it can't be repeated."""
    state = [leaves[k] for k in repetition.state]
    arguments = arguments_of(tuple(repetition.arguments(0, leaves, state)), {}, cache.asked)
    if tracing.recorder is not None or len(arguments.traced) < len(leaves):
        return None
    entry = cache.entries.get(arguments.key if variables is None else ("reverse", tuple(variables), arguments.key))
    if entry is None or entry.may_change or not all(entry.inside) or not entry.is_current():
        return None
    last = arguments._replace(leaves=repetition.arguments(repetition.calls - 1, leaves, state))
    return entry if is_admitted(entry, arguments) and is_admitted(entry, last) else None


def _called(cache: ProgramCache, repetition: Repetition, leaves: Sequence[Any]) -> list[Tree] | None:
    entry = _entry(cache, repetition, leaves, None)
    if entry is None:
        return None
    note_channels(entry.channels)
    replay, state, made = entry.replays.take(), [leaves[k] for k in repetition.state], []
    for call in range(repetition.calls):
        count(entry.communications)
        made.append(replay.first(*repetition.arguments(call, leaves, state)))
        state = made[-1][: len(state)]
    entry.replays.give_back(replay)
    return list(map(entry.build, made))


def recorded(cache: ProgramCache, repetition: Repetition, leaves: list[Any], variables: Sequence[int]) -> Recording | None:
    """Run the first part of the program for each call; None if the calls must be made one by one on a tape.

    `leaves`: plain values; `variables`: the positions of those whose cotangents `Recording.pull` returns.
    """
    for k in variables:
        leaves[k] = leaves[k] if type(leaves[k]) is np.ndarray else np.asarray(leaves[k])
    entry = _entry(cache, repetition, leaves, variables)
    if entry is None:
        return None
    calls, n, later = repetition.calls, len(repetition.state), entry.replays.read_later
    state, rows, leases, kept = [leaves[k] for k in repetition.state], [], list[Lease](), []
    note_channels(entry.channels)
    for call in range(calls):
        inputs = repetition.arguments(call, leaves, state)
        leases.append(entry.replays.lease())
        count(entry.communications)
        values = leases[-1].replay.first(*inputs)
        kept.append([x if k in later else None for k, x in enumerate(inputs)])
        state = values[:n]
        rows.append(values[n:])
    specs, width = {k: spec_like(leaves[k]) for k in variables}, len(rows[0])

    def pull(gs: list[Array]) -> list[Array]:
        require_plain(gs, cache.name)
        state, totals = gs[:n], {k: specs[k].zeros() for k in variables if k in repetition.entries}
        for call in reversed(range(calls)):
            count(entry.communications)
            place = n + call * width
            made = leases[call].replay.later[0](*kept[call], *state, *gs[place : place + width])
            cotangents = dict(zip(variables, made))
            state = [conform(cotangents.pop(k), *specs[k]) for k in repetition.state]
            for k, g in cotangents.items():
                if k in repetition.entries:
                    totals[k][call * repetition.steps : (call + 1) * repetition.steps] = g
                else:
                    g = conform(g, *specs[k])
                    totals[k] = np.add(totals[k], g, out=totals[k]) if k in totals and np.shape(g) else totals.get(k, 0) + g
        return [state[k - repetition.state.start] if k in repetition.state else totals[k] for k in variables]

    return Recording(entry, state, rows, pull)
