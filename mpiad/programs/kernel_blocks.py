"""Blocks of memory from which the kernels of a replay read their arguments, and the links between kernels.

Loops, small messages and halo exchanges between two calls of Python are a chain of linked kernels, which one call runs (see
`mpiad.compiling.cache` and `mpiad.transport.core.linked_calls`).
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.arguments import address_of
from mpiad.compiling.cache import Kernel
from mpiad.programs.array_program import parts_of
from mpiad.programs.fusion import Schedule, root_of
from mpiad.programs.loops import LoopText
from mpiad.programs.memory_plan import Allocation
from mpiad.programs.overlap import Action
from mpiad.transport import Envelope
from mpiad.transport.core.channels import Channel
from mpiad.transport.core.linked_calls import LinkedCall, LinkedRun, LinkedStep, handle_of
from mpiad.transport.core.messages import Prepared


class Message(NamedTuple):
    """A prepared communication from buffer x into buffer `out`; None for no array."""

    prepared: Callable[..., Prepared | None]  # see `Operation`
    params: Any
    x: int | None
    out: int | None
    renewed: Sequence[Envelope] = ()  # the envelopes among the parameters that get new numbers in each run
    linked: LinkedCall | None = None  # the call, if it is made by machine code


# The messages of a schedule's steps; None for a step that needs no call.
Messages: TypeAlias = "dict[int, Message | None]"
# The steps' operators that linked kernels run in their buffers.
Operators: TypeAlias = "dict[int, LinkedRun]"


def _linked_steps(action: Action, messages: Messages, operators: Operators) -> Sequence[LinkedStep] | None:
    """Return the calls and updates of a communication; none for a loop, and None if Python runs the action."""
    at = action.at
    if at in messages:
        message = messages[at]
        return [] if message is None else None if message.linked is None else [message.linked]
    if at in operators:
        steps, begun = operators[at].linked or (), operators[at].begun
        return {"begin": steps[:begun], "end": steps[begun:]}.get(action.kind, steps)
    return None


_WORD = 8


class CompiledLoops(NamedTuple):
    """The loops of a schedule: lists of their texts and kernels, with None for calls, and where buffers are allocated."""

    texts: Sequence[LoopText | None]
    kernels: Sequence[Kernel | None]
    allocations: Mapping[int, Allocation]


class KernelBlocks:
    """The blocks of memory, one per thread of a loop, from which kernels read their arguments (see `compiling.cache`)."""

    def __init__(
        self, schedule: Schedule, loops: CompiledLoops, actions: Sequence[Action], messages: Messages, operators: Operators
    ):
        # The kernels and calls between two calls of Python are linked: a call of the first one runs all of them. `linked`:
        # the actions that are run by the action before them.
        self._buffers = schedule.buffers
        self._places: dict[int, list[int]] = {}
        self._held: list[Array] = []
        self._steps: list[tuple[int, LinkedStep, int]] = []  # of calls and operators: first word, and step of the schedule
        self._loops: dict[tuple[int, int], int] = {}  # first words of the blocks of loops, by action and thread
        # The first words and the kernels of each action; None if Python runs it.
        self.chains: list[list[tuple[int, Kernel]] | None] = []
        words: list[int] = [0]  # the first one is the number of the call that has failed, plus one
        for k, action in enumerate(actions):
            text, steps = loops.texts[action.at], _linked_steps(action, messages, operators)
            chain: list[tuple[int, Kernel]] = []
            for step in steps or ():
                chain.append((len(words), step.kernel))  # type: ignore[arg-type]
                self._steps.append((len(words), step, action.at))
                words += step.words(0, 0, 0)
            for thread, boxes in enumerate(action.shares):
                self._loops[k, thread] = len(words)
                words += self._words_of_loop(loops.allocations, text, boxes, len(words))  # type: ignore[arg-type]
            if len(action.shares) == 1:
                chain = [(self._loops[k, 0], loops.kernels[action.at])]  # type: ignore[list-item]
            self.chains.append(chain if len(action.shares) == 1 or steps is not None else None)
        self.words = (ctypes.c_int64 * len(words))(*words)
        for number, (start, step, at) in enumerate(self._steps):
            self._store(number)
            message = messages.get(at)
            if message is None or not isinstance(step, LinkedCall):
                continue
            for kind, b in (("x", message.x), ("out", message.out)):
                places = [start + place for place in step.places(kind)]
                if b is not None:
                    self._places.setdefault(root_of(self._buffers, b), []).extend(places)
                elif places:  # nobody reads the message
                    self._held.append(np.empty(step.nbytes, np.uint8))
                    self.words[places[0]] = address_of(self._held[-1])
        # The calls of MPI of each part that has any.
        self.calls: dict[int, list[LinkedCall]] = {}
        for _, step, at in self._steps:
            if isinstance(step, LinkedCall):
                self.calls.setdefault(schedule.part(at), []).append(step)
        self.linked: set[int] = set()
        last = None  # the action before, if it may be linked to the next one
        for k, (action, steps) in enumerate(zip(actions, self.chains)):
            for (before, _), (start, kernel) in pairwise(steps or ()):
                self._link(before, start, kernel)
            if last is not None and steps and schedule.part(action.at) == schedule.part(actions[last].at):
                self.linked.add(k)
                self._link(self.chains[last][-1][0], *steps[0])  # type: ignore[index]
            last = last if steps == [] else k if steps else None

    def _store(self, number: int) -> None:
        """Store the words of a call or an update, but not what follows it."""
        start, step, _ = self._steps[number]
        words = step.words(self.address_of(start), self.address_of(0), number + 1)
        self.words[start + 2 : start + len(words)] = words[2:]

    def _words_of_loop(
        self, allocations: Mapping[int, Allocation], text: LoopText, boxes: Sequence[Array], start: int
    ) -> list[int]:
        words, buffers = [0, 0], self._buffers
        for b in text.buffers:
            shape, root = buffers[b].shape, root_of(buffers, b)
            self._places.setdefault(root, []).append(start + len(words))
            is_padded = root in allocations and buffers[root].shape == shape
            pitch = allocations[root].pitch if is_padded else (shape or (1,))[-1]
            words += [0, *shape[:-1], pitch * parts_of(buffers[b].dtype)]
        for array in (*boxes, *([np.empty(text.lanes)] if text.lanes else [])):
            self._held.append(np.ascontiguousarray(array))
            words += [self._held[-1].ctypes.data, *array.shape]
        return words

    def _link(self, before: int, start: int, kernel: Kernel) -> None:
        self.words[before : before + 2] = kernel.function.address, self.address_of(start)  # type: ignore[attr-defined]

    def set_operator(self, at: int, operator: LinkedRun) -> None:
        """Store the words of an operator, which works in another buffer now."""
        numbers = [number for number, (_, _, other) in enumerate(self._steps) if other == at]
        for number, step in zip(numbers, operator.linked or ()):
            self._steps[number] = self._steps[number][0], step, at
            self._store(number)

    def _calls(self) -> Iterator[tuple[int, LinkedCall]]:
        return ((start, step) for start, step, _ in self._steps if isinstance(step, LinkedCall))

    def bind_communicators(self) -> None:
        """Store the handles of the communicators, which change when channels are renewed."""
        for start, call in self._calls():
            for place in call.places("comm"):
                self.words[start + place] = handle_of(call.comm)

    def channels(self) -> dict[tuple[int, bool], LinkedCall]:
        """Return a call for each communicator."""
        return {(id(call.channel), call.is_reverse): call for _, call in self._calls()}

    def counts(self, part: int) -> Counter[tuple[Channel, tuple[str, tuple[int, int]]]]:
        """Return how many messages of a part are counted in each count of a channel; see `LinkedCall.counted`."""
        return Counter((call.channel, call.counted) for call in self.calls.get(part, ()) if call.counted is not None)

    def tag_of(self, at: int, place: int) -> int:
        """Return the index of the word of a message's tag."""
        return next(start for start, _, other in self._steps if other == at) + place

    def step_of(self, number: int) -> int:
        """Return the step of the schedule of a call of MPI that has failed, `words[0]`."""
        return self._steps[number - 1][2]

    def raise_error(self, number: int) -> None:
        """Raise the error of a call that has failed."""
        start, call, _ = self._steps[number - 1]
        self.words[0] = 0
        call.raise_error(self.words[start:])  # type: ignore[union-attr]

    def head(self, k: int) -> tuple[int, Kernel]:
        """Return the address of the first block of an action, and its kernel."""
        start, kernel = self.chains[k][0]  # type: ignore[index]
        return self.address_of(start), kernel

    def address(self, k: int, thread: int) -> int:
        """Return the address of the block of a loop for a thread."""
        return self.address_of(self._loops[k, thread])

    def address_of(self, place: int) -> int:
        """Return the address of a word; the first one contains the number of a failed call."""
        return ctypes.addressof(self.words) + _WORD * place

    def bind(self, b: int, address: int) -> None:
        """Store the address of a buffer in the blocks."""
        for place in self._places.get(b, ()):
            self.words[place] = address

    def addresses_of(self, b: int) -> list[int]:
        """Return the addresses of the words with the address of a buffer."""
        return [self.address_of(place) for place in self._places.get(b, ())]

    def assignment(self, b: int, address: str) -> str:
        """Return the statement of a replay that stores the address of a buffer in the blocks; in it, `words` is named t."""
        targets = "".join(f"t[{place}] = " for place in self._places.get(b, ()))
        return f"{targets}{address}" if targets else ""
