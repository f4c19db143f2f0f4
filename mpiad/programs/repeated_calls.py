"""Repeated calls of a compiled function, each with results of the call before: the time steps of a loop, for example.

The program has one length, and loops have any. A loop that runs a program many times is one node of the tape, and each run
costs a call of a replay: the arguments are compared with the program's signature once. The reverse pass runs the second
part of the program from the last run to the first, each in the buffers of its replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from autograd.tracer import Box, getval

from mpiad._typing import Array, Tree
from mpiad.differentiation.tape import OrderedTape
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.programs.calls_on_tape import is_simple, require_plain
from mpiad.programs.program_cache import Entry, ProgramCache, count
from mpiad.programs.replay import Lease
from mpiad.programs.signature import arguments_of
from mpiad.transport.core.tracing import note_channels, tracing

_boxes = Box.types


class Repetition(NamedTuple):
    """Repeated calls of a function of leaves: the number of the first step, and arrays.

    The first results of a call are the arguments at the positions `state` of the next one. Each call gets the next `steps`
    entries of the arguments at the positions `entries`, along their first axis, and a number that is larger by `steps`. The
    further results have one entry per step, and are joined along their first axis.
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
    columns: list[Array]  # the further results, with one entry per step of all calls
    pull: Callable[[list[Array]], list[Array]]  # the cotangents of the variables, given those of state and columns

    @property
    def build(self) -> Callable[[list[Array]], Tree]:
        """A function that returns the result, given its leaves."""
        return self.entry.build


# The programs that were compared with the arguments and with the function's closure, by the variables. A loop passes the
# same dict as long as neither the arguments' shapes change nor Python runs between its steps.
Compared: TypeAlias = "dict[tuple[int, ...] | None, Entry]"


def called_repeatedly(
    cache: ProgramCache, repetition: Repetition, leaves: Sequence[Any], compared: Compared
) -> Tree | None:
    """Return the last state and the joined results; None if the calls must be made one by one: there is no program, say."""
    tape: Any = tracing.tape
    boxed = [k for k, x in enumerate(leaves) if type(x) in _boxes]
    if tape is None:
        return None if boxed else _called(cache, repetition, leaves, compared)
    if type(tape) is not OrderedTape or tape.passes not in ("one", "several") or not set(repetition.state) <= set(boxed):
        return None
    if not is_simple(tape, [leaves[k] for k in boxed]):
        return None
    made = recorded(cache, repetition, list(map(getval, leaves)), boxed, compared)
    if made is None:
        return None
    values, places, entry = [*made.state, *made.columns], [leaves[k]._node.index for k in boxed], made.entry
    return made.build(tape.record_call(entry.channels, values, [True] * len(values), places, made.pull, entry.communicates))


def _entry(
    cache: ProgramCache, repetition: Repetition, leaves: Sequence[Any], variables: Sequence[int] | None, compared: Compared
) -> Entry | None:
    """Return the program of a call, with a reverse pass if there are `variables`; None if it can't be repeated."""
    known = None if variables is None else tuple(variables)
    entry = compared.get(known)
    if entry is None:
        state = [leaves[k] for k in repetition.state]
        arguments = arguments_of(tuple(repetition.arguments(0, leaves, state)), {}, cache.asked)
        if tracing.recorder is not None or len(arguments.traced) < len(leaves):
            return None
        entry = cache.entries.get(arguments.key if known is None else ("reverse", known, arguments.key))
        if entry is None or entry.may_change or not all(entry.inside) or not entry.is_current():
            return None
        compared[known] = entry
    if entry.admits is not None:
        last = leaves[0] + (repetition.calls - 1) * repetition.steps
        if not all(entry.admits(list(map(getval, [first, *leaves[1:]]))) for first in (leaves[0], last)):
            return None
    return entry


def _called(cache: ProgramCache, repetition: Repetition, leaves: Sequence[Any], compared: Compared) -> Tree | None:
    entry = _entry(cache, repetition, leaves, None, compared)
    if entry is None:
        return None
    note_channels(entry.channels)
    replay, state, rows = entry.replays.take(), [leaves[k] for k in repetition.state], []
    for call in range(repetition.calls):
        count(entry.communications)
        values = replay.first(*repetition.arguments(call, leaves, state))
        state = values[: len(state)]
        rows.append(values[len(state) :])
    entry.replays.give_back(replay)
    return entry.build([*state, *_joined(rows)])


def _joined(rows: list[list[Array]]) -> list[Array]:
    return rows[0] if len(rows) == 1 else [np.concatenate(column) for column in zip(*rows)]


def recorded(
    cache: ProgramCache, repetition: Repetition, leaves: list[Any], variables: Sequence[int], compared: Compared
) -> Recording | None:
    """Run the first part of the program for each call; None if the calls must be made one by one on a tape.

    `leaves`: plain values; `variables`: the positions of those whose cotangents `Recording.pull` returns.
    """
    for k in variables:
        leaves[k] = leaves[k] if type(leaves[k]) is np.ndarray else np.asarray(leaves[k])
    entry = _entry(cache, repetition, leaves, variables, compared)
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
    specs, length = {k: spec_like(leaves[k]) for k in variables}, repetition.steps

    def pull(gs: list[Array]) -> list[Array]:
        require_plain(gs, cache.name)
        state, totals = gs[:n], {k: specs[k].zeros() for k in variables if k in repetition.entries}
        for call in reversed(range(calls)):
            count(entry.communications)
            steps = slice(call * length, (call + 1) * length)
            made = leases[call].replay.later[0](*kept[call], *state, *[g[steps] for g in gs[n:]])
            cotangents = dict(zip(variables, made))
            state = [conform(cotangents.pop(k), *specs[k]) for k in repetition.state]
            for k, g in cotangents.items():
                if k in repetition.entries:
                    totals[k][steps] = g
                else:
                    g = conform(g, *specs[k])
                    totals[k] = np.add(totals[k], g, out=totals[k]) if k in totals and np.shape(g) else totals.get(k, 0) + g
        return [state[k - repetition.state.start] if k in repetition.state else totals[k] for k in variables]

    return Recording(entry, state, _joined(rows), pull)
